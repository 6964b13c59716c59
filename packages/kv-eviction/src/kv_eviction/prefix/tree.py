"""The tree of prefixes: segments of chunks, each below the one that its prompts have in common.

A new prompt adds a segment below the one that it shares (`attach`); where it diverges in the middle of a segment, that
segment is split. A segment that no longer differs from its only child takes over the child's chunks (`join_parent`).
Chunks whose parents were unknown, as after a restart, get their place when they are requested (`relink`).

What segments are worth is not the tree's concern: splits and joins only keep their order up to date.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from kv_eviction.prefix.order import SegmentOrder
from kv_eviction.prefix.segment import Segment


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

    def take(self, slot: int) -> Segment:
        """Remove a slot from the index; the segment that it was in still lists it."""
        return self._segment_of.pop(slot)

    def assign(self, slots: Iterable[int], segment: Segment) -> None:
        """Append these slots to the segment, in place of the segments that they were in."""
        for slot in slots:
            self._segment_of[slot] = segment
            segment.slots[slot] = None

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
