"""The relay: one thread that takes requests from many sockets, asks the cache, and answers. It stores nothing itself.

`LocalCache` never waits, so one thread is enough and nobody waits for another's medium. What does take time, opening
the tiers below a new format's pool, happens on a thread of its own. A client gets a few requests' worth of a turn, so
one that floods the server delays nobody by more than that; one that does not read its answers is dropped.

Only processes of our own user are served: the kernel says who is at the other end. A connection that closes is the end
of its session at once, however the client died. What it was writing is the exception: its slots are reserved until its
process is gone (then nothing can write there any more) or until it comes back and says which leases it still has.
"""

import logging
import os
import select
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import Final

from kv_core.clock import Clock
from kv_core.errors import ConfigError, InputError, MisuseError
from kv_core.service import LeaseId, WriteLease

from kv_tiers.build import build_local_cache
from kv_tiers.clock import MonotonicClock
from kv_tiers.local import LocalCache
from kv_tiers.server import wire
from kv_tiers.server.address import Address
from kv_tiers.server.config import ServerConfig
from kv_tiers.server.connection import PACKAGE
from kv_tiers.server.session import OpenWrite, Session

_log = logging.getLogger(__name__)

MAX_QUEUED_FRAMES: Final = 64
"""Answers that a client has not read; one that follows the protocol has at most two."""
FRAMES_A_TURN: Final = 16
ACCEPTED_A_TURN: Final = 16
_READ_NBYTES: Final = 1 << 18
_PEER: Final = struct.Struct("3i")
_ORPHANS_LOOK_S: Final = 1.0

Format = tuple[int, str]
"""A chunk's size in bytes and what its bytes mean."""


@dataclass(eq=False, slots=True)
class _Client:
    """One connection. pidfd: becomes readable when its process is gone; -1 where the kernel cannot tell us."""

    number: int
    socket: socket.socket
    pid: int
    pidfd: int
    frames: wire.Frames = field(default_factory=lambda: wire.Frames(wire.MAX_REQUEST_NBYTES))
    unsent: deque[tuple[bytes, int]] = field(default_factory=deque)
    """Frames, each with the descriptor that goes with it or -1."""
    is_greeted: bool = False
    is_ending: bool = False
    """It gets what is unsent and no more."""
    waiting: wire.Register | None = None
    """Its caches are being opened."""
    register: wire.Register | None = None
    session: Session | None = None
    token: bytes = b""
    events: int = 0


@dataclass(eq=False, slots=True)
class _Orphan:
    """What the session before was writing when its connection closed. deadline_s: only where there is no pidfd."""

    cache: LocalCache
    writes: dict[int, OpenWrite]
    pidfd: int
    deadline_s: float


@dataclass(slots=True)
class _Opened:
    """What became of a new format's cache."""

    format: Format
    cache: LocalCache | None
    failure: wire.Failed


