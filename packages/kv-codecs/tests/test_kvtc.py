"""The codec `kvtc`: recorded keys and values come back within their bound, at any position, in a fraction of the bytes.

`recorded/` holds 128 tokens of SmolLM2 135M, K then V of two layers. Longer contexts are drawn: keys with a mean and
few components, turned to their positions, as trained models have them.
"""

import hashlib
import json
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_codecs.calibrated import calibration_of, fingerprint_of
from kv_codecs.calibration import SINKS, Calibration, ChannelOrder, Learning, read_calibration
from kv_codecs.kernels import compiled_kernels
from kv_codecs.kvtc import HEAD_BYTES, KvtcCodec, make_kvtc_codec
from kv_codecs.rotation import turn, turn_back, turns
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged, Loaded
from kv_testing.drawn_kv import (
    DTYPES,
    Drawn,
    as_numbers,
    as_stored,
    assert_within_the_bound,
    decoded,
    encoded,
    frequencies,
    position_in,
)
from kv_testing.numpy_kernels import NumpyKernels
from kv_tiers.approximate import uses_calibration
from kv_tiers.chunk_header import HEADER_BYTES, SEAL_BYTES, format_id, seal
from kv_tiers.codec import Codec, CodecError, EncodesFirst
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.moving import Payloads
from kv_tiers.testing.codec_contract import CodecContract
from kv_tiers.tier import Read, TierContext
from numpy.typing import NDArray

RECORDED = (Path(__file__).parent / "recorded" / "smollm2.bfloat16").read_bytes()


def recorded_calibration(step: float = 0.4) -> Calibration:
    """By two copies of what is tested, as there is no more of it: for the bound and the bytes, not for the ratio."""
    numbers = as_numbers(RECORDED, "bfloat16").reshape(2, 2, 128, 3, 64)
    learning = Learning(
        model="SmolLM2", dtype="bfloat16", heads=3, head_dim=64, max_tokens=8192, frequencies=[frequencies(64)] * 2
    )
    for _ in range(4):
        learning.add([(numbers[0, layer], numbers[1, layer]) for layer in range(2)])
    return learning.learnt(step)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("part", "name"), [(0, "keys"), (1, "values")])
def test_nothing_is_learnt_from_numbers_that_are_not_finite(bad: float, part: int, name: str) -> None:
    drawn = Drawn()
    context = drawn.context(0, 256)
    context[part, 1, 7] = bad
    with pytest.raises(ConfigError, match=f"the {name} of layer 1 contain NaN or infinity"):
        drawn.learning().add([(context[0, layer], context[1, layer]) for layer in range(drawn.layers)])


