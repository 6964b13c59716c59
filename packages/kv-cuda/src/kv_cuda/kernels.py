"""Functions in C for copies and formats on a CPU, from a library that this package's build compiles if it can.

Without it torch does the work, with the same bytes. The rules of its functions are in `csrc/library.c`.
"""

from array import array
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from kv_core.c_library import CLibrary
from kv_core.errors import MisuseError
from kv_core.log import limited_logger
from numpy.typing import NDArray

_log = limited_logger(__name__)

LIBRARY: Final = Path(__file__).parent / "csrc" / "_kernels.so"
SOURCES: Final = sorted(LIBRARY.parent.glob("*.[ch]"))
"""The sources, in the order in which `hatch_build.py` compiles them and takes their checksum."""
_VERSION: Final = 4
"""The version of the functions' arguments; `KV_VERSION` in the sources."""
_ARGUMENTS: Final = {"quantise": (0, 4), "dequantise": (0, 4), "copy_blocks": (1, 4), "submit": (0, 9)}
"""How many numbers each function takes, and how many arrays behind them."""
OTHER: Final = -2
"""`KV_OTHER` in the sources."""

Place = tuple[int, int]
"""The address and size in bytes of an array that is passed often. The caller keeps its memory alive."""


class CopyKernels(CLibrary):
    """The functions of one library, by name."""

    def __init__(self, library: Path) -> None:
        """Raises `OSError` and `MisuseError`, as `CLibrary`."""
        super().__init__(str(library), _VERSION, _ARGUMENTS)

    def call(self, name: str, /, *arguments: int | NDArray[np.generic] | Place) -> int:
        """Call a function by its name in the source, without `kv_`; returns its result.

        arguments: a number, if the function takes one, and its arrays.

        Raises:
            MisuseError: the arrays' sizes do not fit each other.
        """
        flat: list[int] = []
        for argument in arguments:
            if isinstance(argument, int):
                flat.append(argument)
            else:
                flat += place_of(argument) if isinstance(argument, np.ndarray) else argument
        return self.invoke(name, flat)


def place_of(array: NDArray[np.generic]) -> Place:
    assert array.flags.c_contiguous
    return array.ctypes.data, array.nbytes


def place_of_packed(numbers: "array[int]") -> Place:
    address, count = numbers.buffer_info()
    return address, count * numbers.itemsize


@cache
def installed_kernels() -> CopyKernels | None:
    """The kernels that were built with this package. None: there are none for this machine."""
    if not LIBRARY.exists():
        return None
    try:
        return CopyKernels(LIBRARY)
    except (OSError, MisuseError) as error:
        _log.warning("copies on a CPU use torch, which is slower: %s", error)
        return None
