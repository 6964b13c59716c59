"""A segment of the tree of prefixes, for the prefix policy (`kv_tiers.eviction.prefix`)."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from kv_core.keys import ChunkKey

from kv_tiers.eviction.returns import Kind, Sample, Trait


class Role(IntEnum):
    """What a segment is to its prompts; each comes back at ages of its own."""

    STALE = 0  # the rest of a prompt whose beginning went on differently since
    LAST = 1  # the last chunk of a prompt; where it is partial, it is never asked for again
    FIRST_TURN = 2
    RETURNED = 3
    SHARED = 4
    UNPLACED = 5  # from an earlier process: what it follows is told when it is first asked for


MANY_BRANCHES: Final = 3
"""A segment with more is no session's own."""
_MAX_TURNS: Final = 8
"""After so many a session counts as an old one."""


class Segment:
    """Chunks of one prompt that were always used together. Eviction may take its tail, and growth brings it back.

    start, end: its places in the prompt, evicted chunks too. slots: of its resident chunks, but those set aside, head
    first. branches: segments that ever began where it ends; kids: those that have chunks now. gap: between its uses.
    Of the last request through here that was its session's own, turns: how often the session had come back by then;
    length: of the prompt; grown_by: chunks that were new to the world.
    """

    __slots__ = (
        "branches", "end", "first_key", "gap", "grown_by", "is_last", "is_stale", "kids", "kind", "last_use", "length",
        "parent", "queue", "sample", "slots", "start", "turns", "uses",
    )  # fmt: skip

    def __init__(self, parent: "Segment | None", start: int, now: int) -> None:
        self.parent = parent
        self.start = self.end = start
        self.slots: dict[int, None] = {}
        self.first_key: ChunkKey | None = None
        self.branches = self.kids = self.uses = self.turns = self.length = self.grown_by = 0
        self.is_last = self.is_stale = False
        self.gap: float | None = None
        self.last_use = now
        self.kind = Kind(Role.UNPLACED, 0)
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

    def role(self) -> Role:
        if self.is_last and not self.uses:
            return Role.LAST
        if self.is_stale:
            return Role.STALE
        if self.branches > MANY_BRANCHES:
            return Role.SHARED
        return Role.RETURNED if self.turns else Role.FIRST_TURN

    def traits(self, role: Role) -> list[Trait]:
        """What is known of it besides, each value as good as the few beside it.

        Length and growth are told once for all and once for the role: all of a first turn is new, so there they say
        the same, and later they do not.
        """
        length, grown_by = _half_octave(self.length), _half_octave(self.grown_by)
        return [
            (0, length),
            (1, grown_by),
            (2, min(self.turns, _MAX_TURNS)),
            (3, _half_octave(self.uses)),
            (4, _half_octave(self.branches)),
            (5, -1 if self.gap is None else round(math.log2(self.gap + 1))),
            (0, length, role),
            (1, grown_by, role),
        ]


def _half_octave(count: int) -> int:
    return int(2 * math.log2(count + 1))
