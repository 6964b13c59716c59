"""A library of ours in C, compiled for 64-bit Arm and run on an emulated processor.

`scripts/setup.sh arm64` installs the cross compiler and the emulator. Without them such tests are skipped.
"""

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_core.c_library import MISFIT
from kv_core.errors import MisuseError
from numpy.typing import NDArray

COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
DRIVER = Path(__file__).with_name("emulated_driver.c")
REQUEST = struct.Struct("<16sqQ")
needs_emulator = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="no cross compiler or no emulator: scripts/setup.sh arm64 installs them"
)


class EmulatedLibrary:
    """Functions in a process of another processor. Arrays are copied there and back."""

    def __init__(self, sources: Sequence[Path], scratch: Path, *options: str) -> None:
        """sources: of the library. options: of the compiler."""
        assert COMPILER and EMULATOR
        program = scratch / "driver"
        flags = ["-std=gnu11", "-O3", "-static", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *options]
        compiled = [DRIVER, *(source for source in sources if source.suffix == ".c")]
        made = [COMPILER, *flags, f"-I{sources[0].parent}", "-o", str(program), *map(str, compiled)]
        subprocess.run(made, check=True, timeout=60)
        self._process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, name: str, *arguments: int | NDArray[Any]) -> int:
        assert self._process.stdin and self._process.stdout
        number = next((one for one in arguments if isinstance(one, int)), 0)
        arrays = [one for one in arguments if not isinstance(one, int)]
        self._process.stdin.write(REQUEST.pack(name.encode(), number, len(arrays)))
        for array in arrays:
            self._process.stdin.write(struct.pack("<Q", array.nbytes) + array.tobytes())
        self._process.stdin.flush()
        (answer,) = struct.unpack("<q", self._process.stdout.read(8))
        for array in arrays:
            there = np.frombuffer(self._process.stdout.read(array.nbytes), array.dtype).reshape(array.shape)
            if array.flags.writeable:
                array[...] = there
        if answer == MISFIT:
            raise MisuseError(f"kernel {name}: arrays whose sizes do not match")
        return int(answer)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
