"""The tree of prefixes: segments of chunks, each below the one that its prompts have in common.

A new prompt adds a segment below the one that it shares (`attach`); where it diverges in the middle of a segment, that
segment is split. A segment that no longer differs from its only child takes over the child's chunks (`join`). Chunks
whose parents were unknown, as after a restart, get their place when they are requested (`relink`).

What segments are worth is not the tree's concern: splits and joins only keep their queues and observations up to date.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from kv_tiers.eviction.prefix.queues import SegmentQueues
from kv_tiers.eviction.prefix.segment import Segment


class PrefixTree:
    """Amortised constant time per chunk: a call takes time per segment, of which a session has about one per turn."""

    def __init__(
        self, queues: SegmentQueues, watch: Callable[[Segment], None], unwatch: Callable[[Segment], None]
    ) -> None:
        """watch, unwatch: begin and end the observation of a segment."""
        self._queues, self._watch, self._unwatch = queues, watch, unwatch
        self._segment_of: dict[int, Segment] = {}
        self.now = 0
        """The time, in chunks ever added."""

    def segment_of(self, slot: int) -> Segment:
        return self._segment_of[slot]

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
        above = self._segment_of[slots[0]]
        for place in range(1, len(slots)):
            segment = self._segment_of[slots[place]]
            # An ancestor may hold this slot already: chunks that were excluded come back in another order.
            if segment.parent is not above and segment not in above.path():
                if segment.parent is not None and segment.slots:
                    self._queues.child_left(segment.parent)
                if not above.ends_with(slots[place - 1]) and slots[place - 1] in above.slots:
                    above = self.split(above, slots[:place])
                segment.end += place - segment.start
                segment.start = place
                self.attach(segment, above)
                segment = self.join_parent(segment)
            above = segment
        return above

    def split(self, segment: Segment, before: Sequence[int]) -> Segment:
        """Cut `segment` after the last of the slots `before`, which hold the beginning of a prompt that diverges there.
        Returns the upper part, which is new.

        The upper part takes the history: the prompt that diverged here has used it. The lower part is stale.
        """
        upper = Segment(segment.parent, segment.start, self.now)
        upper.end, upper.first_key, upper.branches = len(before), segment.first_key, 1
        upper.turns, upper.length, upper.grown_by = segment.turns, segment.length, segment.grown_by
        upper.uses = max(1, segment.uses)
        upper.gap = self.now - segment.last_use if segment.gap is None else segment.gap
        used = [slot for slot in before if self._segment_of[slot] is segment]
        first = next((slot for slot in used if slot in segment.slots), None)
        above: Iterable[int] = takewhile(lambda slot: slot != first, segment.slots) if first is not None else ()
        for slot in dict.fromkeys([*above, *used]):
            self._segment_of[slot] = upper
            if slot in segment.slots:  # else it is excluded
                del segment.slots[slot]
                upper.slots[slot] = None
        upper.children = int(bool(segment.slots))  # all that are left may be excluded
        if upper.parent is not None and upper.children and not upper.slots:
            self._queues.child_left(upper.parent)  # `segment` counted as its child, and the excluded ones do not
        segment.parent, segment.start, segment.is_stale, segment.first_key = upper, len(before), True, None
        self._watch(segment)
        self._watch(upper)
        return upper

    def join_parent(self, segment: Segment) -> Segment:
        """Join a segment to its parent if nothing distinguishes the two; returns the one that has the chunks then."""
        parent = segment.parent
        if parent is None or segment.children or not segment.slots or not parent.slots:
            return segment
        if parent.children != 1 or parent.branches > (not segment.is_last):
            return segment
        self._queues.remove(segment)
        self._unwatch(segment)
        slots, segment.slots = segment.slots, {}
        self.assign(slots, parent)
        parent.end, parent.children, parent.branches = segment.end, 0, 0
        self._queues.add(parent)
        return parent
