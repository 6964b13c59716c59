"""A segment of the tree of prefixes, for the prefix policy (`kv_tiers.eviction.prefix`)."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from kv_core.keys import ChunkKey

from kv_tiers.eviction.returns import Class, Sample

_STALE: Final[Class] = (0,)  # the rest of a prompt whose beginning went on differently since
_LAST: Final[Class] = (1,)  # the last chunk of a prompt; where it is partial, it is never asked for again
_FIRST_TURN: Final = 2
_RETURNED: Final = 3
_SHARED: Final = 4
_UNPLACED: Final[Class] = (5,)  # from an earlier process: what it follows is told when it is first asked for
MANY_BRANCHES: Final = 3
"""A segment with more is no session's own."""


class Segment:
    """Chunks of one prompt that were always used together. Eviction may take its tail, and growth brings it back.

    start, end: its places in the prompt, evicted chunks too. slots: of its resident chunks, but those set aside, head
    first. branches: segments that ever began where it ends; kids: those that have chunks now. returned: its session
    has come back. grown_by: chunks that were new to the world in the last request through here. gap: between its uses.
    """

    __slots__ = (
        "branches", "end", "first_key", "gap", "grown_by", "is_last", "is_stale", "kids", "kind", "last_use", "parent",
        "queue", "returned", "sample", "slots", "start", "uses",
    )  # fmt: skip

    def __init__(self, parent: "Segment | None", start: int, now: int) -> None:
        self.parent = parent
        self.start = self.end = start
        self.slots: dict[int, None] = {}
        self.first_key: ChunkKey | None = None
        self.branches = self.kids = self.uses = self.grown_by = 0
        self.is_last = self.is_stale = self.returned = False
        self.gap: float | None = None
        self.last_use = now
        self.kind = _UNPLACED
        self.sample: Sample | None = None
        self.queue: OrderedDict[Segment, None] | None = None

    def ends_with(self, slot: int) -> bool:
        return next(reversed(self.slots), None) == slot

    def path(self) -> "Iterator[Segment]":
        """This and all above it."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def classified(self, capacity_chunks: int) -> Class:
        """What is known of it, the most telling first."""
        if self.is_last and not self.uses:
            return _LAST
        if self.is_stale:
            return _STALE
        if self.branches > MANY_BRANCHES:
            gap = capacity_chunks if self.gap is None else self.gap
            return _SHARED, max(-5, min(4, round(math.log2((gap + 1) / capacity_chunks))))
        if not self.returned:
            return _FIRST_TURN, min(7, self.end.bit_length())
        return _RETURNED, (self.grown_by > 3) + (self.grown_by > 7), min(2, self.uses)
