"""The choice of a victim: among the segments without a resident successor, the one with the lowest value.

Segments of one kind have the same value at the same age, and older ones a lower one. So each kind has a queue ordered
by last use, and only the oldest of each queue, a few dozen, are compared.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from kv_tiers.eviction.prefix.returns import Kind
from kv_tiers.eviction.prefix.segment import Segment


class SegmentQueues:
    def __init__(self) -> None:
        self._oldest_first: dict[Kind, OrderedDict[Segment, None]] = {}

    def add(self, segment: Segment, *, oldest: bool = False) -> None:
        """Queue a segment as the latest of its kind, or the oldest. One without chunks is in no queue."""
        self.remove(segment)
        if segment.slots:
            queue = segment.queue = self._oldest_first.setdefault(segment.kind, OrderedDict())
            queue[segment] = None
            if oldest:
                queue.move_to_end(segment, last=False)

    def remove(self, segment: Segment) -> None:
        if segment.queue is not None:
            del segment.queue[segment]
            segment.queue = None

    def left(self, segment: Segment) -> None:
        """Its last chunk has left."""
        self.remove(segment)
        if segment.parent is not None:
            self.child_left(segment.parent)

    def child_left(self, parent: Segment) -> None:
        """It has a child less that has chunks. Without other children it may be chosen again."""
        parent.children -= 1
        if not parent.children and parent.slots and parent.queue is None:
            self.add(parent, oldest=True)

    def least_worth(self, now: int, worth: Callable[[Kind, int], float]) -> Segment | None:
        """worth: of one of this kind, at this age (`Returns.worth`). Ties are broken by the last use."""
        best, least = None, math.inf
        for kind, queue in self._oldest_first.items():
            while queue:
                segment = next(iter(queue))
                if not segment.children:
                    its_worth = worth(kind, now - segment.last_use)
                    if best is None or (its_worth, segment.last_use) < (least, best.last_use):
                        best, least = segment, its_worth
                    break
                self.remove(segment)  # until its last child has left; then it is the oldest again
        return best
