"""The codec `progressive`: every bit comes back from the whole, an approximation from the first quarter.

`recorded/` holds keys and values of ARCHITECTURE.md: of SmolLM2 135M (128 tokens, K then V of two layers) and Gemma 3
270M (128 tokens, K then V of a layer with full attention).
"""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_codecs.progressive import HEAD_BYTES, PARTS, ProgressiveCodec, make_progressive_codec
from kv_codecs.zstd import ByteCoder
from kv_core.errors import ConfigError
from kv_testing.codec_fuzz import SPECIAL, drawn_words, parts_of, sealed_again
from kv_testing.numpy_kernels import NumpyKernels, kernels_here
from kv_tiers.codec import APPROXIMATE_SHARE, Codec, CodecError
from kv_tiers.testing.codec_contract import CodecContract
from kv_tiers.tier import ANY_CHUNKS

RECORDED = {
    name: (Path(__file__).parent / "recorded" / f"{name}.bfloat16").read_bytes() for name in ("smollm2", "gemma3")
}
CODEC = ProgressiveCodec()
CODECS = pytest.mark.parametrize(
    "codec", [pytest.param(ProgressiveCodec(kernels), id=kernels.name) for kernels in kernels_here()]
)


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return drawn_words(np.random.default_rng(seed), count)


def values_of(chunk: bytes) -> np.ndarray:
    return (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32)


def encoded(chunk: bytes, codec: ProgressiveCodec = CODEC) -> bytes:
    out = memoryview(bytearray(len(chunk)))
    size = codec.encode(memoryview(chunk), out)
    assert size is not None
    return bytes(out[:size])


def from_prefix(prefix: bytes, nbytes: int, codec: ProgressiveCodec = CODEC) -> tuple[int, bytes]:
    out = bytearray(nbytes)
    return codec.decode_prefix(memoryview(prefix), memoryview(out)), bytes(out)


def part_ends(payload: bytes) -> list[int]:
    sizes = np.frombuffer(payload, "<u4", PARTS, 12)
    return [int(end) for end in 56 + np.cumsum(sizes)]


