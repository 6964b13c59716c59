"""The choice of a victim among the segments that no other follows, by one of several rules.

Segments of one class have the same value at the same age, and older ones a lower one. So each class has its segments
by last use, a rule compares the oldest of each, and a change of the rule moves nothing.
"""

import heapq
from enum import Enum, auto
from itertools import count

from kv_eviction.prefix.returns import CLASSES, Returns
from kv_eviction.prefix.segment import Segment

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
