"""The peers of a tier, the connections to each, and the back-off after failures.

Names are resolved periodically, on separate threads; callers wait for it only the first time. Each counts as soon as
it is resolved, whatever others take. A peer that fails is not contacted, briefly at first and then ever longer;
meanwhile the others serve. Idle connections are retained, and a dead one is replaced at once, because the peer may have
been restarted.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from kv_core.errors import InputError
from kv_core.log import limited_logger, on_one_line
from kv_remote.host_port import HostPort
from kv_remote.tls_files import TlsFiles
from kv_remote.together import begin
from kv_tiers.threads import start_thread

from kv_server.peers.wire import MAX_ANSWER_BYTES, PROCESS, A, PeerStream, Request

_log = limited_logger(__name__)

_IDLE: Final = 4
"""Idle connections retained to each peer; each of the lane's threads uses one."""
_MAX_AT_ONCE: Final = 16
_MAX_RESOLVING: Final = 16
"""Names resolved at once. One that nobody knows takes the system's resolver ten seconds."""
_MIN_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 5.0

T = TypeVar("T")


class Peer:
    """One address. Safe to call from any thread."""

    def __init__(
        self, host: str, address: tuple[str, int], *, token: bytes, tls: TlsFiles | None, connect_s: float
    ) -> None:
        """host: as configured, which its certificate must name. address: one that the name resolved to."""
        self.host = HostPort(host, address[1])
        """As configured."""
        self._address = address
        self._token = token
        self._tls = tls
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._idle: list[PeerStream] = []
        self._backoff_s = self._retry_at_s = 0.0
        self._is_closed = False
        self.is_self = False
        self.last_failure = ""
        self.conversations = 0
        """How many conversations there are now."""

    def __str__(self) -> str:
        return str(HostPort(*self._address))

    def is_up(self) -> bool:
        """Whether it may be contacted now: after a failure only once its back-off is over, which grows if it fails
        again."""
        return not self.is_self and time.monotonic() >= self._retry_at_s

    def talk(self, work: Callable[[PeerStream, float], T], timeout_s: float) -> T:
        """The result of `work`, which is passed a connection and a deadline, `timeout_s` after it begins there. `work`
        is restarted on a new connection if an idle one turns out to be dead before anything was received. Raises
        `OSError` and `InputError`: it failed, and the peer is not contacted for a while."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
            self.conversations += 1
        try:
            if idle is not None and not idle.is_current(self._tls):
                idle.close()
            elif idle is not None:
                received_bytes = idle.received_bytes
                try:
                    return self._talk(idle, work, timeout_s)
                except (ConnectionResetError, BrokenPipeError):
                    if idle.received_bytes > received_bytes:
                        raise
                    self._drop()
            return self._talk(self._connect(), work, timeout_s)
        except (OSError, InputError) as error:
            self._failed(error)
            raise
        finally:
            with self._lock:
                self.conversations -= 1

    def ask(self, request: Request, wanted: type[A], timeout_s: float, *, max_bytes: int = MAX_ANSWER_BYTES) -> A:
        """The answer to this request, of this kind. Raises as `talk` does."""

        def work(stream: PeerStream, deadline: float) -> A:
            stream.send_message(request, deadline)
            return stream.answer(wanted, deadline, max_bytes=max_bytes)

        return self.talk(work, timeout_s)

    def close(self) -> None:
        self._is_closed = True
        self._drop()

    def _talk(self, stream: PeerStream, work: Callable[[PeerStream, float], T], timeout_s: float) -> T:
        try:
            result = work(stream, time.monotonic() + timeout_s)
        except BaseException:
            stream.close()
            raise
        with self._lock:
            self._backoff_s = self._retry_at_s = 0.0
            keep = len(self._idle) < _IDLE and not self._is_closed
            if keep:
                self._idle.append(stream)
        if not keep:
            stream.close()
        return result

    def _connect(self) -> PeerStream:
        deadline = time.monotonic() + self._connect_s
        sock = socket.create_connection(self._address, self._connect_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if self._tls is not None:
                sock = self._tls.current().wrap_socket(sock, server_hostname=self.host.host)
            stream = PeerStream(sock)
            if stream.introduce(self._token, deadline) == PROCESS:
                self.is_self = True
                raise ConnectionError("it is this process")
        except BaseException:
            sock.close()
            raise
        return stream

    def _drop(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _failed(self, error: Exception) -> None:
        self._drop()
        with self._lock:
            self.last_failure = on_one_line(str(error)) or type(error).__name__
            self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s or _MIN_BACKOFF_S)
            self._retry_at_s = time.monotonic() + self._backoff_s
        if not self.is_self:
            _log.warning("peer %s is not queried for a while: %s", self, self.last_failure)


@dataclass(slots=True, eq=False)
class _Name:
    """A configured host. peers: by the address that it resolved to. failed: the last attempt did."""

    host: HostPort
    peers: dict[str, Peer] = field(default_factory=dict)
    due_s: float = 0.0
    is_queued: bool = False
    failed: bool = False


class PeerHosts:
    """All peers of one tier. Safe to call from any thread."""

    def __init__(
        self, hosts: Sequence[HostPort], *, token: bytes, tls: TlsFiles | None, resolve_s: float, connect_s: float
    ) -> None:
        """Resolves no names yet."""
        self._token, self._tls = token, tls
        self._resolve_s, self._connect_s = resolve_s, connect_s
        self._lock = threading.Lock()
        self._names = {host: _Name(host) for host in hosts}
        self._due_s = 0.0  # when the first of them is due
        self._queue: deque[_Name] = deque()
        self._resolving = 0
        self._unresolved = set(self._names)  # of those that callers wait for the first time
        self._resolved = threading.Event()
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="kv-peers")
        self._background = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="kv-peers")
        self._is_closed = False

    def peers(self) -> list[Peer]:
        """The known peers except this process itself. Waits for name resolution only the first time, for a bounded
        time.
        """
        self._resolve_if_due()
        if not self._resolved.is_set():
            if self._unresolved:
                self._resolved.wait(self._connect_s)
            self._resolved.set()
        with self._lock:
            return [peer for name in self._names.values() for peer in name.peers.values() if not peer.is_self]

    @property
    def has_self(self) -> bool:
        """Whether a host has turned out to be this process."""
        with self._lock:
            return any(peer.is_self for name in self._names.values() for peer in name.peers.values())

    def set_hosts(self, hosts: Sequence[HostPort]) -> None:
        with self._lock:
            if new := set(hosts) - self._names.keys():
                self._due_s = 0.0
            gone = [self._names.pop(host) for host in self._names.keys() - set(hosts)]
            self._names |= {host: _Name(host) for host in new}
        for name in gone:
            for peer in name.peers.values():
                peer.close()
        self._resolve_if_due()

    def at(self, host: HostPort) -> list[Peer]:
        """The known peers at this host, as far as it has been resolved. Does not wait."""
        with self._lock:
            name = self._names.get(host)
            return [] if name is None else [peer for peer in name.peers.values() if not peer.is_self]

    def each(self, peers: Sequence[Peer], work: Callable[[Peer], T], *, in_background: bool = False) -> dict[Peer, T]:
        """The results of `work` for each peer, run concurrently; without those that failed. All calls have ended when
        this returns.

        in_background: no request waits for it. It has threads of its own, as slow peers may keep all of them.
        """
        answers: dict[Peer, T] = {}

        def run(peer: Peer) -> None:
            with suppress(OSError, InputError):  # the peer is backing off, and the reason has been logged
                answers[peer] = work(peer)

        futures = []
        if len(peers) > 1:
            if self._is_closed:
                return {}  # as if all had failed
            threads = self._background if in_background else self._threads
            futures = [begin(threads, partial(run, peer)) for peer in peers[1:]]
        try:
            for peer in peers[:1]:
                run(peer)
        finally:
            wait(futures)  # also if there is a bug, because the work may use borrowed memory
        for future in futures:
            future.result()
        return answers

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            peers = [peer for name in self._names.values() for peer in name.peers.values()]
            self._names = {}
            self._queue.clear()
        self._threads.shutdown()
        self._background.shutdown()
        for peer in peers:
            peer.close()

    def _resolve_if_due(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._due_s or self._is_closed:
                return
            due = [name for name in self._names.values() if now_s >= name.due_s and not name.is_queued]
            for name in due:
                name.due_s = now_s + self._resolve_s
                if name.host.address is not None:
                    self._take(name, [name.host.host])
                else:
                    name.is_queued = True
                    # Those that could not be resolved come last, for they may take long again.
                    (self._queue.append if name.failed else self._queue.appendleft)(name)
            self._due_s = min((name.due_s for name in self._names.values()), default=now_s + self._resolve_s)
            wanted = min(_MAX_RESOLVING - self._resolving, len(self._queue))
            self._resolving += wanted
        for started in range(wanted):
            thread = threading.Thread(target=self._resolve_queued, name="kv-peers-names", daemon=True)
            if why := start_thread(thread):
                _log.warning("the names of peers are not resolved for now: %s", why)
                with self._lock:
                    self._resolving -= wanted - started
                    if not self._resolving:  # nobody takes them from the queue: the next call tries again
                        for name in self._queue:
                            name.is_queued, name.due_s = False, 0.0
                        self._queue.clear()
                        self._due_s = 0.0
                return

    def _resolve_queued(self) -> None:
        """Resolve names until there are no more. One that cannot be resolved keeps its previous addresses."""
        while True:
            with self._lock:
                if not self._queue:
                    self._resolving -= 1
                    return
                name = self._queue.popleft()
            host, addresses = name.host, None
            try:
                resolved = socket.getaddrinfo(host.host, host.port, type=socket.SOCK_STREAM)
                addresses = [str(address[0]) for *_, address in resolved]
            except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
                _log.warning("the peers at %s cannot be resolved: %s", host, error)
            except Exception:  # noqa: BLE001  # a bug must not end the thread, which is counted
                _log.exception("resolving the peers at %s hit a bug", host)
            with self._lock:
                name.is_queued, name.failed = False, addresses is None
                gone = self._take(name, addresses)
            for peer in gone:
                peer.close()

    def _take(self, name: _Name, addresses: Sequence[str] | None) -> list[Peer]:
        """Use what a name resolved to; None: nothing, for now. Returns the peers that are gone. Under the lock."""
        self._unresolved.discard(name.host)
        if not self._unresolved:
            self._resolved.set()
        if addresses is None or self._names.get(name.host) is not name:
            return []
        before = name.peers
        name.peers = {address: before.get(address) or self._peer(name.host, address) for address in addresses}
        return [peer for address, peer in before.items() if address not in name.peers]

    def _peer(self, host: HostPort, address: str) -> Peer:
        return Peer(host.host, (address, host.port), token=self._token, tls=self._tls, connect_s=self._connect_s)
