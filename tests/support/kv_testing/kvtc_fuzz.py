"""Payloads of `kvtc` as an attacker who may write to a tier makes them, and what becomes of them.

A calibration is drawn, not learnt: what is compared is kernels, so its matrices need not be each other's inverse.
`python -m kv_testing.kvtc_fuzz LIBRARY SEED ROUNDS` does it with kernels of a library of one's own, such as one
that was compiled with sanitizers.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from kv_codecs.calibration import Calibration, Shape
from kv_codecs.kernels import TILE, CompiledKernels, transform_of
from kv_codecs.kvtc import HEAD_BYTES, KvtcCodec
from kv_codecs.row_codes import MOST_LOW_BITS, SYMBOLS, row_codes, unit_numbers
from kv_core.errors import MisuseError
from kv_tiers.codec import CodecError
from numpy.typing import NDArray

from kv_testing.codec_fuzz import SPECIAL, spoilt
from kv_testing.numpy_rows import decode_rows

_SHAPES = ((1, 1, 2), (2, 3, 4), (1, 2, 10), (2, 1, 32), (1, 3, 64), (1, 1, 256), (1, 2, 192), (1, 1, 320), (1, 4, 64))
"""Layers, heads and their size: blocks of 2 to 256 channels, not all of them of whole heads."""


def drawn_calibration(chance: np.random.Generator, shape: Shape) -> Calibration:
    blocks, channels = shape.blocks, shape.block_channels
    largest = int((1 << 14) / np.sqrt(channels))
    return Calibration(
        shape,
        chance.uniform(0, 1, (1 + max(shape.tables), shape.head_dim // 2)),
        chance.normal(0, 1, (blocks, channels)).astype(np.float32),
        chance.integers(-largest, largest, (blocks, channels, channels), dtype=np.int16, endpoint=True),
        chance.integers(-128, 127, (blocks, channels, channels), dtype=np.int8, endpoint=True),
        chance.uniform(1e-4, 1e-2, (blocks, channels)).astype(np.float32),
        chance.uniform(0.05, 1, blocks).astype(np.float32),
    )


def drawn_shape(chance: np.random.Generator) -> Shape:
    layers, heads, head_dim = _SHAPES[int(chance.integers(0, len(_SHAPES)))]
    dtype = ("bfloat16", "float16", "float32")[int(chance.integers(0, 3))]
    return Shape("drawn", dtype, layers, heads, head_dim, 4096, 0.4, tuple(range(layers)))


def drawn_chunk(chance: np.random.Generator, shape: Shape, tokens: int) -> bytes:
    """Numbers near their means, sometimes with some that are far away or none."""
    count = shape.token_bytes // (4 if shape.dtype == "float32" else 2) * tokens
    numbers = chance.normal(0, 1, count).astype(np.float32)
    numbers[chance.integers(0, count, int(chance.integers(0, 3)))] *= 10 ** chance.uniform(0, 5)
    if shape.dtype == "float32":
        return numbers.astype("<f4").tobytes()
    if shape.dtype == "float16":
        words = numbers.clip(-65504, 65504).astype("<f2").view("<u2")
    else:
        words = (numbers.view("<u4") >> 16).astype("<u2")
    if chance.integers(0, 4) == 0:
        words[int(chance.integers(0, count))] = chance.choice(np.array(SPECIAL, "<u2"))
    return words.tobytes()


def kvtc_outcomes(kernels: CompiledKernels, seed: int, rounds: int) -> str:
    """A digest of everything that these kernels computed for this many chunks and their mutated payloads."""
    chance, digest = np.random.default_rng(seed), xxhash.xxh3_128()
    for _ in range(rounds):
        shape = drawn_shape(chance)
        codec = KvtcCodec(drawn_calibration(chance, shape), kernels)
        chunk = drawn_chunk(chance, shape, int(chance.integers(1, 3 * TILE)))
        for encode in (codec.encode, codec.encode_first):
            room = memoryview(bytearray(len(chunk) + int(chance.integers(0, 4096))))
            size = encode(memoryview(chunk), room)
            digest.update(b"none" if size is None else bytes(room[:size]))
            if size is None:
                continue
            payload = bytes(room[:size])
            changed = [payload[:HEAD_BYTES] + spoilt(payload[HEAD_BYTES:], chance) for _ in range(6)]
            for one in (payload, *changed):
                _decode(codec, one, len(chunk), digest)
        digest.update(_rows(kernels, chance))
    return digest.hexdigest()


def _decode(codec: KvtcCodec, payload: bytes, nbytes: int, digest: "xxhash.xxh3_128") -> None:
    out = bytearray(nbytes)
    try:
        codec.decode(memoryview(payload), memoryview(out))
        digest.update(bytes(out))
    except CodecError as error:
        digest.update(str(error).encode())


def _rows(kernels: CompiledKernels, chance: np.random.Generator) -> bytes:
    """Of widths from nearly nothing to all of 16 bits, with some numbers far beyond."""
    tokens, channels = int(chance.integers(1, 400)), 2 * int(chance.integers(1, 20))
    widths = 10 ** chance.uniform(-1, 4, (channels * int(chance.integers(1, 3)), 1))
    drawn = chance.logistic(0, 1, (len(widths), tokens)) * widths
    drawn[chance.random(drawn.shape) < 0.001] *= 9
    rows, out = np.rint(drawn).clip(-32768, 32767).astype(np.int16), np.zeros(4 * drawn.size + 4096, np.uint8)
    size = kernels.encode_rows(rows, channels, row_codes(), out)
    if size is None:
        return b"none"
    back = np.empty_like(rows)
    decode_rows(out[:size], channels, row_codes(), back)
    return out[:size].tobytes() + (b"same" if np.array_equal(back, rows) else b"others")


def kvtc_misfits(kernels: CompiledKernels) -> list[str]:
    """Calls with an array of a size, or with a description of a shape, that does not fit the others, and that were not
    refused."""
    chance = np.random.default_rng(1)
    shape, tokens, accepted = Shape("drawn", "bfloat16", 2, 3, 4, 4096, 0.4, (0, 1)), 70, []
    transform, codes = transform_of(drawn_calibration(chance, shape)), row_codes()
    words = np.frombuffer(drawn_chunk(chance, shape, tokens), "<u2").copy()
    turns = np.ones((2, 2, 2, 2 * TILE), np.float32)
    rows = np.zeros((shape.blocks * shape.block_channels, tokens), np.int16)
    described, scratch = transform.described(tokens, 4), np.zeros(8 * TILE * 12, np.uint8)
    out = np.zeros(2 * rows.nbytes, np.uint8)
    lent = (transform.tables, transform.means)
    tables = (codes.low_bits, codes.shares, codes.starts, codes.symbols)
    rows[::3] = 7
    size = kernels.encode_rows(rows, shape.block_channels, codes, out)
    calls: dict[str, tuple[Any, ...]] = {
        "project": (described, words, turns, *lent, transform.steps, transform.forward, rows.copy(), scratch),
        "encode_rows": (
            np.array([tokens, shape.block_channels], np.int64),
            rows,
            *tables,
            codes.limits,
            np.zeros(unit_numbers(tokens), np.int16),
            out.copy(),
        ),
        "decode": (
            described,
            out[:size].copy(),
            turns,
            *lent,
            transform.scales,
            transform.backward,
            transform.small,
            *tables,
            words,
            np.zeros(transform.scratch_bytes(tokens), np.uint8),
        ),
    }
    for name, arguments in calls.items():
        if kernels.call(name, *arguments) < 0:
            accepted.append(f"{name} refuses what fits")
        for place, one in enumerate(arguments):
            if name == "encode_rows" and place == len(arguments) - 1:  # any room will do, but it is all that is used
                continue
            flat = one.reshape(-1)
            wrong = [flat[:-1].copy(), np.resize(flat, flat.size + 1)]
            if (name, place) != ("encode_rows", 1):  # half of the rows are rows
                wrong.append(flat[: flat.size // 2].copy())
            for other in wrong:
                if not _refused(kernels, name, (*arguments[:place], other, *arguments[place + 1 :])):
                    accepted.append(f"{name}, argument {place}")
    for name in calls:
        described = calls[name][0]
        for at in range(len(described)):
            for value in (-1, 1 << 40, tokens + 1 if at == 6 else 0):  # no tokens may be exact
                forged = described.copy()
                forged[at] = value
                if not _refused(kernels, name, (forged, *calls[name][1:])):
                    accepted.append(f"{name} of shape {forged.tolist()}")
    for name in ("project", "decode"):
        for beyond in (2, -1):
            accepted += _led_astray(kernels, name, calls[name], 3, beyond)  # tables
    accepted += _led_astray(kernels, "decode", calls["decode"], 8, MOST_LOW_BITS + 1)
    accepted += _led_astray(kernels, "decode", calls["decode"], 11, SYMBOLS)
    return accepted


def _led_astray(
    kernels: CompiledKernels, name: str, arguments: tuple[Any, ...], argument: int, value: int
) -> list[str]:
    """With an index that leads elsewhere."""
    changed: list[NDArray[Any]] = list(arguments)
    changed[argument] = changed[argument].copy()
    changed[argument].reshape(-1)[0] = value
    return [] if _refused(kernels, name, tuple(changed)) else [f"{name} with index {value}"]


def _refused(kernels: CompiledKernels, name: str, arguments: tuple[Any, ...]) -> bool:
    try:
        return kernels.call(name, *arguments) < 0
    except MisuseError:
        return True


if __name__ == "__main__":
    library, seed, rounds = sys.argv[1:]
    sanitized = CompiledKernels(Path(library))
    sys.stdout.write("\n".join([kvtc_outcomes(sanitized, int(seed), int(rounds)), *kvtc_misfits(sanitized)]))