class CacheServer:
    """Serves from `serve` until `stop`. Everything but `stop` is for one thread."""

    def __init__(self, config: ServerConfig, *, clock: Clock | None = None) -> None:
        """Take the socket. Clients that connect from now wait until `serve`.

        Raises:
            ConfigError: another server has it, or it cannot be had.
        """
        self._config = config
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._address = Address(config.socket_path())
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._address.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)
        self._clients: dict[int, _Client] = {}
        self._eager: dict[int, _Client] = {}  # more of their requests are here than their turn allowed
        self._orphans: dict[bytes, _Orphan] = {}
        self._caches: dict[Format, LocalCache] = {}
        self._opening: dict[Format, threading.Thread] = {}
        self._opened: deque[_Opened] = deque()
        self._last_number = 0
        self._is_stopping = False

    @property
    def socket_path(self) -> Path:
        return self._address.path

    @property
    def caches(self) -> dict[Format, LocalCache]:
        """One for each format that was ever registered. For tools and tests in this process."""
        return dict(self._caches)

    def stop(self) -> None:
        """From any thread or signal handler, at any time: `serve` closes everything and returns."""
        self._is_stopping = True
        self._wake()

    def watch(self, descriptor: int) -> None:
        """Stop when this descriptor ends: somebody holds the other end for as long as we are wanted."""
        self._selector.register(descriptor, selectors.EVENT_READ, self.stop)

    def serve(self) -> None:
        """Answer until `stop`; then accept nobody, have stored below what is to be stored there, and close."""
        try:
            while not self._is_stopping:
                for key, events in self._selector.select(self._patience_s()):
                    self._ready(key.data, events)
                for client in list(self._eager.values()):
                    self._work(client)
                self._look_after_orphans()
        finally:
            self._close()

    def _ready(self, what: _Client | Callable[[], None], events: int) -> None:
        if not isinstance(what, _Client):
            what()
            return
        if events & selectors.EVENT_WRITE and self._clients.get(what.number) is what:
            self._flush(what)
        if events & selectors.EVENT_READ and self._clients.get(what.number) is what:
            self._read(what)

    def _patience_s(self) -> float | None:
        if self._eager:
            return 0
        return _ORPHANS_LOOK_S if any(orphan.pidfd < 0 for orphan in self._orphans.values()) else None

    # Connections.

    def _accept(self) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                accepted, _ = self._address.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                _log.warning("a client could not be accepted: %s", error)
                return
            self._greet(accepted)

    def _greet(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        pid, uid, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        self._last_number += 1
        client = _Client(self._last_number, accepted, pid, -1)
        self._clients[client.number] = client
        if uid != os.geteuid():
            self._refuse(client, f"this server is user {os.geteuid()}'s, and you are user {uid}")
        elif len(self._clients) > self._config.max_sessions:
            self._refuse(client, f"this server has its {self._config.max_sessions} clients (max_sessions) already")
        else:
            client.pidfd = _open_pidfd(pid)
            self._watch(client)

    def _watch(self, client: _Client) -> None:
        """Have the selector tell us what this client's state has use for."""
        events = selectors.EVENT_WRITE if client.unsent else 0
        if not (client.is_ending or client.waiting or client.number in self._eager):
            events |= selectors.EVENT_READ
        if events == client.events:
            return
        if not client.events:
            self._selector.register(client.socket, events, client)
        elif not events:
            self._selector.unregister(client.socket)
        else:
            self._selector.modify(client.socket, events, client)
        client.events = events

    def _read(self, client: _Client) -> None:
        try:
            data = client.socket.recv(_READ_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.frames.feed(data)
        self._work(client)

    def _work(self, client: _Client) -> None:
        """Answer what has arrived, up to a turn's worth."""
        self._eager.pop(client.number, None)
        for _ in range(FRAMES_A_TURN):
            if client.waiting or client.is_ending or client.number not in self._clients:
                break
            if not self._attempt(client, partial(self._take_next, client)):
                break
        else:
            self._eager[client.number] = client
        if client.number in self._clients:
            self._watch(client)

    def _take_next(self, client: _Client) -> bool:
        """False: no whole request is here."""
        body = client.frames.next()
        if body is None:
            return False
        self._answer(client, wire.read_request(body))
        return True

    def _attempt(self, client: _Client, act: Callable[[], bool]) -> bool:
        """What comes of wrong requests, and of bugs of ours: one client's trouble and nobody else's."""
        try:
            return act()
        except InputError as error:
            self._refuse(client, str(error), kind="malformed")
        except MisuseError as error:
            self._send(client, wire.Failed("misuse", str(error)))
        except Exception:  # noqa: BLE001  # whatever it is, the other clients must not notice
            _log.exception("session %d ends, as its request met a bug", client.number)
            self._refuse(client, "a bug in the server; its log has the rest", kind="fault")
        return True

    def _send(self, client: _Client, answer: wire.Answer, descriptor: int = -1) -> None:
        client.unsent.append((wire.frame(answer), descriptor))
        if len(client.unsent) > MAX_QUEUED_FRAMES:
            _log.warning("session %d is dropped: it does not read its answers", client.number)
            self._drop(client)
            return
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            while client.unsent:
                data, descriptor = client.unsent[0]
                if descriptor >= 0:
                    sent = socket.send_fds(client.socket, [data], [descriptor])
                else:
                    sent = client.socket.send(data)
                if sent == len(data):
                    client.unsent.popleft()
                else:
                    client.unsent[0] = (data[sent:], -1)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(client)
            return
        if client.is_ending and not client.unsent:
            self._drop(client)
        else:
            self._watch(client)

    def _refuse(self, client: _Client, text: str, *, kind: wire.FailedKind = "refused") -> None:
        """Say why, and end the session."""
        _log.warning("session %d of process %d is ended: %s", client.number, client.pid, text)
        client.is_ending = True
        self._send(client, wire.Failed(kind, text))

    def _drop(self, client: _Client) -> None:
        """The connection is over, whichever side ended it."""
        if self._clients.pop(client.number, None) is None:
            return
        self._eager.pop(client.number, None)
        if client.events:
            self._selector.unregister(client.socket)
            client.events = 0
        client.socket.close()
        pidfd, client.pidfd = client.pidfd, -1
        session = client.session
        if session is not None:
            session.end_reads()
            if session.writes and not _is_gone(pidfd):
                orphan = _Orphan(session.cache, session.writes, pidfd, self._clock.now_s() + self._config.host.lease_s)
                self._orphans[client.token] = orphan
                if pidfd >= 0:
                    token = client.token
                    self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._end_orphan(token))
                return
            _give_up(session.cache, session.writes)
        if pidfd >= 0:
            os.close(pidfd)

    # What was being written when a connection closed.

    def _take_orphan(self, token: bytes) -> _Orphan | None:
        orphan = self._orphans.pop(token, None)
        if orphan is not None and orphan.pidfd >= 0:
            self._selector.unregister(orphan.pidfd)
            os.close(orphan.pidfd)
        return orphan

    def _end_orphan(self, token: bytes) -> None:
        orphan = self._take_orphan(token)
        if orphan is not None:
            _give_up(orphan.cache, orphan.writes)

    def _look_after_orphans(self) -> None:
        now_s = self._clock.now_s()
        for token in [key for key, orphan in self._orphans.items() if orphan.pidfd < 0 and orphan.deadline_s <= now_s]:
            self._end_orphan(token)

    # Requests.

    def _answer(self, client: _Client, request: wire.Request) -> None:
        """
        Raises:
            InputError, MisuseError: the request is wrong.
        """
        if not client.is_greeted and not isinstance(request, wire.Hello):
            raise InputError("the first message is a hello")
        match request:
            case wire.Hello():
                client.is_greeted = True
                self._send(client, wire.Welcome(PACKAGE, os.getpid()))
            case wire.Ping():
                self._send(client, wire.Done())
            case wire.Status():
                self._send(client, wire.Stated(self._report()))
            case wire.Registered(engine):
                found = [_registration(one, one.register) for one in self._clients.values() if one.register]
                self._send(client, wire.Registrations([one for one in found if one.engine == engine]))
            case wire.Register():
                if client.session is not None:
                    raise MisuseError("this session is registered already; unregister, or connect again")
                self._register(client, request)
            case wire.Unregister():
                self._unregister(client)
                self._send(client, wire.Done())
            case _:
                if client.session is None:
                    raise MisuseError("this session has registered no cache")
                self._send(client, client.session.answer(request))

    def _register(self, client: _Client, request: wire.Register) -> None:
        request.forgotten.unpack()  # wrong keys are refused before anything is made for them
        wanted = (request.chunk_nbytes, request.fingerprint)
        cache = self._caches.get(wanted)
        if cache is not None:
            self._begin_session(client, request, cache)
            return
        if wanted not in self._opening:
            if len(self._caches) + len(self._opening) >= self._config.max_formats:
                self._refuse(
                    client,
                    f"this server has caches of {self._config.max_formats} formats (max_formats) already; "
                    "start another one for this model",
                )
                return
            self._opening[wanted] = thread = threading.Thread(target=self._open, args=(wanted,), daemon=True)
            thread.start()
        client.waiting = request
        self._watch(client)

    def _open(self, wanted: Format) -> None:
        """On a thread of its own."""
        cache, failure = None, wire.Failed("refused", "")
        try:
            cache = build_local_cache(
                self._config.host,
                chunk_nbytes=wanted[0],
                fingerprint=wanted[1],
                tiers=self._config.tiers,
                cold=self._config.cold,
                clock=self._clock,
                shared=True,
            )
        except ConfigError as error:
            failure = wire.Failed("refused", str(error))
        except Exception as error:  # noqa: BLE001  # whatever it is, somebody waits for an answer
            _log.exception("no cache of %d bytes a chunk could be made", wanted[0])
            failure = wire.Failed("fault", f"no cache could be made: {error}")
        self._opened.append(_Opened(wanted, cache, failure))
        self._wake()

    def _woken(self) -> None:
        self._wake_reader.recv(4096)
        while self._opened:
            opened = self._opened.popleft()
            self._opening.pop(opened.format).join()
            if opened.cache is not None:
                self._caches[opened.format] = opened.cache
            for client in list(self._clients.values()):
                request = client.waiting
                if request is None or (request.chunk_nbytes, request.fingerprint) != opened.format:
                    continue
                client.waiting = None
                self._attempt(client, partial(self._go_on, client, request, opened))
                self._work(client)

    def _go_on(self, client: _Client, request: wire.Register, opened: _Opened) -> bool:
        """A client whose cache was being opened."""
        if opened.cache is not None:
            self._begin_session(client, request, opened.cache)
        else:
            self._refuse(client, opened.failure.text, kind=opened.failure.kind)
        return True

    def _begin_session(self, client: _Client, request: wire.Register, cache: LocalCache) -> None:
        session = Session(
            client.number,
            cache,
            lease_s=self._config.host.lease_s,
            clock=self._clock,
            is_open_elsewhere=lambda lease: self._is_open(lease, cache, but=client),
        )
        self._end_session_before(request.resume)
        orphan = self._take_orphan(request.resume)
        if orphan is not None and orphan.cache is cache:
            kept = set(request.writes)
            session.adopt({lease: write for lease, write in orphan.writes.items() if lease in kept})
            _give_up(cache, {lease: write for lease, write in orphan.writes.items() if lease not in kept})
        elif orphan is not None:
            _give_up(orphan.cache, orphan.writes)
        if request.is_cleared:
            cache.clear()
        cache.forget(request.forgotten.unpack())
        client.session, client.register = session, request
        # The same for as long as the client is: it may never have read what we answered last time.
        client.token = request.resume or token_bytes(16)
        pool = cache.pool
        answer = wire.Pool(pool.name, pool.chunk_nbytes, pool.slots, client.token, list(session.writes))
        self._send(client, answer, pool.descriptor)

    def _end_session_before(self, token: bytes) -> None:
        """A client that gave its connection up may be back before we have seen the old one close."""
        for other in list(self._clients.values()):
            if token and other.token == token:
                self._drop(other)

    def _unregister(self, client: _Client) -> None:
        if client.session is not None:
            client.session.end_reads()
            _give_up(client.session.cache, client.session.writes)
        client.session = client.register = None
        client.token = b""

    def _is_open(self, lease: int, cache: LocalCache, *, but: _Client) -> bool:
        sessions = [one.session for one in self._clients.values() if one.session is not None and one is not but]
        if any(one.cache is cache and (lease in one.writes or one.reads(lease)) for one in sessions):
            return True
        return any(orphan.cache is cache and lease in orphan.writes for orphan in self._orphans.values())

    def _report(self) -> wire.Report:
        sessions = [_registration(one, one.register) for one in self._clients.values() if one.register]
        used = [one.session.cache for one in self._clients.values() if one.session is not None]
        caches = [
            wire.CacheReport(nbytes, fingerprint, cache.pool.name, used.count(cache), cache.counts(), _tiers(cache))
            for (nbytes, fingerprint), cache in self._caches.items()
        ]
        return wire.Report(os.getpid(), PACKAGE, sessions, len(self._orphans), caches)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full of reasons to wake already, or closed
            self._wake_writer.send(b"w")

    def _close(self) -> None:
        self._address.stop_listening()
        for thread in self._opening.values():
            thread.join()
        for client in list(self._clients.values()):
            self._drop(client)
        for token in list(self._orphans):
            self._take_orphan(token)
        for opened in self._opened:
            if opened.cache is not None:
                self._caches[opened.format] = opened.cache
        for cache in self._caches.values():
            try:
                cache.close()
            except BufferError as error:
                _log.warning("%s", error)  # the process ends, and the pool with it
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self._address.close()


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or a process of another container, which is 0 here
        return -1


def _is_gone(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _give_up(cache: LocalCache, writes: dict[int, OpenWrite]) -> None:
    for lease in writes:
        cache.release(WriteLease(LeaseId(lease), (), (), ""))


def _registration(client: _Client, register: wire.Register) -> wire.Registration:
    return wire.Registration(
        client.number,
        client.pid,
        register.engine,
        register.chunk_nbytes,
        register.fingerprint,
        register.shards,
        register.facts,
    )


def _tiers(cache: LocalCache) -> list[wire.TierReport]:
    return [
        wire.TierReport(
            state.name,
            state.health.name,
            state.why,
            state.usage.chunks,
            state.usage.used_bytes,
            state.usage.capacity_bytes,
            state.spill.waiting,
            state.spill.under_way,
        )
        for state in cache.below.states()
    ]
