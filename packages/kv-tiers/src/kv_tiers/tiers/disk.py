"""The disk tier: a few large files with room for payloads of any size, and an index file, which is all that a restart
reads.

The promise: after the process or the power is lost at any instant, the next start finds every chunk whose store was
answered with `Stored`, unless it was evicted or discarded since, and nothing else. It is kept by an order of writes,
followed once per store and not per chunk:

    1. records of what the chunk's place held before are wiped, durably, unless they already were
    2. the chunk's header and payload are written to the place, durably
    3. the chunk's record is written, durably
    4. the chunk can be found, and `Stored` is answered

A file system that is full is not at fault: the tier continues with the room that it has. One that has turned read-only,
as after an error, is: no eviction and no discard could be recorded there, so the tier is down until it accepts writes
again.

`disk_chunks` implements that order, `disk_records` tracks which records are durable, `disk_directory` describes the
files, `space` allocates their room, and docs/adr/0013 says why it is slots.
"""

import errno
import itertools
import mmap
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from kv_core.clock import Clock
from kv_core.errors import ConfigError, MisuseError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, StoreOutcome
from kv_core.transfer import FileExtent
from kv_eviction.policy import EvictionPolicy
from kv_eviction.registry import DEFAULT_POLICY, PolicySpec, make_policy

from kv_tiers import chunk_header
from kv_tiers.chunk_header import HEADER_BYTES
from kv_tiers.clock import MonotonicClock
from kv_tiers.options import read_options
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.tier import (
    ANY_CHUNKS,
    FileLease,
    Read,
    Tier,
    TierContext,
    TierUsage,
    WhenFull,
    Write,
    checked,
    encoded_bytes,
)
from kv_tiers.tiers.disk_chunks import DiskChunks, bytes_for
from kv_tiers.tiers.disk_directory import check_place, place_of, try_place
from kv_tiers.tiers.disk_files import NO_ROOM, File, Move, Segment, behind, bytes_in_files, size_of_file_system
from kv_tiers.tiers.disk_record import header_of
from kv_tiers.tiers.index import IndexedTier, read_quotas
from kv_tiers.tiers.space import Place

_READ_FAULTS: Final = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG)
"""Errors of devices and file systems that cannot read certain bytes, while others may still be readable."""
_MAX_FAILURES: Final = 3
"""How many chunks of one call may fail one by one before the rest are skipped: each may cost the device's time-out."""
_PROBED_CHUNKS: Final = 8


class _Located(NamedTuple):
    """A chunk that a call reads.

    number: its position in the call.
    wanted_bytes: how much of the payload, counted from its start.
    payload: memory for the part of the payload that is read.
    segments: where that part is in the files, with the header before it unless the start of the payload is left out.
    """

    number: int
    read: Read
    wanted_bytes: int
    payload: memoryview
    segments: Sequence[Segment]


class DiskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a disk tier."""

    directory: str | list[str]
    """One, or several on different devices, over which chunks are spread. Created if the parent exists."""
    capacity_bytes: int
    """Of all directories together, for chunks of one format. Allocated as it is used, about a GiB at a time."""
    direct: Literal["auto", "always", "never"] = "auto"
    """Bypass the page cache (O_DIRECT). auto: where the file system supports it."""
    durability: Literal["power", "process"] = "power"
    """What stored chunks survive: a power loss, or only the end of the process, which saves waiting for the medium."""
    wait_s: float = 1.0
    """How long a store waits for room while every chunk is being read or written: up to 5, well below the 10 s after
    which a lane gives up a call that does not return, and with it the tier."""
    policy: PolicySpec = DEFAULT_POLICY
    """The eviction policy."""
    when_full: WhenFull = "drop_chunks"
    """drop_parts: cut chunks to their first half and then to their first quarter before evicting any. What is left is
    an approximation, so the tier needs `codec: progressive` and `approximate: true` (docs/quality.md)."""
    quota_bytes: dict[str, int] = {}
    """The part that a tenant has to itself, and its limit, by its name in `tenants`. Others share what these leave."""

    @property
    def directories(self) -> list[str]:
        return [self.directory] if isinstance(self.directory, str) else self.directory


def slots_for(config: DiskConfig, context: TierContext) -> int:
    """The number of chunks for which the capacity has room. Raises `ConfigError`: there is not one slot for every
    directory, or a setting makes no sense."""
    paths = config.directories
    if not paths or not all(paths) or len(set(map(Path, paths))) < len(paths):
        raise ConfigError(f"the disk tier's `directory` must be one directory or several different ones, not {paths}")
    if not 0 <= config.wait_s <= 5:
        raise ConfigError(
            f"the disk tier's `wait_s` is {config.wait_s}; write 0 to 5, because a call that takes 10 s counts as one "
            "that hangs, and the tier is not used meanwhile"
        )
    slots = (config.capacity_bytes - bytes_for(context, 0, len(paths))) // bytes_for(context, 1, 0)
    if slots < len(paths):
        needed = bytes_for(context, len(paths), len(paths))
        raise ConfigError(
            f"the disk tier's `capacity_bytes` of {config.capacity_bytes} has no room for a chunk of this model in "
            f"every directory; write at least {needed} ({spelled(needed)}), and for real use a thousand times that"
        )
    return slots


def _check_options(options: Mapping[str, object]) -> None:
    config = read_options(DiskConfig, options, "disk")
    make_policy(config.policy, slots := slots_for(config, ANY_CHUNKS))
    read_quotas(config.quota_bytes, config.capacity_bytes, ANY_CHUNKS, slots)
    for path in config.directories:
        check_place(Path(path))
        try_place(Path(path))
    _check_capacity(config)


def _check_capacity(config: DiskConfig) -> None:
    """Raises `ConfigError`: the file systems can never hold that much, whatever else is removed from them."""
    paths = config.directories
    directories_on = Counter(place_of(Path(path)) for path in paths)
    for (_, mount), directories in directories_on.items():
        with suppress(OSError):
            wanted_bytes, total_bytes = config.capacity_bytes * directories // len(paths), size_of_file_system(mount)
            if 0 < total_bytes < wanted_bytes:
                here = " of all its directories" if len(paths) > 1 else ""
                raise ConfigError(
                    f"the disk tier's capacity_bytes of {spelled(config.capacity_bytes)}{here} asks for "
                    f"{spelled(wanted_bytes)} on {mount}, whose file system has {spelled(total_bytes)} in all; write "
                    "less than that, and leave room for whatever else is there"
                )


@checked(_check_options)
def make_disk_tier(options: Mapping[str, object], context: TierContext) -> Tier:
    """The factory of the tier type `disk`; `DiskConfig` describes `options`. Raises `ConfigError`: options that cannot
    be honoured, or directories that cannot be used."""
    config = read_options(DiskConfig, options, "disk")
    _check_capacity(config)
    common = slots_for(config, context) - sum(_quotas(config, context).values())
    return DiskTier(config, context, make_policy(config.policy, max(1, common)))


def _quotas(config: DiskConfig, context: TierContext) -> dict[bytes, int]:
    slots = slots_for(config, context)
    return read_quotas(config.quota_bytes, config.capacity_bytes, context, slots, len(config.directories))


class DiskTier(IndexedTier):
    """Safe to call from any thread."""

    name = "disk"
    holds_is_local = True

    def __init__(
        self, config: DiskConfig, context: TierContext, policy: EvictionPolicy, *, clock: Clock | None = None
    ) -> None:
        """Take possession of the directories and find what is in them: about a second for every 100 000 chunks. Raises
        `ConfigError`: a setting or a directory cannot be used.

        policy: of the common share (`Shares`), which has `slots_for(config, context)` chunks without quotas.
        """
        self._config = config
        self.name = context.name or self.name
        self._clock: Clock = clock or MonotonicClock()
        self._chunks = DiskChunks(
            self.name,
            config.directories,
            context,
            slots_for(config, context),
            policy,
            direct=config.direct,
            syncs=config.durability == "power",
            drops_parts=config.when_full == "drop_parts",
            clock=self._clock,
            quotas=_quotas(config, context),
            share_policy=partial(make_policy, config.policy),
        )
        super().__init__(self._chunks.index)
        self._context = context
        self._format_id = chunk_header.format_id(context.fingerprint)
        self._drops_parts = config.when_full == "drop_parts"
        self._reads_failed = False  # since the last probe that found something readable
        self._lease_ids = itertools.count()
        self._leases: dict[int, list[int | None]] = {}  # under the lock of the chunks

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        held = self._index.holds(keys)
        if self._chunks.has_unreadable():
            held = [is_held and not self._chunks.is_passed_over(key) for is_held, key in zip(held, keys, strict=True)]
        return held

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        entries = self._chunks.begin_load([read.key for read in reads])
        outcomes: list[LoadOutcome] = [Absent()] * len(reads)
        try:
            located = [
                self._locate(number, entry, read)
                for number, (read, entry) in enumerate(zip(reads, entries, strict=True))
                if entry is not None
            ]
            for number, outcome in self._read(located).items():
                outcomes[number] = outcome
        finally:
            self._index.end_load(entries)
        damaged = [read.key for read, outcome in zip(reads, outcomes, strict=True) if isinstance(outcome, Damaged)]
        failed = [read.key for read, outcome in zip(reads, outcomes, strict=True) if isinstance(outcome, ReadFailed)]
        if damaged or failed:
            with self._chunks.lock:
                self._chunks.discard(damaged)
                self._reads_failed = self._reads_failed or bool(failed)
                self._chunks.pass_over(failed)
        return outcomes

    load_prefixes = load_remainders = load

    def some_keys(self, count: int) -> list[ChunkKey]:
        keys = self._index.all_keys()
        return keys[:: max(1, len(keys) // max(1, count))][:count]

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        stored: set[ChunkKey] = set()
        why = "every slot is being read or written, or holds an earlier chunk of the prompt"
        until_s = self._clock.now_s() + self._config.wait_s
        remaining = list(writes)
        while remaining:
            releases = self._index.releases
            sizes = [write.stored_bytes for write in remaining]
            decoded = [encoded_bytes(write) for write in remaining] if self._drops_parts else ()
            places = self._chunks.reserve([write.key for write in remaining], sizes, remaining[0].parent, decoded)
            taken = [(write, place) for write, place in zip(remaining, places, strict=True) if place is not None]
            written = self._write(taken)
            if len(written) == len(writes):
                return [Stored()] * len(writes)
            stored.update(write.key for write in written)
            held = self._index.holds([write.key for write in remaining])
            stored.update(write.key for write, is_held in zip(remaining, held, strict=True) if is_held)
            remaining = [write for write in remaining if write.key not in stored]
            if taken and not written:
                why = "the disk is full"
                break
            if remaining and not taken:
                wait_s = until_s - self._clock.now_s()
                keys, parent = [write.key for write in remaining], remaining[0].parent
                if wait_s <= 0 or not self._index.wait_for_room(releases, wait_s, keys, parent):
                    break
        return [Stored() if write.key in stored else Refused(why) for write in writes]

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        with self._chunks.lock:
            whole = self._chunks.discard(keys)
        if not whole:
            raise TierDown(f"disk tier {self.name}: discarded chunks may reappear after a restart")
        self._chunks.sync_all_wipes()

    def probe(self) -> None:
        """Also repair what can be repaired: start over in directories that were replaced, and retry wipes that failed.

        After a failed read, at least one chunk must be readable.
        """
        with self._chunks.lock:
            self._chunks.mend()
        if self._reads_failed:
            self._try_to_read()
            self._reads_failed = False

    def usage(self) -> TierUsage:
        capacity_bytes = self._index.slots * bytes_for(self._context, 1, 0)
        usage = (self._index.chunks, self._chunks.used_bytes, capacity_bytes, self._chunks.full)
        return TierUsage(*usage, self._index.by_group(), self._index.chunks_cut, self._index.quotas())

    def close(self) -> None:
        self._chunks.close()

    # Extents of the files, leased to callers that read the bytes (`kv_tiers.tier.SupportsFileExtents`).

    def lease_extents(self, keys: Sequence[ChunkKey]) -> FileLease:
        entries = self._chunks.begin_load(keys)
        try:
            extents = [
                None if entry is None else self._extent_of(key, entry) for key, entry in zip(keys, entries, strict=True)
            ]
        except BaseException as error:
            self._index.end_load(entries)
            if isinstance(error, OSError):
                raise self._chunks.down(error) from error
            raise
        lease = FileLease(next(self._lease_ids), tuple(extents))
        with self._chunks.lock:
            self._leases[lease.id] = entries
        return lease

    def end_lease(self, lease: FileLease, failed: Sequence[ChunkKey] = ()) -> None:
        with self._chunks.lock:
            entries = self._leases.pop(lease.id, None)
            self._chunks.pass_over(failed)
            self._reads_failed = self._reads_failed or bool(failed)
        if entries is None:
            raise MisuseError(f"file lease {lease.id} is not open")
        self._index.end_load(entries)

    def _extent_of(self, key: ChunkKey, entry: int) -> FileExtent | None:
        """The extent to lease. None: the chunk is encoded or in pieces, or its record was wiped meanwhile or is
        damaged; a load may report which."""
        extent = self._index.extent(entry)
        if not isinstance(extent.units, range):
            return None
        local_entry = entry // len(self._chunks.directories)
        stored_header = header_of(self._chunks.directory(entry).record_at(local_entry), local_entry)
        header = None if stored_header is None else chunk_header.read_header(stored_header)
        if not isinstance(header, chunk_header.Header) or header.key != key or header.codec or header.encryption:
            return None
        if (header.decoded_bytes, header.format_id) != (self._context.chunk_bytes, self._format_id):
            return None
        ((file, offset, _),) = self._chunks.segments(entry, extent.units, PAGE_BYTES)
        return FileExtent(str(file.path.absolute()), offset + PAGE_BYTES, header.decoded_bytes, header.checksum)

    # Storing.

    def _write(self, taken: Sequence[tuple[Write, Place]]) -> list[Write]:
        """Make chunks durable and findable. Returns those for which the medium had room. Raises `TierDown`: none was
        stored."""
        if not taken:
            return []
        write_of = {place.entry: write for write, place in taken}
        places = [place for _, place in taken]
        with self._chunks.aborting(places):
            self._chunks.make_ready(places)
            self._write_chunks(places, write_of)
            written = [write_of[place.entry] for place in places]
            records = [(place, write.header) for place, write in zip(places, written, strict=True)]
            self._chunks.write_records(records, written[0].parent if written else None)
        self._chunks.make_findable(places, [write.parent for write in written])
        return written

    def _write_chunks(self, places: list[Place], write_of: Mapping[int, Write]) -> None:
        """Write the chunks to their places, durably. Places for which the medium has no room are removed from the list
        and withheld."""
        without_space: set[int] = set()
        why = ""
        files: set[File] = set()
        headers = self._chunks.header_pages.take(len(places))
        try:
            moves: list[Move] = []
            for number, (place, header) in enumerate(zip(places, headers, strict=True)):
                write, nbytes = write_of[place.entry], bytes_in_files(place.stored_bytes)
                header[:HEADER_BYTES] = write.header
                segments = self._chunks.segments(place.entry, place.units, nbytes)
                moves.append((number, [header, write.pages[: nbytes - PAGE_BYTES]], segments))
            runs = self._chunks.runs(moves)
            for run in runs:
                try:
                    run.file.write(run.buffers, run.offset)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    without_space.update(number for number, _ in run.parts)
                    why = error.strerror or ""
                    continue
                files.add(run.file)
            self._chunks.sync_files(files)
            for run in runs:
                if not run.file.direct:
                    run.file.drop_cached(run.offset, run.end - run.offset)
        finally:
            self._chunks.header_pages.give(headers)
        self._chunks.withhold(places, [places[number] for number in without_space], why)

    # Loading.

    def _locate(self, number: int, entry: int, read: Read) -> _Located:
        extent = self._index.extent(entry)
        wanted_bytes = min(read.wanted_bytes, extent.stored_bytes)
        nbytes = bytes_in_files(wanted_bytes)
        segments = self._chunks.segments(entry, extent.units, nbytes)
        if read.from_bytes:
            segments = behind(segments, PAGE_BYTES + read.from_bytes)
        return _Located(number, read, wanted_bytes, read.pages[read.from_bytes : nbytes - PAGE_BYTES], segments)

    def _read(self, located: Sequence[_Located]) -> dict[int, LoadOutcome]:
        """The outcomes, by each chunk's number in the call."""
        outcomes: dict[int, LoadOutcome] = {}
        failed: dict[int, LoadOutcome] = {}
        headers = self._chunks.header_pages.take(len(located))
        try:
            runs = self._chunks.runs(
                (chunk.number, [chunk.payload] if chunk.read.from_bytes else [header, chunk.payload], chunk.segments)
                for chunk, header in zip(located, headers, strict=True)
            )
            for run in runs:
                try:
                    end = run.offset + run.file.read(run.buffers, run.offset)
                except OSError as error:
                    if error.errno not in _READ_FAULTS:
                        raise self._chunks.down(error) from error
                    failed |= dict.fromkeys(
                        [number for number, _ in run.parts], ReadFailed(f"{run.file.path}: {error.strerror}")
                    )
                    continue
                if not run.file.direct:
                    run.file.drop_cached(run.offset, run.end - run.offset)
                for number, needed in run.parts:
                    if needed > end:
                        outcomes[number] = Damaged(f"{run.file.path} ends within it")
            for chunk, header in zip(located, headers, strict=True):
                if not chunk.read.from_bytes:
                    chunk.read.header[:] = header[:HEADER_BYTES]
                outcomes.setdefault(chunk.number, Loaded(chunk.wanted_bytes))
        finally:
            self._chunks.header_pages.give(headers)
        if len(failed) > 1:
            failed = self._read_one_by_one([chunk for chunk in located if chunk.number in failed])
        return outcomes | failed

    def _read_one_by_one(self, located: Sequence[_Located]) -> dict[int, LoadOutcome]:
        """Read chunks one by one, because a single bad one may have made the whole read fail."""
        outcomes: dict[int, LoadOutcome] = {}
        for chunk in located:
            failed = [outcome for outcome in outcomes.values() if isinstance(outcome, ReadFailed)]
            if len(failed) >= _MAX_FAILURES and len(failed) == len(outcomes):
                return dict.fromkeys([chunk.number for chunk in located], failed[0]) | outcomes
            outcomes |= self._read([chunk])
        return outcomes

    def _try_to_read(self) -> None:
        """Read the headers of a few chunks, if possible of those that have not been unreadable. One success is enough.
        Raises `TierDown`: none could be read."""
        keys = self._chunks.readable_first()
        sample = random.sample(keys, min(_PROBED_CHUNKS, len(keys)))  # no secret depends on which
        entries = self._index.begin_load(sample, touch=False)
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        failure: OSError | None = None
        try:
            for entry in entries:
                if entry is None:
                    continue
                file, offset, _ = self._chunks.segments(entry, self._index.extent(entry).units, PAGE_BYTES)[0]
                try:
                    if not file.direct:
                        file.drop_cached(offset, PAGE_BYTES)
                    file.read([page], offset)
                    return
                except OSError as error:
                    failure = error
            if failure is not None:
                raise self._chunks.down(failure)
        finally:
            self._index.end_load(entries)
            failure = None  # its traceback refers to this frame
