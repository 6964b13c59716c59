"""A library in C that a package was built with, called through ctypes, which releases the interpreter's lock meanwhile.

Every array is passed with its size in bytes, and the functions compare all sizes before they access anything.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kv_core.errors import MisuseError

MISFIT: Final = -1
"""`KV_MISFIT` in the sources."""


class CLibrary:
    """The functions of one library, by their names in the source without `kv_`."""

    def __init__(self, path: str, version: int, arguments: Mapping[str, tuple[int, int]]) -> None:
        """version: `KV_VERSION` in the sources. arguments: how many numbers each function takes, and how many arrays
        behind them.

        Raises:
            OSError: the library cannot be loaded: it does not exist, or is for another processor.
            MisuseError: the library was compiled from another version of the source.
        """
        loaded = ctypes.CDLL(path)
        loaded.kv_version.restype = loaded.kv_source.restype = ctypes.c_int64
        if loaded.kv_version() != version:
            raise MisuseError(f"{path} was compiled from another version of its source: install its package again")
        self.source_checksum: int = loaded.kv_source()
        """zlib.crc32 of the sources that the library was compiled from; 0: not known."""
        self._functions: dict[str, Any] = {}
        for name, (numbers, arrays) in arguments.items():
            function = getattr(loaded, f"kv_{name}")
            function.argtypes = [ctypes.c_int64] * numbers + [ctypes.c_void_p, ctypes.c_size_t] * arrays
            function.restype = ctypes.c_int64
            self._functions[name] = function

    def invoke(self, name: str, arguments: Sequence[int | bytes]) -> int:
        """Call a function; returns its result. arguments: its numbers, and the address and size of each array.

        Raises:
            MisuseError: the arrays' sizes do not fit each other.
        """
        result: int = self._functions[name](*arguments)
        if result == MISFIT:
            raise MisuseError(f"kernel {name}: arrays whose sizes do not match")
        return result
