"""Ours: keep what is most likely to come back, judged by what its place in the tree of prefixes tells.

Prompts that share a prefix make a tree, and a tree can tell what a list of chunks cannot: whether a prefix is shared by
many, how often a session has come back before, and by how much its last turn made it longer. Chunks that were always
used together form a segment, which has a role and some traits (`kv_tiers.eviction.segment`). How likely it comes back
at which age is learnt from these while running (`kv_tiers.eviction.returns`); nothing is tuned to a workload. Segments
that are worth the same at the same age queue together. Of the oldest of each queue that no resident segment follows,
the one worth least loses its last chunk.

A lookup touches segments and not chunks, of which a session has about one a turn. The hit ratios, what can be reached
at all and where this does not win are in docs/adr/0008-the-prefix-policy.md.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_tiers.eviction.returns import Factor, Kind, Returns
from kv_tiers.eviction.segment import MANY_BRANCHES, Role, Segment


class PrefixPolicy:
    """Amortised constant time a chunk, and for a victim the number of queues, some dozens.

    Memory: a segment for each run of chunks, and at most as many remembered segments and samples as chunks.
    """

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._now = 0  # chunks added ever
        self._returns = Returns(capacity_chunks)
        self._segment_of: dict[int, Segment] = {}
        self._aside: set[int] = set()
        self._oldest_first: dict[Kind, OrderedDict[Segment, None]] = {}
        self._gone: OrderedDict[ChunkKey, Segment] = OrderedDict()  # evicted whole, by the key of the first chunk
        self._recalled: list[Segment] = []  # of these, the ones that the latest chunks belong to
        self._fresh: Segment | None = None  # the latest chunks, while it is not known what they follow
        self._offer: Segment | None = None

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        self._now += len(slots)
        self._returns.advance(self._now)
        self._recalled = [gone for key in keys if (gone := self._gone.pop(key, None)) is not None]
        for gone in self._recalled:
            self._came_back(gone)
        segment = self._fresh = Segment(None, 0, self._now)
        segment.first_key = keys[0]
        self._move(slots, segment)
        segment.end = len(slots)
        self._enqueue(segment)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        deepest = self._deepest(slots)
        if deepest.is_last:
            deepest = self._join_parent(deepest)
        # Who leaves a segment before its middle is somebody else, on a way of their own.
        came_back = 2 * (len(slots) - deepest.start) >= len(deepest.slots)
        for segment in deepest.path():
            if segment is not deepest or came_back:
                self._came_back(segment)
                segment.last_use = self._now
                self._watch(segment)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        fresh, self._fresh = self._fresh, None
        if fresh is None or not fresh.slots:
            return
        places = [place for place, slot in enumerate(slots) if slot in fresh.slots]
        if len(places) < len(fresh.slots):  # another prompt's: what was added last has come alone, as by an adoption
            return
        first = places[0]
        self._offer = None
        parent = self._deepest(slots[:first]) if first else None
        known = sum(max(1, gone.end - gone.start) for gone in self._recalled)
        *body, last = fresh.slots
        segment: Segment | None = fresh
        turns = 1 + max((gone.turns for gone in self._recalled), default=-1)
        fresh.start, fresh.end = first, first + len(body)
        if parent is not None and self._goes_on(parent, first, slots[first - 1]):
            # What was evicted of its tail is back, or the same request stores its next piece.
            known += parent.end - first if not parent.is_last else -parent.grown_by
            turns = max(turns, parent.turns + (not parent.is_last))
            segment = self._join_parent(parent) if parent.is_last else parent
            segment.is_last = False
            segment.end = max(segment.end, fresh.end)
            self._dequeue(fresh)
            self._move(body, segment)
        else:
            if parent is not None and not parent.ends_with(slots[first - 1]):
                parent = self._split(parent, slots[first - 1], first)
            if self._recalled:
                fresh.uses, fresh.gap = self._recalled[-1].uses, self._recalled[-1].gap
            if parent is not None and parent.branches < MANY_BRANCHES:
                turns = max(turns, parent.turns + 1)
            if body:
                self._attach(fresh, parent)
                self._watch(fresh)
            else:
                self._dequeue(fresh)
                segment = parent
        tail = Segment(None, fresh.end, self._now)
        tail.end, tail.is_last = fresh.end + 1, True
        tail.first_key = keys[first + len(body)] if body else fresh.first_key
        fresh.slots.pop(last, None)
        self._move([last], tail)
        self._attach(tail, segment)
        self._watch(tail)
        self._characterize(tail, turns, max(0, len(body) + 1 - known))
        if slots[-1] != last:  # it fills a gap that a forgotten chunk left
            self._mend(slots)

    def removed(self, slot: int) -> None:
        segment = self._segment_of.pop(slot)
        evicted = segment is self._offer and segment.ends_with(slot)
        if not evicted:
            self._offer = None
        if slot in self._aside:
            self._aside.remove(slot)
            return
        del segment.slots[slot]
        if segment.slots:
            return
        self._offer = None
        self._emptied(segment)
        if evicted and segment.first_key is not None:
            segment.parent = None
            self._gone[segment.first_key] = segment
            if len(self._gone) > self._capacity:
                self._lose(self._gone.popitem(last=False)[1])

    def victim(self) -> int | None:
        if self._offer is None:
            self._offer = self._least_worth()
        return None if self._offer is None else next(reversed(self._offer.slots))

    def set_aside(self, slot: int) -> None:
        self._offer = None
        segment = self._segment_of[slot]
        self._aside.add(slot)
        del segment.slots[slot]
        if not segment.slots:
            self._emptied(segment)

    def put_back(self, slots: Sequence[int]) -> None:
        self._offer = None
        for slot in slots:
            self._aside.remove(slot)
            segment = self._segment_of[slot]
            if not segment.slots and segment.parent is not None:
                segment.parent.kids += 1
            segment.slots[slot] = None
            segment.last_use = self._now
            self._enqueue(segment)

    def _least_worth(self) -> Segment | None:
        best, least = None, math.inf
        for kind, queue in self._oldest_first.items():
            while queue:
                segment = next(iter(queue))
                if not segment.kids:
                    worth = self._returns.worth(kind, self._now - segment.last_use)
                    if best is None or (worth, segment.last_use) < (least, best.last_use):
                        best, least = segment, worth
                    break
                self._dequeue(segment)  # until its last kid has left: then it is the oldest again
        return best

    def _watch(self, segment: Segment) -> None:
        self._lose(segment)
        segment.sample = self._returns.watch(*self._judge(segment), self._now)
        self._enqueue(segment)

    def _judge(self, segment: Segment) -> tuple[Role, list[Factor]]:
        role = segment.role()
        factors = self._returns.factors(segment.traits(role))
        segment.kind = self._returns.kind(role, factors)
        return role, factors

    def _lose(self, segment: Segment) -> None:
        if segment.sample is not None:
            self._returns.lose(segment.sample)
            segment.sample = None

    def _came_back(self, segment: Segment) -> None:
        if segment.sample is not None:
            self._returns.came_back(segment.sample, self._now)
            segment.sample = None
        segment.uses += 1
        gap = self._now - segment.last_use
        segment.gap = gap if segment.gap is None else math.sqrt(segment.gap * gap + 1)

    def _characterize(self, tail: Segment, turns: int, grown_by: int) -> None:
        """Say of a request's whole way, as far as it is its session's own, what the session is like."""
        for own in tail.path():
            if own.branches > MANY_BRANCHES:
                return
            own.turns, own.length, own.grown_by = turns, tail.end, grown_by
            role, factors = self._judge(own)
            if own.sample is not None:
                own.sample.role, own.sample.factors = role, factors
            self._enqueue(own)

    def _goes_on(self, segment: Segment, place: int, slot: int) -> bool:
        if segment.kids or not segment.ends_with(slot):
            return False
        return segment.end > place or (segment.is_last and not segment.uses)

    def _deepest(self, slots: Sequence[int]) -> Segment:
        """The segment of the last of these, which are a prompt from its first chunk on; whole up to there."""
        deepest = self._segment_of[slots[-1]]
        *_, top = deepest.path()
        return deepest if top is self._segment_of[slots[0]] else self._mend(slots)

    def _mend(self, slots: Sequence[int]) -> Segment:
        """Join what came one by one, from an earlier process, or back into a gap that a forgotten chunk left."""
        above = self._segment_of[slots[0]]
        for place in range(1, len(slots)):
            segment = self._segment_of[slots[place]]
            # One that is above already holds this slot for want of knowing better, as it was set aside at a split.
            if segment.parent is not above and segment not in above.path():
                if segment.parent is not None:
                    segment.parent.kids -= 1
                if not above.ends_with(slots[place - 1]) and slots[place - 1] in above.slots:
                    above = self._split(above, slots[place - 1], place)
                segment.end += place - segment.start
                segment.start = place
                self._attach(segment, above)
                segment = self._join_parent(segment)
            above = segment
        return above

    def _split(self, segment: Segment, slot: int, place: int) -> Segment:
        """Set apart what comes after this slot, and is before `place` in the prompt; the segment that ends there."""
        upper = Segment(segment.parent, segment.start, self._now)
        upper.end, upper.first_key, upper.branches, upper.kids = place, segment.first_key, 1, 1
        upper.turns, upper.length, upper.grown_by = segment.turns, segment.length, segment.grown_by
        upper.uses = max(1, segment.uses)
        upper.gap = self._now - segment.last_use if segment.gap is None else segment.gap
        moved = []
        for own in segment.slots:
            moved.append(own)
            if own == slot:
                break
        for own in moved:
            del segment.slots[own]
        self._move(moved, upper)
        segment.parent, segment.start, segment.is_stale, segment.first_key = upper, place, True, None
        self._watch(segment)
        self._watch(upper)
        return upper

    def _join_parent(self, segment: Segment) -> Segment:
        """Make one segment of two that nothing tells apart any more; the segment that has the chunks then."""
        parent = segment.parent
        if parent is None or segment.kids or not parent.slots:
            return segment
        if parent.kids != 1 or parent.branches > (not segment.is_last):
            return segment
        self._dequeue(segment)
        self._lose(segment)
        slots, segment.slots = segment.slots, {}
        self._move(slots, parent)
        parent.end, parent.kids, parent.branches = segment.end, 0, 0
        self._enqueue(parent)
        return parent

    def _move(self, slots: Sequence[int] | dict[int, None], segment: Segment) -> None:
        for slot in slots:
            self._segment_of[slot] = segment
            segment.slots[slot] = None

    def _attach(self, segment: Segment, parent: Segment | None) -> None:
        segment.parent = parent
        if parent is not None:
            parent.kids += 1
            parent.branches += not segment.is_last

    def _emptied(self, segment: Segment) -> None:
        self._dequeue(segment)
        parent = segment.parent
        if parent is not None:
            parent.kids -= 1
            if not parent.kids and parent.slots and parent.queue is None:
                self._enqueue(parent, oldest=True)

    def _enqueue(self, segment: Segment, *, oldest: bool = False) -> None:
        self._dequeue(segment)
        if segment.slots:
            queue = segment.queue = self._oldest_first.setdefault(segment.kind, OrderedDict())
            queue[segment] = None
            if oldest:
                queue.move_to_end(segment, last=False)

    def _dequeue(self, segment: Segment) -> None:
        if segment.queue is not None:
            del segment.queue[segment]
            segment.queue = None
