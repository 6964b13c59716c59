"""The prefix policy: whichever rule saves the most prefill at present, over one order of segments.

Four rules are compared all the time on a sample of what is requested (`judge`): LRU, ARC, and by what each class of
chunks is worth, with and without refusing to store what is worth too little. The leader orders the tier, and a change
of the leader moves nothing. What a prompt requests is processed when something is stored: a lookup only notes it.
"""

from collections.abc import Sequence
from typing import Final

from kv_core.keys import ChunkKey

from kv_eviction.prefix.judge import Judge
from kv_eviction.prefix.order import Rule
from kv_eviction.prefix.returns import Returns
from kv_eviction.prefix.segments import SegmentsPolicy

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
        if self.order.rule is Rule.ARC:
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
