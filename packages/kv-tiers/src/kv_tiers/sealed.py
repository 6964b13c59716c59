"""Structs followed by a checksum, by which a header or a record in a file is verified."""

import struct
from collections.abc import Iterable
from typing import Final

import xxhash

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
