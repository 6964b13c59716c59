"""Simulates tiers of given capacities on a trace, with the index and the policies of the real cache.

For each request, the leading chunks that any tier holds are hits, each counted for the fastest tier that has it. Then
the prompt is stored in the first tier: chunks that hit in a lower tier are promoted and stay there as well, missed
chunks are computed. A chunk that is evicted moves to the next tier, unless that already holds it. Requests do not
overlap, nothing waits, and no bytes exist.

The hit ratio is by tokens over contiguous prefixes: chunks hit over chunks requested, all of the same number of tokens,
after the first requests (`warm_up`), which fill the tiers and do not count. Beside it stand the seconds of prefill that
hits save, because a chunk deep in a prompt takes longer to compute than its first one (`PrefillCost`).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kv_core.keys import ChunkKey
from kv_eviction import make_policy
from kv_eviction.coverage import BoundedGroups, CoveragePolicy
from kv_tiers.index.residency import Residency

from kv_observe.lives import Distribution, Lives, Span

WARM_UP = 0.2
"""The part of the requests that fills the tiers before hits count."""

Prompts = Sequence[Sequence[ChunkKey]]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What an engine needs to compute a prompt: for each token, and for each token before it.

    The defaults are about those of an 8B model on one GPU.
    """

    token_s: float = 40e-6
    pair_s: float = 1.31e-9

    def seconds(self, chunks: int, chunk_tokens: int) -> float:
        """For a prompt of so many chunks."""
        tokens = chunks * chunk_tokens
        return self.token_s * tokens + self.pair_s * chunk_tokens * chunk_tokens * chunks * (chunks - 1) / 2


_COST = PrefillCost()


@dataclass(frozen=True, slots=True)
class TierPlan:
    name: str
    capacity_chunks: int
    policy: str


@dataclass(slots=True)
class TierCounts:
    """Counts of one tier.

    chunks_hit: served from here.
    chunks_stored: written here, whether computed, promoted or spilled.
    """

    name: str
    chunks_hit: int = 0
    chunks_stored: int = 0
    chunks_evicted: int = 0


@dataclass(slots=True)
class Served:
    """What all tiers served, for the requests after the warm-up.

    lives: of the first tier's chunks, by span and role, from the first request on; empty: times are not known.
    """

    tiers: list[TierCounts]
    requests: int = 0
    chunks_asked: int = 0
    asked_s: float = 0.0
    saved_s: float = 0.0
    lives: dict[tuple[Span, str], Distribution] = field(default_factory=dict)

    def add(self, asked: int, hit: int, cost: PrefillCost, chunk_tokens: int) -> None:
        """A request of so many chunks, of which the first ones hit."""
        self.requests += 1
        self.chunks_asked += asked
        self.asked_s += cost.seconds(asked, chunk_tokens)
        self.saved_s += cost.seconds(hit, chunk_tokens)

    @property
    def chunks_hit(self) -> int:
        return sum(tier.chunks_hit for tier in self.tiers)

    @property
    def hit_ratio(self) -> float:
        return self.chunks_hit / self.chunks_asked if self.chunks_asked else 0.0

    @property
    def saved_ratio(self) -> float:
        """Of all seconds of prefill."""
        return self.saved_s / self.asked_s if self.asked_s else 0.0


