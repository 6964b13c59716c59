"""The codec `floats`: whatever the bits are they come back, and real keys and values get nearly a third smaller.

`recorded/smollm2.bfloat16` is what SmolLM2 135M made of 128 tokens of ARCHITECTURE.md: K then V of two layers.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_codecs.floats import FloatsCodec, make_floats_codec
from kv_core.errors import ConfigError
from kv_testing.numpy_kernels import NumpyKernels, kernels_here
from kv_tiers.codec import Codec, CodecError
from kv_tiers.testing.codec_contract import CodecContract
from kv_tiers.tier import ANY_CHUNKS

RECORDED = (Path(__file__).parent / "recorded" / "smollm2.bfloat16").read_bytes()
CODECS = [pytest.param(FloatsCodec(kernels), id=kernels.name) for kernels in kernels_here()]
SPECIAL = {  # zeros, the smallest subnormals, infinities, NaNs with a payload, the largest
    "u2": [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C00, 0xFC00, 0x7E01, 0x7F7F],
    "u4": [0, 1 << 31, 1, (1 << 31) + 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x7F7FFFFF],
}


def numbers(dtype: str, count: int, seed: int = 0) -> bytes:
    drawn = np.random.default_rng(seed).normal(0, 3, count).astype(np.float32)
    if dtype == "bfloat16":
        return (drawn.view(np.uint32) >> 16).astype("<u2").tobytes()
    return drawn.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


class TestFloats(CodecContract):
    def make(self) -> Codec:
        return make_floats_codec({}, ANY_CHUNKS)

    def chunk(self, nbytes: int = 50_000) -> bytes:
        return numbers("bfloat16", nbytes // 2 + 1)[:nbytes]

    def test_a_frame_that_is_small_and_says_that_it_is_huge_costs_nothing(self) -> None:
        import zstandard

        bomb = zstandard.ZstdCompressor(19).compress(bytes(1 << 28))
        for kind in (1, 2, 3):
            payload = bytes([kind, 0, 0, 0]) + len(bomb).to_bytes(4, "little") + bomb + bytes(50_000)
            with pytest.raises(CodecError, match="a frame of 268435456 bytes"):
                self.decode(payload, 50_000)

    @pytest.mark.parametrize("kind", [0, 4, 255])
    def test_kinds_of_numbers_that_it_does_not_know(self, kind: int) -> None:
        encoded = self.encoded(self.chunk())
        with pytest.raises(CodecError, match="does not begin"):
            self.decode(bytes([kind]) + encoded[1:], 50_000)

    def test_every_truncation_is_found(self) -> None:
        chunk = self.chunk(5001)
        encoded = self.encoded(chunk)
        for length in range(len(encoded)):
            with pytest.raises(CodecError):
                self.decode(encoded[:length], len(chunk))

    @pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1.45), ("float16", 1.1), ("float32", 1.17)])
    @pytest.mark.parametrize("count", [4096, (1 << 17) - 1, (1 << 17) + 1, 300_001])
    def test_each_dtype_gets_smaller_in_blocks_of_any_number(self, dtype: str, least: float, count: int) -> None:
        chunk = numbers(dtype, count)
        encoded = self.encoded(chunk)
        assert len(chunk) / len(encoded) > least
        assert self.decode(encoded, len(chunk)) == chunk

    def test_real_keys_and_values_get_nearly_a_third_smaller(self) -> None:
        encoded = self.encoded(RECORDED)
        assert len(RECORDED) / len(encoded) > 1.44
        assert self.decode(encoded, len(RECORDED)) == RECORDED

    def test_what_gets_no_smaller_is_left(self) -> None:
        assert self.encode(b"") is None
        assert self.encode(b"\x01") is None
        assert self.encode(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()) is None


class TestFloatsWithNumpy(TestFloats):
    """Where nothing was compiled."""

    def make(self) -> Codec:
        return FloatsCodec(NumpyKernels())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("word", SPECIAL)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_bits_come_back(word: str, codec: FloatsCodec, data: st.DataObject) -> None:
    """Of every kind, whatever the sample says they are: special numbers among drawn ones, and an odd tail of bytes."""
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.integers(8, 3000))
    values = chance.normal(0, 1, count).astype(np.float32).view(np.uint32)
    words = (values if word == "u4" else values >> 16).astype(f"<{word}")
    places = chance.integers(0, count, data.draw(st.integers(0, count // 4)))
    words[places] = chance.choice(np.array(SPECIAL[word], words.dtype), places.size)
    chunk = words.tobytes() + bytes(data.draw(st.binary(max_size=3)))
    out = memoryview(bytearray(len(chunk) + 64))
    size = codec.encode(memoryview(chunk), out)
    assert size is not None or count < 200
    if size is not None:
        decoded = bytearray(len(chunk))
        codec.decode(out[:size], memoryview(decoded))
        assert decoded == chunk


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_wrong_guess_of_the_dtype_costs_bytes_and_no_bits(codec: FloatsCodec, data: st.DataObject) -> None:
    """Bits of any kind, taken apart as each kind: by the payload's first byte the encoder's choice is forced."""
    chunk = data.draw(st.binary(min_size=1, max_size=600))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_likeliest", lambda _: data.draw(st.sampled_from([1, 2, 3])))
        out = memoryview(bytearray(len(chunk) + 200))
        size = codec.encode(memoryview(chunk), out)
    assert size is not None
    decoded = bytearray(len(chunk))
    codec.decode(out[:size], memoryview(decoded))
    assert decoded == chunk


def test_the_pages_example() -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "floats.md").read_text(encoding="utf-8")
    (payload,) = re.findall(r"^    ([0-9a-f ]+)$", page, re.MULTILINE)
    chunk = bytearray(6)
    make_floats_codec({}, ANY_CHUNKS).decode(memoryview(bytes.fromhex(payload)), memoryview(chunk))
    assert chunk == bytes.fromhex("803f 20c0 0000")
    values = np.frombuffer(chunk, "<u2").astype(np.uint32) << 16
    assert values.view(np.float32).tolist() == [1.0, -2.5, 0.0]


def test_options_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="level"):
        make_floats_codec({"level": 3}, ANY_CHUNKS)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'kv-codecs\[zstd\]'"):
        make_floats_codec({}, ANY_CHUNKS)
