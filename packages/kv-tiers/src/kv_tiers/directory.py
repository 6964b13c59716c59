"""What lies in the slots of a named pool, said in the pool itself, so that the next process can find it.

A header, then one record a slot. Little-endian; a record is whole only if its own checksum fits, so one that was torn by
kill -9 in the middle of a write is as good as none.

    header   magic 8s "KVPOOL\\0\\0" | version u32 | record bytes u32 | slots u64 | slot bytes u64 | fingerprint 96s
    record   magic 4s "KVRC" | version u16 | key length u16 | chunk bytes u64 | xxh3-128 of the bytes 16s | key 64s
             | xxh3-64 of all that u64, and zeros up to 128 bytes

Order is everything: a chunk's bytes are written before its record, and its record is cleared before its slot is given to
another chunk.
"""

import hashlib
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from kv_core.errors import InputError
from kv_core.keys import ChunkKey

_log = logging.getLogger(__name__)

VERSION = 1
_HEADER = struct.Struct("<8sIIQQ96s")
_HEADER_MAGIC = b"KVPOOL\0\0"
_HEADER_BYTES = 4096
_RECORD = struct.Struct("<4sHHQ16s64s")
_RECORD_MAGIC = b"KVRC"
_RECORD_BYTES = 128
_CHECKSUM = struct.Struct("<Q")
_NOTHING = bytes(_RECORD_BYTES)


@dataclass(frozen=True, slots=True)
class Record:
    """A chunk that a former process left in `slot`. Its bytes are still to be compared with `digest`."""

    slot: int
    key: ChunkKey
    nbytes: int
    digest: bytes


class Directory:
    """The records of one pool. Knows nothing of the bytes they speak of."""

    def __init__(self, view: memoryview, *, slots: int, slot_bytes: int, fingerprint: str) -> None:
        """view: the pool's first bytes, page-aligned and at least `Directory.nbytes(slots)` of them."""
        self._view = view
        self._slots = slots
        named = hashlib.sha256(fingerprint.encode()).hexdigest().encode()
        wanted = _HEADER.pack(_HEADER_MAGIC, VERSION, _RECORD_BYTES, slots, slot_bytes, named)
        found = bytes(view[: _HEADER.size])
        if found != wanted:
            if any(found):
                _log.warning("the named host pool was made for other chunks or sizes; it starts empty")
            view[: _HEADER.size] = bytes(_HEADER.size)  # no header while records of another shape are being cleared
            view[_HEADER_BYTES:] = bytes(len(view) - _HEADER_BYTES)
            view[: _HEADER.size] = wanted

    @staticmethod
    def nbytes(slots: int) -> int:
        return _HEADER_BYTES + slots * _RECORD_BYTES

    def records(self) -> Iterator[Record]:
        """Every record that is whole. Of two with one key (a torn past) the first."""
        seen: set[ChunkKey] = set()
        for slot in range(self._slots):
            record = self._read(slot)
            if record is not None and record.key not in seen:
                seen.add(record.key)
                yield record

    def write(self, slot: int, key: ChunkKey, data: memoryview) -> None:
        """Say that `slot` holds the chunk. Its bytes must be there already."""
        body = _RECORD.pack(_RECORD_MAGIC, VERSION, len(key), len(data), checksum(data), key)
        at = self._at(slot)
        self._view[at : at + _RECORD.size + 8] = body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    def clear(self, slot: int) -> None:
        """Say that `slot` holds nothing."""
        at = self._at(slot)
        self._view[at : at + _RECORD_BYTES] = _NOTHING

    def close(self) -> None:
        self._view.release()

    def _at(self, slot: int) -> int:
        return _HEADER_BYTES + slot * _RECORD_BYTES

    def _read(self, slot: int) -> Record | None:
        at = self._at(slot)
        body = bytes(self._view[at : at + _RECORD.size])
        (said,) = _CHECKSUM.unpack_from(self._view, at + _RECORD.size)
        magic, version, key_length, nbytes, digest, key = _RECORD.unpack(body)
        if magic != _RECORD_MAGIC or version != VERSION or said != xxhash.xxh3_64_intdigest(body):
            return None
        try:
            return Record(slot, ChunkKey.from_bytes(key[:key_length]), nbytes, digest)
        except InputError:
            return None


def checksum(data: memoryview) -> bytes:
    """16 bytes over a chunk's. Releases the GIL, and runs at the speed of memory."""
    return xxhash.xxh3_128_digest(data)
