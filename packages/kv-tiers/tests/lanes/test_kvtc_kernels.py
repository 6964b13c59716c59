"""The codec `kvtc` in C and in numpy: the same bytes from both; and the codes and positions that payloads rest on."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import MisuseError
from kv_testing.kvtc_fuzz import drawn_calibration, kvtc_misfits, kvtc_outcomes
from kv_tiers.codec import CodecError
from kv_tiers.codecs.calibration import MATRIX_BITS, Shape, read_calibration
from kv_tiers.codecs.compiled_kernels import CompiledKernels, installed_kernels
from kv_tiers.codecs.kernels import kernels_here
from kv_tiers.codecs.kvtc import KvtcCodec
from kv_tiers.codecs.numpy_kernels import NumpyKernels
from kv_tiers.codecs.rotation import Turner, turns
from kv_tiers.codecs.row_codes import COSTED_CLASSES, ESCAPED, LONGEST_BITS, class_of, code_lengths, row_codes
from kv_tiers.codecs.transform import FINEST, LARGEST, TILE, transform_of

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
    assert np.array_equal(rows[transform.places[1]], (sums + (1 << shift - 1)) >> shift)


@pytest.mark.parametrize("kernels", kernels_here(), ids=lambda kernels: kernels.name)
@settings(deadline=None, max_examples=60)
@given(
    tokens=st.sampled_from([1, 7, 255, 256, 20_000]),
    count=st.integers(1, 70),
    width=st.floats(-1.5, 4.6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows_come_back_and_take_few_bits(
    kernels: CompiledKernels | NumpyKernels, tokens: int, count: int, width: float, seed: int
) -> None:
    chance, codes = np.random.default_rng(seed), row_codes()
    shape = (min(count, 1 + 40_000 // tokens), tokens)
    rows = np.rint(chance.logistic(0, 10**width, shape)).clip(-32768, 32767).astype(np.int16)
    out = np.zeros(4 * rows.size + 4096, np.uint8)
    size = kernels.encode_rows(rows, codes, out)
    assert size is not None
    back = np.empty_like(rows)
    kernels.decode_rows(out[:size], codes, back)
    assert np.array_equal(back, rows)
    if rows.size > 8192 and 0.3 < 10**width < 25:
        _, counts = np.unique(rows, return_counts=True)
        share = counts / rows.size
        entropy = -float((share * np.log2(share)).sum())
        assert 8 * size / rows.size < entropy + 0.2
    for room in (0, size // 2, size - 1):
        assert kernels.encode_rows(rows, codes, out[:room]) is None
    for length in {*range(0, size, 1 + size // 20), size - 1}:
        with pytest.raises(CodecError):
            kernels.decode_rows(out[:length], codes, back)


def test_codes_are_complete_and_the_same_for_ever() -> None:
    """A payload names one of these, so another machine, or another release of this version, must have the same."""
    codes = row_codes()
    for words, lookup, coded in zip(codes.words, codes.lookup, codes.coded, strict=True):
        used = np.flatnonzero(words)
        lengths = words[used] >> 16
        assert ESCAPED in used and lengths.max() <= LONGEST_BITS
        assert (1 << (LONGEST_BITS - lengths.astype(np.int64))).sum() == 1 << LONGEST_BITS
        assert np.array_equal(lookup[words[used] & 0xFFFF], used << 8 | lengths)
        its = np.where(words, words, words[ESCAPED])
        assert np.array_equal(coded & 63, its >> 16) and np.array_equal(coded >> 8, its & 0xFFFF)
        assert set(np.flatnonzero(coded >> 7 & 1)) == set(range(256)) - set(used) | {ESCAPED}
    for single, pairs in zip(codes.lookup.astype(np.int64), codes.pairs.astype(np.int64), strict=True):
        rest = single[np.arange(single.size) >> (single & 255)]
        two = (single & 255) + (rest & 255) <= LONGEST_BITS
        assert np.array_equal(pairs >> 8 & 255, 1 + two) and np.array_equal(pairs >> 16 & 255, single >> 8)
        assert np.array_equal(pairs & 255, (single & 255) + (rest & 255) * two)
        assert np.array_equal(pairs >> 24, (rest >> 8) * two)
    digest = hashlib.sha256(codes.kinds.tobytes() + codes.words.tobytes() + codes.lookup.tobytes())
    assert digest.hexdigest()[:16] == "98d16f7f3c812b3d"


def test_codes_of_any_weights_are_complete() -> None:
    chance = np.random.default_rng(3)
    for _ in range(50):
        count = int(chance.integers(2, 257))
        weights = {byte: 1 + int(10 ** chance.uniform(0, 12)) for byte in range(count)}
        lengths = code_lengths(weights)
        assert max(lengths.values()) <= LONGEST_BITS
        assert sum(2 ** (LONGEST_BITS - length) for length in lengths.values()) == 1 << LONGEST_BITS


def test_symbols_of_a_class_are_adjacent_and_classes_are_few() -> None:
    classes = class_of(np.arange(1 << 16, dtype=np.uint16))
    assert (np.diff(classes) >= 0).all() and classes[-1] == COSTED_CLASSES - 1
    assert len(np.unique(classes)) == COSTED_CLASSES


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
    with pytest.raises(MisuseError, match="kernel decode_rows"):
        compiled.call("decode_rows", 5, *[np.zeros(3, np.uint8)] * 7)
