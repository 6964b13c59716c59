"""The dram tier: plain host memory below the pool, unpinned, on another NUMA node, or on a memory expander."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Loaded, LoadOutcome, Refused, Stored, StoreOutcome
from kv_eviction.coverage import BoundedGroups
from kv_eviction.policy import EvictionPolicy
from kv_eviction.registry import DEFAULT_POLICY, PolicySpec, make_policy

from kv_tiers.options import read_options
from kv_tiers.pool.host_pool import HostPool, check_capacity
from kv_tiers.tier import ANY_CHUNKS, Read, Tier, TierContext, TierUsage, WhenFull, Write, checked, encoded_bytes
from kv_tiers.tiers.index import ExtentIndex, IndexedTier, read_quotas
from kv_tiers.tiers.space import Geometry, runs

_SLOT_UNITS: Final = 16
_LINE_BYTES: Final = 64
"""Memory does not need units of whole pages; cache lines suffice."""


class DramConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much memory, in addition to the host pool's."""

    capacity_bytes: int
    policy: PolicySpec = DEFAULT_POLICY
    """The eviction policy."""
    when_full: WhenFull = "drop_chunks"
    """drop_parts: as for the disk tier."""
    quota_bytes: dict[str, int] = {}
    """As for the disk tier."""


def _check_options(options: Mapping[str, object]) -> None:
    config = read_options(DramConfig, options, "dram")
    make_policy(config.policy, slots := _slots_for(config, ANY_CHUNKS))
    read_quotas(config.quota_bytes, config.capacity_bytes, ANY_CHUNKS, slots)
    check_capacity(config.capacity_bytes, "dram")


@checked(_check_options)
def make_dram_tier(options: Mapping[str, object], context: TierContext) -> Tier:
    """The factory of the tier type `dram`. Raises `ConfigError`: options that cannot be honoured on this machine."""
    config = read_options(DramConfig, options, "dram")
    slots = _slots_for(config, context)
    quotas = read_quotas(config.quota_bytes, config.capacity_bytes, context, slots)
    pool = HostPool.anonymous("dram", context.chunk_bytes, slots)
    return DramTier(
        pool,
        make_policy(config.policy, max(1, slots - sum(quotas.values()))),
        bounded=context.bounded,
        drops_parts=config.when_full == "drop_parts",
        quotas=quotas,
        share_policy=partial(make_policy, config.policy),
    )


def _slots_for(config: DramConfig, context: TierContext) -> int:
    slots = config.capacity_bytes // context.slot_bytes
    if slots < 1:
        raise ConfigError(f"dram: a capacity_bytes of {config.capacity_bytes} holds no chunk of {context.slot_bytes}")
    return slots


class DramTier(IndexedTier):
    """A second pool; bytes are copied between it and the host pool."""

    holds_is_local = True

    def __init__(
        self,
        pool: HostPool,
        policy: EvictionPolicy,
        *,
        name: str = "dram",
        bounded: BoundedGroups | None = None,
        drops_parts: bool = False,
        quotas: Mapping[bytes, int] | None = None,
        share_policy: Callable[[int], EvictionPolicy] | None = None,
    ) -> None:
        """pool: anonymous, with slots of the size of the host pool's. The tier closes it.
        The rest: as for `ExtentIndex`.
        """
        self.name = name
        self._pool = pool
        self._unit_bytes = -(-pool.chunk_bytes // (_SLOT_UNITS * _LINE_BYTES)) * _LINE_BYTES
        geometry = Geometry(self._unit_bytes, _SLOT_UNITS)
        index = ExtentIndex(
            [pool.slots],
            geometry,
            policy,
            bounded=bounded,
            drops_parts=drops_parts,
            quotas=quotas,
            share_policy=share_policy,
        )
        super().__init__(index)
        self._headers: dict[int, bytes] = {}  # by entry
        self._closing = threading.Lock()

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        entries = self._index.begin_load([read.key for read in reads])
        try:
            return [self._load(read, entry) for read, entry in zip(reads, entries, strict=True)]
        finally:
            self._index.end_load(entries)

    load_prefixes = load_remainders = load

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        if not writes:
            return []
        sizes = [write.stored_bytes for write in writes]
        decoded = [encoded_bytes(write) for write in writes]
        places, _, _ = self._index.reserve([write.key for write in writes], sizes, writes[0].parent, decoded)
        outcomes: list[StoreOutcome] = []
        for write, place in zip(writes, places, strict=True):
            if place is not None:
                self._copy(place.units, write.payload, write.stored_bytes, is_load=False)
                self._headers[place.entry] = write.header
                outcomes.append(Stored())
            elif self._index.holds_or_writes(write.key):
                outcomes.append(Stored())
            else:
                outcomes.append(Refused("every slot is being read or written, or holds an earlier chunk of the prompt"))
        written = [(place, write.parent) for place, write in zip(places, writes, strict=True) if place is not None]
        self._index.commit([place for place, _ in written], [parent for _, parent in written])
        return outcomes

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._index.discard(keys)

    def probe(self) -> None:
        return

    def usage(self) -> TierUsage:
        used_bytes = self._index.used_units * self._unit_bytes
        capacity_bytes = self._pool.slots * self._pool.slot_bytes
        by_group, cut = self._index.by_group(), self._index.chunks_cut
        usage = (self._index.chunks, used_bytes, capacity_bytes)
        return TierUsage(*usage, by_group=by_group, cut_chunks=cut, quotas=self._index.quotas())

    def close(self) -> None:
        with self._closing:
            self._pool.close()

    def _load(self, read: Read, entry: int | None) -> LoadOutcome:
        if entry is None:
            return Absent()
        extent = self._index.extent(entry)
        wanted_bytes = min(read.wanted_bytes, extent.stored_bytes)
        self._copy(extent.units, read.pages, wanted_bytes, is_load=True, from_bytes=read.from_bytes)
        if not read.from_bytes:
            read.header[:] = self._headers[entry]
        return Loaded(wanted_bytes)

    def _copy(
        self, units: Sequence[int], pages: memoryview, nbytes: int, *, is_load: bool, from_bytes: int = 0
    ) -> None:
        """Copy the first `nbytes` bytes of a payload, except those before `from_bytes`. Does not hold the interpreter's
        lock, which an assignment to a memoryview would."""
        offset = 0
        for first, count in runs(units):
            end = min(offset + count * self._unit_bytes, nbytes)
            begin = max(offset, from_bytes)
            start = first * self._unit_bytes + begin - offset
            if begin < end:
                with self._pool.view[start : start + end - begin] as pool_bytes, pages[begin:end] as page_bytes:
                    target, source = (page_bytes, pool_bytes) if is_load else (pool_bytes, page_bytes)
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            offset = end
            if offset == nbytes:
                return
