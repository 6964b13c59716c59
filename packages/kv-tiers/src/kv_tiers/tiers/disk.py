"""Chunks on local disks: a few large files of equal slots, and an index file that a restart reads instead of them.

The promise: after the process or the power is gone at any instant, the next start finds every chunk whose store was
answered `Stored`, unless it was evicted or discarded since, and nothing else. It is kept by an order of writes, done
once a store and not once a chunk:

    1. the record of what a slot held is wiped, and that made durable, unless it was so long ago
    2. the chunk's header and bytes go into the slot, and are made durable
    3. the slot's new record is written and made durable
    4. the chunk can be found, and `Stored` is answered

One lock makes what the index in memory decides and what the records in the files say change together: without it, a
chunk could be discarded between the eviction that emptied its slot and the wipe, and come back after a crash. It is
held for small writes into the system's cache, never while a chunk's bytes move, nor while anything is made durable but
by a probe.

`disk_records` knows which records last, `disk_files` what the bytes are, and docs/adr/0007 why it is slots.
"""

import errno
import itertools
import mmap
import random
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec
from kv_core.clock import Clock
from kv_core.errors import ConfigError, MisuseError, TierDown
from kv_core.extent import FileExtent
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, StoreOutcome

from kv_tiers import chunk_header
from kv_tiers.clock import MonotonicClock
from kv_tiers.eviction.policy import EvictionPolicy
from kv_tiers.eviction.registry import DEFAULT_POLICY, PolicySpec, make_policy
from kv_tiers.options import read_options
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import ANY_CHUNKS, FileLease, FileRoom, Read, Tier, TierContext, TierUsage, Write, checked
from kv_tiers.tiers.disk_files import NO_ROOM, RECORD_BYTES, DiskDirectory, File, check_place
from kv_tiers.tiers.disk_records import SlotRecords
from kv_tiers.tiers.index import Place, SlotIndex

_log = limited_logger(__name__)

_MAX_SLOTS_AHEAD: Final = 16
"""Emptied by one store for the next, so that a full tier need not wait for a wipe to last: a third of all waiting."""
_MAX_IN_A_RUN: Final = 256
_FULL_DISK_REST_S: Final = 60.0
_UNREADABLE_REST_S: Final = 60.0
"""A chunk that could not be read is passed over for so long, lest a bad sector rests the whole tier at each request."""
_READ_FAULTS: Final = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG)
"""What devices and file systems say of bytes that cannot be read, where others perhaps can."""
_MAX_FAILURES: Final = 3
"""Chunks of one call that failed by themselves before the rest is not tried: each may take the device's time-out."""
_PROBED_CHUNKS: Final = 8

_Item = TypeVar("_Item")


class DiskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where, how much, and what is feared."""

    directory: str | list[str]
    """One, or several on different devices that chunks are spread over. Made if its parent is there."""
    capacity_bytes: int
    """Of all directories together, for chunks of this model. Taken from the disk as it is used, about a GiB at once."""
    direct: Literal["auto", "always", "never"] = "auto"
    """Past the system's page cache (O_DIRECT). auto: where the file system can."""
    durability: Literal["power", "process"] = "power"
    """What stored chunks survive: the machine's end, or only the process's, which saves waiting for the medium."""
    wait_s: float = 1.0
    """How long a store waits for room when every chunk is being read or written."""
    policy: PolicySpec = DEFAULT_POLICY
    """What leaves when room is needed."""

    @property
    def directories(self) -> list[str]:
        return [self.directory] if isinstance(self.directory, str) else self.directory


def bytes_for(context: TierContext, chunks: int, directories: int = 1) -> int:
    """The smallest capacity that has room for so many chunks."""
    return chunks * (PAGE_BYTES + context.slot_bytes + RECORD_BYTES) + directories * PAGE_BYTES


