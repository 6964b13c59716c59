"""The server: one thread that takes requests from many sockets, calls the cache, and answers. It stores nothing itself.

`LocalCache` never waits, so one thread is enough, and no client waits for another's medium. Only explaining a prompt
takes long, and has a thread of its own. A connection that closes ends its session at once, however the client died: its
read leases and promises are released. Its write leases are the exception (`session.Orphans`).
"""

import gc
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from heapq import nlargest
from pathlib import Path
from secrets import token_bytes, token_hex
from types import UnionType
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec
from kv_core.clock import Clock
from kv_core.errors import ConfigError, InputError, MisuseError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_observe.build import build_bus
from kv_observe.explain import explain
from kv_observe.history import History, KnownKeySpace, Memory
from kv_remote.host_port import HostPort
from kv_tiers.cache.admin import TenantUse
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.clock import MonotonicClock
from kv_tiers.pool.host_pool import InheritedPool
from kv_tiers.threads import OutOfThreadsError, must_start, start_thread

from kv_server import wire
from kv_server.address import Acceptor, ListeningSocket, Ports
from kv_server.caches import Caches, Opened, why_not_passed_on
from kv_server.config import ServerConfig
from kv_server.connection import PACKAGE, close_descriptor
from kv_server.connections import ClientConnection, Connections, turn_away
from kv_server.engine_loads import EngineLoads
from kv_server.peers.side import directories_of, peer_side
from kv_server.report import MAX_TENANTS, CacheReport, Registration, ReloadReport, Report, TenantReport
from kv_server.session import Orphan, OrphanImage, Orphans, Session, give_up, lasting_owner, release
from kv_server.shrinking import PINS, Shrinking
from kv_server.succession.channel import FORMAT, Channel, ClientImage, Remainder
from kv_server.succession.image import Passed, end_inherited_leases, restore_cache, restore_pool, restore_tiers
from kv_server.succession.upgrade import STOPPED_S, PassingOn, TakingOver
from kv_server.wire import Format

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kv_server.peers.server import PeerServer

_log = limited_logger(__name__)
T = TypeVar("T")


