"""Codecs, and what a lane makes of them: chunks of any size and compressibility come back, and damage never does."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_codecs.zstd import make_zstd_codec
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Stored
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_remote.shared_fs import make_shared_fs_tier
from kv_testing.faults import FaultyTier
from kv_tiers import chunk_header
from kv_tiers.build import build_lane
from kv_tiers.codec import Codec, CodecError
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for
from kv_tiers.testing.codec_contract import CodecContract
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import ANY_CHUNKS, Read, Tier, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.dram import DramTier

CHUNK_BYTES = 300_000
CONTEXT = TierContext(CHUNK_BYTES, slot_bytes_for(CHUNK_BYTES), "codecs")
FORM = chunk_header.format_id(CONTEXT.fingerprint)
ZSTD = make_zstd_codec({}, CONTEXT)


class TestZstd(CodecContract):
    def make(self) -> Codec:
        return make_zstd_codec({}, ANY_CHUNKS)

    def test_a_frame_that_is_small_and_says_that_it_is_huge_costs_nothing(self) -> None:
        import zstandard

        bomb = zstandard.ZstdCompressor(19).compress(bytes(1 << 28))
        assert len(bomb) < 50_000
        with pytest.raises(CodecError):
            self.decode(bomb, 50_000)
        window = zstandard.ZstdCompressionParameters.from_level(19, window_log=27)
        wide = zstandard.ZstdCompressor(compression_params=window).compressobj().compress(b"") + bomb[:9]
        with pytest.raises(CodecError):
            self.decode(wide, 50_000)

    def test_levels_are_decoded_by_all(self) -> None:
        chunk = self.chunk()
        for level in (-5, 1, 19):
            self.codec = make_zstd_codec({"level": level}, ANY_CHUNKS)
            encoded = self.encoded(chunk)
            self.codec = self.make()
            assert self.decode(encoded, len(chunk)) == chunk
        for level in (0, 20, -101):
            with pytest.raises(ConfigError, match="write 1 to 19"):
                make_zstd_codec({"level": level}, ANY_CHUNKS)

    def test_without_its_library_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(ConfigError, match=r"pip install 'kv-codecs\[zstd\]'"):
            make_zstd_codec({}, ANY_CHUNKS)


class Rounding:
    """Lossy: keeps the upper four bits of each byte."""

    name = "rounding"
    is_lossless = False

    def encode(self, chunk: memoryview, out: memoryview) -> int | None:
        if len(out) < len(chunk) // 2:
            return None
        out[: len(chunk) // 2] = bytes(chunk[at] & 0xF0 | chunk[at + 1] >> 4 for at in range(0, len(chunk), 2))
        return len(chunk) // 2

    def decode(self, payload: memoryview, out: memoryview) -> None:
        if 2 * len(payload) != len(out):
            raise CodecError("another size")
        out[::2] = bytes(byte & 0xF0 for byte in payload)
        out[1::2] = bytes(byte << 4 & 0xF0 for byte in payload)


class TestALossyCodec(CodecContract):
    def make(self) -> Codec:
        return Rounding()

    def assert_alike(self, chunk: bytes, decoded: bytes) -> None:
        assert decoded == bytes(byte & 0xF0 for byte in chunk)


def dram(path: Path) -> Tier:
    return DramTier(HostPool.anonymous("codecs", CHUNK_BYTES, 8), LruPolicy())


def disk(path: Path) -> Tier:
    config = DiskConfig(directory=str(path), capacity_bytes=bytes_for(CONTEXT, 8), durability="process")
    return DiskTier(config, CONTEXT, LruPolicy())


def shared_fs(path: Path) -> Tier:
    return make_shared_fs_tier({"directory": str(path)}, CONTEXT)


class Box:
    """A lane that works when it is told to, and whose codec may be changed."""

    def __init__(self, tier: Tier) -> None:
        self.tier = FaultyTier(tier)
        self.arrivals: dict[ChunkKey, Arrival] = {}
        self.reads: dict[ChunkKey, Read] = {}

    def lane(self, codec: Codec | None) -> Lane:
        codecs = {"zstd": ZSTD, "rounding": Rounding()}

        def find(name: str) -> Codec:
            if name not in codecs:
                raise ConfigError(f"no codec {name}")
            return codecs[name]

        return Lane(self.tier, FORM, codec=codec, find_codec=find, threads=0)

    def store(self, chunks: dict[ChunkKey, bytes], codec: Codec | None) -> None:
        lane, outcomes, outgoing = self.lane(codec), list[object](), []
        for key, data in chunks.items():
            pages = aligned_pages(CONTEXT.slot_bytes)
            pages[:CHUNK_BYTES] = data
            outgoing.append(Outgoing(key, None, pages, CHUNK_BYTES))
        assert lane.store(outgoing, outcomes.extend)
        while lane.step():
            pass
        assert outcomes == [Stored()] * len(chunks)

    def load(self, key: ChunkKey, lane: Lane | None = None) -> LoadOutcome:
        lane = lane or self.lane(None)
        read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), CHUNK_BYTES)

        def done(arrivals: list[Arrival]) -> None:
            self.arrivals |= {arrival.key: arrival for arrival in arrivals}

        assert lane.load([read], done)
        while lane.step():
            pass
        self.reads[key] = read
        return self.arrivals[key].outcome

    def header(self, key: ChunkKey) -> chunk_header.Header:
        read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), CHUNK_BYTES)
        self.tier.load([read])
        header = chunk_header.read_header(read.header)
        assert isinstance(header, chunk_header.Header)
        return header


@pytest.fixture(params=[dram, disk, shared_fs])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Box]:
    make: Callable[[Path], Tier] = request.param
    made = Box(make(tmp_path))
    yield made
    made.tier.close()


def partly_noise(key: ChunkKey, noise_bytes: int) -> bytes:
    return random.Random(key).randbytes(noise_bytes).ljust(CHUNK_BYTES, b"\7")


KEYS = key_chain(5)


def test_chunks_of_several_codecs_lie_side_by_side_and_all_come_back(box: Box) -> None:
    plain, packed, noise = (partly_noise(KEYS[at], size) for at, size in enumerate((1000, 60_000, CHUNK_BYTES)))
    box.store({KEYS[0]: plain}, None)
    box.store({KEYS[1]: packed, KEYS[2]: noise}, ZSTD)
    box.store({KEYS[3]: plain}, Rounding())
    assert [box.header(key).codec for key in KEYS[:4]] == ["", "zstd", "", "rounding"]
    assert 60_000 < box.header(KEYS[1]).stored_bytes < 61_000
    for key, data in zip(KEYS, (plain, packed, noise), strict=False):
        assert box.load(key) == Loaded(CHUNK_BYTES)
        assert bytes(box.reads[key].room) == data
        assert box.arrivals[key].checksum == checksum_of(memoryview(data))
    assert box.load(KEYS[3]) == Loaded(CHUNK_BYTES)
    assert box.header(KEYS[3]).decoded_checksum is None
    decoded = bytes(byte & 0xF0 for byte in plain)
    assert bytes(box.reads[KEYS[3]].room) == decoded
    assert box.arrivals[KEYS[3]].checksum == checksum_of(memoryview(decoded))


@given(st.lists(st.integers(0, CHUNK_BYTES), min_size=1, max_size=5), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_chunks_are_like_they_come_back(box: Box, noise: list[int], again: bool) -> None:
    chunks = {key: partly_noise(key, size) for key, size in zip(KEYS, noise, strict=False)}
    box.tier.discard(KEYS)
    box.store(chunks, ZSTD)
    if again:
        box.tier.discard(list(chunks)[::2])
        box.store(chunks, None)
    for key, data in chunks.items():
        assert box.load(key) == Loaded(CHUNK_BYTES)
        assert bytes(box.reads[key].room) == data


@pytest.mark.parametrize("fault", ["truncate", "flip"])
def test_damage_is_found_before_anything_is_decoded(box: Box, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box.store({KEYS[0]: partly_noise(KEYS[0], 50_000)}, ZSTD)
    monkeypatch.setattr(ZSTD, "decode", None)
    box.tier.fault = "flip" if fault == "flip" else "truncate"
    assert isinstance(box.load(KEYS[0]), Damaged)
    box.tier.fault = ""
    assert box.tier.holds(KEYS[:1]) == [False]


def test_a_codec_that_is_not_installed_is_a_miss_a_line_in_the_log_and_the_chunk_stays(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    box.store({KEYS[0]: partly_noise(KEYS[0], 50_000)}, ZSTD)
    without = Lane(box.tier, FORM, threads=0)
    assert box.load(KEYS[0], without) == Absent()
    assert "there is no codec 'zstd' here" in caplog.text
    assert box.load(KEYS[0]) == Loaded(CHUNK_BYTES)


def test_what_decodes_to_another_chunk_is_damage(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.store({KEYS[0]: partly_noise(KEYS[0], 50_000)}, ZSTD)
    real = ZSTD.decode

    def decode(payload: memoryview, out: memoryview) -> None:
        real(payload, out)
        out[7] ^= 1

    monkeypatch.setattr(ZSTD, "decode", decode)
    outcome = box.load(KEYS[0])
    assert isinstance(outcome, Damaged)
    assert "different bytes" in outcome.reason


def test_the_settings_of_a_tier_name_its_codec() -> None:
    options = {"type": "dram", "capacity_bytes": "4MiB"}
    lane, _ = build_lane(options | {"codec": {"type": "zstd", "level": 3}}, CONTEXT, where="tiers[0]")
    lane.close()
    for codec, message in (
        ("zst", "no codec 'zst'; did you mean 'zstd'"),
        ({"level": 3}, "say which, such as codec: zstd"),
        ({"type": "zstd", "levle": 3}, "did you mean 'level'"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_lane(options | {"codec": codec}, CONTEXT, where="tiers[0]")
