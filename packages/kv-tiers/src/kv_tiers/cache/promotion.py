"""Chunks on their way up, as records."""

from dataclasses import dataclass

from kv_core.keys import ChunkKey
from kv_core.service import Holder


@dataclass(slots=True)
class Promotion:
    """What one boundary needs, on its way up.

    holder: for whom.
    broken_at: the first chunk that a group of the whole prefix did not get: from there on all is worthless.
    """

    holder: Holder
    broken_at: int


@dataclass(slots=True)
class Job:
    """What one call of a tier brings up: neighbours of one group and shard.

    tier: its place among the lanes.
    start: the first key's chunk.
    is_whole: of a group that needs the whole prefix.
    chain: all keys of this group and shard up to the last of these.
    touched_from: the first chunk of the chain that the boundary needs.
    keys: what is brought.
    slots: where they are going to be.
    began_s: when it was submitted.
    estimated_s: what it was expected to take; None: nothing was known.
    is_probe: it is brought to see how quick the tier is.
    """

    tier: int
    start: int
    is_whole: bool
    chain: list[ChunkKey]
    touched_from: int
    keys: list[ChunkKey]
    slots: list[int]
    began_s: float
    estimated_s: float | None = None
    is_probe: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.keys)