def slots_for(config: DiskConfig, context: TierContext) -> int:
    """Chunks that the capacity has room for.

    Raises:
        ConfigError: not one for every directory, or a setting that makes no sense.
    """
    paths = config.directories
    if not paths or len(set(map(Path, paths))) < len(paths):
        raise ConfigError(f"the disk tier's `directory` must be one directory or several different ones, not {paths}")
    if not 0 <= config.wait_s <= 3600:
        raise ConfigError(f"the disk tier's `wait_s` is {config.wait_s}; write 0 to 3600")
    slots = (config.capacity_bytes - bytes_for(context, 0, len(paths))) // bytes_for(context, 1, 0)
    if slots < len(paths):
        least = bytes_for(context, len(paths), len(paths))
        raise ConfigError(
            f"the disk tier's `capacity_bytes` of {config.capacity_bytes} has no room for a chunk of this model in "
            f"every directory; write at least {least} ({spelled(least)}), and for use a thousand times that"
        )
    return slots


def _check_options(options: Mapping[str, object]) -> None:
    config = read_options(DiskConfig, options, "disk")
    make_policy(config.policy, slots_for(config, ANY_CHUNKS))
    for path in config.directories:
        check_place(Path(path))


@checked(_check_options)
def make_disk_tier(options: Mapping[str, object], context: TierContext) -> Tier:
    """The factory of the tier type `disk`; `DiskConfig` says what may be in `options`.

    Raises:
        ConfigError: options that cannot be honoured, or directories that cannot be used.
    """
    config = read_options(DiskConfig, options, "disk")
    return DiskTier(config, context, make_policy(config.policy, slots_for(config, context)))


@dataclass(frozen=True, slots=True)
class _Carried:
    """A chunk whose bytes another has written into its place."""

    place: Place
    parent: ChunkKey | None
    checksum: bytes


