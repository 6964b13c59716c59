"""Functions in C for copies and formats on a CPU.

They are in the library that is built with kv-tiers (docs/adr/0016), found through an entry point because neither
package depends on the other. Without it, torch does the work, with the same bytes.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

GROUP: Final = "kv_cuda.kernels"
"""The entry-point group. An entry point names a function that returns `Kernels`, or None if there are none."""


Place = tuple[int, int]
"""The address and size in bytes of an array that is passed often. The caller keeps its memory alive."""


class Kernels(Protocol):
    """C functions by name. Raises `MisuseError` where the arrays' sizes do not fit each other."""

    def call(self, name: str, /, *arguments: int | NDArray[np.generic] | Place) -> int: ...


def place_of(array: NDArray[np.generic]) -> Place:
    assert array.flags.c_contiguous
    return array.ctypes.data, array.nbytes


@cache
def installed_kernels() -> Kernels | None:
    """None: they are not installed, or not for this machine."""
    candidates = (entry.load()() for entry in entry_points(group=GROUP))
    return next((kernels for kernels in candidates if kernels is not None), None)
