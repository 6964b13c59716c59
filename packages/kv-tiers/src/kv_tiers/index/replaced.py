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
        """Of the last exchange of bytes that were being read."""
        self._of: dict[int, list[tuple[int, int]]] = {}  # by slot: the numbers of exchanges, and where old bytes are
        self._chunks: dict[int, tuple[int, ChunkKey]] = {}  # by where they are: the slot and chunk that they were of

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
        self._of.setdefault(slot, []).append((self.number, to))
        self._chunks[to] = slot, key

    def drop(self, at: int) -> None:
        """The replaced bytes in this slot are no longer being read."""
        slot, _ = self._chunks.pop(at)
        left = [one for one in self._of[slot] if one[1] != at]
        if left:
            self._of[slot] = left
        else:
            del self._of[slot]

    def of(self, key: ChunkKey) -> list[int]:
        """The slots that have replaced bytes of this chunk."""
        return [at for at, (_, its_key) in self._chunks.items() if its_key == key]

    def keys(self) -> list[ChunkKey]:
        """The chunks that have replaced bytes."""
        return [key for _, key in self._chunks.values()]

    def key_of(self, at: int) -> ChunkKey:
        """The chunk to which the replaced bytes in this slot belong."""
        return self._chunks[at][1]

    def bytes_at(self, slots: Sequence[int], since: int) -> Sequence[int]:
        """Where the bytes that were in each of these slots when they were leased for reading are now.

        since: `number` at that time.
        """
        if not self._of:
            return slots
        return [next((at for number, at in self._of.get(slot, ()) if number > since), slot) for slot in slots]
