"""The inner loops of the codecs `floats`, `progressive` and `kvtc`, in C.

The sources are in this folder, and this package's build compiles them if there is a compiler. Their definition in
numpy, with the same bytes, is the tests'; only that of `floats`, which is fast enough, serves where nothing was
compiled. docs/adr/0010 says why.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np
from kv_core.c_library import CLibrary
from kv_core.errors import ConfigError, MisuseError
from kv_core.log import limited_logger
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

from kv_codecs.calibration import Calibration, Shape
from kv_codecs.rotation import Numbers
from kv_codecs.row_codes import DAMAGED, RowCodes, unit_numbers

_log = limited_logger(__name__)

Words = NDArray[Any]
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int16]
"""[rows, tokens]: components in whole steps."""

BFLOAT16: Final = 1
FLOAT16: Final = 2
FLOAT32: Final = 3

SECTION_NUMBERS: Final = 1 << 17
SCALED_NUMBERS: Final = 256
"""Numbers of a chunk of the codec `progressive` that share a step; a section is a whole number of these."""
LEAST_EXPONENT: Final = 8
"""The least exponent of a step, so that numbers of exponent 0, which have no leading one, lie far below every step."""
MOST_EXPONENT: Final = 240
"""The largest exponent of a step, so that no approximation is infinite."""
LONG_CODE: Final = 15
"""The least code of steps that does not fit into four bits."""
ESCAPED_CODE: Final = 127
"""The code of a number of 1984 steps or more, which the first part holds unchanged."""
ALL_MISSING: Final = 8
"""Missing bits of a number whose leading one is in neither the first part nor the second: it is stored unchanged."""
ESCAPED: Final = 16
"""Missing bits of a number whose code is `ESCAPED_CODE`."""

TOO_FEW: Final = "there are fewer numbers than its codes say"


def packed_room(numbers: int) -> int:
    """Bytes that the missing bits of this many numbers may take while they are packed."""
    return numbers // 8 * 7 + 8


def check_exponents(exponents: Bytes) -> None:
    """
    Raises:
        CodecError: one of them is not from `LEAST_EXPONENT` to `MOST_EXPONENT`.
    """
    wrong = exponents[(exponents < LEAST_EXPONENT) | (exponents > MOST_EXPONENT)]
    if wrong.size:
        raise CodecError(f"steps of exponents out of range, such as {wrong[0]}")


class Cut(NamedTuple):
    """What n bfloat16 numbers are cut into, as docs/formats/progressive.md specifies it.

    exponents: of the steps, [n / `SCALED_NUMBERS`]. signs: a bit each, [n / 8].
    codes: of the steps, four bits each, [n / 2]; `LONG_CODE` for longer ones. Those of the first half are in the lower
        bits.
    long_codes: the longer ones, one after the other, [n], of which the first ones are used.
    nibbles: [n / 2], as codes.
    missing: how many bits of each number are in neither codes nor nibbles, `ALL_MISSING` or `ESCAPED`, [n].
    """

    exponents: Bytes
    signs: Bytes
    codes: Bytes
    long_codes: Bytes
    nibbles: Bytes
    missing: Bytes

    @staticmethod
    def empty(n: int) -> "Cut":
        """New arrays for this many numbers."""
        sizes = (n // SCALED_NUMBERS, n // 8, n // 2, n, n // 2, n)
        return Cut(*(np.empty(size, np.uint8) for size in sizes))


class Known(NamedTuple):
    """What n numbers of several sections are restored from; what only further parts have is empty.

    exponents, signs, codes, nibbles: as in `Cut`, section after section.
    long_codes: those of these numbers, and perhaps more behind them. So are the following:
    escaped, whole: the numbers that are stored unchanged, in the first part and in the third.
    packed: the missing bits of each section; if there are fewer, the others are 0.
    """

    exponents: Bytes
    signs: Bytes
    codes: Bytes
    long_codes: Bytes
    escaped: Words
    nibbles: Bytes
    whole: Words
    packed: Bytes


class Used(NamedTuple):
    """How much of `Known` restored numbers used, where it may have more than they need. packed: in bytes."""

    long_codes: int
    escaped: int
    whole: int
    packed: int


DTYPES: Final = ("", "bfloat16", "float16", "float32")
"""The dtypes, by their number in the kernels' description of a shape."""
TILE: Final = 64
"""Tokens that are processed at a time, and share the precision that their numbers are rounded to."""
_ROW_LANES, _FAR_BYTES = 16, 12
"""Tokens of a vector, and the size of a number that is not a byte, in the kernels in C."""


