"""Lookup plans: how many leading chunks can be served, from which tier, and why the run ended."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kv_core.cost import Choice
from kv_core.errors import MisuseError


class Ended(Enum):
    """Why the hit is not longer."""

    ALL_HELD = "every requested chunk is held"
    ABSENT = "the next chunk is not held"
    INCOMPLETE = "the next chunk is held by some shards or groups but not by all"
    REFUSED = "the cache grants no new leases at present"
    PENDING = "more is being promoted or looked up in a slower tier: ask again"


@dataclass(frozen=True, slots=True)
class LookupPlan:
    """The leading chunks that `holder` may now load. They stay in the pool until its lease ends or expires.

    holder: the owner of the lease.
    chunks: number of leading chunks that hit: every group has all that it needs of them, in every shard.
    ended: why the hit is not longer.
    tiers: for each of these chunks, the slowest tier that a needed key comes from.
    prefix_chunks: number of leading chunks held by the groups that need the whole prefix. If it exceeds `chunks`, other
        prompts diverge from this one there while a window or a state is missing. Without such groups: `chunks`.
    lacking: the group that ended the hit before `prefix_chunks`; -1 if none did.
    choice: whether loading pays, if the lookup came with costs.
    """

    holder: str
    chunks: int
    ended: Ended
    tiers: tuple[str, ...]
    prefix_chunks: int = 0
    lacking: int = -1
    choice: Choice | None = None


def leading_run(held: Iterable[bool], keys_per_chunk: int) -> tuple[int, Ended]:
    """Count the leading chunks of which every key is held, and say why the count stopped.

    held: chunk-major, `keys_per_chunk` answers per chunk; read lazily and never past the first miss.

    Raises:
        MisuseError: the answers do not make up whole chunks.
    """
    if keys_per_chunk < 1:
        raise MisuseError(f"a chunk has at least one key, not {keys_per_chunk}")
    chunks = 0
    held_in_chunk = 0
    for is_held in held:
        if not is_held:
            return chunks, Ended.INCOMPLETE if held_in_chunk else Ended.ABSENT
        held_in_chunk += 1
        if held_in_chunk == keys_per_chunk:
            chunks, held_in_chunk = chunks + 1, 0
    if held_in_chunk:
        raise MisuseError(f"{keys_per_chunk} keys per chunk, but only {held_in_chunk} were given for the last chunk")
    return chunks, Ended.ALL_HELD
