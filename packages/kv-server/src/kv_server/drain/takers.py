"""Hosts that take chunks from one that leaves, and their answers to offers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from kv_core.keys import ChunkKey


class OfferFate(IntEnum):
    """The present state of an offered chunk."""

    NOT_TAKEN = 0
    COMING = 1
    HERE = 2


@dataclass(frozen=True, slots=True)
class OfferAnswer:
    """fates: of each offered chunk. room: how many more would be taken now."""

    fates: list[OfferFate]
    room: int


class Taker(Protocol):
    """Another host, to which chunks of this one can be offered."""

    name: str

    def offer(self, chain: Sequence[ChunkKey], first: int) -> OfferAnswer:
        """Have the other host fetch the chunks of this chain from index `first` on, unless it has them; at most
        `MAX_OFFERED`. It returns at once; offering the same chunks again reports the progress.

        Raises:
            OSError, InputError: the host does not answer, or its answer is not that of a peer.
        """


MAX_OFFERED: Final = 1 << 8
