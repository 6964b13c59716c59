"""What engines of other hosts store here, and remove (`peers.take_stores`).

An engine on a host without a server has a small pool of its own, and this server as the tier below it. A chunk is
received and verified in memory outside the pool, and enters it only then: a sender that stalls, dies or lies holds no
slot and leaves nothing behind.
"""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged
from kv_remote.archive import pool_bytes
from kv_tiers.cache.host import FROZEN
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import HEADER_BYTES, Header, format_id, read_header
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import TierContext

from kv_server.peers import wire
from kv_server.peers.side import LEAVING, FindCache, PeerReads, peer_side
from kv_server.wire import Format

_SENDERS: Final = 4
"""Senders that may have memory outside the pool at a time, one chunk each."""
_WAIT_S: Final = 3.0
"""How long a sender waits for the cache of its format, which its first store opens (a large disk may take longer), and
for a place: less than it waits for an answer, or it would not hear why not."""
_POLL_S: Final = 0.02

Fate = tuple[wire.StoreFate, str]
"""What became of a chunk, and why it is not stored."""


class RemoteStores:
    """Safe to use from any thread; a sender's thread waits for its bytes."""

    def __init__(self, find: FindCache, open_cache: Callable[[Format], object], timeout_s: float) -> None:
        """open_cache: have the cache of this format opened. Called on any thread; does not wait.
        timeout_s: of `PeersConfig`."""
        self._find = find
        self._open_cache = open_cache
        self._timeout_s = timeout_s
        self._senders = threading.BoundedSemaphore(_SENDERS)
        self._numbers = itertools.count(1)

    def take(self, stream: wire.PeerStream, request: wire.PeerStore, deadline: float) -> tuple[int, int]:
        """Answer this request: receive the chunks that are not here, and store them; if it names none, have their cache
        opened. Returns how many are stored, and their bytes.

        Raises:
            OSError: the sender is gone, or too slow.
            InputError: what it sends is no chunk of this format.
            MisuseError: the cache was closed meanwhile.
        """
        keys = wire.unpack_keys(request)
        wait_s = min(self._timeout_s / 2, _WAIT_S)
        until_s = time.monotonic() + wait_s
        found = self._opened(request.format, wait_s=wait_s if keys else 0.0)
        if not keys:
            why = ""
        elif found is None:
            why = "it has no cache of this format yet, and could not open one in time; its log says more"
        elif not self._senders.acquire(timeout=max(0.0, until_s - time.monotonic())):
            why = "it is busy with what others store"
        else:
            try:
                return self._receive(stream, request, *found, deadline)
            finally:
                self._senders.release()
        stream.send_message(wire.PeerWanted(bytes(len(keys)), why), deadline)
        return 0, 0

    def forget(self, request: wire.PeerForget | wire.PeerClear) -> None:
        """Raises `InputError`: these are not keys."""
        found = self._find(request.namespace)
        if isinstance(request, wire.PeerForget):
            keys = wire.unpack_keys(request)
            if found is not None:
                found[0].forget(keys)
        elif found is not None and request.tenant:
            found[0].admin.clear_tenant(request.tenant)
        elif found is not None:
            found[0].clear()

    def _opened(self, wanted: Format, wait_s: float) -> tuple[LocalCache, PeerReads] | None:
        namespace = TierContext(max(wanted[0]), 0, wanted[1]).namespace
        until_s = time.monotonic() + wait_s
        found = self._find(namespace)
        if found is None:
            self._open_cache(wanted)
        while found is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
            found = self._find(namespace)
        # Of two formats that differ in the sizes of smaller groups only, the first one has the namespace.
        return found if found is None or found[0].pool.sizes.group_bytes == wanted[0] else None

    def _receive(
        self, stream: wire.PeerStream, request: wire.PeerStore, cache: LocalCache, reads: PeerReads, deadline: float
    ) -> tuple[int, int]:
        keys, own_format = wire.unpack_keys(request), format_id(request.fingerprint)
        wanted = [not is_here for is_here in reads.holds(keys)]
        why = _refusal(cache) if any(wanted) else ""  # before the bytes cross the network in vain
        stream.send_message(wire.PeerWanted(bytes(len(keys)) if why else bytes(wanted), why), deadline)
        if why or not any(wanted):
            return 0, 0
        pages = chunk_memory(cache.pool.slot_bytes)
        fates: list[wire.StoreFate] = []
        reason, stored_bytes = "", 0
        for key in itertools.compress(keys, wanted):
            nbytes = cache.pool.sizes.of(key)
            header, payload, fate = self._chunk(stream, key, pages, nbytes, own_format)
            if fate is None:
                fate = self._enter(cache, key, header.parent, payload, reads)
            fates.append(fate[0])
            if fate[0] == wire.StoreFate.STORED:
                stored_bytes += nbytes
            else:
                reason = fate[1]
        stream.send_message(wire.PeerStored(bytes(fates), reason), wire.deadline_for(0, self._timeout_s))
        return fates.count(wire.StoreFate.STORED), stored_bytes

    def _chunk(
        self, stream: wire.PeerStream, key: ChunkKey, pages: memoryview, nbytes: int, own_format: bytes
    ) -> tuple[Header, memoryview, Fate | None]:
        """The next chunk, and its fate if it is not to be stored. nbytes: its size here."""
        data = bytearray(HEADER_BYTES)
        stream.fill(memoryview(data), wire.deadline_for(0, self._timeout_s))
        header = read_header(data)
        if isinstance(header, Damaged):
            raise InputError(f"a chunk's header is damaged: {header.reason}")
        if header.key != key or header.format_id != own_format or header.decoded_bytes != nbytes:
            raise InputError("a chunk that is stored has another key, format or size than was said before")
        payload = pages[: header.stored_bytes]  # at most `decoded_bytes`, as every header that can be read
        checksum = stream.receive_chunk(payload, self._timeout_s, lambda: None)
        if header.codec or header.encryption:
            why = "it takes chunks as they are: leave codec out of the tier that stores them"
            return header, payload, (wire.StoreFate.UNSTORABLE, why)
        if checksum != header.checksum:
            return header, payload, (wire.StoreFate.REFUSED, "its bytes were damaged on the way")
        return header, payload, None

    def _enter(
        self, cache: LocalCache, key: ChunkKey, parent: ChunkKey | None, payload: memoryview, reads: PeerReads
    ) -> Fate:
        """Copy a verified chunk into the pool."""
        holder = f"store of another host/{next(self._numbers)}"
        chains = [[key]]
        if parent is not None and len(parent) == len(key) and parent.tenant == key.tenant:
            chains.insert(0, [parent, key])
        try:
            for chain in chains:
                lease = cache.begin_store(chain, holder)
                if lease.keys == (key,):
                    with pool_bytes(cache, lease.extents[0]) as room:
                        room[:] = payload
                    cache.commit(lease)
                    return wire.StoreFate.STORED, ""
                cache.release(lease)
                if not lease.keys:
                    break
                # The chunk before it is not in the pool (any more), and its bytes are not at hand.
        finally:
            cache.end(holder)
        if reads.holds([key])[0]:
            return wire.StoreFate.STORED, ""
        return wire.StoreFate.REFUSED, lease.refused or "it is worth less than what the pool holds"


def _refusal(cache: LocalCache) -> str:
    """Why it stores nothing new, whatever it is; empty: it may."""
    if cache.parts.host.is_frozen:
        return FROZEN
    return LEAVING if peer_side(cache).offers.is_refused else ""
