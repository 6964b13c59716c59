"""The server's connections: they read requests and send answers, and no client is served at the expense of another.

A client's turn is limited to a few requests, so one that floods the server delays the others by no more than that, and
one that does not read its answers is disconnected. Only processes of the same user are served; the kernel reports which
user is at the other end.
"""

import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kv_core.errors import InputError, MisuseError
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache
from kv_tiers.threads import OutOfThreadsError

from kv_server import wire
from kv_server.connection import close_descriptor, credentials, open_pidfd
from kv_server.session import Session

_log = limited_logger(__name__)

MAX_QUEUED_FRAMES: Final = 64
"""Answers that a client has not read; one that follows the protocol has at most two."""
FRAMES_A_TURN: Final = 16
GREETING_S: Final = 5.0
"""How long a client may take to send its hello, and a refused one to read the reason."""
UNREGISTERED_S: Final = 60.0
"""How long a client that has registered no cache may send no request."""
_READ_BYTES: Final = 1 << 18


@dataclass(eq=False, slots=True)
class ClientConnection:
    """The connection of one client, on the server's side.

    number: never reused.
    socket: non-blocking.
    pid: of the client's process; 0 if it is not visible.
    pidfd: of the same process, or -1; taken over by the callback for lost connections.
    is_greeted: the client has sent its hello.
    is_ending: it is sent what is unsent and nothing more.
    waiting: the request that is being answered on another thread, while no more of its requests are read.
    clearing: the cache that is being cleared before the client joins it; None: there is none.
    is_ahead: it has sent some nevertheless, or will send no more.
    register, session: what it registered, and what it holds since.
    token: to resume the session.
    frames: what has arrived.
    unsent: frames, each with the descriptor that goes with it or -1.
    events: what the selector watches the socket for.
    last_seen_s: when it connected, made its last whole request or was refused, by the monotonic clock.
    """

    number: int
    socket: socket.socket
    pid: int
    pidfd: int = -1
    is_greeted: bool = False
    is_ending: bool = False
    waiting: wire.Register | wire.Explain | wire.Clear | wire.Reload | None = None
    clearing: LocalCache | None = None
    is_ahead: bool = False
    register: wire.Register | None = None
    session: Session | None = None
    token: bytes = b""
    frames: wire.Frames = field(default_factory=lambda: wire.Frames(wire.MAX_REQUEST_BYTES))
    unsent: deque[tuple[bytes, int]] = field(default_factory=deque)
    events: int = 0
    last_seen_s: float = 0.0

    @property
    def due_s(self) -> float | None:
        """When we stop waiting for it; None: it has a cache, or is waiting for an answer."""
        if self.is_ending or not self.is_greeted:
            return self.last_seen_s + GREETING_S
        return self.last_seen_s + UNREGISTERED_S if self.session is None and self.waiting is None else None


