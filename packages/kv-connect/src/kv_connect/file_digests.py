"""Digests of a model's or an adapter's files. Every byte counts and is read once.

The digest of a file is remembered in a small private file, by path, inode, size and timestamps, so that the next start
need not read the file again. Changing a file changes its timestamps; a file that was changed within the last seconds is
not remembered, because a coarse clock could hide a second change.
"""

import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.pool.private_files import open_own_file, own_directory
from kv_tiers.threads import start_thread

_log = limited_logger(__name__)

_MAX_BYTES: Final = 4 * 1024**2
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt")
_BESIDE: Final = re.compile(
    r".*quant.*\.json|.*\.index\.json|adapter_config\.json|params\.json|.*processor_config\.json|.*\.py"
)
"""Files that determine how weights are read and what their input is: scales and methods of quantisation, the index of
layers, an adapter's and Mistral's configurations, how images and sounds are prepared, the model's code."""
_SPLIT_GGUF: Final = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf")
_SEGMENT_BYTES: Final = 64 * 1024**2
"""Files are hashed in parts of this size, several at a time. The digest depends on it."""
_READ_BYTES: Final = 1024**2
_MAX_THREADS: Final = 4
_SETTLED_NS: Final = 2 * 10**9
_MAX_REMEMBERED: Final = 4096


def cache_file(name: str) -> Path | None:
    """The path of such a file of this user, according to XDG; None for a user without a home."""
    xdg_cache_home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(xdg_cache_home) if os.path.isabs(xdg_cache_home) else Path.home() / ".cache") / "kv-tiers" / name
    except RuntimeError:
        return None


def read_private(path: Path) -> Any:
    """Read what `write_private` wrote; None if it does not exist, is accessible to others, or is malformed."""
    try:
        descriptor = open_own_file(path, os.O_RDONLY, "remove it")
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        _log.warning("the content of %s is not used: %s", path, error)
        return None
    with os.fdopen(descriptor, "rb") as stream:
        text = stream.read(_MAX_BYTES + 1)
    try:
        document = json.loads(text) if len(text) <= _MAX_BYTES else None
        if isinstance(document, dict) and document.get("checksum") == _checksum(document.get("content")):
            return document["content"]
    except (ValueError, RecursionError):
        pass
    _log.info("%s is damaged and not used", path)
    return None


