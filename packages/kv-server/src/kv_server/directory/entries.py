"""What a server writes into the directory: an entry for each batch of changes, and periodically one without any.

Any client that may write into the directory may write anything, so sizes are bounded, and an entry is used only as a
hint: which chunks are worth requesting from which host (docs/peers.md). With TLS an entry is signed
(`kv_server.directory.signatures`).
"""

from typing import Annotated, Final

import msgspec
from kv_core.errors import ConfigError, InputError
from kv_tiers.host_port import HostPort, read_host_port
from kv_tiers.messages import Message

from kv_server.directory.names import NAME_BYTES, Names, unpack

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
    count, root: of all names that it holds after this entry (`names.root_of`).
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

    @property
    def has_changes(self) -> bool:
        return bool(self.added or self.removed)

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
    """
    Raises:
        InputError: this is not a valid entry.
    """
    if len(written) > MAX_ENTRY_BYTES:
        raise InputError(f"an entry of {len(written)} bytes; at most {MAX_ENTRY_BYTES} are allowed")
    try:
        entry = _DECODER.decode(written)
        entry.names()
        entry.host_port()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, ConfigError) as error:
        raise InputError(f"not an entry of a directory: {error}") from None
    return entry
