"""The memory of pools that have become smaller: it is given back to the system while the server serves.

A process that takes over with a smaller `host.capacity_bytes` evicts what no longer fits, the least worth first. What
stays may lie anywhere in the pool: chunks beyond the capacity are copied into free places below it, except while they
are written or read. Then the memory beyond it is freed (`HostPool.give_back`).

Memory that a client has registered with a device must not be freed: the device would go on with the old pages, and
bytes that it wrote later would be found nowhere. So nothing is freed while a process maps the pool that has not said
that it registers nothing (`kv_server.wire.UNPINNED`). The kernel knows: such a client's descriptor has one more lock.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.machine import spelled

_log = limited_logger(__name__)

PINS: Final = b"\xffpinned"
"""The token of all clients that may register the pool's memory, for `HostPool.lend`."""
_COPIED_BYTES: Final = 4 << 20
_FREED_BYTES: Final = 64 << 20
"""At most so much at a time, at least one slot: a millisecond or two, in which nobody is served."""
_PAUSE_S: Final = 0.003
_LOOK_S: Final = 0.5
"""How long until it is tried again what cannot be done now."""


class Shrinking:
    """Of all pools of a server, for its thread."""

    def __init__(self, caches: Callable[[], Iterable[LocalCache]], pins: Callable[[LocalCache], Sequence[int]]) -> None:
        """pins: the processes of a cache's clients that may have its pool registered with a device."""
        self._caches, self._pins = caches, pins
        self._due_s: float | None = None
        self._named: set[str] = set()

    def begin(self) -> None:
        """A pool has come from another process."""
        self._due_s = 0.0

    def patience_s(self) -> float | None:
        """How soon `go_on` should be called. None: there is nothing to do."""
        return None if self._due_s is None else max(0.0, self._due_s - time.monotonic())

    def go_on(self) -> None:
        """Do a part of what is to be done."""
        if self._due_s is not None and time.monotonic() >= self._due_s:
            waits_s = [wait_s for cache in self._caches() if (wait_s := shrink(cache, self._is_pinned)) is not None]
            self._due_s = time.monotonic() + min(waits_s) if waits_s else None

    def _is_pinned(self, cache: LocalCache) -> bool:
        pool = cache.pool
        if pool.is_lent(PINS) is False:
            return False
        beyond_bytes = 512 * os.fstat(pool.descriptor).st_blocks - pool.slots * pool.slot_bytes
        if beyond_bytes > 0 and pool.name not in self._named:
            self._named.add(pool.name)
            _log.warning(
                "%s of pool %s, beyond its capacity, stay in memory until these processes end, which may have them "
                "registered with a GPU: %s",
                spelled(beyond_bytes), pool.name, ", ".join(map(str, self._pins(cache))) or "none that is connected",
            )  # fmt: skip
        return True


def shrink(cache: LocalCache, is_pinned: Callable[[LocalCache], bool]) -> float | None:
    """Do a part; returns how soon to do the next. None: there is no more. is_pinned: nothing may be freed."""
    pool = cache.pool
    with cache.parts.host.lock:
        if not pool.above and not pool.unused:
            return None
        moves, since = _begin_moves(cache, max(1, _COPIED_BYTES // pool.slot_bytes))
    for _, slot, spare in moves:
        with pool.pages(slot) as old, pool.pages(spare) as new:
            new[:] = old
    with cache.parts.host.lock:
        _end_moves(cache, moves, since)
    if pool.unused and not is_pinned(cache):
        with cache.parts.host.lock:  # lanes free slots
            pool.give_back(_FREED_BYTES)
        return _PAUSE_S
    return _PAUSE_S if moves else _LOOK_S


def _begin_moves(cache: LocalCache, at_most: int) -> tuple[list[tuple[ChunkKey, int, int]], int]:
    """Chunks to copy into free places below the capacity, none of which is being written or read: the key, its slot,
    and the slot there. And `since`, as returned by `Residency.lease_bytes`. Under the lock."""
    host, index, pool = cache.parts.host, cache.parts.index, cache.pool
    found = ((key, slot) for slot in pool.above if (key := index.key_at(slot)) is not None and not index.is_read(slot))
    moves = []
    for key, slot in list(islice(found, at_most)):
        if (spare := pool.allocate()) is None:
            break
        host.shares.took([spare], key.tenant, each=0)  # or stores meanwhile would evict for it
        index.take_spare(spare)
        moves.append((key, slot, spare))
    return moves, index.lease_bytes([slot for _, slot, _ in moves])


def _end_moves(cache: LocalCache, moves: Sequence[tuple[ChunkKey, int, int]], since: int) -> None:
    """Under the lock. A chunk that left meanwhile, got better bytes or is being read stays as it is."""
    host, index = cache.parts.host, cache.parts.index
    for key, slot, spare in moves:
        bytes_at = index.bytes_at([slot], since)
        host.unlease(bytes_at, of_bytes=True)
        if bytes_at[0] == slot and index.key_at(slot) == key and not index.is_read(slot):
            cache.pool.swap(slot, spare)
        index.free_spare(spare)
        host.shares.left(spare, 0)
        cache.pool.free(spare)
