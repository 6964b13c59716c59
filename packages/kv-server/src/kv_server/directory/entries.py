"""What a server writes into the directory: an entry for each batch of changes, and periodically one without any.

A chunk is named by 64 bits of a hash of its key. Two keys may share a name, which costs a read that finds nothing: what
is read is verified by its whole key. A set of names is divided into `SHARDS` by their first bits. The sum of a shard is
the exclusive or of its names, so adding or removing a name changes it in the same way, in any order; the root is the
exclusive or of all sums. Sets of equal size and root are taken to be equal.

Any client that may write into the directory may write anything, so sizes are bounded, and an entry is used only as a
hint: which chunks are worth requesting from which host (docs/peers.md). With TLS an entry is signed
(`kv_server.directory.signatures`).
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from kv_core.errors import ConfigError, InputError
from kv_remote.host_port import HostPort, read_host_port
from kv_remote.messages import Message

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
    """Raises `ValueError`: this is no whole number of names."""
    return np.frombuffer(packed, "<u8").astype(np.uint64, copy=False)


VERSION: Final = 2
MAX_CHANGES: Final = 1 << 12
"""Names in one entry. If more have changed, the entry has none, and readers query the server itself."""
MAX_ENTRY_BYTES: Final = MAX_CHANGES * NAME_BYTES + (1 << 10)
MAX_CHAIN_BYTES: Final = 8 << 10
"""Certificates and signature, around an entry."""
HOST_BYTES: Final = 16

HostId = Annotated[bytes, msgspec.Meta(min_length=HOST_BYTES, max_length=HOST_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Root = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
Packed = Annotated[bytes, msgspec.Meta(max_length=MAX_CHANGES * NAME_BYTES)]


class Entry(Message):
    """A server's entry.

    version: of this format.
    host: identifies the cache of this server, until its process ends.
    address: a host and a port where peers read from it.
    sequence: the number of the last change, this entry's if it has any. A change for which there is no entry leaves a
        gap in the numbers.
    count, root: of all names that it holds after this entry (`root_of`).
    added, removed: names, 8 bytes each, little-endian. None is in both.
    leaves: it shuts down, and holds nothing any more.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    host: HostId
    address: Annotated[str, msgspec.Meta(max_length=280)]
    sequence: Number
    count: Number
    root: Root
    added: Packed = b""
    removed: Packed = b""
    leaves: bool = False

    def names(self) -> tuple[Names, Names]:
        """The names added and removed."""
        return unpack(self.added), unpack(self.removed)

    def host_port(self) -> HostPort:
        return read_host_port(self.address, "an address in the directory")


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    return _ENCODER.encode(entry)


def decode(written: bytes) -> Entry:
    """Raises `InputError`: this is not a valid entry."""
    if len(written) > MAX_ENTRY_BYTES:
        raise InputError(f"an entry of {len(written)} bytes; at most {MAX_ENTRY_BYTES} are allowed")
    try:
        entry = _DECODER.decode(written)
        entry.names()
        entry.host_port()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, ConfigError) as error:
        raise InputError(f"not an entry of a directory: {error}") from None
    return entry
