"""The second address of a server, at which other hosts' servers look up and read its chunks (`peers.wire`).

A peer only reads: nothing that it sends stores, moves, evicts or forgets a chunk, unless `take_stores` lets it
(`peers.stores`). It can end a hold. Each connection has its own thread, and the serving thread never waits for one. A
thread leases one chunk at a time, sends it from where it is, and disconnects a peer that is too slow. The number of
connections is limited; further ones are refused, and cost the others nothing.
"""

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey, by_chain
from kv_core.log import limited_logger
from kv_remote.host_port import HostPort, read_host_port
from kv_remote.messages import pack_keys
from kv_remote.staging import StagingBuffers
from kv_remote.tls_files import TlsFiles
from kv_tiers.cache.host import ClosedError
from kv_tiers.config import PeersConfig
from kv_tiers.threads import join_all, must_start, start_thread

from kv_server.address import Acceptor, Ports
from kv_server.directory.entries import pack
from kv_server.peers import wire
from kv_server.peers.security import check_protected, nixl_starter, read_token, tls_files
from kv_server.peers.side import LOWER_S, FindCache, FoundCache, peer_side
from kv_server.peers.stores import RemoteStores
from kv_server.report import PeersServed
from kv_server.wire import Format

_log = limited_logger(__name__)

_WHERE: Final = "peers"
_GREETING_S: Final = 5.0
"""How long a new connection may take to authenticate itself."""
_IDLE_S: Final = 120.0
"""How long a connection may be idle. A host that is gone is silent too."""
_END_S: Final = 5.0
_ANSWER_S: Final = 2.0
"""How long answers in progress may take when another process takes over."""
_NO_CACHE_S: Final = 0.2
"""How soon a follower may query again if no engine has registered the cache yet."""


def read_peers(config: PeersConfig) -> tuple[HostPort, bytes, TlsFiles | None]:
    """The address at which to listen, the token (empty: none) and the certificates, if there are any. Raises
    `ConfigError`: the settings cannot be honoured."""
    listen = read_host_port(config.listen, f"{_WHERE}: listen")
    check_protected(config, _WHERE)
    return listen, read_token(config, _WHERE), tls_files(config, _WHERE, is_server=True)


