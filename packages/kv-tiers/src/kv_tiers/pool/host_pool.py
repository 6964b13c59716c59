"""The host pool: one mapping divided into equal slots, one chunk per slot.

The mapping is reserved as a whole and populated a bounded distance ahead of the slots handed out
(`kv_tiers.pool.populated`): used slots are handed out again first, new ones in ascending order. It is ordinary memory;
the process that owns a device pins it, and the processes that share it map it by name. A pool counts no leases and does
not lock: its cache does.

An anonymous pool ends with its process. A named pool is a private file in shared memory with a directory of its content
(`kv_tiers.pool.directory`), which the next process to open it finds. A shared pool has no name in any file system:
other processes map it by a descriptor that they receive, and it ends with the last of them.
"""

import errno
import fcntl
import mmap
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kv_core.errors import ConfigError, MisuseError
from kv_core.log import limited_logger

from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.core_dumps import keep_out
from kv_tiers.pool.directory import PoolDirectory, nbytes_for
from kv_tiers.pool.machine import memory_limit_bytes, spelled
from kv_tiers.pool.populated import PAGE_BYTES, Places, PopulatedPages, slot_bytes_for
from kv_tiers.pool.private_files import open_locked, open_own_file, own_directory

_log = limited_logger(__name__)

__all__ = ("PAGE_BYTES", "HostPool", "InheritedPool", "check_capacity", "pool_path", "slot_bytes_for")

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
"""The file system is full, or this user or control group has used up its quota of it."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_LOCK: Final = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`: type, whence, start, length, process."""


class InheritedPool(NamedTuple):
    """A shared pool that another process has filled; `slots` may be others than it had there."""

    name: str
    slots: int
    mapped_slots: int
    descriptor: int


