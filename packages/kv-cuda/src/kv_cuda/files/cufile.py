"""GPUDirect Storage: files ↔ device memory, through cuFile as wrapped by kvikio.

Availability is determined once and without touching cuFile, because opening cuFile's driver never returns if the kernel
lacks it. Three things are required: NVIDIA's kernel module, its devices (a container has the first without the second),
and kvikio outside its compatibility mode, which copies through its own host memory; our staged path does that with one
copy less.

kvikio: https://docs.rapids.ai/api/kvikio/stable/
"""

import errno
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from kv_core.tools.doctor import version_of

from kv_cuda.files.host_files import Files, OpenFile, Transfer

_THREADS: Final = 8
"""Threads of kvikio, which divides a transfer into tasks of 4 MiB; each makes one call of cuFile at a time."""


@dataclass(frozen=True, slots=True)
class NoCuFile:
    """Files cannot be read straight into this device.

    why: what is missing.
    advice: what to do about it.
    has_module: whether the kernel has the module.
    """

    why: str
    advice: str
    has_module: bool = False


def find_cufile(device: torch.device, *, proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> Files | NoCuFile:
    """cuFile for memory of this device. proc, dev: the paths of /proc and /dev."""
    if device.type != "cuda":
        return NoCuFile("the blocks are not on a GPU", "")
    return what_is_missing(kvikio_version(), proc=proc, dev=dev) or _load()


def kvikio_version() -> str | None:
    return version_of("kvikio-cu13") or version_of("kvikio-cu12")


def what_is_missing(kvikio: str | None, *, proc: Path, dev: Path) -> NoCuFile | None:
    """What is missing, as far as that can be seen without touching cuFile. kvikio: its version, if it is installed."""
    has_module = (proc / "driver/nvidia-fs/version").exists()
    if not has_module:
        why = f"kvikio {kvikio} without the nvidia-fs module" if kvikio else "neither kvikio nor the nvidia-fs module"
        return NoCuFile(why, "for the direct path: the nvidia-gds package, and kvikio")
    if not any(dev.glob("nvidia-fs*")):
        advice = "start the container with the devices: --device for each /dev/nvidia-fs*, and /run/udev read-only"
        return NoCuFile("the nvidia-fs module is loaded, but its devices are missing", advice, has_module=True)
    if kvikio is None:
        return NoCuFile(
            "the nvidia-fs module is loaded, but kvikio is not installed", "pip install 'kv-cuda[gds]'", has_module=True
        )
    return None


def _load() -> Files | NoCuFile:
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
    except (ImportError, OSError, RuntimeError) as error:
        advice = "reinstall it: pip install --force-reinstall 'kv-cuda[gds]'"
        return NoCuFile(f"kvikio cannot be imported: {error}", advice, has_module=True)
    if defaults.is_compat_mode_preferred():
        advice = "check that KVIKIO_COMPAT_MODE is not ON and that gdscheck -p finds the driver"
        return NoCuFile("kvikio is in compatibility mode", advice, has_module=True)
    if defaults.get("num_threads") == 1:  # the default; another number is the user's choice
        defaults.set("num_threads", _THREADS)
    return CuFiles(kvikio)


class CuFiles:
    """`Files` for memory of a device."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio

    def open(self, path: str, *, writable: bool) -> OpenFile:
        with _raising_os_error(f"open {path}"):
            return _CuFile(self._kvikio.CuFile(path, "r+" if writable else "r"), path)

    def register(self, memory: torch.Tensor) -> None:
        with _raising_os_error("register memory"):
            self._kvikio.memory_register(memory)

    def unregister(self, memory: torch.Tensor) -> None:
        with _raising_os_error("unregister memory"):
            self._kvikio.memory_deregister(memory)

    def close(self) -> None:
        return None


class _CuFile:
    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def read(self, memory: torch.Tensor, offset: int) -> Transfer:
        with _raising_os_error(f"read {self._path}"):
            return _Pending(self._file.pread(memory, memory.numel(), offset), self._path)

    def write(self, memory: torch.Tensor, offset: int) -> Transfer:
        with _raising_os_error(f"write {self._path}"):
            return _Pending(self._file.pwrite(memory, memory.numel(), offset), self._path)

    def close(self) -> None:
        self._file.close()


class _Pending:
    def __init__(self, future: Any, path: str) -> None:
        self._future, self._path = future, path

    def wait(self) -> int:
        with _raising_os_error(f"transfer bytes of {self._path}"):
            return int(self._future.get())


@contextmanager
def _raising_os_error(what: str) -> Iterator[None]:
    """kvikio reports failures by several exceptions: raise `OSError` instead."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise OSError(errno.EIO, f"cuFile could not {what}: {error}") from error
