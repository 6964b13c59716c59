"""Which hosts hold which name: a hash table in three arrays, which takes 12 bytes per slot and looks up hundreds of
names at once.

A pair of a name and a host is an entry. The holders of a name have places 0, 1, 2 and so on without a gap: an entry is
found by name and place, and a lookup tries the first few places. Entries are found by linear probing from a salted hash
of both, so that no outsider can make names collide. The slot of a removed entry can only be reused for the same name
and place, until the table is rebuilt.

Callers must serialise changes of the table. Lookups need no lock: one that runs during a change may see a holder too
many or too few, which costs a miss, but it always ends.
"""

import secrets
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kv_tiers.tiers.directory.names import Flags, Names

Hosts = npt.NDArray[np.uint16]
_Slots = npt.NDArray[np.int64]

NOBODY: Final = 0
"""The number of no host."""
MAX_HOSTS: Final = (1 << 16) - 2
_NEVER: Final = (1 << 16) - 1
"""The place of a slot that was never used, where a probe ends."""
_MIN_SLOTS: Final = 1 << 10
_FULL: Final = 0.66
_GROWTH: Final = 2.25
"""Slots per entry when the table is rebuilt: it is then 0.44 full."""
_AT_ONCE: Final = 1 << 18
"""Entries that one call handles together, which bounds the temporary memory it needs."""
_PLACE_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


class _Slotted:
    """The arrays."""

    def __init__(self, slots: int, salt: np.uint64) -> None:
        self.names = np.zeros(slots, np.uint64)
        self.hosts = np.zeros(slots, np.uint16)
        self.places = np.full(slots, _NEVER, np.uint16)
        self.used = 0
        self._salt = salt

    @property
    def slots(self) -> int:
        return len(self.names)

    def find(self, names: Names, place: int) -> _Slots:
        """The slot of each name's entry with this place; -1: there is none."""
        found = np.full(len(names), -1, np.int64)
        at = self._homes(names, np.uint64(place))
        pending = np.arange(len(names))
        for _ in range(self.slots):
            places = self.places[at]
            is_it = (self.names[at] == names[pending]) & (places == place)
            found[pending[is_it]] = at[is_it]
            goes_on = ~is_it & (places != _NEVER)
            if not goes_on.any():
                break
            pending, at = pending[goes_on], (at[goes_on] + 1) % self.slots
        return found

    def insert(self, names: Names, places: npt.NDArray[np.uint16], hosts: Hosts) -> None:
        """Add entries that are not there yet, no two with the same name and place. The caller has ensured that there is
        room."""
        at = self._homes(names, places.astype(np.uint64))
        pending = np.arange(len(names))
        while len(pending):
            free = np.flatnonzero(self.places[at] == _NEVER)
            slots, first = np.unique(at[free], return_index=True)
            placed = free[first]
            winners = pending[placed]
            self.names[slots], self.hosts[slots] = names[winners], hosts[winners]
            self.places[slots] = places[winners]
            lost = np.ones(len(pending), np.bool_)
            lost[placed] = False
            pending, at = pending[lost], (at[lost] + 1) % self.slots
        self.used += len(names)

    def _homes(self, names: Names, places: npt.NDArray[np.uint64] | np.uint64) -> _Slots:
        mixed = names ^ self._salt
        mixed = (mixed ^ (mixed >> _HALF)) * _MIX
        mixed = mixed + np.multiply(places, _PLACE_FACTOR, dtype=np.uint64)
        mixed = (mixed ^ (mixed >> _HALF)) * _MIX
        return (((mixed >> _HALF) * np.uint64(self.slots)) >> _HALF).astype(np.int64)


