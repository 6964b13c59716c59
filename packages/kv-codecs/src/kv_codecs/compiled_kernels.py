"""The kernels in C, from a library that this package's build compiles if there is a compiler.

The sources are the C files in this folder.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from kv_core.c_library import CLibrary
from kv_core.errors import MisuseError
from kv_core.log import limited_logger
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

from kv_codecs.kernels import TOO_FEW, Bytes, Cut, Known, Rows, Used, Words, check_exponents
from kv_codecs.row_codes import DAMAGED, RowCodes, unit_numbers
from kv_codecs.transform import TILE, Transform

_log = limited_logger(__name__)

LIBRARY: Final = Path(__file__).with_name("_kernels.so")
SOURCES: Final = sorted(LIBRARY.parent.glob("*.[ch]"))
"""The sources, in the order in which `hatch_build.py` compiles them and takes their checksum."""
_VERSION: Final = 12
"""The version of the functions' arguments; `KV_VERSION` in the sources."""
_DAMAGED, _FULL = -2, -3
"""`KV_DAMAGED` and `KV_FULL` in the sources."""
_addressof = ctypes.addressof
_at: Final[Callable[[Any], ctypes.Array[ctypes.c_char]]] = (ctypes.c_char * 0).from_buffer
_ARGUMENTS: Final = {
    "split": (1, 3),
    "join": (1, 3),
    "cut": (1, 8),
    "restore": (1, 10),
    "pack": (0, 3),
    "select": (1, 3),
    "histogram": (0, 2),
    "encode_rows": (0, 9),
    "project": (0, 9),
    "decode": (0, 14),
}
"""How many numbers each function takes, and how many arrays behind them."""


class CompiledKernels(CLibrary):
    """`CodecKernels` in C."""

    name = "compiled"
    _local = threading.local()

    def __init__(self, library: Path) -> None:
        """Raises `OSError` and `MisuseError`, as `CLibrary`."""
        super().__init__(str(library), _VERSION, _ARGUMENTS)

    def split(self, kind: int, words: Words, coded: Bytes, rest: Bytes) -> None:
        self.call("split", kind, words, coded, rest)

    def join(self, kind: int, coded: Bytes, rest: Bytes, words: Words) -> None:
        self.call("join", kind, coded, rest, words)

    def cut(self, words: Words, offset: int, into: Cut) -> tuple[int, int, int]:
        counts = np.empty(3, np.int64)
        self.call("cut", offset, words, *into, counts)
        return int(counts[0]), int(counts[1]), int(counts[2])

    def restore(self, parts: int, known: Known, words: Words) -> Used:
        counts = np.empty(4, np.int64)
        if self.call("restore", parts, *known, words, counts) == _DAMAGED:
            check_exponents(known.exponents)
            raise CodecError(TOO_FEW)
        return Used(*counts.tolist())

    def pack(self, words: Words, missing: Bytes, room: Bytes) -> Bytes:
        return room[: self.call("pack", words, missing, room)]

    def select(self, words: Words, marks: Bytes, mark: int, count: int) -> Words:
        selected = np.empty(count, "<u2")
        self.call("select", mark, words, marks, selected)
        return selected

    def histogram(self, symbols: Bytes) -> NDArray[np.int64]:
        counts = np.empty(256, np.int64)
        self.call("histogram", symbols, counts)
        return counts

    def project(self, transform: Transform, words: Words, turns: NDArray[np.float32], rows: Rows, exact: int) -> bool:
        arrays = (transform.tables, transform.means, transform.steps, transform.forward)
        shape = transform.shape
        scratch = self._scratch(8 * TILE * shape.heads * shape.head_dim)
        description = transform.described(rows.shape[1], exact)
        return self.call("project", description, words, turns, *arrays, rows, scratch) == 0

    def encode_rows(self, rows: Rows, channels: int, codes: RowCodes, out: Bytes) -> int | None:
        tokens = rows.shape[1]
        scratch = self._scratch(2 * unit_numbers(tokens))
        tables = (codes.low_bits, codes.shares, codes.starts, codes.symbols, codes.limits)
        size = self.call("encode_rows", np.array([tokens, channels], np.int64), rows, *tables, scratch, out)
        return None if size == _FULL else size

    def decode(
        self, transform: Transform, payload: Bytes, codes: RowCodes, turns: NDArray[np.float32], words: Words
    ) -> None:
        tokens = words.nbytes // transform.shape.token_bytes
        arrays = (transform.tables, transform.means, transform.scales, transform.backward, transform.small)
        tables = (codes.low_bits, codes.shares, codes.starts, codes.symbols)
        description = transform.described(tokens, 0)
        scratch = self._scratch(transform.scratch_bytes(tokens))
        if self.call("decode", description, payload, turns, *arrays, *tables, words, scratch):
            raise CodecError(DAMAGED)

    def _scratch(self, nbytes: int) -> Bytes:
        """This thread's memory, reused because fresh pages cost more than the work done in some of them."""
        scratch: Bytes | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.nbytes < nbytes:
            scratch = self._local.scratch = np.empty(nbytes, np.uint8)
        return scratch[:nbytes]

    def call(self, name: str, *arguments: int | NDArray[Any] | tuple[int, int]) -> int:
        """Call a function by its name in the source, without `kv_`; returns its result.

        arguments: a number, if the function takes one, and its arrays, or the address and size in bytes of each.

        Raises:
            MisuseError: the arrays' sizes do not fit each other.
        """
        flat: list[int | bytes] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                # numpy's own way takes 1 µs, and a section has many arrays: that would be a tenth of its time.
                if argument.flags.writeable:
                    flat += _addressof(_at(argument)), argument.nbytes  # refuses what is not contiguous
                elif isinstance(base := cast(object, argument.base), bytes) and len(base) == argument.nbytes:
                    flat += base, argument.nbytes
                else:
                    assert argument.flags.c_contiguous
                    flat += argument.ctypes.data, argument.nbytes
            elif isinstance(argument, int):
                flat.append(argument)
            else:
                flat += argument
        return self.invoke(name, flat)


@cache
def installed_kernels() -> CompiledKernels | None:
    """The kernels that were built with this package. None: there are none for this machine."""
    if not LIBRARY.exists():
        return None
    try:
        return CompiledKernels(LIBRARY)
    except (OSError, MisuseError) as error:
        _log.warning("there are no compiled kernels: %s", error)
        return None