class Connections:
    """Used only by the server's thread, which calls what is registered with the selector."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        max_connections: int,
        *,
        answer: Callable[[ClientConnection, wire.Request], None],
        gone: Callable[[ClientConnection], None],
    ) -> None:
        """answer: may raise `InputError` and `MisuseError`. gone: called when the connection is closed, whichever side
        did it."""
        self._selector = selector
        self._max_connections = max_connections
        self._answer = answer
        self._gone = gone
        self._connections: dict[int, ClientConnection] = {}
        self._eager: dict[int, ClientConnection] = {}  # clients with more requests waiting than their turn allowed
        self._unsettled: dict[int, ClientConnection] = {}  # clients that may have to be dropped for their silence
        self.last_number = 0
        """Of the last client."""

    def all(self) -> list[ClientConnection]:
        return list(self._connections.values())

    def patience_s(self) -> float | None:
        """How soon `take_turns` and `expire` should be called: at once while a client has another request waiting."""
        if self._eager:
            return 0.0
        due = [due_s for client in self._unsettled.values() if (due_s := client.due_s) is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def expire(self) -> None:
        """Disconnect clients that have been silent for too long."""
        now_s = time.monotonic()
        for client in list(self._unsettled.values()):
            due_s = client.due_s
            if due_s is None:
                del self._unsettled[client.number]
            elif due_s <= now_s:
                if client.is_ending:
                    self.drop(client)
                elif not client.is_greeted:
                    self.refuse(client, f"no hello came within {GREETING_S:g} s of the connection")
                else:
                    self.refuse(client, f"no request came for {UNREGISTERED_S:g} s, and no cache is registered")

    def take_turns(self) -> None:
        for client in list(self._eager.values()):
            self.work(client)

    def work(self, client: ClientConnection) -> None:
        """Answer what has arrived, up to a turn's worth."""
        self._eager.pop(client.number, None)
        for _ in range(FRAMES_A_TURN):
            if client.waiting or client.is_ending or client.number not in self._connections:
                break
            if not self._attempt(client, partial(self._take_next, client)):
                break
        else:
            self._eager[client.number] = client
        if client.number in self._connections:
            self._watch(client)

    def finish(self, client: ClientConnection, act: Callable[[], object]) -> None:
        """Answer what a client is waiting for, and go on with its other requests."""
        if client.number not in self._connections:
            return
        client.waiting = None
        client.last_seen_s = time.monotonic()
        self._attempt(client, act)
        if client.session is None and client.number in self._connections:
            self._unsettled[client.number] = client
        self.work(client)

    def _attempt(self, client: ClientConnection, act: Callable[[], object]) -> bool:
        """Handle a request; False if `act` says that there is none. Malformed requests, and bugs of ours, affect only
        the client that sent it."""
        try:
            return act() is not False
        except InputError as error:
            self.refuse(client, str(error), kind="malformed")
        except MisuseError as error:
            self.send(client, wire.Failed("misuse", str(error)))
        except OutOfThreadsError as error:
            self.refuse(client, f"in this server {error}")
        except Exception:  # noqa: BLE001  # whatever it is, the other clients must not be affected
            _log.exception("session %d ends: its request hit a bug", client.number)
            self.refuse(client, "a bug in the server; its log has the rest", kind="fault")
        return True

    def send(self, client: ClientConnection, answer: wire.Answer, descriptor: int = -1) -> None:
        """descriptor: goes with the answer, and is closed here."""
        client.unsent.append((wire.frame(answer), descriptor))
        if len(client.unsent) > MAX_QUEUED_FRAMES:
            _log.warning("session %d is dropped: it does not read its answers", client.number)
            self.drop(client)
            return
        self._flush(client)

    def refuse(self, client: ClientConnection, text: str, *, kind: wire.FailedKind = "refused") -> None:
        """Send the reason, and end the session."""
        _log.warning("session %d of process %d is refused and ends: %s", client.number, client.pid, text)
        client.is_ending = True
        client.last_seen_s = time.monotonic()
        self._unsettled[client.number] = client
        self.send(client, wire.Failed(kind, text))

    def drop(self, client: ClientConnection) -> None:
        """The connection is over, whichever side ended it."""
        if self._connections.pop(client.number, None) is None:
            return
        self._forget(client)
        client.socket.close()
        for _, descriptor in client.unsent:
            close_descriptor(descriptor)
        client.unsent.clear()
        self._gone(client)

    def detach(self, client: ClientConnection) -> socket.socket:
        """Forget this client and return its socket, on which the caller goes on."""
        del self._connections[client.number]
        self._forget(client)
        close_descriptor(client.pidfd)
        return client.socket

    def _forget(self, client: ClientConnection) -> None:
        self._eager.pop(client.number, None)
        self._unsettled.pop(client.number, None)
        if client.events:
            self._selector.unregister(client.socket)
            client.events = 0

    def restore(self, clients: Sequence[ClientConnection], last_number: int) -> None:
        """In a new object: go on with the clients of another process."""
        self.last_number = last_number
        for client in clients:
            self._connections[client.number] = self._unsettled[client.number] = client
            self._eager[client.number] = client  # requests of it may have arrived as a whole
            self._watch(client)

    def greet(self, accepted: socket.socket) -> None:
        """Take over a connection that was accepted; it does not block."""
        pid, uid = credentials(accepted)
        self.last_number += 1
        client = self._connections[self.last_number] = ClientConnection(
            self.last_number, accepted, pid, last_seen_s=time.monotonic()
        )
        self._unsettled[client.number] = client
        if uid != os.geteuid():
            self.refuse(client, f"this server is user {os.geteuid()}'s, and you are user {uid}")
        elif len(self._connections) > self._max_connections:
            self.refuse(client, f"this server already has its {self._max_connections} clients (max_sessions)")
        else:
            client.pidfd = open_pidfd(accepted, pid)
            self._watch(client)

    def _watch(self, client: ClientConnection) -> None:
        """Register this client with the selector for what its state needs: reading, writing, or both."""
        events = selectors.EVENT_WRITE if client.unsent else 0
        is_full = client.waiting is not None and client.is_ahead
        if not (client.is_ending or is_full or client.number in self._eager):
            events |= selectors.EVENT_READ
        if events == client.events:
            return
        ready = partial(self._ready, client)
        if not client.events:
            self._selector.register(client.socket, events, ready)
        elif not events:
            self._selector.unregister(client.socket)
        else:
            self._selector.modify(client.socket, events, ready)
        client.events = events

    def _ready(self, client: ClientConnection) -> None:
        # The client may have been dropped since the selector reported it, and either of these may drop it.
        if client.unsent and client.number in self._connections:
            self._flush(client)
        if client.events & selectors.EVENT_READ and client.number in self._connections:
            self._read(client)

    def _read(self, client: ClientConnection) -> None:
        # Of a client that waits for its cache only the end matters: opening one may take minutes, and clients that give
        # up and come back would fill the server.
        is_waiting = client.waiting is not None
        try:
            data = client.socket.recv(_READ_BYTES, socket.MSG_PEEK if is_waiting else 0)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        client.is_ahead = is_waiting and (bool(data) or not _has_hung_up(client.socket))
        if client.is_ahead:
            self._watch(client)
            return
        if not data:
            self.drop(client)
            return
        client.frames.feed(data)
        self.work(client)

    def _take_next(self, client: ClientConnection) -> bool:
        """Handle the next request. False: none has arrived as a whole."""
        body = client.frames.next()
        if body is None:
            return False
        self._answer(client, wire.read_request(body))
        client.last_seen_s = time.monotonic()
        if client.session is None and client.number in self._connections:
            self._unsettled[client.number] = client
        return True

    def _flush(self, client: ClientConnection) -> None:
        try:
            while client.unsent:
                data, descriptor = client.unsent[0]
                if descriptor >= 0:
                    sent = socket.send_fds(client.socket, [data], [descriptor])
                    os.close(descriptor)
                else:
                    sent = client.socket.send(data)
                if sent == len(data):
                    client.unsent.popleft()
                else:
                    client.unsent[0] = (data[sent:], -1)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.drop(client)
            return
        if client.is_ending and not client.unsent:
            self.drop(client)
        else:
            self._watch(client)


def _has_hung_up(connection: socket.socket) -> bool:
    """Whether the other side has closed it, and not only said that it sends no more."""
    poller = select.poll()
    poller.register(connection, 0)
    return any(events & select.POLLHUP for _, events in poller.poll(0))


def turn_away(accepted: socket.socket) -> None:
    """Tell a new client that this process has no descriptors for it. The caller closes the connection."""
    text = "this server may open no more descriptors; raise its limit (ulimit -n), or let it serve fewer (max_sessions)"
    with suppress(OSError):
        accepted.send(wire.frame(wire.Failed("refused", text)))
