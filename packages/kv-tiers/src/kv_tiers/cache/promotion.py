"""Records of promotions: where a prompt's chunks are, which are being loaded, which holders wait, and counters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kv_core.cost import Skipped
from kv_core.keys import ChunkKey
from kv_core.service import Holder

from kv_tiers.cache.presence import Answers


@dataclass(slots=True)
class PromoteCounts:
    """Counters of promotion. They only grow.

    requested: chunks that loads were submitted for.
    arrived: of those, the chunks that entered the pool.
    given_up: of those, the chunks that were not delivered, or were behind one that was not.
    """

    requested: int = 0
    arrived: int = 0
    given_up: int = 0


@dataclass(slots=True)
class Promotion:
    """The loads of one boundary.

    holder: whose lookup started them.
    broken_at: the first chunk that a group of the whole prefix did not get: everything from there on is worthless.
    divisor: of each chunk one of this many parts is read (`Lane.divisors`); None: the smallest.
    on_arrived: called under the lock with the slots of chunks that have arrived.
    lower: the numbers of the tiers that the chunks may be written to; None: all.
    """

    holder: Holder
    broken_at: int
    divisor: int | None = None
    on_arrived: Callable[[Sequence[int]], object] | None = None
    lower: frozenset[int] | None = None


@dataclass(slots=True)
class Job:
    """One load from one tier: consecutive chunks of one group and shard.

    tier: the index of its lane.
    start: the chunk of the first key.
    is_whole: the group needs the whole prefix.
    chain: all keys of this group and shard up to the last one loaded.
    touched_from: the first chunk of the chain that the boundary needs.
    keys: the keys that are loaded.
    slots: their reserved slots, in the order of `keys`.
    began_s: when the load was submitted.
    estimated_s: the estimate of its duration; None: the tier was not measured yet.
    is_probe: it is loaded only to measure the tier.
    given_up_slots: how many of the chunks are no longer awaited: the tier hangs, or an engine stores them. Their slots
        stay reserved until the load ends.
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
    given_up_slots: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


@dataclass(slots=True)
class View:
    """Where the chunks of a prompt are.

    keys: the prompt's keys, chunk-major.
    in_pool: for each key, whether the pool has it or is loading it.
    writing: keys that engines are storing now, or that come from a tier that may not be read for this request. They
        count as absent: they are available to the next request.
    in_tiers: for the remaining keys, the index of the tier that has it.
    all_answered: every tier that was queried has answered.
    """

    keys: Sequence[ChunkKey]
    in_pool: list[bool]
    writing: set[ChunkKey]
    in_tiers: dict[ChunkKey, int] = field(default_factory=dict)
    all_answered: bool = True

    def has(self, place: int) -> bool:
        return self.in_pool[place] or self.keys[place] in self.in_tiers


@dataclass(slots=True)
class PromotionWait:
    """One holder's wait.

    answers: what the tiers have answered, and when the wait began.
    until_s: when the wait times out.
    over: the wait has ended.
    slots: of chunks that arrived for this holder, leased until they are promised to it or the wait ends.
    needed: the keys that the current target boundary needs from the tiers.
    tiers: the indices of the tiers that load something for this holder.
    skipped: what it does not wait for.
    awaited: what it waits for; becomes `skipped` when the wait times out.
    """

    answers: Answers
    until_s: float
    over: bool = False
    slots: list[int] = field(default_factory=list)
    needed: set[ChunkKey] = field(default_factory=set)
    tiers: set[int] = field(default_factory=set)
    skipped: Skipped | None = None
    awaited: Skipped | None = None