class ServerMailbox:
    """Work that other threads `submit` to the serving thread, which does it between two requests (`drain`)."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called on the submitting thread when there is something to do."""
        self._wake = wake
        self._lock = threading.Lock()
        self._submitted: deque[Callable[[], None]] = deque()
        self._closed = False

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """The future holds what `work` returns or raises, or `TierDown` if the server ends first."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._closed:
                future.set_exception(TierDown("the server is stopping"))
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  # the future's owner gets it
                future.set_exception(error)

        with self._lock:
            closed = self._closed
            if not closed:
                self._submitted.append(run)
        if closed:
            run()
        else:
            self._wake()
        return future

    def drain(self) -> None:
        """Do what was submitted until now."""
        for _ in range(len(self._submitted)):
            self._submitted.popleft()()

    def close(self) -> None:
        """Do no more work: every future, pending or later, gets `TierDown`."""
        with self._lock:
            self._closed = True
        self.drain()


class WantsReload(Protocol):
    """As `kv_server.reload.Reloading.want`."""

    def __call__(self, then: Callable[[ReloadReport], object], *, take_over: bool) -> object: ...


_MAX_MODELS: Final = 8
"""Models that are named for one format."""


class CacheServer:
    """Serves from `serve` until `stop`. Everything but `stop`, `is_stopping` and `submit` is for one thread."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock | None = None,
        address: ListeningSocket | None = None,
        succession: TakingOver | None = None,
        ports: Ports | None = None,
    ) -> None:
        """Bind the socket. Clients that connect from now on wait until `serve`. Raises `ConfigError`: another server
        has it, or it cannot be used.

        address: of an earlier server of these settings; None: bind the socket.
        succession: everything is taken over from the server that this names. Call `take_over`, then `serve`.
        ports: in use, or handed over.
        """
        self._config = config
        self._lease_s = config.host.lease_s
        self._max_formats = config.max_formats
        self.tenant_names = {tenant.tag: tenant.name for tenant in config.tenants}
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._started_s = self._clock.now_s()
        self._run = token_hex(4)  # in the names of sessions, as another process's leases may still be open
        self._peers: PeerServer | None = None
        made: list[Caches] = []
        self._models: dict[Format, list[str]] = {}

        def existing_caches() -> list[LocalCache]:
            return [cache for caches in made for cache in caches.by_format().values()]

        self.bus, self._history = build_bus(
            config.observe,
            existing_caches,
            lambda: self.network_metrics(existing_caches()),
        )
        """The events of all of its caches; it is closed with them."""
        self._passing: PassingOn | None = None
        self._succession = succession
        self._is_private = False
        self.reload: WantsReload = _no_file
        """On any thread: have the settings read again. What has become of it is passed on, on any thread."""
        self.pause_http: Callable[[bool], object] = lambda is_paused: None
        """On any thread: have HTTP's clients wait until further notice."""
        self.is_passed_on = False
        """Another process has taken over."""
        self.ports = ports or Ports()
        descriptors = [] if succession is None else succession.descriptors
        try:
            if address is None and descriptors:
                address = ListeningSocket.handed_over(config.socket_path(), descriptors[0], descriptors[1])
            self.address = address or ListeningSocket(config.socket_path())
        except ConfigError:
            self.bus.close()
            raise
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()  # of callables
        self.formats = Caches(config, self._clock, self.bus, self._wake, self._forget_history)
        """One cache for each format. For the serving thread."""
        made.append(self.formats)
        self.engine_loads = EngineLoads(self._clock)
        """For the serving thread."""
        self._mailbox = ServerMailbox(self._wake)
        self._orphans = Orphans(self._clock, self._lease_s)
        self._shrinking = Shrinking(existing_caches, self._pins)
        self._connections = Connections(self._selector, config.max_sessions, answer=self._answer, gone=self._gone)
        self._acceptor = Acceptor(self.address.listener, greet=self._connections.greet, turn_away=turn_away)
        self._accepts_from_s: float | None = None
        self._selector.register(self.address.listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)
        self.is_stopping = False
        try:
            if succession is None or self.ports.open_now("peers", config.peers.listen):
                self._open_peers()
            if succession is not None:
                quotas = succession.prepared.quotas_set()
                for image, descriptor in zip(succession.prepared.pools, descriptors[2:], strict=True):
                    given = InheritedPool(image.name, image.slots, image.mapped_slots, descriptor)
                    cache = self.formats.take_over(image.format, given, quotas)
                    restore_pool(cache, image)
        except ConfigError:
            self._close(keeps_address=succession is not None)
            raise

    @property
    def peers_address(self) -> HostPort | None:
        """The address for other hosts' servers; None: not served."""
        return None if self._peers is None else self._peers.address

    @property
    def socket_path(self) -> Path:
        return self.address.path

    @property
    def caches(self) -> dict[Format, LocalCache]:
        """One for each format that is served. For tools and tests in this process."""
        return self.formats.by_format()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """From any thread: have the serving thread do this between two requests. It must not wait, nor take long.

        The future holds what it returns or raises, or `TierDown` once the server stops.
        """
        return self._mailbox.submit(work)

    def stop(self) -> None:
        """From any thread or signal handler, at any time: `serve` closes everything and returns."""
        self.is_stopping = True
        self._wake()

    def watch(self, descriptor: int) -> None:
        """Stop when this descriptor is closed at the other end, which lives as long as the server is wanted."""
        self._is_private = True
        self._selector.register(descriptor, selectors.EVENT_READ, self.stop)

    def serve(self) -> None:
        """Serve until `stop`; then accept no more connections, complete pending spills, and close. Raises
        `OutOfThreadsError`: the system has no thread for peers; it is closed."""
        if threading.current_thread() is threading.main_thread():
            # A signal that arrives just before a wait, or on another thread, would not end it.
            signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        try:
            if self._peers is not None and self._succession is None and not self.is_stopping:
                self._peers.start()
            while not self.is_stopping:
                for key, _ in self._selector.select(self._patience_s()):
                    key.data()
                    if self.is_passed_on:  # what clients have sent is the other process's
                        return
                self._connections.take_turns()
                self._orphans.expire()
                self._connections.expire()
                self._shrinking.go_on()
                self._accept_again()
        finally:
            self._close()

    def _patience_s(self) -> float | None:
        """How long to wait for a request. None: without limit."""
        soonest = [self._orphans.patience_s(), self._connections.patience_s(), self._shrinking.patience_s()]
        if self._accepts_from_s is not None:
            soonest.append(max(0.0, self._accepts_from_s - time.monotonic()))
        return min((seconds for seconds in soonest if seconds is not None), default=None)

    def _accept(self) -> None:
        backoff_s = self._acceptor.accept()
        if backoff_s:
            self._selector.unregister(self.address.listener)
            self._accepts_from_s = time.monotonic() + backoff_s

    def _accept_again(self) -> None:
        if self._accepts_from_s is not None and self._accepts_from_s <= time.monotonic():
            self._accepts_from_s = None
            self._selector.register(self.address.listener, selectors.EVENT_READ, self._accept)

    def _answer(self, client: ClientConnection, request: wire.Request) -> None:
        """Raises `InputError` and `MisuseError`: the request is wrong."""
        if not client.is_greeted and not isinstance(request, wire.Hello):
            raise InputError("the first message is a hello")
        send = partial(self._connections.send, client)
        match request:
            case wire.Hello():
                client.is_greeted = True
                send(wire.Welcome(PACKAGE, os.getpid()))
            case wire.Ping():
                send(wire.Done())
            case wire.Status():
                send(wire.Stated(self.report()))
            case wire.Drain():
                try:
                    if request.is_begun:
                        self.formats.drain(request.timeout_s, request.max_bytes)
                    else:
                        self.formats.end_drain()
                    send(wire.Stated(self.report()))
                except InputError as why:  # the client reports it; it is not the log's
                    send(wire.Failed("misuse", str(why)))
            case wire.Freeze(is_begun):
                self.formats.freeze(is_begun)
                send(wire.Stated(self.report()))
            case wire.TakeOver():
                self._begin_passing_on(client, request)
            case wire.Reload():
                client.waiting = request
                answer_later = partial(self._answer_later, client)
                self.reload(lambda report: answer_later(lambda: wire.Reloaded(report)), take_over=request.take_over)
            case wire.Explain():
                client.waiting = request
                answer_later = partial(self._answer_later, client)
                on_thread("kv-explain", partial(explainer(self), request), lambda one: answer_later(one.result))
            case wire.Clear() if client.session is not None:
                client.waiting = request
                answer_later = partial(self._answer_later, client)
                on_thread("kv-clear", client.session.clear, lambda one: answer_later(one.result))
            case wire.Registered(engine):
                send(wire.Registrations([one for one in self.registrations() if engine in (one.engine, "")]))
            case wire.Register():
                self._register(client, request)
            case wire.Unregister():
                self._unregister(client)
                send(wire.Done())
            case _:
                if client.session is None:
                    raise MisuseError("this session has registered no cache")
                answer = client.session.answer(request)
                if answer is not None:
                    send(answer)

    def _answer_later(self, client: ClientConnection, answer: Callable[[], wire.Answer]) -> None:
        """On any thread."""
        send = self._connections.send
        self.submit(partial(self._connections.finish, client, lambda: send(client, answer())))

    # Sessions, from their registration to their end.

    def _register(self, client: ClientConnection, request: wire.Register) -> None:
        """Raises `InputError`: the forgotten keys are not keys. Raises `MisuseError`: this connection has a session
        already."""
        if client.session is not None:
            raise MisuseError("this session is registered already; unregister, or connect again")
        request.forgotten.unpack()  # invalid keys are refused before anything is created for them
        cache = self.caches.get(request.format)
        if cache is not None:
            self._begin_session(client, request, cache)
        elif self.formats.held_for:
            client.waiting = request  # until it is known which process opens it, or with which settings
        elif self.formats.open(request.format, self._in_use()):
            client.waiting = request
        else:
            self._connections.refuse(
                client,
                f"this server already has caches of {self._max_formats} formats (max_formats), all of them used "
                f"in the last {self._lease_s:g} s (lease_s) or open to peers; start another one for this model",
            )

    def _go_on(self, client: ClientConnection, request: wire.Register, opened: Opened) -> None:
        """Continue with a client whose cache was being opened."""
        if isinstance(opened.cache, LocalCache):
            self._begin_session(client, request, opened.cache)
        else:
            self._connections.refuse(client, opened.cache.text, kind=opened.cache.kind)

    def _begin_session(self, client: ClientConnection, request: wire.Register, cache: LocalCache) -> None:
        if request.is_cleared:
            cleared = msgspec.structs.replace(request, is_cleared=False)

            def go_on(done: "Future[None]") -> None:
                client.clearing = None
                done.result()
                self._register(client, cleared)

            client.waiting, client.clearing = request, cache
            finish = partial(self._connections.finish, client)
            on_thread("kv-clear", cache.clear, lambda done: self.submit(partial(finish, partial(go_on, done))))
            return
        pool = cache.pool
        # The same for the client's whole life: it may never have read our last answer, and it keeps its first mapping.
        token = request.resume or client.token or token_bytes(16)
        try:
            lent = pool.lend(token, *([] if wire.UNPINNED in request.facts else [PINS]))
        except OSError as error:
            self._connections.refuse(client, f"this server can lend its pool to no more clients: {error.strerror}")
            return
        session = self._make_session(client, request, cache, self._resumed(client, request, cache))
        cache.forget(request.forgotten.unpack())
        client.session, client.register, client.token = session, request, token
        answer = wire.Pool(
            name=pool.name,
            group_bytes=pool.sizes.group_bytes,
            slots=pool.mapped_slots,
            token=client.token,
            lasting=session.lasting(),
            is_watched=cache.events.on,
            tiers=cache.tiers,
            lease_s=self._lease_s,
        )
        self._connections.send(client, answer, lent)

    def _make_session(self, client: ClientConnection, request: wire.Register, cache: LocalCache, name: str) -> Session:
        note = partial(self.engine_loads.looked_up, request.engine, request.format)
        chunk_tokens = request.facts.get(wire.CHUNK_TOKENS, "")
        if chunk_tokens.isascii() and chunk_tokens.isdigit() and len(chunk_tokens) < 10:  # an engine chooses its facts
            cache.events.chunk_tokens = int(chunk_tokens)
        if model := request.facts.get(wire.MODEL_NAME):
            self._note_model(request.format, model)
        return Session(
            name,
            cache,
            is_watched=client.pidfd >= 0 or cache.pool.knows_lent,
            on_lookup=(lambda *_: None) if wire.REPEATS_LOOKUPS in request.facts else note,
            ends_holds=wire.READS_TOGETHER not in request.facts,
        )

    def _resumed(self, client: ClientConnection, request: wire.Register, cache: LocalCache) -> str:
        """The name of this client's session: a new one, or that of its previous session, with the leases under which it
        was copying and which it still has."""
        for other in self._connections.all():
            # A client that gave its connection up may be back before we have seen the old one close.
            if request.resume and other.token == request.resume and other is not client:
                self._connections.drop(other)
        name = f"{self._run}.{client.number}"
        for orphan in self._orphans.take(request.resume):
            if orphan.cache is not cache:
                give_up(orphan)
                continue
            name = orphan.image.session
            with cache.parts.host.lock:
                leases = cache.parts.leases.of(lasting_owner(name))
            still_held = set(request.lasting)
            for lease in leases:
                if lease.number not in still_held:
                    release(cache, lease)
        return name

    def _unregister(self, client: ClientConnection) -> None:
        if client.session is not None:
            client.session.cache.end_all(client.session.name)
            client.session.cache.end_all(client.session.lasting_owner)
            self.formats.left(client.session.cache)
        client.session = client.register = None

    def _gone(self, client: ClientConnection) -> None:
        pidfd, client.pidfd = client.pidfd, -1
        if client.session is None or client.register is None:
            close_descriptor(pidfd)
            return
        cache, name, wanted = client.session.cache, client.session.name, client.register.format
        cache.end_all(name)
        self.formats.left(cache)
        image = OrphanImage(client.token, wanted, name, client.pid, pidfd >= 0, self._clock.now_s())
        self._orphans.add(Orphan(image, cache, pidfd))

    def _pins(self, cache: LocalCache) -> list[int]:
        clients = [one for one in self._connections.all() if one.session is not None and one.session.cache is cache]
        return [one.pid for one in clients if one.register is not None and wire.UNPINNED not in one.register.facts]

    def _in_use(self) -> list[LocalCache]:
        """The caches that have clients, or leases of clients that were copying when their connections closed."""
        clients = self._connections.all()
        used = [one.session.cache for one in clients if one.session is not None]
        used += [one.clearing for one in clients if one.clearing is not None]
        return used + [cache for cache in self.formats.by_format().values() if self._orphans.are_of(cache)]

    def _forget_history(self, cache: str) -> None:
        """Runs on the thread that has closed the cache."""
        if self._history is not None:
            self.bus.flush()  # or its last events would add it to the history again
            self._history.forget(cache)

    def _note_model(self, wanted: Format, model: str) -> None:
        """For reports, also after the engine has gone. Only of formats that have a cache."""
        open_formats = self.formats.by_format()
        self._models = {one: models for one, models in self._models.items() if one in open_formats}
        models = self._models.setdefault(wanted, [])
        if model not in models:
            self._models[wanted] = [*models[1 - _MAX_MODELS :], model]

    # Passing everything on to another process, or taking it over (`kv_server.succession`).

    def _begin_passing_on(self, client: ClientConnection, request: wire.TakeOver) -> None:
        why = self._why_not_passed_on(request)
        if why:
            self._connections.refuse(client, why)
            return
        self._connections.send(client, wire.Done())
        if client.unsent:
            self._connections.drop(client)
            return
        self._passing = PassingOn(
            Channel(self._connections.detach(client)),
            self.address,
            self.caches,
            dict(self.formats.quotas_set),
            self.ports,
            pause_ports=self._pause_ports,
            stop=lambda passed: self.submit(partial(self._pass_on, passed)),
            gone_on=lambda: self.submit(self._go_on_serving),
        )
        must_start(self._passing)
        self.formats.held_for = "another process is taking over from it"

    def _why_not_passed_on(self, request: wire.TakeOver) -> str:
        if request.format != FORMAT:
            return (
                f"release {PACKAGE} passes on what it has in format {FORMAT}, and release {request.package} takes over "
                f"format {request.format}: stop this server, and start the other one"
            )
        if self._is_private:
            return "it is an engine's private server, which ends with its engine"
        return why_not_passed_on(self.formats)

    def _pause_ports(self) -> None:
        """On the thread that passes everything on."""
        self.pause_http(True)
        if self._peers is not None:
            self._peers.close(keeps_port=True)

    def _pass_on(self, passed: Sequence[Passed]) -> bool:
        """Serve nobody until the other process has taken over. False: it does not, and this one goes on. Raises
        `TierDown`: the same, and why."""
        assert self._passing is not None
        formats = self.formats
        if formats.is_frozen or formats.drained is not None or formats.quotas_set != self._passing.quotas:
            raise TierDown(
                "meanwhile it was frozen or drained, or a quota was set, which the other one has not heard of"
            )
        channel, stopped_s = self._passing.channel, time.monotonic()
        for client in self._connections.all():
            is_reloading = isinstance(client.waiting, wire.Reload)
            if client.is_ending or is_reloading or any(descriptor >= 0 for _, descriptor in client.unsent):
                self._connections.drop(client)
        gc.disable()  # a collection looks at every chunk
        with ExitStack() as held:
            held.callback(gc.enable)
            for one in passed:
                held.enter_context(one.cache.parts.host.lock)  # other threads change nothing either
            clients, orphans = self._connections.all(), self._orphans.all()
            images = [_image_of(client) for client in clients]
            rest = Remainder(
                [one.cache_image() for one in passed],
                images,
                [one.image for one in orphans],
                self._connections.last_number,
                stopped_s,
            )
            descriptors = [number for client in clients for number in (client.socket.fileno(), client.pidfd)]
            descriptors += [one.pidfd for one in orphans]
            channel.send(rest, [number for number in descriptors if number >= 0], within_s=STOPPED_S)
            self.is_passed_on = channel.is_taken(within_s=stopped_s + STOPPED_S - time.monotonic())
            if self.is_passed_on:
                self.is_stopping = True
                for one in passed:
                    one.cache.parts.host.stop()
        return self.is_passed_on

    def _go_on_serving(self) -> None:
        """No other process has taken over."""
        self._passing = None
        self.formats.held_for = ""
        self.pause_http(False)
        self._serve_peers()

    def _open_peers(self) -> None:
        """Bind the address in the settings, if they have one. Imports TLS only here, because not every server needs it.
        Raises `ConfigError`: it cannot be bound, or a setting cannot be honoured."""
        if self._config.peers.listen:
            from kv_server.peers.server import PeerServer

            self._peers = PeerServer(self._config.peers, self.formats.for_peers, self._open_for_peers, self.ports)
            self.formats.peers_address = self.peers_address

    def _open_for_peers(self, wanted: Format) -> None:
        """Have this cache opened, on any thread, for engines of other hosts."""

        def begin() -> None:
            if wanted in self.caches or self.formats.held_for:  # then the sender asks again
                return
            if not self.formats.open(wanted, self._in_use()):
                _log.warning(
                    "an engine of another host may not store: there are caches of %d formats; raise max_formats",
                    self._max_formats,
                )

        self.submit(begin)

    def _serve_peers(self) -> None:
        """Serve other hosts and let them find the caches, with tiers that were opened again."""
        try:
            if self._peers is None or self._peers.is_closed:
                self._open_peers()
            for wanted, cache in self.caches.items():
                self.formats.publish(wanted, cache)
            if self._peers is not None:
                self._peers.start()
        except (ConfigError, OutOfThreadsError) as error:
            self.ports.keep("peers", "")  # peers that connect would wait
            _log.warning("other hosts cannot read from this server: %s", error)

    def _answer_waiting(self, kinds: type | UnionType) -> None:
        for client in self._connections.all():
            if (request := client.waiting) is not None and isinstance(request, kinds):
                self._connections.finish(client, partial(self._answer, client, request))

    def take_over(self) -> None:
        """Take the place of the server from which this one takes over: then `serve`.

        Raises:
            ConfigError: it gives up, and goes on serving; this server is closed.
            VanishedError: it has died; this server is closed, and another one can have its `address`.
        """
        assert self._succession is not None
        gc.collect()
        gc.freeze()  # or the first collection while clients wait would look at every chunk
        try:
            rest, descriptors = self._succession.remainder()
            for image, rest_of_it in zip(self._succession.prepared.pools, rest.caches, strict=True):
                restore_cache(self.caches[image.format], rest_of_it)
            clients, orphans = self._restored(rest, descriptors)
            self._succession.commit()
        except BaseException:
            self._close(keeps_address=True)
            raise
        self._connections.restore(clients, rest.last_number)
        for orphan in orphans:
            self._orphans.restore(orphan)
        self.submit(partial(self._begin_to_serve, rest))

    def _restored(self, rest: Remainder, descriptors: Sequence[int]) -> tuple[list[ClientConnection], list[Orphan]]:
        """The clients and the orphans of the other process, with their descriptors."""
        left = iter(descriptors)
        clients = []
        for image in rest.clients:
            client = ClientConnection(
                image.number,
                socket.socket(fileno=next(left)),
                image.pid,
                next(left) if image.has_pidfd else -1,
                is_greeted=image.is_greeted,
                waiting=image.waiting,
                token=image.token,
                last_seen_s=image.last_seen_s,
            )
            client.socket.setblocking(False)
            client.frames.feed(image.frames)
            if image.unsent:
                client.unsent.append((image.unsent, -1))
            if image.session and image.register is not None:
                cache = self.caches[image.register.format]
                client.register = image.register
                client.session = self._make_session(client, image.register, cache, image.session)
            clients.append(client)
        orphans = [
            Orphan(orphan, self.caches[orphan.format], next(left) if orphan.has_pidfd else -1)
            for orphan in rest.orphans
        ]
        return clients, orphans

    def _begin_to_serve(self, rest: Remainder) -> None:
        assert self._succession is not None
        for image, rest_of_it in zip(self._succession.prepared.pools, rest.caches, strict=True):
            restore_tiers(self.caches[image.format], rest_of_it)
        self._shrinking.begin()
        if self._peers is not None:
            self.submit(self._serve_peers)
        self._answer_waiting(wire.Register | wire.Explain | wire.Clear)
        waited_s = time.monotonic() - rest.stopped_s
        chunks = sum(cache.counts().chunks_resident for cache in self.caches.values())
        text = "taken over, with %d chunks and %d clients, which have waited for %.1f ms"
        _log.info(text, chunks, len(rest.clients), 1e3 * waited_s)

    def finish_take_over(self) -> None:
        """On another thread, while this server serves: wait until the server that it took over from has ended, and
        take what only one process can have."""
        assert self._succession is not None
        self._succession.wait_for_end()
        for cache in self.submit(lambda: list(self.caches.values())).result():
            end_inherited_leases(cache)
        if self._peers is None:
            self.submit(self._serve_peers).result()

    # Reports.

    def registrations(self) -> list[Registration]:
        """For the serving thread: the sessions that have registered a cache."""
        made = [(one, one.register) for one in self._connections.all() if one.register is not None]
        return [
            Registration(one.number, one.pid, its.engine, its.group_bytes, its.fingerprint, its.shards, its.facts)
            for one, its in made
        ]

    def report(self) -> Report:
        """For the serving thread: the server at this moment."""
        used = [one.session.cache for one in self._connections.all() if one.session is not None]
        caches = [
            CacheReport(
                max(group_bytes),
                group_bytes,
                fingerprint,
                cache.pool.name,
                used.count(cache),
                cache.counts(),
                cache.admin.held(),
                cache.lower.states(),
                directories_of(cache),
                *_tenants(cache, self.tenant_names),
                cache.holds.chunks,
                drain=peer_side(cache).drain.state(),
                name=cache.events.name,
                models=sorted(self._models.get((group_bytes, fingerprint), ())),
            )
            for (group_bytes, fingerprint), cache in self.formats.by_format().items()
        ]
        return Report(
            os.getpid(),
            PACKAGE,
            self.registrations(),
            len(self._orphans),
            caches,
            opening=len(self.formats.opening),
            uptime_s=self._clock.now_s() - self._started_s,
            peers=None if self._peers is None else self._peers.counts(),
            keeps=_keeps(self._config),
            frozen=self.formats.is_frozen,
            for_s={what: self._clock.now_s() - since_s for what, since_s in self.formats.since_s.items()},
            engines=self.engine_loads.uses.of_engines(),
            prefixes=self.engine_loads.uses.of_prefixes(),
            saved_s=self.engine_loads.uses.saved_s,
        )

    # Waking and ending.

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, so the thread will wake anyway, or closed
            self._wake_writer.send(b"w")

    def _woken(self) -> None:
        self._wake_reader.recv(4096)
        self._mailbox.drain()
        for opened in self.formats.opened():
            self._shrinking.begin()
            if isinstance(opened.cache, wire.Failed):  # perhaps for an engine of another host, which gets no reason
                _log.warning("a cache could not be opened: %s", opened.cache.text)
            for image in opened.orphans:
                if isinstance(opened.cache, LocalCache):
                    self._orphans.restore(Orphan(image, opened.cache, -1))
            for client in self._connections.all():
                match client.waiting:
                    case wire.Register() as request if request.format == opened.format:
                        self._connections.finish(client, partial(self._go_on, client, request, opened))
        for client in [] if self.formats.held_for else self._connections.all():
            match client.waiting:
                case wire.Register() as request if (
                    request.format not in self.formats.opening and client.clearing is None
                ):
                    # It was held.
                    self._connections.finish(client, partial(self._answer, client, request))

    def network_metrics(self, caches: Iterable[LocalCache]) -> "Iterator[Metric]":
        """On any thread. caches: those of this server."""
        from kv_server.peers.metrics import network_families, peer_families

        yield from network_families(caches)
        if self._peers is not None:
            yield from peer_families(self._peers.counts())

    def _close(self, *, keeps_address: bool = False) -> None:
        keeps_address = keeps_address or self.is_passed_on
        if not keeps_address:
            self.address.stop_listening()
        self._acceptor.close()
        if self._peers is not None:
            self._peers.close(keeps_port=keeps_address)  # it reads from the caches
        self._mailbox.close()
        for client in [] if self.is_passed_on else self._connections.all():
            self._connections.drop(client)
        orphans = [msgspec.structs.replace(one.image, has_pidfd=False) for one in self._orphans.all()]
        self._orphans.close()
        if not self.is_passed_on:  # else the pools and what is in them are the other process's
            self.formats.close(orphans)
        self.bus.close()
        self._selector.close()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._wake_reader.close()
        self._wake_writer.close()
        if self.is_passed_on:
            self.address.abandon()
        elif not keeps_address:
            self.address.close()


