"""What is remembered of chunks that are not held: how often they were requested, and which were evicted lately.

An evicted segment is remembered by the key of its first chunk, because a policy is not told the keys of the others.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kv_core.keys import ChunkKey

from kv_eviction.prefix.segment import Segment


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
        uses_of.update(dict.fromkeys(missing[:tail], tail_uses + 1))
        for place, key in enumerate(missing):
            if (segment := self._segments.get(key)) is not None:
                again = missing[place : place + max(1, segment.end - segment.start)]
                uses_of.update(dict.fromkeys(again, segment.uses + 2))
            elif uses_of[key] == 1 and (before := self._uses.get(key) or self._uses_before.get(key)):
                uses_of[key] = before + 1
        if len(self._uses) > self._capacity:
            self._uses_before, self._uses = self._uses, {}
        self._uses.update(uses_of)
        return sum(uses == 1 for uses in uses_of.values())

    def uses(self, key: ChunkKey) -> int:
        """How often the chunk was requested, with the latest time."""
        return self._uses.get(key, 1)

    def was_requested(self, key: ChunkKey) -> bool:
        return key in self._uses or key in self._uses_before

    def evicted(self, segment: Segment, *, is_last_chunk: bool) -> None:
        """A chunk of this segment was evicted. is_last_chunk: the segment has none now."""
        self._evictions += 1
        if is_last_chunk and segment.first_key is not None:
            segment.parent = None
            segment.evicted_at = self._evictions
            self._segments[segment.first_key] = segment
            if len(self._segments) > self._capacity:
                self._segments.popitem(last=False)

    def stored(self, keys: Sequence[ChunkKey], within: int) -> bool:
        """These are held now. Returns whether one was evicted among the latest evictions, so many of them."""
        is_recent = False
        for key in keys:
            segment = self._segments.pop(key, None)
            if segment is not None and self._evictions - segment.evicted_at < within:
                is_recent = True
            self._uses.pop(key, None)
            self._uses_before.pop(key, None)
        return is_recent
