"""The codec `kvtc`: keys and values as principal components in coarse steps; lossy, 4.7 to 8.7 times smaller.

After "KV Cache Transform Coding" (arXiv 2511.01815). Each token's keys, turned back to position 0, and values are
projected onto components that were learnt on other text, rounded to whole steps, and entropy coded. The first tokens of
a prompt are stored unchanged. docs/formats/kvtc.md specifies the bytes, docs/quality.md what it costs.

The position from which a chunk's keys are turned back is found in the keys themselves (`_Finder`), and is in the
payload: neither storing nor loading a chunk requires its place in its prompt. The bases are nearly orthonormal, so a
wrong position would not make the error larger, only the payload (docs/adr/0010). The inner loops are in `kernels`, and
decode to the same bytes on every processor (docs/adr/0010).
"""

import struct
import threading
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from kv_core.errors import ConfigError
from kv_tiers.chunk_header import SEAL_BYTES, seal, unseal
from kv_tiers.codec import Codec, CodecError
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext
from numpy.typing import NDArray

from kv_codecs.calibrated import Division, division_in
from kv_codecs.calibration import ID_BYTES, ITEMSIZES, PARTS, SINKS, Calibration, read_calibration
from kv_codecs.kernels import TILE, CompiledKernels, Rows, Words, compiled_kernels, transform_of, wide
from kv_codecs.rotation import Numbers, Turner, turns
from kv_codecs.row_codes import row_codes

VERSION: Final = 3
_HEAD: Final = struct.Struct(f"<BBxxIQ{ID_BYTES}s")
HEAD_BYTES: Final = _HEAD.size + SEAL_BYTES
_NO_NUMBERS: Final[Numbers] = np.empty((0, 0), np.float32)
MOST_TOKENS: Final = 1 << 17
"""The most tokens of a chunk."""
_FINDING_LAYERS: Final = 4
_FINDING_TOKENS: Final = 64
"""A chunk's position is found from this many layers and tokens."""


class KvtcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The codec's calibration."""

    calibration: str = ""
    """The file that `kv judge --calibrate` wrote for this model."""


def make_kvtc_codec(options: Mapping[str, object], context: TierContext | None) -> Codec:
    """The factory of the codec `kvtc`. context: None for chunks outside a cache.

    Raises:
        ConfigError: there is no calibration, the cache's fingerprint does not name it, or zstandard is not installed.
    """
    path = read_options(KvtcConfig, options, "codec kvtc").calibration
    if not path:
        raise ConfigError("codec kvtc needs a calibration for the model: write one with `kv judge --calibrate`")
    calibration = read_calibration(path)
    if context is not None and context.fingerprint and calibration.name not in context.fingerprint.split():
        raise ConfigError(
            "codec kvtc is lossy, and for each engine to allow: set it in the engine's settings, not in those of a "
            "kv-server that engines join"
        )
    division = None if context is None else division_in(context.fingerprint)
    return KvtcCodec(calibration) if division is None else DividedKvtc(calibration, division)


class DividedKvtc:
    """The codec for engines whose chunks each have some of a model's layers or heads: a codec per group and shard."""

    name = "kvtc"
    is_lossless = False

    def __init__(self, calibration: Calibration, division: Division) -> None:
        """
        Raises:
            ConfigError: the calibration's model cannot be divided this way.
        """
        division.check(calibration.shape)
        self.calibration = calibration
        # All codecs are made now, while no request is waiting: together they are no larger than the calibration.
        self._codecs: dict[tuple[int, int], KvtcCodec] = {}
        codecs: dict[bytes, KvtcCodec] = {}
        for group, shard in division.shares:
            part = division.part(calibration, group, shard)
            if part.id not in codecs:
                codecs[part.id] = KvtcCodec(part)
            self._codecs[group, shard] = codecs[part.id]

    def of_shard(self, group: int, shard: int) -> Codec | None:
        return self._codecs.get((group, shard))

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        return None  # the chunk's group and shard are not known

    def decode(self, payload: memoryview, out: memoryview) -> None:
        raise CodecError("the rank whose share it is was not given")


