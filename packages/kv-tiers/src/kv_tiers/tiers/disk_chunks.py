"""What the calls of a disk tier share: which chunk has which place, and the order of writes that makes it durable.

One lock makes the in-memory index and the records in the files change together. Without it, a chunk could be discarded
between the eviction that emptied its place and the wipe, and reappear after a crash. It is held during small writes
into the page cache, never while a chunk's bytes move, and never during an fsync except a probe's.
"""

import errno
import gc
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from kv_core.clock import Clock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_eviction.policy import EvictionPolicy

from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk_directory import DiskDirectory, place_of
from kv_tiers.tiers.disk_files import NO_ROOM, File, allocated_bytes, free_bytes
from kv_tiers.tiers.disk_record import RECORD_BYTES
from kv_tiers.tiers.disk_records import ChunkRecords
from kv_tiers.tiers.disk_transfer import HeaderPages, Move, Run, Segment, new_filler, runs_of
from kv_tiers.tiers.extents import Place
from kv_tiers.tiers.index import ExtentIndex
from kv_tiers.tiers.space import CHUNKS_A_SLOT, Geometry

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
    ) -> None:
        """
        drops_parts: as for `ExtentIndex`.

        Raises:
            ConfigError: a directory cannot be used.
        """
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
        records makes the evictions durable, unless no chunk got a place: then this call does.

        decoded_bytes: as for `ExtentIndex`.

        Raises:
            TierDown: records could not be wiped.
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
        """If anything fails in the body of this context, free the places that are in the list at that time.

        Raises:
            TierDown: in place of an `OSError`, or of the `ConfigError` for what is in the way of a new file.
        """
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
            if self._slots_ahead:
                room = self.index.evict_ahead(self._slots_ahead, parent)
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

        Raises:
            TierDown: the medium does not work yet, or the tier has been closed.
        """
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
                )
                opened.append(directory)
            places = [directory.place for directory in opened]
            self._check_mounted(places)
            records = ChunkRecords(opened, self._geometry.slot_units, syncs=self._syncs)
            with _collector_paused():
                self.index.adopt(records.take_over(cut=self._drops_parts))
            self.directories, self._places, self._records = opened, places, records
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
        """
        Raises:
            ConfigError: a medium is not mounted. Its path then belongs to the file system above it, where nothing may
                be made. Mounted again, it may have another device number.
        """
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
