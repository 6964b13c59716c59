"""The pools that an engine's ranks can copy from, and what is ready in them, as reported to the scheduler.

Nothing of a layerwise load may be missing in any rank. Ranks in separate processes each map the pool of their server,
notice at different times that it was restarted, and make memory ready for their own device. So each reports what it has
ready, and the scheduler promises only from what all of them have. What a rank has reported stays ready until the
scheduler uses a later pool, and the scheduler uses a pool until every copy from it has ended.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_core.device import LayerwiseCopier
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_core.transfer import HostExtent
from kv_server.remote_cache import MappedPool
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.threads import start_thread

_log = limited_logger(__name__)

_AHEAD_BYTES: Final = 64 << 20
"""How much is made ready beyond the last need. Pools are filled from their start."""
_NOTHING: Final[Mapping[str, int]] = {}


class EngineCopier(LayerwiseCopier, Protocol):
    """A copier that can also detach a pool."""

    def detach(self, pool: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolPart:
    """The first `nbytes` bytes of the pool of this name."""

    pool: str
    nbytes: int


class RankPools:
    """One rank's pools: the one that its cache uses, and earlier ones that the scheduler may still promise from."""

    def __init__(self, copiers: Sequence[EngineCopier], *, for_scheduler: bool) -> None:
        """for_scheduler: a scheduler in another process promises from them."""
        self._copiers = copiers
        self._for_scheduler = for_scheduler
        self._is_queued = any(copier.is_queued for copier in copiers)
        self._pools: dict[str, HostPool | MappedPool] = {}  # in the order in which they were added
        self._ready: dict[str, int] = {}
        self._refused: set[str] = set()
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> Mapping[str, int]:
        """How many of each pool's first bytes are ready; a copy."""
        return dict(self._ready) if self._for_scheduler else _NOTHING

    def add(self, pool: HostPool | MappedPool) -> None:
        """From now on the cache uses this one."""
        for copier in self._copiers:
            copier.attach(pool.name, pool.view)
        self._pools[pool.name] = pool
        self._ready[pool.name] = 0 if self._is_queued else len(pool.view)
        if not self._for_scheduler:
            self._detach_before(pool.name)

    def follow(self, wanted: PoolPart) -> None:
        """The scheduler uses this pool, and needs this much of it to be ready."""
        pool = self._pools.get(wanted.pool)
        if pool is None:
            return  # our cache does not use it yet, or never will
        self._detach_before(wanted.pool)
        first, end = self._ready[pool.name], min(wanted.nbytes, len(pool.view))
        is_busy = self._thread is not None and self._thread.is_alive()
        if first < end and pool.name not in self._refused and not is_busy:
            try:
                self._copiers[0].prepare([])  # a copier's state other than the pool's belongs to this thread
            except ConfigError as error:
                self._refuse(pool.name, error)
                return
            # Not in a step: the system takes tens of milliseconds for each slice.
            thread = threading.Thread(target=self._prepare, args=(pool.name, first, end), name="kv-ready", daemon=True)
            if why := start_thread(thread):  # the next step tries again
                _log.debug("no memory is made ready for now, and chunks are loaded between steps: %s", why)
                return
            self._thread = thread

    def close(self) -> None:
        """Detach all pools."""
        for name in list(self._pools):
            self._detach(name)

    def _detach_before(self, name: str) -> None:
        for earlier in list(self._pools):
            if earlier == name:
                return
            self._detach(earlier)

    def _detach(self, name: str) -> None:
        if self._thread is not None:
            self._thread.join()
        del self._pools[name], self._ready[name]
        for copier in self._copiers:
            copier.detach(name)

    def _prepare(self, name: str, first: int, end: int) -> None:
        """On a thread of its own."""
        try:
            for offset in range(first, end, _AHEAD_BYTES):
                nbytes = min(_AHEAD_BYTES, end - offset)
                self._copiers[0].prepare([HostExtent(name, offset, nbytes)])
                self._ready[name] = offset + nbytes
        except Exception as error:  # noqa: BLE001  # otherwise each step would start another thread that fails
            self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused.add(name)
        _log.warning("chunks are loaded between steps: %s", error)


class RanksReady:
    """The scheduler's record of what its ranks have ready, as far as they have reported."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._by_rank: dict[int, Mapping[str, int]] = {}
        self._wanted = PoolPart("", 0)

    def receive(self, rank: int, ready: Mapping[str, int]) -> None:
        """Record what this rank has ready now (`RankPools.ready`)."""
        self._by_rank[rank] = ready

    def have(self, extents: Iterable[HostExtent]) -> bool:
        """Whether all ranks can copy from these. If not, `wanted` requests it of them."""
        needed: dict[str, int] = {}
        for extent in extents:
            needed[extent.pool] = max(needed.get(extent.pool, 0), extent.offset + extent.nbytes)
        for pool, end in needed.items():
            if (pool != self._wanted.pool) or self._wanted.nbytes < end + _AHEAD_BYTES:
                self._wanted = PoolPart(pool, end + _AHEAD_BYTES)
        return len(self._by_rank) == self._ranks and all(
            ready.get(pool, 0) >= end for ready in self._by_rank.values() for pool, end in needed.items()
        )

    def wanted(self, pool: str) -> PoolPart:
        """What the ranks must make ready, for a scheduler whose cache uses this pool."""
        if self._wanted.pool != pool:
            self._wanted = PoolPart(pool, _AHEAD_BYTES)
        return self._wanted
