"""Lookup plans: how many leading chunks can be served, from which tier, and why the run ended."""

from dataclasses import dataclass
from enum import Enum

from kv_core.cost import Choice
from kv_core.extent import FileExtent


class Ended(Enum):
    """Why the hit is not longer."""

    ALL_HELD = "every requested chunk is held"
    ABSENT = "the next chunk is not held"
    INCOMPLETE = "the next chunk is held by some shards or groups but not by all"
    REFUSED = "the cache grants no new leases at present"
    PENDING = "more is being promoted or looked up in a lower tier: ask again"


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The leading chunks that `holder` may now load. They stay where they are until its lease ends or expires.

    holder: the owner of the lease.
    chunks: number of leading chunks that hit: every group has all that it needs of them, in every shard.
    ended: why the hit is not longer.
    tiers: for each of these chunks, the slowest tier that a needed key comes from.
    prefix_chunks: number of leading chunks held by the groups that need the whole prefix. If it exceeds `chunks`, other
        prompts diverge from this one there while a window or a state is missing. Without such groups: `chunks`.
    lacking: the group that ended the hit before `prefix_chunks`; -1 if none did.
    choice: whether loading pays, if the lookup came with costs.
    files: where the last of these chunks are in a tier's files, if they are to be read there instead of in the pool.
    """

    holder: str
    chunks: int
    ended: Ended
    tiers: tuple[str, ...]
    prefix_chunks: int = 0
    lacking: int = -1
    choice: Choice | None = None
    files: tuple[FileExtent, ...] = ()
