"""The order of eviction by segments: the tree of prefixes, and a rule that chooses among its leaves.

A lookup touches segments, not chunks.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import count, islice, repeat, takewhile
from typing import Final

from kv_core.keys import ChunkKey

from kv_eviction.policy import EvictionPolicy
from kv_eviction.prefix.returns import CLASSES, LAST, Returns, class_of, ended, growth_of

# A segment: a node of the tree of prefixes, and what is known about the requests that used it.


class Segment:
    """Chunks of one prompt that have always been used together. Eviction removes its tail first, and growth restores
    it.

    Its place in the tree:

    parent: the segment before it in the prompt; None at the root.
    start, end: its positions in the prompt, in chunks, including evicted ones.
    slots: slots of its resident chunks except excluded ones, head first. A dict, for order and fast removal.
    first_key: the key of the first chunk with which it began as a segment, by which it is recognised after its
        eviction.
    branches: how many segments have ever begun where it ends.
    children: how many of those have chunks now.
    is_last: it is the last chunk of a prompt.

    Its history:

    uses: how often it was requested again.
    again: it was requested again while it was held, or soon after: ARC's second list.
    evicted_at: when its last chunk was evicted, in evictions.
    last_use: when it was last requested, in chunks requested.
    chunk_class: of its chunks (`returns.class_of`).
    """

    __slots__ = (
        "again", "branches", "children", "chunk_class", "end", "evicted_at", "first_key", "is_last", "last_use",
        "parent", "slots", "start", "uses",
    )  # fmt: skip

    def __init__(self, parent: "Segment | None", start: int, now: int) -> None:
        self.parent = parent
        self.start = self.end = start
        self.slots: dict[int, None] = {}
        self.first_key: ChunkKey | None = None
        self.branches = self.children = self.uses = 0
        self.is_last = self.again = False
        self.evicted_at = 0
        self.last_use = now
        self.chunk_class = LAST

    def ends_with(self, slot: int) -> bool:
        return next(reversed(self.slots), None) == slot

    def path(self) -> "Iterator[Segment]":
        """This segment and all its ancestors, upwards."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent


# The choice of a victim among the segments that no other follows, by one of several rules.
#
# Segments of one class have the same value at the same age, and older ones a lower one. So each class has its segments
# by last use, a rule compares the oldest of each, and a change of the rule moves nothing.

_Entry = tuple[int, int, int, Segment]


class Rule(Enum):
    LRU = auto()  # the segment that was used longest ago
    ARC = auto()  # the same, of those requested once or of those requested again (`SegmentOrder.prefers_once`)
    WORTH = auto()  # the one that is worth least
    REFUSE = auto()  # as WORTH, and a chunk that is worth less than its victim is not stored


class SegmentOrder:
    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._oldest_first: list[list[_Entry]] = [[] for _ in range(CLASSES)]
        self._clean_up_at = [64] * CLASSES
        self._number = count()
        self.rule = Rule.LRU
        self.prefers_once = False
        """For the rule ARC: whether the victim is one of those requested once, if there are any."""

    def add(self, segment: Segment) -> None:
        """A segment has come, was used, has changed its class, or no other follows it any more."""
        if segment.children or not segment.slots:
            return
        heap = self._oldest_first[segment.chunk_class]
        # Of those used at the same time the tail of a prompt goes first.
        heapq.heappush(heap, (segment.last_use, -segment.start, next(self._number), segment))
        if len(heap) > self._clean_up_at[segment.chunk_class]:
            heap[:] = {id(entry[3]): entry for entry in heap if _is_valid(entry, segment.chunk_class)}.values()
            heapq.heapify(heap)
            self._clean_up_at[segment.chunk_class] = 64 + 2 * len(heap)

    def emptied(self, segment: Segment) -> None:
        """The segment's last chunk has left."""
        if segment.parent is not None:
            self.child_emptied(segment.parent)

    def child_emptied(self, parent: Segment) -> None:
        """A child of this segment has lost its last chunk. If it was the only one, the segment may be chosen again."""
        parent.children -= 1
        self.add(parent)

    def least(self, now: int) -> Segment | None:
        """The segment that loses its last chunk first."""
        oldest = []
        for chunk_class, heap in enumerate(self._oldest_first):
            while heap and not _is_valid(heap[0], chunk_class):
                heapq.heappop(heap)
            if heap:
                oldest.append(heap[0])
        if not oldest:
            return None
        if self.rule is Rule.LRU:
            return min(oldest)[3]
        if self.rule is Rule.ARC:
            return min(oldest, key=lambda entry: (entry[3].again == self.prefers_once, entry))[3]
        worth = self._returns.worth
        return min(oldest, key=lambda entry: (worth(entry[3].chunk_class, now - entry[0]), entry))[3]


