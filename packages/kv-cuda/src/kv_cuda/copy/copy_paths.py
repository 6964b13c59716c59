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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args

import torch
from kv_core.errors import ConfigError
from kv_core.log import limited_logger

_log = limited_logger(__name__)

Direction = Literal["load", "store"]
CopyPath = Literal["direct", "staged", "driver"]
FileCopyPath = Literal["direct", "staged"]

_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 1 << 16


class _MeasuredTable(ABC):
    """A table in a file of its own for each kind of device; without arguments, the one where nothing was measured."""

    __slots__ = ()
    file_stem: ClassVar[str]

    @classmethod
    def file(cls, device_name: str) -> Path:
        """The file with the measured table of this kind of device.

        Raises:
            ConfigError: there is no place for it.
        """
        try:
            home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # a user of a container who is in no list of users
            raise ConfigError("this user has no home directory for measurements: set XDG_CACHE_HOME") from None
        slug = "".join(char if char.isalnum() else "-" for char in device_name).strip("-").lower()
        return home / "kv-cuda" / f"{cls.file_stem}-{slug or 'device'}.json"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The measured table, or the one where nothing was measured.

        Raises:
            ConfigError: the file was not written by `write`.
        """
        try:
            text = path.read_bytes()[:_MAX_FILE_BYTES]
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; remove it, or measure again: kv bench copy"
            ) from None
        try:
            saved: Any = json.loads(text)
            if saved["version"] != _VERSION:
                raise ValueError("another version")
            return cls._parsed(saved)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not a table of copy paths ({error}); remove it, or measure again: kv bench copy"
            ) from None

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """The table that `kv bench copy` measured on this kind of device, if readable; else the built-in one."""
        if device.type != "cuda":
            return cls()
        try:
            return cls.read(cls.file(torch.cuda.get_device_name(device)))
        except ConfigError as error:
            _log.warning("%s; the built-in table is used", error)
            return cls()

    def write(self, path: Path) -> None:
        """Write the table atomically, private to the user."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": _VERSION, **self._saved()}, indent=1)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        temporary.replace(path)

    @classmethod
    @abstractmethod
    def _parsed(cls, saved: Any) -> Self: ...

    @abstractmethod
    def _saved(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class CopyPaths(_MeasuredTable):
    """For each direction, pairs of (shortest run in bytes, path), ascending from 0."""

    load: tuple[tuple[int, CopyPath], ...] = ((0, "direct"), (256 << 10, "driver"))
    store: tuple[tuple[int, CopyPath], ...] = ((0, "direct"), (256 << 10, "driver"))
    file_stem: ClassVar = "copy-paths"

    def choose(self, direction: Direction, run_bytes: int, *, may_stage: bool, can_drive: bool) -> CopyPath:
        """may_stage, can_drive: whether this copy can be staged, or made by the driver, at all; direct always works."""
        table = self.load if direction == "load" else self.store
        copy_path = [copy_path for shortest, copy_path in table if run_bytes >= shortest][-1]
        if copy_path == "driver" and not can_drive:
            copy_path = "staged"
        return "direct" if copy_path == "staged" and not may_stage else copy_path

    @classmethod
    def _parsed(cls, saved: Any) -> Self:
        return cls(load=_table(saved["load"]), store=_table(saved["store"]))

    def _saved(self) -> dict[str, object]:
        return {"load": self.load, "store": self.store}


@dataclass(frozen=True, slots=True)
class FileCopyPaths(_MeasuredTable):
    """The faster path for each directory that was measured, by its absolute path."""

    measured: Mapping[str, FileCopyPath] = field(default_factory=dict)
    file_stem: ClassVar = "file-copy-paths"

    def takes_direct(self, path: str) -> bool:
        """Whether this file takes the direct path: as measured for its nearest parent directory; True without a
        measurement."""
        for parent in Path(path).parents:
            if (copy_path := self.measured.get(str(parent))) is not None:
                return copy_path == "direct"
        return True

    @classmethod
    def _parsed(cls, saved: Any) -> Self:
        return cls(_directories(saved["directories"]))

    def _saved(self) -> dict[str, object]:
        return {"directories": self.measured}


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
