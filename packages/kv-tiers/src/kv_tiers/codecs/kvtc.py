"""The codec `kvtc`: keys and values as principal components in coarse steps; lossy, five to nine times smaller.

After "KV Cache Transform Coding" (arXiv 2511.01815). Each token's keys, turned back to position 0, and values are
projected onto components that were learnt on other text, rounded to whole steps, and entropy coded. The first tokens of
a prompt are stored as they are. docs/formats/kvtc.md specifies the bytes, docs/quality.md what it costs.

Which position a chunk's keys are turned back from is found in the keys themselves (`_Finder`), and is in the payload:
nobody has to know a chunk's place in its prompt, neither who stores it nor who loads it. The bases are orthonormal, so
a wrong position would not make the error larger, only the payload (docs/adr/0034).
"""

import struct
import threading
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from kv_core.errors import ConfigError
from numpy.typing import NDArray

from kv_tiers.codec import Codec, CodecError
from kv_tiers.codecs.byte_coder import FRAME_SYMBOLS, ByteCoder
from kv_tiers.codecs.calibration import ID_BYTES, ITEMSIZES, PARTS, Calibration, read_calibration
from kv_tiers.codecs.cursor import Cursor
from kv_tiers.codecs.learning import SINKS
from kv_tiers.codecs.rotation import Numbers, turn, turn_back, turns
from kv_tiers.codecs.symbols import decode_group, encode_group, rows_together, straight, zigzag
from kv_tiers.options import read_options
from kv_tiers.sealed import SEAL_BYTES, seal, unseal
from kv_tiers.tier import TierContext

VERSION: Final = 1
_HEAD: Final = struct.Struct(f"<BBxxIQ{ID_BYTES}s")
HEAD_BYTES: Final = _HEAD.size + SEAL_BYTES
_LARGEST: Final = 32767.0
"""In steps: chunks with a number farther from its mean are stored as they are."""
_FINDING_LAYERS: Final = 4
_LARGEST_FLOAT16: Final = 65504.0


class KvtcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What it was calibrated with."""

    calibration: str = ""
    """The file that `kv judge --calibrate` wrote for this model."""


def make_kvtc_codec(options: Mapping[str, object], context: TierContext | None) -> Codec:
    """The factory of the codec `kvtc`. context: None for chunks of no cache.

    Raises:
        ConfigError: there is no calibration, the cache's fingerprint does not say so, or zstandard is not installed.
    """
    path = read_options(KvtcConfig, options, "codec kvtc").calibration
    if not path:
        raise ConfigError("codec kvtc needs a calibration for the model: write one with `kv judge --calibrate`")
    calibration = read_calibration(path)
    if context is not None and context.fingerprint and calibration.name not in context.fingerprint.split():
        raise ConfigError(
            "codec kvtc is lossy and an engine's own to allow: set it in the engine's settings, not in those of a "
            "kv-server that engines join"
        )
    return KvtcCodec(calibration)


class KvtcCodec:
    """For chunks in the canonical order of the calibration's model, of any number of tokens."""

    name = "kvtc"
    is_lossless = False

    def __init__(self, calibration: Calibration) -> None:
        """Raises `ConfigError`."""
        self.calibration = calibration
        self._shape = shape = calibration.shape
        self._coder = ByteCoder(self.name)
        bases = calibration.bases.astype(np.float32)
        widths = calibration.widths[:, None, None]
        self._forward = bases / widths
        self._backward = np.ascontiguousarray((bases * widths).transpose(0, 2, 1))
        self._offsets = np.matmul(calibration.means[:, None], self._forward)
        relative = (calibration.deviations / calibration.widths[:, None]).reshape(-1)
        order = np.argsort(-relative, kind="stable")
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        self._places: NDArray[np.int64] = places.reshape(shape.blocks, -1)
        """For each component of each block, its row."""
        self._finder = _Finder(calibration)
        self._mine = threading.local()

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        with np.errstate(all="ignore"):  # of numbers that have no steps
            return self._encode(chunk, out, 0)

    def encode_first(self, chunk: memoryview, out: memoryview) -> int | None:
        """Like `encode`, of a chunk that may be its prompt's first."""
        with np.errstate(all="ignore"):
            return self._encode(chunk, out, SINKS)

    def decode(self, payload: memoryview, out: memoryview) -> None:
        fields = unseal(payload[:HEAD_BYTES])
        if fields is None:
            raise CodecError("it does not begin as a payload of this codec does")
        version, exact, first, chunk_bytes, calibration = _HEAD.unpack(fields)
        tokens, rest = divmod(len(out), self._shape.token_bytes)
        if version != VERSION or chunk_bytes != len(out) or rest or not 0 < tokens <= FRAME_SYMBOLS or exact > tokens:
            raise CodecError(f"version {version}, of a chunk of {chunk_bytes} bytes instead of {len(out)}")
        if calibration != self.calibration.id:
            raise CodecError(
                f"it was encoded with calibration {calibration.hex()}, this is {self.calibration.id.hex()}"
            )
        cursor = Cursor(payload[HEAD_BYTES:])
        stored = self._stored(out)
        itemsize = ITEMSIZES[self._shape.dtype]
        as_they_are = cursor.take(exact * self._shape.token_bytes)
        rows = self._rows(tokens)
        together = rows_together(tokens)
        for at in range(0, len(rows), together):
            decode_group(self._coder, cursor, rows[at : at + together].reshape(-1))
        if cursor.left:
            raise CodecError("there are bytes behind its numbers")
        tables = [turns(one, first, tokens) for one in self.calibration.frequencies]
        for plane in range(len(stored)):
            numbers = self._projected_back(rows, plane)
            if plane < self._shape.layers:
                numbers = turn(numbers, *tables[self._shape.tables[plane]])
            _narrow(numbers, stored[plane], self._shape.dtype)
        if exact:
            stored[:, :exact] = np.frombuffer(as_they_are, f"<u{itemsize}").reshape(stored[:, :exact].shape)

    def _encode(self, chunk: memoryview, out: memoryview, exact: int) -> int | None:
        tokens, rest = divmod(len(chunk), self._shape.token_bytes)
        if rest or not 0 < tokens <= FRAME_SYMBOLS:
            return None
        stored = self._stored(chunk)
        exact = min(exact, tokens)
        first = self._finder.position(stored, exact)
        tables = [turns(one, first, tokens) for one in self.calibration.frequencies]
        rows = self._rows(tokens)
        for plane in range(len(stored)):
            numbers = _wide(stored[plane], self._shape.dtype)
            if plane < self._shape.layers:
                numbers = turn_back(numbers, *tables[self._shape.tables[plane]])
            if not self._project(numbers, exact, rows, plane):
                return None
        at = HEAD_BYTES
        written = np.frombuffer(out, np.uint8)
        together = rows_together(tokens)
        groups = (
            piece
            for start in range(0, len(rows), together)
            for piece in encode_group(self._coder, rows[start : start + together].reshape(-1))
        )
        for piece in (stored[:, :exact].tobytes(), *groups):
            if at + len(piece) > len(out):
                return None
            written[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        if at > len(out):
            return None
        out[:HEAD_BYTES] = seal(_HEAD.pack(VERSION, exact, first, len(chunk), self.calibration.id))
        return at

    def _stored(self, chunk: memoryview) -> NDArray[Any]:
        """[planes, tokens, heads, head_dim], as unsigned integers. A plane is one layer's keys, or its values."""
        shape = self._shape
        words = np.frombuffer(chunk, f"<u{ITEMSIZES[shape.dtype]}")
        return words.reshape(PARTS * shape.layers, -1, shape.heads, shape.head_dim)

    def _rows(self, tokens: int) -> NDArray[np.uint16]:
        """This thread's symbols, [rows, tokens]."""
        rows: NDArray[np.uint16] | None = getattr(self._mine, "rows", None)
        if rows is None or rows.shape[1] != tokens:
            rows = self._mine.rows = np.empty((self._places.size, tokens), np.uint16)
        return rows

    def _blocks(self, plane: int) -> range:
        of_plane = self._shape.heads // self._shape.block_heads
        return range(plane * of_plane, (plane + 1) * of_plane)

    def _project(self, numbers: Numbers, exact: int, rows: NDArray[np.uint16], plane: int) -> bool:
        """Whether all of them are near enough to their means. numbers: [tokens, heads, head_dim]."""
        flat = numbers.reshape(len(numbers), -1)
        for at, block in enumerate(self._blocks(plane)):
            channels = self._shape.block_channels
            steps = flat[exact:, at * channels : (at + 1) * channels] @ self._forward[block]
            steps -= self._offsets[block]
            np.rint(steps, out=steps)
            if steps.size and not (float(steps.min()) >= -_LARGEST and float(steps.max()) <= _LARGEST):  # NaN is not
                return False
            places = self._places[block]
            rows[places, exact:] = zigzag(steps.astype(np.int32)).T
            rows[places, :exact] = 0
        return True

    def _projected_back(self, rows: NDArray[np.uint16], plane: int) -> Numbers:
        """[tokens, heads, head_dim]"""
        found = []
        for block in self._blocks(plane):
            steps = straight(rows[self._places[block]]).astype(np.float32)
            found.append(steps.T @ self._backward[block] + self.calibration.means[block])
        return np.concatenate(found, 1).reshape(-1, self._shape.heads, self._shape.head_dim)


class _Finder:
    """Finds the position of a chunk's first token by its keys.

    Keys at position 0 have a mean, which is large beside what tokens differ by. Keys of a chunk, turned back by their
    place in the chunk, have that mean turned by the chunk's own position: of all positions at which a chunk can begin,
    the one whose turn fits best is taken. On real keys of two models it was always the right one.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration, self._shape = calibration, calibration.shape
        shape = calibration.shape
        means = calibration.means.reshape(PARTS * shape.layers, shape.heads, shape.head_dim)[: shape.layers]
        widths = calibration.widths.reshape(PARTS * shape.layers, -1)[: shape.layers, 0]
        clear = (means**2).sum((1, 2)) / widths**2
        self._layers = np.argsort(-clear, kind="stable")[:_FINDING_LAYERS]
        self._means = {int(layer): _points(means[layer]) / widths[layer] ** 2 for layer in self._layers}
        self._phases: tuple[int, NDArray[np.complex64]] = (0, np.empty((0, 0, 0), np.complex64))

    def position(self, stored: NDArray[Any], exact: int) -> int:
        """stored: [planes, tokens, heads, head_dim]. exact: first tokens that are unlike the others."""
        tokens: int = stored.shape[1]
        if exact == tokens:
            return 0
        seen = np.zeros(self._calibration.frequencies.shape, np.complex128)
        for layer, mean in self._means.items():
            table = self._shape.tables[layer]
            numbers = _wide(stored[layer], self._shape.dtype)
            numbers = turn_back(numbers, *turns(self._calibration.frequencies[table], 0, tokens))
            seen[table] += (np.conj(mean) * _points(numbers[exact:].mean(0))).sum(0)
        scores = (self._phases_of(tokens) @ seen.reshape(-1)).real
        return int(np.argmax(np.nan_to_num(scores, nan=-np.inf))) * tokens

    def _phases_of(self, tokens: int) -> NDArray[np.complex64]:
        """[positions, tables × head_dim / 2]: the turns back from all positions at which such chunks begin."""
        known, phases = self._phases
        if known != tokens:
            count = max(1, -(-self._shape.max_tokens // tokens))
            angles = np.arange(count)[:, None] * tokens * self._calibration.frequencies.reshape(1, -1)
            phases = np.exp(-1j * angles).astype(np.complex64)
            self._phases = tokens, phases
        return phases


def _points(heads: NDArray[Any]) -> NDArray[np.complex128]:
    """[heads, head_dim / 2]: each pair of elements that are turned together, as a point."""
    half = heads.shape[-1] // 2
    return heads[..., :half].astype(np.float64) + 1j * heads[..., half:].astype(np.float64)


def _wide(stored: NDArray[Any], dtype: str) -> Numbers:
    """The numbers of these words."""
    if dtype == "bfloat16":
        return (stored.astype("<u4") << 16).view(np.float32)
    return stored.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _narrow(numbers: Numbers, stored: NDArray[Any], dtype: str) -> None:
    """The reverse, rounded to the nearest."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        stored[:] = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    elif dtype == "float16":
        # Half a step more would be infinite.
        stored.view("<f2")[:] = np.clip(numbers, -_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    else:
        stored.view("<f4")[:] = numbers