def write_private(path: Path, content: Any) -> None:
    """Write lists, dicts, strings and numbers there, atomically. A failure is logged and nothing more."""
    text = json.dumps({"checksum": _checksum(content), "content": content})
    try:
        own_directory(path.parent, "remove it", parents=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # of mode 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, ConfigError) as error:
        _log.info("%s cannot be written: %s", path, error)


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class FilesChangedError(Exception):
    """A file changed while it was read, so it is not known which content the engine has loaded."""


class HashingStoppedError(Exception):
    """The caller no longer needs the digest."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The status of a file. Equal states have equal content, as far as timestamps show.

    path: resolved.
    device, inode: of the file system.
    mtime_ns, ctime_ns: since the epoch.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """
        Raises:
            OSError: there is no file, or it is not accessible.
        """
        resolved = path.resolve()
        status = os.stat(resolved)
        size, modified_ns, changed_ns = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return cls(str(resolved), status.st_dev, status.st_ino, size, modified_ns, changed_ns)


def content_files(source: Path) -> list[tuple[str, Path]]:
    """The files that determine what a model or an adapter computes, besides its configuration: (name, path), by name.

    source: a directory, or one file of weights, whose split parts and quantisation count too. Empty without weights.
    """
    if source.is_dir():
        paths = [path for path in source.rglob("*") if path.suffix in _WEIGHTS or _BESIDE.fullmatch(path.name)]
        named = [(path.relative_to(source).as_posix(), path) for path in paths]
    else:
        split = _SPLIT_GGUF.fullmatch(source.name)
        parts = source.parent.glob(f"{split[1]}-*-of-*.gguf") if split else [source]
        related = [path for path in source.parent.iterdir() if _BESIDE.fullmatch(path.name)]
        named = [(path.name, path) for path in [*parts, *related]]
    named = sorted((name, path) for name, path in named if path.is_file())
    return named if any(path.suffix in _WEIGHTS for _, path in named) else []


class DigestMemory:
    """Digests of files by their state, in a private file of this user. If anything is wrong with it, it counts as
    empty."""

    def __init__(self, path: Path | None, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        """path: None to remember nothing."""
        self._path = path
        self._now_ns = now_ns

    def recall(self, states: Iterable[FileState]) -> dict[FileState, str]:
        """The digests of those that are known."""
        known = self._read()
        return {state: known[state] for state in states if state in known}

    def remember(self, digests: dict[FileState, str]) -> None:
        """Store the digests of files that have not changed just now. A failure only costs another reading."""
        settled = self._now_ns() - _SETTLED_NS
        stable = {state: digest for state, digest in digests.items() if max(state.mtime_ns, state.ctime_ns) < settled}
        if self._path is None or not stable:
            return
        paths = {state.path for state in stable}
        older = {state: digest for state, digest in self._read().items() if state.path not in paths}
        remembered = list((older | stable).items())[-_MAX_REMEMBERED:]
        write_private(self._path, [[*astuple(state), digest] for state, digest in remembered])

    def _read(self) -> dict[FileState, str]:
        entries = read_private(self._path) if self._path is not None else None
        known = {}
        for entry in entries if isinstance(entries, list) else ():
            match entry:
                case [str(path), int(device), int(inode), int(size), int(mtime), int(ctime), str(digest)]:
                    known[FileState(path, device, inode, size, mtime, ctime)] = digest
        return known


@dataclass(slots=True)
class _Segments:
    """Segments still to be hashed, taken by several threads."""

    tasks: Iterator[tuple[FileState, int]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    digests: dict[tuple[FileState, int], bytes] = field(default_factory=dict)
    error: BaseException | None = None

    def take(self) -> tuple[FileState, int] | None:
        with self.lock:
            return None if self.error else next(self.tasks, None)


def content_digest(
    files: Sequence[tuple[str, FileState]],
    memory: DigestMemory,
    *,
    threads: int | None = None,
    stopped: threading.Event | None = None,
) -> str:
    """32 hex digits over the names and all bytes of these files in these states. Files that are not in `memory` are
    read.

    Raises:
        OSError: a file cannot be read.
        FilesChangedError: one has another state by now.
        HashingStoppedError: `stopped` was set.
    """
    states = dict(files)
    known = memory.recall(states.values())
    unknown = [state for state in dict.fromkeys(states.values()) if state not in known]
    if unknown:
        fresh = _hash_all(unknown, threads or _threads(), stopped or threading.Event())
        memory.remember(fresh)
        known |= fresh
    digest = hashlib.sha256(b"kv-files/2")
    for name, state in states.items():
        digest.update(json.dumps([name, state.size, known[state]]).encode())
    return digest.hexdigest()[:32]


def _hash_all(states: Sequence[FileState], threads: int, stopped: threading.Event) -> dict[FileState, str]:
    segments = _Segments((state, offset) for state in states for offset in range(0, max(state.size, 1), _SEGMENT_BYTES))
    # Daemons: an engine that ends meanwhile does not wait for them.
    helpers = [threading.Thread(target=_hash_some, args=(segments, stopped), daemon=True) for _ in range(threads - 1)]
    started = [thread for thread in helpers if not start_thread(thread)]
    _hash_some(segments, stopped)
    for thread in started:
        thread.join()
    if segments.error is not None:
        raise segments.error
    digests = {}
    for state in states:
        parts = [segments.digests[state, offset] for offset in range(0, max(state.size, 1), _SEGMENT_BYTES)]
        digests[state] = hashlib.sha256(b"".join(parts)).hexdigest()
    if changed := [state.path for state in states if FileState.of(Path(state.path)) != state]:
        raise FilesChangedError(f"{changed[0]} changed while it was read")
    return digests


def _hash_some(segments: _Segments, stopped: threading.Event) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    while (task := segments.take()) is not None:
        try:
            segments.digests[task] = _hash_segment(*task, buffer, stopped)
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits for the answer
            segments.error = error


def _hash_segment(state: FileState, offset: int, buffer: memoryview, stopped: threading.Event) -> bytes:
    digest = hashlib.sha256()
    remaining = min(_SEGMENT_BYTES, state.size - offset)
    descriptor = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while remaining:
            if stopped.is_set():
                raise HashingStoppedError
            count = os.preadv(descriptor, [buffer[: min(remaining, _READ_BYTES)]], offset)
            if not count:
                raise FilesChangedError(f"{state.path} became shorter while it was read")
            digest.update(buffer[:count])
            offset, remaining = offset + count, remaining - count
    finally:
        os.close(descriptor)
    return digest.digest()


def _threads() -> int:
    """Half of the CPUs that this process may use: the engine is starting at the same time."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


def default_memory() -> DigestMemory:
    """In the user's cache directory."""
    return DigestMemory(cache_file("file-digests.json"))
