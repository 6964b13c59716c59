"""The files of one directory of the disk tier: who may use them, what they contain, and how they are written.

    lock        locked (flock) by the one process that uses the directory
    index       a header page, then records of 512 bytes, one for each chunk: all that a restart reads
    slab-0000…  units of whole pages (`kv_tiers.tiers.space`): the chunk's header in a page of its own, then the payload

    header  magic 8 | version u32 | record's bytes u32 | unit's bytes u64 | units of a slot u32 | zero u32
            | slab's slots u64 | namespace 16 | xxh3_64 of the above
    records: `kv_tiers.tiers.disk_record`

Everything is little-endian. A record lists the units of its chunk in the order of the bytes; their number follows from
the payload's size. It vouches for the units as they were when it was written, so it must be wiped (with zeros) before
the bytes of any of them are replaced. Entries, slots and units are numbered from 0 in each directory, so directories
can be striped, moved and left out in any combination.

Nothing here tracks residency or makes decisions. Errors of the system are `OSError`; only the constructor turns them
into `ConfigError`.
"""

import errno
import mmap
import os
import re
import resource
import secrets
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError

from kv_tiers.chunk_header import SEAL_BYTES, seal, unseal
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.pool.private_files import lock, open_own_directory
from kv_tiers.tiers.disk_files import NO_ROOM, File, FileSystem, allocated_bytes
from kv_tiers.tiers.disk_record import RECORD_BYTES, Found, RecordReader
from kv_tiers.tiers.space import CHUNKS_A_SLOT, Geometry, runs

VERSION: Final = 2
_MAGIC: Final = b"kvdisk\r\n"
_HEADER: Final = struct.Struct("<8sIIQI4xQ16s")
_SLAB_BYTES: Final = 1 << 30
_MAX_SLABS: Final = 64
"""Larger directories have larger slabs, because every slab is an open file. One whose capacity was raised has more."""
_OTHER_FILES: Final = 256
"""The descriptors that are left for all else when more slabs than that are allowed."""
_RECORDS_AT_ONCE: Final = 2048
_INDEX_STEPS: Final = 64
_MIN_INDEX_STEP_BYTES: Final = 16 << 10
"""The index grows in steps of at least this size: most of its room is needed only for small payloads."""
_SLAB_NAME: Final = re.compile(r"slab-[0-9]{4}|slab-[1-9][0-9]{4,8}")
_TRIAL: Final = "trial"
_ELSEWHERE: Final = "remove it or choose another directory"


