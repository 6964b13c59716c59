"""The directory of a named pool, by which it outlives its process: a header and one record per slot.

A record is verifiable by its checksum, which covers the slot's number too, and contains the checksum of its chunk's
bytes (xxh3_128). It is written after the bytes and wiped before they may be replaced, so at whatever instant a process
dies, a valid record refers to complete bytes. All writes are plain stores to shared memory, which survive the process
in the order in which it made them.

    header  magic 8 | version u32 | zero u32 | largest chunk_bytes u64 | slot_bytes u64 | slots u64
            | sha256(fingerprint, and all sizes if groups differ in size) 32 | xxh3_64 of the above
    record  magic 4 | version u16 | key length u16 | parent's slot u32 (0xFFFFFFFF: none) | parts u32 | chunk_bytes u64
            | number u64 | xxh3_128 of the chunk 16 | key 72 | xxh3_64 of the above, seeded with the slot

Everything is little-endian.
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey

from kv_tiers.chunk_header import seal, unseal
from kv_tiers.payload_sizes import PayloadSizes

VERSION: Final = 1
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 128
MAX_KEY_BYTES: Final = 72
NO_PARENT: Final = 0xFFFFFFFF

_MAGIC: Final = b"kvpool\r\n"
_HEADER: Final = struct.Struct("<8sIIQQQ32s")
_RECORD_MAGIC: Final = b"kvck"
_RECORD: Final = struct.Struct(f"<4sHHIIQQ16s{MAX_KEY_BYTES}s")


@dataclass(frozen=True, slots=True)
class Record:
    """One slot's committed chunk.

    parent: the slot of the chunk before it in the prompt at that time, or `NO_PARENT`.
    number: counts commits, so a later commit has a larger one.
    parts: the chunk was decoded from this many first parts of a tier's payload; 0: it is exact.
    """

    slot: int
    key: ChunkKey
    parent: int
    number: int
    digest: bytes
    parts: int = 0


def nbytes_for(slots: int) -> int:
    """Header and records, in whole pages."""
    return HEADER_BYTES + -(-slots * RECORD_BYTES // 4096) * 4096


def least_worth_first(records: Sequence[Record]) -> list[Record]:
    """Ordered by the last commit to anything that builds on the chunk, and tails before their heads."""
    by_slot = {record.slot: record for record in records}
    ordered = slots_least_worth_first(
        {slot: record.number for slot, record in by_slot.items()},
        {slot: record.parent for slot, record in by_slot.items()},
    )
    return [by_slot[slot] for slot in ordered]


def slots_least_worth_first(number_of: Mapping[int, int], parent_of: Mapping[int, int]) -> list[int]:
    """The same for chunks by slot: the number of each one's commit, and its parent's slot, or one not in use."""
    last_commit = dict(number_of)
    newest_first = sorted(number_of, key=number_of.__getitem__, reverse=True)
    for slot in newest_first:
        parent = parent_of[slot]
        if parent in last_commit:
            last_commit[parent] = max(last_commit[parent], last_commit[slot])
    return sorted(newest_first, key=last_commit.__getitem__)  # stable: equals stay in that order


class PoolDirectory:
    """Header and records in the first `nbytes_for(slots)` bytes of a pool's mapping."""

    def __init__(
        self, mapping: mmap.mmap, *, sizes: PayloadSizes, slot_bytes: int, slots: int, fingerprint: str
    ) -> None:
        self._mapping = mapping
        self._sizes = sizes
        self._slots = slots
        format_text = fingerprint if sizes.are_equal else f"{fingerprint}\0{sizes.spelled()}"
        fields = _HEADER.pack(
            _MAGIC, VERSION, 0, sizes.largest, slot_bytes, slots, hashlib.sha256(format_text.encode()).digest()
        )
        self._header = seal(fields)
        self._next_number = 0

    def is_ours(self) -> bool:
        """The header is there and has our geometry and fingerprint."""
        return self._mapping[: len(self._header)] == self._header

    def is_blank(self) -> bool:
        return not any(self._mapping[: len(self._header)])

    def begin(self) -> None:
        """Write the header over a directory of zeros."""
        self._mapping[: len(self._header)] = self._header

    def records(self) -> list[Record]:
        """All valid records, by slot. An invalid one belongs to no chunk."""
        records = [record for slot in range(self._slots) if (record := self._read(slot)) is not None]
        self._next_number = max((record.number + 1 for record in records), default=0)
        return records

    def write(self, slot: int, key: ChunkKey, parent: int, digest: bytes) -> None:
        """Record a chunk whose bytes are in its slot."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._write(slot, Record(slot, key, parent, number, digest))

    def is_approximate(self, slot: int, parts: int) -> None:
        """Record that the chunk in this slot was decoded from this many first parts."""
        record = self._read(slot)
        if record is not None:
            self._write(slot, replace(record, parts=parts))

    def move(self, slot: int, to: int, digest: bytes, parts: int) -> None:
        """The chunk of this record now has other bytes, in another slot. Its rank stays the same.

        If the process is killed at any moment, one record names the chunk, or none. Records of chunks that follow it
        name the slot that it left, which is a hint like every parent.
        """
        record = self._read(slot)
        self.wipe(slot)
        if record is not None:
            self._write(to, replace(record, digest=digest, parts=parts))

    def wipe(self, slot: int) -> None:
        """The slot's bytes are about to be replaced, or its chunk was forgotten."""
        start = HEADER_BYTES + slot * RECORD_BYTES
        self._mapping[start : start + RECORD_BYTES] = bytes(RECORD_BYTES)

    def _write(self, slot: int, record: Record) -> None:
        key, nbytes = record.key, self._sizes.of(record.key)
        numbers = record.parent, record.parts, nbytes, record.number
        fields = _RECORD.pack(_RECORD_MAGIC, VERSION, len(key), *numbers, record.digest, key)
        start = HEADER_BYTES + slot * RECORD_BYTES
        self._mapping[start : start + RECORD_BYTES] = seal(fields, seed=slot)

    def _read(self, slot: int) -> Record | None:
        start = HEADER_BYTES + slot * RECORD_BYTES
        data = self._mapping[start : start + RECORD_BYTES]
        if data[:4] != _RECORD_MAGIC:
            return None
        fields = unseal(data, seed=slot)
        if fields is None:
            return None
        _, version, key_bytes, parent, parts, chunk_bytes, number, digest, key = _RECORD.unpack(fields)
        if version != VERSION:
            return None
        try:
            record = Record(slot, ChunkKey.from_bytes(key[:key_bytes]), parent, number, digest, parts)
        except InputError:
            return None
        return record if chunk_bytes == self._sizes.of(record.key) else None
