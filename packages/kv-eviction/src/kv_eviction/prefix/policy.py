"""The prefix policy: whichever rule saves the most prefill at present, over one order of segments.

Four rules are compared all the time on a sample of what is requested (`judge`): LRU, ARC, and by what each class of
chunks is worth, with and without refusing to store what is worth too little. The leader orders the tier, and a change
of the leader moves nothing. What a prompt requests is processed when something is stored: a lookup only notes it.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from kv_core.keys import ChunkKey

from kv_eviction.arc import ArcPolicy
from kv_eviction.policy import EvictionPolicy
from kv_eviction.prefix.returns import Returns
from kv_eviction.prefix.segments import Rule, SegmentsPolicy
from kv_eviction.simple import LruPolicy

# Which rule saves the most prefill: each runs a small cache of a sample of the chunks, without bytes.
#
# The sample is of keys, not of prompts: so a prompt whose tail is evicted first loses the tail of its sample first. A
# small cache holds as much of the sample as the tier holds of everything, and is credited with what a request saves by
# the leading chunks that it holds: seconds of prefill, which cost more the deeper in the prompt a chunk is.

_DEPTH_COST: Final = 0.0084
"""How much more of a prefill's time each chunk costs than the one before it, of the first chunk's: attention to 256
more tokens, for an 8B model (40 µs a token and 1.31 ns for each token before it)."""
_HALF_LIFE: Final = 20
"""Of the scores, in capacities."""
_LEAD: Final = 0.01
_NOISE: Final = 0.3
"""How far ahead of the leader a rule has to be: a part of its score, and of the noise in the differences."""


class _SmallCache:
    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self._slot_of: dict[ChunkKey, int] = {}
        self._key_at: list[ChunkKey] = []  # by slot; grows up to the capacity
        self._capacity = capacity

    def request(self, keys: Sequence[ChunkKey], now: int, growth: int, *, has_end: bool) -> int:
        """Look up the chunks and store those that miss. Returns how many leading ones were held."""
        policy, slot_of = self.policy, self._slot_of
        held = next((place for place, key in enumerate(keys) if key not in slot_of), len(keys))
        slots = [slot_of[key] for key in keys[:held]]
        by_segments = policy if isinstance(policy, SegmentsPolicy) else None
        if by_segments is not None:
            by_segments.requested(keys, slots, now, growth)
        if held:
            policy.used(keys, slots)
        if held == len(keys):
            return held
        protected = {slot_of[key] for key in keys if key in slot_of}
        excluded: set[int] = set()
        new: dict[ChunkKey, int] = {}
        for place, key in enumerate(keys[held:], held):
            if key in slot_of:
                continue
            if len(self._key_at) < self._capacity:
                new[key] = len(self._key_at)
                self._key_at.append(key)
                continue
            while (slot := policy.victim()) is not None and slot in protected:
                policy.exclude(slot)
                excluded.add(slot)
            if slot is None:
                break
            if by_segments is not None and by_segments.refuses(key, is_last=has_end and place == len(keys) - 1):
                break
            policy.removed(slot)
            del slot_of[self._key_at[slot]]
            self._key_at[slot] = key
            new[key] = slot
        if excluded:
            policy.reinsert([slot for key in keys if (slot := slot_of.get(key)) in excluded])
        if new:
            slot_of.update(new)
            policy.added(list(new), list(new.values()))
            resident = [key for key in keys if key in slot_of]
            slots = [slot_of[key] for key in resident]
            if by_segments is not None:
                by_segments.extended(resident, slots, has_end=has_end and resident[-1] is keys[-1])
            else:
                policy.extended(resident, slots)
        return held

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        held = takewhile(self._slot_of.__contains__, keys)
        self.policy.turn_ended(keys, [self._slot_of[key] for key in held])


class Judge:
    def __init__(self, capacity_chunks: int, rate: int, returns: Returns) -> None:
        """rate: one chunk in so many is in the sample."""
        self._half_life = _HALF_LIFE * capacity_chunks
        small = max(1, capacity_chunks // rate)
        self._arc = ArcPolicy(small)
        policies: dict[Rule, EvictionPolicy] = {Rule.LRU: LruPolicy(), Rule.ARC: self._arc}
        # Of equals the first leads: refusing stores less, and a loop, of which both have learnt the same, loses what is
        # resident under WORTH.
        for rule in (Rule.REFUSE, Rule.WORTH):
            by_segments = policies[rule] = SegmentsPolicy(small, returns)
            by_segments.order.rule = rule
        self._caches = {rule: _SmallCache(policy, small) for rule, policy in policies.items()}
        self._scores = dict.fromkeys(self._caches, 0.0)
        self._noise = 0.0
        self._scored_at = 0
        self.leader = Rule.LRU
        self.may_refuse = False

    @property
    def once_share(self) -> float:
        """The part of the tier that ARC gives to chunks requested once."""
        return self._arc.once_share

    def request(self, keys: Sequence[ChunkKey], places: Sequence[int], now: int, growth: int, *, has_end: bool) -> None:
        """keys, places: of the chunks of a prompt that are in the sample. has_end: its last chunk is among them."""
        saved = {}
        for rule, cache in self._caches.items():
            held = cache.request(keys, now, growth, has_end=has_end)
            saved[rule] = held + _DEPTH_COST * sum(places[:held])
        decay = 0.5 ** ((now - self._scored_at) / self._half_life)
        self._scored_at = now
        spread = max(saved.values()) - min(saved.values())
        self._noise = self._noise * decay + spread * spread
        for rule, seconds in saved.items():
            self._scores[rule] = self._scores[rule] * decay + seconds
        allowed = [rule for rule in self._scores if self.may_refuse or rule is not Rule.REFUSE]
        best = max(allowed, key=self._scores.__getitem__)
        lead = self._scores[best] - self._scores[self.leader]
        if lead > _LEAD * self._scores[best] + _NOISE * self._noise**0.5:
            self.leader = best

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        for cache in self._caches.values():
            cache.turn_ended(keys)


_LEAST_CHUNKS: Final = 128
"""A smaller tier is LRU: so few chunks tell too little."""
_SAMPLE_CHUNKS: Final = 1024
"""The sample is as dense as this many chunks of it filling the tier, or denser."""
_MAX_RATE: Final = 128
_MAX_NOTED: Final = 64
"""Lookups that are noted before they are processed even though nothing is stored."""


class PrefixPolicy(SegmentsPolicy):
    """The default. Amortised constant time per chunk. Memory for the sample: of what is requested in the time in which
    sixteen tiers could be filled, every 2nd to 128th chunk; all of them below 2,048 chunks.
    """

    def __init__(self, capacity_chunks: int) -> None:
        super().__init__(capacity_chunks, Returns(capacity_chunks))
        rate = 1
        while rate < _MAX_RATE and 2 * rate * _SAMPLE_CHUNKS <= capacity_chunks:
            rate *= 2
        self._mask = rate - 1
        self._judge = None if capacity_chunks < _LEAST_CHUNKS else Judge(capacity_chunks, rate, self._returns)
        self._noted: list[tuple[Sequence[ChunkKey], Sequence[int]]] = []  # lookups that are still to be processed
        self._count_at = 0

    @property
    def rule(self) -> Rule:
        """The leader."""
        self._process()
        return self.order.rule

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._noted.append((keys, slots))
        if len(self._noted) >= _MAX_NOTED:
            self._process()

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._process()
        super().turn_ended(keys, slots)
        sample = [key for key in keys if not key[-1] & self._mask]
        if self._judge is not None and sample:
            self._returns.turn_ended(sample)
            self._judge.turn_ended(sample)

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if self._noted:
            self._process()
        if not self._absent.was_requested(keys[0]):
            self._request(keys, ())
        super().added(keys, slots)
        self._balance()

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int], *, has_end: bool = True) -> None:
        if self._noted:
            self._process()
        super().extended(keys, slots, has_end=has_end)

    def removed(self, slot: int) -> None:
        if self._noted:
            self._process()
        super().removed(slot)
        self._balance()

    def evicted(self, slots: Sequence[int]) -> None:
        super().evicted(slots)
        self._balance()

    def victim(self) -> int | None:
        if self._noted:
            self._process()
        return super().victim()

    def exclude(self, slot: int) -> None:
        if self._noted:
            self._process()
        super().exclude(slot)

    def reinsert(self, slots: Sequence[int]) -> None:
        if self._noted:
            self._process()
        super().reinsert(slots)

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        if self._judge is not None:
            self._judge.may_refuse = True  # only a tier that asks can refuse
        return super().refuses(key, is_last=is_last)

    def _process(self) -> None:
        noted, self._noted = self._noted, []
        for keys, slots in noted:
            self._request(keys, slots)
            super().used(keys, slots)

    def _request(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        now = self._tree.now + len(keys)
        self.requested(keys, slots, now)
        if self._judge is None:
            return
        mask = self._mask
        places = [place for place, key in enumerate(keys) if not key[-1] & mask]
        if not places:
            return
        sample = [keys[place] for place in places]
        has_end = places[-1] == len(keys) - 1
        self._returns.requested(sample, self.growth, now, has_end=has_end)
        self._judge.request(sample, places, now, self.growth, has_end=has_end)
        if self._judge.leader is not self.order.rule:
            self.order.rule = self._judge.leader
            self._offer = None
        if self.order.rule is Rule.ARC and now >= self._count_at:
            self._count_at = now + self._capacity // 16  # counting takes time for each chunk
            self._once = sum(not segment.again for segment in self._tree.segments())
            self._balance()

    def _balance(self) -> None:
        """For the rule ARC: the victim is one requested once where there are more of these than there should be."""
        if self._judge is not None and self.order.rule is Rule.ARC:
            self.order.prefers_once = self._once > self._judge.once_share * self._capacity
