"""What the calls of a disk tier share: which chunk has which place, and the order of writes that makes it durable.

One lock makes the in-memory index and the records in the files change together. Without it, a chunk could be discarded
between the eviction that emptied its place and the wipe, and reappear after a crash. It is held during small writes
into the page cache, never while a chunk's bytes move, and never during an fsync except a probe's.
"""

import errno
import gc
import mmap
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from kv_core.clock import Clock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_eviction.policy import EvictionPolicy

from kv_tiers.pool.directory import NO_PARENT, slots_least_worth_first
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk_directory import DiskDirectory, place_of
from kv_tiers.tiers.disk_files import (
    NO_ROOM,
    File,
    HeaderPages,
    Move,
    Run,
    Segment,
    allocated_bytes,
    free_bytes,
    new_filler,
    runs_of,
)
from kv_tiers.tiers.disk_record import RECORD_BYTES, Found, pack_record, shortened
from kv_tiers.tiers.index import ExtentIndex
from kv_tiers.tiers.space import CHUNKS_A_SLOT, Extent, Geometry, PackedUnits, Place, RecoveredChunk, pack

# Which entries of a disk tier have a record on the medium, and whether it would survive a power loss.
#
# A record is in one of three states: present, wiped but perhaps only in the page cache, or durably absent. Only in the
# last state may the bytes that it vouched for be replaced. Wipes are counted: a number per slot says since which wipe
# no record vouches for any part of it, and a number per directory says which wipes are durable. A record that is
# shortened, because its chunk was cut, counts as a wipe for the units that it no longer names.
#
# Entry e of the tier is entry e // n of directory e % n, and the same holds for slots. The tier holds its lock around
# every call except those that make writes durable (`sync…`), which any thread may make at any time.


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


_log = limited_logger(__name__)

_MAX_SLOTS_AHEAD: Final = 16
"""Slots that one store empties for the next, so that a full tier does not wait for a wipe to be durable, which is a
third of all waiting."""
_FULL_DISK_REST_S: Final = 60.0
_UNREADABLE_REST_S: Final = 60.0
"""A chunk that could not be read is skipped for this long, so that a bad sector does not take the whole tier down at
each request."""


def geometry_of(context: TierContext) -> Geometry:
    """The slots of a disk tier: each has room for a header's page and a chunk's pages."""
    return Geometry.of(PAGE_BYTES + context.slot_bytes)


def bytes_for(context: TierContext, chunks: int, directories: int = 1) -> int:
    """The smallest capacity that has room for this many whole chunks."""
    return chunks * (geometry_of(context).slot_bytes + CHUNKS_A_SLOT * RECORD_BYTES) + directories * PAGE_BYTES


