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

from kv_server.directory.entries import Flags, Names

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
_BATCH_ENTRIES: Final = 1 << 18
"""Entries that one call handles together, which bounds the temporary memory it needs."""
_PLACE_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)


class _SlotArrays:
    """The three arrays of the table. A slot is an index into all of them."""

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
        entry_slots = np.full(len(names), -1, np.int64)
        slots = self._homes(names, np.uint64(place))
        pending = np.arange(len(names))
        for _ in range(self.slots):
            places = self.places[slots]
            matches = (self.names[slots] == names[pending]) & (places == place)
            entry_slots[pending[matches]] = slots[matches]
            continues = ~matches & (places != _NEVER)
            if not continues.any():
                break
            pending, slots = pending[continues], (slots[continues] + 1) % self.slots
        return entry_slots

    def insert(self, names: Names, places: npt.NDArray[np.uint16], hosts: Hosts) -> None:
        """Add entries that are not there yet, no two with the same name and place. The caller has ensured that there is
        room."""
        slots = self._homes(names, places.astype(np.uint64))
        pending = np.arange(len(names))
        while len(pending):
            free = np.flatnonzero(self.places[slots] == _NEVER)
            free_slots, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            winners = pending[placed]
            self.names[free_slots], self.hosts[free_slots] = names[winners], hosts[winners]
            self.places[free_slots] = places[winners]
            lost = np.ones(len(pending), np.bool_)
            lost[placed] = False
            pending, slots = pending[lost], (slots[lost] + 1) % self.slots
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
        self._arrays = _SlotArrays(_MIN_SLOTS, self._salt)
        self.entries = 0

    @property
    def nbytes(self) -> int:
        arrays = self._arrays
        return arrays.names.nbytes + arrays.hosts.nbytes + arrays.places.nbytes

    def holders(self, names: Names, most: int) -> Hosts:
        """[names, most]: the holders of each name, at most `most`, padded with `NOBODY`. Needs no lock."""
        arrays = self._arrays
        holders = np.zeros((len(names), most), np.uint16)
        pending = np.arange(len(names))
        for place in range(most):
            hosts = _hosts_at(arrays, arrays.find(names[pending], place))
            holders[pending, place] = hosts
            pending = pending[hosts != NOBODY]
            if not len(pending):
                break
        return holders

    def add(self, names: Names, host: int) -> Flags:
        """Add these names for this host; returns which of them it did not hold before. names: without duplicates."""
        return self._in_parts(names, host, self._add)

    def remove(self, names: Names, host: int) -> Flags:
        """Remove these names for this host; returns which of them it held. names: without duplicates."""
        return self._in_parts(names, host, self._remove)

    def names_of(self, host: int) -> Names:
        """All names that this host holds. Scans every slot: a millisecond per million."""
        arrays = self._arrays
        names: Names = arrays.names[arrays.hosts == host]
        return names

    def drop(self, host: int) -> None:
        self.remove(self.names_of(host), host)

    def _in_parts(self, names: Names, host: int, work: Callable[[Names, int], Flags]) -> Flags:
        changed = [work(names[start : start + _BATCH_ENTRIES], host) for start in range(0, len(names), _BATCH_ENTRIES)]
        return np.concatenate(changed) if changed else np.zeros(0, np.bool_)

    def _add(self, names: Names, host: int) -> Flags:
        arrays = self._with_room(len(names))
        is_new = np.zeros(len(names), np.bool_)
        pending, place = np.arange(len(names)), 0
        while len(pending):
            slots = arrays.find(names[pending], place)
            hosts = _hosts_at(arrays, slots)
            free = hosts == NOBODY
            arrays.hosts[slots[free & (slots >= 0)]] = host
            new_names = names[pending[free & (slots < 0)]]
            count = len(new_names)
            arrays.insert(new_names, np.full(count, place, np.uint16), np.full(count, host, np.uint16))
            is_new[pending[free]] = True
            pending, place = pending[~free & (hosts != host)], place + 1
        self.entries += int(np.count_nonzero(is_new))
        return is_new

    def _remove(self, names: Names, host: int) -> Flags:
        arrays = self._arrays
        host_slots, last_slots = np.full(len(names), -1, np.int64), np.full(len(names), -1, np.int64)
        pending, place = np.arange(len(names)), 0
        while len(pending):
            slots = arrays.find(names[pending], place)
            hosts = _hosts_at(arrays, slots)
            is_host = hosts == host
            host_slots[pending[is_host]] = slots[is_host]
            held = hosts != NOBODY
            pending, place = pending[held], place + 1
            last_slots[pending] = slots[held]
        was_held = host_slots >= 0
        # The last holder moves to the freed place, so that there is no gap.
        arrays.hosts[host_slots[was_held]] = arrays.hosts[last_slots[was_held]]
        arrays.hosts[last_slots[was_held]] = NOBODY
        self.entries -= int(np.count_nonzero(was_held))
        return was_held

    def _with_room(self, added: int) -> _SlotArrays:
        """The arrays, with room for this many more entries."""
        old = self._arrays
        if old.used + added > _FULL * old.slots:
            new = _SlotArrays(max(_MIN_SLOTS, int(_GROWTH * (self.entries + added))), self._salt)
            for start in range(0, old.slots, _BATCH_ENTRIES):
                part = slice(start, start + _BATCH_ENTRIES)
                live = old.hosts[part] != NOBODY
                new.insert(old.names[part][live], old.places[part][live], old.hosts[part][live])
            self._arrays = new
        return self._arrays


def _hosts_at(arrays: _SlotArrays, slots: _Slots) -> Hosts:
    """The hosts of the entries in these slots; `NOBODY` where there is none."""
    return np.where(slots >= 0, arrays.hosts[slots], NOBODY).astype(np.uint16, copy=False)