class TestKvtc(CodecContract):
    drawn = Drawn()
    calibration = drawn.calibration()

    def make(self) -> Codec:
        return KvtcCodec(self.calibration)

    def chunk(self, nbytes: int = 50_000) -> bytes:
        return self.drawn.chunk(512, max(1, nbytes // self.calibration.shape.token_bytes))

    def assert_alike(self, chunk: bytes, decoded: bytes) -> None:
        assert len(chunk) == len(decoded)
        assert_within_the_bound(self.calibration, chunk, decoded)


def test_recorded_keys_and_values_come_back_within_the_bound_in_a_fifth_and_first_tokens_as_they_are() -> None:
    calibration = recorded_calibration()
    codec = KvtcCodec(calibration)
    assert isinstance(codec, EncodesFirst)
    payload = encoded(codec, RECORDED, first=True)
    assert len(RECORDED) / len(payload) > 4
    assert position_in(payload) == 0
    back = decoded(codec, payload, len(RECORDED))
    exact, approximate = (np.frombuffer(one, "<u2").reshape(4, 128, -1) for one in (RECORDED, back))
    assert (exact[:, :SINKS] == approximate[:, :SINKS]).all()
    assert (exact[:, SINKS:] != approximate[:, SINKS:]).mean() > 0.5
    assert_within_the_bound(calibration, RECORDED, back)


def test_a_smaller_step_costs_bytes_and_brings_numbers_nearer() -> None:
    sizes, errors = [], []
    for step in (0.2, 0.4, 0.8):
        codec = KvtcCodec(recorded_calibration(step))
        payload = encoded(codec, RECORDED)
        back = decoded(codec, payload, len(RECORDED))
        difference = as_numbers(RECORDED, "bfloat16") - as_numbers(back, "bfloat16")
        sizes.append(len(payload))
        errors.append(float(np.square(difference).mean()))
    assert sizes[0] > sizes[1] > sizes[2] and errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_a_chunks_position_is_found_in_its_keys(tokens: int) -> None:
    drawn = Drawn(layers=4)
    codec = KvtcCodec(drawn.calibration(max_tokens=131_072))
    for number in (0, 1, 2, 7, 100, 131_072 // tokens - 1):
        chunk = drawn.chunk(number * tokens, tokens)
        payload = encoded(codec, chunk)
        assert position_in(payload) == number * tokens
        assert_within_the_bound(codec.calibration, chunk, decoded(codec, payload, len(chunk)))


def test_a_wrong_position_costs_bytes_and_no_precision() -> None:
    """The reason why nobody needs to know a chunk's place: what is found there is no more than a good guess."""
    drawn = Drawn(layers=4)
    calibration = drawn.calibration(max_tokens=1024)
    codec = KvtcCodec(calibration)
    near, beyond = (drawn.chunk(first, 256) for first in (768, 100_000 - 1))  # where no chunk begins
    right, wrong = encoded(codec, near), encoded(codec, beyond)
    assert position_in(right) == 768 and position_in(wrong) < 1024
    assert len(wrong) > 1.1 * len(right)
    assert_within_the_bound(calibration, beyond, decoded(codec, wrong, len(beyond)))


@settings(max_examples=40, deadline=None)
@example(layers=1, heads=3, head_dim=128, tokens=8, dtype="bfloat16", step=0.1, number=0)  # the sample was of one token
@example(layers=3, heads=8, head_dim=128, tokens=16, dtype="bfloat16", step=0.1, number=0)
@example(layers=3, heads=8, head_dim=128, tokens=17, dtype="bfloat16", step=0.1, number=0)
@example(layers=1, heads=8, head_dim=128, tokens=1, dtype="bfloat16", step=0.1, number=0)  # nearly all are escaped
@example(layers=3, heads=1, head_dim=2, tokens=22, dtype="float16", step=0.4, number=20)  # both components off by half
@given(
    layers=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 3, 5, 8]),
    head_dim=st.sampled_from([2, 16, 64, 128]),
    tokens=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES)),
    step=st.sampled_from([0.1, 0.4, 1.0]),
    number=st.integers(0, 20),
)
def test_chunks_of_every_shape_come_back(
    layers: int, heads: int, head_dim: int, tokens: int, dtype: str, step: float, number: int
) -> None:
    drawn = Drawn(layers, heads, head_dim, dtype, seed=tokens)
    calibration = drawn.calibration(step)
    codec = KvtcCodec(calibration)
    chunk = drawn.chunk(number * tokens, tokens)
    out = memoryview(bytearray(4 * len(chunk) + 4096))
    for encode in (codec.encode, codec.encode_first):
        size = encode(memoryview(chunk), out)
        assert size is not None
        assert_within_the_bound(calibration, chunk, decoded(codec, bytes(out[:size]), len(chunk)))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 3e38])