def _no_file(then: Callable[[ReloadReport], object], *, take_over: bool) -> None:
    then(ReloadReport([], {}, "it has no file of settings to read again; start it with --config FILE"))


def _image_of(client: ClientConnection) -> ClientImage:
    assert not isinstance(client.waiting, wire.Reload)  # it was dropped
    return ClientImage(
        client.number,
        client.pid,
        client.pidfd >= 0,
        client.is_greeted,
        client.waiting,
        client.register,
        "" if client.session is None else client.session.name,
        client.token,
        client.frames.arrived,
        b"".join(data for data, _ in client.unsent),
        client.last_seen_s,
    )


def _keeps(config: ServerConfig) -> list[str]:
    """Places of the settings that may hold chunks of an earlier process."""
    disks = [str(tier.get("name") or "disk") for tier in config.tiers if tier.get("type") == "disk"]
    return [*([f"pool {config.host.name}"] if config.host.name else []), *disks]


def _tenants(cache: LocalCache, names: Mapping[bytes, str]) -> tuple[list[TenantReport], int]:
    """The tenants that a report lists, and their total number."""
    uses = {use.tenant: use for use in cache.admin.tenants()}
    for tag in names:
        uses.setdefault(tag, TenantUse(tag, 0, 0, None))
    listed = nlargest(
        MAX_TENANTS, uses.values(), key=lambda use: (use.tenant in names or use.quota_bytes is not None, use.chunks)
    )
    return [
        TenantReport(names.get(use.tenant, ""), use.tenant.hex(), use.chunks, use.used_bytes, use.quota_bytes)
        for use in listed
    ], len(uses)


