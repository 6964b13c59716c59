"""Approximations from first parts, through real tiers: a quarter is read, and nothing of it is taken for exact."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_codecs.floats import FloatsCodec
from kv_codecs.progressive import ProgressiveCodec
from kv_connect.open_cache import Format, open_remote, workers_of
from kv_core.clock import HandClock
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, Stored
from kv_core.service import ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_remote.redis import make_redis_tier
from kv_remote.shared_fs import make_shared_fs_tier
from kv_testing.faults import FaultyTier
from kv_testing.redis_servers import VALKEY, end_all, running
from kv_testing.wait import until
from kv_tiers import HostConfig, build, build_local_cache, chunk_header
from kv_tiers.approximate import exact_fingerprint, fingerprint_above
from kv_tiers.build import build_lane
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.upgrade import Upgrades
from kv_tiers.codec import Codec
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for
from kv_tiers.settings import load as load_settings
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, Tier, TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.dram import DramTier

RECORDED = (Path(__file__).parent / "recorded" / "smollm2.bfloat16").read_bytes()
CONTEXT = TierContext(len(RECORDED), slot_bytes_for(len(RECORDED)), "approximations")
FORM = chunk_header.format_id(CONTEXT.fingerprint)
CODECS: dict[str, Codec] = {codec.name: codec for codec in (ProgressiveCodec(), FloatsCodec())}
KEYS = key_chain(3)
_NUMBERS = itertools.count()


def disk(path: Path) -> Tier:
    config = DiskConfig(directory=str(path), capacity_bytes=bytes_for(CONTEXT, 8), durability="process")
    return DiskTier(config, CONTEXT, LruPolicy())


def dram(path: Path) -> Tier:
    return DramTier(HostPool.anonymous("approximations", CONTEXT.chunk_bytes, 8), LruPolicy())


def shared_fs(path: Path) -> Tier:
    return make_shared_fs_tier({"directory": str(path)}, CONTEXT)


def valkey(path: Path) -> Tier:
    options = {"url": f"unix://{running('valkey', VALKEY).unix}", "prefix": f"approximate{next(_NUMBERS)}"}
    return make_redis_tier(options, CONTEXT)


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(params=[disk, dram, shared_fs, valkey])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["CountingTier"]:
    make: Callable[[Path], Tier] = request.param
    made = CountingTier(make(tmp_path))
    yield made
    made.close()


class CountingTier(FaultyTier):
    """Knows how many bytes of payloads it has brought."""

    brought_bytes = 0

    def _counted(self, outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
        self.brought_bytes += sum(one.nbytes for one in outcomes if isinstance(one, Loaded))
        return outcomes

    def load(self, reads: list[Read]) -> list[LoadOutcome]:  # type: ignore[override]
        return self._counted(super().load(reads))

    def load_prefixes(self, reads: list[Read]) -> list[LoadOutcome]:  # type: ignore[override]
        return self._counted(super().load_prefixes(reads))


def store(tier: Tier, keys: list[ChunkKey], codec: Codec | None) -> None:
    lane = Lane(tier, FORM, codec=codec, threads=0)
    outgoing, outcomes = [], list[object]()
    for key in keys:
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[: len(RECORDED)] = RECORDED
        outgoing.append(Outgoing(key, None, pages, len(RECORDED)))
    assert lane.store(outgoing, outcomes.extend)
    assert lane.step()
    assert outcomes == [Stored()] * len(keys)


def load(
    tier: Tier, keys: list[ChunkKey], *, approximate: bool = True, divisor: int | None = None
) -> tuple[list[LoadOutcome], list[bytes], Lane]:
    lane = Lane(tier, FORM, find_codec=CODECS.__getitem__, approximate=approximate, threads=0)
    reads = [
        Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), len(RECORDED))
        for key in keys
    ]
    arrivals: list[Arrival] = []
    assert lane.load(reads, arrivals.extend, divisor=divisor)
    assert lane.step()
    return [arrival.outcome for arrival in arrivals], [bytes(read.room) for read in reads], lane


def expected(parts: int = 1) -> bytes:
    payload, decoded = memoryview(bytearray(len(RECORDED))), bytearray(len(RECORDED))
    assert ProgressiveCodec().encode(memoryview(RECORDED), payload)
    assert ProgressiveCodec().decode_prefix(payload[: parts * len(RECORDED) // 4], memoryview(decoded)) == parts
    return bytes(decoded)


def test_a_quarter_is_read_and_decodes_to_the_approximation(tier: CountingTier) -> None:
    store(tier, KEYS, CODECS["progressive"])
    outcomes, chunks, lane = load(tier, KEYS)
    assert outcomes == [Loaded(len(RECORDED))] * 3
    assert chunks == [expected()] * 3
    assert expected() != RECORDED
    assert tier.brought_bytes == 3 * len(RECORDED) / 4
    assert (lane.counts().loaded, lane.counts().approximate) == (3, 3)


def test_a_half_is_read_where_that_much_is_wanted_and_decodes_to_two_parts(tier: CountingTier) -> None:
    store(tier, KEYS, CODECS["progressive"])
    outcomes, chunks, lane = load(tier, KEYS, divisor=2)
    assert outcomes == [Loaded(len(RECORDED))] * 3
    assert chunks == [expected(2)] * 3
    assert expected(2) not in (expected(1), RECORDED)
    assert tier.brought_bytes == 3 * len(RECORDED) / 2
    assert lane.counts().approximate == 3
    outcomes, chunks, lane = load(tier, KEYS, divisor=1)
    assert chunks == [RECORDED] * 3
    assert lane.counts().approximate == 0


def test_what_a_load_would_take_is_known_for_every_share_with_its_decoding() -> None:
    """From quarters alone, of a medium that takes a second for each 100 bytes read and each 800 bytes decoded."""
    clock = HandClock()
    for approximate in (True, False):
        tier = DramTier(HostPool.anonymous("measured", CONTEXT.chunk_bytes, 8), LruPolicy())
        lane = Lane(tier, FORM, find_codec=CODECS.__getitem__, approximate=approximate, threads=0, clock=clock)
        assert lane.load_s(800) is None
        for number in range(40):
            nbytes = 800 * (1 + number % 5)
            lane._speed.began(number, nbytes, clock.now_s(), 4)
            clock.advance(nbytes / 400)
            lane._speed.was_read(number, nbytes // 4, clock.now_s())
            clock.advance(nbytes / 800)
            lane._speed.ended(number, clock.now_s(), loaded=True, stored_bytes=nbytes * 3 // 4)
        assert lane.divisors == ((1, 2, 4) if approximate else (1,))
        link_s, decode_s = {4: 2.0, 2: 4.0, 1: 6.0}, {4: 1.0, 2: 2**0.5, 1: 2.0}
        for divisor in lane.divisors:
            assert lane.load_s(800, divisor) == pytest.approx(link_s[divisor] + decode_s[divisor], rel=0.05)
            ten_loads_s = 10 * link_s[divisor] + decode_s[divisor]  # the others decode while the next are read
            assert lane.load_s(8000, divisor, 800) == pytest.approx(ten_loads_s, rel=0.05)
        assert lane.load_s(800) == lane.load_s(800, lane.divisors[-1])
        lane.close()


def test_chunks_that_are_decoded_come_in_loads_of_4_mib_once_that_is_known(tier: CountingTier) -> None:
    """So that one is decoded while the next is read."""
    wanted = 32 << 20
    for keys, codec, batch_bytes in ((KEYS[:1], None, wanted), (KEYS[1:2], CODECS["floats"], 4 << 20)):
        store(tier, keys, codec)
        _, _, lane = load(tier, keys, approximate=False)
        assert lane.batch_bytes(wanted) == batch_bytes
        assert lane.batch_bytes(1 << 20) == 1 << 20


def test_a_cache_that_did_not_ask_for_approximations_gets_every_bit(tier: CountingTier) -> None:
    store(tier, KEYS, CODECS["progressive"])
    outcomes, chunks, lane = load(tier, KEYS, approximate=False)
    assert outcomes == [Loaded(len(RECORDED))] * 3
    assert chunks == [RECORDED] * 3
    assert lane.counts().approximate == 0


def test_what_has_no_first_part_is_read_whole(tier: CountingTier) -> None:
    store(tier, KEYS[:1], None)
    store(tier, KEYS[1:2], CODECS["floats"])
    outcomes, chunks, lane = load(tier, KEYS)
    assert outcomes == [Loaded(len(RECORDED))] * 2 + [Absent()]
    assert chunks[:2] == [RECORDED] * 2
    assert (lane.counts().loaded, lane.counts().approximate, lane.counts().absent) == (2, 0, 1)


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap"])
def test_a_first_part_that_is_damaged_is_a_miss_and_discarded(tier: CountingTier, fault: str) -> None:
    store(tier, KEYS, CODECS["progressive"])
    tier.fault = fault  # type: ignore[assignment]
    outcomes, _, lane = load(tier, KEYS[:2])
    assert all(isinstance(outcome, Damaged) for outcome in outcomes)
    assert lane.counts().approximate == 0
    tier.fault = ""
    while lane.step():
        pass
    assert tier.holds(KEYS) == [False, False, True]


def test_a_codec_that_is_not_installed_is_a_miss_and_the_chunk_stays(tier: CountingTier) -> None:
    store(tier, KEYS[:1], CODECS["progressive"])

    def missing(name: str) -> Codec:
        raise ConfigError(name)

    lane = Lane(tier, FORM, find_codec=missing, approximate=True, threads=0)
    arrivals: list[Arrival] = []
    pages = aligned_pages(CONTEXT.slot_bytes)
    assert lane.load([Read(KEYS[0], bytearray(chunk_header.HEADER_BYTES), pages, len(RECORDED))], arrivals.extend)
    while lane.step():
        pass
    assert [arrival.outcome for arrival in arrivals] == [Absent()]
    assert tier.holds(KEYS[:1]) == [True]


READING = {"type": "dram", "capacity_bytes": "4MiB", "approximate": True, "write": "never"}
SMALL = HostConfig(capacity_bytes=4 << 20)


def test_fingerprints() -> None:
    above = fingerprint_above([READING], "f")
    assert above != "f"
    assert fingerprint_above([READING], above) == above
    assert exact_fingerprint(above) == "f" == exact_fingerprint("f")
    assert fingerprint_above([{"type": "dram"}], "f") == "f"


@pytest.fixture
def unupgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read in part stays as it is, so that it can be looked at."""
    monkeypatch.setattr(Upgrades, "_begin", lambda self, tier: self._wanted[tier].clear())


