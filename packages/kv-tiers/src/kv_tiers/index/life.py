"""The states of a chunk in the host tier, and their transitions, as a table.

Lookups find a chunk only while it is `RESIDENT`. `LEAVING` is the state of a chunk that was forgotten while it was
read, `ORPHANED` of one that was forgotten, or given to another writer, while it was written: lookups do not find it,
and the slot becomes free when its readers or its writer are done. A slot that is `SPARE` never has a chunk that is
found: the exact bytes of an approximation that is resident elsewhere arrive in it (`kv_tiers.cache.upgrade`), then the
two slots change places. The slot is then given back, or is `REPLACED`: reads of the chunk that were in progress finish
there.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from kv_core.errors import MisuseError

BEING_WRITTEN: Final = "being written"
"""Shown to people for a `RESERVED` chunk, in place of a tier's name."""


class Life(IntEnum):  # of ints because they hash in C: a store of 512 chunks looks into the table a thousand times
    ABSENT = 0
    RESERVED = 1
    RESIDENT = 2
    LEAVING = 3
    ORPHANED = 4
    SPARE = 5
    REPLACED = 6


class LifeEvent(IntEnum):
    RESERVE = 0
    COMMIT = 1
    ABORT = 2
    ADOPT = 3
    EVICT = 4
    FORGET = 5
    GONE = 6
    TAKE_SPARE = 7
    FREE_SPARE = 8
    REPLACE = 9


_NEXT: Final = {
    (Life.ABSENT, LifeEvent.RESERVE): Life.RESERVED,  # a slot is ours, bytes still arriving
    (Life.ABSENT, LifeEvent.ADOPT): Life.RESIDENT,  # a named pool's directory says that the bytes are there already
    (Life.RESERVED, LifeEvent.COMMIT): Life.RESIDENT,  # only from here can a lookup find it
    (Life.RESERVED, LifeEvent.ABORT): Life.ABSENT,
    (Life.RESERVED, LifeEvent.FORGET): Life.ORPHANED,  # the bytes being written predate the forgetting
    (Life.ORPHANED, LifeEvent.COMMIT): Life.ABSENT,
    (Life.ORPHANED, LifeEvent.ABORT): Life.ABSENT,
    (Life.RESIDENT, LifeEvent.EVICT): Life.ABSENT,  # needs zero leases
    (Life.RESIDENT, LifeEvent.FORGET): Life.LEAVING,
    (Life.LEAVING, LifeEvent.GONE): Life.ABSENT,  # the last lease has ended
    (Life.ABSENT, LifeEvent.TAKE_SPARE): Life.SPARE,
    (Life.SPARE, LifeEvent.FREE_SPARE): Life.ABSENT,  # with the worse bytes of the two, or with incomplete ones
    (Life.SPARE, LifeEvent.REPLACE): Life.REPLACED,  # with the worse bytes of the two, which are being read
    (Life.REPLACED, LifeEvent.GONE): Life.ABSENT,  # they are no longer being read
    (Life.REPLACED, LifeEvent.FORGET): Life.LEAVING,  # their chunk was forgotten, so reads of them are void
}


_NEXT_BY_EVENT: Final = {event: {now: to for (now, on), to in _NEXT.items() if on is event} for event in LifeEvent}


def advance(life: list[Life], slots: Sequence[int], event: LifeEvent) -> None:
    """Change the states of these slots as the event demands. Raises `MisuseError`: a slot's state does not allow the
    event. That slot and those after it are unchanged."""
    next_state = _NEXT_BY_EVENT[event]
    for slot in slots:
        try:
            life[slot] = next_state[life[slot]]
        except KeyError:
            raise MisuseError(f"a chunk that is {life[slot].name} cannot {event.name}") from None