# What became of a prompt: its chunks in every cache of the server and every key space that could hold them.

MAX_RUNS = 1024
MAX_EXPLAINED_KEY_SPACES = 16
_MAX_RUNS_OF_GROUP = 64
_FIRST_CHUNKS = 4
"""If none of the first chunks is known in a key space, the prompt is not known there."""


def explainer(server: CacheServer) -> Callable[[wire.Explain], wire.Explanations]:
    """For the serving thread. The result is for any other, and tells what became of a prompt."""
    state = (server.caches, server.registrations(), server._history, server.bus.now_s())
    return lambda request: explain_prompt(request, *state)


def on_thread(
    name: str, work: Callable[[], T], then: Callable[["Future[T]"], object] = lambda done: None
) -> "Future[T]":
    """Do this on a thread of its own, and call `then` there with its outcome. What takes tenths of a second, as with a
    prompt of thousands of chunks in many groups and shards, would keep all engines waiting for the serving thread."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001  # the client that asked gets it
            done.set_exception(error)
        then(done)

    if start_thread(threading.Thread(target=run, name=name, daemon=True)):
        run()
    return done


def explain_prompt(
    request: wire.Explain,
    caches: Mapping[Format, LocalCache],
    sessions: Sequence[Registration],
    history: History | None,
    now_s: float,
) -> wire.Explanations:
    """Raises `InputError`: the request's digests and key prefixes form no keys."""
    digests, key_prefixes = request.unpack()
    explained_spaces: list[wire.Explained] = []
    is_whole = True
    for (group_bytes, fingerprint), cache in caches.items():
        memory = None if history is None else history.of(cache.events.name)
        is_whole = is_whole and memory is not None and memory.is_whole
        engines = {one.engine for one in sessions if (one.group_bytes, one.fingerprint) == (group_bytes, fingerprint)}
        remote_tiers_skipped = cache.lower.remote_tiers_skipped()
        directories = directories_of(cache)
        for known, was_asked in _key_spaces(key_prefixes, memory):
            if len(explained_spaces) == MAX_EXPLAINED_KEY_SPACES:
                break
            try:
                if not _is_known(cache, memory, known, digests):
                    continue
                shares = [_keys(prefix, digests) for prefix in known.key_prefixes]
                explained = explain(cache, memory, shares, now_s)
            except ClosedError:  # it had no client, and made room for another format meanwhile
                break
            explained_spaces.append(
                wire.Explained(
                    group_bytes,
                    fingerprint,
                    known.space.hex(),
                    known.tenant.hex(),
                    sorted(engines),
                    was_asked,
                    len(shares),
                    explained.held,
                    explained.prefix,
                    [replace(group, states=group.states[:_MAX_RUNS_OF_GROUP]) for group in explained.lacking],
                    remote_tiers_skipped,
                    explained.runs[:MAX_RUNS],
                    len(explained.runs) > MAX_RUNS,
                    explained.choice,
                    directories,
                )
            )
    remembered_s = 0.0 if history is None else max(0.0, now_s - history.began_s)
    history_keys = 0 if history is None else history.max_keys
    return wire.Explanations(len(caches), history_keys, remembered_s, is_whole, explained_spaces)