@contextmanager
def _collector_paused() -> Iterator[None]:
    """For creating many objects, none of them garbage: the collector would scan them all again and again, which takes a
    quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class DiskChunks:
    """Slot i and entry i are in directory i % n. Safe to call from any thread."""

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        context: TierContext,
        slots: int,
        policy: EvictionPolicy,
        *,
        direct: Literal["auto", "always", "never"],
        syncs: bool,
        drops_parts: bool,
        clock: Clock,
        quotas: Mapping[bytes, int],
        share_policy: Callable[[int], EvictionPolicy],
    ) -> None:
        """drops_parts, quotas, share_policy: as for `ExtentIndex`.
        Raises `ConfigError`: a directory cannot be used."""
        self.name = name
        self.context = context
        self.clock = clock
        self._paths, self._direct, self._syncs = list(paths), direct, syncs
        self._drops_parts = drops_parts
        self._geometry = geometry_of(context)
        self._slots_of = [-(-(slots - number) // len(paths)) for number in range(len(paths))]
        self.index = ExtentIndex(
            self._slots_of,
            self._geometry,
            policy,
            overhead_bytes=PAGE_BYTES,
            bounded=context.bounded,
            drops_parts=drops_parts,
            quotas=quotas,
            share_policy=share_policy,
        )
        self._slots_ahead = min(_MAX_SLOTS_AHEAD, slots // 24) if syncs else 0
        slack_bytes = self._geometry.slot_bytes - PAGE_BYTES - context.slot_bytes
        self._filler = new_filler(min(slack_bytes, self._geometry.unit_bytes - PAGE_BYTES))
        self.header_pages = HeaderPages()
        self.lock = threading.Lock()
        # Everything below changes only under that lock.
        self._arriving: dict[int, ChunkKey] = {}  # by entry; without chunks that were discarded meanwhile
        self._full_until_s: float | None = None
        self.full = ""
        self._full_is_logged = False
        self._is_closed = False
        self._unreadable: dict[ChunkKey, float] = {}  # until when each is skipped
        self.directories: list[DiskDirectory] = []
        self._places: list[tuple[int, Path]] = []  # the device and mount point of each directory
        self._open_directories()

    @property
    def used_bytes(self) -> int:
        return self.index.used_units * self._geometry.unit_bytes + self.index.chunks * RECORD_BYTES

    # Lookups.

    def begin_load(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """Like `begin_load` of the index, without the chunks that are being skipped."""
        if not self._unreadable:
            return self.index.begin_load(keys)
        wanted = [not self.is_passed_over(key) for key in keys]
        # A key that is repeated is leased as often, because `end_load` ends as many leases.
        entries = iter(self.index.begin_load([key for key, is_wanted in zip(keys, wanted, strict=True) if is_wanted]))
        return [next(entries) if is_wanted else None for is_wanted in wanted]

    def has_unreadable(self) -> bool:
        return bool(self._unreadable)

    def is_passed_over(self, key: ChunkKey) -> bool:
        until_s = self._unreadable.get(key)
        if until_s is not None and self.clock.now_s() >= until_s:
            self._unreadable.pop(key, None)
            return False
        return until_s is not None

    def pass_over(self, keys: Iterable[ChunkKey]) -> None:
        """Skip these for a while: they could not be read. Under the lock."""
        for known_key in list(self._unreadable):  # some have been evicted since, and are never looked up again
            self.is_passed_over(known_key)
        self._unreadable.update(dict.fromkeys(keys, self.clock.now_s() + _UNREADABLE_REST_S))

    def readable_first(self) -> list[ChunkKey]:
        """All keys except those that could not be read lately, or all if none remain."""
        keys = self.index.all_keys()
        return [key for key in keys if key not in self._unreadable] or keys

    def directory(self, entry: int) -> DiskDirectory:
        return self.directories[entry % len(self.directories)]

    def segments(self, entry: int, units: Sequence[int], nbytes: int) -> list[Segment]:
        """Where the first `nbytes` bytes of the header's page and the payload are (`bytes_in_files`)."""
        return self.directories[entry % len(self.directories)].segments(units, nbytes)

    def runs(self, moves: Iterable[Move]) -> list[Run]:
        return runs_of(moves, self._filler)

    # Storing, in this order.

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        stored_bytes: Sequence[int],
        parent: ChunkKey | None,
        decoded_bytes: Sequence[int] = (),
    ) -> list[Place | None]:
        """Reserve places as far as there is room, and wipe the records of what they held. The sync of the new chunks'
        records makes the evictions durable, unless no chunk got a place: then this call does. Raises `TierDown`:
        records could not be wiped.

        decoded_bytes: as for `ExtentIndex`.
        """
        with self.lock:
            if self._full_until_s is not None and self.clock.now_s() >= self._full_until_s:
                self._full_until_s = None
                self.index.resume()
            if self._unreadable and (unreadable := [key for key in keys if key in self._unreadable]):
                self.discard(unreadable)  # its bytes are stored anew, and the new ones may be readable
            room = self.index.reserve(keys, stored_bytes, parent, decoded_bytes)
            places = room.places
            taken = [place for place in places if place is not None]
            self._arriving.update([(place.entry, place.key) for place in taken])
            try:
                self._wipe(room.evicted + [place.entry for place in taken], room.cut)
            except OSError as error:
                self.abort(taken)
                raise self.down(error) from error
        if (room.evicted or room.cut) and not taken:
            with self.aborting(taken):
                self.sync_all_wipes()
        return places

    def aborting(self, places: list[Place]) -> "_Aborting":
        """If anything fails in the body of this context, free the places that are in the list at that time. Raises
        `TierDown`: in place of an `OSError`, or of the `ConfigError` for what is in the way of a new file."""
        return _Aborting(self, places)

    def make_ready(self, places: list[Place]) -> None:
        """Return once it is durable that no record vouches for what these places held, and their space is allocated.
        Places for which the medium has no space are removed from the list and withheld."""
        count = len(self.directories)
        for number in {place.entry % count for place in places}:
            if self.directories[number].has_vanished():
                raise OSError(errno.ENOENT, "the directory was removed or replaced")
        self._records.sync_wipes(places)
        directories = self.directories
        without_space: list[Place] = []
        why = ""
        try:
            for place in places:
                entry, directory_number = divmod(place.entry, len(directories))
                if entry < directories[directory_number].entries_ready:
                    continue
                try:
                    directories[directory_number].make_room(entry, place.units)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    without_space.append(place)
                    why = error.strerror or ""
        finally:
            self.withhold(places, without_space, why)

    def withhold(self, places: list[Place], short: Sequence[Place], why: str) -> None:
        """Give these up because the medium has no space; they are removed from the list."""
        if not short:
            return
        places[:] = [place for place in places if place not in short]
        path = self.directory(short[0].entry).path
        with self.lock:
            for place in short:
                self._arriving.pop(place.entry, None)
            self.index.withhold(short)
            self._full_until_s = self.clock.now_s() + _FULL_DISK_REST_S
            self.full = f"{path}: {why}; it continues with the room that it has"
            if not self._full_is_logged:
                self._full_is_logged = True
                _log.warning(
                    "disk tier %s: %s has no room for more; it continues with the %d chunks that it has, and tries "
                    "periodically to grow",
                    self.name,
                    path,
                    self.index.chunks,
                )

    def sync_files(self, files: Iterable[File]) -> None:
        """Return once the writes to these files are durable."""
        self._records.sync_files(files)

    def write_records(self, chunks: Sequence[tuple[Place, bytes]], parent: ChunkKey | None) -> None:
        """Write the records of the chunks in these places, durably. parent: of the first of them."""
        with self.lock:
            self._records.write([chunk for chunk in chunks if chunk[0].entry in self._arriving])
            # What the next store will replace is wiped now, so that one sync makes both durable.
            if self._slots_ahead and chunks:
                room = self.index.evict_ahead(self._slots_ahead, parent, chunks[0][0].key.tenant)
                self._wipe_if_possible(room.evicted, room.cut)
        self._records.sync([place.entry for place, _ in chunks])

    def make_findable(self, places: Sequence[Place], parents: Sequence[ChunkKey | None]) -> None:
        with self.lock:
            for place in places:
                self._arriving.pop(place.entry, None)
            if gone := self.index.commit(places, parents):
                self._wipe_if_possible([place.entry for place in gone])
            if self._full_until_s is None:
                self.full = ""  # space that was withheld has been allocated again

    # Under the lock.

    def discard(self, keys: Sequence[ChunkKey]) -> bool:
        """Discard chunks. False: a restart may still find them."""
        entries = self.index.discard(keys)
        for key in keys if self._unreadable else ():
            self._unreadable.pop(key, None)
        gone = set(keys)
        arriving = [entry for entry, key in self._arriving.items() if key in gone]
        for entry in arriving:
            del self._arriving[entry]
        return self._wipe_if_possible([*entries, *arriving])

    def abort(self, places: Sequence[Place]) -> None:
        for place in places:
            self._arriving.pop(place.entry, None)
        self._wipe_if_possible([place.entry for place in places])
        self.index.abort(places)

    def mend(self) -> None:
        """Start over in directories that were replaced, retry wipes that failed, and allow the tier to grow again.
        Raises `TierDown`: the medium does not work yet, or the tier has been closed."""
        if self._is_closed:
            raise TierDown(f"disk tier {self.name} has been closed")
        try:
            has_vanished = any(directory.has_vanished() for directory in self.directories)
        except OSError as error:
            raise self.down(error) from error
        if has_vanished:
            self._start_over()
        if self._arriving and self._records.doubted():
            # The lost writes may be of chunks that are being stored now, and the next sync of those would succeed.
            raise TierDown(f"disk tier {self.name}: a sync failed, and chunks that it may have lost are being stored")
        try:
            for directory in self.directories:
                directory.try_out()
            self._records.mend()
        except OSError as error:
            raise self.down(error) from error
        self._full_until_s = None
        self.index.resume()

    def _wipe(self, entries: Iterable[int], cut: Mapping[int, int]) -> None:
        """Wipe the records of these entries, and shorten the records of the cut ones."""
        self._records.wipe(entries, {entry: (divisor, self.index.extent(entry)) for entry, divisor in cut.items()})

    def _wipe_if_possible(self, entries: Iterable[int], cut: Mapping[int, int] = MappingProxyType({})) -> bool:
        try:
            self._wipe(entries, cut)
        except OSError as error:
            _log.warning("disk tier %s: records could not be wiped yet: %s", self.name, error.strerror)
            return False
        return True

    def _start_over(self) -> None:
        discarded = self.index.discard(self.index.all_keys())
        self._unreadable.clear()
        self.full, self._full_is_logged = "", False  # it may be another medium
        if not self.index.is_idle():
            # A store in progress may get their room in a directory that is still there.
            self._wipe_if_possible(discarded)
            raise TierDown(f"disk tier {self.name}: its directory has gone, and chunks of it are still in use")
        self._close_directories()
        try:
            self._open_directories()
        except ConfigError as error:
            raise TierDown(str(error)) from None

    # Directories.

    def sync_all_wipes(self) -> None:
        """Return once all discards are durable. Called without the lock."""
        try:
            self._records.sync(())
        except OSError as error:
            raise self.down(error) from error

    def close(self) -> None:
        with self.lock:
            self._is_closed = True  # or a probe that waits for the lock would open the directories again
            self._close_directories()

    def _open_directories(self) -> None:
        paths = self._paths
        opened: list[DiskDirectory] = []
        try:
            if self._places:
                self._check_mounted([place_of(Path(path) / self.context.namespace) for path in paths])
            for number, path in enumerate(paths):
                directory = DiskDirectory(
                    path,
                    self.context.namespace,
                    slots=self._slots_of[number],
                    geometry=self._geometry,
                    direct=self._direct,
                    to_open=len(paths) - number,
                )
                opened.append(directory)
            places = [directory.place for directory in opened]
            self._check_mounted(places)
            records = ChunkRecords(opened, self._geometry.slot_units, syncs=self._syncs)
            with _collector_paused():
                gone = self.index.adopt(records.take_over(cut=self._drops_parts))
            self.directories, self._places, self._records = opened, places, records
            self._wipe_if_possible(gone)
        except BaseException as error:
            for directory in opened:
                directory.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"disk tier {self.name} at {paths} cannot be read: {error.strerror}; repair it or choose another "
                    "directory"
                ) from None
            raise
        for directory in self.directories:
            _log.info(
                "disk tier %s: %s, %s, %d chunks found in all",
                self.name,
                directory.path,
                "direct I/O" if directory.direct else "through the page cache",
                self.index.chunks,
            )
            for note in directory.notes:
                _log.warning("disk tier %s: %s", self.name, note)
        with suppress(OSError):  # only a remark
            self._warn_of_full_file_systems()

    def _check_mounted(self, places: Sequence[tuple[int, Path]]) -> None:
        """Raises `ConfigError`: a medium is not mounted. Its path then belongs to the file system above it, where
        nothing may be made. Mounted again, it may have another device number."""
        known = self._places or places
        elsewhere = [
            path
            for path, (device, mounted_at), (known_device, known_mount) in zip(self._paths, places, known, strict=True)
            if device != known_device and mounted_at != known_mount
        ]
        if elsewhere:
            raise ConfigError(
                f"disk tier {self.name}: {elsewhere} are not on the file systems that they were on at start; mount "
                "those again"
            )

    def _warn_of_full_file_systems(self) -> None:
        """Warn in advance, because a full file system is full for everything else on it too."""
        for device in dict.fromkeys(device for device, _ in self._places):
            on_device = [directory for directory in self.directories if directory.place[0] == device]
            wanted_bytes = sum(directory.slots for directory in on_device) * self._geometry.slot_bytes
            room_bytes = free_bytes(on_device[0].path) + sum(allocated_bytes(directory.path) for directory in on_device)
            if wanted_bytes > room_bytes:
                _log.warning(
                    "disk tier %s: its capacity_bytes has %s for %s, whose file system has room for %s: the tier will "
                    "fill it up, which affects everything else there; write less",
                    self.name,
                    spelled(wanted_bytes),
                    ", ".join(str(directory.path.parent) for directory in on_device),
                    spelled(room_bytes),
                )

    def _close_directories(self) -> None:
        for directory in self.directories:
            directory.close()

    def down(self, error: OSError) -> TierDown:
        return TierDown(f"disk tier {self.name} at {', '.join(self._paths)}: {error.strerror or error}")


class _Aborting(AbstractContextManager[None]):
    """See `DiskChunks.aborting`. A store enters it every time, and a generator's context takes four times as long."""

    def __init__(self, chunks: DiskChunks, places: list[Place]) -> None:
        self._chunks, self._places = chunks, places

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        with self._chunks.lock:
            self._chunks.abort(self._places)
        if isinstance(error, OSError):
            raise self._chunks.down(error) from error
        if isinstance(error, ConfigError):
            raise TierDown(f"disk tier {self._chunks.name}: {error}") from error