@pytest.mark.usefixtures("unupgraded")
def test_a_cache_reads_approximations_of_what_an_exact_one_stored(tmp_path: Path) -> None:
    """The exact one's chunks are found, by the exact fingerprint; what was read never goes down as exact."""
    tier = {"type": "shared_fs", "directory": str(tmp_path)}
    exact = cache_over([tier | {"codec": "progressive"}])
    lease = exact.begin_store(KEYS[:1], "w")
    chunk_in(exact, lease)[:] = RECORDED
    exact.commit(lease)
    until(lambda: exact.lower.states()[0].lane.stored == 1)
    exact.close()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for options, chunk in (({"approximate": True, "write": "never"}, expected()), ({}, RECORDED)):
        cache = cache_over([tier | options])
        until(lambda cache=cache: cache.lookup(KEYS[:1], "r", wait_for_promotion=True).chunks == 1)  # type: ignore[misc]
        read = cache.load(KEYS[:1], "r")
        assert isinstance(read, ReadLease)
        assert bytes(chunk_in(cache, read)) == chunk
        cache.release(read)
        lane = cache.lower.states()[0].lane
        assert lane.approximate == (lane.loaded if options else 0)  # what measures the tier at the start loads, too
        cache.close()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.usefixtures("unupgraded")
def test_what_a_quick_link_pays_for_is_read_whole(tmp_path: Path) -> None:
    """With an engine whose computing takes far longer than any load; before it is known, a quarter."""
    tier = {"type": "shared_fs", "directory": str(tmp_path)}
    keys = key_chain(6)
    exact = cache_over([tier | {"codec": "progressive"}])
    lease = exact.begin_store(keys, "w")
    for extent in lease.extents:
        exact.pool.view[extent.offset : extent.offset + len(RECORDED)] = RECORDED
    exact.commit(lease)
    until(lambda: exact.lower.states()[0].lane.stored == len(keys))
    exact.close()
    cache = cache_over([tier | {"approximate": True, "write": "never"}])
    for chunks in range(1, len(keys) + 1):
        costs = Costs(compute=(1e3, 0.0)) if chunks == len(keys) else None

        def found(chunks: int = chunks, costs: Costs | None = costs) -> bool:
            plan = cache.lookup(keys[:chunks], f"r{chunks}", shape=ChunkShape(16), wait_for_promotion=True, costs=costs)
            return plan.chunks == chunks

        until(found)
    read = cache.load(keys, "r6")
    assert isinstance(read, ReadLease)
    brought = [bytes(cache.pool.view[one.offset : one.offset + len(RECORDED)]) for one in read.extents]
    assert brought == [expected()] * 5 + [RECORDED]
    cache.release(read)
    cache.close()