def _is_valid(entry: _Entry, chunk_class: int) -> bool:
    """Whether the segment has stayed what it was when this was entered."""
    last_use, _, _, segment = entry
    return (
        segment.last_use == last_use
        and segment.chunk_class == chunk_class
        and not segment.children
        and bool(segment.slots)
    )


# What is remembered of chunks that are not held: how often they were requested, and which were evicted lately.
#
# An evicted segment is remembered by the key of its first chunk, because a policy is not told the keys of the others.


class AbsentChunks:
    """At most as many segments as the tier has chunks, and a number for each chunk that the latest requests lacked."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._segments: OrderedDict[ChunkKey, Segment] = OrderedDict()  # by the first chunk, the oldest first
        self._uses: dict[ChunkKey, int] = {}  # how often chunks were requested that were never evicted
        self._uses_before: dict[ChunkKey, int] = {}
        self._evictions = 0

    def requested(self, missing: Sequence[ChunkKey], *, tail: int = 0, tail_uses: int = 0) -> int:
        """A request lacks these chunks of its prompt. Returns how many of them were never requested before.

        tail: so many leading ones were evicted from the segment that the prompt continues, which had so many uses.
        """
        uses_of = dict.fromkeys(missing, 1)
        chunks_new = len(uses_of)
        if tail or not self._are_new(missing):  # a new prompt is what comes most often
            uses_of.update(dict.fromkeys(missing[:tail], tail_uses + 1))
            for place, key in enumerate(missing):
                if (segment := self._segments.get(key)) is not None:
                    again = missing[place : place + max(1, segment.end - segment.start)]
                    uses_of.update(dict.fromkeys(again, segment.uses + 2))
                elif uses_of[key] == 1 and (before := self._uses.get(key) or self._uses_before.get(key)):
                    uses_of[key] = before + 1
            chunks_new = sum(uses == 1 for uses in uses_of.values())
        if len(self._uses) > self._capacity:
            self._uses_before, self._uses = self._uses, {}
        self._uses.update(uses_of)
        return chunks_new

    def _are_new(self, keys: Sequence[ChunkKey]) -> bool:
        return all(known.keys().isdisjoint(keys) for known in (self._segments, self._uses, self._uses_before))

    def uses(self, key: ChunkKey) -> int:
        """How often the chunk was requested, with the latest time."""
        return self._uses.get(key, 1)

    def was_requested(self, key: ChunkKey) -> bool:
        return key in self._uses or key in self._uses_before

    def evicted(self, segment: Segment, chunks: int, *, is_last_chunk: bool) -> None:
        """Chunks of this segment were evicted. is_last_chunk: the segment has none now."""
        self._evictions += chunks
        if is_last_chunk and segment.first_key is not None:
            segment.parent = None
            segment.evicted_at = self._evictions
            self._segments[segment.first_key] = segment
            if len(self._segments) > self._capacity:
                self._segments.popitem(last=False)

    def stored(self, keys: Sequence[ChunkKey], within: int) -> bool:
        """These are held now. Returns whether one was evicted among the latest evictions, so many of them."""
        for known in (self._uses, self._uses_before):
            deque(map(known.pop, keys, repeat(None)), maxlen=0)
        if self._segments.keys().isdisjoint(keys):
            return False
        back = [segment for key in keys if (segment := self._segments.pop(key, None)) is not None]
        return any(self._evictions - segment.evicted_at < within for segment in back)


# The tree of prefixes: segments of chunks, each below the one that its prompts have in common.
#
# A new prompt adds a segment below the one that it shares (`attach`); where it diverges in the middle of a segment,
# that segment is split. A segment that no longer differs from its only child takes over the child's chunks
# (`join_parent`). Chunks whose parents were unknown, as after a restart, get their place when they are requested
# (`relink`).
#
# What segments are worth is not the tree's concern: splits and joins only keep their order up to date.


class PrefixTree:
    """Amortised constant time per chunk: a call takes time per segment, of which a session has about one per turn."""

    def __init__(self, order: SegmentOrder) -> None:
        self._order = order
        self._segment_of: dict[int, Segment] = {}
        self.now = 0
        """The time, in chunks requested."""

    def segment_of(self, slot: int) -> Segment:
        return self._segment_of[slot]

    def segments(self) -> Iterable[Segment]:
        """The segment of each chunk."""
        return self._segment_of.values()

    def take(self, slots: Iterable[int]) -> None:
        """Remove slots from the index; the segments that they were in still list them."""
        deque(map(self._segment_of.pop, slots), maxlen=0)

    def assign(self, slots: Collection[int], segment: Segment) -> None:
        """Append these slots to the segment, in place of the segments that they were in."""
        self._segment_of.update(dict.fromkeys(slots, segment))
        segment.slots.update(dict.fromkeys(slots))

    def attach(self, segment: Segment, parent: Segment | None) -> None:
        segment.parent = parent
        if parent is not None:
            parent.children += bool(segment.slots)
            parent.branches += not segment.is_last

    def deepest(self, slots: Sequence[int]) -> Segment:
        """The segment of the last of these slots, which hold a prompt from its first chunk on.

        All of them are linked afterwards.
        """
        deepest = self._segment_of[slots[-1]]
        *_, root = deepest.path()
        return deepest if root is self._segment_of[slots[0]] else self.relink(slots)

    def relink(self, slots: Sequence[int]) -> Segment:
        """Link a prompt that was added chunk by chunk, from an earlier process, or whose forgotten chunk returned."""
        parent = self._segment_of[slots[0]]
        for position in range(1, len(slots)):
            segment = self._segment_of[slots[position]]
            # An ancestor may hold this slot already: chunks that were excluded come back in another order.
            if segment.parent is not parent and segment not in parent.path():
                if segment.parent is not None and segment.slots:
                    self._order.child_emptied(segment.parent)
                if not parent.ends_with(slots[position - 1]) and slots[position - 1] in parent.slots:
                    parent = self.split(parent, slots[:position])
                segment.end += position - segment.start
                segment.start = position
                self.attach(segment, parent)
                segment = self.join_parent(segment)
            parent = segment
        return parent

    def split(self, segment: Segment, prefix_slots: Sequence[int]) -> Segment:
        """Cut `segment` after the last of `prefix_slots`, which hold the beginning of a prompt that diverges there.
        Returns the upper part, which is new.

        Both have the same history until the prompt that diverges uses the upper part.
        """
        upper = Segment(segment.parent, segment.start, self.now)
        upper.end, upper.first_key, upper.branches = len(prefix_slots), segment.first_key, 1
        upper.uses, upper.last_use, upper.chunk_class, upper.again = (
            segment.uses,
            segment.last_use,
            segment.chunk_class,
            segment.again,
        )
        upper_slots = [slot for slot in prefix_slots if self._segment_of[slot] is segment]
        first_resident = next((slot for slot in upper_slots if slot in segment.slots), None)
        preceding: Iterable[int] = ()
        if first_resident is not None:
            preceding = takewhile(lambda slot: slot != first_resident, segment.slots)
        for slot in dict.fromkeys([*preceding, *upper_slots]):
            self._segment_of[slot] = upper
            if slot in segment.slots:  # else it is excluded
                del segment.slots[slot]
                upper.slots[slot] = None
        upper.children = int(bool(segment.slots))  # 0 if all chunks of the lower part are excluded
        if upper.parent is not None and upper.children and not upper.slots:
            self._order.child_emptied(upper.parent)  # `segment` counted as its child; `upper`, without slots, does not
        segment.parent, segment.start, segment.first_key = upper, len(prefix_slots), None
        self._order.add(segment)
        self._order.add(upper)
        return upper

    def join_parent(self, segment: Segment) -> Segment:
        """Join a segment to its parent if nothing distinguishes them; returns the segment that has the chunks then."""
        parent = segment.parent
        if parent is None or segment.children or not segment.slots or not parent.slots:
            return segment
        if parent.children != 1 or parent.branches > (not segment.is_last):
            return segment
        slots, segment.slots = segment.slots, {}
        self.assign(slots, parent)
        parent.end, parent.children, parent.branches = segment.end, 0, 0
        self._order.add(parent)
        return parent


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

    def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        if not slots:
            return
        self._offer = None
        deepest = self._tree.segment_of(slots[-1])
        for segment in deepest.path():
            if segment.last_use == deepest.last_use:  # another request may have used what both have in common since
                segment.chunk_class = ended(segment.chunk_class)
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
        segment = self._tree.segment_of(slot)
        if segment is self._offer and segment.ends_with(slot):
            self.evicted((slot,))
            return
        self._offer = None
        self._tree.take((slot,))
        self._once -= not segment.again
        if slot in self._excluded:
            self._excluded.remove(slot)
            return
        del segment.slots[slot]
        if not segment.slots:
            self.order.emptied(segment)

    def evicted(self, slots: Sequence[int]) -> None:
        if (segment := self._offer) is None or not slots:
            return
        self._tree.take(slots)
        for slot in slots:
            del segment.slots[slot]
        self._once -= 0 if segment.again else len(slots)
        if not segment.slots:
            self._offer = None
            self.order.emptied(segment)
        # Unlike a chunk that was forgotten, these may return.
        self._absent.evicted(segment, len(slots), is_last_chunk=not segment.slots)

    def victims(self, at_most: int) -> Iterable[int]:
        if self.victim() is None or self._offer is None:
            return ()
        return islice(reversed(self._offer.slots), at_most)

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
