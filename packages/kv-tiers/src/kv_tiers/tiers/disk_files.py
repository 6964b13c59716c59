"""The files of one directory of the disk tier: who may use them, what is in them, and how it gets there whole.

    lock        locked (flock) by the one process that uses the directory
    index       a header page, then a record of 512 bytes a slot: all that a restart reads
    slab-0000…  slots: the chunk's header in a page of its own, then the chunk's pages

    header  magic 8 | version u32 | record's bytes u32 | slot's bytes u64 | slab's slots u64 | namespace 16
            | xxh3_64 of the above
    record  magic 8 | number u64 | slot u64 | the chunk's header 256 | zeros 224 | xxh3_64 of the above

Everything is little-endian. A record vouches for its slot as it was when the record was written, so it must be wiped
(with zeros) before the slot's bytes are replaced. Slots are this directory's own, from 0, so directories can be
striped, moved and left out in any combination.

Nothing here knows what is resident, and nothing is decided: `OSError` is what the system said. Only the constructor
turns it into a `ConfigError`.
"""

import errno
import fcntl
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from kv_core.errors import ConfigError

from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.machine import spelled
from kv_tiers.pool.private_files import open_own_directory, open_own_file

VERSION: Final = 1
RECORD_BYTES: Final = 512
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_MAGIC: Final = b"kvdisk\r\n"
_HEADER: Final = struct.Struct("<8sIIQQ16s")
_RECORD_MAGIC: Final = b"kvslot\r\n"
_RECORD: Final = struct.Struct(f"<8sQQ{chunk_header.HEADER_BYTES}s224x")
_RECORD_HEADER_AT: Final = 24
_RECORD_LAYOUT: Final = np.dtype(
    [
        ("magic", "S8"),
        ("number", "<u8"),
        ("slot", "<u8"),
        ("header", f"V{chunk_header.HEADER_BYTES}"),
        ("zeros", "V224"),
        ("checksum", "<u8"),
    ]
)
_U64: Final = struct.Struct("<Q")
_SLAB_BYTES: Final = 1 << 30
_MAX_SLABS: Final = 64
"""Larger slabs for larger directories: every slab is an open file."""
_RECORDS_AT_ONCE: Final = 16384
_SLAB_NAME: Final = re.compile(r"slab-[0-9]{4}|slab-[1-9][0-9]{4,8}")
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class File:
    """One private file, read and written in whole: what the system does in part is finished here."""

    def __init__(self, directory: int, path: Path, *, direct: bool = False) -> None:
        """directory: open, the one that `path` is in. The file is made if it is not there.

        Raises:
            ConfigError: it is a link, somebody else's, or open to others.
        """
        self.path = path
        self.direct = direct
        self.in_doubt = False
        """A sync failed: nobody knows what of the last writes has reached the medium."""
        self._syncing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.fd = open_own_file(path, flags, "remove it or choose another directory", directory=directory)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.fd).st_size

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        left = sum(map(len, buffers))
        while (done := os.pwritev(self.fd, buffers, offset)) < left:
            if not done:
                raise OSError(errno.EIO, "nothing of a write was taken")
            buffers, offset, left = _after(buffers, done), offset + done, left - done

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read: fewer than asked for where the file ends."""
        left, start = sum(map(len, buffers)), offset
        while left and (done := os.preadv(self.fd, buffers, offset)):
            offset, left = offset + done, left - done
            if done % PAGE_BYTES:  # only the file's end has such a length, and past the cache none may start there
                break
            buffers = _after(buffers, done)
        return offset - start

    def sync(self) -> None:
        """Return when what was written lasts.

        After a failure the system may forget what it could not write and call the next sync a success, to whoever asks
        (https://lwn.net/Articles/752063/), so all of them fail until `trust_again`.
        """
        with self._syncing:
            if self.in_doubt:
                raise OSError(errno.EIO, "an earlier write did not reach the medium")
            try:
                os.fdatasync(self.fd)
            except OSError:
                self.in_doubt = True
                raise

    def trust_again(self) -> None:
        """What was in doubt has been written anew, or nobody relies on it."""
        self.in_doubt = False

    def allocate(self, start: int, end: int) -> None:
        """Have room on the medium from `start` to `end`; of a failed attempt nothing remains."""
        nbytes = self.nbytes
        try:
            os.posix_fallocate(self.fd, start, end - start)
        except OSError:
            os.ftruncate(self.fd, nbytes)
            raise

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self.fd, nbytes)

    def drop_cached(self, offset: int, nbytes: int) -> None:
        """The host pool is the cache of these bytes; the system's would be a second one."""
        os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closing again does nothing."""
        opened, self.fd = self.fd, -1
        if opened >= 0:
            os.close(opened)


class DiskDirectory:
    """The slots of one directory, each a page and `slot_bytes`. Safe to call from any thread; close it last."""

    def __init__(self, root: str, namespace: str, *, slots: int, slot_bytes: int, direct: str) -> None:
        """Take possession of the directory, made if its parent is there.

        Raises:
            ConfigError: it cannot be used, is in use, or what lies there is not ours.
        """
        self.path = Path(root) / namespace
        self.slots = slots
        self.stride = PAGE_BYTES + slot_bytes
        self.notes: list[str] = []
        """What the user should read of what was found; for the log."""
        self._growing = threading.Lock()
        self._slabs: dict[int, File] = {}
        self._backed: dict[int, int] = {}  # bytes that have room on the medium, by slab
        self._open_files: list[File] = []
        self._namespace = bytes.fromhex(namespace)
        self._fd = -1
        try:
            _make(Path(root))
            _make(self.path)
            self._fd = open_own_directory(self.path, "remove it or choose another directory")
            lock = self._open("lock")
            opened = os.fstat(lock.fd)
            self._lock_path, self._lock_is = str(lock.path), (opened.st_ino, opened.st_dev)
            self.device = opened.st_dev
            self._take_possession(lock)
            self.direct = direct != "never" and self._takes_direct()
            if direct == "always" and not self.direct:
                raise ConfigError(
                    f"{self.path} has no direct I/O (O_DIRECT); write `direct: auto` or another directory"
                )
            self.index = self._open("index")
            self._slab_slots = -(-max(_SLAB_BYTES, slots * self.stride // _MAX_SLABS) // self.stride)
            self._begin_or_continue()
            self._look_around()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"{self.path} cannot be used for the disk tier: {error.strerror}; mend it or choose another directory"
            ) from None
        except BaseException:
            self.close()
            raise

    def has_vanished(self) -> bool:
        """What is at our path is not what we opened: removed, replaced, or no longer mounted."""
        if self._fd < 0:
            return True
        try:
            found = os.lstat(self._lock_path)
        except OSError:
            return True
        return (found.st_ino, found.st_dev) != self._lock_is

    def records(self) -> Iterator[tuple[int, int, bytes, bytes | None]]:
        """Slot, number, key and parent of every record that reads well and whose slot is there. Other slots are free.

        number: counts commits, so what was committed later has the larger one.
        """
        # Plain tuples of plain bytes: the garbage collector would spend half a second on a hundred thousand records.
        piece = bytearray(_RECORDS_AT_ONCE * RECORD_BYTES)
        records = np.frombuffer(piece, _RECORD_LAYOUT)
        slab_slots = min(self._slab_slots, self.slots)
        slabs = range(-(-self.slots // slab_slots))
        backed_slots = np.array([self._backed.get(number, 0) // self.stride for number in slabs])
        for start in range(0, self.slots, _RECORDS_AT_ONCE):
            got = self.index.read([memoryview(piece)], PAGE_BYTES + start * RECORD_BYTES) // RECORD_BYTES
            found = records[: min(got, self.slots - start)]
            slots = np.arange(start, start + len(found))
            ours = (found["magic"] == _RECORD_MAGIC) & (found["slot"] == slots)
            (at_all,) = np.nonzero(ours & (slots % slab_slots < backed_slots[slots // slab_slots]))
            columns = (at_all, found["number"][at_all], found["checksum"][at_all])
            for at, number, checksum in zip(*(column.tolist() for column in columns), strict=True):
                fields = bytes(piece[at * RECORD_BYTES : (at + 1) * RECORD_BYTES - _U64.size])
                if xxhash.xxh3_64_intdigest(fields) == checksum:
                    yield start + at, number, *chunk_header.names_in(fields, _RECORD_HEADER_AT)

    def header_in(self, slot: int) -> bytes | None:
        """The chunk's header in this slot's record; None if the record does not read well."""
        found = bytearray(RECORD_BYTES)
        got = self.index.read([memoryview(found)], PAGE_BYTES + slot * RECORD_BYTES)
        fields, checksum = bytes(found[: _RECORD.size]), found[_RECORD.size :]
        magic, _, place, header = _RECORD.unpack(fields)
        if got < RECORD_BYTES or magic != _RECORD_MAGIC or place != slot:
            return None
        return bytes(header) if _U64.unpack(checksum)[0] == xxhash.xxh3_64_intdigest(fields) else None

    def write_records(self, records: Iterable[tuple[int, bytes]]) -> None:
        """By slot; neighbours in one call."""
        runs: list[tuple[int, list[bytes]]] = []
        for slot, record in sorted(records):
            if runs and slot == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(record)
            else:
                runs.append((slot, [record]))
        for first, run in runs:
            self.index.write([b"".join(run)], PAGE_BYTES + first * RECORD_BYTES)

    def place(self, slot: int) -> tuple[File, int]:
        """The file that a slot of ours is in, and where there, with room on the medium made if need be."""
        number, at = divmod(slot, self._slab_slots)
        offset = at * self.stride
        if self._backed.get(number, 0) < offset + self.stride:
            with self._growing:
                self._grow(number, offset + self.stride)
        return self._slabs[number], offset

    def write_header(self) -> None:
        """Again, with the bytes that it has: to see whether the medium takes them."""
        self.index.write([self._header()], 0)

    def files(self) -> list[File]:
        """Those that chunks depend on."""
        return [self.index, *self._slabs.values()]

    def close(self) -> None:
        """Closing again does nothing. Whatever the system says of one file, the others are closed, the lock too."""
        with ExitStack() as closing:
            opened, self._fd = self._fd, -1
            if opened >= 0:
                closing.callback(os.close, opened)
            for file in self._open_files:
                closing.callback(file.close)

    def _open(self, name: str, *, direct: bool = False) -> File:
        file = File(self._fd, self.path / name, direct=direct)
        self._open_files.append(file)
        return file

    def _take_possession(self, lock: File) -> None:
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path} is in use by another disk tier, in this process or another, and has one owner: "
                "end that one or choose another directory"
            ) from None
        if self.has_vanished():
            raise ConfigError(f"{self.path} was removed while it was opened; start again")

    def _takes_direct(self) -> bool:
        """Try it: file systems refuse at the open or at the first write."""
        try:
            file = File(self._fd, self.path / "direct", direct=True)
        except OSError as error:
            if error.errno in _NO_DIRECT:
                return False
            raise
        try:
            with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
                file.write([view], 0)
        except OSError as error:
            if error.errno not in NO_ROOM:  # a full disk still has what it has
                if error.errno in _NO_DIRECT:
                    return False
                raise
        finally:
            file.close()
            os.unlink("direct", dir_fd=self._fd)
        return True

    def _header(self) -> bytes:
        fields = _HEADER.pack(_MAGIC, VERSION, RECORD_BYTES, self.stride, self._slab_slots, self._namespace)
        return (fields + _U64.pack(xxhash.xxh3_64_intdigest(fields))).ljust(PAGE_BYTES, b"\0")

    def _begin_or_continue(self) -> None:
        found = bytearray(PAGE_BYTES)
        got = self.index.read([memoryview(found)], 0)
        if any(found) and found[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(
                f"{self.index.path} is not the index of a disk tier; move it away or choose another directory"
            )
        fields, checksum = found[: _HEADER.size], found[_HEADER.size : _HEADER.size + _U64.size]
        _, version, record_bytes, stride, slab_slots, namespace = _HEADER.unpack(fields)
        if (
            got == PAGE_BYTES
            and _U64.unpack(checksum)[0] == xxhash.xxh3_64_intdigest(fields)
            and (version, record_bytes, stride, namespace) == (VERSION, RECORD_BYTES, self.stride, self._namespace)
            and slab_slots > 0
        ):
            self._slab_slots = slab_slots
            self._continue()
            return
        if any(found):
            self.notes.append(f"starts empty: {self.index.path} is damaged or of another version")
        self.index.truncate(0)
        self.index.sync()
        for number in self._slabs_found():
            os.unlink(_slab_name(number), dir_fd=self._fd)
        self.index.write([self._header()], 0)
        self.index.sync()
        os.fsync(self._fd)

    def _continue(self) -> None:
        # A smaller capacity than last time: forgotten for good, lest what was discarded meanwhile comes back later.
        end = PAGE_BYTES + self.slots * RECORD_BYTES
        if self.index.nbytes > end:
            self.index.truncate(end)
        for number in self._slabs_found():
            slots = self._slots_in(number)
            if slots <= 0:
                os.unlink(_slab_name(number), dir_fd=self._fd)
                continue
            slab = self._slabs[number] = self._open(_slab_name(number), direct=self.direct)
            if slab.nbytes > slots * self.stride:
                slab.truncate(slots * self.stride)
            self._backed[number] = slab.nbytes
            slab.sync()
        # The last process may have died before this was durable, or have feared no power cut; we rely on all of it.
        self.index.sync()

    def _look_around(self) -> None:
        """Say what else takes room here: nobody else would."""
        others = [
            os.lstat(file).st_blocks * 512
            for file in self.path.parent.glob("[0-9a-f]" * 32 + "/*")
            if file.parent != self.path
        ]
        if others:
            self.notes.append(
                f"chunks of other formats take {spelled(sum(others))} in {self.path.parent}; remove the directories "
                "there that are not used any more"
            )

    def _slabs_found(self) -> list[int]:
        return [int(name[5:]) for name in os.listdir(self._fd) if _SLAB_NAME.fullmatch(name)]

    def _slots_in(self, number: int) -> int:
        return min(self._slab_slots, self.slots - number * self._slab_slots)

    def _grow(self, number: int, least: int) -> None:
        """Give the slab all of its room, or as much as there is, but `least` bytes."""
        have, first = self._backed.get(number, 0), number * self._slab_slots
        if have >= least:
            return
        records_end = PAGE_BYTES + (first + self._slots_in(number)) * RECORD_BYTES
        if self.index.nbytes < records_end:
            self.index.allocate(PAGE_BYTES + first * RECORD_BYTES, records_end)
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._open(_slab_name(number), direct=self.direct)
            os.fsync(self._fd)
        end = self._slots_in(number) * self.stride
        while True:
            try:
                slab.allocate(have, end)
                break
            except OSError as error:
                if error.errno not in NO_ROOM or end == least:
                    if slab is not self._slabs.get(number):
                        self._open_files.remove(slab)
                        slab.close()
                    raise
                end = least + (end - least) // self.stride // 2 * self.stride
        self._slabs[number] = slab
        self._backed[number] = end


def pack_record(slot: int, number: int, header: bytes) -> bytes:
    """header: the chunk's own (`kv_tiers.chunk_header`)."""
    fields = _RECORD.pack(_RECORD_MAGIC, number, slot, header)
    return fields + _U64.pack(xxhash.xxh3_64_intdigest(fields))


BLANK_RECORD: Final = bytes(RECORD_BYTES)


def _slab_name(number: int) -> str:
    return f"slab-{number:04}"


def _after(buffers: Sequence[bytes | memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the buffers after their first `nbytes`."""
    left = []
    for buffer in buffers:
        if nbytes < len(buffer):
            left.append(memoryview(buffer)[nbytes:])
        nbytes = max(0, nbytes - len(buffer))
    return left


def _make(path: Path) -> None:
    """The directory, if it is not there; its parent must be."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def check_place(path: Path) -> None:
    """What can be seen, without making anything, of whether the directory is there or can be made.

    Raises:
        ConfigError: it is not and cannot.
    """
    # Each format has a directory of its own in there, 0700; who may read this one is the user's to say.
    parent = path.absolute().parent
    if path.exists():
        if not path.is_dir():
            raise ConfigError(
                f"{path} cannot be used for the disk tier: it is not a directory; choose another directory"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"the disk tier's directory {path} cannot be written to by this user; write another path")
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