def cache_over(tiers: list[dict[str, object]]) -> LocalCache:
    return build_local_cache(
        SMALL, group_bytes=(len(RECORDED),), fingerprint=fingerprint_above(tiers, "f"), tiers=tiers
    )


def chunk_in(cache: LocalCache, lease: ReadLease | WriteLease) -> memoryview:
    (extent,) = lease.extents
    return cache.pool.view[extent.offset : extent.offset + len(RECORDED)]


def test_approximations_cannot_reach_a_tier_or_an_engine_that_did_not_allow_them() -> None:
    for tiers, fingerprint, message in (
        ([READING | {"write": "through"}], "f approximate", r"tiers\[0\].*write: never"),
        ([READING, {"type": "dram", "name": "other", "capacity_bytes": "4MiB"}], "f approximate", r"tiers\[1\]"),
        ([READING], "f", "for each engine to allow"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_local_cache(SMALL, group_bytes=(5000,), fingerprint=fingerprint, tiers=tiers)


def test_a_tier_that_reads_whole_chunks_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    whole = Whole()
    monkeypatch.setattr(build, "tier_factory", lambda name: lambda options, context: whole)
    with pytest.raises(ConfigError, match="reads whole chunks only"):
        build_lane(READING, CONTEXT, where="tiers[0]")
    assert whole.is_closed


@pytest.mark.parametrize("approximate", [True, False])
def test_a_private_server_has_approximations_and_one_that_engines_join_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, approximate: bool
) -> None:
    """Real servers. The exact fingerprint, of which keys are made, can be had from what workers registered."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = {"approximate": True, "write": "never"} if approximate else {}
    tiers = [{"type": "shared_fs", "directory": str(tmp_path / "kv"), **options}]
    own, _ = load_settings({"host": {"capacity_bytes": "4MiB"}, "tiers": tiers}, {})
    chunks = Format((len(RECORDED),), "f")
    remote, server = open_remote(own, chunks, engine_id="one", is_first=True, facts={"rank": "0"})
    try:
        (worker,) = workers_of(own, "one")
        assert worker.fingerprint == fingerprint_above(tiers, "f")
        assert exact_fingerprint(worker.fingerprint) == "f"
        assert server is not None
        joining, _ = load_settings({"server": {"socket": str(server.socket)}}, {})
        if approximate:
            with pytest.raises(ConfigError, match="for each engine to allow"):
                open_remote(joining, chunks, engine_id="two", is_first=True, facts={})
        else:
            open_remote(joining, chunks, engine_id="two", is_first=True, facts={})[0].close()
    finally:
        remote.close()
        if server is not None:
            server.stop()


def test_a_worker_of_a_private_server_keeps_what_it_reads_and_then_gets_the_exact_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process sees leases and no slots: where a chunk is after it was upgraded, each new lease says."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "4MiB"}
    exact = cache_over([disk | {"codec": "progressive"}])
    lease = exact.begin_store(KEYS[:1], "w")
    chunk_in(exact, lease)[:] = RECORDED
    exact.commit(lease)
    until(lambda: exact.lower.states()[0].lane.stored == 1)
    exact.close()
    tiers = [disk | {"approximate": True, "write": "never"}]
    own, _ = load_settings({"host": {"capacity_bytes": "4MiB"}, "tiers": tiers}, {})
    chunks = Format((len(RECORDED),), "f")
    remote, server = open_remote(own, chunks, engine_id="one", is_first=True, facts={"rank": "0"})
    try:

        def found() -> bytes:
            read = remote.load(KEYS[:1], "r")
            assert isinstance(read, ReadLease)
            (extent,) = read.extents
            view = remote.pool.view
            chunk = bytes(view[extent.offset : extent.offset + extent.nbytes])
            assert bytes(view[extent.offset : extent.offset + extent.nbytes]) == chunk
            assert remote.release(read)
            return chunk

        until(lambda: remote.lookup(KEYS[:1], "r", wait_for_promotion=True).chunks == 1)
        assert found() in (expected(), RECORDED)
        remote.end("r")
        until(lambda: found() == RECORDED)
    finally:
        remote.close()
        if server is not None:
            server.stop()


def test_a_cache_that_is_not_approximate_does_not_have_the_name_of_one(tmp_path: Path) -> None:
    """Its tiers would take the mark off, and store its chunks where exact ones are."""
    tiers = [{"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": 1 << 20}]
    for below in (tiers, []):
        with pytest.raises(ConfigError, match="is that of a cache that may hold approximations"):
            build_local_cache(
                HostConfig(capacity_bytes=1 << 20), group_bytes=(4096,), fingerprint="f approximate", tiers=below
            )
    assert not (tmp_path / "disk").exists()
