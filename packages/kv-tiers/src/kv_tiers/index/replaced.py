"""Bytes that were replaced by better ones while they were being read.

A chunk's slot keeps its number, so read leases, which name bytes, and all others, which name a chunk, would be counted
on the same slot. When its bytes are exchanged for those of a second slot (`Residency.exchange`), the read leases move
to that slot, which from then on has the old bytes. The holder of such a lease has only the slot that it leased and the
value of `number` at that time; `bytes_at` finds its bytes from these two.
"""

from collections.abc import Sequence

from kv_core.keys import ChunkKey


class Replaced:
    """The replaced bytes of one index."""

    def __init__(self) -> None:
        self.number = 0
        """The number of the last exchange of bytes that were being read."""
        # By slot: the number of each exchange, and the slot that has had the old bytes since.
        self._moved_to: dict[int, list[tuple[int, int]]] = {}
        self._chunks: dict[int, tuple[int, ChunkKey]] = {}  # by slot with old bytes: the chunk's slot, and the chunk

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, slot: int) -> bool:
        """Whether this slot has replaced bytes."""
        return slot in self._chunks

    def add(self, slot: int, key: ChunkKey, to: int) -> None:
        """From now on the bytes of this chunk that are being read are in the slot `to`."""
        self.number += 1
        self._moved_to.setdefault(slot, []).append((self.number, to))
        self._chunks[to] = slot, key

    def drop(self, old_slot: int) -> None:
        """The replaced bytes in this slot are no longer being read."""
        slot, _ = self._chunks.pop(old_slot)
        remaining = [move for move in self._moved_to[slot] if move[1] != old_slot]
        if remaining:
            self._moved_to[slot] = remaining
        else:
            del self._moved_to[slot]

    def of(self, key: ChunkKey) -> list[int]:
        """The slots that have replaced bytes of this chunk."""
        return [old_slot for old_slot, (_, replaced_key) in self._chunks.items() if replaced_key == key]

    def keys(self) -> list[ChunkKey]:
        """The chunks that have replaced bytes."""
        return [key for _, key in self._chunks.values()]

    def key_of(self, old_slot: int) -> ChunkKey:
        """The chunk to which the replaced bytes in this slot belong."""
        return self._chunks[old_slot][1]

    def bytes_at(self, slots: Sequence[int], since: int) -> Sequence[int]:
        """Where the bytes that were in each of these slots when they were leased for reading are now.

        since: `number` at that time.
        """
        if not self._moved_to:
            return slots
        moved_to = self._moved_to
        return [next((place for number, place in moved_to.get(slot, ()) if number > since), slot) for slot in slots]
