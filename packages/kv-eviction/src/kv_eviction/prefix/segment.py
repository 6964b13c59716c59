"""A segment: a node of the tree of prefixes, and what is known about the requests that used it."""

from collections.abc import Iterator

from kv_core.keys import ChunkKey

from kv_eviction.prefix.returns import LAST


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
