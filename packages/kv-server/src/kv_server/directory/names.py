"""Names of chunks in the directory, and the sums by which two sets of names are compared.

A name is 64 bits of a hash of the key. Two keys may share a name, which costs a read that finds nothing: what is read
is verified by its whole key. A set is divided into `SHARDS` by the first bits of its names. The sum of a shard is the
exclusive or of its names, so adding or removing a name changes it in the same way, in any order; the root is the
exclusive or of all sums. Sets of equal size and root are taken to be equal.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

Names = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

NAME_BYTES: Final = 8
SHARDS: Final = 1 << 12
SUMS_BYTES: Final = SHARDS * NAME_BYTES
_SHARD_SHIFT: Final = np.uint64(64 - 12)


def names_of(keys: Sequence[bytes]) -> Names:
    """The names of these keys, in their order."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))


def shards_of(names: Names) -> npt.NDArray[np.int64]:
    return (names >> _SHARD_SHIFT).astype(np.int64)


def no_sums() -> Names:
    return np.zeros(SHARDS, np.uint64)


def toggle(sums: Names, names: Names) -> None:
    """Account for names that were added, or removed."""
    np.bitwise_xor.at(sums, shards_of(names), names)


def root_of(sums: Names) -> bytes:
    return pack(np.bitwise_xor.reduce(sums, keepdims=True))


def pack(names: Names) -> bytes:
    return names.astype("<u8", copy=False).tobytes()


def unpack(packed: bytes) -> Names:
    """
    Raises:
        ValueError: this is no whole number of names.
    """
    return np.frombuffer(packed, "<u8").astype(np.uint64, copy=False)
