"""The prefix policy: the tree, what is learnt from it, and the choice, updated at every arrival, use and departure.

Prompts that share a prefix form a tree, which shows what a list of chunks cannot: whether a prefix is shared by many,
how often a session has returned, and how much its last turn added. How likely a segment is to be used again at which
age is learnt online; nothing is tuned to a workload.

A lookup touches segments, not chunks. An evicted segment is remembered by the key of its first chunk, as a ghost, so
that its return is observed although it was a miss.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.keys import ChunkKey

from kv_eviction.prefix.queues import SegmentQueues
from kv_eviction.prefix.returns import Factor, Returns
from kv_eviction.prefix.segment import MAX_OWN_BRANCHES, Role, Segment
from kv_eviction.prefix.tree import PrefixTree


@dataclass(slots=True)
class _Session:
    """What a request that stores more of its prompt reveals about its session.

    turns: how often the session has returned.
    stored_before: how many of the chunks just added had been stored before.
    """

    turns: int
    stored_before: int


class PrefixPolicy:
    """Amortised constant time per chunk; a victim takes time for each queue, of which there are a few dozen.

    Memory: a segment for each run of chunks, and at most as many ghosts and samples as chunks.
    """

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._returns = Returns(capacity_chunks)
        self._queues = SegmentQueues()
        self._tree = PrefixTree(self._queues, self._watch, self._unwatch)
        self._excluded: set[int] = set()
        self._ghosts: OrderedDict[ChunkKey, Segment] = OrderedDict()  # by the key of the first chunk, oldest first
        self._returned_ghosts: list[Segment] = []  # the ghosts to which the chunks added last belong
        self._newest: Segment | None = None  # the chunks added last, until `extended` tells what they follow
        self._offer: Segment | None = None  # the segment whose last chunk is offered as the victim

    def added(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        self._tree.now += len(slots)
        self._returns.advance(self._tree.now)
        self._returned_ghosts = [ghost for key in keys if (ghost := self._ghosts.pop(key, None)) is not None]
        for ghost in self._returned_ghosts:
            self._observe_return(ghost)
        segment = self._newest = Segment(None, 0, self._tree.now)
        segment.first_key = keys[0]
        self._tree.assign(slots, segment)
        segment.end = len(slots)
        self._queues.add(segment)

    def used(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        self._offer = None
        deepest = self._tree.deepest(slots)
        if deepest.is_last:
            deepest = self._tree.join_parent(deepest)
        # A prompt that leaves the deepest segment before its middle is another session's: this one has not returned.
        reached_middle = 2 * (len(slots) - deepest.start) >= len(deepest.slots)
        for segment in deepest.path():
            if segment is not deepest or reached_middle:
                self._observe_return(segment)
                segment.last_use = self._tree.now
                self._watch(segment)

    def extended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
        """Find the place of the chunks added last: they continue a segment, or begin one below it.

        The last of them becomes a segment of its own (`tail`): if it is a partial chunk, it is never requested again.
        """
        newest, self._newest = self._newest, None
        if newest is None or not newest.slots:
            return
        positions = [position for position, slot in enumerate(slots) if slot in newest.slots]
        if len(positions) < len(newest.slots):  # the call is for another prompt; these were added alone, as if adopted
            return
        self._offer = None
        start = positions[0]
        *body, last_slot = newest.slots
        newest.start, newest.end = start, start + len(body)
        session = _Session(
            turns=1 + max((ghost.turns for ghost in self._returned_ghosts), default=-1),
            stored_before=sum(max(1, ghost.end - ghost.start) for ghost in self._returned_ghosts),
        )
        parent = self._tree.deepest(slots[:start]) if start else None
        tail_parent: Segment | None
        if parent is not None and self._continues(parent, start, slots[start - 1]):
            tail_parent = self._append(newest, body, parent, session)
        else:
            if parent is not None and not parent.ends_with(slots[start - 1]):
                parent = self._tree.split(parent, slots[:start])
            tail_parent = self._branch_off(newest, body, parent, session)
        tail = self._add_tail(newest, last_slot, keys[start + len(body)] if body else newest.first_key, tail_parent)
        self._record_session(tail, session.turns, max(0, len(body) + 1 - session.stored_before))
        if slots[-1] != last_slot:  # the chunks filled a gap that forgotten ones had left, and others follow them
            self._tree.relink(slots)

    def removed(self, slot: int) -> None:
        segment = self._tree.take(slot)
        was_evicted = segment is self._offer and segment.ends_with(slot)
        if not was_evicted:
            self._offer = None
        if slot in self._excluded:
            self._excluded.remove(slot)
            return
        del segment.slots[slot]
        if segment.slots:
            return
        self._offer = None
        self._queues.emptied(segment)
        if was_evicted and segment.first_key is not None:  # a chunk that was forgotten is not expected to return
            segment.parent = None
            self._ghosts[segment.first_key] = segment
            if len(self._ghosts) > self._capacity:
                self._unwatch(self._ghosts.popitem(last=False)[1])

    def victim(self) -> int | None:
        if self._offer is None:
            self._offer = self._queues.least_worth(self._tree.now, self._returns.worth)
        return None if self._offer is None else next(reversed(self._offer.slots))

    def exclude(self, slot: int) -> None:
        self._offer = None
        segment = self._tree.segment_of(slot)
        self._excluded.add(slot)
        del segment.slots[slot]
        if not segment.slots:
            self._queues.emptied(segment)

    def reinsert(self, slots: Sequence[int]) -> None:
        self._offer = None
        for slot in slots:
            self._excluded.remove(slot)
            segment = self._tree.segment_of(slot)
            if not segment.slots and segment.parent is not None:
                segment.parent.children += 1
            segment.slots[slot] = None
            segment.last_use = self._tree.now
            self._queues.add(segment)

    # Where new chunks belong.

    def _continues(self, parent: Segment, position: int, last_slot: int) -> bool:
        """Whether chunks from `position` on continue this segment rather than begin a new turn of its session: its
        evicted tail has returned, or a request stores its prompt in pieces.
        """
        if parent.children or not parent.ends_with(last_slot):
            return False
        return parent.end > position or (parent.is_last and not parent.uses)

    def _append(self, newest: Segment, body: Sequence[int], parent: Segment, session: _Session) -> Segment:
        """Add the new chunks to the segment that they continue; returns that segment."""
        session.turns = max(session.turns, parent.turns + (not parent.is_last))
        if parent.is_last:
            session.stored_before -= parent.grown_by  # chunks that earlier pieces of this request added are new as well
            segment = self._tree.join_parent(parent)
        else:
            session.stored_before += parent.end - newest.start  # the tail that was evicted
            segment = parent
        segment.is_last = False
        segment.end = max(segment.end, newest.end)
        self._queues.remove(newest)
        self._tree.assign(body, segment)
        return segment

    def _branch_off(
        self, newest: Segment, body: Sequence[int], parent: Segment | None, session: _Session
    ) -> Segment | None:
        """Attach the new chunks below `parent` as a branch; returns the segment that their last chunk follows."""
        if self._returned_ghosts:
            newest.uses, newest.gap = self._returned_ghosts[-1].uses, self._returned_ghosts[-1].gap
        if parent is not None and parent.branches < MAX_OWN_BRANCHES:
            session.turns = max(session.turns, parent.turns + 1)
        if not body:
            self._queues.remove(newest)
            return parent
        self._tree.attach(newest, parent)
        self._watch(newest)
        return newest

    def _add_tail(self, newest: Segment, slot: int, key: ChunkKey | None, parent: Segment | None) -> Segment:
        """Move the last of the new chunks into a segment of its own, below `parent`; returns that segment."""
        tail = Segment(None, newest.end, self._tree.now)
        tail.end, tail.is_last, tail.first_key = newest.end + 1, True, key
        newest.slots.pop(slot, None)
        self._tree.assign([slot], tail)
        self._tree.attach(tail, parent)
        self._watch(tail)
        return tail

    # What is learnt.

    def _watch(self, segment: Segment) -> None:
        """Observe when the segment returns next, under its present traits."""
        self._unwatch(segment)
        segment.sample = self._returns.watch(*self._classify(segment), self._tree.now)
        self._queues.add(segment)

    def _unwatch(self, segment: Segment) -> None:
        if segment.sample is not None:
            self._returns.stop_watching(segment.sample)
            segment.sample = None

    def _observe_return(self, segment: Segment) -> None:
        if segment.sample is not None:
            self._returns.observe_return(segment.sample, self._tree.now)
            segment.sample = None
        segment.used(self._tree.now)

    def _classify(self, segment: Segment) -> tuple[Role, list[Factor]]:
        role = segment.role()
        factors = self._returns.factors(segment.traits(role))
        segment.kind = self._returns.kind(role, factors)
        return role, factors

    def _record_session(self, tail: Segment, turns: int, grown_by: int) -> None:
        """Record the session's traits in all segments of the request, up to the first that many sessions share."""
        for segment in tail.path():
            if segment.is_shared:
                return
            segment.turns, segment.length, segment.grown_by = turns, tail.end, grown_by
            role, factors = self._classify(segment)
            if segment.sample is not None:
                segment.sample.role, segment.sample.factors = role, factors
            self._queues.add(segment)