class TestProgressive(CodecContract):
    def make(self) -> Codec:
        return make_progressive_codec({}, ANY_CHUNKS)

    def chunk(self, nbytes: int = 50_000) -> bytes:
        return drawn(nbytes // 2 + 1).tobytes()[:nbytes]

    def test_every_truncation_is_found(self) -> None:
        chunk = self.chunk(9001)
        payload = self.encoded(chunk)
        for length in range(len(payload)):
            with pytest.raises(CodecError):
                self.decode(payload[:length], len(chunk))

    def test_every_flip_is_found(self) -> None:
        chunk = self.chunk(9001)
        payload = bytearray(self.encoded(chunk))
        for at in range(len(payload)):
            payload[at] ^= 1 << at % 8
            with pytest.raises(CodecError):
                self.decode(bytes(payload), len(chunk))
            payload[at] ^= 1 << at % 8


class TestProgressiveWithNumpy(TestProgressive):
    """Where nothing was compiled."""

    def make(self) -> Codec:
        return ProgressiveCodec(NumpyKernels())


@CODECS
@pytest.mark.parametrize(("name", "bits"), [("smollm2", 11.0), ("gemma3", 11.6)])
def test_real_keys_and_values_take_a_quarter_for_the_first_part_and_three_quarters_whole(
    name: str, bits: float, codec: ProgressiveCodec
) -> None:
    chunk = RECORDED[name]
    payload = encoded(chunk, codec)
    first, second, whole = part_ends(payload)
    assert first <= len(chunk) / APPROXIMATE_SHARE
    assert second <= len(chunk) / 2 + 100
    assert whole == len(payload) <= len(chunk) * bits / 16
    assert from_prefix(payload, len(chunk), codec) == (PARTS, chunk)


@pytest.mark.parametrize("name", RECORDED)
def test_each_further_part_brings_all_numbers_nearer(name: str) -> None:
    chunk = RECORDED[name]
    payload = encoded(chunk)
    exact = values_of(chunk)
    errors = []
    for number, end in enumerate(part_ends(payload), 1):
        parts, decoded = from_prefix(payload[:end], len(chunk))
        assert parts == number
        errors.append(float(np.sqrt(np.mean((values_of(decoded) - exact) ** 2) / np.mean(exact**2))))
    assert 0.01 < errors[0] < 0.15
    assert errors[1] < errors[0] / 8
    assert errors[2] == 0.0


def test_cut_anywhere_it_decodes_exactly_the_parts_that_are_whole() -> None:
    chunk = drawn(20_000).tobytes()
    payload = encoded(chunk)
    ends = part_ends(payload)
    known = [from_prefix(payload[:end], len(chunk)) for end in ends]
    for length in range(0, len(payload) + 1, 37):
        whole = sum(end <= length for end in ends)
        if whole:
            assert from_prefix(payload[:length], len(chunk)) == known[whole - 1]
        else:
            with pytest.raises(CodecError):
                from_prefix(payload[:length], len(chunk))


def test_the_quarter_that_a_reader_asks_for_has_the_first_part() -> None:
    for seed in range(20):
        chunk = drawn(5000 + 997 * seed, seed).tobytes()
        assert part_ends(encoded(chunk))[0] <= len(chunk) // APPROXIMATE_SHARE


def test_a_number_is_off_by_half_a_step_at_most() -> None:
    """Of each 256 numbers, a step that lies at most four bits above their mean exponent."""
    words = drawn(1 << 16)
    chunk = words.tobytes()
    payload = encoded(chunk)
    _, decoded = from_prefix(payload[: part_ends(payload)[0]], len(chunk))
    off = np.abs(values_of(decoded) - values_of(chunk)).reshape(-1, 256).max(1)
    mean = ((words >> 7) & 0xFF).reshape(-1, 256).mean(1)
    assert (off <= 2.0 ** (mean + 4 - 127) / 2).all()


@CODECS
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_bits_come_back(codec: ProgressiveCodec, data: st.DataObject) -> None:
    """Special numbers among drawn ones, sections of any length, and an odd tail of bytes."""
    count = data.draw(st.one_of(st.integers(6000, 9000), st.integers((1 << 17) - 300, (1 << 17) + 900)))
    words = drawn(count, data.draw(st.integers(0, 1000)))
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    places = chance.integers(0, count, data.draw(st.integers(0, count // 100)))
    words[places] = chance.choice(np.array(SPECIAL, "<u2"), places.size)
    chunk = words.tobytes() + data.draw(st.binary(max_size=3))
    payload = encoded(chunk, codec)
    assert from_prefix(payload, len(chunk), codec) == (PARTS, chunk)
    approximated = values_of(from_prefix(payload[: part_ends(payload)[0]], len(chunk), codec)[1][: 2 * count])
    exact = values_of(chunk[: 2 * count])
    # Numbers of 1984 steps or more are in the first part as they are, and so are infinities and what is no number.
    assert np.array_equal(np.isfinite(approximated), np.isfinite(exact))


@CODECS
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), exponents=st.integers(1, 12))
def test_random_bits_come_back_whatever_the_room(codec: ProgressiveCodec, seed: int, exponents: int) -> None:
    """Bits that are no keys or values at all, with fewer exponents or more; what cannot be made so small is left."""
    chance = np.random.default_rng(seed)
    words = chance.integers(0, 1 << 16, 4096).astype("<u2")
    words = (words & 0x807F) | (chance.integers(128 - exponents, 128 + exponents, 4096) << 7).astype("<u2")
    chunk = words.tobytes()
    out = memoryview(bytearray(len(chunk)))
    size = codec.encode(memoryview(chunk), out)
    if size is not None:
        assert from_prefix(bytes(out[:size]), len(chunk), codec) == (PARTS, chunk)


@CODECS
@pytest.mark.parametrize("exponent", [0, 7, 241, 255])
def test_a_step_that_no_encoder_chooses_is_refused(codec: ProgressiveCodec, exponent: int) -> None:
    """All checksums are right, as whoever may write a payload can make them."""
    chunk = RECORDED["smollm2"]
    first, *others = parts_of(encoded(chunk, codec))
    forged = sealed_again([bytes([exponent]) + first[1:], *others], len(chunk))
    for payload in (forged, forged[: HEAD_BYTES + len(first)]):
        with pytest.raises(CodecError, match=rf"steps of exponents .*\b{exponent}\b"):
            from_prefix(payload, len(chunk), codec)


def with_other_long_codes(part: bytes, numbers: int, change: Callable[[np.ndarray], np.ndarray]) -> bytes:
    """A first part with its long codes, of which there is one frame, changed."""
    coder, at = ByteCoder("progressive"), numbers // 256 + numbers // 8
    count, size = struct.unpack_from("<II", part, at)
    frame_at = at + 8
    changed = change(coder.decode(memoryview(part)[frame_at : frame_at + size], count).copy())
    frame = coder.encode(changed)
    return part[:at] + struct.pack("<II", changed.size, len(frame)) + frame + part[frame_at + size :]


@CODECS
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param(lambda codes: np.append(codes[1:], np.uint8(14)), "out of range", id="that is short"),
        pytest.param(lambda codes: np.append(codes[1:], np.uint8(128)), "out of range", id="too large"),
        pytest.param(
            lambda codes: np.append(codes[1:], np.uint8(127)), "fewer numbers", id="of a number that is not there"
        ),
        pytest.param(lambda codes: codes[1:], "fewer numbers", id="one too few"),
        pytest.param(lambda codes: np.append(codes, np.uint8(15)), "more numbers", id="one too many"),
    ],
)
def test_long_codes_that_no_encoder_writes_are_refused(
    codec: ProgressiveCodec, change: Callable[[np.ndarray], np.ndarray], problem: str
) -> None:
    chunk = RECORDED["smollm2"]
    first, *others = parts_of(encoded(chunk, codec))
    forged = sealed_again([with_other_long_codes(first, len(chunk) // 2, change), *others], len(chunk))
    with pytest.raises(CodecError, match=problem):
        from_prefix(forged, len(chunk), codec)


def test_a_list_of_more_numbers_than_the_chunk_has_is_not_decoded() -> None:
    chunk = RECORDED["smollm2"]
    numbers = len(chunk) // 2
    first, *others = parts_of(encoded(chunk))
    at = numbers // 256 + numbers // 8
    changed = first[:at] + struct.pack("<I", numbers + 1) + first[at + 4 :]
    with pytest.raises(CodecError, match=f"{numbers + 1} numbers of {numbers}"):
        from_prefix(sealed_again([changed, *others], len(chunk)), len(chunk))


def test_what_cannot_be_cut_into_so_small_a_first_part_is_left() -> None:
    for chunk in (b"", b"\x01", np.random.default_rng(0).bytes(1 << 16)):
        assert CODEC.encode(memoryview(chunk), memoryview(bytearray(len(chunk)))) is None


def test_the_page_describes_the_head() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "progressive.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"^    ([0-9a-f ]+)$", page, re.MULTILINE)
    chunk = np.resize(np.array([0x3F80, 0xC020, 0x3F00, 0xBE80], "<u2"), 256).tobytes()
    payload = encoded(chunk)
    assert payload[: len(bytes.fromhex(written))] == bytes.fromhex(written)


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="level"):
        make_progressive_codec({"level": 3}, ANY_CHUNKS)
