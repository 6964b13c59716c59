"""The contract of a codec, which makes a chunk smaller on its way to a tier and restores it on its way back.

A codec is called concurrently by a lane's threads, with memory that the lane owns. It allocates nothing as large as a
chunk, and retains nothing. Its input for decoding has passed its checksum but may have been written by another version,
or by anyone with write access to the tier: it must never write beyond `out` or trust a size in its input.

Chunks name their codec in their headers (docs/formats/chunk.md). So a tier may hold chunks of several codecs, and a
lane reads every chunk whose codec is installed, whichever codec it writes. docs/extend/codec.md shows how to add one.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol, runtime_checkable

from kv_tiers.tier import TierContext


class CodecError(Exception):
    """The input is not an encoding of this codec. The chunk is `Damaged`."""


class Codec(Protocol):
    """Safe to call from several threads at once."""

    name: str
    """Its entry point, and its name in every header: at most 16 ASCII letters. The meaning of an encoding never
    changes; another encoding needs another name."""

    is_lossless: bool
    """Decoding returns exactly the encoded bytes, which the lane verifies. Otherwise only sizes and the payload's
    checksum are verified, and the codec is used only where the settings ask for it."""

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        """Write the encoded chunk to the start of `out`; returns its size in bytes. None: it does not fit into `out`,
        so encoding saves nothing, and the chunk is stored unencoded."""

    def decode(self, payload: memoryview, out: memoryview) -> None:
        """Write the whole chunk to `out`, whatever options it was encoded with. Raises `CodecError`: this is not an
        encoded chunk of `len(out)` bytes."""


PREFIX_DIVISORS: Final = (2, 4)
"""A payload's first part ends within a quarter of the chunk's size, its first two within half, so that a reader knows
how much to request."""
APPROXIMATE_SHARE: Final = PREFIX_DIVISORS[-1]
"""The first part ends within the chunk's size divided by this."""


@runtime_checkable
class DecodesPrefixes(Protocol):
    """Optional capability of a `Codec`: decoding the first bytes of a payload to an approximation of the chunk."""

    def decode_prefix(self, prefix: memoryview, out: memoryview) -> int:
        """Like `decode`, from the parts of the payload that are complete in `prefix`. Returns the number of those
        parts. Raises `CodecError`: it is not a prefix of an encoded chunk of `len(out)` bytes, or is shorter than the
        first part."""


@runtime_checkable
class EncodesFirst(Protocol):
    """Optional capability of a `Codec`: encoding a prompt's first chunk, which begins with the attention sinks, more
    exactly."""

    def encode_first(self, chunk: memoryview, out: memoryview) -> int | None:
        """Like `encode`, for a chunk that may be its prompt's first: no chunk before it is known."""


@runtime_checkable
class CodesShards(Protocol):
    """Optional capability of a `Codec`: chunks of each group of layers and each shard have a codec of their own. The
    lane looks it up for every chunk, and never calls this codec's `encode` and `decode`."""

    def of_shard(self, group: int, shard: int) -> Codec | None:
        """The codec for chunks with this group and shard in their keys. None: they are stored unencoded."""


CodecFactory = Callable[[Mapping[str, object], TierContext], Codec]
"""The object of an entry point in the group `kv_tiers.codecs`. Arguments: the options that the user wrote (without
`type`; empty if it only decodes), and the context of the chunks. It raises `ConfigError` for invalid options, and if a
library that it needs is missing."""