class KvtcCodec:
    """The codec for chunks in the canonical order of the calibration's model, of any number of tokens."""

    name = "kvtc"
    is_lossless = False

    def __init__(self, calibration: Calibration, kernels: CompiledKernels | None = None) -> None:
        """kernels: None for those that were compiled.

        Raises:
            ConfigError: none were.
        """
        self.calibration = calibration
        self.kernels = kernels or compiled_kernels(self.name)
        self._shape = calibration.shape
        self._transform = transform_of(calibration)
        self._codes = row_codes()
        self._finder = _Finder(calibration)
        self._turners = [Turner(frequencies) for frequencies in calibration.frequencies]
        self._local = threading.local()

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        with np.errstate(all="ignore"):  # from numbers that have no steps
            return self._encode(chunk, out, 0)

    def encode_first(self, chunk: memoryview, out: memoryview) -> int | None:
        """Like `encode`, for a chunk that may be its prompt's first."""
        with np.errstate(all="ignore"):
            return self._encode(chunk, out, SINKS)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        fields = unseal(payload[:HEAD_BYTES]) if len(payload) >= HEAD_BYTES else None
        if fields is None:
            raise CodecError("it does not begin as a payload of this codec does")
        version, exact, first, chunk_bytes, calibration = _HEAD.unpack(fields)
        tokens, rest = divmod(len(out), self._shape.token_bytes)
        if version != VERSION or chunk_bytes != len(out) or rest or not 0 < tokens <= MOST_TOKENS or exact > tokens:
            raise CodecError(f"version {version}, of a chunk of {chunk_bytes} bytes instead of {len(out)}")
        if calibration != self.calibration.id:
            raise CodecError(
                f"it was encoded with calibration {calibration.hex()}, this is {self.calibration.id.hex()}"
            )
        coded_at = HEAD_BYTES + exact * self._shape.token_bytes
        if len(payload) < coded_at:
            raise CodecError(f"it ends after {len(payload)} bytes, within its first tokens")
        words, coded = self._words(out), np.frombuffer(payload[coded_at:], np.uint8)
        ordered = words if self._shape.order.is_usual else np.empty_like(words)
        with np.errstate(all="ignore"):  # from payloads that no encoder produces
            self.kernels.decode(self._transform, coded, self._codes, self._turns(first, tokens), ordered)
        stored = self._shape.planes(words)
        if ordered is not words:
            self._restore(self._shape.planes(ordered), stored)
        stored[:, :exact] = np.frombuffer(payload[HEAD_BYTES:coded_at], words.dtype).reshape(stored[:, :exact].shape)

    def _encode(self, chunk: memoryview, out: memoryview, exact: int) -> int | None:
        tokens, rest = divmod(len(chunk), self._shape.token_bytes)
        if rest or not 0 < tokens <= MOST_TOKENS:
            return None
        words = self._words(chunk)
        stored = self._shape.planes(words)
        ordered = self._ordered(words)
        exact = min(exact, tokens)
        coded_at = HEAD_BYTES + exact * self._shape.token_bytes
        if coded_at > len(out):
            return None
        first = self._finder.position(self._shape.planes(ordered), exact)
        rows = self._rows(tokens)
        if not self.kernels.project(self._transform, ordered, self._turns(first, tokens), rows, exact):
            return None
        written = np.frombuffer(out, np.uint8)
        coded_bytes = self.kernels.encode_rows(rows, self._shape.block_channels, self._codes, written[coded_at:])
        if coded_bytes is None:
            return None
        written[HEAD_BYTES:coded_at] = stored[:, :exact].reshape(-1).view(np.uint8)
        out[:HEAD_BYTES] = seal(_HEAD.pack(VERSION, exact, first, len(chunk), self.calibration.id))
        return coded_at + coded_bytes

    def _words(self, chunk: memoryview) -> Words:
        return np.frombuffer(chunk, f"<u{ITEMSIZES[self._shape.dtype]}")

    def _ordered(self, words: Words) -> Words:
        """The words with the channels of keys in the order of kernels."""
        order, layers = self._shape.order, self._shape.layers
        if order.is_usual:
            return words
        out = np.empty_like(words)
        stored, ordered = self._shape.planes(words), self._shape.planes(out)
        order.ordered(stored[:layers], ordered[:layers])
        ordered[layers:] = stored[layers:]
        return out

    def _restore(self, ordered: Words, out: Words) -> None:
        """The reverse of `_ordered`. Both in the shape of `Shape.planes`."""
        layers = self._shape.layers
        self._shape.order.restored(ordered[:layers], out[:layers])
        out[layers:] = ordered[layers:]

    def _turns(self, first: int, tokens: int) -> Numbers:
        """[tables, 2, head_dim / 2, tokens, to a whole tile]"""
        tables = np.empty((len(self._turners), 2, self._shape.head_dim // 2, -(-tokens // TILE) * TILE), np.float32)
        for turner, table in zip(self._turners, tables, strict=True):
            turner.fill(first, table)
        return tables

    def _rows(self, tokens: int) -> Rows:
        """This thread's steps, reused because fresh pages cost more than the work done in them."""
        rows: Rows | None = getattr(self._local, "rows", None)
        if rows is None or rows.shape[1] != tokens:
            rows = self._local.rows = np.empty((self._shape.blocks * self._shape.block_channels, tokens), np.int16)
        return rows


class _Finder:
    """Finds the position of a chunk's first token by its keys.

    Keys at position 0 have a mean that is large compared with the differences between tokens. Keys of a chunk, turned
    back by their place in the chunk, have that mean turned by the chunk's own position: of all positions at which a
    chunk can begin, the one whose turn fits best is taken. On real keys of two models it was always the right one.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._shape = calibration, calibration.shape
        shape = calibration.shape
        means = calibration.means.reshape(PARTS * shape.layers, shape.heads, shape.head_dim)[: shape.layers]
        widths = calibration.widths.reshape(PARTS * shape.layers, -1)[: shape.layers, 0]
        clarity = (means**2).sum((1, 2)) / widths**2
        self._layers = np.argsort(-clarity, kind="stable")[:_FINDING_LAYERS]
        self._means = {int(layer): _points(means[layer]) / widths[layer] ** 2 for layer in self._layers}
        self._turns: dict[int, tuple[int, tuple[Numbers, Numbers]]] = {}
        self._phases: tuple[int, Numbers] = 0, np.empty((0, 0), np.float32)

    def position(self, stored: NDArray[Any], exact: int) -> int:
        """stored: [planes, tokens, heads, head_dim]. exact: first tokens that are unlike the others."""
        tokens: int = stored.shape[1]
        if exact == tokens:
            return 0
        stride = max(1, tokens // _FINDING_TOKENS)
        sums = np.zeros(self._calibration.frequencies.shape, np.complex128)
        for layer, mean in self._means.items():
            table = self._shape.tables[layer]
            numbers = wide(stored[layer, exact::stride], self._shape.dtype)
            cos, sin = self._turns_of(table, tokens)
            sums[table] += (np.conj(mean) * _sum_turned_back(numbers, cos[exact::stride], sin[exact::stride])).sum(0)
        real_and_imaginary = np.concatenate((sums.real.reshape(-1), sums.imag.reshape(-1)), dtype=np.float32)
        # Not `@`: the threads of BLAS, one for each processor, would go on for a while looking for more to do.
        scores = np.einsum("pj,j->p", self._phases_of(tokens), real_and_imaginary)
        return int(np.argmax(np.nan_to_num(scores, nan=-np.inf))) * tokens

    def _turns_of(self, table: int, tokens: int) -> tuple[Numbers, Numbers]:
        """Cosines and sines for the places in a chunk, each [tokens, head_dim / 2]."""
        known_tokens, cached = self._turns.get(table, (0, (_NO_NUMBERS, _NO_NUMBERS)))
        if known_tokens != tokens:
            cos, sin = turns(self._calibration.frequencies[table], 0, tokens)
            cached = cos[:, 0], sin[:, 0]
            self._turns[table] = tokens, cached
        return cached

    def _phases_of(self, tokens: int) -> Numbers:
        """[positions, 2 × tables × head_dim / 2]: the cosines, then the sines, of the turns back from all positions at
        which such chunks begin.
        """
        known_tokens, phases = self._phases
        if known_tokens != tokens:
            count = max(1, -(-self._shape.max_tokens // tokens))
            angles = np.arange(count)[:, None] * tokens * self._calibration.frequencies.reshape(1, -1)
            phases = np.concatenate((np.cos(angles), np.sin(angles)), 1, dtype=np.float32)
            self._phases = tokens, phases
        return phases


def _sum_turned_back(numbers: Numbers, cos: Numbers, sin: Numbers) -> NDArray[np.complex64]:
    """[heads, head_dim / 2]: the sum of tokens turned back to position 0, each pair of elements that are turned
    together as a point.

    numbers: [tokens, heads, head_dim], at the positions of `cos` and `sin`, [tokens, head_dim / 2].
    """
    half = numbers.shape[-1] // 2
    low, high = numbers[..., :half], numbers[..., half:]

    def summed(elements: Numbers, factors: Numbers) -> NDArray[Any]:
        product: NDArray[Any] = np.einsum("thj,tj->hj", elements, factors)
        return product

    turned: NDArray[np.complex64] = summed(low, cos) + summed(high, sin) + 1j * (summed(high, cos) - summed(low, sin))
    return turned


def _points(heads: NDArray[Any]) -> NDArray[np.complex128]:
    """[heads, head_dim / 2]: each pair of elements that are turned together, as a point."""
    half = heads.shape[-1] // 2
    return heads[..., :half].astype(np.float64) + 1j * heads[..., half:].astype(np.float64)
