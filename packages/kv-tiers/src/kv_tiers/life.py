"""The life of a chunk in the host tier, as a table.

A lookup finds a chunk only while it is RESIDENT. It stops being found at once when it is forgotten, and its slot is free
for others only when nobody reads it any more.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kv_core.errors import MisuseError


class Life(Enum):
    ABSENT = "not here"
    RESERVED = "a slot is its own, its bytes are still to come"
    RESIDENT = "whole, and found by lookups"
    DOOMED = "forgotten before its bytes came; its writer does not know yet"
    LEAVING = "forgotten while it is read; its slot waits for the last reader"


class Event(Enum):
    RESERVE = "room was made for it"
    ADOPT = "found whole in a pool that outlived its process"
    COMMIT = "its writer is done"
    ABORT = "its writer gave up"
    EVICT = "room was needed, and nobody reads it"
    FORGET = "nobody is to find it any more, and nobody reads it"
    FORGET_LEASED = "nobody is to find it any more, but somebody reads it"
    LAST_RELEASE = "its last reader is done"


NEXT: Final[Mapping[tuple[Life, Event], Life]] = {
    (Life.ABSENT, Event.RESERVE): Life.RESERVED,
    (Life.ABSENT, Event.ADOPT): Life.RESIDENT,
    (Life.RESERVED, Event.COMMIT): Life.RESIDENT,
    (Life.RESERVED, Event.ABORT): Life.ABSENT,
    (Life.RESERVED, Event.FORGET): Life.DOOMED,
    (Life.DOOMED, Event.COMMIT): Life.ABSENT,
    (Life.DOOMED, Event.ABORT): Life.ABSENT,
    (Life.RESIDENT, Event.EVICT): Life.ABSENT,
    (Life.RESIDENT, Event.FORGET): Life.ABSENT,
    (Life.RESIDENT, Event.FORGET_LEASED): Life.LEAVING,
    (Life.LEAVING, Event.LAST_RELEASE): Life.ABSENT,
}


def advance(now: Life, event: Event) -> Life:
    """What the chunk becomes.

    Raises:
        MisuseError: the table has no such move.
    """
    try:
        return NEXT[now, event]
    except KeyError:
        raise MisuseError(f"a chunk that is {now.name} cannot {event.name}") from None