@dataclass(frozen=True)
class Transform:
    """A calibration's arrays, as the kernels take them.

    steps: the number of steps in a unit, [blocks].
    scales: factors for the results of `backward`, [planes, channels].
    forward: [blocks, components, channels], int16.
    backward: [blocks, channels, components], int16.
    small: the same as bytes, four components of every channel side by side, [blocks, components / 4, channels, 4]; the
        last components are padded with zeros.
    """

    shape: Shape
    tables: NDArray[np.int32]
    means: Numbers
    steps: Numbers
    scales: Numbers
    forward: NDArray[np.int16]
    backward: NDArray[np.int16]
    small: NDArray[np.int8]

    def described(self, tokens: int, exact: int) -> NDArray[np.int64]:
        """The sizes that the kernels in C take. exact: how many of the first tokens have no steps."""
        shape = self.shape
        sizes = (shape.layers, tokens, shape.heads, shape.head_dim, shape.block_channels, exact, 1 + max(shape.tables))
        return np.array([DTYPES.index(shape.dtype), *sizes], np.int64)

    def scratch_bytes(self, tokens: int) -> int:
        """What the kernels in C need to decode a chunk, as `scratch_of` divides it there."""
        shape = self.shape
        block, channels = shape.block_channels, shape.heads * shape.head_dim
        part = channels if block % shape.head_dim else block
        padded = -(-tokens // _ROW_LANES) * _ROW_LANES
        decoded = part // block * -(-block // 4) * 4 * padded
        turns = 4 * (1 + max(shape.tables)) * shape.head_dim * padded
        tiles = -(-tokens // TILE)
        return decoded + 4 * TILE + turns + 8 * TILE * part + 4 * tiles + _FAR_BYTES * decoded


def transform_of(calibration: Calibration) -> Transform:
    shape = calibration.shape
    channels, fours = shape.block_channels, -(-shape.block_channels // 4)
    padded = np.zeros((shape.blocks, channels, 4 * fours), np.int8)
    padded[:, :, :channels] = calibration.backward
    planes = (2 * shape.layers, -1)
    return Transform(
        shape,
        np.array(shape.tables, np.int32),
        np.ascontiguousarray(calibration.means, np.float32).reshape(planes),
        (np.float32(1) / calibration.widths).astype(np.float32),
        np.ascontiguousarray(calibration.scales, np.float32).reshape(planes),
        np.ascontiguousarray(calibration.forward, np.int16),
        calibration.backward.astype(np.int16),
        np.ascontiguousarray(padded.reshape(shape.blocks, channels, fours, 4).transpose(0, 2, 1, 3)),
    )


def wide(stored: NDArray[Any], dtype: str) -> Numbers:
    """The numbers of these words."""
    if dtype == "bfloat16":
        return (stored.astype("<u4") << 16).view(np.float32)
    return stored.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


class FloatKernels(Protocol):
    """What the codec `floats` needs. Like `CompiledKernels`."""

    name: str
    """`numpy` or `compiled`."""

    def split(self, kind: int, words: Words, coded: Bytes, rest: Bytes) -> None:
        """Split numbers, as specified in docs/formats/floats.md.

        kind: their type, `BFLOAT16`, `FLOAT16` or `FLOAT32`; words: n, as unsigned integers; coded: n; rest: plane
        after plane, n × (size of a number − 1).
        """

    def join(self, kind: int, coded: Bytes, rest: Bytes, words: Words) -> None:
        """The reverse of `split`."""

    def histogram(self, symbols: Bytes) -> NDArray[np.int64]:
        """How often each of the 256 symbols occurs."""


_CACHED: Final = 1 << 15
"""How many numbers are processed at a time, so that numpy's passes over them stay in the processor's cache."""


class NumpyFloats:
    """`FloatKernels` where nothing was compiled: three quarters as fast as in C."""

    name = "numpy"

    def split(self, kind: int, words: Words, coded: Bytes, rest: Bytes) -> None:
        planes = _planes(kind, rest, words.size)
        for piece in pieces_of(words.size):
            _SPLITS[kind](words[piece], coded[piece], [plane[piece] for plane in planes])

    def join(self, kind: int, coded: Bytes, rest: Bytes, words: Words) -> None:
        planes = _planes(kind, rest, words.size)
        for piece in pieces_of(words.size):
            _JOINS[kind](coded[piece], [plane[piece] for plane in planes], words[piece])

    def histogram(self, symbols: Bytes) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.bincount(symbols, minlength=256)
        return counts


def pieces_of(numbers: int) -> list[slice]:
    """Parts of so many numbers that stay in the cache."""
    return [slice(first, min(first + _CACHED, numbers)) for first in range(0, numbers, _CACHED)]


def _planes(kind: int, rest: Bytes, numbers: int) -> list[Words]:
    """Views of the planes that are stored unchanged."""
    if kind in (BFLOAT16, FLOAT16):
        return [rest]
    return [rest[: 2 * numbers].view("<u2"), rest[2 * numbers :]]


def _split_bfloat16(words: Words, coded: Bytes, rest: list[Words]) -> None:
    wide = np.right_shift(words, 7)
    coded[...] = wide
    np.bitwise_and(wide, 0x100, out=wide)
    np.right_shift(wide, 1, out=wide)
    np.bitwise_or(wide, np.bitwise_and(words, 0x7F), out=wide)
    rest[0][...] = wide


def _join_bfloat16(coded: Bytes, rest: list[Words], words: Words) -> None:
    signed = words.view(np.int16)
    signed[...] = rest[0].view(np.int8)  # widened with its sign, which is the number's
    np.bitwise_and(signed, np.int16(-0x7F81), out=signed)
    exponents = coded.astype(np.int16)
    np.left_shift(exponents, 7, out=exponents)
    np.bitwise_or(signed, exponents, out=signed)


def _split_float16(words: Words, coded: Bytes, rest: list[Words]) -> None:
    coded[...] = np.right_shift(words, 8)
    rest[0][...] = words.view(np.uint8)[::2]


def _join_float16(coded: Bytes, rest: list[Words], words: Words) -> None:
    words[...] = coded
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, rest[0], out=words)


def _split_float32(words: Words, coded: Bytes, rest: list[Words]) -> None:
    turned = np.bitwise_or(np.left_shift(words, 1), np.right_shift(words, 31))
    halves = turned.view(np.uint16)
    rest[0][...] = halves[::2]
    rest[1][...] = halves[1::2]  # its low byte
    coded[...] = np.right_shift(halves[1::2], 8)


def _join_float32(coded: Bytes, rest: list[Words], words: Words) -> None:
    words[...] = coded
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, rest[1], out=words)
    np.left_shift(words, 16, out=words)
    np.bitwise_or(words, rest[0], out=words)
    low = np.left_shift(words, 31)
    np.right_shift(words, 1, out=words)
    np.bitwise_or(words, low, out=words)


_SPLITS: Final = {BFLOAT16: _split_bfloat16, FLOAT16: _split_float16, FLOAT32: _split_float32}
_JOINS: Final = {BFLOAT16: _join_bfloat16, FLOAT16: _join_float16, FLOAT32: _join_float32}


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
    """Safe to call from several threads at once. All arrays are contiguous, of one axis, and of sizes that fit each
    other: anything else is a bug of the caller, and an error. n: how many numbers there are, at most
    `SECTION_NUMBERS`.
    """

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
        """Cut numbers at a step. Returns how many have long codes, how many are `ESCAPED`, and how many are
        `ALL_MISSING`.

        offset: how far the step lies above the mean exponent of its numbers, in 256ths of a bit.
        """
        counts = np.empty(3, np.int64)
        self.call("cut", offset, words, *into, counts)
        return int(counts[0]), int(counts[1]), int(counts[2])

    def restore(self, parts: int, known: Known, words: Words) -> Used:
        """Restore numbers, of which there may be more than `SECTION_NUMBERS`.

        parts: how many are known, 1 to 3; each number is assumed to be in the middle of its step or of its nibble.

        Raises:
            CodecError: as `check_exponents`, or there are fewer long codes or stored numbers than it takes.
        """
        counts = np.empty(4, np.int64)
        if self.call("restore", parts, *known, words, counts) == _DAMAGED:
            check_exponents(known.exponents)
            raise CodecError(TOO_FEW)
        return Used(*counts.tolist())

    def pack(self, words: Words, missing: Bytes, room: Bytes) -> Bytes:
        """The missing bits of all numbers but those that are `ALL_MISSING` or `ESCAPED`, one after the other from bit 0
        up.

        room: memory of `packed_room(n)` bytes for the result.
        """
        return room[: self.call("pack", words, missing, room)]

    def select(self, words: Words, marks: Bytes, mark: int, count: int) -> Words:
        """The words whose mark is this one. count: how many there are."""
        selected = np.empty(count, "<u2")
        self.call("select", mark, words, marks, selected)
        return selected

    def histogram(self, symbols: Bytes) -> NDArray[np.int64]:
        counts = np.empty(256, np.int64)
        self.call("histogram", symbols, counts)
        return counts

    def project(self, transform: Transform, words: Words, turns: NDArray[np.float32], rows: Rows, exact: int) -> bool:
        """Turn keys back, subtract means and divide into components' steps, as specified in docs/formats/kvtc.md.
        Returns whether all numbers are close enough to their means.

        words: [planes × tokens × channels]. turns: cosines and sines of the chunk's positions, [tables, 2, head_dim /
        2, tokens, to a whole tile of 64]. exact: number of first tokens whose steps are 0.
        """
        arrays = (transform.tables, transform.means, transform.steps, transform.forward)
        shape = transform.shape
        scratch = self._scratch(8 * TILE * shape.heads * shape.head_dim)
        description = transform.described(rows.shape[1], exact)
        return self.call("project", description, words, turns, *arrays, rows, scratch) == 0

    def encode_rows(self, rows: Rows, channels: int, codes: RowCodes, out: Bytes) -> int | None:
        """Encode rows, as specified in docs/formats/kvtc.md. Returns how many bytes they take; None: there is no room
        for them.

        channels: the rows of a block.
        """
        tokens = rows.shape[1]
        scratch = self._scratch(2 * unit_numbers(tokens))
        tables = (codes.low_bits, codes.shares, codes.starts, codes.symbols, codes.limits)
        size = self.call("encode_rows", np.array([tokens, channels], np.int64), rows, *tables, scratch, out)
        return None if size == _FULL else size

    def decode(
        self, transform: Transform, payload: Bytes, codes: RowCodes, turns: NDArray[np.float32], words: Words
    ) -> None:
        """The reverse of `project` and `encode_rows`.

        Raises:
            CodecError: these are not the bytes of a chunk of this size.
        """
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


def compiled_kernels(codec: str) -> CompiledKernels:
    """The kernels that were built with this package.

    Raises:
        ConfigError: there are none for this machine.
    """
    if (compiled := installed_kernels()) is None:
        raise ConfigError(
            f"codec {codec} needs kernels in C, and none were compiled for this machine: install a C compiler and then "
            "kv-codecs again, or use codec floats or zstd"
        )
    return compiled