def simulate(
    prompts: Prompts,
    plans: Sequence[TierPlan],
    *,
    warm_up: float = WARM_UP,
    progress: Progress | None = None,
    cost: PrefillCost = _COST,
    chunk_tokens: int = 512,
    turn_ends: Sequence[bool] = (),
    hinted_share: float = 0.0,
    times_s: Sequence[float] = (),
) -> Served:
    """Replay the prompts over these tiers, the fastest first. Raises `ConfigError`: there is no policy of that name.

    turn_ends: of each request, whether the first tier's policy learns that it ended its user's turn; empty: of none.
    hinted_share: the part of the requests whose client demotes in the first tier, as by KV hints, what of their prompt
        no later one has.
    times_s: when each request arrived; empty: not known.
    progress: called after each request with the number done.
    """
    tiers = [_Tier(plan, may_refuse=len(plans) == 1) for plan in plans]
    parent_of: dict[ChunkKey, ChunkKey | None] = {prompt[0]: None for prompt in prompts}
    parent_of |= {key: parent for prompt in prompts for parent, key in pairwise(prompt)}
    last_request = {key: number for number, prompt in enumerate(prompts) for key in prompt} if hinted_share else {}
    begin = int(warm_up * len(prompts))
    served, lives = Served([]), Lives(every=1)
    for number, prompt in enumerate(prompts):
        if number == begin:
            served = Served([tier.start_counting() for tier in tiers])
        hits = _count_hits(prompt, tiers)
        served.add(len(prompt), sum(map(len, hits)), cost, chunk_tokens)
        evicted = tiers[0].store(prompt)
        if times_s:
            lives.used(hits[0], times_s[number])
            lives.evicted(evicted, times_s[number])
            lives.stored(tiers[0].newest, times_s[number])
        if turn_ends and turn_ends[number]:
            tiers[0].turn_ended(prompt)
        if int((number + 1) * hinted_share) > int(number * hinted_share):
            tiers[0].demote([key for key in prompt if last_request[key] == number])
        for tier in tiers[1:]:
            evicted = [key for run in _runs(evicted, parent_of) for key in tier.take(run, parent_of)]
        if progress is not None:
            progress(number + 1)
    if begin == len(prompts):  # all of them warm it up, so none counts
        served = Served([tier.start_counting() for tier in tiers])
    served.lives = lives.spans if times_s else {}
    return served


def optimum(
    prompts: Prompts,
    capacity_chunks: int,
    *,
    warm_up: float = WARM_UP,
    cost: PrefillCost = _COST,
    chunk_tokens: int = 512,
) -> Served:
    """What one tier of this capacity would serve by Belady's algorithm, which knows the future. No policy exceeds its
    hit ratio over a whole trace (`warm_up=0`), and after a warm-up hardly any, since it gains from the warm-up's hits
    too; the seconds that it saves are no bound, but close to one.

    Of the chunks that are resident or arriving, those whose next use is nearest stay (Belady, IBM Systems Journal 5:2,
    1966), and those that are never used again are not stored at all. A chunk is used whenever one that follows it is,
    so heads never leave before tails, and the maximum of chunk hits is also that of prefix hits. It may decline to
    store a chunk, which our policies may not: they can only evict it first.
    """
    never = len(prompts)
    next_use: list[list[int]] = []
    upcoming: dict[ChunkKey, int] = {}
    for number in range(len(prompts) - 1, -1, -1):
        next_use.append([upcoming.get(key, never) for key in prompts[number]])
        upcoming.update(dict.fromkeys(prompts[number], number))
    next_use.reverse()
    resident: dict[ChunkKey, int] = {}
    latest_first: list[tuple[int, int, ChunkKey]] = []
    begin = int(warm_up * len(prompts))
    served = Served([TierCounts("host")])
    for number, prompt in enumerate(prompts):
        if number >= begin:
            hit = next((place for place, key in enumerate(prompt) if key not in resident), len(prompt))
            served.tiers[0].chunks_hit += hit
            served.add(len(prompt), hit, cost, chunk_tokens)
        for place, (key, use) in enumerate(zip(prompt, next_use[number], strict=True)):
            if use == never:
                resident.pop(key, None)
            else:
                resident[key] = use
                heapq.heappush(latest_first, (-use, -place, key))
        while len(resident) > capacity_chunks:
            negative, _, key = heapq.heappop(latest_first)
            if resident.get(key) == -negative:
                del resident[key]
    return served


