"""The shared_fs tier: chunks as files of a file system shared by many hosts (NFS, Lustre, …). One file per chunk:

    <directory>/<namespace>[-<key's name>]/<chunk key's path>    a page that begins with the header, then the payload

No host owns the directory: all hosts write, read and remove files in it concurrently. So a file is written under a
unique name and then renamed. A lookup only checks that a file's length is possible; the header does the rest. A file
that vanishes during a lookup, or is replaced while it is read, counts as an absent chunk.

**Whose chunks are served.** Those of this user, or with `mode: group` of the directory's group. A file that belongs to
another, or that others may write to, counts as absent, and a directory that others may write to is not used. Users that
share one on purpose also share a key (`key_file`): each file then carries a code made with it over its header and
payload (HMAC-SHA256, after the header in its page), and a file without the right code is damaged. Chunks made with
another key, or with none, are in another directory. Any user with the key can write chunks that others will load.

**What is removed.** Each store checks a few other files, and removes those that are too old, that were used longest ago
of more than `capacity_bytes` (`LeastUsed`), or that a killed host left half-written. Ages are measured by the file
system's own clock. A file in use is never removed: a load renews its age, and those used in the last minute stay. The
capacity is kept approximately: a host counts what others store when it comes across it. When what it knows of exceeds
the capacity nevertheless, it stores nothing.
"""

import errno
import hashlib
import hmac
import itertools
import math
import operator
import os
import random
import secrets
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, StoreOutcome, Unstorable
from kv_tiers.chunk_header import HEADER_BYTES, stored_bytes_in
from kv_tiers.pool.machine import spelled
from kv_tiers.pool.private_files import read_secret
from kv_tiers.threads import start_thread
from kv_tiers.tier import Read, RemovalRefusedError, TierContext, TierUsage, Write
from kv_tiers.tiers.disk_files import FileSystem, after, size_of_file_system

from kv_remote.factories import factory_of
from kv_remote.key_paths import keys_in_paths
from kv_remote.least_used import LeastUsed

# Spreads work over threads that keep no process from ending.
#
# The interpreter waits for an executor's threads when it ends, and a call to a file system that does not answer may
# never return. These threads are daemons, and exist only as long as there is work.

T = TypeVar("T")
R = TypeVar("R")


def spread(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """The results for these items, by at most this many threads, or fewer if the system has no more for us. The calling
    thread is one of them. If `work` raises, so does this, and nothing more is begun."""
    todo = deque(enumerate(items))
    done: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                done[number] = work(item)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
                errors.append(error)

    helpers: list[threading.Thread] = []
    for _ in range(min(threads, len(items)) - 1):
        helper = threading.Thread(target=run, name="kv-helper", daemon=True)
        if start_thread(helper):
            break
        helpers.append(helper)
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(items))]


# The files below a directory in which others may write, too: none of their links leads to files elsewhere.

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened_below(top: str, path: str) -> Iterator[int]:
    """A descriptor of the directory `path`, which is relative to `top`. Only `top` itself may be a link. Raises
    `OSError`: it is not there, or a link is on the way."""
    descriptor = os.open(top, _DIRECTORY)
    try:
        for name in path.split("/"):
            parent, descriptor = descriptor, os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def files_below(
    top: str, path: str, levels: int, *, order: Callable[[list[Any]], object] = len
) -> Iterator[tuple[str, str]]:
    """The directory (relative to `top`) and name of every file below `path`, found lazily, `levels` directories deep.

    Directories that vanish meanwhile are skipped. Nothing is open between two files.

    order: puts the names in a directory into the order in which they are found.
    """
    directories = [(path, levels)]
    while directories:
        directory, deeper = directories.pop()
        try:
            with opened_below(top, directory) as opened, os.scandir(opened) as scanned:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scanned]
        except OSError:
            continue
        order(entries)
        for name, is_directory in entries:
            if not is_directory:
                yield directory, name
            elif deeper:
                directories.append((f"{directory}/{name}", deeper - 1))


_PAGE_BYTES: Final = 4096
"""The header has a page to itself, so that the chunk's bytes begin at a page boundary."""

_KEYS_A_THREAD: Final = 32
_SLOW_S: Final = 50e-6
"""Looking up a file that is cached on this host takes 6 µs, and threads would double that. Looking it up on another
host takes a fraction of a millisecond, which threads reduce. So the first few lookups are timed."""

_SWEPT_AT_ONCE: Final = 64
"""Files that one store checks in addition to its own."""

