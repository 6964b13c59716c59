"""The inner loops of the codecs `floats`, `progressive` and `kvtc`, which are in C (`compiled_kernels`).

Their definition in numpy, with the same bytes, is the tests'; only that of `floats`, which is fast enough, serves where
nothing was compiled. docs/adr/0010 says why.
"""

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
from kv_core.errors import ConfigError
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kv_codecs.row_codes import RowCodes
    from kv_codecs.transform import Transform

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


class FloatKernels(Protocol):
    """What the codec `floats` needs. Like `CodecKernels`."""

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


class CodecKernels(FloatKernels, Protocol):
    """Safe to call from several threads at once. All arrays are contiguous, of one axis, and of sizes that fit each
    other: anything else is a bug of the caller, and an error. n: how many numbers there are, at most
    `SECTION_NUMBERS`."""

    def cut(self, words: Words, offset: int, into: Cut) -> tuple[int, int, int]:
        """Cut numbers at a step. Returns how many have long codes, how many are `ESCAPED`, and how many are
        `ALL_MISSING`.

        offset: how far the step lies above the mean exponent of its numbers, in 256ths of a bit.
        """

    def restore(self, parts: int, known: Known, words: Words) -> Used:
        """Restore numbers, of which there may be more than `SECTION_NUMBERS`.

        parts: how many are known, 1 to 3; each number is assumed to be in the middle of its step or of its nibble.

        Raises:
            CodecError: as `check_exponents`, or there are fewer long codes or stored numbers than it takes.
        """

    def pack(self, words: Words, missing: Bytes, room: Bytes) -> Bytes:
        """The missing bits of all numbers but those that are `ALL_MISSING` or `ESCAPED`, one after the other from bit 0
        up.

        room: memory of `packed_room(n)` bytes for the result.
        """

    def select(self, words: Words, marks: Bytes, mark: int, count: int) -> Words:
        """The words whose mark is this one. count: how many there are."""

    def project(self, transform: "Transform", words: Words, turns: NDArray[np.float32], rows: Rows, exact: int) -> bool:
        """Turn keys back, subtract means and divide into components' steps, as specified in docs/formats/kvtc.md.
        Returns whether all numbers are close enough to their means.

        words: [planes × tokens × channels]. turns: cosines and sines of the chunk's positions, [tables, 2, head_dim /
        2, tokens, to a whole tile of 64]. exact: number of first tokens whose steps are 0.
        """

    def encode_rows(self, rows: Rows, channels: int, codes: "RowCodes", out: Bytes) -> int | None:
        """Encode rows, as specified in docs/formats/kvtc.md. Returns how many bytes they take; None: there is no room
        for them.

        channels: the rows of a block.
        """

    def decode(
        self, transform: "Transform", payload: Bytes, codes: "RowCodes", turns: NDArray[np.float32], words: Words
    ) -> None:
        """The reverse of `project` and `encode_rows`.

        Raises:
            CodecError: these are not the bytes of a chunk of this size.
        """


def compiled_kernels(codec: str) -> CodecKernels:
    """The kernels that were built with this package.

    Raises:
        ConfigError: there are none for this machine.
    """
    from kv_codecs.compiled_kernels import installed_kernels

    if (compiled := installed_kernels()) is None:
        raise ConfigError(
            f"codec {codec} needs kernels in C, and none were compiled for this machine: install a C compiler and then "
            "kv-codecs again, or use codec floats or zstd"
        )
    return compiled


def float_kernels() -> FloatKernels:
    """The fastest ones for codec `floats`."""
    from kv_codecs.compiled_kernels import installed_kernels
    from kv_codecs.floats_numpy import NumpyFloats

    return installed_kernels() or NumpyFloats()
