"""Chunks that a full tier has cut, through lanes and caches: approximations where they are allowed, and only there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from kv_codecs.progressive import ProgressiveCodec
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.wait import until
from kv_tiers import HostConfig, build_local_cache, chunk_header
from kv_tiers.approximate import fingerprint_above
from kv_tiers.build import build_lane, check_settings
from kv_tiers.cache.local import LocalCache
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, Tier, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.disk_files import bytes_in_files
from kv_tiers.tiers.dram import DramTier

RECORDED = (Path(__file__).parent / "recorded" / "smollm2.bfloat16").read_bytes()
CONTEXT = TierContext(len(RECORDED), slot_bytes_for(len(RECORDED)), "cut")
FORM = chunk_header.format_id(CONTEXT.fingerprint)
CODEC = ProgressiveCodec()
KEYS = [key for branch in range(12) for key in key_chain(1, branch=str(branch))]


def disk(path: Path, when_full: Literal["drop_chunks", "drop_parts"] = "drop_parts") -> DiskTier:
    config = DiskConfig(
        directory=str(path), capacity_bytes=bytes_for(CONTEXT, 2), durability="process", when_full=when_full
    )
    return DiskTier(config, CONTEXT, LruPolicy())


def dram(path: Path) -> DramTier:
    return DramTier(HostPool.anonymous("cut", CONTEXT.chunk_bytes, 2), LruPolicy(), drops_parts=True)


@pytest.fixture(params=[disk, dram])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    make: Callable[[Path], Tier] = request.param
    made = make(tmp_path)
    yield made
    made.close()


def store(tier: Tier, keys: list[ChunkKey]) -> None:
    lane = Lane(tier, FORM, codec=CODEC, threads=0)
    for key in keys:
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[: len(RECORDED)] = RECORDED
        assert lane.store([Outgoing(key, None, pages, len(RECORDED))], lambda outcomes: None)
        assert lane.step()


def load(
    tier: Tier, keys: list[ChunkKey], divisor: int, *, exact: bool = False, as_stored: bool = False
) -> tuple[list[LoadOutcome], list[bytes], Lane]:
    allows = not exact
    lane = Lane(tier, FORM, find_codec=lambda name: CODEC, approximate=allows, drops_parts=allows, threads=0)
    reads = [
        Read(
            key,
            bytearray(chunk_header.HEADER_BYTES),
            aligned_pages(CONTEXT.slot_bytes),
            len(RECORDED),
            as_stored=as_stored,
        )
        for key in keys
    ]
    arrivals: list[Arrival] = []
    assert lane.load(reads, arrivals.extend, divisor=divisor)
    while lane.step():
        pass
    return [arrival.outcome for arrival in arrivals], [bytes(read.room) for read in reads], lane


def decoded(parts: int) -> bytes:
    payload, out = memoryview(bytearray(len(RECORDED))), bytearray(len(RECORDED))
    assert CODEC.encode(memoryview(RECORDED), payload)
    assert CODEC.decode_prefix(payload[: parts * len(RECORDED) // 4], memoryview(out)) == parts
    return bytes(out)


BY_PARTS = {RECORDED: 3, decoded(2): 2, decoded(1): 1}


def parts_of(tier: Tier) -> dict[ChunkKey, int]:
    """By key that is held: how many parts there are, by what they decode to."""
    held = [key for key, here in zip(KEYS, tier.holds(KEYS), strict=True) if here]
    outcomes, chunks, _ = load(tier, held, 1)
    assert outcomes == [Loaded(len(RECORDED))] * len(held)
    return {key: BY_PARTS[chunk] for key, chunk in zip(held, chunks, strict=True)}


@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_what_is_left_is_decoded_and_never_more_than_was_wanted(tier: Tier, divisor: int) -> None:
    seen = set()
    for last in range(3, 9):
        store(tier, KEYS[last - 1 : last] if last > 3 else KEYS[:3])
        parts = parts_of(tier)
        seen |= set(parts.values())
        outcomes, chunks, lane = load(tier, list(parts), divisor)
        assert outcomes == [Loaded(len(RECORDED))] * len(parts)
        wanted = {1: 3, 2: 2, 4: 1}[divisor]
        assert [BY_PARTS[chunk] for chunk in chunks] == [min(wanted, have) for have in parts.values()]
        assert lane.counts().approximate == sum(min(wanted, have) < 3 for have in parts.values())
        assert tier.usage().cut_chunks == sum(have < 3 for have in parts.values())
    assert seen == {1, 2, 3}


def test_a_lane_that_wants_exact_chunks_takes_what_was_cut_for_damage(tier: Tier) -> None:
    """Only if it is put before a tier that drops parts, which settings do not allow; and then it is a miss."""
    store(tier, KEYS[:6])
    parts = parts_of(tier)
    outcomes, chunks, _ = load(tier, list(parts), 1, exact=True)
    for have, outcome, chunk in zip(parts.values(), outcomes, chunks, strict=True):
        if have == 3:
            assert outcome == Loaded(len(RECORDED)) and chunk == RECORDED
        else:
            assert isinstance(outcome, Damaged)
    assert set(parts.values()) > {3}
    assert [key for key, held in zip(KEYS, tier.holds(KEYS), strict=True) if held] == [
        key for key, have in parts.items() if have == 3
    ]


def test_payloads_that_were_cut_are_not_handed_on(tier: Tier) -> None:
    store(tier, KEYS[:6])
    parts = parts_of(tier)
    outcomes, _, _ = load(tier, list(parts), 1, as_stored=True)
    assert [outcome == Absent() for outcome in outcomes] == [have < 3 for have in parts.values()]
    assert parts_of(tier) == parts


def test_an_exact_reader_of_the_directory_finds_what_is_whole_and_stores_the_rest_again(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    store(tier, KEYS[:5])
    parts = parts_of(tier)
    tier.close()
    tier = disk(tmp_path, "drop_chunks")
    assert [key for key, held in zip(KEYS, tier.holds(KEYS), strict=True) if held] == [
        key for key, have in parts.items() if have == 3
    ]
    cut = next(key for key, have in parts.items() if have < 3)
    store(tier, [cut])
    outcomes, chunks, _ = load(tier, [cut], 1, exact=True)
    assert (outcomes, chunks) == ([Loaded(len(RECORDED))], [RECORDED])
    tier.close()


@pytest.mark.parametrize("at", [0, 5, 60, 383, 4096, 4096 + 40, 4096 + 3000, "last"])
def test_a_bit_flipped_in_what_is_left_is_found_and_behind_it_does_not_matter(tmp_path: Path, at: int | str) -> None:
    tier = disk(tmp_path)
    store(tier, KEYS[:5])
    key = next(key for key, have in parts_of(tier).items() if have < 3)
    (entry,) = tier._index.begin_load([key], touch=False)
    assert entry is not None
    extent = tier._index.extent(entry)
    segments = tier._chunks.segments(entry, extent.units, bytes_in_files(extent.stored_bytes))
    tier._index.end_load([entry])
    wanted = 4096 + extent.stored_bytes - 1 if isinstance(at, str) else at
    places = [(file, offset + byte) for file, offset, nbytes in segments for byte in range(nbytes)]
    file, place = places[wanted]
    with file.path.open("r+b") as slab:
        slab.seek(place)
        (byte,) = slab.read(1)
        slab.seek(place)
        slab.write(bytes([byte ^ 1]))
    outcomes, _, _ = load(tier, [key], 1)
    assert isinstance(outcomes[0], Damaged)
    assert tier.holds([key]) == [False]
    tier.close()


# Caches.

OWN: dict[str, object] = {"type": "disk", "codec": "progressive", "approximate": True, "when_full": "drop_parts"}
SMALL = HostConfig(capacity_bytes=8 << 20)


def cache_over(*tiers: dict[str, object]) -> LocalCache:
    fingerprint = fingerprint_above(tiers, "f")
    return build_local_cache(SMALL, group_bytes=(len(RECORDED),), fingerprint=fingerprint, tiers=tiers)


def put(cache: LocalCache, key: ChunkKey) -> None:
    stored = cache.lower.states()[0].lane.stored
    lease = cache.begin_store([key], "w")
    (extent,) = lease.extents
    cache.pool.view[extent.offset : extent.offset + len(RECORDED)] = RECORDED
    cache.commit(lease)
    until(lambda: cache.lower.states()[0].lane.stored > stored)


def found(cache: LocalCache, key: ChunkKey) -> bool:
    return cache.lookup([key], key.hex(), wait_for_promotion=True).chunks == 1


def read(cache: LocalCache, key: ChunkKey) -> bytes | None:
    """None: a miss."""
    until(lambda: found(cache, key) or not is_held(cache, key))
    lease = cache.load([key], key.hex())
    if not isinstance(lease, ReadLease) or not lease.extents:
        return None
    (extent,) = lease.extents
    chunk = bytes(cache.pool.view[extent.offset : extent.offset + len(RECORDED)])
    cache.release(lease)
    return chunk


def is_held(cache: LocalCache, key: ChunkKey) -> bool:
    """By the disk tier."""
    return cache.lower.locate([key]) == ["disk"]


def test_a_small_disk_serves_twice_as_many_chunks_where_it_may_drop_parts(tmp_path: Path) -> None:
    """Real caches with a real disk tier: the same capacity, the same chunks, and a restart."""
    served = {}
    for name, options in (("chunks", {"codec": "progressive"}), ("parts", OWN)):
        tier = {"type": "disk", "directory": str(tmp_path / name), "capacity_bytes": bytes_for(CONTEXT, 2), **options}
        cache = cache_over(tier)
        for key in KEYS:
            put(cache, key)
        cache.close()
        cache = cache_over(tier)
        chunks = [chunk for key in KEYS if (chunk := read(cache, key)) is not None]
        served[name] = len(chunks)
        state = cache.lower.states()[0]
        assert state.usage.chunks == len(chunks)
        if name == "chunks":
            assert set(chunks) == {RECORDED}
            assert state.usage.cut_chunks == 0
        else:
            assert set(chunks) <= set(BY_PARTS) and chunks.count(decoded(1)) > len(chunks) // 2
            assert state.usage.cut_chunks > len(chunks) // 2
        cache.close()
    assert served["parts"] >= 2 * served["chunks"]


def test_an_exact_cache_never_meets_the_chunks_of_one_that_drops_parts(tmp_path: Path) -> None:
    """Whether they were cut or not: what was computed behind an approximation is none of its either."""
    place: dict[str, object] = {"directory": str(tmp_path), "capacity_bytes": bytes_for(CONTEXT, 2)}
    cache = cache_over(OWN | place)
    for key in KEYS[:6]:
        put(cache, key)
    cache.close()
    exact = cache_over({"type": "disk", "codec": "progressive", **place})
    assert exact.lower.states()[0].usage.chunks == 0
    assert [read(exact, key) for key in KEYS[:6]] == [None] * 6
    put(exact, KEYS[0])
    exact.close()
    cache = cache_over(OWN | place)
    assert cache.lower.states()[0].usage.chunks == len([key for key in KEYS if is_held(cache, key)]) > 2
    cache.close()


def test_a_tier_of_its_own_above_exact_chunks_that_others_stored(tmp_path: Path) -> None:
    """The cache writes where it may drop parts, and reads first parts of exact chunks where it must not write."""
    shared: dict[str, object] = {"type": "shared_fs", "directory": str(tmp_path / "shared")}
    (tmp_path / "shared").mkdir()
    exact = cache_over(shared | {"codec": "progressive"})
    put(exact, KEYS[0])
    exact.close()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    own = OWN | {"directory": str(tmp_path / "own"), "capacity_bytes": bytes_for(CONTEXT, 2)}
    cache = cache_over(own, shared | {"approximate": True, "write": "never"})
    put(cache, KEYS[1])
    until(lambda: found(cache, KEYS[0]))
    assert read(cache, KEYS[0]) in BY_PARTS
    cache.close()
    assert {path: path.read_bytes() for path in files} == files
    assert {path for path in (tmp_path / "shared").rglob("*") if path.is_file()} == files.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"approximate": False}, r"tiers\[0\].*approximate: true"),
        ({"write": "never"}, r"tiers\[0\].*never full"),
    ],
)
def test_settings_that_leave_parts_for_nobody_are_refused_before_anything_is_opened(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    tier = OWN | {"directory": str(tmp_path / "kv"), "capacity_bytes": "1GiB"} | options
    with pytest.raises(ConfigError, match=message):
        cache_over(tier)
    with pytest.raises(ConfigError, match=message):
        check_settings(SMALL, [tier])
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("codec", ["", "floats", "zstd"])
def test_a_codec_without_parts_is_refused(tmp_path: Path, codec: str) -> None:
    tier = OWN | {"directory": str(tmp_path / "kv"), "capacity_bytes": "1GiB", "codec": codec}
    with pytest.raises(ConfigError, match=r"tiers\[0\].*codec: progressive"):
        build_lane(tier, CONTEXT, where="tiers[0]")
    with pytest.raises(ConfigError, match=r"tiers\[0\].*codec: progressive"):
        check_settings(SMALL, [tier])
    assert not (tmp_path / "kv").exists()


def test_a_second_tier_that_is_written_must_drop_parts_too(tmp_path: Path) -> None:
    own = OWN | {"directory": str(tmp_path / "kv"), "capacity_bytes": bytes_for(CONTEXT, 2)}
    with pytest.raises(ConfigError, match=r"tiers\[1\].*write: never"):
        cache_over(own, {"type": "dram", "capacity_bytes": "4MiB"})
