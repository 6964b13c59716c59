"""The codec `floats`, lossless: codes the exponents of floating-point numbers in two or three bits each.

Keys and values have few distinct exponents, while their signs and mantissas are practically random. So the exponents
are entropy coded (by zstandard's Huffman coder, with its search for repetitions practically off) and the rest is stored
unchanged: bfloat16 shrinks by a third, float32 by a sixth. The type of the numbers is determined for each chunk from a
sample: it need not be configured, and a wrong guess costs space, never correctness. docs/formats/floats.md specifies
the bytes.

Needs the package `zstandard` (the extra `kv-codecs[zstd]`).
"""

import struct
from collections.abc import Mapping
from typing import Final

import numpy as np
from kv_tiers.codec import Codec, CodecError
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext

from kv_codecs.kernels import BFLOAT16, FLOAT16, FLOAT32, FloatKernels, NumpyFloats, installed_kernels
from kv_codecs.zstd import FRAME_SYMBOLS, ByteCoder, NoOptions

_HEAD: Final = struct.Struct("<B3x")
_FRAME_BYTES: Final = struct.Struct("<I")
_BLOCK_NUMBERS: Final = FRAME_SYMBOLS
"""Part of the encoding: every block but the last has this many numbers, and each has a frame of its own."""
_SAMPLE: Final = (16, 256)
"""From how many places the sample is taken, and how many consecutive numbers from each."""
_WORTH_BITS: Final = 0.25
"""By how much a number must get smaller, in bits, for encoding its chunk to be tried at all."""
_WORDS: Final = {BFLOAT16: "<u2", FLOAT16: "<u2", FLOAT32: "<u4"}
"""The types that numbers may have, by their code in a payload: a number as an unsigned integer."""


def make_floats_codec(options: Mapping[str, object], context: TierContext) -> Codec:
    """The factory of the codec `floats`, which has no options.

    Raises:
        ConfigError: there are options, or the package zstandard is not installed.
    """
    read_options(NoOptions, options, "codec floats")
    return FloatsCodec()


class FloatsCodec:
    """One frame for the exponents of each block of numbers, and the rest of them behind it."""

    name = "floats"
    is_lossless = True

    def __init__(self, kernels: FloatKernels | None = None) -> None:
        """kernels: None for the fastest available; all produce the same bytes. Raises `ConfigError`."""
        self._coder = ByteCoder(self.name)
        self.kernels = kernels or installed_kernels() or NumpyFloats()

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        kind = self._likeliest(chunk)
        if kind is None or len(out) < _HEAD.size:
            return None
        words = np.frombuffer(chunk, _WORDS[kind], len(chunk) // _itemsize(kind))
        tail = chunk[words.nbytes :]
        _HEAD.pack_into(out, 0, kind)
        offset, written = _HEAD.size, np.frombuffer(out, np.uint8)
        for first in range(0, words.size, _BLOCK_NUMBERS):
            block = words[first : first + _BLOCK_NUMBERS]
            coded = np.empty(block.size, np.uint8)
            rest = np.empty(_rest_bytes(kind, block.size), np.uint8)
            self.kernels.split(kind, block, coded, rest)
            frame = self._coder.encode(coded)
            end = offset + _FRAME_BYTES.size + len(frame) + rest.size
            if end + len(tail) > len(out):
                return None
            _FRAME_BYTES.pack_into(out, offset, len(frame))
            offset += _FRAME_BYTES.size
            out[offset : offset + len(frame)] = frame
            written[end - rest.size : end] = rest  # without the interpreter's lock
            offset = end
        out[offset : offset + len(tail)] = tail
        return offset + len(tail)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if len(payload) < _HEAD.size or (kind := payload[0]) not in _WORDS or any(payload[1 : _HEAD.size]):
            raise CodecError("it does not begin as a payload of this codec does")
        words = np.frombuffer(out, _WORDS[kind], len(out) // _itemsize(kind))
        offset = _HEAD.size
        for first in range(0, words.size, _BLOCK_NUMBERS):
            block = words[first : first + _BLOCK_NUMBERS]
            if len(payload) - offset < _FRAME_BYTES.size:
                raise CodecError(f"it ends after {offset} bytes, where a frame begins")
            (frame_bytes,) = _FRAME_BYTES.unpack_from(payload, offset)
            offset += _FRAME_BYTES.size
            rest_offset = offset + frame_bytes
            end = rest_offset + _rest_bytes(kind, block.size)
            if end > len(payload):
                raise CodecError(f"it ends after {len(payload)} bytes, within a block that ends at {end}")
            coded = self._coder.decode(payload[offset:rest_offset], block.size)
            self.kernels.join(kind, coded, np.frombuffer(payload, np.uint8, end - rest_offset, rest_offset), block)
            offset = end
        tail = out[words.nbytes :]
        if len(payload) - offset != len(tail):
            raise CodecError(f"{len(payload) - offset} bytes after the numbers instead of {len(tail)}")
        tail[:] = payload[offset:]

    def _likeliest(self, chunk: memoryview) -> int | None:
        """The type of the chunk's numbers: the one with the smallest result, judged by a sample. None: no type makes
        the chunk smaller.
        """
        best, best_saving = None, _WORTH_BITS / 32
        for kind, word in _WORDS.items():
            itemsize = _itemsize(kind)
            words = np.frombuffer(chunk, word, len(chunk) // itemsize)
            if not words.size:
                continue
            places, run = _SAMPLE
            starts = range(0, max(1, words.size - run), max(1, words.size // places))
            sample = np.concatenate([words[start : start + run] for start in starts])
            coded, rest = np.empty(sample.size, np.uint8), np.empty(_rest_bytes(kind, sample.size), np.uint8)
            self.kernels.split(kind, sample, coded, rest)
            counts = self.kernels.histogram(coded)
            share = counts[counts > 0] / sample.size
            saved = (8 + float((share * np.log2(share)).sum())) / (8 * itemsize)
            if saved > best_saving:
                best, best_saving = kind, saved
        return best


def _itemsize(kind: int) -> int:
    """The size of a number in bytes."""
    return np.dtype(_WORDS[kind]).itemsize


def _rest_bytes(kind: int, numbers: int) -> int:
    """Bytes of this many numbers that are stored unchanged."""
    return (_itemsize(kind) - 1) * numbers