class PeerServer:
    """Binds its address at once, and serves from `start` until `close`."""

    def __init__(
        self, config: PeersConfig, find: FindCache, open_cache: Callable[[Format], object], ports: Ports
    ) -> None:
        """open_cache: as for `RemoteStores`.
        Raises `ConfigError`: the settings cannot be honoured, or the address is taken."""
        _, self._token, self._tls = read_peers(config)
        self._config = config
        self._find = find
        self._stores = RemoteStores(find, open_cache, config.timeout_s) if config.take_stores else None
        start_nixl = nixl_starter(config, _WHERE)
        self._buffers = None if start_nixl is None else StagingBuffers(start_nixl)
        self._listener, self.address = ports.listen(_WHERE, config.listen)
        self._lock = threading.Lock()
        self._counts = PeersServed()
        self._connected: dict[threading.Thread, socket.socket] = {}
        self._answering: set[threading.Thread] = set()
        self._ending = threading.Event()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)  # readable from then on
        self._accepting = threading.Thread(target=self._accept, name="kv-peers", daemon=True)

    def start(self) -> None:
        """Does nothing if it serves already."""
        if self._accepting.ident is None:
            must_start(self._accepting)

    @property
    def is_closed(self) -> bool:
        return self._ending.is_set()

    def counts(self) -> PeersServed:
        """A snapshot, on any thread."""
        with self._lock:
            return replace(self._counts, connections=len(self._connected))

    def close(self, *, keeps_port: bool = False) -> None:
        """Accept no more connections and end those in progress: when this returns, no chunk is leased for a peer.

        keeps_port: peers that connect wait for another process or server at the port, and requests in progress are
            answered first, for a short time.
        """
        self._ending.set()
        if self._ended >= 0:
            os.eventfd_write(self._ended, 1)
            if self._accepting.is_alive():
                self._accepting.join(_END_S)
            os.close(self._ended)
            self._ended = -1
        if not keeps_port:
            self._listener.close()
        with self._lock:
            connected = dict(self._connected)
            answering = self._answering & connected.keys() if keeps_port else set()
        for thread in connected.keys() - answering:
            _interrupt_calls(connected[thread])
        join_all(answering, _ANSWER_S)
        for sock in connected.values():
            _interrupt_calls(sock)
        join_all(connected, _END_S)
        if self._buffers is not None:
            self._buffers.close()

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._ended, select.POLLIN)
        acceptor = Acceptor(self._listener, greet=self._greet, turn_away=lambda _: self._count_refused())
        while poller.poll() and not self._ending.is_set():
            # One at a time: those that connect once we are ending wait for who has the port next.
            if rest_s := acceptor.accept(1):
                self._ending.wait(rest_s)
        acceptor.close()

    def _greet(self, sock: socket.socket) -> None:
        """Serve it on a thread of its own. A peer that is refused learns only that the connection was closed."""
        thread = threading.Thread(target=self._serve, args=(sock,), name="kv-peer", daemon=True)
        why = ""
        with self._lock:
            if len(self._connected) >= self._config.max_connections:
                limit = self._config.max_connections
                why = f"there are as many connections as peers.max_connections allows, {limit}; write more"
            else:
                self._connected[thread] = sock
                self._answering.add(thread)  # its first request will come soon
        if why := why or start_thread(thread):
            _log.warning("a peer is refused: %s", why)
            self._count_refused()
            with self._lock:
                self._connected.pop(thread, None)
                self._answering.discard(thread)
            sock.close()

    def _count_refused(self) -> None:
        with self._lock:
            self._counts.turned_away += 1

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends, in whatever way."""
        try:
            self._converse(self._admitted(sock))
        except (InputError, PermissionError) as error:
            _log.warning("a peer is refused: %s", error)
            self._count_refused()
        except OSError as error:
            _log.debug("a peer has gone: %s", error)
        except ClosedError:
            _log.debug("a peer is disconnected: the cache that it reads is closed")
        except Exception:  # noqa: BLE001  # a bug costs this connection and no other
            _log.exception("serving a peer hit a bug")
        finally:
            self._end_staging()
            with self._lock:
                sock = self._connected.pop(threading.current_thread())
                self._answering.discard(threading.current_thread())
            sock.close()

    def _admitted(self, sock: socket.socket) -> wire.PeerStream:
        """The stream of a peer that has authenticated itself. Raises `PermissionError`: it has not. Raises
        `InputError`: it does not follow the protocol. Raises `OSError`: it is gone."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(_GREETING_S)
        if self._tls is not None:
            try:
                sock = self._tls.current().wrap_socket(sock, server_side=True)
            except ssl.SSLError as error:
                raise PermissionError(f"no certificate that is accepted here: {error.reason or error}") from None
            with self._lock:
                self._connected[threading.current_thread()] = sock
        stream = wire.PeerStream(sock)
        try:
            stream.admit(self._token, _GREETING_S)
        except (InputError, PermissionError) as error:
            with suppress(OSError):
                stream.send_message(wire.PeerRefused(str(error)), time.monotonic() + _GREETING_S)
            raise
        return stream

    def _converse(self, stream: wire.PeerStream) -> None:
        while True:
            request, deadline = stream.next_request(time.monotonic() + _IDLE_S, self._config.timeout_s)
            self._end_staging()
            if not stream.is_current(self._tls):
                return  # a peer that still may connects again by itself
            self._set_answering(not isinstance(request, wire.Follow))  # which waits for what may never come
            self._answer_request(stream, request, deadline)
            self._set_answering(False)
            if self._ending.is_set():
                return

    def _end_staging(self) -> None:
        if self._buffers is not None:
            self._buffers.give_back()

    def _set_answering(self, is_answering: bool) -> None:
        with self._lock:
            (self._answering.add if is_answering else self._answering.discard)(threading.current_thread())

    def _answer_request(self, stream: wire.PeerStream, request: wire.Request, deadline: float) -> None:
        if isinstance(request, wire.PeerHello):
            raise InputError("a peer says hello once")
        if isinstance(request, wire.PeerStore | wire.PeerForget | wire.PeerClear):
            self._answer_store(stream, request, deadline)
            return
        found = self._find(request.namespace)
        if isinstance(request, wire.Fetch):
            self._answer_fetch(stream, request, found)
        else:
            stream.send_message(self._answer(request, found), deadline)

    def _answer_store(
        self, stream: wire.PeerStream, request: wire.PeerStore | wire.PeerForget | wire.PeerClear, deadline: float
    ) -> None:
        if isinstance(request, wire.PeerStore):
            if self._stores is None:
                why = "it takes no stores of other hosts; write peers.take_stores: true there, or leave out stores here"
                stream.send_message(wire.PeerWanted(bytes(len(wire.unpack_keys(request))), why), deadline)
                return
            stored, nbytes = self._stores.take(stream, request, deadline)
            with self._lock:
                self._counts.stored += stored
                self._counts.stored_bytes += nbytes
            return
        if self._stores is None:
            raise InputError("a peer may remove nothing here: peers.take_stores is false")
        self._stores.forget(request)
        stream.send_message(wire.PeerHeld(b"", None), deadline)

    def _answer(
        self,
        request: wire.PeerHolds | wire.Follow | wire.PeerReceived | wire.Offer | wire.Sum | wire.List,
        found: FoundCache,
    ) -> wire.Answer:
        match request:
            case wire.PeerHolds():
                return self._held(wire.unpack_keys(request), found)
            case wire.Follow():
                return self._followed(request, found)
            case wire.PeerReceived():
                if found is not None:
                    found[1].received(wire.unpack_keys(request))
                return wire.PeerHeld(b"", None)
            case wire.Offer():
                return self._offered(request, found)
        if found is None or (contents := found[1].contents) is None:
            return wire.Summed(b"", 0, b"", None) if isinstance(request, wire.Sum) else wire.Listed(b"", 0, 0, b"")
        if isinstance(request, wire.Sum):
            cleared_s = found[0].cleared_for_s()  # before, as in `_held`
            return wire.Summed(contents.id, *contents.sums(), cleared_s)
        sequence, shards, names = contents.names_in(request.shards, wire.MAX_LISTED)
        return wire.Listed(contents.id, sequence, shards, pack(names))

    def _held(self, keys: Sequence[ChunkKey], found: FoundCache) -> wire.PeerHeld:
        held, cleared_s = [False] * len(keys), None
        if found is not None:
            cache, reads = found
            cleared_s = cache.cleared_for_s()  # first: chunks found before a clear must not appear newer than it
            held = reads.holds(keys)
        with self._lock:
            self._counts.asked += len(keys)
            self._counts.held += sum(held)
        return wire.PeerHeld(bytes(held), cleared_s)

    def _answer_fetch(self, stream: wire.PeerStream, request: wire.Fetch, found: FoundCache) -> None:
        keys = wire.unpack_keys(request)
        timeout_s = self._config.timeout_s
        buffer = None
        if request.staged:
            buffer = None if self._buffers is None else self._buffers.take()
            staging = wire.Staging(b"", 0) if buffer is None else wire.Staging(buffer.metadata, buffer.address)
            stream.send_message(staging, wire.deadline_for(0, timeout_s))
            if buffer is None:
                return
        # For all together that cannot be had: the peer waits for one after the other, and if that takes ten seconds its
        # lane takes the tier to hang, and reads from no host.
        patience_s = min(timeout_s, LOWER_S)
        for key in keys:
            if found is None:
                stream.send([wire.SIZE.pack(wire.NOT_HERE)], wire.deadline_for(0, timeout_s))
                continue
            began_s = time.monotonic()
            with found[1].read(key, patience_s) as stored:
                if stored is None:
                    patience_s -= time.monotonic() - began_s
                    if (contents := found[1].contents) is not None:
                        contents.doubt([key])
                    stream.send([wire.SIZE.pack(wire.NOT_HERE)], wire.deadline_for(0, timeout_s))
                    continue
                nbytes = stored.payload.nbytes
                if buffer is None:
                    stream.send_chunk(stored.payload, stored.header, timeout_s)
                elif (checksum := buffer.put(stored.payload)) is not None:
                    said = [wire.SIZE.pack(nbytes), stored.header(checksum)]
                    stream.send(said, wire.deadline_for(0, timeout_s))
                else:
                    stream.send([wire.SIZE.pack(wire.NOT_STAGED)], wire.deadline_for(0, timeout_s))
                    continue
            with self._lock:
                self._counts.staged += buffer is not None
                self._counts.sent += 1
                self._counts.sent_bytes += nbytes

    def _followed(self, request: wire.Follow, found: FoundCache) -> wire.Followed:
        if found is None:
            self._ending.wait(min(request.wait_s, _NO_CACHE_S))
            return wire.Followed(b"", 0, [], None)
        cache, _ = found
        feed = peer_side(cache).handed_over
        after = request.after if request.feed == feed.name else 0
        cleared_s = cache.cleared_for_s()  # before it waits, as in `_held`
        upto, announced = feed.after(after, min(request.wait_s, self._config.timeout_s / 2), wire.MAX_ASKED)
        given = [wire.Given(pack_keys(one.chain), one.first, feed.seconds_left(one)) for one in announced]
        return wire.Followed(feed.name, upto, given, cleared_s)

    def _offered(self, request: wire.Offer, found: FoundCache) -> wire.Offered:
        chain = wire.unpack_keys(request)
        offered = len(chain) - request.first
        if not 0 < offered <= wire.MAX_OFFERED:
            raise InputError(f"an offer of {offered} chunks")
        if len(by_chain(chain)) > 1:  # it would count in one tenant's share and be stored in another's
            raise InputError("an offer of several chains")
        if found is None:
            return wire.Offered(bytes([wire.OfferFate.NOT_TAKEN] * offered), 0)
        return peer_side(found[0]).offers.take(
            chain, request.first, request.cleared_s, fetches=self._config.take_offers
        )


def _interrupt_calls(sock: socket.socket) -> None:
    """Make every pending call on it return, on any thread."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a TLS socket's own would drop state that its thread is using
