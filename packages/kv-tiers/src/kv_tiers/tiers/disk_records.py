"""Which slots of a disk tier have a record on the medium, and whether that would outlive a power cut.

A record in a file is one of three things: there, wiped but perhaps only in the system's cache, or durably not there.
Only the last lets a slot's bytes be replaced. Wipes are counted, so that a number a directory says which of them last.

Slot i of the tier is slot i // n of directory i % n. The tier holds its lock around every call but those that make
durable (`sync…`), which any thread may make at any time.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kv_core.keys import ChunkKey

from kv_tiers.pool.directory import NO_PARENT, slots_least_worth_first
from kv_tiers.tiers.disk_files import BLANK_RECORD, DiskDirectory, File, pack_record

_RECORDED: Final = -1


class SlotRecords:
    """The records in the directories' index files. Every call may raise `OSError`."""

    def __init__(self, directories: Sequence[DiskDirectory], slots: int, *, syncs: bool) -> None:
        """syncs: whether power cuts are feared; else what makes durable does nothing."""
        self._directories = directories
        self._syncs = syncs
        self._state = array("q", bytes(8 * slots))
        """By slot: `_RECORDED`, or the number of the wipe since which it has no record; 0: so it was found, durably."""
        self._stale: set[int] = set()  # slots whose record should have been wiped, and may still be read
        self._wipes = 0
        self._last_wipe = [0] * len(directories)
        self._durable = [0] * len(directories)
        """By directory: wipes up to this number last."""
        self._next_number = 0

    def take_over(self) -> Iterator[tuple[ChunkKey, ChunkKey | None, int]]:
        """Key, parent and slot of every chunk that is recorded, those worth least first. Once, at the start.

        Of two records of a chunk the newer counts: the other's wipe did not last.
        """
        count = len(self._directories)
        slot_of: dict[bytes, int] = {}
        key_of: dict[int, bytes] = {}
        above: dict[int, bytes | None] = {}
        number_of: dict[int, int] = {}
        for at, directory in enumerate(self._directories):
            for local, number, key, parent in directory.records():
                slot = local * count + at
                self._state[slot] = _RECORDED
                other = slot_of.get(key)
                if other is not None:
                    older = slot if number < number_of[other] else other
                    self._stale.add(older)
                    if older == slot:
                        continue
                    del number_of[other]
                slot_of[key], key_of[slot], above[slot], number_of[slot] = slot, key, parent, number
        self._next_number = max(number_of.values(), default=-1) + 1
        self.wipe(())
        parent_of = {slot: NO_PARENT if key is None else slot_of.get(key, NO_PARENT) for slot, key in above.items()}
        keys = {slot: ChunkKey(key) for slot, key in key_of.items()}
        for slot in slots_least_worth_first(number_of, parent_of):
            parent = keys.get(parent_of[slot])  # its own object, where it is here: half as many, and equal at a glance
            if parent is None and (elsewhere := above[slot]) is not None:
                parent = ChunkKey(elsewhere)
            yield keys[slot], parent, slot

    def write(self, headers: Iterable[tuple[int, bytes]]) -> None:
        """Vouch for the chunks, by slot, whose headers and bytes are in their slots."""
        count = len(self._directories)
        records: dict[int, list[tuple[int, bytes]]] = {}
        for slot, header in headers:
            self._state[slot] = _RECORDED
            self._stale.discard(slot)
            records.setdefault(slot % count, []).append(
                (slot // count, pack_record(slot // count, self._next_number, header))
            )
            self._next_number += 1
        for at, those in records.items():
            self._directories[at].write_records(those)

    def wipe(self, slots: Iterable[int]) -> None:
        """No restart of this process finds what these slots, and those where it failed before, had a record of."""
        state = self._state
        self._stale.update([slot for slot in slots if state[slot] == _RECORDED])
        if not self._stale:
            return
        count, wiped = len(self._directories), self._stale
        for at in {slot % count for slot in wiped}:
            self._directories[at].write_records((slot // count, BLANK_RECORD) for slot in wiped if slot % count == at)
            self._last_wipe[at] = self._wipes + 1
        # Counted when it is done: whoever makes durable reads the count first.
        self._wipes += 1
        for slot in wiped:
            state[slot] = self._wipes
        self._stale = set()

    def mend(self) -> None:
        """After a sync that failed: write anew what may not have reached the medium, and try it."""
        doubted = [file for directory in self._directories for file in directory.files() if file.in_doubt]
        if doubted:
            # Any wipe since the start may be among it. Records are not: the stores that they belong to have failed.
            self._stale.update(slot for slot, state in enumerate(self._state) if state > 0)
        for file in doubted:
            file.trust_again()
        self.wipe(())
        for directory in self._directories:
            directory.write_header()
        self.sync_files(directory.index for directory in self._directories)

    def sync_wipes(self, slots: Sequence[int]) -> None:
        """Return when it lasts that these have no record: at once where they never had one, or it was done."""
        count = len(self._directories)
        for at in {slot % count for slot in slots if self._state[slot] > self._durable[slot % count]}:
            self._sync(at)

    def sync(self, slots: Iterable[int]) -> None:
        """Return when the records of these last, and every wipe so far: what has left stays away."""
        count = len(self._directories)
        written = {slot % count for slot in slots}
        for at in range(count):
            if at in written or self._last_wipe[at] > self._durable[at]:
                self._sync(at)

    def sync_files(self, files: Iterable[File]) -> None:
        """Return when what was written to these lasts."""
        if self._syncs:
            for file in files:
                file.sync()

    def _sync(self, at: int) -> None:
        wipes = self._wipes
        self.sync_files([self._directories[at].index])
        self._durable[at] = max(self._durable[at], wipes)