class HolderTable:
    """Hosts are numbers from 1 to `MAX_HOSTS`."""

    def __init__(self) -> None:
        self._salt = np.uint64(secrets.randbits(64))
        self._slotted = _Slotted(_MIN_SLOTS, self._salt)
        self.entries = 0

    @property
    def nbytes(self) -> int:
        slotted = self._slotted
        return slotted.names.nbytes + slotted.hosts.nbytes + slotted.places.nbytes

    def holders(self, names: Names, most: int) -> Hosts:
        """[names, most]: the holders of each name, at most `most`, padded with `NOBODY`. Needs no lock."""
        slotted = self._slotted
        found = np.zeros((len(names), most), np.uint16)
        asking = np.arange(len(names))
        for place in range(most):
            hosts = _hosts_at(slotted, slotted.find(names[asking], place))
            found[asking, place] = hosts
            asking = asking[hosts != NOBODY]
            if not len(asking):
                break
        return found

    def add(self, names: Names, host: int) -> Flags:
        """Add these names for this host; returns which of them it did not hold before. names: without duplicates."""
        return self._in_parts(names, host, self._add)

    def remove(self, names: Names, host: int) -> Flags:
        """Remove these names for this host; returns which of them it held. names: without duplicates."""
        return self._in_parts(names, host, self._remove)

    def names_of(self, host: int) -> Names:
        """All names that this host holds. Scans every slot: a millisecond per million."""
        slotted = self._slotted
        names: Names = slotted.names[slotted.hosts == host]
        return names

    def drop(self, host: int) -> None:
        self.remove(self.names_of(host), host)

    def _in_parts(self, names: Names, host: int, work: Callable[[Names, int], Flags]) -> Flags:
        changed = [work(names[at : at + _AT_ONCE], host) for at in range(0, len(names), _AT_ONCE)]
        return np.concatenate(changed) if changed else np.zeros(0, np.bool_)

    def _add(self, names: Names, host: int) -> Flags:
        slotted = self._with_room(len(names))
        is_new = np.zeros(len(names), np.bool_)
        asking, place = np.arange(len(names)), 0
        while len(asking):
            slots = slotted.find(names[asking], place)
            hosts = _hosts_at(slotted, slots)
            free = hosts == NOBODY
            slotted.hosts[slots[free & (slots >= 0)]] = host
            fresh = names[asking[free & (slots < 0)]]
            slotted.insert(fresh, np.full(len(fresh), place, np.uint16), np.full(len(fresh), host, np.uint16))
            is_new[asking[free]] = True
            asking, place = asking[~free & (hosts != host)], place + 1
        self.entries += int(np.count_nonzero(is_new))
        return is_new

    def _remove(self, names: Names, host: int) -> Flags:
        slotted = self._slotted
        mine, last = np.full(len(names), -1, np.int64), np.full(len(names), -1, np.int64)
        asking, place = np.arange(len(names)), 0
        while len(asking):
            slots = slotted.find(names[asking], place)
            hosts = _hosts_at(slotted, slots)
            is_mine = hosts == host
            mine[asking[is_mine]] = slots[is_mine]
            held = hosts != NOBODY
            asking, place = asking[held], place + 1
            last[asking] = slots[held]
        was_held = mine >= 0
        # The last holder moves to the freed place, so that there is no gap.
        slotted.hosts[mine[was_held]] = slotted.hosts[last[was_held]]
        slotted.hosts[last[was_held]] = NOBODY
        self.entries -= int(np.count_nonzero(was_held))
        return was_held

    def _with_room(self, more: int) -> _Slotted:
        """The arrays, with room for this many more entries."""
        old = self._slotted
        if old.used + more > _FULL * old.slots:
            new = _Slotted(max(_MIN_SLOTS, int(_GROWTH * (self.entries + more))), self._salt)
            for at in range(0, old.slots, _AT_ONCE):
                part = slice(at, at + _AT_ONCE)
                live = old.hosts[part] != NOBODY
                new.insert(old.names[part][live], old.places[part][live], old.hosts[part][live])
            self._slotted = new
        return self._slotted


def _hosts_at(slotted: _Slotted, slots: _Slots) -> Hosts:
    """The hosts of the entries in these slots; `NOBODY` where there is none."""
    return np.where(slots >= 0, slotted.hosts[slots], NOBODY).astype(np.uint16, copy=False)
