"""One mapped run of memory, cut into slots of one size. The bytes of every resident chunk lie in one of them.

The mapping is reserved whole and taken from the machine page by page as slots are first written: free slots are handed
out most recently freed first, and never-used ones last and in order. An anonymous pool ends with its process. A named one
is a file in shared memory, 0600 in a directory of its user, that outlives the process and is found again by name; what
lies in it is said by its directory (`kv_tiers.directory`).
"""

import fcntl
import logging
import mmap
import os
import re
import stat
import tempfile
from pathlib import Path

from kv_core.errors import ConfigError, MisuseError
from kv_core.extent import HostExtent

from kv_tiers.directory import Directory

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class HostPool:
    """Fixed slots in one mapping.

    name: by which extents and other processes know it. view: all slots as writable bytes; slot i starts at
    i × slot_bytes. directory: of a named pool, else None.
    """

    def __init__(
        self, name: str, mapping: mmap.mmap, *, slot_bytes: int, slots: int, start: int, lock_file: int | None
    ) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._mapping = mapping
        self._lock_file = lock_file
        self._whole = memoryview(mapping)
        self.view = self._whole[start : start + slots * slot_bytes]
        self.directory: Directory | None = None
        self._start = start
        self._freed: list[int] = []
        self._never_used = 0
        self._backed: set[int] = set()

    @classmethod
    def anonymous(cls, name: str, *, slot_bytes: int, slots: int) -> "HostPool":
        """A pool that ends with this process.

        Raises:
            ConfigError: more than the machine's memory.
        """
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
        nbytes = slot_bytes * slots
        check_capacity(nbytes, machine_memory_bytes(), "this machine's memory")
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:  # a kernel without huge pages; populating is slower, nothing else changes
                _log.info("no huge pages for the host pool: %s", error)
        return cls(name, mapping, slot_bytes=slot_bytes, slots=slots, start=0, lock_file=None)

    @classmethod
    def named(cls, name: str, *, slot_bytes: int, slots: int, fingerprint: str) -> "HostPool":
        """A pool that outlives its process: opened if it is there and fits, else made empty.

        fingerprint: of the chunks' format. A pool of another one, or of other sizes, starts empty.

        Raises:
            ConfigError: the name is no file name, the file is not this user's alone, another process has it open, or
                it would not fit into shared memory.
        """
        slot_bytes = round_up(slot_bytes, PAGE_BYTES)
        start = round_up(Directory.nbytes(slots), PAGE_BYTES)
        nbytes = start + slot_bytes * slots
        path = pool_path(name)
        file = _open_private(path)
        try:
            held_bytes = os.fstat(file).st_size
            room = free_bytes(path.parent) + held_bytes
            check_capacity(nbytes, min(room, machine_memory_bytes()), f"shared memory ({path.parent})")
            os.ftruncate(file, nbytes)
            os.posix_fallocate(file, 0, start)
            mapping = mmap.mmap(file, nbytes)
        except BaseException:
            os.close(file)
            raise
        pool = cls(name, mapping, slot_bytes=slot_bytes, slots=slots, start=start, lock_file=file)
        pool.directory = Directory(pool._whole[:start], slots=slots, slot_bytes=slot_bytes, fingerprint=fingerprint)
        return pool

    @staticmethod
    def unlink(name: str) -> None:
        """Remove a named pool. Whoever has it open keeps it until it is closed; no error if there is none."""
        pool_path(name).unlink(missing_ok=True)

    def allocate(self) -> int | None:
        """A free slot, or None."""
        if self._freed:
            slot = self._freed.pop()
        elif self._never_used < self.slots:
            slot = self._never_used
            self._never_used += 1
        else:
            return None
        if self._lock_file is not None and slot not in self._backed and not self._back(slot):
            self._freed.append(slot)
            return None
        return slot

    def _back(self, slot: int) -> bool:
        """Have the system set memory aside for the slot: writing to shared memory that is full kills the process."""
        assert self._lock_file is not None
        try:
            os.posix_fallocate(self._lock_file, self._start + slot * self.slot_bytes, self.slot_bytes)
        except OSError as error:
            _log.warning("shared memory has no room for another slot of pool %s: %s", self.name, error)
            return False
        self._backed.add(slot)
        return True

    def free(self, slot: int) -> None:
        """Give a slot back. The caller sees to it that nobody reads or writes it."""
        self._freed.append(slot)

    def adopt(self, slots: set[int]) -> None:
        """Take these slots as used; all others are free."""
        if self._never_used or self._freed:
            raise MisuseError("slots are adopted before any is handed out")
        self._never_used = max(slots, default=-1) + 1
        self._freed = sorted(set(range(self._never_used)) - slots, reverse=True)
        self._backed = set(slots)

    @property
    def free_slots(self) -> int:
        return len(self._freed) + self.slots - self._never_used

    def extent(self, slot: int, nbytes: int) -> HostExtent:
        return HostExtent(self.name, slot * self.slot_bytes, nbytes)

    def slot_view(self, slot: int, nbytes: int) -> memoryview:
        return self.view[slot * self.slot_bytes : slot * self.slot_bytes + nbytes]

    def close(self) -> None:
        """Unmap. A named pool's file stays.

        Raises:
            MisuseError: somebody still holds a view of the pool; nothing was unmapped.
        """
        if self.directory is not None:
            self.directory.close()
        self.view.release()
        self._whole.release()
        try:
            self._mapping.close()
        except BufferError:
            raise MisuseError(f"host pool {self.name} is closed while something still holds a view of it") from None
        finally:
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None


def pool_path(name: str) -> Path:
    """Where a named pool lies.

    Raises:
        ConfigError: the name cannot be a file's.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a pool's name is letters, digits, '.', '_' and '-', and at most 100 of them; not {name!r}")
    shared = Path("/dev/shm")  # noqa: S108  # in a directory of the user's own, see _open_private
    base = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return base / f"kv-tiers-{os.getuid()}" / f"{name}.pool"


def _open_private(path: Path) -> int:
    """Open or make the file so that nobody else can have put it there, read it or have it open."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    folder = path.parent.lstat()
    if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid() or folder.st_mode & 0o077:
        raise ConfigError(f"{path.parent} is not a directory of this user's alone (0700): remove it and start again")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the pool {path} cannot be opened: {error.strerror}") from None
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        os.close(file)
        raise ConfigError(f"the pool {path} is not a file of this user's alone (0600): remove it and start again")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            f"another process has the pool {path.stem!r} open; give this engine another name in host.name"
        ) from None
    return file


def round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def check_capacity(asked_bytes: int, there_bytes: int, where: str) -> None:
    """Refuse a pool that cannot fit, before the machine finds out under load.

    Raises:
        ConfigError: says what was asked for, what there is, and what to write.
    """
    if asked_bytes > there_bytes:
        fitting = int(there_bytes * 0.8) >> 20
        raise ConfigError(
            f"the host pool would take {asked_bytes >> 20} MiB, and {where} has {there_bytes >> 20} MiB; "
            f"write a capacity of at most {fitting}MiB"
        )


def machine_memory_bytes() -> int:
    """What this process may use: the machine's memory, or its control group's limit if that is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            text = limit.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


def free_bytes(directory: Path) -> int:
    state = os.statvfs(directory)
    return state.f_bavail * state.f_frsize
