"""Where chunks are on a medium that is divided into units, and how much of each may be left."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_core.keys import ChunkKey

from kv_tiers import chunk_header
from kv_tiers.codec import PREFIX_DIVISORS
from kv_tiers.tiers.space import PackedUnits

CUTS: Final = (1, *PREFIX_DIVISORS)
"""The steps in which a chunk is cut, as divisors of its size: first the whole chunk, then ever smaller parts."""


def cut_bytes(decoded_bytes: int, divisor: int) -> int:
    """The size of what is left of a cut payload. decoded_bytes: of the chunk. divisor: one of `CUTS`, but not 1."""
    return chunk_header.prefix_bytes(decoded_bytes // divisor, decoded_bytes)


class Extent(NamedTuple):
    """Where a payload is. units: of its entry's medium, in the order of the bytes. stored_bytes: size of the payload,
    or of what is left of it."""

    units: Sequence[int]
    stored_bytes: int


class RecoveredChunk(NamedTuple):
    """A chunk found at a restart. divisor: it is cut by this one of `CUTS`. decoded_bytes: as for `reserve`."""

    key: ChunkKey
    parent: ChunkKey | None
    entry: int
    stored_bytes: int
    units: PackedUnits
    decoded_bytes: int = 0
    divisor: int = 1


class RoomMade(NamedTuple):
    """What was done to make room.

    places: for each chunk its place, or None.
    evicted: entries whose chunks have left.
    cut: by entry of which less is stored than before: by which of `CUTS`.
    """

    places: list["Place | None"]
    evicted: list[int]
    cut: dict[int, int]


class Place(NamedTuple):
    """An entry and room that are reserved for a chunk. units, stored_bytes: as for `Extent`."""

    key: ChunkKey
    entry: int
    units: Sequence[int]
    stored_bytes: int
