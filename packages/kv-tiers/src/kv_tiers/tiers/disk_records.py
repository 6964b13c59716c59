"""Which entries of a disk tier have a record on the medium, and whether it would survive a power loss.

A record is in one of three states: present, wiped but perhaps only in the page cache, or durably absent. Only in the
last state may the bytes that it vouched for be replaced. Wipes are counted: a number per slot says since which wipe no
record vouches for any part of it, and a number per directory says which wipes are durable. A record that is shortened,
because its chunk was cut, counts as a wipe for the units that it no longer names.

Entry e of the tier is entry e // n of directory e % n, and the same holds for slots. The tier holds its lock around
every call except those that make writes durable (`sync…`), which any thread may make at any time.
"""

import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from kv_core.keys import ChunkKey

from kv_tiers.pool.directory import NO_PARENT, slots_least_worth_first
from kv_tiers.tiers.disk_directory import DiskDirectory
from kv_tiers.tiers.disk_files import File
from kv_tiers.tiers.disk_record import Found, pack_record, shortened
from kv_tiers.tiers.extents import Extent, Place, RecoveredChunk
from kv_tiers.tiers.space import PackedUnits, pack


class ChunkRecords:
    """The records in the directories' index files. Every call may raise `OSError`."""

    def __init__(self, directories: Sequence[DiskDirectory], slot_units: int, *, syncs: bool) -> None:
        """syncs: whether records must survive a power loss; if not, the calls that make writes durable do nothing."""
        self._directories = directories
        self._slot_units = slot_units
        self._syncs = syncs
        self._recorded: dict[int, PackedUnits] = {}
        """By entry that has a record: the units that it names, of its directory."""
        self._shortened: set[int] = set()  # entries whose record names less than it once did
        self._stale: set[int] = set()  # entries whose record should have been wiped, but may still be on the medium
        slots = max(directory.slots for directory in directories) * len(directories)
        # Takes up memory only where it is written.
        wiped = mmap.mmap(-1, 8 * slots, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._wiped = memoryview(wiped).cast("q")
        """By slot: the number of the last wipe of a record of it; 0: none since the start, or nothing is synced."""
        self._wipes = 0
        self._last_wipe = [0] * len(directories)
        self._durable = [0] * len(directories)
        """By directory: wipes up to this number are durable."""
        self._next_number = 0

    def take_over(self, *, cut: bool) -> Iterator[RecoveredChunk]:
        """Every recorded chunk, those worth least first. Call it once.

        cut: include chunks of which only first parts are left; otherwise their records are wiped.

        Of two records of the same chunk, or two that name the same unit, the newer counts: the other's wipe was not
        durable.
        """
        count = len(self._directories)
        found: list[Found] = []
        for number, directory in enumerate(self._directories):
            found += directory.records(number, count)
        found.sort(reverse=True)
        self._recorded = {record.entry: record.units for record in found}
        self._next_number = found[0].number + 1 if found else 0
        entry_of: dict[bytes | None, int] = {}
        live: dict[int, Found] = {}
        claim = [_ClaimedSpace(self._slot_units).claim for _ in self._directories]
        for record in found:
            _, entry, key, _, _, units, _, divisor = record
            is_unusable = units == () or (divisor > 1 and not cut)
            if key in entry_of or is_unusable or not claim[entry % count](units):
                self._stale.add(entry)
                continue
            entry_of[key], live[entry] = entry, record
        self.wipe(())
        number_of = {entry: record.number for entry, record in live.items()}
        parent_of = {entry: entry_of.get(record.parent, NO_PARENT) for entry, record in live.items()}
        keys = {entry: ChunkKey(record.key) for entry, record in live.items()}
        for entry in slots_least_worth_first(number_of, parent_of):
            _, _, _, parent, stored_bytes, units, decoded_bytes, divisor = live[entry]
            # The parent's own key object, if the parent is here: half as many objects, and quick to compare.
            parent_key = keys.get(parent_of[entry])
            if parent_key is None and parent is not None:
                parent_key = ChunkKey(parent)
            yield RecoveredChunk(keys[entry], parent_key, entry, stored_bytes, units, decoded_bytes, divisor)

    def write(self, chunks: Sequence[tuple[Place, bytes]]) -> None:
        """Write the records of chunks whose headers and payloads are in their places."""
        count = len(self._directories)
        records: list[list[tuple[int, bytes]]] = [[] for _ in self._directories]
        for (_, entry, units, _), header in chunks:
            self._recorded[entry] = pack(units)
            local, number = divmod(entry, count)
            records[number].append((local, pack_record(local, self._next_number, header, units)))
            self._next_number += 1
        for forgotten in (self._stale, self._shortened):
            if forgotten:
                forgotten.difference_update([place.entry for place, _ in chunks])
        for directory, directory_records in zip(self._directories, records, strict=True):
            if directory_records:
                directory.write_records(directory_records)

    def wipe(self, entries: Iterable[int], cut: Mapping[int, tuple[int, Extent]] = MappingProxyType({})) -> None:
        """Wipe the records of these entries, and those whose wipe failed before. No restart of this process finds them.

        cut: entries whose records are shortened: by which of `extents.CUTS`, and where. A record that
            cannot be shortened is wiped.
        """
        self._stale.update(self._recorded.keys() & entries)
        if cut:
            recorded = self._recorded.keys() - self._stale
            self._shorten({entry: remainder for entry, remainder in cut.items() if entry in recorded})
        if not self._stale:
            return
        count, stale = len(self._directories), self._stale
        for number, directory in enumerate(self._directories):
            if local := [entry // count for entry in stale if entry % count == number]:
                directory.wipe_records(local)
                self._last_wipe[number] = self._wipes + 1
        # Counted only when done: the thread that makes records durable reads the count first.
        self._wipes += 1
        units_of = [(entry, self._recorded.pop(entry, ())) for entry in stale]
        for entry, units in units_of if self._syncs else ():
            self._note_wiped(entry, units)
        self._stale = set()

    def _shorten(self, cut: Mapping[int, tuple[int, Extent]]) -> None:
        """Rewrite the records for what is left. Those for which this fails remain stale."""
        self._stale.update(cut)
        count = len(self._directories)
        for number, directory in enumerate(self._directories):
            records = {}
            for entry, (divisor, (units, _)) in cut.items():
                if entry % count == number:
                    local = entry // count
                    record = shortened(directory.record_at(local), local, divisor, units)
                    if record is not None:
                        records[entry] = record
            if not records:
                continue
            directory.write_records([(entry // count, record) for entry, record in records.items()])
            self._last_wipe[number] = self._wipes + 1
            self._wipes += 1
            for entry in records:
                if self._syncs:
                    self._note_wiped(entry, self._recorded[entry])
                self._recorded[entry] = pack(cut[entry][1].units)
            self._stale.difference_update(records)
            self._shortened.update(records)

    def _note_wiped(self, entry: int, units: PackedUnits) -> None:
        """Note that the last counted wipe was of this entry's record, which named these units."""
        for slot in self._slots_of(entry, units):
            self._wiped[slot] = self._wipes

    def doubted(self) -> list[File]:
        """The files of which a sync has failed."""
        return [file for directory in self._directories for file in directory.files() if file.in_doubt]

    def mend(self) -> None:
        """After a failed sync: rewrite what may not have reached the medium, and try the medium. Nothing is being
        stored."""
        doubted = self.doubted()
        if doubted:
            # A shortened record may be the longer one again, so it is given up.
            self._stale.update(self._shortened & self._recorded.keys())
            self._shortened.clear()
            # Any wipe since the start may have been lost, of any entry that has no record now. Records need no
            # rewriting: the stores that they belong to have failed.
            for directory_number, directory in enumerate(self._directories):
                blank = [
                    entry
                    for entry in range(directory.records_there())
                    if entry * len(self._directories) + directory_number not in self._recorded
                ]
                directory.wipe_records(blank)
        for file in doubted:
            file.trust_again()
        self.wipe(())
        for directory in self._directories:
            directory.write_header()
        self.sync_files(directory.index for directory in self._directories)

    def sync_wipes(self, places: Iterable[Place]) -> None:
        """Return once it is durable that no record names any part of these places' slots. Returns at once where none
        ever did, or where that is durable already."""
        count = len(self._directories)
        late: set[int] = set()
        for place in places if self._syncs else ():
            number = place.entry % count
            if number not in late:
                slots = self._slots_of(place.entry, pack(place.units))
                if max(map(self._wiped.__getitem__, slots)) > self._durable[number]:
                    late.add(number)
        for number in late:
            self._sync(number)

    def sync(self, entries: Iterable[int]) -> None:
        """Return once the records of these entries and every wipe so far are durable: evicted chunks do not come
        back."""
        count = len(self._directories)
        written = {entry % count for entry in entries}
        for number in range(count):
            if number in written or self._last_wipe[number] > self._durable[number]:
                self._sync(number)

    def sync_files(self, files: Iterable[File]) -> None:
        """Return once the writes to these files are durable."""
        if self._syncs:
            for file in files:
                file.sync()

    def _sync(self, number: int) -> None:
        wipes = self._wipes
        self.sync_files([self._directories[number].index])
        self._durable[number] = max(self._durable[number], wipes)

    def _slots_of(self, entry: int, units: PackedUnits) -> Collection[int]:
        """The tier's slots to which these units of the entry's directory belong."""
        count = len(self._directories)
        if isinstance(units, int):
            return (units // self._slot_units * count + entry % count,)
        return {unit // self._slot_units * count + entry % count for unit in units}


class _ClaimedSpace:
    """The slots and units of one directory that records name, while they are taken over."""

    def __init__(self, slot_units: int) -> None:
        self._slot_units = slot_units
        self._whole: set[int] = set()
        self._in_part: set[int] = set()
        self._units: set[int] = set()

    def claim(self, packed: PackedUnits) -> bool:
        """Claim these units. False: another record names one of them."""
        if isinstance(packed, int):
            slot = packed // self._slot_units
            if slot in self._whole or slot in self._in_part:
                return False
            self._whole.add(slot)
            return True
        slots, units = {unit // self._slot_units for unit in packed}, set(packed)
        if len(units) < len(packed) or not slots.isdisjoint(self._whole) or not units.isdisjoint(self._units):
            return False
        self._units |= units
        self._in_part |= slots
        return True