_SWEPT_WHEN_FULL: Final = 1024
"""As many if the capacity is nearly reached, and before a store is refused."""

_PASSES_WHEN_FULL: Final = 3
"""To count, to remove, and to count again."""

_REST_S: Final = 60.0
"""The least time from the beginning of one sweep to that of the next, unless much was stored meanwhile."""

_IN_USE_S: Final = 60.0
"""Files used in this time are not removed for want of room."""

_RENEWED_S: Final = 600.0
"""How old the age of a file in use may become, for the sake of `capacity_bytes`."""

_DEFAULT_SHARE: Final = 10
"""Without `capacity_bytes`, chunks take up this part of the file system."""

_LEVELS: Final = 4
"""Directories in the path of a chunk key."""

_MAX_FAILURES: Final = 3
"""How many files of one call may be unreadable before the rest are skipped."""

_TEMPORARY: Final = ".tmp"
_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL: Final = {errno.ENOSPC, errno.EDQUOT} | _READ_ONLY
_OF_THE_CHUNK: Final = {errno.EFBIG, errno.ENAMETOOLONG, errno.EISDIR, errno.EMLINK, errno.EILSEQ, errno.EOVERFLOW}
"""Errors of a file's size or name, or of what is there under its name."""
_NOT_OURS: Final = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}
_CODE_AT: Final = slice(HEADER_BYTES, HEADER_BYTES + 32)
_GONE: Final = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}

_log = limited_logger(__name__)


class SharedFsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the files are, and how long they are kept."""

    directory: str
    """Must exist, so that nothing is written where the file system is not mounted."""
    mode: Literal["private", "group"] = "private"
    """Who may access files and directories: only their owner (0600, 0700), or the directory's group as well (0660,
    2770)."""
    key_file: str = ""
    """A secret of 16 to 4096 bytes (0600) shared by all users of the directory: only chunks authenticated with it are
    served, so it does not matter who else may write there."""
    trust_writers: bool = False
    """Serve chunks of any user who may write in the directory, without a key."""
    capacity_bytes: int = 0
    """Of all hosts together, for chunks of one format: beyond it, those used longest ago are removed. 0: a tenth of the
    file system."""
    ttl_s: int = 0
    """Files are removed this long after they were last stored or loaded, give or take half of it; 0: never."""
    temporary_s: int = 3600
    """The age at which an incomplete file counts as left behind."""
    lookup_threads: int = 16
    """Threads that look for files when a lookup needs many."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory is empty")
        if self.key_file and self.trust_writers:
            raise ValueError("write key_file or trust_writers, not both")
        if self.capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        if self.ttl_s < 0 or self.temporary_s < 1 or self.lookup_threads < 1:
            raise ValueError("temporary_s and lookup_threads must be positive, and ttl_s not negative")


