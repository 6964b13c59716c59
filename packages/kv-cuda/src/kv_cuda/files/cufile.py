"""GPUDirect Storage: files → device memory, through cuFile as wrapped by kvikio.

Whether a machine has it is tested with cuFile itself, by reading a file of the directory in use: it depends on the
driver, the file system and the kernel (NVIDIA's module, or since CUDA 12.8 the kernel's own peer-to-peer transfers).
The probe is a child process with a time limit, because without a driver opening cuFile's never returns.
kvikio's compatibility mode is off, because it copies through its own host memory; our staged path does that with one
copy less.

kvikio: https://docs.rapids.ai/api/kvikio/stable/
"""

import errno
import importlib
import subprocess
import sys
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
_LIMIT_S: Final = 60.0
"""A child process imports torch and creates a context on the device, which takes seconds."""
_PROBE: Final = """
import sys, tempfile
import kvikio, kvikio.defaults, torch
kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF)
memory = torch.zeros(4096, dtype=torch.uint8, device=sys.argv[2])
with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
    file.write(bytes([7]) * 4096)
    file.flush()
    with kvikio.CuFile(file.name, "r") as opened:
        assert opened.pread(memory, 4096, 0).get() == 4096 and bool((memory == 7).all()), "it reads other bytes"
"""


@dataclass(frozen=True, slots=True)
class NoCuFile:
    """Files cannot be read straight into this device.

    why: what is missing.
    advice: what to do about it.
    is_installed: whether kvikio is.
    """

    why: str
    advice: str
    is_installed: bool = False


def find_cufile(device: torch.device, directory: Path) -> Files | NoCuFile:
    """cuFile for memory of this device, and files of this directory or, if it does not exist yet, of its parent."""
    if device.type != "cuda":
        return NoCuFile("the blocks are not on a GPU", "")
    if kvikio_version() is None:
        return NoCuFile("kvikio is not installed", "for the direct path: pip install 'kv-cuda[gds]'")
    if why := why_not(device, directory):
        return NoCuFile(f"cuFile {why}", "gdscheck -p says what the driver and the file system support", True)
    kvikio, defaults = importlib.import_module("kvikio"), importlib.import_module("kvikio.defaults")
    defaults.set("compat_mode", kvikio.CompatMode.OFF)
    if defaults.get("num_threads") == 1:  # the default; another number is the user's choice
        defaults.set("num_threads", _THREADS)
    return CuFiles(kvikio)


def kvikio_version() -> str | None:
    return version_of("kvikio-cu13") or version_of("kvikio-cu12")


def why_not(device: torch.device, directory: Path, *, limit_s: float = _LIMIT_S, probe: str = _PROBE) -> str:
    """Why cuFile cannot read files of this directory into this device; empty: it can."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    # -P: what is in the current directory is nobody's module.
    command = [sys.executable, "-P", "-c", probe, str(place), str(device)]
    with subprocess.Popen(  # noqa: S603  # ourselves
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            _, said = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return f"does not answer within {limit_s:g} s"
    if child.returncode == 0:
        return ""
    last_line = said.strip().rpartition("\n")[2]
    return f"cannot read a file of {place}: {last_line or f'its process ended with {child.returncode}'}"


class CuFiles:
    """`Files` for memory of a device."""

    def __init__(self, kvikio: Any) -> None:
        self._kvikio = kvikio

    def open(self, path: str) -> OpenFile:
        with _raising_os_error(f"open {path}"):
            return _CuFile(self._kvikio.CuFile(path, "r"), path)

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
