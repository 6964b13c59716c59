"""A segment: a node of the tree of prefixes, and what is known about the requests that used it."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from kv_core.keys import ChunkKey

from kv_eviction.prefix.returns import Kind, Sample, Trait


class Role(IntEnum):
    """How prompts use a segment. Each role has its own distribution of return ages."""

    STALE = 0  # the rest of a prompt whose beginning has since continued differently
    LAST = 1  # the last chunk of a prompt; if partial, it is not requested again
    FIRST_TURN = 2
    RETURNED = 3
    SHARED = 4
    UNPLACED = 5  # from an earlier process; its parent becomes known when it is requested


MAX_OWN_BRANCHES: Final = 3
"""A segment with more branches belongs to no single session."""
_MAX_TURNS: Final = 8
"""A session with more turns is treated as one with this many."""


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
    is_stale: a later prompt diverged before it.

    Its history:

    uses: how often it was used again.
    last_use: when it was last used, in chunks ever added.
    gap: the mean time between its uses (each step the geometric mean with the latest), None before the second.
    turns, length, grown_by: of the last request through it that belonged to one session: how often the session had
        returned, the chunks of the prompt, and how many of these had not been stored before.

    Fields used by learning and choosing: kind, sample, queue.
    """

    __slots__ = (
        "branches", "children", "end", "first_key", "gap", "grown_by", "is_last", "is_stale", "kind", "last_use",
        "length", "parent", "queue", "sample", "slots", "start", "turns", "uses",
    )  # fmt: skip

    def __init__(self, parent: "Segment | None", start: int, now: int) -> None:
        self.parent = parent
        self.start = self.end = start
        self.slots: dict[int, None] = {}
        self.first_key: ChunkKey | None = None
        self.branches = self.children = self.uses = self.turns = self.length = self.grown_by = 0
        self.is_last = self.is_stale = False
        self.gap: float | None = None
        self.last_use = now
        self.kind = Kind(Role.UNPLACED, 0)
        self.sample: Sample | None = None
        self.queue: OrderedDict[Segment, None] | None = None

    @property
    def is_shared(self) -> bool:
        return self.branches > MAX_OWN_BRANCHES

    def ends_with(self, slot: int) -> bool:
        return next(reversed(self.slots), None) == slot

    def path(self) -> "Iterator[Segment]":
        """This segment and all its ancestors, upwards."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def used(self, now: int) -> None:
        """Record that the segment was used again."""
        self.uses += 1
        gap = now - self.last_use
        self.gap = gap if self.gap is None else math.sqrt(self.gap * gap + 1)

    def role(self) -> Role:
        if self.is_last and not self.uses:
            return Role.LAST
        if self.is_stale:
            return Role.STALE
        if self.is_shared:
            return Role.SHARED
        return Role.RETURNED if self.turns else Role.FIRST_TURN

    def traits(self, role: Role) -> list[Trait]:
        """The segment's traits besides its role, in steps coarse enough that each value has many samples.

        Length and growth are learnt both over all roles and for this role: in a first turn everything is new, so the
        two are equal there, and in later turns they differ.
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
