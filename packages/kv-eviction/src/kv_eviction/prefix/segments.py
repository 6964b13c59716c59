"""The order of eviction by segments: the tree of prefixes, and a rule that chooses among its leaves.

A lookup touches segments, not chunks.
"""

from collections.abc import Sequence
from typing import Final

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy
from kv_eviction.prefix.absent import AbsentChunks
from kv_eviction.prefix.order import Rule, SegmentOrder
from kv_eviction.prefix.returns import LAST, Returns, class_of, growth_of
from kv_eviction.prefix.segment import Segment
from kv_eviction.prefix.tree import PrefixTree

_REFUSED_BELOW: Final = 0.8
"""What a chunk has to be worth to take its victim's place, of the victim's worth. With 1 a full tier can freeze."""


class SegmentsPolicy(EvictionPolicy):
    """An `EvictionPolicy` by a rule that may change at any time. `requested` comes before `used` and `added`.

    Amortised constant time per chunk; a segment's victim takes time for each class. Memory: a segment for each run of
    chunks, and what `AbsentChunks` needs.
    """

    def __init__(self, capacity_chunks: int, returns: Returns) -> None:
        self._capacity = capacity_chunks
        self._returns = returns
        self.order = SegmentOrder(returns)
        self._tree = PrefixTree(self.order)
        self._excluded: set[int] = set()
        self._absent = AbsentChunks(capacity_chunks)
        self._newest: Segment | None = None  # the chunks added last, until `extended` tells what they follow
        self._offer: Segment | None = None  # the segment whose last chunk is offered as the victim
        self.growth = 0
        """Of the latest request."""
        self._once = 0  # about how many chunks were requested once

    def requested(self, keys: Sequence[ChunkKey], slots: Sequence[int], now: int, growth: int | None = None) -> None:
        """A request has this prompt, of which the leading chunks are held, in `slots`. growth: None: as seen from
        here."""
        self._tree.now = now
        missing = keys[len(slots) :]
        tail = tail_uses = 0
        if slots and missing:
            deepest = self._tree.segment_of(slots[-1])
            if deepest.ends_with(slots[-1]):
                tail, tail_uses = max(0, deepest.end - len(slots)), deepest.uses + 1
        chunks_new = self._absent.requested(missing, tail=tail, tail_uses=tail_uses)
        self.growth = growth_of(chunks_new, continues=chunks_new < len(keys)) if growth is None else growth

    def refuses(self, key: ChunkKey, *, is_last: bool) -> bool:
        if self.order.rule is not Rule.REFUSE or self.victim() is None or self._offer is None:
            return False
        uses = self._absent.uses(key)
        new = self._returns.worth(LAST if is_last and uses == 1 else class_of(uses, self.growth), 0)
        age = self._tree.now - self._offer.last_use
        return new < _REFUSED_BELOW * self._returns.worth(self._offer.chunk_class, age)

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        segment = self._newest = Segment(None, 0, self._tree.now)
        segment.first_key = keys[0]
        uses = self._absent.uses(keys[0])
        segment.uses, segment.chunk_class = uses - 1, class_of(uses, self.growth)
        segment.again = self._absent.stored(keys, within=self._capacity - self._once)
        self._tree.assign(slots, segment)
        segment.end = len(slots)
        self.order.add(segment)
        if not segment.again:
            self._once += len(slots)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        if not slots:
            return
        deepest = self._tree.deepest(slots)
        if deepest.is_last:
            deepest = self._tree.join_parent(deepest)
        if len(slots) < len(keys) and not deepest.ends_with(slots[-1]) and slots[-1] in deepest.slots:
            deepest = self._tree.split(deepest, slots)
        for segment in deepest.path():
            if not segment.again:
                self._once -= len(segment.slots)
                segment.again = True
            segment.uses += 1
            segment.last_use = self._tree.now
            segment.chunk_class = class_of(segment.uses + 1, self.growth)
            self.order.add(segment)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int], *, has_end: bool = True) -> None:
        """Find the place of the chunks added last: they continue a segment, or begin one below it.

        The last of them becomes a segment of its own (`tail`): if it is a partial chunk, it is never requested again.

        has_end: whether the last of the keys is the prompt's last.
        """
        newest, self._newest = self._newest, None
        if newest is None or not newest.slots:
            return
        positions = [position for position, slot in enumerate(slots) if slot in newest.slots]
        if len(positions) < len(newest.slots):  # the call is for another prompt; these were added alone, as if adopted
            return
        self._offer = None
        start = positions[0]
        *body, last_slot = newest.slots
        if not has_end:
            body.append(last_slot)
        newest.start, newest.end = start, start + len(body)
        parent = self._tree.deepest(slots[:start]) if start else None
        tail_parent: Segment | None
        if parent is not None and self._continues(parent, start, slots[start - 1]):
            tail_parent = self._append(newest, body, parent)
        else:
            if parent is not None and not parent.ends_with(slots[start - 1]):
                parent = self._tree.split(parent, slots[:start])
            tail_parent = self._branch_off(newest, body, parent)
        if has_end:
            self._add_tail(newest, last_slot, keys[start + len(body)] if body else newest.first_key, tail_parent)
        if slots[-1] != last_slot:  # the chunks filled a gap that forgotten ones had left, and others follow them
            self._tree.relink(slots)

    def removed(self, slot: int) -> None:
        segment = self._tree.take(slot)
        self._once -= not segment.again
        was_evicted = segment is self._offer and segment.ends_with(slot)
        if not was_evicted:
            self._offer = None
        if slot in self._excluded:
            self._excluded.remove(slot)
            return
        del segment.slots[slot]
        if not segment.slots:
            self._offer = None
            self.order.emptied(segment)
        if was_evicted:  # a chunk that was forgotten is not expected to return
            self._absent.evicted(segment, is_last_chunk=not segment.slots)

    def victim(self) -> int | None:
        if self._offer is None:
            self._offer = self.order.least(self._tree.now)
        return None if self._offer is None else next(reversed(self._offer.slots))

    def exclude(self, slot: int) -> None:
        self._offer = None
        segment = self._tree.segment_of(slot)
        self._excluded.add(slot)
        del segment.slots[slot]
        if not segment.slots:
            self.order.emptied(segment)

    def reinsert(self, slots: Sequence[int]) -> None:
        self._offer = None
        for slot in slots:
            self._excluded.remove(slot)
            segment = self._tree.segment_of(slot)
            if not segment.slots and segment.parent is not None:
                segment.parent.children += 1
            segment.slots[slot] = None
            segment.last_use = self._tree.now
            self.order.add(segment)

    # Where new chunks belong.

    def _continues(self, parent: Segment, position: int, last_slot: int) -> bool:
        """Whether chunks from `position` on continue this segment rather than begin a new turn of its session: its
        evicted tail has returned, or a request stores its prompt in pieces.
        """
        if parent.children or not parent.ends_with(last_slot):
            return False
        return parent.end > position or (parent.is_last and not parent.uses)

    def _append(self, newest: Segment, body: Sequence[int], parent: Segment) -> Segment:
        """Add the new chunks to the segment that they continue; returns that segment."""
        segment = self._tree.join_parent(parent) if parent.is_last else parent
        segment.is_last = False
        segment.end = max(segment.end, newest.end)
        for slot in body:
            del newest.slots[slot]
        self._tree.assign(body, segment)
        self.order.add(segment)
        return segment

    def _branch_off(self, newest: Segment, body: Sequence[int], parent: Segment | None) -> Segment | None:
        """Attach the new chunks below `parent` as a branch; returns the segment that their last chunk follows."""
        if not body:
            return parent
        self._tree.attach(newest, parent)
        return newest

    def _add_tail(self, newest: Segment, slot: int, key: ChunkKey | None, parent: Segment | None) -> None:
        """Move the last of the new chunks into a segment of its own, below `parent`."""
        tail = Segment(None, newest.end, self._tree.now)
        tail.end, tail.is_last, tail.first_key, tail.uses = newest.end + 1, True, key, newest.uses
        tail.again = newest.again
        tail.chunk_class = newest.chunk_class if newest.uses else LAST
        newest.slots.pop(slot, None)
        self._tree.assign([slot], tail)
        self._tree.attach(tail, parent)
        self.order.add(tail)