def test_a_number_that_has_no_steps_leaves_the_chunk_as_it_is_unless_it_is_kept_as_it_is(odd: float) -> None:
    drawn = Drawn(dtype="float32")
    codec = KvtcCodec(drawn.calibration())
    numbers = drawn.context(0, 64)
    numbers[1, 0, 20, 1, 3] = odd
    chunk = numbers.astype("<f4").tobytes()
    out = memoryview(bytearray(len(chunk)))
    with warnings.catch_warnings(action="error"):
        assert codec.encode(memoryview(chunk), out) is None
    numbers[1, 0, 20, 1, 3], numbers[1, 0, 2, 1, 3] = 0, odd
    chunk = numbers.astype("<f4").tobytes()
    back = np.frombuffer(decoded(codec, encoded(codec, chunk, first=True), len(chunk)), "<f4").reshape(numbers.shape)
    assert np.array_equal(back[:, :, :SINKS], numbers[:, :, :SINKS], equal_nan=True)


def test_the_largest_float16_does_not_become_infinite() -> None:
    """Half a step more would be."""
    drawn = Drawn(dtype="float16")
    drawn.mixes *= 15_000
    codec = KvtcCodec(drawn.calibration(1.0))
    chunk = np.clip(drawn.context(0, 64), -65504, 65504).astype("<f2").tobytes()
    assert (np.abs(np.frombuffer(chunk, "<f2")) == 65504).any()
    back = np.frombuffer(decoded(codec, encoded(codec, chunk), len(chunk)), "<f2")
    assert np.isfinite(back).all() and back.max() == 65504


def test_numbers_far_beyond_the_calibration_keep_the_bound() -> None:
    drawn = Drawn()
    calibration = drawn.calibration()
    codec = KvtcCodec(calibration)
    numbers = drawn.context(0, 64)
    numbers[:, :, 10:12] *= 300
    chunk = as_stored(numbers, "bfloat16").tobytes()
    assert_within_the_bound(calibration, chunk, decoded(codec, encoded(codec, chunk), len(chunk)))


def test_keys_that_are_turned_back_are_turned_again() -> None:
    numbers = np.random.default_rng(1).normal(0, 1, (40, 3, 64)).astype(np.float32)
    tables = turns(np.array(frequencies(64)), 5000, 40)
    assert np.allclose(turn(turn_back(numbers, *tables), *tables), numbers, atol=1e-6)
    half = numbers[..., :32] + 1j * numbers[..., 32:]
    angles = (5000 + np.arange(40))[:, None, None] * np.array(frequencies(64))
    turned = half * np.exp(1j * angles)
    assert np.allclose(turn(numbers, *tables), np.concatenate((turned.real, turned.imag), -1), atol=1e-4)