class DiskTier:
    """Slot i is in directory i % n. Safe to call from any thread."""

    holds_is_local = True

    def __init__(
        self,
        config: DiskConfig,
        context: TierContext,
        policy: EvictionPolicy,
        *,
        name: str = "disk",
        clock: Clock | None = None,
    ) -> None:
        """Take possession of the directories and find what is in them: about a second for every 100 000 chunks.

        policy: for `slots_for(config, context)` chunks.

        Raises:
            ConfigError: a setting or a directory cannot be used.
        """
        self.name = name
        self._config = config
        self._context = context
        self._format_id = chunk_header.format_id(context.fingerprint)
        self._stride = PAGE_BYTES + context.slot_bytes
        self._clock: Clock = clock or MonotonicClock()
        self._index = SlotIndex(slots_for(config, context), policy)
        self._slots_ahead = min(_MAX_SLOTS_AHEAD, self._index.slots // 24) if config.durability == "power" else 0
        self._pages: deque[memoryview] = deque()
        self._ids = itertools.count()
        self._lock = threading.Lock()
        # All below change under that lock.
        self._arriving: dict[int, ChunkKey] = {}  # not the chunks that were discarded meanwhile
        self._leases: dict[int, list[int | None]] = {}
        self._rooms: dict[int, list[tuple[Place | None, ChunkKey | None]]] = {}
        self._full_until_s: float | None = None
        self._full = ""
        self._told_full = False
        self._unreadable: dict[ChunkKey, float] = {}  # until when it is passed over
        self._reads_failed = False
        self._closed = False
        self._directories: list[DiskDirectory] = []
        self._devices: list[int] = []
        self._open_directories()

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        held = self._index.holds(keys)
        if self._unreadable:
            held = [here and not self._is_passed_over(key) for here, key in zip(held, keys, strict=True)]
        return held

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        slots = self._readable([read.key for read in reads])
        outcomes: list[LoadOutcome] = [Absent()] * len(reads)
        try:
            there = [(*self._place(slot), at) for at, slot in enumerate(slots) if slot is not None]
            for file, offset, run in self._runs(there):
                found = self._read_run(file, offset, [reads[at] for at in run])
                for at, outcome in zip(run, found, strict=True):
                    outcomes[at] = outcome
        finally:
            self._index.end_load(slots)
        damaged = [read.key for read, outcome in zip(reads, outcomes, strict=True) if isinstance(outcome, Damaged)]
        failed = [read.key for read, outcome in zip(reads, outcomes, strict=True) if isinstance(outcome, ReadFailed)]
        if damaged or failed:
            with self._lock:
                self._discard(damaged)
                self._reads_failed = self._reads_failed or bool(failed)
                self._unreadable.update(dict.fromkeys(failed, self._clock.now_s() + _UNREADABLE_REST_S))
        return outcomes

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        stored: set[ChunkKey] = set()
        why = "every slot is being read or written, or holds an earlier chunk of the prompt"
        until_s = self._clock.now_s() + self._config.wait_s
        left = list(writes)
        while left:
            releases = self._index.releases
            places = self._reserve([write.key for write in left], left[0].parent)
            taken = [(write, place) for write, place in zip(left, places, strict=True) if place is not None]
            written = self._write(taken)
            if len(written) == len(writes):
                return [Stored()] * len(writes)
            stored.update(write.key for write, _ in written)
            held = self._index.holds([write.key for write in left])
            stored.update(write.key for write, is_held in zip(left, held, strict=True) if is_held)
            left = [write for write in left if write.key not in stored]
            if taken and not written:
                why = "the disk is full"
                break
            if left and not taken:
                wait_s = until_s - self._clock.now_s()
                if wait_s <= 0 or not self._index.wait_for_room(releases, wait_s):
                    break
        return [Stored() if write.key in stored else Refused(why) for write in writes]

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            whole = self._discard(keys)
        if not whole:
            raise TierDown(f"disk tier {self.name}: what was discarded may come back after a restart")
        try:
            self._records.sync(())
        except OSError as error:
            raise self._down(error) from error

    def clear(self) -> None:
        self.discard(self._index.all_keys())

    def clear_tenant(self, tenant: bytes) -> None:
        self.discard([key for key in self._index.all_keys() if key.tenant == tenant])

    def probe(self) -> None:
        """Also mends what can be: starts over in directories that were replaced, and wipes what could not be wiped.

        After a read that failed some chunk must be readable.
        """
        with self._lock:
            if any(directory.has_vanished() for directory in self._directories):
                self._start_over()
            try:
                self._records.mend()
            except OSError as error:
                raise self._down(error) from error
            self._full_until_s = None
            self._index.resume()
        if self._reads_failed:
            self._try_to_read()
            self._reads_failed = False

    def usage(self) -> TierUsage:
        chunk = bytes_for(self._context, 1, 0)
        return TierUsage(self._index.chunks, self._index.chunks * chunk, self._index.slots * chunk, self._full)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_directories()

    # Bytes that others carry (`kv_tiers.tier.KeepsFiles`).

    def lend(self, keys: Sequence[ChunkKey]) -> FileLease:
        slots = self._readable(keys)
        try:
            found = [None if slot is None else self._lent(key, slot) for key, slot in zip(keys, slots, strict=True)]
        except BaseException as error:
            self._index.end_load(slots)
            if isinstance(error, OSError):
                raise self._down(error) from error
            raise
        lease = FileLease(next(self._ids), tuple(found))
        with self._lock:
            self._leases[lease.id] = slots
        return lease

    def end(self, lease: FileLease) -> None:
        with self._lock:
            slots = self._leases.pop(lease.id, None)
        if slots is None:
            raise MisuseError(f"file lease {lease.id} is not open")
        self._index.end_load(slots)

    def reserve(self, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> FileRoom:
        places = self._reserve(keys, parent)
        taken = [place for place in places if place is not None]
        located: dict[int, FileExtent] = {}
        why = ""
        with self._aborting(taken):
            self._make_ready(taken)
            for place in taken:
                try:
                    located[place.slot] = self._extent(place.slot, None)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    why = error.strerror or ""
        if short := [place for place in taken if place.slot not in located]:
            self._withhold(short, why)
        given = [place if place is not None and place.slot in located else None for place in places]
        room = FileRoom(next(self._ids), tuple(None if place is None else located[place.slot] for place in given))
        with self._lock:
            self._rooms[room.id] = list(zip(given, [parent, *keys], strict=False))
        return room

    def commit(self, room: FileRoom, checksums: Sequence[bytes | None]) -> list[StoreOutcome]:
        if len(checksums) != len(room.extents):
            raise MisuseError(f"{len(checksums)} checksums for room for {len(room.extents)} chunks")
        with self._lock:
            given = self._rooms.pop(room.id, None)
            if given is None:
                raise MisuseError(f"file room {room.id} is not open")
            carried = [
                _Carried(place, parent, checksum)
                for (place, parent), checksum in zip(given, checksums, strict=True)
                if place is not None and checksum is not None
            ]
            kept = {one.place.slot for one in carried}
            self._abort([place for place, _ in given if place is not None and place.slot not in kept])
        if carried:
            self._keep(carried)
        why = "there was no room for it, or it was not written"
        return [Stored() if place is not None and place.slot in kept else Refused(why) for place, _ in given]

    def _keep(self, carried: Sequence[_Carried]) -> None:
        """The third and fourth step; the second but for the headers was another's.

        Raises:
            TierDown: none was kept.
        """
        places = [one.place for one in carried]
        files = set()
        headers = []
        with self._aborting(places):
            self._refuse_vanished(places)
            for one in carried:
                slot, nbytes = one.place.slot, self._context.chunk_bytes
                said = chunk_header.Header(one.place.key, one.parent, nbytes, self._format_id, one.checksum)
                headers.append((slot, chunk_header.make_header(said)))
                file, offset = self._place(slot)
                self._write_header(file, offset, headers[-1][1])
                files.add(file)
            self._records.sync_files(files)
            for place in places:
                self._drop_cached(*self._place(place.slot), 1)
            self._write_records(headers, carried[0].parent)
        self._make_findable(places, [one.parent for one in carried])

    def _write_header(self, file: File, offset: int, header: bytes) -> None:
        page = self._page()
        page[: chunk_header.HEADER_BYTES] = header
        try:
            file.write([page], offset)
        finally:
            self._pages.append(page)

    def _lent(self, key: ChunkKey, slot: int) -> FileExtent | None:
        """None where its record was wiped meanwhile, or damaged: a load may tell which."""
        header = self._directory(slot).header_in(slot // len(self._directories))
        said = None if header is None else chunk_header.read_header(header)
        if not isinstance(said, chunk_header.Header) or said.key != key:
            return None
        if (said.nbytes, said.format_id) != (self._context.chunk_bytes, self._format_id):
            return None
        return self._extent(slot, said.checksum)

    def _extent(self, slot: int, checksum: bytes | None) -> FileExtent:
        file, offset = self._place(slot)
        return FileExtent(str(file.path.absolute()), offset + PAGE_BYTES, self._context.chunk_bytes, checksum)

    # A chunk's way in.

    def _reserve(self, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> list[Place | None]:
        """Places for those that get one, their slots' old records wiped."""
        with self._lock:
            if self._full_until_s is not None and self._clock.now_s() >= self._full_until_s:
                self._full_until_s = None
                self._index.resume()
            if self._unreadable and (unreadable := [key for key in keys if key in self._unreadable]):
                self._discard(unreadable)  # here are its bytes again, and new ones may be readable
            places = self._index.reserve(keys, parent)
            taken = [place for place in places if place is not None]
            self._arriving.update((place.slot, place.key) for place in taken)
            try:
                self._records.wipe([place.slot for place in taken])
            except OSError as error:
                self._abort(taken)
                raise self._down(error) from error
        return places

    def _write(self, taken: Sequence[tuple[Write, Place]]) -> list[tuple[Write, Place]]:
        """Make durable and findable; those of them for which there was room on the medium.

        Raises:
            TierDown: none was kept.
        """
        if not taken:
            return []
        places = [place for _, place in taken]
        with self._aborting(places):
            self._make_ready(places)
            kept = self._write_chunks(taken)
            places[:] = [place for _, place in kept]
            parent = kept[0][0].parent if kept else None
            self._write_records([(place.slot, write.header) for write, place in kept], parent)
        self._make_findable(places, [write.parent for write, _ in kept])
        with self._lock:
            if self._full_until_s is None:
                self._full = ""  # what was withheld is given again, and was taken
        return kept

    @contextmanager
    def _aborting(self, places: list[Place]) -> Iterator[None]:
        """Whatever fails meanwhile frees the places that are in the list then.

        Raises:
            TierDown: for what the system said.
        """
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._abort(places)
            if isinstance(error, OSError):
                raise self._down(error) from error
            raise

    def _make_ready(self, places: Sequence[Place]) -> None:
        """Return when it lasts that nothing vouches for what these slots held."""
        self._refuse_vanished(places)
        self._records.sync_wipes([place.slot for place in places])

    def _refuse_vanished(self, places: Sequence[Place]) -> None:
        if any(directory.has_vanished() for directory in {self._directory(place.slot) for place in places}):
            raise OSError(errno.ENOENT, "the directory was removed or replaced")

    def _write_chunks(self, taken: Sequence[tuple[Write, Place]]) -> list[tuple[Write, Place]]:
        """Durable in their slots. Those for which the medium has no room are given up, unless another fault comes."""
        placed: list[tuple[File, int, tuple[Write, Place]]] = []
        kept: set[int] = set()
        short: list[Place] = []
        why = ""
        files = set()
        for write, place in taken:
            try:
                placed.append((*self._place(place.slot), (write, place)))
            except OSError as error:
                short.append(place)
                if error.errno not in NO_ROOM:
                    raise
                why = error.strerror or ""
        for file, offset, run in self._runs(placed):
            try:
                self._write_run(file, offset, [write for write, _ in run])
            except OSError as error:
                short += [place for _, place in run]
                if error.errno not in NO_ROOM:
                    raise
                why = error.strerror or ""
                continue
            kept.update(place.slot for _, place in run)
            files.add(file)
        self._records.sync_files(files)
        for file, offset, _ in placed:
            self._drop_cached(file, offset, 1)
        if short:
            self._withhold(short, why)
        return [each for each in taken if each[1].slot in kept]

    def _write_run(self, file: File, offset: int, writes: Sequence[Write]) -> None:
        pages = [self._page() for _ in writes]
        for page, write in zip(pages, writes, strict=True):
            page[: chunk_header.HEADER_BYTES] = write.header
        try:
            file.write(self._interleaved(pages, writes), offset)
        finally:
            self._pages.extend(pages)

    def _write_records(self, headers: Sequence[tuple[int, bytes]], parent: ChunkKey | None) -> None:
        """Vouch, durably, for the chunks that are in these slots. parent: of the first chunk that was stored."""
        with self._lock:
            self._records.write((slot, header) for slot, header in headers if slot in self._arriving)
            # What the next store will replace is wiped now, so that one sync makes both durable.
            self._wipe_if_possible(self._index.evict_ahead(self._slots_ahead, parent))
        self._records.sync(slot for slot, _ in headers)

    def _make_findable(self, places: Sequence[Place], parents: Sequence[ChunkKey | None]) -> None:
        with self._lock:
            for place in places:
                self._arriving.pop(place.slot, None)
            gone = self._index.commit(places, parents)
            self._wipe_if_possible([place.slot for place in gone])

    def _withhold(self, short: Sequence[Place], why: str) -> None:
        with self._lock:
            for place in short:
                self._arriving.pop(place.slot, None)
            self._index.withhold(short)
            self._full_until_s = self._clock.now_s() + _FULL_DISK_REST_S
            self._full = f"{self._directory(short[0].slot).path}: {why}; it goes on in the room that it has"
            if not self._told_full:
                self._told_full = True
                _log.warning(
                    "disk tier %s: %s has no room for more; it goes on with the %d chunks that it has, and tries "
                    "now and then to grow",
                    self.name,
                    self._directory(short[0].slot).path,
                    self._index.chunks,
                )

    # A chunk's way out.

    def _read_run(self, file: File, offset: int, reads: Sequence[Read]) -> list[LoadOutcome]:
        pages = [self._page() for _ in reads]
        try:
            got = file.read(self._interleaved(pages, reads), offset)
            for page, read in zip(pages, reads, strict=True):
                read.header[:] = page[: chunk_header.HEADER_BYTES]
        except OSError as error:
            if error.errno not in _READ_FAULTS:
                raise self._down(error) from error
            if len(reads) > 1:
                return self._read_one_by_one(file, offset, reads)
            return [ReadFailed(f"{file.path}: {error.strerror}")]
        finally:
            self._pages.extend(pages)
        self._drop_cached(file, offset, len(reads))
        whole = got // self._stride
        return [
            Loaded(read.nbytes) if at < whole else Damaged(f"{file.path} ends within it")
            for at, read in enumerate(reads)
        ]

    def _read_one_by_one(self, file: File, offset: int, reads: Sequence[Read]) -> list[LoadOutcome]:
        """As only one of them may be to blame."""
        outcomes: list[LoadOutcome] = []
        for at, read in enumerate(reads):
            failed = [outcome for outcome in outcomes if isinstance(outcome, ReadFailed)]
            if len(failed) >= _MAX_FAILURES and len(failed) == at:
                return [*outcomes, *failed[:1] * (len(reads) - at)]
            outcomes += self._read_run(file, offset + at * self._stride, [read])
        return outcomes

    def _readable(self, keys: Sequence[ChunkKey]) -> list[int | None]:
        """As `begin_load` of the index, without the chunks that are passed over."""
        if not self._unreadable:
            return self._index.begin_load(keys)
        asked = [key for key in keys if not self._is_passed_over(key)]
        slot_of = dict(zip(asked, self._index.begin_load(list(dict.fromkeys(asked))), strict=False))
        return [slot_of.get(key) for key in keys]

    def _is_passed_over(self, key: ChunkKey) -> bool:
        until_s = self._unreadable.get(key)
        if until_s is not None and self._clock.now_s() >= until_s:
            self._unreadable.pop(key, None)
            return False
        return until_s is not None

    def _try_to_read(self) -> None:
        """A few chunks' headers, of those that were not unreadable before if there are such: one will do.

        Raises:
            TierDown: none could be read.
        """
        keys = self._index.all_keys()
        keys = [key for key in keys if key not in self._unreadable] or keys
        some = random.sample(keys, min(_PROBED_CHUNKS, len(keys)))  # no secret depends on which
        slots = self._index.begin_load(some, touch=False)
        page = self._page()
        failure: OSError | None = None
        try:
            for slot in slots:
                if slot is None:
                    continue
                file, offset = self._place(slot)
                try:
                    self._drop_cached(file, offset, 1)
                    file.read([page], offset)
                    return
                except OSError as error:
                    failure = error
            if failure is not None:
                raise self._down(failure)
        finally:
            self._pages.append(page)
            self._index.end_load(slots)
            failure = None  # which has this frame in its traceback

    # Under the lock.

    def _discard(self, keys: Sequence[ChunkKey]) -> bool:
        slots = self._index.discard(keys)
        for key in keys if self._unreadable else ():
            self._unreadable.pop(key, None)
        asked = set(keys)
        arriving = [slot for slot, key in self._arriving.items() if key in asked]
        for slot in arriving:
            del self._arriving[slot]
        return self._wipe_if_possible([*slots, *arriving])

    def _abort(self, places: Sequence[Place]) -> None:
        for place in places:
            self._arriving.pop(place.slot, None)
        self._wipe_if_possible([place.slot for place in places])
        self._index.abort(places)

    def _wipe_if_possible(self, slots: Iterable[int]) -> bool:
        try:
            self._records.wipe(slots)
        except OSError as error:
            _log.warning("disk tier %s: records could not be wiped yet: %s", self.name, error.strerror)
            return False
        return True

    # Directories.

    def _open_directories(self) -> None:
        paths, slots = self._config.directories, self._index.slots
        opened: list[DiskDirectory] = []
        try:
            for at, path in enumerate(paths):
                directory = DiskDirectory(
                    path,
                    self._context.namespace,
                    slots=-(-(slots - at) // len(paths)),
                    slot_bytes=self._context.slot_bytes,
                    direct=self._config.direct,
                )
                opened.append(directory)
            devices = [directory.device for directory in opened]
            if self._devices not in ([], devices):
                raise ConfigError(
                    f"disk tier {self.name}: {paths} are not on the devices of the start; mount those again"
                )
            records = SlotRecords(opened, slots, syncs=self._config.durability == "power")
            self._index.adopt(records.take_over())
            self._directories, self._devices, self._records = opened, devices, records
        except BaseException as error:
            for directory in opened:
                directory.close()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"disk tier {self.name} at {paths} cannot be read: {error.strerror}; mend it or choose another "
                    "directory"
                ) from None
            raise
        for directory in self._directories:
            _log.info(
                "disk tier %s: %s, %s, %d chunks found in all",
                self.name,
                directory.path,
                "direct I/O" if directory.direct else "through the page cache",
                self._index.chunks,
            )
            for note in directory.notes:
                _log.warning("disk tier %s: %s", self.name, note)

    def _start_over(self) -> None:
        self._index.discard(self._index.all_keys())
        self._unreadable.clear()
        if not self._index.is_idle():
            raise TierDown(f"disk tier {self.name}: its directory has gone, and chunks of it are still in use")
        self._close_directories()
        try:
            self._open_directories()
        except ConfigError as error:
            raise TierDown(str(error)) from None

    def _close_directories(self) -> None:
        for directory in self._directories:
            directory.close()

    # Small things.

    def _directory(self, slot: int) -> DiskDirectory:
        return self._directories[slot % len(self._directories)]

    def _place(self, slot: int) -> tuple[File, int]:
        return self._directory(slot).place(slot // len(self._directories))

    def _page(self) -> memoryview:
        """For a header, aligned for direct I/O. Give it back to `_pages`."""
        try:
            return self._pages.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, PAGE_BYTES))

    def _drop_cached(self, file: File, offset: int, slots: int) -> None:
        if not file.direct:
            file.drop_cached(offset, slots * self._stride)

    def _interleaved(self, pages: Sequence[memoryview], chunks: Sequence[Read | Write]) -> list[memoryview]:
        slot_bytes = self._context.slot_bytes
        return [part for page, chunk in zip(pages, chunks, strict=True) for part in (page, chunk.pages[:slot_bytes])]

    def _runs(self, placed: Iterable[tuple[File, int, _Item]]) -> list[tuple[File, int, list[_Item]]]:
        """Neighbours together: one call for all of them keeps the device busy, an eighth faster than one for each."""
        runs: list[tuple[File, int, list[_Item]]] = []
        for file, offset, item in sorted(placed, key=lambda each: (each[0].fd, each[1])):
            if runs:
                last, first, items = runs[-1]
                if file is last and offset == first + len(items) * self._stride and len(items) < _MAX_IN_A_RUN:
                    items.append(item)
                    continue
            runs.append((file, offset, [item]))
        return runs

    def _down(self, error: OSError) -> TierDown:
        return TierDown(f"disk tier {self.name} at {', '.join(self._config.directories)}: {error.strerror or error}")
