"""The codec `kvtc` in C and in numpy: the same bytes from both; and the codes and positions that payloads rest on."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_codecs.calibration import MATRIX_BITS, Shape, read_calibration
from kv_codecs.kernels import TILE, CompiledKernels, installed_kernels, transform_of
from kv_codecs.kvtc import KvtcCodec
from kv_codecs.rotation import Turner, turns
from kv_codecs.row_codes import (
    CODES,
    ESCAPED,
    MEAN_UNIT,
    MOST_LOW_BITS,
    SHARES,
    SYMBOLS,
    ZERO_SYMBOL,
    row_codes,
    shares_of,
)
from kv_core.errors import MisuseError
from kv_testing.kvtc_fuzz import drawn_calibration, kvtc_misfits, kvtc_outcomes
from kv_testing.numpy_kernels import NumpyKernels, kernels_here
from kv_testing.numpy_rows import decode_rows
from kv_testing.numpy_transform import FINEST, LARGEST
from kv_tiers.codec import CodecError

NUMPY = NumpyKernels()
needs_compiled = pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler: none were compiled")


@pytest.fixture
def compiled() -> CompiledKernels:
    found = installed_kernels()
    assert found is not None
    return found


@needs_compiled
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_chunks_and_damaged_payloads_become_the_same(seed: int) -> None:
    """Of all dtypes, with blocks of 2 to 256 channels, numbers far from their means, and numbers that are none."""
    found = installed_kernels()
    assert found is not None
    assert kvtc_outcomes(found, seed, 3) == kvtc_outcomes(NUMPY, seed, 3)


@needs_compiled
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [pytest.param(3, 64, id="one block"), (4, 64), (2, 128), (2, 256), pytest.param(1, 320, id="half a head a block")],
)
def test_whole_tiles_of_bfloat16_become_the_same(heads: int, head_dim: int, compiled: CompiledKernels) -> None:
    """Two and a part of a third, of several layers: what is read ahead, or worked on together, ends where they do."""
    chance, tokens = np.random.default_rng(heads * head_dim), 2 * TILE + 9
    shape = Shape("drawn", "bfloat16", 2, heads, head_dim, 4096, 0.4, (0, 1))
    calibration = drawn_calibration(chance, shape)
    numbers = chance.normal(0, 1, (4, tokens, heads * head_dim)).astype(np.float32)
    numbers[:, TILE + 5, ::7] *= 300  # rounded more coarsely, and with steps that take 16 bits
    chunk = (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    results = []
    for kernels in (NUMPY, compiled):
        codec = KvtcCodec(calibration, kernels)
        for encode in (codec.encode, codec.encode_first):
            room, back = memoryview(bytearray(2 * len(chunk))), bytearray(len(chunk))
            size = encode(memoryview(chunk), room)
            assert size is not None
            codec.decode(room[:size], memoryview(back))
            results.append((bytes(room[:size]), bytes(back)))
    assert results[:2] == results[2:]


@needs_compiled
def test_arrays_and_shapes_that_do_not_fit_are_refused(compiled: CompiledKernels) -> None:
    assert kvtc_misfits(compiled) == []


@pytest.mark.parametrize("kernels", kernels_here(), ids=lambda kernels: kernels.name)
def test_a_head_of_256_channels_stays_whole_and_its_largest_sums_within_32_bits(
    kernels: CompiledKernels | NumpyKernels, tmp_path: Path
) -> None:
    """Rows of the largest norm that a calibration may have, and numbers as large as they can be, in their direction."""
    shape = Shape("drawn", "float32", 1, 1, 256, 4096, 0.4, (0,))
    assert shape.block_channels == 256
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.int16), (256, 256))
    drawn = drawn_calibration(np.random.default_rng(1), shape)
    path = tmp_path / "widest.kvtc"
    replace(
        drawn,
        means=np.zeros_like(drawn.means),
        widths=np.ones_like(drawn.widths),
        forward=np.stack([1152 * signs] * 2).astype(np.int16),
    ).write(path)
    transform = transform_of(read_calibration(path))
    words = np.zeros((2, 256, 256), np.float32)
    words[1] = (LARGEST >> FINEST) * signs
    rows = np.zeros((512, 256), np.int16)
    assert kernels.project(transform, words.view("<u4").reshape(-1), np.ones((1, 2, 128, 256), np.float32), rows, 0)
    sums = 1152 * signs.astype(np.int64) @ (LARGEST * signs.T.astype(np.int64))
    assert 2**31 > sums.max() > 0.98 * 2**31
    shift = MATRIX_BITS + FINEST
    assert np.array_equal(rows[256:], (sums + (1 << shift - 1)) >> shift)


@pytest.mark.parametrize("kernels", kernels_here(), ids=lambda kernels: kernels.name)
@settings(deadline=None, max_examples=60)
@given(
    tokens=st.sampled_from([1, 7, 16, 64, 255, 256, 2048]),
    channels=st.sampled_from([2, 6, 64, 128]),
    width=st.floats(-1.5, 4.6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows_come_back_and_take_few_bits(
    kernels: CompiledKernels | NumpyKernels, tokens: int, channels: int, width: float, seed: int
) -> None:
    chance, codes = np.random.default_rng(seed), row_codes()
    shape = (channels * max(1, min(3, 40_000 // tokens // channels)), tokens)
    rows = np.rint(chance.logistic(0, 10**width, shape)).clip(-32768, 32767).astype(np.int16)
    out = np.zeros(32 * rows.size + 4096, np.uint8)  # low bits are of whole vectors, of 16 tokens
    size = kernels.encode_rows(rows, channels, codes, out)
    assert size is not None
    back = np.empty_like(rows)
    decode_rows(out[:size], channels, codes, back)
    assert np.array_equal(back, rows)
    if rows.size > 8192 and tokens >= 64 and channels % 4 == 0 and 0.3 < 10**width < 25:
        _, counts = np.unique(rows, return_counts=True)
        share = counts / rows.size
        entropy = -float((share * np.log2(share)).sum())
        assert 8 * (size - 512) / rows.size < entropy + 0.15
    for room in (0, size // 2, size - 1):
        assert kernels.encode_rows(rows, channels, codes, out[:room]) is None
    assert kernels.encode_rows(rows, channels, codes, out[:size]) == size
    for length in {*range(0, size, 1 + size // 20), size - 1}:
        with pytest.raises(CodecError):
            decode_rows(out[:length], channels, codes, back)


def test_codes_fit_their_distributions_and_are_the_same_for_ever() -> None:
    """A payload names one of these, so another machine, or another release of this version, must have the same."""
    codes = row_codes()
    numbers = np.arange(-32768, 32768)
    for code, scale in enumerate(200 / 4096 * 1.15 ** np.arange(CODES)):
        shares = codes.shares[code].astype(np.int64)
        assert shares.sum() == SHARES and shares[ESCAPED] >= 1 and shares[ZERO_SYMBOL] >= 1
        assert np.array_equal(codes.starts[code], np.cumsum(shares) - shares)
        assert np.array_equal(codes.symbols[code], np.repeat(np.arange(SYMBOLS), shares))
        below = 1 / (1 + np.exp(-np.clip((numbers - 0.5) / scale, -700, 700)))
        weights = np.append(below[1:], 1) - below
        weights[0] += below[0]
        low_bits = int(codes.low_bits[code])
        symbols = (numbers >> low_bits) + ZERO_SYMBOL
        symbols[(symbols < 0) | (symbols >= ESCAPED)] = ESCAPED
        symbols[shares[symbols] == 0] = ESCAPED
        bits = np.log2(SHARES / shares[symbols]) + low_bits * (symbols != ESCAPED) + 16 * (symbols == ESCAPED)
        entropy = -(weights * np.log2(weights, where=weights > 0, out=np.zeros_like(weights))).sum()
        assert (weights * bits).sum() < entropy + (0.07 if scale < 1000 else 0.2)  # as the widest are cut off
        if scale < 1000:
            assert codes.limits[code] > MEAN_UNIT * (weights * abs(numbers)).sum() - 1
    assert codes.low_bits.max() == MOST_LOW_BITS and (np.diff(codes.limits) > 0).all()
    arrays = (codes.low_bits, codes.shares, codes.starts, codes.symbols)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
    assert digest.hexdigest()[:16] == "37d090845e49ece7"


def test_any_weights_have_shares() -> None:
    chance = np.random.default_rng(3)
    for _ in range(50):
        drawn = 10 ** chance.uniform(0, 6, SYMBOLS) * (chance.random(SYMBOLS) < chance.random())
        drawn[int(chance.integers(ESCAPED))] = drawn.max() + 1
        weights = [int(weight * 2**48 / max(1.0, drawn.sum())) for weight in drawn[:ESCAPED]]
        shares = shares_of([*weights, 2**48 - sum(weights)])
        assert sum(shares) == SHARES and shares[ESCAPED] >= 1 and max(shares) < SHARES


@needs_compiled
@pytest.mark.parametrize("share", range(1, SHARES))
def test_every_state_of_a_lane_is_encoded_to_what_numpy_has(share: int, compiled: CompiledKernels) -> None:
    """Where the kernels divide by multiplying."""
    codes = row_codes()
    shares = np.array([[share, SHARES - share, *[0] * (SYMBOLS - 2)]], np.uint8)
    shares = np.roll(shares, -2 if share % 2 else ZERO_SYMBOL, 1)
    own = replace(
        codes,
        low_bits=np.zeros(1, np.uint8),
        shares=shares,
        starts=(np.cumsum(shares, 1) - shares).astype(np.uint8),
        symbols=np.repeat(np.arange(SYMBOLS, dtype=np.uint8), shares[0])[None],
        limits=np.array([2**62]),
    )
    chance = np.random.default_rng(share)
    used = np.flatnonzero(shares[0]) - ZERO_SYMBOL
    rows = chance.choice(used, (8, 256), p=shares[0][used + ZERO_SYMBOL] / SHARES).astype(np.int16)
    outs = [np.zeros(65536, np.uint8) for _ in range(2)]
    sizes = [kernels.encode_rows(rows, 4, own, out) for kernels, out in zip((NUMPY, compiled), outs, strict=True)]
    assert sizes[0] == sizes[1] and np.array_equal(*(out[: sizes[0]] for out in outs))


@pytest.mark.parametrize("first", [0, 1, 255, 4096, 131_071, (1 << 27) - 1])
def test_positions_turn_as_the_c_library_has_it_though_by_products_alone(first: int) -> None:
    frequencies = np.concatenate((500_000.0 ** (-np.arange(0, 1, 1 / 32)), [0.0, 3.0, 6.5]))
    cos, sin = turns(frequencies, first, 200)
    angles = (first + np.arange(200))[:, None, None] * frequencies
    bound = 1e-6 + first * 2.0**-44  # the unit's last place, as often as it is multiplied
    assert np.abs(cos - np.cos(angles)).max() < bound and np.abs(sin - np.sin(angles)).max() < bound
    again = turns(frequencies, 0, 200 + min(first, 300))
    if first <= 300:
        assert np.abs(again[0][first:] - cos).max() < 1e-6


@pytest.mark.parametrize("first", [0, 256, 4096, 131_071, (1 << 32) - 1])
def test_turns_for_kernels_are_the_same_numbers(first: int) -> None:
    frequencies = np.concatenate((500_000.0 ** (-np.arange(0, 1, 1 / 32)), [0.0, 3.0, 6.5]))
    turner = Turner(frequencies)
    for tokens in (64, 256, 192):
        made = np.empty((2, frequencies.size, tokens), np.float32)
        turner.fill(first, made)
        for one, other in zip(made, turns(frequencies, first, tokens), strict=True):
            assert one.tobytes() == other[:, 0].T.tobytes()


@needs_compiled
def test_a_kernel_of_another_shape_is_a_bug_and_not_a_miss(compiled: CompiledKernels) -> None:
    with pytest.raises(MisuseError, match="kernel decode"):
        compiled.call("decode", *[np.zeros(3, np.uint8)] * 14)