class Stored:
    """A chunk as a tier has it, by what a lane makes of it."""

    def __init__(self, codec: KvtcCodec, chunk: bytes, *, parent: ChunkKey | None) -> None:
        self.form, self.nbytes = format_id("f"), len(chunk)
        self.payloads = Payloads(self.form, codec)
        self.key = ChunkKey(bytes([1, *bytes(45)]))
        pages = memoryview(bytearray(-(-len(chunk) // 4096) * 4096))
        pages[: len(chunk)] = chunk
        (write,) = self.payloads.writes([Outgoing(self.key, parent, pages, len(chunk))])
        self.header, self.payload = write.header, bytes(write.payload)

    def loaded(self, payload: bytes) -> tuple[object, bytes]:
        pages = memoryview(bytearray(-(-self.nbytes // 4096) * 4096))
        pages[: len(payload)] = payload
        read = Read(self.key, bytearray(self.header), pages, len(pages), self.nbytes)
        arrival = self.payloads.arrival(read, Loaded(len(payload)), "disk")
        return arrival.outcome, bytes(pages[: self.nbytes])


def test_a_lane_finds_every_truncation_and_flip_and_keeps_sinks_of_chunks_without_a_parent() -> None:
    drawn = Drawn()
    codec = KvtcCodec(drawn.calibration())
    chunk = drawn.chunk(0, 64)
    first, later = (Stored(codec, chunk, parent=parent) for parent in (None, ChunkKey(bytes([1, *bytes(44), 7]))))
    assert len(first.header) == HEADER_BYTES
    sinks = SINKS * codec.calibration.shape.token_bytes // 4
    words = np.frombuffer(chunk, "<u2").reshape(4, 64, -1)[:, :SINKS]
    for stored, kept in ((first, True), (later, False)):
        outcome, back = stored.loaded(stored.payload)
        assert isinstance(outcome, Loaded)
        assert (np.frombuffer(back, "<u2").reshape(4, 64, -1)[:, :SINKS] == words).all() == kept
    assert len(first.payload) > len(later.payload) + sinks
    spoilt = bytearray(first.payload)
    for at in range(0, len(spoilt), 7):
        spoilt[at] ^= 1 << at % 8
        assert isinstance(first.loaded(bytes(spoilt))[0], Damaged)
        spoilt[at] ^= 1 << at % 8
    for length in range(0, len(spoilt), 61):
        assert isinstance(first.loaded(bytes(spoilt[:length]))[0], Damaged)


def test_what_another_calibration_encoded_is_refused() -> None:
    drawn = Drawn()
    one, other = KvtcCodec(drawn.calibration(0.4)), KvtcCodec(drawn.calibration(0.5))
    chunk = drawn.chunk(0, 64)
    with pytest.raises(CodecError, match="encoded with calibration"):
        decoded(other, encoded(one, chunk), len(chunk))


def test_a_payload_that_ends_within_its_head_is_damaged_even_if_its_checksum_is_right() -> None:
    """Anyone who may write to the tier can write one, and any other error would be taken for a failure of the tier."""
    drawn = Drawn()
    codec, chunk = KvtcCodec(drawn.calibration()), drawn.chunk(0, 64)
    head = encoded(codec, chunk)[: HEAD_BYTES - SEAL_BYTES]
    for length in (0, 1, len(head) - 1):
        with pytest.raises(CodecError, match="does not begin"):
            decoded(codec, seal(head[:length]), len(chunk))


def test_payloads_and_calibrations_of_older_versions_are_refused_by_name(tmp_path: Path) -> None:
    drawn = Drawn()
    calibration = drawn.calibration()
    codec = KvtcCodec(calibration)
    chunk = drawn.chunk(0, 64)
    payload = encoded(codec, chunk)
    head = HEAD_BYTES - SEAL_BYTES
    with pytest.raises(CodecError, match="version 1"):
        decoded(codec, seal(b"\1" + payload[1:head]) + payload[HEAD_BYTES:], len(chunk))
    path = tmp_path / "old.kvtc"
    calibration.write(path)
    for version in (1, 2, 3, 4):
        path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", version) + path.read_bytes()[12:])
        with pytest.raises(ConfigError, match=f"version {version}; this release reads version 5: write it again"):
            read_calibration(path)


def test_a_forged_calibration_whose_sums_would_overflow_is_refused(tmp_path: Path) -> None:
    calibration = Drawn().calibration()
    path = tmp_path / "large.kvtc"
    replace(calibration, forward=np.full_like(calibration.forward, 16_000)).write(path)
    with pytest.raises(ConfigError, match="not close to orthonormal"):
        read_calibration(path)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "model.kvtc"
    Drawn().calibration().write(path)
    return path


def test_a_calibration_is_read_as_it_was_written(written: Path) -> None:
    read = read_calibration(written)
    drawn = Drawn().calibration()
    assert read.id == drawn.id and read.shape == drawn.shape
    for name in ("frequencies", "means", "forward", "backward", "scales", "widths"):
        assert np.array_equal(getattr(read, name), getattr(drawn, name))
    assert read.name == f"kvtc-{read.id.hex()}"


def test_every_damage_of_a_calibration_is_found_before_its_sizes_are_used(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    spoilt = tmp_path / "spoilt.kvtc"
    for length in (*range(300), len(whole) // 2, len(whole) - 1):
        spoilt.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            read_calibration(spoilt)
    spoilt.write_bytes(whole + b"x")
    with pytest.raises(ConfigError, match="bytes instead of"):
        read_calibration(spoilt)
    for at in (*range(300), len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        spoilt.write_bytes(flipped)
        with pytest.raises(ConfigError):
            read_calibration(spoilt)


@pytest.mark.parametrize(
    "change",
    [
        {"rotated": 0},
        {"rotated": 15},
        {"rotated": 66},
        {"rotated": "16"},
        {"rotated": True},
        {"neighbours": 1},
        {"block_channels": 0},
        {"block_channels": 7},
    ],
)
def test_a_forged_order_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    order = {"rotated": 16, "neighbours": True}
    calibration = Drawn().calibration()
    path = tmp_path / "file"
    replace(calibration, shape=replace(calibration.shape, rotated=16, neighbours=True)).write(path)
    assert {name: getattr(read_calibration(path).shape, name) for name in order} == order
    whole = path.read_bytes()[:-32]
    (text_bytes,) = struct.unpack_from("<I", whole, 12)
    text = json.dumps(json.loads(whole[16 : 16 + text_bytes]) | change).encode()
    content = whole[:12] + struct.pack("<I", len(text)) + text + whole[16 + text_bytes :]
    path.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(ConfigError, match="not a file of"):
        read_calibration(path)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 1 << 40},
        {"layers": -1},
        {"layers": True},
        {"heads": 0},
        {"head_dim": 3},
        {"head_dim": "64"},
        {"dtype": "int8"},
        {"max_tokens": 1 << 60},
        {"step": 0.0},
        {"step": float("nan")},
        {"step": "1"},
        {"tables": [0, 9]},
        {"tables": []},
        {"tables": 5},
        {"model": 7},
        {"block_channels": 64},
        {"block_channels": 16},
        {"more": 1},
    ],
)
def test_a_forged_calibration_is_refused_whatever_it_says(written: Path, change: dict[str, object]) -> None:
    """With a checksum that is right, as whoever can write the file can make one."""
    whole = written.read_bytes()
    (text_bytes,) = struct.unpack_from("<I", whole, 12)
    said = json.loads(whole[16 : 16 + text_bytes]) | change
    text = json.dumps(said).encode()
    written.write_bytes(whole[:12] + struct.pack("<I", len(text)) + text + whole[16 + text_bytes :])
    with pytest.raises(ConfigError):
        read_calibration(written)


@pytest.mark.parametrize("absent", ["rotated", "neighbours", "block_channels", "model"])
def test_a_calibration_that_leaves_something_to_be_guessed_is_refused(written: Path, absent: str) -> None:
    whole = written.read_bytes()[:-32]
    (text_bytes,) = struct.unpack_from("<I", whole, 12)
    said = json.loads(whole[16 : 16 + text_bytes])
    del said[absent]
    text = json.dumps(said).encode()
    content = whole[:12] + struct.pack("<I", len(text)) + text + whole[16 + text_bytes :]
    written.write_bytes(content + hashlib.sha256(content).digest())
    with pytest.raises(ConfigError, match="not a file of"):
        read_calibration(written)


def test_settings_are_refused_by_name_and_fingerprints_differ_by_calibration(written: Path, tmp_path: Path) -> None:
    tiers = [{"type": "disk", "codec": {"type": "kvtc", "calibration": str(written)}}]
    calibration = calibration_of(tiers)
    assert calibration is not None and calibration.id == read_calibration(written).id
    marked = fingerprint_of(calibration, "f")
    assert marked == f"f {calibration.name}"
    assert uses_calibration(tiers) and not uses_calibration([{"type": "disk", "codec": "floats"}, {"type": "dram"}])
    other = tmp_path / "other.kvtc"
    Drawn().calibration(0.5).write(other)
    two = [*tiers, {"type": "dram", "codec": {"type": "kvtc", "calibration": str(other)}}]
    with pytest.raises(ConfigError, match="the same calibration"):
        calibration_of(two)
    with pytest.raises(ConfigError, match="write codec"):
        calibration_of([{"type": "disk", "codec": "kvtc"}])
    with pytest.raises(ConfigError, match="No such file"):
        calibration_of([{"type": "disk", "codec": {"type": "kvtc", "calibration": str(tmp_path / "none")}}])
    options = {"calibration": str(written)}
    assert make_kvtc_codec(options, TierContext(1 << 20, 1 << 20, marked)).name == "kvtc"
    with pytest.raises(ConfigError, match="for each engine to allow"):
        make_kvtc_codec(options, TierContext(1 << 20, 1 << 20, "f"))
    with pytest.raises(ConfigError, match="needs a calibration"):
        make_kvtc_codec({}, TierContext(1 << 20, 1 << 20, marked))


@pytest.mark.parametrize(("rotated", "neighbours"), [(16, False), (16, True), (64, True), (2, False), (64, False)])
def test_keys_of_another_order_come_back_where_they_were(rotated: int, neighbours: bool, tmp_path: Path) -> None:
    """Their channels are put into the order of kernels, coded, and put back; values stay where they are."""
    head_dim, heads, tokens, layers = 64, 2, 256, 2
    rng = np.random.default_rng(3)
    frequencies = [*(1e4 ** -(np.arange(rotated // 2) / (rotated // 2))), *[0.0] * (32 - rotated // 2)]
    means = 3 * rng.standard_normal((layers, heads, head_dim))
    order = ChannelOrder(head_dim, rotated, neighbours)

    def drawn(first: int) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        made = []
        for layer in range(layers):
            still = means[layer] + 0.5 * rng.standard_normal((tokens, heads, head_dim))
            angles = (first + np.arange(tokens))[:, None, None] * np.array(frequencies)
            points = (still[..., :32] + 1j * still[..., 32:]) * np.exp(1j * angles)
            keys = np.empty((tokens, heads, head_dim), np.float32)
            order.restored(np.concatenate([points.real, points.imag], -1).astype(np.float32), keys)
            made.append((keys, rng.standard_normal(keys.shape).astype(np.float32)))
        return made

    learning = Learning(
        model="m", dtype="float32", heads=heads, head_dim=head_dim, max_tokens=4096, frequencies=[frequencies] * layers,
        rotated=rotated, neighbours=neighbours,
    )  # fmt: skip
    for _ in range(4):
        learning.add(drawn(0))
    learnt = learning.learnt(0.2)
    learnt.write(tmp_path / "file")
    read = read_calibration(tmp_path / "file")
    assert read.shape == learnt.shape and read.id == learnt.id
    assert read.part([1], range(heads)).shape.order == order
    sizes = []
    for first in (0, 2560):
        planes = drawn(first)
        chunk = np.stack([one[part] for part in range(2) for one in planes]).astype("<f4").tobytes()
        payloads = set()
        for kernels in (NumpyKernels(), compiled_kernels("kvtc")):
            codec = KvtcCodec(read, kernels)
            out, back = bytearray(len(chunk)), bytearray(len(chunk))
            size = codec.encode(memoryview(chunk), memoryview(out))
            assert size is not None
            payloads.add(bytes(out[:size]))
            codec.decode(memoryview(out)[:size], memoryview(back))
            error = np.frombuffer(back, "<f4") - np.frombuffer(chunk, "<f4")
            assert np.abs(error).max() < 3.0 and np.sqrt(np.square(error).mean()) < 0.4
            payload = encoded(codec, chunk, first=True)
            exact = np.frombuffer(chunk, "<f4").reshape(4, 256, -1)[:, :SINKS]
            assert payload[HEAD_BYTES : HEAD_BYTES + exact.nbytes] == exact.tobytes()
            its = np.frombuffer(decoded(codec, payload, len(chunk)), "<f4").reshape(4, 256, -1)[:, :SINKS]
            assert (exact == its).all()
        assert len(payloads) == 1
        sizes.append(size)
    assert abs(sizes[0] - sizes[1]) < 0.03 * sizes[0]  # its position was found
