"""Where chunks are on a medium that is divided into units, and how much of them there may be."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_core.keys import ChunkKey

from kv_tiers import chunk_header
from kv_tiers.codec import PREFIX_SHARES
from kv_tiers.tiers.space import PackedUnits

CUTS: Final = (1, *PREFIX_SHARES)
"""How a chunk becomes smaller: whole, then one of so many equal shares of its size, and then one of more."""


def cut_bytes(decoded_bytes: int, share: int) -> int:
    """The size of what is left of a payload that was cut. decoded_bytes: the chunk's. share: of `CUTS`, but not 1."""
    return chunk_header.prefix_bytes(decoded_bytes // share, decoded_bytes)


class Extent(NamedTuple):
    """Where a payload is. units: of its entry's medium, in the order of the bytes. stored_bytes: the payload's size, or
    of what is left of it."""

    units: Sequence[int]
    stored_bytes: int


class Stored(NamedTuple):
    """A chunk that was there before. share: of `CUTS`, what is left of it. decoded_bytes: as for `reserve`."""

    key: ChunkKey
    parent: ChunkKey | None
    entry: int
    stored_bytes: int
    units: PackedUnits
    decoded_bytes: int = 0
    share: int = 1


class Room(NamedTuple):
    """What was done to make room.

    places: for each chunk, unless there is none for it.
    evicted: entries whose chunks have left.
    cut: entries of which less is stored than before, and the share of `CUTS` that is left.
    """

    places: list["Place | None"]
    evicted: list[int]
    cut: dict[int, int]


class Place(NamedTuple):
    """An entry and room that are reserved for a chunk."""

    key: ChunkKey
    entry: int
    extent: Extent