class HostPool:
    """Slots of `slot_bytes` in one mapping; a chunk lies at the start of its slot.

    chunk_bytes: of the largest chunk. sizes: of every group's.
    slots: how many may be in use. mapped_slots: how many the mapping has room for. What lies beyond `slots` is not
        handed out: a chunk that an earlier process has left there stays until its slot is freed, and is in `above`.

    Created by `anonymous`, `named` or `shared`. For one thread at a time, except `view` and `places`.
    """

    def __init__(
        self,
        name: str,
        chunk_bytes: int,
        slots: int,
        mapping: mmap.mmap,
        *,
        group_bytes: Sequence[int] = (),
        mapped_slots: int = 0,
        file: int = -1,
        keeps_directory: bool = False,
        fingerprint: str = "",
        core_dump: bool = False,
    ) -> None:
        self.name = name
        self.sizes = PayloadSizes(group_bytes or (chunk_bytes,))
        if self.sizes.largest > chunk_bytes:
            raise ConfigError(f"chunks of {self.sizes.largest} bytes in a pool for chunks of {chunk_bytes}")
        self.chunk_bytes = self.sizes.largest
        self.slot_bytes = slot_bytes_for(chunk_bytes)
        self.slots, self.mapped_slots = slots, mapped_slots or slots
        self.above: set[int] = set()
        self.directory: PoolDirectory | None = None
        self._mapping = mapping if core_dump else keep_out(mapping)
        self._file = file
        self._slots_offset = 0
        self._can_run_dry = file >= 0
        if keeps_directory:
            self._slots_offset = nbytes_for(slots)
            self.directory = PoolDirectory(
                mapping, sizes=self.sizes, slot_bytes=self.slot_bytes, slots=slots, fingerprint=fingerprint
            )
        self.view = memoryview(mapping)[self._slots_offset :]
        """The slots' bytes, writable; offsets of extents count from its start. Release everything derived from it."""
        self.knows_lent = True
        """Whether the system can say if a descriptor from `lend` is still in use."""
        self._closed = False
        self._taken = bytearray(self.mapped_slots)
        self.slots_used = 0
        self.unused: list[int] = []
        """Free places beyond `slots`, which may still have memory."""
        # Last in, first out: the slot that is most likely still in the processor's cache.
        self._returned: list[int] = []
        self._untouched_from = 0
        self._backed = bytearray(self.mapped_slots)
        self.places = Places(name, self.sizes, self.slot_bytes, self.mapped_slots)
        self._pages = PopulatedPages(mapping, self._slots_offset, slots * self.slot_bytes)
        if not keeps_directory:
            self._pages.reached(0)

    @classmethod
    def anonymous(
        cls, name: str, chunk_bytes: int, slots: int, *, group_bytes: Sequence[int] = (), core_dump: bool = False
    ) -> "HostPool":
        """Memory of this process alone, in huge pages where the machine has them. Raises `ConfigError`: not enough
        memory.

        chunk_bytes: of the largest chunk. group_bytes: of each group's; none: all have that size.
        core_dump: a core dump of this process has the pool in it.
        """
        nbytes = _check_size(name, chunk_bytes, slots)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _cannot_be_mapped(f"the host pool {name!r}", nbytes, error) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # the system has none
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(name, chunk_bytes, slots, mapping, group_bytes=group_bytes, core_dump=core_dump)

    @classmethod
    def named(
        cls,
        name: str,
        chunk_bytes: int,
        slots: int,
        *,
        group_bytes: Sequence[int] = (),
        fingerprint: str = "",
        core_dump: bool = False,
    ) -> "HostPool":
        """A pool in a private file (mode 0600) in a directory of this user. One process at a time can open it. Raises
        `ConfigError`: not enough memory or space; another process uses the name; or the file is not ours.

        chunk_bytes, group_bytes, core_dump: as for `anonymous`.
        fingerprint: identifies the format of the chunks. If it, the chunks' sizes or the number of slots differ from
            the file's, the pool starts empty.
        """
        slots_bytes = _check_size(name, chunk_bytes, slots)
        nbytes = nbytes_for(slots) + slots_bytes
        path = pool_path(name)
        _make_private(path.parent)
        file = _open_private(path)
        try:
            pool = cls(
                name,
                chunk_bytes,
                slots,
                _map_file(file, path, nbytes, slots_bytes),
                group_bytes=group_bytes,
                file=file,
                keeps_directory=True,
                fingerprint=fingerprint,
                core_dump=core_dump,
            )
        except BaseException:
            os.close(file)
            raise
        try:
            pool._start_directory(path, nbytes)
        except OSError as error:
            pool.close()  # else the lock would stay with us
            raise _cannot_be_mapped(f"the pool's file {path}", nbytes, error) from None
        pool._pages.reached(0)  # not before: a file of another geometry was truncated and extended again
        return pool

    @classmethod
    def shared(
        cls,
        name: str,
        chunk_bytes: int,
        slots: int,
        *,
        group_bytes: Sequence[int] = (),
        mapped_slots: int = 0,
        core_dump: bool = False,
        descriptor: int = -1,
    ) -> "HostPool":
        """A pool without a name in any file system; a process that receives `descriptor` can map it too. Raises
        `ConfigError`: not enough memory.

        Memory is allocated when it is first written, and freed when the last process that maps it ends. The file is
        sealed against truncation and growth, so that no process can take pages from under another.

        chunk_bytes, group_bytes, core_dump: as for `anonymous`.
        mapped_slots: up to how many `slots` may be raised by a process that takes over; 0: no further.
        descriptor: of the pool of this name and size that another process hands over; -1: it is a new one. It is the
            pool's from now on.
        """
        nbytes = _check_size(name, chunk_bytes, mapped_slots or slots)
        is_new = descriptor < 0
        file, is_sealed = _open_unnamed(name) if is_new else (descriptor, _is_sealed(descriptor))
        try:
            if is_new:
                os.ftruncate(file, nbytes)
            elif os.fstat(file).st_size != nbytes:
                raise OSError(errno.EINVAL, "it has another size")
            if is_new and is_sealed:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            pool = cls(
                name,
                chunk_bytes,
                slots,
                mmap.mmap(file, nbytes),
                group_bytes=group_bytes,
                mapped_slots=mapped_slots,
                file=file,
                core_dump=core_dump,
            )
        except OSError as error:
            os.close(file)
            raise _cannot_be_mapped(f"the host pool {name!r}", nbytes, error) from None
        # A memfd is in no file system that other users could fill. Memory allocated slot by slot would be zeroed on the
        # calling thread, which in a server is the only one.
        pool._can_run_dry = not is_sealed
        return pool

    @staticmethod
    def unlink(name: str) -> None:
        """Remove the named pool's file, if it exists. A process that has it open keeps it until it closes it."""
        pool_path(name).unlink(missing_ok=True)

    @property
    def descriptor(self) -> int:
        """The file that holds the slots, from its first byte; for a shared pool only. The pool still owns it, and other
        processes get theirs from `lend`. Raises `MisuseError`: not a shared pool."""
        if self._file < 0 or self.directory is not None:
            raise MisuseError(f"pool {self.name!r} is not shared, so it has no descriptor to hand out")
        return self._file

    def lend(self, token: bytes, *more: bytes) -> int:
        """A new descriptor of a shared pool, for another process to map. `is_lent` with one of the tokens says whether
        it is still in use. The caller closes its copy. Raises `OSError`: this process may open no more descriptors."""
        lent = -1
        try:
            # A description of its own, which lives as long as any descriptor or mapping that was made from it, in
            # whatever process; and the lock lives as long as the description.
            lent = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
            for number in (token, *more):
                fcntl.fcntl(lent, fcntl.F_OFD_SETLK, _lock_of(number, fcntl.F_RDLCK))
        except OSError as error:
            if lent >= 0:
                os.close(lent)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ENOMEM):
                raise
            if self.knows_lent:
                _log.warning("pool %s cannot know which processes map it: %s", self.name, error.strerror)
            self.knows_lent = False
            return os.dup(self.descriptor)
        return lent

    def is_lent(self, token: bytes) -> bool | None:
        """Whether some process has open, or maps, a descriptor that `lend` made for this token. None: the system cannot
        say."""
        if not self.knows_lent:
            return None
        found = fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, _lock_of(token, fcntl.F_WRLCK))
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def allocate(self) -> int | None:
        """A free slot, or None."""
        if self._returned:
            slot = self._returned.pop()
        elif self._untouched_from < self.slots:
            slot = self._untouched_from
            self._untouched_from += 1
            self._pages.reached(self._untouched_from * self.slot_bytes)
        else:
            return None
        self._taken[slot] = 1
        self.slots_used += 1
        return slot

    def free(self, slot: int) -> None:
        if not self._taken[slot]:
            raise MisuseError(f"slot {slot} of pool {self.name!r} is free already")
        self._taken[slot] = 0
        self.slots_used -= 1
        if (place := self.places.at(slot)) < self.slots:
            self._returned.append(slot)
        else:
            self.above.discard(slot)
            self.unused.append(place)

    def take(self, slots: Iterable[int]) -> None:
        """Mark free slots as in use: an earlier process filled them. Call it again when `places` are known."""
        taken = set(slots)
        if any(self._taken[slot] for slot in taken):
            raise MisuseError(f"pool {self.name!r} has handed out some of these slots already")
        for slot in taken:
            self._taken[slot] = 1
        self.slots_used += len(taken)
        self._untouched_from = max(self._untouched_from, max((*taken, *self.places.moved), default=-1) + 1)
        moved = self.places.moved
        beyond = {slot for slot in range(self.slots, self.mapped_slots) if slot not in moved}
        beyond.update(slot for slot, place in moved.items() if place >= self.slots)
        self.above = {slot for slot in beyond if self._taken[slot]}
        self.unused = [self.places.at(slot) for slot in beyond - self.above]
        self._returned = [n for n in range(self._untouched_from) if not self._taken[n] and n not in beyond]
        self._pages.reached(self._untouched_from * self.slot_bytes)
        self._pages.written(self._untouched_from * self.slot_bytes)

    def give_back(self, nbytes: int) -> None:
        """Free the memory of `unused` places of about so many bytes, at least one. No process may have it registered
        with a device, which would go on with the old pages."""
        for place in [self.unused.pop() for _ in self.unused[: max(1, nbytes // self.slot_bytes)]]:
            try:
                self._mapping.madvise(mmap.MADV_REMOVE, place * self.slot_bytes, self.slot_bytes)
            except OSError as error:  # its file system cannot
                _log.warning("pool %s cannot give memory back: %s", self.name, error.strerror)

    def back(self, slots: Iterable[int]) -> set[int]:
        """Have the file system allocate space for these slots; returns those for which it has none left.

        Without this, writing to a slot for the first time kills the process (SIGBUS) if the file system has become
        full. It costs what the first write would have cost. Memory outside file systems does not need it.
        """
        if not self._can_run_dry:
            return set()
        unbacked: set[int] = set()
        for slot in slots:
            place = self.places.at(slot)
            if not self._backed[place]:
                try:
                    os.posix_fallocate(self._file, self._slots_offset + place * self.slot_bytes, self.slot_bytes)
                    self._backed[place] = 1
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    unbacked.add(slot)
        if unbacked:
            _log.warning(
                "pool %s has no memory for more chunks, as its file system (%s) or this control group is full; free "
                "some, or write a smaller capacity",
                self.name,
                _parent(),
            )
        return unbacked

    def swap(self, first: int, second: int) -> None:
        """Exchange the places of two slots: each then has the other's bytes, which stay where they are in memory."""
        self.places.swap(first, second)
        for slot in (first, second):
            (self.above.add if self.places.at(slot) >= self.slots else self.above.discard)(slot)

    def chunk(self, slot: int, nbytes: int) -> memoryview:
        """The bytes of a chunk of this size in this slot. Release it."""
        start = self.places.at(slot) * self.slot_bytes
        return self.view[start : start + nbytes]

    def pages(self, slot: int) -> memoryview:
        """The whole slot, from a page's boundary. Release it."""
        start = self.places.at(slot) * self.slot_bytes
        return self.view[start : start + self.slot_bytes]

    def close(self) -> None:
        """Unmap, and leave a named pool's file for the next process. Closing again does nothing. Raises `BufferError`:
        something derived from `view` is still alive; the pool stays open: release it and close again."""
        if self._closed:
            return
        self._pages.stop()
        try:
            # Both refuse while the memory is in use: the view if an array was made of it, the mapping if a slice was.
            self.view.release()
            self._mapping.close()
        except BufferError:
            self.view = memoryview(self._mapping)[self._slots_offset :]
            raise BufferError(
                f"pool {self.name!r} cannot be unmapped: an array or memoryview made from its view still exists; "
                "release it, then close again"
            ) from None
        self._closed = True
        if self._file >= 0:
            os.close(self._file)  # and with it the lock

    def _start_directory(self, path: Path, nbytes: int) -> None:
        assert self.directory is not None
        if self.directory.is_ours():
            return
        if not self.directory.is_blank():
            _log.warning(
                "pool %s starts empty: %s was made for another chunk format, chunk size or number of slots, or by "
                "another release",
                self.name,
                path,
            )
            # With another geometry, any byte may lie where we would look for a record.
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, nbytes)
            os.posix_fallocate(self._file, 0, self._slots_offset)
        self.directory.begin()


def pool_path(name: str) -> Path:
    """The path of the named pool's file. Raises `ConfigError`: not a valid file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the pool's name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ - and not start with a dot")
    return _parent() / f"kv-tiers-{os.geteuid()}" / name


def _parent() -> Path:
    shared = Path("/dev/shm")  # noqa: S108  # the directory made in it is the user's alone
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def check_capacity(nbytes: int, name: str = "") -> None:
    """Check a pool's size as far as that is possible without knowing the chunks. name: of the pool, for the error.
    Raises `ConfigError`: it has no room for a chunk, or exceeds the machine's memory."""
    if nbytes < PAGE_BYTES:
        raise ConfigError(
            f"a capacity of {nbytes} bytes holds no chunk at all; write how much memory chunks may take, such as 4GiB"
        )
    limit = memory_limit_bytes()
    if limit is not None and nbytes > limit:
        raise ConfigError(
            f"the host pool {name!r} needs {spelled(nbytes)} and this machine (or its control group) has "
            f"{spelled(limit)} in all; write a capacity of at most {spelled(limit // 2)}, which leaves the engine room"
        )


def _check_size(name: str, chunk_bytes: int, slots: int) -> int:
    if chunk_bytes <= 0 or slots <= 0:
        raise ConfigError(f"a pool of {slots} chunks of {chunk_bytes} bytes; both must be positive")
    nbytes = slots * slot_bytes_for(chunk_bytes)
    check_capacity(nbytes, name)
    return nbytes


def _lock_of(token: bytes, kind: int) -> bytes:
    """A lock of one byte, which need not exist: that with this token's number."""
    return _LOCK.pack(kind, os.SEEK_SET, int.from_bytes(token[:7], "little"), 1, 0)


def _open_unnamed(name: str) -> tuple[int, bool]:
    """A file in memory without a name, and whether it can be sealed. Pythons built for old systems lack memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"kv-tiers-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), True
    with tempfile.NamedTemporaryFile(prefix="kv-tiers-", dir=_parent()) as named:  # unlinked with the block, mode 0600
        return os.dup(named.fileno()), False


def _is_sealed(file: int) -> bool:
    try:
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # its file system has no seals
        return False


def _make_private(directory: Path) -> None:
    """A directory that is ours and closed to others, created if it does not exist."""
    try:
        own_directory(directory, "remove it, or write no name for the pool")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made for named pools: {error.strerror}; write no name") from None


def _open_private(path: Path) -> int:
    """The file, created if it does not exist, ours alone and locked."""
    remedy = "remove it or choose another name"
    try:
        file = open_locked(path, lambda: open_own_file(path, os.O_RDWR | os.O_CREAT, remedy))
    except OSError as error:
        raise ConfigError(f"the pool's file {path} cannot be opened: {error.strerror}; {remedy}") from None
    if file is None:
        raise ConfigError(
            f"the pool {path.name!r} is open already, in this process or another; a named pool has one owner: "
            "stop that one or choose another name"
        )
    return file


def check_room(file: int, path: Path, nbytes: int) -> None:
    """Raises `ConfigError`: this file of a pool cannot grow to so many bytes."""
    status, file_system = os.fstat(file), os.fstatvfs(file)
    free = file_system.f_bavail * file_system.f_frsize + status.st_blocks * 512
    if nbytes > free:
        raise ConfigError(
            f"the pool's file {path} needs {spelled(nbytes)} and its file system has {spelled(free)} free; write a "
            f"capacity of {spelled(free // 2)} or less, or no name for a pool outside that file system"
        )


def _map_file(file: int, path: Path, nbytes: int, slots_bytes: int) -> mmap.mmap:
    check_room(file, path, nbytes)
    try:
        if os.fstat(file).st_size != nbytes:
            os.ftruncate(file, nbytes)
        os.posix_fallocate(file, 0, nbytes - slots_bytes)  # the directory is written to at any time: see `back`
        return mmap.mmap(file, nbytes)
    except OSError as error:
        raise _cannot_be_mapped(f"the pool's file {path}", nbytes, error) from None


def _cannot_be_mapped(what: str, nbytes: int, error: OSError) -> ConfigError:
    return ConfigError(f"{what} of {spelled(nbytes)} cannot be mapped: {error.strerror}; write a smaller capacity")
