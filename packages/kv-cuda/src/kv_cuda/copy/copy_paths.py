"""Chooses the path for a chunk's bytes, from measurements.

    direct   the kernel reads or writes pinned host memory over the bus: no ring, but multiprocessors wait for the bus
    staged   the copy engine fills or empties a small ring in device memory; the kernel moves between ring and blocks
    driver   the driver's batched copies, run by run: no kernel at all, for long runs only

For each direction, a table gives the fastest path by run length (contiguous bytes on both sides). The built-in table is
an H100's (docs/performance.md); `kv bench copy` measures it on the device and writes a file that is used from then on.

There are two more paths from files to the device (`kv_cuda.files.direct`). Which is faster depends on the medium:
`kv bench copy --file DIRECTORY` measures it and writes the result for each directory to another file.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from kv_core.errors import ConfigError

Direction = Literal["load", "store"]
CopyPath = Literal["direct", "staged", "driver"]
FileCopyPath = Literal["direct", "staged"]

_Table = TypeVar("_Table")

_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class CopyPaths:
    """For each direction, pairs of (shortest run in bytes, path), ascending from 0."""

    load: tuple[tuple[int, CopyPath], ...] = ((0, "direct"), (256 << 10, "driver"))
    store: tuple[tuple[int, CopyPath], ...] = ((0, "direct"), (256 << 10, "driver"))

    def choose(self, direction: Direction, run_bytes: int, *, may_stage: bool, can_drive: bool) -> CopyPath:
        """may_stage, can_drive: whether this copy can be staged, or made by the driver, at all; direct always works."""
        table = self.load if direction == "load" else self.store
        copy_path = [copy_path for shortest, copy_path in table if run_bytes >= shortest][-1]
        if copy_path == "driver" and not can_drive:
            copy_path = "staged"
        return "direct" if copy_path == "staged" and not may_stage else copy_path


@dataclass(frozen=True, slots=True)
class FileCopyPaths:
    """The faster path for each directory that was measured, by its absolute path."""

    measured: Mapping[str, FileCopyPath] = field(default_factory=dict)

    def takes_direct(self, path: str) -> bool:
        """Whether this file takes the direct path: as measured for its nearest parent directory; True without a
        measurement."""
        for parent in Path(path).parents:
            if (copy_path := self.measured.get(str(parent))) is not None:
                return copy_path == "direct"
        return True


def copy_paths_file(device_name: str) -> Path:
    """The file with the measured table of this kind of device.

    Raises:
        ConfigError: there is no place for it.
    """
    return _table_file("copy-paths", device_name)


def file_copy_paths_file(device_name: str) -> Path:
    """Like `copy_paths_file`, for the measured paths from files to this kind of device."""
    return _table_file("file-copy-paths", device_name)


def _table_file(what: str, device_name: str) -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user of a container who is in no list of users
        raise ConfigError("this user has no home directory for measurements: set XDG_CACHE_HOME") from None
    slug = "".join(char if char.isalnum() else "-" for char in device_name).strip("-").lower()
    return home / "kv-cuda" / f"{what}-{slug or 'device'}.json"


def read_copy_paths(path: Path) -> CopyPaths:
    """The measured table, or the built-in one where nothing was measured.

    Raises:
        ConfigError: the file was not written by `write_copy_paths`.
    """
    return _read(path, lambda saved: CopyPaths(load=_table(saved["load"]), store=_table(saved["store"])), CopyPaths())


def read_file_copy_paths(path: Path) -> FileCopyPaths:
    """The measurements; empty if there are none.

    Raises:
        ConfigError: the file was not written by `write_file_copy_paths`.
    """
    return _read(path, lambda saved: FileCopyPaths(_directories(saved["directories"])), FileCopyPaths())


def write_copy_paths(path: Path, copy_paths: CopyPaths) -> None:
    """Write the table atomically, private to the user."""
    _write(path, {"load": copy_paths.load, "store": copy_paths.store})


def write_file_copy_paths(path: Path, copy_paths: FileCopyPaths) -> None:
    """Like `write_copy_paths`."""
    _write(path, {"directories": copy_paths.measured})


def _read(path: Path, parse: Callable[[Any], _Table], default: _Table) -> _Table:
    try:
        text = path.read_bytes()[:_MAX_FILE_BYTES]
    except FileNotFoundError:
        return default
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; remove it, or measure again: kv bench copy"
        ) from None
    try:
        saved: Any = json.loads(text)
        if saved["version"] != _VERSION:
            raise ValueError("another version")
        return parse(saved)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a table of copy paths ({error}); remove it, or measure again: kv bench copy"
        ) from None


def _write(path: Path, table: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"version": _VERSION, **table}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    temporary.replace(path)


def fastest(rates: Mapping[int, Mapping[CopyPath, float]]) -> tuple[tuple[int, CopyPath], ...]:
    """The table that follows from GB/s by run length and path. The shortest run's winner also holds below it."""
    table: list[tuple[int, CopyPath]] = []
    for run_bytes in sorted(rates):
        best = max(rates[run_bytes], key=rates[run_bytes].__getitem__)
        if not table or table[-1][1] != best:
            table.append((run_bytes if table else 0, best))
    return tuple(table)


def _directories(saved: Mapping[str, Any]) -> dict[str, FileCopyPath]:
    for path, copy_path in saved.items():
        if not Path(path).is_absolute() or copy_path not in get_args(FileCopyPath):
            raise ValueError(f"{path}: {copy_path}")
    return dict(saved)


def _table(saved: Sequence[Sequence[Any]]) -> tuple[tuple[int, CopyPath], ...]:
    table = []
    for shortest, copy_path in saved:
        if isinstance(shortest, bool) or not isinstance(shortest, int) or copy_path not in get_args(CopyPath):
            raise ValueError(f"{[shortest, copy_path]}")
        table.append((shortest, copy_path))
    starts = [shortest for shortest, _ in table]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError("lengths of runs must ascend from 0")
    return tuple(table)