class _Tier:
    def __init__(self, plan: TierPlan, *, may_refuse: bool) -> None:
        """may_refuse: as with the pool of the cache, if no tier below can take what it refuses."""
        self._may_refuse = may_refuse
        self._policy = CoveragePolicy(make_policy(plan.policy, plan.capacity_chunks), BoundedGroups())
        self.residency = Residency(plan.capacity_chunks, self._policy)
        self._free = list(range(plan.capacity_chunks - 1, -1, -1))
        self.counts = TierCounts(plan.name)
        self.newest: list[ChunkKey] = []
        """What the latest prompt had stored."""

    def start_counting(self) -> TierCounts:
        self.counts = TierCounts(self.counts.name)
        return self.counts

    def store(self, prompt: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Store the chunks of the prompt that are not here, as `LocalCache` does. Returns what that evicted, in
        order."""
        residency = self.residency
        resident_slots = self._extend(prompt)
        protected, skipped = frozenset(resident_slots), set[int]()
        keys: list[ChunkKey] = []
        slots: list[int] = []
        evicted: list[ChunkKey] = []
        missing = residency.not_held(prompt)
        for key in missing:
            slot = self._free.pop() if self._free else residency.victim(protected, skipped)
            if slot is None:
                break
            if (
                self._may_refuse
                and residency.key_at(slot) is not None
                and self._policy.refuses(key, is_last=key is missing[-1])
            ):
                break
            if (victim := residency.key_at(slot)) is not None:
                residency.empty(slot)
                evicted.append(victim)
            residency.reserve([key], [slot])
            keys.append(key)
            slots.append(slot)
        if skipped:
            residency.reinsert([slot for slot in resident_slots if slot in skipped])
        if keys:
            residency.commit(keys, slots)
            self._extend(prompt)
        self.newest = keys
        self.counts.chunks_stored += len(keys)
        self.counts.chunks_evicted += len(evicted)
        return evicted

    def turn_ended(self, prompt: Sequence[ChunkKey]) -> None:
        self._policy.turn_ended(prompt, self.residency.leading(prompt))

    def demote(self, keys: Sequence[ChunkKey]) -> None:
        for slot in self.residency.resident(keys)[1]:
            self.residency.demote(slot, self._policy)

    def take(self, run: Sequence[ChunkKey], parent_of: dict[ChunkKey, ChunkKey | None]) -> list[ChunkKey]:
        """Store what the tier above evicted, after the chunks of the same prompt that are here. Returns what that
        evicted in turn."""
        chain = list(reversed(run))
        parent = parent_of[chain[-1]]
        while parent is not None and self.residency.find(parent) is not None:
            chain.append(parent)
            parent = parent_of[parent]
        chain.reverse()
        return self.store(chain)

    def _extend(self, chain: Sequence[ChunkKey]) -> list[int]:
        keys, slots = self.residency.resident(chain)
        if slots:
            self.residency.extend(keys, slots)
        return slots


def _count_hits(prompt: Sequence[ChunkKey], tiers: Sequence[_Tier]) -> list[list[ChunkKey]]:
    """Returns the leading chunks that are hits, of each tier."""
    hits: list[tuple[list[ChunkKey], list[int]]] = [([], []) for _ in tiers]
    for key in prompt:
        for tier, (keys, slots) in zip(tiers, hits, strict=True):
            if (slot := tier.residency.find(key)) is not None:
                keys.append(key)
                slots.append(slot)
                break
        else:
            break
    for tier, (keys, slots) in zip(tiers, hits, strict=True):
        tier.counts.chunks_hit += len(slots)
        if tier is tiers[0]:
            tier.residency.touch(prompt, slots)
        elif slots:
            tier.residency.touch(keys, slots)
    return [keys for keys, _ in hits]


def _runs(evicted: Sequence[ChunkKey], parent_of: dict[ChunkKey, ChunkKey | None]) -> list[list[ChunkKey]]:
    """Evicted chunks in runs of one prompt, each head first."""
    runs: list[list[ChunkKey]] = []
    for key in evicted:
        if runs and parent_of[runs[-1][-1]] == key:
            runs[-1].append(key)
        else:
            runs.append([key])
    return [list(reversed(run)) for run in runs]