class DiskDirectory:
    """The slots of one directory. Safe to call from any thread; close it last."""

    def __init__(
        self, root: str, namespace: str, *, slots: int, geometry: Geometry, direct: str, to_open: int = 1
    ) -> None:
        """Take possession of the directory, which is created if its parent exists. Raises `ConfigError`: it cannot be
        used, is in use, or has files in it that are not ours.

        to_open: how many directories like this one are still to be opened, with this one.
        """
        self.path = Path(root) / namespace
        self.slots = slots
        self._geometry = geometry
        self._unit_bytes, self._slot_units = geometry.unit_bytes, geometry.slot_units
        self.notes: list[str] = []
        """Remarks on what was found, for the log."""
        self._growing = threading.Lock()
        self._slabs: dict[int, File] = {}
        self._backed: dict[int, int] = {}  # bytes allocated on the medium, by slab
        self._index_bytes = 0
        self._slabs_complete = False  # every slot is allocated on the medium
        self.entries_ready = 0
        """Entries below this need no `make_room`, whatever their units are."""
        self._open_files: list[File] = []
        self._namespace = bytes.fromhex(namespace)
        self._fd = -1
        try:
            self._file_system = FileSystem(self.path)
            _make(Path(root))
            self._fd = _make_own(self.path)
            lock = self._open("lock")
            status = os.fstat(lock.fd)
            self._lock_path, self._lock_identity = str(lock.path), (status.st_ino, status.st_dev)
            self.place = place_of(self.path)
            self._take_possession(lock)
            self.direct = direct != "never"
            try:
                self.direct = try_out(self._fd, self.path, self._file_system, direct=self.direct)
            except OSError as error:
                if error.errno not in NO_ROOM:  # for one more file; those that are there can be used nevertheless
                    raise
                self.direct = False
                self.notes.append(f"uses the page cache until the next start, as no file can be made: {error.strerror}")
            self._file_system.needs_direct = direct == "always"
            if direct == "always" and not self.direct:
                raise ConfigError(
                    f"{self.path} has no direct I/O (O_DIRECT); write `direct: auto` or another directory"
                )
            self.index = self._open("index")
            self._slab_slots = -(-max(_SLAB_BYTES, slots * geometry.slot_bytes // _MAX_SLABS) // geometry.slot_bytes)
            self._begin_or_continue(to_open)
            self._note_other_formats()
        except OSError as error:
            self.close()
            failed = self.path / os.fsdecode(error.filename or "")  # for one of our files, only its name
            raise ConfigError(
                f"{failed} cannot be used for the disk tier: {error.strerror}; repair it or choose another directory"
            ) from None
        except BaseException:
            self.close()
            raise

    def has_vanished(self) -> bool:
        """Whether what is at our path is no longer what we opened: removed, replaced, or unmounted. Raises `OSError`:
        the path cannot be looked at now, which says nothing about the directory."""
        if self._fd < 0:
            return True
        try:
            status = os.lstat(self._lock_path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return (status.st_ino, status.st_dev) != self._lock_identity

    def try_out(self) -> None:
        """Do with a small file all that stores and loads do with theirs. Raises `OSError`: chunks cannot be stored
        there, for another reason than that there is no room."""
        with _room_or_not():  # what is there can be used nevertheless
            self.direct = try_out(self._fd, self.path, self._file_system, direct=self.direct)

    def records(self, number: int, directories: int) -> Iterator[Found]:
        """Every valid record. Other entries are free.

        number, directories: which directory of the tier this is, of how many; entries are those of the tier.
        """
        piece = bytearray(_RECORDS_AT_ONCE * RECORD_BYTES)
        entries = CHUNKS_A_SLOT * self.slots
        backed = [
            range(slab * self._slab_slots, slab * self._slab_slots + nbytes // self._geometry.slot_bytes)
            for slab, nbytes in self._backed.items()
        ]
        reader = RecordReader(self._geometry, self.slots, backed, number, directories)
        for start in range(0, entries, _RECORDS_AT_ONCE):
            records_read = self.index.read([memoryview(piece)], PAGE_BYTES + start * RECORD_BYTES) // RECORD_BYTES
            count = min(records_read, entries - start)
            if not count:
                return
            yield from reader.found_in(piece, start, count)

    def record_at(self, entry: int) -> bytearray:
        """The record as it is stored. If there is none: bytes that `header_of` and `shortened` reject."""
        record = bytearray(RECORD_BYTES)
        self.index.read([memoryview(record)], PAGE_BYTES + entry * RECORD_BYTES)
        return record

    def write_records(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Write records, given by entry. Adjacent ones are written in one call."""
        ordered = sorted(records)
        done = 0
        for first, count in runs([entry for entry, _ in ordered]):
            run = b"".join([record for _, record in ordered[done : done + count]])
            self.index.write([run], PAGE_BYTES + first * RECORD_BYTES)
            done += count

    def wipe_records(self, entries: Iterable[int]) -> None:
        for first, count in runs(sorted(entries)):
            self.index.write([bytes(count * RECORD_BYTES)], PAGE_BYTES + first * RECORD_BYTES)

    def make_room(self, entry: int, units: Sequence[int]) -> None:
        """Allocate space on the medium for a record and for these units."""
        record_end = PAGE_BYTES + (entry + 1) * RECORD_BYTES
        if self._index_bytes < record_end:
            with self._growing:
                self._grow_index(record_end)
        if self._slabs_complete:
            return
        for number, _, end in self._slab_runs(units):
            if self._backed.get(number, 0) < end:
                with self._growing:
                    self._grow(number, end)

    def segments(self, units: Sequence[int], nbytes: int) -> list[tuple[File, int, int]]:
        """File, offset and size of each contiguous piece of the first `nbytes` bytes in these units, in order."""
        if isinstance(units, range):  # a whole slot is in one slab
            slab, unit = divmod(units.start, self._slab_slots * self._slot_units)
            return [(self._slabs[slab], unit * self._unit_bytes, nbytes)]
        pieces = []
        for number, offset, end in self._slab_runs(units):
            if nbytes > 0:
                pieces.append((self._slabs[number], offset, min(end - offset, nbytes)))
            nbytes -= end - offset
        return pieces

    def _slab_runs(self, units: Sequence[int]) -> list[tuple[int, int, int]]:
        """Slab, offset and end of each run of adjacent units within a slab."""
        slab_units, unit_bytes = self._slab_slots * self._slot_units, self._unit_bytes
        slab_runs = []
        for first, count in runs(units):
            unit, end = first, first + count
            while unit < end:
                slab, offset = divmod(unit, slab_units)
                step = min(end - unit, slab_units - offset)
                slab_runs.append((slab, offset * unit_bytes, (offset + step) * unit_bytes))
                unit += step
        return slab_runs

    def records_there(self) -> int:
        """How many records the index has room for on the medium."""
        return (self._index_bytes - PAGE_BYTES) // RECORD_BYTES

    def write_header(self) -> None:
        """Write the same header again, to see whether the medium accepts writes."""
        self.index.write([self._header()], 0)

    def files(self) -> list[File]:
        """The files on which chunks depend."""
        return [self.index, *self._slabs.values()]

    def close(self) -> None:
        """Closing again does nothing. If closing one file fails, the others are closed nevertheless, and so is the
        lock."""
        with ExitStack() as closing:
            opened, self._fd = self._fd, -1
            if opened >= 0:
                closing.callback(os.close, opened)
            for file in self._open_files:
                closing.callback(file.close)

    def _open(self, name: str, *, direct: bool = False) -> File:
        direct = direct and not self._file_system.lacks("O_DIRECT")
        file = File(self._fd, self.path / name, self._file_system, direct=direct)
        self._open_files.append(file)
        return file

    def _take_possession(self, file: File) -> None:
        try:
            lock(file.fd, file.path)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path} is in use by another disk tier, in this process or another, and has one owner: stop "
                "that one or choose another directory"
            ) from None
        if self.has_vanished():
            raise ConfigError(f"{self.path} was removed while it was opened; start again")

    def _header(self) -> bytes:
        unit_bytes, slot_units = self._geometry.unit_bytes, self._geometry.slot_units
        fields = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES, unit_bytes, slot_units, self._slab_slots, self._namespace)
        return seal(fields).ljust(PAGE_BYTES, b"\0")

    def _begin_or_continue(self, to_open: int) -> None:
        page = bytearray(PAGE_BYTES)
        bytes_read = self.index.read([memoryview(page)], 0)
        if any(page) and page[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(
                f"{self.index.path} is not the index of a disk tier; move it away or choose another directory"
            )
        header = page[: _HEADER.size + SEAL_BYTES]
        _, version, record_bytes, unit_bytes, slot_units, slab_slots, namespace = _HEADER.unpack_from(header)
        geometry = Geometry(unit_bytes, slot_units)
        if (
            bytes_read == PAGE_BYTES
            and unseal(header) is not None
            and (version, record_bytes, namespace) == (VERSION, RECORD_BYTES, self._namespace)
            and geometry == self._geometry
            and slab_slots > 0
        ):
            self._slab_slots = slab_slots
            self._allow_descriptors(to_open)
            self._continue()
            return
        slabs = self._slabs_found()
        if any(page):
            self.notes.append(f"starts empty: {self.index.path} is damaged or of another version")
        elif slabs:
            self.notes.append(
                f"starts empty: {self.index.path} was removed or cut short, and nothing else records which of the "
                f"chunks in {len(slabs)} slab files were kept and which were discarded"
            )
        self.index.truncate(0)
        self.index.sync()
        for number in slabs:
            os.unlink(_slab_name(number), dir_fd=self._fd)
        self.index.write([self._header()], 0)
        self.index.sync()
        self._index_bytes = PAGE_BYTES
        self._file_system.sync_directory(self._fd)

    def _allow_descriptors(self, directories: int) -> None:
        """Raise this process's limit of open files if that many directories with as many slabs need more. Raises
        `ConfigError`: it cannot be raised that far."""
        slabs = -(-self.slots // self._slab_slots)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(os.listdir("/proc/self/fd")) + directories * slabs + _OTHER_FILES
        if slabs <= _MAX_SLABS or soft == resource.RLIM_INFINITY or needed <= soft:
            return
        if hard != resource.RLIM_INFINITY and needed > hard:
            raise ConfigError(
                f"{self.path} was begun with a smaller capacity, and so with small files, of which this one needs "
                f"{slabs}: with others that makes {needed} open files, and this process may have {hard}. Raise that "
                f"limit (ulimit -n {needed}), write a smaller `capacity_bytes`, or begin in a new directory, whose "
                "files are larger"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))

    def _continue(self) -> None:
        # With a smaller capacity than last time, records beyond it are dropped for good, lest chunks that are discarded
        # meanwhile come back later.
        end = PAGE_BYTES + CHUNKS_A_SLOT * self.slots * RECORD_BYTES
        if self.index.nbytes > end:
            self.index.truncate(end)
        dropped_bytes = 0
        for number in self._slabs_found():
            slots = self._slots_in(number)
            if slots <= 0:
                dropped_bytes += os.stat(_slab_name(number), dir_fd=self._fd).st_size
                os.unlink(_slab_name(number), dir_fd=self._fd)
                continue
            slab = self._slabs[number] = self._open(_slab_name(number), direct=self.direct)
            if slab.nbytes > slots * self._geometry.slot_bytes:
                dropped_bytes += slab.nbytes - slots * self._geometry.slot_bytes
                slab.truncate(slots * self._geometry.slot_bytes)
            self._note_backed(number, slab.nbytes)
            slab.sync()
        if dropped_bytes:
            self.notes.append(
                f"{self.path} has a smaller capacity than at the last start: the chunks in {spelled(dropped_bytes)} "
                "beyond it are dropped for good"
            )
        # The last process may have died before this was durable, or may not have synced at all; we rely on all of it.
        self.index.sync()
        self._index_bytes = self.index.nbytes
        self._count_ready()

    def _note_other_formats(self) -> None:
        """Note what other formats take space here, because nothing else would report it."""
        other_bytes: Counter[bool] = Counter()
        old = []
        for directory in self.path.parent.glob("[0-9a-f]" * 32):
            if directory == self.path or not directory.is_dir():
                continue
            with suppress(OSError):  # another user's, or removed meanwhile
                nbytes = allocated_bytes(directory)
                is_old = _version_of(directory / "index") not in (None, VERSION)
                old += [directory.name] * is_old
                other_bytes[is_old] += nbytes
        if old:
            self.notes.append(
                f"chunks that another release stored take {spelled(other_bytes[True])} in {self.path.parent}; this "
                f"one neither reads nor removes them: remove {', '.join(sorted(old))} if that release is no longer "
                "used"
            )
        if other_bytes[False]:
            self.notes.append(
                f"chunks of other formats take {spelled(other_bytes[False])} in {self.path.parent}; remove the "
                "directories there that are no longer used"
            )

    def _slabs_found(self) -> list[int]:
        return [int(name[5:]) for name in os.listdir(self._fd) if _SLAB_NAME.fullmatch(name)]

    def _slots_in(self, number: int) -> int:
        return min(self._slab_slots, self.slots - number * self._slab_slots)

    def _grow_index(self, min_bytes: int) -> None:
        max_bytes = PAGE_BYTES + CHUNKS_A_SLOT * self.slots * RECORD_BYTES
        step = max(_MIN_INDEX_STEP_BYTES, max_bytes // _INDEX_STEPS // RECORD_BYTES * RECORD_BYTES)
        end = max(min_bytes, min(self._index_bytes + step, max_bytes))
        if self._index_bytes < min_bytes:
            self._index_bytes = _allocate(self.index, self._index_bytes, min_bytes, end, RECORD_BYTES)
            self._count_ready()

    def _grow(self, number: int, min_bytes: int) -> None:
        """Allocate all of the slab's space, or as much as there is, but at least `min_bytes`."""
        allocated = self._backed.get(number, 0)
        if allocated >= min_bytes:
            return
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._open(_slab_name(number), direct=self.direct)
            self._file_system.sync_directory(self._fd)
        stride = self._geometry.slot_bytes
        # Whole slots, because taking the first unit of a slot makes all its units available.
        min_bytes = -(-min_bytes // stride) * stride
        try:
            end = _allocate(slab, allocated, min_bytes, self._slots_in(number) * stride, stride)
        except OSError:
            if slab is not self._slabs.get(number):
                self._open_files.remove(slab)
                slab.close()
            raise
        self._slabs[number] = slab
        self._note_backed(number, end)

    def _note_backed(self, number: int, nbytes: int) -> None:
        self._backed[number] = nbytes
        self._slabs_complete = sum(self._backed.values()) >= self.slots * self._geometry.slot_bytes
        self._count_ready()

    def _count_ready(self) -> None:
        self.entries_ready = max(0, self.records_there()) if self._slabs_complete else 0


def _allocate(file: File, allocated: int, min_bytes: int, max_bytes: int, step: int) -> int:
    """Extend a file of `allocated` bytes towards `max_bytes`, as far as there is space: to `min_bytes` and a number of
    steps beyond. Returns its new size.
    """
    while True:
        try:
            return file.allocate(allocated, min_bytes, max_bytes)
        except OSError as error:
            if error.errno not in NO_ROOM or max_bytes == min_bytes:
                raise
            max_bytes = min_bytes + (max_bytes - min_bytes) // step // 2 * step


def try_place(path: Path) -> FileSystem:
    """Do there what the start of a tier, stores and loads do, and leave nothing behind. Raises `ConfigError`: a disk
    tier cannot be there."""
    file_system, inside = FileSystem(path), path / f".kv-{secrets.token_hex(8)}"
    is_new = not path.exists()
    try:
        with ExitStack() as undo, _room_or_not():
            _make(path)
            if is_new:
                undo.callback(_remove, path)
            undo.callback(_remove, inside)
            try:
                descriptor = _make_own(inside)
            except FileNotFoundError:  # somebody else's trial has just removed the directory
                _make(path)
                descriptor = _make_own(inside)
            undo.callback(os.close, descriptor)
            try_out(descriptor, inside, file_system, direct=True)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used for the disk tier: {error.strerror}; repair it or choose another directory"
        ) from None
    return file_system


def _remove(directory: Path) -> None:
    """If it is there and empty: another tier may have begun to use it."""
    with suppress(OSError):
        directory.rmdir()


def try_out(directory: int, path: Path, file_system: FileSystem, *, direct: bool) -> bool:
    """Do in a directory all that a tier does there: lock, reserve room, write, sync, read back. Nothing is left there.
    Raises `ConfigError` and `OSError`: chunks cannot be stored there.

    directory: an open descriptor of `path`. direct: try to bypass the page cache. Returns whether that works.
    """
    pages = [memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(4)]
    for page in pages[:2]:
        page[:] = os.urandom(PAGE_BYTES)
    file = File(directory, path / _TRIAL, file_system, direct=direct)
    try:
        lock(file.fd, file.path)
        with _room_or_not():  # the other files may have all that they need
            file.allocate(0, 2 * PAGE_BYTES, 2 * PAGE_BYTES)
            file.write(pages[:2], 0)
            file.sync()
            for is_last in (not file.direct, True):
                if not file.direct:
                    file.drop_cached(0, 2 * PAGE_BYTES)
                if file.read(pages[2:], 0) == 2 * PAGE_BYTES and pages[:2] == pages[2:]:
                    break
                if is_last:
                    raise OSError(errno.EIO, "what was written is not what is read back")
                file.leave_direct("what was written is not what is read back")
        return file.direct
    finally:
        file.close()
        os.unlink(_TRIAL, dir_fd=directory)


@contextmanager
def _room_or_not() -> Iterator[None]:
    """A full medium is no reason not to use what is there."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def _version_of(index: Path) -> int | None:
    """The version of the directory whose index this is; None: it is not an index. It may be another user's, and a pipe
    that nobody writes to."""
    try:
        file = os.open(index, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            magic, version, *_ = _HEADER.unpack(os.read(file, _HEADER.size))
        finally:
            os.close(file)
    except (OSError, struct.error):
        return None
    return int(version) if magic == _MAGIC else None


def _slab_name(number: int) -> str:
    return f"slab-{number:04}"


def place_of(path: Path) -> tuple[int, Path]:
    """The device and the mount point of the file system that this path is on, or would be on if it were made."""
    mount = Path(os.path.realpath(path))
    while not mount.exists():
        mount = mount.parent
    device = mount.stat().st_dev
    while mount != mount.parent and mount.parent.stat().st_dev == device:
        mount = mount.parent
    return device, mount


def _make(path: Path) -> None:
    """Create the directory if it does not exist; its parent must."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        FileSystem(path.parent).sync_directory(parent)
    finally:
        os.close(parent)


def _make_own(path: Path) -> int:
    """Create and open a directory that is ours alone."""
    is_new = not path.exists()
    _make(path)
    remedy = _ELSEWHERE
    if is_new:
        options = f"uid={os.geteuid()},dmask=077,fmask=177"
        remedy = f"its file system decides that: mount it with {options}, or choose another directory"
    return open_own_directory(path, remedy)


def check_place(path: Path) -> None:
    """Check, without creating anything, whether the directory exists or can be created. Raises `ConfigError`: it does
    not and cannot."""
    # Each format has its own subdirectory, mode 0700; who may read this one is up to the user.
    parent = path.absolute().parent
    try:
        is_there = path.exists()
    except OSError as error:
        raise ConfigError(
            f"the disk tier's directory {path} cannot be reached: {error.strerror}; open the directories above it to "
            "this user, or write another path"
        ) from None
    if is_there:
        if not path.is_dir():
            raise ConfigError(
                f"{path} cannot be used for the disk tier: it is not a directory; choose another directory"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"the disk tier's directory {path} cannot be written to by this user; write another path")
    elif path.is_symlink():
        raise ConfigError(
            f"the disk tier's directory {path} is a link to {os.readlink(path)}, which is not there; mount or make "
            "that, or write another path"
        )
    elif not parent.is_dir():
        raise ConfigError(
            f"the disk tier's directory {path} cannot be made, as there is no directory {parent}; make that one "
            f"(mkdir -p {parent}), or write another path"
        )
    elif not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the disk tier's directory {path} cannot be made, as {parent} cannot be written to by this user; make "
            "it for this user, with mode 0700, or write another path"
        )
