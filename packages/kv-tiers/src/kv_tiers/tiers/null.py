"""The smallest tier: it refuses everything. For measuring what the hierarchy itself costs, and to read first."""

from collections.abc import Sequence

from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, LoadOutcome, Refused, StoreOutcome

from kv_tiers.tier import Read, TierUsage, Write


class NullTier:
    """Holds nothing."""

    name = "null"
    holds_is_local = True

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [False] * len(keys)

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return [Absent() for _ in reads]

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return self.load(reads)

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        return [Refused("the null tier keeps nothing") for _ in writes]

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        return

    def clear(self) -> None:
        return

    def clear_tenant(self, tenant: bytes) -> None:
        return

    def probe(self) -> None:
        return

    def usage(self) -> TierUsage:
        return TierUsage(chunks=0, used_bytes=0, capacity_bytes=0)

    def close(self) -> None:
        return
