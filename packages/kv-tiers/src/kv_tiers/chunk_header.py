"""The header that goes with a chunk wherever it leaves the host pool for, and the check of what comes back.

The bytes are described in docs/formats/chunk.md with a worked example. All of a chunk's identity is in its header
(which key, whose bytes, how many, their checksum), so that a file, a reply or a disk slot vouches for itself and
nothing else has to be believed.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

import xxhash
from kv_core.checksum import checksum_of
from kv_core.errors import InputError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged

MAGIC: Final = b"kvchunk\n"
VERSION: Final = 1
"""The meaning of a version never changes. A reader refuses versions that it does not know."""

HEADER_BYTES: Final = 256
MAX_KEY_BYTES: Final = 72

_FIELDS: Final = struct.Struct(f"<8sHHHHQ16s16s{MAX_KEY_BYTES}s{MAX_KEY_BYTES}s48x")
_CHECKSUM: Final = struct.Struct("<Q")
_NAMES: Final = struct.Struct("<HH")
_NAMES_BYTES_AT: Final = 12
_CHECKSUM_AT: Final = slice(40, 56)
_KEY_AT: Final = 56


@dataclass(frozen=True, slots=True)
class Header:
    """What a chunk says of itself.

    parent: the chunk before it in the prompt; None for a prompt's first.
    nbytes: of the chunk, without this header.
    format_id: what its bytes mean (`format_id`).
    checksum: `kv_core.checksum` of its bytes.
    """

    key: ChunkKey
    parent: ChunkKey | None
    nbytes: int
    format_id: bytes
    checksum: bytes


def format_id(fingerprint: str) -> bytes:
    """16 bytes that differ whenever the fingerprints of two chunk formats do."""
    return hashlib.sha256(fingerprint.encode()).digest()[:16]


def pack_header(key: ChunkKey, parent: ChunkKey | None, chunk: memoryview, format_id: bytes) -> bytes:
    """The header of a chunk whose bytes are `chunk`. It reads all of them: call it without a lock.

    Raises:
        MisuseError: as `make_header`.
    """
    return make_header(Header(key, parent, chunk.nbytes, format_id, checksum_of(chunk)))


def make_header(said: Header) -> bytes:
    """The bytes that say so.

    Raises:
        MisuseError: a key of more than `MAX_KEY_BYTES`.
    """
    key, parent = said.key, said.parent
    above = b"" if parent is None else parent
    if max(len(key), len(above)) > MAX_KEY_BYTES:
        raise MisuseError(f"a chunk's header has room for keys of {MAX_KEY_BYTES} bytes")
    fields = _FIELDS.pack(
        MAGIC, VERSION, HEADER_BYTES, len(key), len(above), said.nbytes, said.format_id, said.checksum, key, above
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(data: bytes | bytearray | memoryview) -> Header | Damaged:
    """What the header says, if it is one and whole. The chunk's bytes are not looked at."""
    if len(data) != HEADER_BYTES:
        return Damaged(f"a header of {len(data)} bytes instead of {HEADER_BYTES}")
    if bytes(data[: len(MAGIC)]) != MAGIC:
        return Damaged("no chunk's header")
    magic_to_parent = data[: _FIELDS.size]
    _, version, header_bytes, key_bytes, parent_bytes, nbytes, format_id, checksum, key, parent = _FIELDS.unpack(
        magic_to_parent
    )
    if _CHECKSUM.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(magic_to_parent):
        return Damaged("the header's own checksum is wrong")
    if version != VERSION or header_bytes != HEADER_BYTES:
        return Damaged(f"a chunk of version {version}; this release reads version {VERSION}")
    try:
        named = ChunkKey.from_bytes(key[:key_bytes])
        above = ChunkKey.from_bytes(parent[:parent_bytes]) if parent_bytes else None
    except InputError as error:
        return Damaged(str(error))
    return Header(named, above, nbytes, format_id, checksum)


def names_in(data: bytes, at: int = 0) -> tuple[bytes, bytes | None]:
    """The key and the parent in the header at `at`, as bytes for `ChunkKey`. Only of one that something vouches for."""
    key_bytes, parent_bytes = _NAMES.unpack_from(data, at + _NAMES_BYTES_AT)
    key_at, parent_at = at + _KEY_AT, at + _KEY_AT + MAX_KEY_BYTES
    parent = data[parent_at : parent_at + parent_bytes] if parent_bytes else None
    return data[key_at : key_at + key_bytes], parent


def checksum_in(header: bytes | bytearray) -> bytes:
    """The checksum of the bytes that a header vouches for. Only of one that was checked."""
    return bytes(header[_CHECKSUM_AT])


def check(
    header: bytes | bytearray | memoryview, chunk: memoryview, *, key: ChunkKey, format_id: bytes
) -> Damaged | None:
    """None if `chunk` is, byte for byte, what was stored under `key` in this format. As slow as `pack_header`."""
    read = read_header(header)
    if isinstance(read, Damaged):
        return read
    if read.key != key:
        return Damaged(f"the header names chunk {read.key.hex()}")
    if read.format_id != format_id:
        return Damaged("the bytes are of another chunk format")
    if read.nbytes != chunk.nbytes:
        return Damaged(f"a chunk of {read.nbytes} bytes instead of {chunk.nbytes}")
    if checksum_of(chunk) != read.checksum:
        return Damaged("the checksum of the bytes is wrong")
    return None
