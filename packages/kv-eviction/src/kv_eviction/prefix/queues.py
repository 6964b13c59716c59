"""The choice of a victim: among the segments without a resident successor, the one with the lowest value.

Segments of one kind have the same value at the same age, and older ones a lower one. So each kind has a queue ordered
by last use, and only the oldest of each queue, a few dozen, are compared.
"""

import math
from collections import OrderedDict
from collections.abc import Callable

from kv_eviction.prefix.returns import Kind
from kv_eviction.prefix.segment import Segment


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

    def emptied(self, segment: Segment) -> None:
        """The segment's last chunk has left."""
        self.remove(segment)
        if segment.parent is not None:
            self.child_emptied(segment.parent)

    def child_emptied(self, parent: Segment) -> None:
        """A child of this segment has lost its last chunk. If it was the only one, the segment may be chosen again."""
        parent.children -= 1
        if not parent.children and parent.slots and parent.queue is None:
            self.add(parent, oldest=True)

    def least_worth(self, now: int, worth: Callable[[Kind, int], float]) -> Segment | None:
        """The segment with the lowest value; among equals, the one used longest ago.

        worth: the value of a kind at an age (`Returns.worth`).
        """
        cheapest, lowest = None, math.inf
        for kind, queue in self._oldest_first.items():
            while queue:
                segment = next(iter(queue))
                if not segment.children:
                    value = worth(kind, now - segment.last_use)
                    if cheapest is None or (value, segment.last_use) < (lowest, cheapest.last_use):
                        cheapest, lowest = segment, value
                    break
                self.remove(segment)  # until its last child is empty; then it is the oldest again
        return cheapest
