"""The common parts of the protocols between processes and between hosts: frames, strict decoding, and keys in bulk.

A frame is a header of five bytes (length of the body as u32, little-endian; protocol version as u8) and one MessagePack
array whose first element names the message. The header is the same in every version of every protocol, so that either
side can tell which one the other speaks.
"""

import struct
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from kv_core.errors import InputError, MisuseError
from kv_core.keys import KEY_BYTES, KEY_VERSION, ChunkKey

HEADER: Final = struct.Struct("<IB")
MAX_KEYS: Final = 1 << 20
"""Keys in one message. A chunk has one for each group of layers and shard: 8 million tokens in chunks of 256, with 4
groups of 8 shards."""

MAX_NAME: Final = 256
"""Characters of a name."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=1 << 12)]


M = TypeVar("M")
_ENCODER: Final = msgspec.msgpack.Encoder()


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message with a fixed number of elements, all of them required."""


class Keys(Message):
    """Keys of one length, one after another."""

    key_bytes: Annotated[int, msgspec.Meta(ge=0, le=max(KEY_BYTES))] = 0
    joined: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS * max(KEY_BYTES))] = b""

    def unpack(self) -> list[ChunkKey]:
        """Raises `InputError`: these are not keys of this release."""
        nbytes, joined = self.key_bytes, self.joined
        if not joined:
            return []
        if nbytes not in KEY_BYTES or len(joined) % nbytes or len(joined) > nbytes * MAX_KEYS:
            raise InputError(f"{len(joined)} bytes are not up to {MAX_KEYS} keys of {nbytes} bytes")
        if set(joined[::nbytes]) != {KEY_VERSION}:
            raise InputError(f"a chunk key of a version other than {KEY_VERSION}")
        return [ChunkKey(key) for (key,) in struct.iter_unpack(f"{nbytes}s", joined)]


def pack_keys(keys: Sequence[ChunkKey]) -> Keys:
    """Raises `MisuseError`: the keys differ in length. Those of one prompt do not, because one scheme made them."""
    if not keys:
        return Keys()
    nbytes, joined = len(keys[0]), b"".join(keys)
    if nbytes * len(keys) != len(joined) or set(map(len, keys)) != {nbytes}:
        raise MisuseError("the keys of one call have digests of one length")
    return Keys(nbytes, joined)


def by_length(keys: Sequence[ChunkKey], at_most: int = MAX_KEYS) -> list[list[ChunkKey]]:
    """The keys of each message. Engines may name prefixes by different algorithms, and an eviction or a drain is of the
    chunks of all, but the keys of a message have one length."""
    found: dict[int, list[ChunkKey]] = {}
    for key in keys:
        found.setdefault(len(key), []).append(key)
    return [alike[start : start + at_most] for alike in found.values() for start in range(0, len(alike), at_most)]


def framed(message: Message, version: int) -> bytes:
    """The message as it crosses a socket. version: of the protocol."""
    body = _ENCODER.encode(message)
    return HEADER.pack(len(body), version) + body


def decoded(decoder: "msgspec.msgpack.Decoder[M]", body: bytes | bytearray, what_not: str) -> M:
    """The message behind a header. what_not: begins the error's text. Raises `InputError`: it is none of the decoder's,
    within its bounds."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{what_not}: {error}") from None


def check_header(header: bytes | bytearray | memoryview, *, version: int, max_bytes: int) -> int:
    """The length of the message behind a frame's header. Raises `InputError`: another version of the protocol, or a
    message longer than `max_bytes`."""
    nbytes, frame_version = HEADER.unpack_from(header)
    if frame_version != version:
        raise InputError(
            f"this side speaks version {version} of the protocol, the other {frame_version}: run the same release of "
            "kv-tiers on both"
        )
    if nbytes > max_bytes:
        raise InputError(f"a message of {nbytes} bytes; at most {max_bytes} are allowed")
    return int(nbytes)
