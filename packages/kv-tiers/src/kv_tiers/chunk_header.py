"""The header stored with a chunk wherever it leaves the host pool, and the verification of what is read back.

docs/formats/chunk.md specifies the bytes with a worked example. The header holds a chunk's whole identity (key, format,
sizes, encoding, checksums), so a file, a reply or a disk slot can be verified by itself.

Behind a header is the *payload*: the chunk's bytes, or their encoding by a codec. It is never larger than the chunk.
Its checksum is computed in pieces, so that the first pieces can be verified without the rest.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import xxhash
from kv_core.errors import InputError, MisuseError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged

# Structs followed by a checksum, by which a header or a record in a file is verified.

SEAL_BYTES: Final = 8
_U64: Final = struct.Struct("<Q")


def seal(fields: bytes, seed: int = 0) -> bytes:
    """The fields, followed by XXH3 of 64 bits over them. seed: what else they are bound to, such as their position."""
    return fields + _U64.pack(xxhash.xxh3_64_intdigest(fields, seed))


def unseal(data: bytes | bytearray | memoryview, seed: int = 0) -> bytes | None:
    """The fields; None if the checksum behind them is wrong, or there is none."""
    fields, checksum = bytes(data[:-SEAL_BYTES]), data[-SEAL_BYTES:]
    if len(checksum) < SEAL_BYTES or _U64.unpack(checksum)[0] != xxhash.xxh3_64_intdigest(fields, seed):
        return None
    return fields


def intact(data: memoryview, starts: Iterable[int], nbytes: int) -> list[bool]:
    """For each of these positions, whether `unseal` would find valid fields there; takes half the time for many."""
    digest, size = xxhash.xxh3_64_intdigest, nbytes - SEAL_BYTES
    return [digest(data[start : start + size]) == _U64.unpack_from(data, start + size)[0] for start in starts]


MAGIC: Final = b"kvchunk\n"
VERSION: Final = 2
"""The meaning of a version never changes. A reader refuses versions that it does not know."""

HEADER_BYTES: Final = 384
MAX_KEY_BYTES: Final = 72
MAX_CODEC_BYTES: Final = 16
MAX_PIECES: Final = 16
PAGE_BYTES: Final = 4096

_FIELDS: Final = struct.Struct(
    f"<8sHHHHQ16s16s{MAX_KEY_BYTES}s{MAX_KEY_BYTES}sQ{MAX_CODEC_BYTES}s16sHHxxxx{8 * (MAX_PIECES - 1)}s8x"
)
_NAMES: Final = struct.Struct("<HH")
_NAMES_BYTES_AT: Final = 12
_KEY_AT: Final = 56
DECODED_BYTES_AT: Final = 16
STORED_BYTES_AT: Final = 200


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a chunk's header.

    key: the chunk's key.
    parent: the key of the chunk before it in the prompt; None for a prompt's first.
    decoded_bytes: size of the chunk.
    stored_bytes: size of the payload after this header; never more than `decoded_bytes`.
    format_id: identifies the format of the chunk's bytes (`format_id`).
    codec: name of the payload's codec; "" if the payload is the chunk's bytes.
    checksum: `kv_core.hashing` of the payload; of an encrypted one, its tag, which only a key can verify.
    decoded_checksum: the same of the chunk's bytes; None if the codec is lossy.
    encryption: what is needed to decrypt the payload besides a key (`kv_tiers.encryption`); empty if it is not
        encrypted. There are no `pieces` then.
    pieces: 8-byte checksums (`piece_bytes`) of the payload's first piece, its first two, …, all but the last. Empty if
        the payload is a single piece, or if its writer computed one checksum of the whole.
    """

    key: ChunkKey
    parent: ChunkKey | None
    decoded_bytes: int
    stored_bytes: int
    format_id: bytes
    codec: str
    checksum: bytes
    decoded_checksum: bytes | None
    pieces: tuple[bytes, ...]
    encryption: bytes = b""


@dataclass(frozen=True, slots=True)
class WholeOnly:
    """A payload without checksums of its pieces, as an encrypted one is: it can only be verified as a whole."""


def format_id(fingerprint: str) -> bytes:
    """16 bytes that differ whenever the fingerprints of two chunk formats do."""
    return hashlib.sha256(fingerprint.encode()).digest()[:16]