def _key_spaces(key_prefixes: Sequence[bytes], memory: Memory | None) -> list[tuple[KnownKeySpace, bool]]:
    """First those of the request, each with its groups and shards as far as known; then all others."""
    known = {} if memory is None else {(one.space, one.tenant): one for one in memory.known_key_spaces()}
    requested: dict[tuple[bytes, bytes], set[bytes]] = {}
    for prefix in key_prefixes:
        key = ChunkKey(prefix)
        requested.setdefault((key.space_id, key.tenant), set()).add(prefix)
    found = []
    for (space, tenant), own in requested.items():
        others = known.pop((space, tenant), None)
        prefixes = own | set(others.key_prefixes if others else ())
        found.append((KnownKeySpace(space, tenant, tuple(sorted(prefixes))), True))
    return found + [(one, False) for one in known.values()]


def _is_known(cache: LocalCache, memory: Memory | None, known: KnownKeySpace, digests: Sequence[bytes]) -> bool:
    """Looks at little: it is called on the serving thread for every key space that is remembered."""
    if not digests:
        return False
    shape = cache.shape_of(known.space)
    groups = () if shape is None else shape.groups
    whole = {group for group, coverage in enumerate(groups) if coverage.kind == "all"}
    prefixes = [prefix for prefix in known.key_prefixes if shape is None or ChunkKey(prefix).group in whole]
    # If a model has only windows and states, the first chunks may never have been stored.
    looked_at, most = (prefixes, _FIRST_CHUNKS) if prefixes else (known.key_prefixes, len(digests))
    keys = [key for prefix in looked_at for key in _keys(prefix, digests[:most])]
    return any(cache.admin.where(keys)) or (memory is not None and any(memory.fate(key) for key in keys))


def _keys(prefix: bytes, digests: Sequence[bytes]) -> list[ChunkKey]:
    return [ChunkKey(prefix + digest) for digest in digests]