class SharedFsTier:
    """Safe to call from any thread, and from any number of hosts."""

    name = "shared_fs"
    holds_is_local = False

    def __init__(self, config: SharedFsConfig, context: TierContext) -> None:
        """Does not look at the directory yet: it may be mounted later."""
        self._config = config
        self._root = os.path.abspath(config.directory)
        self.name = context.name or self.name
        self._key = _read_key(config, self.name) if config.key_file else b""
        key_name = f"-{hashlib.sha256(b'the name of the key' + self._key).hexdigest()[:16]}" if self._key else ""
        self._directory = f"{self._root}/{context.namespace}{key_name}"
        self._removal_prefix = f".{os.path.basename(self._directory)}."  # of directories that are being removed
        self._chunk_bytes = context.chunk_bytes
        self._file_mode, self._directory_mode = (0o600, 0o700) if config.mode == "private" else (0o660, 0o2770)
        self._full = ""
        self._file_system = FileSystem(Path(self._root))
        self._least_used = LeastUsed(config.capacity_bytes)
        self._renew_s = min(config.ttl_s / 2 or math.inf, _RENEWED_S)
        self._time_there = -math.inf  # the file system's clock, less our monotonic one: its time as of the last store
        self._gid: int | None = None  # the directory's group, once it was looked at
        self._sweeping = threading.Lock()
        self._sweep: Iterator[tuple[str, str]] = iter(())  # directories and names
        self._swept_from_s = -math.inf  # by this machine's monotonic clock: the file system's may be set back

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._ensure_root_checked()
        first, remaining = keys[:_KEYS_A_THREAD], keys[_KEYS_A_THREAD:]
        start_s = time.perf_counter()
        held = self._are_held(first)
        if time.perf_counter() - start_s > _SLOW_S * _KEYS_A_THREAD and remaining:
            parts = [remaining[start : start + _KEYS_A_THREAD] for start in range(0, len(remaining), _KEYS_A_THREAD)]
            held += itertools.chain.from_iterable(spread(self._are_held, parts, self._config.lookup_threads))
        else:
            held += self._are_held(remaining)
        if held and not any(held):
            self._check_root()
        return held

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        self._ensure_root_checked()
        outcomes: list[LoadOutcome] = []
        failed: list[ReadFailed] = []
        for read in reads:
            # Each failure may cost the file system's time-out.
            outcomes.append(failed[0] if len(failed) >= _MAX_FAILURES else self._load(read))
            failed += [outcome for outcome in outcomes[-1:] if isinstance(outcome, ReadFailed)]
        if failed and not any(isinstance(outcome, Loaded) for outcome in outcomes):
            raise TierDown(failed[0].reason)
        if outcomes and all(isinstance(outcome, Absent) for outcome in outcomes):
            self._check_root()
        return outcomes

    load_prefixes = load

    def some_keys(self, count: int) -> list[ChunkKey]:
        self._ensure_root_checked()
        files = itertools.islice(self._files(), 8 * count)
        paths = (f"{directory}/{name}".partition("/")[2] for directory, name in files)
        keys = itertools.islice(keys_in_paths(paths), count)
        candidates = ((key, self._status_of(self._path(key))) for key in keys)
        return [key for key, status in candidates if status is not None and self._is_chunk(status)]

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        self._ensure_root_checked()
        outcomes: list[StoreOutcome] = []
        refusal: Refused | None = None
        for write in writes:
            # Later chunks of the prompt are worth less than the one that was refused.
            outcomes.append(refusal or self._store_one(write))
            if isinstance(outcomes[-1], Refused) and not isinstance(outcomes[-1], Unstorable):
                refusal = outcomes[-1]
        if outcomes and isinstance(outcomes[-1], Stored):
            self._full = ""
        return outcomes

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._ensure_root_checked()
        for key in keys:
            self._remove(self._path(key))

    def clear(self) -> None:
        self._take_away([self._directory])
        self._least_used.cleared()

    def clear_tenant(self, tenant: bytes) -> None:
        try:
            spaces = os.listdir(self._directory)
        except OSError as error:
            if error.errno not in _GONE:
                raise self._down(error) from error
            spaces = []
        self._take_away([f"{self._directory}/{space}/{tenant.hex()}" for space in spaces])

    def probe(self) -> None:
        """Write, rename, and read back a file as stores and loads do theirs."""
        self._check_root()
        path = f"{self._root}/.{secrets.token_hex(8)}{_TEMPORARY}"
        payload = memoryview(secrets.token_bytes(_PAGE_BYTES))
        write = Write(ChunkKey(b""), None, bytes(HEADER_BYTES), payload, len(payload))
        try:
            self._put(path, write)
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                page, read_back = bytearray(_PAGE_BYTES), bytearray(_PAGE_BYTES)
                nbytes = os.preadv(file, [page, read_back], 0)
            finally:
                os.close(file)
            if nbytes != 2 * _PAGE_BYTES or read_back != payload:
                raise OSError(errno.EIO, "what was written is not what is read back", path)
        except OSError as error:
            if error.errno not in _FULL:  # a full or read-only file system can still be read
                raise self._down(error) from error
        finally:
            self._forget(path)

    def usage(self) -> TierUsage:
        capacity_bytes = self._least_used.capacity_bytes or None
        return TierUsage(None, self._least_used.used_bytes, capacity_bytes, full=self._full)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, key: ChunkKey) -> str:
        return f"{self._directory}/{key.path()}"

    def _are_held(self, keys: Sequence[ChunkKey]) -> list[bool]:
        files = (self._status_of(self._path(key)) for key in keys)
        return [status is not None and self._is_chunk(status) for status in files]

    def _is_chunk(self, status: os.stat_result) -> bool:
        return self._has_payload(status) and self._is_trusted(status)

    def _has_payload(self, status: os.stat_result) -> bool:
        return 0 < status.st_size - _PAGE_BYTES <= self._chunk_bytes and stat.S_ISREG(status.st_mode)

    def _is_trusted(self, status: os.stat_result) -> bool:
        """Whether only users whose chunks we serve can have written the file."""
        if self._key or self._config.trust_writers:
            return True
        if status.st_mode & stat.S_IWOTH:
            return False
        if self._config.mode == "group":
            return status.st_gid == self._gid
        return status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWGRP

    def _status_of(self, path: str) -> os.stat_result | None:
        try:
            return os.lstat(path)
        except OSError as error:
            if error.errno in _GONE | _OF_THE_CHUNK:
                return None
            raise self._down(error) from error

    def _load(self, read: Read) -> LoadOutcome:
        path = self._path(read.key)
        for may_try_again in (True, False):
            try:
                return self._receive(path, read)
            except OSError as error:
                if error.errno == errno.EIO:
                    return ReadFailed(f"{path}: {error.strerror}")
                if error.errno not in _GONE | _OF_THE_CHUNK:
                    raise self._down(error) from error
                # Perhaps another host replaced it in the meantime.
                if error.errno != errno.ESTALE or not may_try_again:
                    break
        return Absent()

    def _receive(self, path: str, read: Read) -> LoadOutcome:
        try:
            # Without O_NONBLOCK, opening a pipe would block forever.
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return Absent()
            raise
        try:
            status = os.fstat(file)
            if not self._is_trusted(status):
                return Absent()
            offset, page = 0, bytearray(_PAGE_BYTES)
            stored_bytes = status.st_size - _PAGE_BYTES
            # The code of a file that others may write covers all of it.
            room = read.pages[:stored_bytes] if self._key else read.room[:stored_bytes]
            if self._has_payload(status):
                while offset < _PAGE_BYTES + len(room):
                    step = os.preadv(file, after([memoryview(page), room], offset), offset)
                    if not step:
                        break
                    offset += step
        finally:
            os.close(file)
        # The header of a truncated file names more bytes than there are.
        if not self._has_payload(status) or offset < _PAGE_BYTES + len(room) or stored_bytes_in(page) != stored_bytes:
            self._forget(path)
            return Damaged(f"a file of {offset or status.st_size} bytes")
        if self._key and not hmac.compare_digest(self._code(page[:HEADER_BYTES], room), bytes(page[_CODE_AT])):
            self._forget(path)
            return Damaged("it was not written with our key")
        read.header[:] = page[:HEADER_BYTES]
        self._renew(path, status.st_mtime)
        return Loaded(min(read.wanted_bytes, stored_bytes))

    def _renew(self, path: str, used_at_s: float) -> None:
        """Reset the age of a file in use. Not at every use, because each is a message to the file system's host."""
        # This host's clock is good enough: if it is wrong, a message is sent too early or too late.
        if time.time() - used_at_s > self._renew_s:
            with suppress(OSError):  # only its owner can renew it, or it is gone
                os.utime(path)

    def _store_one(self, write: Write) -> StoreOutcome:
        path = self._path(write.key)
        status = self._status_of(path)
        if status is not None and self._is_chunk(status):
            self._renew(path, status.st_mtime)
            return Stored()
        if self._least_used.is_full:
            for _ in range(_PASSES_WHEN_FULL):
                self._sweep_some()
            if self._least_used.is_full:
                capacity = spelled(self._least_used.capacity_bytes)
                self._full = f"{self._root}: its chunks take up capacity_bytes ({capacity}), and all are in use"
                return Refused(self._full)
        for may_try_again in (True, False):
            try:
                self._put(path, write)
                break
            except OSError as error:
                if error.errno in _FULL:
                    self._sweep_some()  # what has expired may be all that fills it
                    self._full = f"{self._root}: {error.strerror}"
                    return Refused(self._full)
                if error.errno in _OF_THE_CHUNK:
                    return Unstorable(f"{path}: {error.strerror} (a file of {_PAGE_BYTES + write.stored_bytes} bytes)")
                # Perhaps another host cleared the directory in the meantime.
                if error.errno not in _GONE or not may_try_again:
                    raise self._down(error) from error
        self._least_used.stored(_PAGE_BYTES + write.stored_bytes)
        self._sweep_some()
        return Stored()

    def _put(self, path: str, write: Write) -> None:
        """Write the file under its final name."""
        temporary = f"{os.path.dirname(path)}/.{secrets.token_hex(8)}{_TEMPORARY}"
        try:
            self._write(temporary, write)
            os.replace(temporary, path)
        except BaseException:
            self._forget(temporary)
            raise

    def _write(self, temporary: str, write: Write) -> None:
        """Write the whole file, durably."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(temporary, flags, self._file_mode)
        except FileNotFoundError:
            self._make_directories(os.path.dirname(temporary))
            file = os.open(temporary, flags, self._file_mode)
        try:
            self._time_there = os.fstat(file).st_mtime - time.monotonic()
            if self._config.mode == "group":
                os.fchmod(file, self._file_mode)  # whatever the umask
            code = self._code(write.header, write.payload) if self._key else b""
            page = memoryview((write.header + code).ljust(_PAGE_BYTES, b"\0"))
            offset = 0
            while offset < _PAGE_BYTES + write.stored_bytes:
                offset += os.pwritev(file, after([page, write.payload], offset), offset)
            # Before the rename, or a host that dies could leave half a file under the final name. It also reveals what
            # a remote file system reports late: that it is full.
            self._sync(file)
            status = os.fstat(file)
            if not self._is_trusted(status):  # the file system gives files to users and groups of its own choice
                mode, owner = stat.S_IMODE(status.st_mode), f"user {status.st_uid} and group {status.st_gid}"
                raise PermissionError(errno.EPERM, f"files made there are of {owner}, mode {mode:04o}: not served")
        finally:
            os.close(file)

    def _sync(self, file: int) -> None:
        if self._file_system.lacks("fsync"):
            return
        try:
            os.fsync(file)
        except OSError as error:
            if not self._file_system.is_lacking("fsync", error):
                raise

    def _code(self, header: bytes | bytearray, payload: memoryview) -> bytes:
        digest = hmac.new(self._key, header, "sha256")
        digest.update(payload)
        return digest.digest()

    def _make_directories(self, path: str) -> None:
        """Create all directories below the root, which must exist."""
        directory = self._root
        for name in os.path.relpath(path, self._root).split("/"):
            directory = f"{directory}/{name}"
            try:
                os.mkdir(directory, self._directory_mode)
            except FileExistsError:
                continue
            if self._config.mode == "group":
                # Not by its name: another member of the group may have put a link in its place.
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    with suppress(PermissionError):  # the root's mode need not hand its group on
                        os.fchown(descriptor, -1, os.stat(self._root).st_gid)
                    os.fchmod(descriptor, self._directory_mode)
                finally:
                    os.close(descriptor)

    def _sweep_some(self) -> None:
        """Check a few more files and remove those that are too old. One thread at a time is enough."""
        if not self._sweeping.acquire(blocking=False):
            return
        try:
            now_s = self._time_there + time.monotonic()
            at_once = _SWEPT_WHEN_FULL if self._least_used.is_nearly_full else _SWEPT_AT_ONCE
            batch = list(itertools.islice(self._sweep, at_once))
            for directory, files in itertools.groupby(batch, operator.itemgetter(0)):
                with suppress(OSError), opened_below(self._root, directory) as opened:
                    for _, name in files:
                        if directory.startswith("."):
                            with suppress(OSError):
                                os.unlink(name, dir_fd=opened)
                        else:
                            self._remove_or_count(name, opened, now_s)
            if len(batch) == at_once:
                return
            self._least_used.end_pass(now_s - _IN_USE_S)
            if self._least_used.is_pass_due or time.monotonic() - self._swept_from_s > _REST_S:
                self._sweep, self._swept_from_s = self._files_to_sweep(), time.monotonic()
                self._least_used.begin_pass()
        finally:
            self._sweeping.release()

    def _remove_or_count(self, name: str, directory: int, now_s: float) -> None:
        with suppress(OSError):  # another host was faster
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            is_temporary = name.endswith(_TEMPORARY)
            limit_s = self._config.temporary_s if is_temporary else self._config.ttl_s
            is_old = limit_s and now_s - status.st_mtime > limit_s
            if is_old or (not is_temporary and self._least_used.is_evicted(status.st_mtime)):
                os.unlink(name, dir_fd=directory)
                self._least_used.removed(status.st_size)
            else:
                self._least_used.passed(status.st_mtime, status.st_size)

    def _files(self) -> Iterator[tuple[str, str]]:
        """The files of our chunks and whatever else is there: the directory below the root, and the name."""
        return files_below(self._root, os.path.basename(self._directory), _LEVELS)

    def _files_to_sweep(self) -> Iterator[tuple[str, str]]:
        """Our chunks' files, and those that a clear has renamed: the host that was to remove them may have died."""
        # In an order of this host's own, so that several find more together than one does.
        yield from files_below(self._root, os.path.basename(self._directory), _LEVELS, order=random.shuffle)
        names: list[str] = []
        with suppress(TierDown):  # the next call will notice
            names = self._taken_away()
        for name in names:
            is_empty = True
            for file in files_below(self._root, name, _LEVELS):
                is_empty = False
                yield file
            if is_empty:  # except for directories
                shutil.rmtree(f"{self._root}/{name}", ignore_errors=True)

    def _taken_away(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._root) if name.startswith(self._removal_prefix)]
        except OSError as error:
            raise self._down(error) from error

    def _take_away(self, directories: Sequence[str]) -> None:
        """Rename these at once, then remove them, and whatever other hosts have renamed but not removed."""
        for directory in directories:
            try:
                os.rename(directory, f"{self._root}/{self._removal_prefix}{secrets.token_hex(8)}")
            except OSError as error:
                if error.errno not in _GONE and (error.errno not in _READ_ONLY or os.path.lexists(directory)):
                    raise self._down(error, removing=True) from error
        self._check_root()
        for name in self._taken_away():
            shutil.rmtree(f"{self._root}/{name}", ignore_errors=True)

    def _remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno in _GONE or error.errno == errno.EISDIR:  # which is no chunk
                return
            if error.errno not in _READ_ONLY or self._is_there(path):
                raise self._down(error, removing=True) from error

    def _is_there(self, path: str) -> bool:
        """Whether the file exists for us: another user's file, which we could not remove, does not."""
        status = self._status_of(path)
        return status is not None and self._is_trusted(status) and (not self._key or status.st_uid == os.geteuid())

    def _forget(self, path: str) -> None:
        """Remove the file if possible; it is not a valid chunk."""
        with suppress(OSError):
            os.unlink(path)

    def _ensure_root_checked(self) -> None:
        if self._gid is None:
            self._check_root()

    def _check_root(self) -> None:
        try:
            status = os.stat(self._root)
        except OSError as error:
            raise self._down(error) from error
        self._bound_by(self._least_used.capacity_bytes)
        if self._key or self._config.trust_writers:
            self._gid = status.st_gid
            return
        others = stat.S_IWOTH if self._config.mode == "group" else stat.S_IWOTH | stat.S_IWGRP
        if status.st_mode & others or status.st_uid not in (os.geteuid(), 0):
            mode = stat.S_IMODE(status.st_mode)
            raise TierDown(
                f"{self._root} (mode {mode:04o}, of user {status.st_uid}) may be written to by others; close it to "
                "them, or write mode: group and give it to a group, or a key_file that all who share it have, or "
                "trust_writers: true"
            )
        self._gid = status.st_gid

    def _bound_by(self, capacity_bytes: int) -> None:
        """The first time, compare the capacity with the file system's size, or derive it from that."""
        if self._gid is not None:
            return
        size_bytes = 0
        with suppress(OSError):
            size_bytes = size_of_file_system(Path(self._root))
        if not capacity_bytes and size_bytes:
            self._least_used.capacity_bytes = size_bytes // _DEFAULT_SHARE
            share = spelled(self._least_used.capacity_bytes)
            _log.info(
                "%s: %s: chunks take up %s, a tenth of the file system; see capacity_bytes",
                self.name,
                self._root,
                share,
            )
        elif not capacity_bytes:
            _log.warning(
                "%s: %s: the file system does not say how large it is, so nothing bounds what is stored there: write "
                "capacity_bytes",
                self.name,
                self._root,
            )
        elif 0 < size_bytes < capacity_bytes:
            _log.warning(
                "%s: capacity_bytes of %s is more than the file system of %s has, %s in all: it will fill up, for "
                "everything else there too; write less",
                self.name,
                spelled(capacity_bytes),
                self._root,
                spelled(size_bytes),
            )

    def _down(self, error: OSError, *, removing: bool = False) -> TierDown:
        kind = RemovalRefusedError if removing and error.errno in _READ_ONLY else TierDown
        return kind(f"{error.filename or self._root}: {error.strerror or error}")


make_shared_fs_tier = factory_of(SharedFsTier, SharedFsConfig, "shared_fs")
"""The factory of the tier type `shared_fs`."""


def _read_key(config: SharedFsConfig, where: str) -> bytes:
    key = read_secret(Path(config.key_file), f"{where}: key_file")
    if not 16 <= len(key) <= 4096:
        raise ConfigError(f"{where}: key_file {config.key_file} has {len(key)} bytes; a key has 16 to 4096")
    return key