def piece_bytes(decoded_bytes: int) -> int:
    """The size of a payload's pieces, in whole pages: at most `MAX_PIECES` of them make a chunk."""
    return -(-decoded_bytes // (MAX_PIECES * PAGE_BYTES)) * PAGE_BYTES


def prefix_bytes(wanted_bytes: int, decoded_bytes: int) -> int:
    """How much of a payload must be read so that its first `wanted_bytes` can be checked; the payload may be shorter.

    decoded_bytes: size of the chunk.
    """
    piece = piece_bytes(decoded_bytes)
    return min(-(-wanted_bytes // piece) * piece, decoded_bytes)


def pack_header(
    key: ChunkKey, parent: ChunkKey | None, chunk: memoryview, format_id: bytes, checksum: bytes | None = None
) -> bytes:
    """The header of a chunk whose payload is its own bytes. It reads all of them: call it without a lock. Raises
    `MisuseError`: as `make_header`.

    checksum: of the bytes, if known; they are then not read, and there are no checksums of pieces.
    """
    pieces: tuple[bytes, ...] = ()
    if checksum is None:
        checksum, pieces = checksums_of(chunk, chunk.nbytes)
    return make_header(Header(key, parent, chunk.nbytes, chunk.nbytes, format_id, "", checksum, checksum, pieces))


def checksums_of(payload: memoryview, decoded_bytes: int) -> tuple[bytes, tuple[bytes, ...]]:
    """The checksum of a payload, and those of its leading pieces: one pass over the bytes.

    decoded_bytes: size of the chunk that it is the payload of.
    """
    running = xxhash.xxh3_128()
    piece = piece_bytes(decoded_bytes)
    pieces = []
    for start in range(0, payload.nbytes, piece):
        if start:
            pieces.append(running.digest()[8:])
        running.update(payload[start : start + piece])
    return running.digest(), tuple(pieces)


def make_header(header: Header) -> bytes:
    """Encode a header. Raises `MisuseError`: a key of more than `MAX_KEY_BYTES`, or the name of a codec of more than
    `MAX_CODEC_BYTES`."""
    parent = b"" if header.parent is None else header.parent
    if max(len(header.key), len(parent)) > MAX_KEY_BYTES:
        raise MisuseError(f"a chunk's header has room for keys of {MAX_KEY_BYTES} bytes")
    if len(header.codec) > MAX_CODEC_BYTES or not header.codec.isascii():
        raise MisuseError(f"a chunk's header has room for {MAX_CODEC_BYTES} letters of a codec's name")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        len(header.key),
        len(parent),
        header.decoded_bytes,
        header.format_id,
        header.checksum,
        header.key,
        parent,
        header.stored_bytes,
        header.codec.encode(),
        header.decoded_checksum or bytes(16),
        len(header.pieces),
        len(header.encryption),
        header.encryption or b"".join(header.pieces),
    )
    return seal(fields)


def read_header(data: bytes | bytearray | memoryview) -> Header | Damaged:
    """Parse and verify a header. The payload is not examined."""
    if len(data) != HEADER_BYTES:
        return Damaged(f"a header of {len(data)} bytes instead of {HEADER_BYTES}")
    if bytes(data[: len(MAGIC)]) != MAGIC:
        return Damaged("not a chunk's header")
    fields = data[: _FIELDS.size]
    (
        _,
        version,
        header_bytes,
        key_bytes,
        parent_bytes,
        decoded_bytes,
        format_id,
        checksum,
        key,
        parent,
        stored_bytes,
        codec,
        decoded_checksum,
        pieces,
        encryption_bytes,
        table,
    ) = _FIELDS.unpack(fields)
    if version != VERSION or header_bytes != HEADER_BYTES:
        return Damaged(f"a chunk of version {version}; this release reads version {VERSION}")
    if unseal(data) is None:
        return Damaged("the header's own checksum is wrong")
    try:
        chunk_key = ChunkKey.from_bytes(key[:key_bytes])
        parent_key = ChunkKey.from_bytes(parent[:parent_bytes]) if parent_bytes else None
        codec_name = codec.rstrip(b"\0").decode("ascii")
    except (InputError, UnicodeDecodeError) as error:
        return Damaged(str(error))
    if not stored_bytes <= decoded_bytes or (not codec_name and stored_bytes != decoded_bytes):
        return Damaged(f"a payload of {stored_bytes} bytes for a chunk of {decoded_bytes}")
    if encryption_bytes > len(table) or (encryption_bytes and pieces):
        return Damaged(f"{encryption_bytes} bytes about its encryption beside {pieces} checksums of pieces")
    if pieces not in (0, -(-stored_bytes // piece_bytes(decoded_bytes)) - 1 if stored_bytes else 0):
        return Damaged(f"checksums of {pieces} pieces in a payload of {stored_bytes} bytes")
    return Header(
        chunk_key,
        parent_key,
        decoded_bytes,
        stored_bytes,
        format_id,
        codec_name,
        checksum,
        decoded_checksum if any(decoded_checksum) else None,
        tuple(table[8 * number : 8 * number + 8] for number in range(pieces)),
        table[:encryption_bytes],
    )


def names_in(data: bytes, offset: int = 0) -> tuple[bytes, bytes | None]:
    """The key and the parent in the header at `offset`, as bytes for `ChunkKey`. The header must be valid."""
    key_bytes, parent_bytes = _NAMES.unpack_from(data, offset + _NAMES_BYTES_AT)
    key_at, parent_at = offset + _KEY_AT, offset + _KEY_AT + MAX_KEY_BYTES
    parent = data[parent_at : parent_at + parent_bytes] if parent_bytes else None
    return data[key_at : key_at + key_bytes], parent


def stored_bytes_in(header: bytes | bytearray | memoryview, offset: int = 0) -> int:
    """The size of the payload in the header at `offset`. If the header may be damaged, check the size before use."""
    return int(_U64.unpack_from(header, offset + STORED_BYTES_AT)[0])


def decoded_bytes_in(header: bytes | bytearray | memoryview) -> int:
    """The size of the chunk in the header. If the header may be damaged, check the size before use."""
    return int(_U64.unpack_from(header, DECODED_BYTES_AT)[0])


def verify(
    header: bytes | bytearray | memoryview,
    payload: memoryview,
    *,
    key: ChunkKey,
    format_id: bytes,
    decoded_bytes: int,
    checksum: bytes = b"",
) -> Header | Damaged:
    """The header if `payload` is, byte for byte, what was stored under `key` in this format: still encoded, if it was.
    An encrypted payload is still to be verified, by decrypting it.

    As slow as `pack_header`. decoded_bytes: size of a chunk. checksum: of the payload, if already computed.
    """
    parsed = _read_for(header, key, format_id, decoded_bytes)
    if isinstance(parsed, Damaged):
        return parsed
    if parsed.stored_bytes != payload.nbytes:
        return Damaged(f"a payload of {payload.nbytes} bytes instead of {parsed.stored_bytes}")
    if not parsed.encryption and (checksum or checksum_of(payload)) != parsed.checksum:
        return Damaged("the checksum of the bytes is wrong")
    return parsed


def verify_prefix(
    header: bytes | bytearray | memoryview, prefix: memoryview, *, key: ChunkKey, format_id: bytes, decoded_bytes: int
) -> Header | Damaged | WholeOnly:
    """Like `verify`, for the first bytes of a payload: `prefix_bytes` of it, or all of it if it is shorter."""
    parsed = _read_for(header, key, format_id, decoded_bytes)
    if isinstance(parsed, Damaged):
        return parsed
    if parsed.encryption:
        return WholeOnly()
    if prefix.nbytes >= parsed.stored_bytes:
        return verify(header, prefix, key=key, format_id=format_id, decoded_bytes=decoded_bytes)
    pieces, remainder = divmod(prefix.nbytes, piece_bytes(decoded_bytes))
    if remainder or not pieces:
        return Damaged(f"{prefix.nbytes} bytes of {parsed.stored_bytes}, which is not a whole number of pieces")
    if not parsed.pieces:
        return WholeOnly()
    if checksum_of(prefix)[8:] != parsed.pieces[pieces - 1]:
        return Damaged("the checksum of the first bytes is wrong")
    return parsed


def check(
    header: bytes | bytearray | memoryview, chunk: memoryview, *, key: ChunkKey, format_id: bytes
) -> Damaged | None:
    """None if `chunk` is, unencoded, what was stored under `key` in this format. As slow as `pack_header`."""
    parsed = verify(header, chunk, key=key, format_id=format_id, decoded_bytes=chunk.nbytes)
    if isinstance(parsed, Damaged):
        return parsed
    encoded = "encrypted" if parsed.encryption else parsed.codec
    return Damaged(f"the bytes are encoded ({encoded})") if encoded else None


def _read_for(
    header: bytes | bytearray | memoryview, key: ChunkKey, format_id: bytes, decoded_bytes: int
) -> Header | Damaged:
    parsed = read_header(header)
    if isinstance(parsed, Damaged):
        return parsed
    if parsed.key != key:
        return Damaged(f"the header names chunk {parsed.key.hex()}")
    if parsed.format_id != format_id:
        return Damaged("the bytes are of another chunk format")
    if parsed.decoded_bytes != decoded_bytes:
        return Damaged(f"a chunk of {parsed.decoded_bytes} bytes instead of {decoded_bytes}")
    return parsed
