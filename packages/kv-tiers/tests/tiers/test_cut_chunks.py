"""A tier that drops parts: what it cuts and in which order, what is left, and what restarts and readers make of it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Stored
from kv_core.testing import key_chain
from kv_eviction.parts import PartsPolicy
from kv_eviction.registry import make_policy
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, Tier, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for
from kv_tiers.tiers.dram import DramTier
from kv_tiers.tiers.index import ExtentIndex
from kv_tiers.tiers.space import Geometry

WHOLE = 64 << 10
HALF, QUARTER = WHOLE // 2, WHOLE // 4
CONTEXT = TierContext(WHOLE, WHOLE, "cut")
FORMAT = chunk_header.format_id("cut")
KEYS = [key for branch in range(24) for key in key_chain(1, branch=str(branch))]
SLOTS = 3
WhenFull = Literal["drop_chunks", "drop_parts"]


def open_disk(path: Path, when_full: WhenFull = "drop_parts", policy: str = "lru") -> DiskTier:
    config = DiskConfig(
        directory=str(path),
        capacity_bytes=bytes_for(CONTEXT, SLOTS),
        durability="process",
        direct="never",
        when_full=when_full,
        wait_s=0.0,
    )
    return DiskTier(config, CONTEXT, make_policy(policy, 100))


def open_dram(drops_parts: bool = True) -> DramTier:
    return DramTier(HostPool.anonymous("cut", WHOLE, SLOTS), LruPolicy(), drops_parts=drops_parts)


@pytest.fixture(params=["disk", "dram"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    made = open_disk(tmp_path) if request.param == "disk" else open_dram()
    yield made
    made.close()


def write_of(key: ChunkKey, stored_bytes: int, parent: ChunkKey | None = None) -> Write:
    """A chunk with a payload of this size; of `WHOLE`, one that is stored as it is."""
    pages = aligned_pages(WHOLE)
    pages[:stored_bytes] = content(ChunkKey(stored_bytes.to_bytes(4, "big") + key), stored_bytes)
    checksum, pieces = chunk_header.checksums_of(pages[:stored_bytes], WHOLE)
    codec = "" if stored_bytes == WHOLE else "test"
    header = chunk_header.Header(key, parent, WHOLE, stored_bytes, FORMAT, codec, checksum, None, pieces)
    return Write(key, parent, chunk_header.make_header(header), pages, stored_bytes)


def left_of(tier: Tier, key: ChunkKey, wanted_bytes: int = WHOLE) -> int:
    """How many bytes of the payload a load brings, which verify; 0: the chunk is absent."""
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(WHOLE), wanted_bytes)
    (outcome,) = tier.load([read])
    if outcome == Absent():
        assert tier.holds([key]) == [False]
        return 0
    assert isinstance(outcome, Loaded)
    assert tier.holds([key]) == [True]
    found = chunk_header.verify_prefix(
        read.header, read.pages[: outcome.nbytes], key=key, format_id=FORMAT, decoded_bytes=WHOLE
    )
    assert isinstance(found, chunk_header.Header)
    return outcome.nbytes


def test_the_least_valuable_chunk_loses_its_last_part_first_and_none_leaves_before_all_have(tier: Tier) -> None:
    """Payloads of 11 pages: cut to 8, then to 4, before the oldest leaves."""
    stored = 11 * 4096
    seen = []
    for key in KEYS[:12]:
        assert tier.store([write_of(key, stored)]) == [Stored()]
        seen.append([left_of_quietly(tier, key) for key in KEYS[:12]])
    assert seen[2][:3] == [stored] * 3
    for before, after in itertools.pairwise(seen):
        for was, now in zip(before, after, strict=True):
            assert now in (was, HALF, QUARTER, 0) if was else now in (0, stored)
            assert now <= was or not was
    for number, now in enumerate(seen):
        kept = now[: number + 1]
        assert kept == sorted(kept), "a younger chunk has lost more than an older one"
        if 0 in kept:
            assert set(kept[:-1]) <= {0, QUARTER}, "a chunk left while others had parts to drop"
    last = seen[-1]
    usage = tier.usage()
    assert usage.cut_chunks == sum(size in (HALF, QUARTER) for size in last)
    assert usage.chunks == sum(map(bool, last)) > SLOTS * WHOLE // stored, "nothing was gained"


def left_of_quietly(tier: Tier, key: ChunkKey) -> int:
    """Like `left_of`, which does not count as a use."""
    assert isinstance(tier, DiskTier | DramTier)
    index = tier._index
    (entry,) = index.begin_load([key], touch=False)
    try:
        return 0 if entry is None else index.extent(entry).stored_bytes
    finally:
        index.end_load([entry])


def test_a_tier_that_drops_chunks_cuts_none(tmp_path: Path) -> None:
    for tier in (open_disk(tmp_path, "drop_chunks"), open_dram(drops_parts=False)):
        for key in KEYS:
            tier.store([write_of(key, HALF + 4096)])
        assert {left_of(tier, key) for key in KEYS} == {0, HALF + 4096}
        assert tier.usage().cut_chunks == 0
        tier.close()


def test_a_chunk_that_is_read_is_not_cut(tier: Tier) -> None:
    assert isinstance(tier, DiskTier | DramTier)
    tier.store([write_of(KEYS[0], 11 * 4096)])
    leased = tier._index.begin_load(KEYS[:1])
    for key in KEYS[1:12]:
        tier.store([write_of(key, 11 * 4096)])
    assert left_of_quietly(tier, KEYS[0]) == 11 * 4096
    tier._index.end_load(leased)
    assert left_of_quietly(tier, KEYS[1]) in (0, QUARTER)


def test_a_prompt_drops_its_own_parts_for_its_tail_but_none_of_its_chunks(tier: Tier) -> None:
    chain = key_chain(40, branch="long")
    stored = []
    for parent, key in zip([None, *chain], chain, strict=False):
        if tier.store([write_of(key, 11 * 4096, parent)]) != [Stored()]:
            break
        stored.append(key)
        assert all(left_of_quietly(tier, one) for one in stored)
    assert {left_of_quietly(tier, key) for key in stored[:-1]} == {QUARTER}
    assert len(stored) >= 2 * (SLOTS * WHOLE // (11 * 4096))


def test_chunks_that_are_stored_as_they_are_leave_after_all_others_were_cut(tier: Tier) -> None:
    tier.store([write_of(KEYS[0], WHOLE)])
    for key in KEYS[1:3]:
        tier.store([write_of(key, 11 * 4096)])
    tier.store([write_of(KEYS[3], 11 * 4096)])
    assert left_of_quietly(tier, KEYS[0]) == WHOLE
    for key in KEYS[4:20]:
        tier.store([write_of(key, 11 * 4096)])
    assert left_of_quietly(tier, KEYS[0]) == 0


SIZES = st.sampled_from([3 * 4096, 5 * 4096, 7 * 4096 + 11, 9 * 4096, 11 * 4096, 14 * 4096 + 1, WHOLE])


@dataclass
class Model:
    """What must be true of a tier, whatever was done: what each chunk had, and what was left of it when last seen."""

    stored: dict[ChunkKey, int] = field(default_factory=dict)
    left: dict[ChunkKey, int] = field(default_factory=dict)

    def see(self, tier: DiskTier, new: ChunkKey | None = None) -> None:
        now = {key: left for key in KEYS if (left := left_of_quietly(tier, key))}
        assert now.keys() <= self.stored.keys()
        for key, left in now.items():
            possible = {self.stored[key]}
            if self.stored[key] < WHOLE:
                possible |= {size for size in (HALF, QUARTER) if size < self.stored[key]}
            assert left in possible
            assert left <= self.left.get(key, WHOLE), "a chunk has grown"
        if new is not None and (gone := self.left.keys() - now.keys()):
            assert gone == {key for key in gone if self.is_at_the_end(key)}, "one left before its parts did"
            assert all(self.is_at_the_end(key, now) for key in now if key != new and self.stored[key] < WHOLE)
        assert tier.usage().cut_chunks == sum(left < self.stored[key] for key, left in now.items())
        assert tier.usage().chunks == len(now)
        self.left = now

    def is_at_the_end(self, key: ChunkKey, left: dict[ChunkKey, int] | None = None) -> bool:
        """Nothing more can be dropped of it. Of one that has gone it is not known what was done just before."""
        return left is None or left[key] <= QUARTER or self.stored[key] <= QUARTER


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_calls_and_restarts_against_a_model(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("model")
    tier, model = open_disk(path), Model()
    for _ in range(data.draw(st.integers(1, 40))):
        call = data.draw(st.sampled_from(["store"] * 6 + ["load"] * 3 + ["discard", "restart", "restart exact"]))
        key = data.draw(st.sampled_from(KEYS))
        if call == "store":
            size = data.draw(SIZES)
            if tier.holds([key]) == [False]:
                model.stored[key] = size
            assert tier.store([write_of(key, size)]) == [Stored()]
            assert tier.holds([key]) == [True]
            model.see(tier, key)
        elif call == "load":
            wanted = data.draw(st.sampled_from([QUARTER, HALF, WHOLE]))
            assert left_of(tier, key, wanted) == min(wanted, model.left.get(key, 0))
        elif call == "discard":
            tier.discard([key])
            model.left.pop(key, None)
            assert tier.holds([key]) == [False]
        elif call == "restart":
            tier.close()
            tier = open_disk(path)
            before = model.left
            model.see(tier)
            assert model.left == before
        else:
            # A reader of exact chunks finds those that are whole. The others are gone for all.
            tier.close()
            tier = open_disk(path, "drop_chunks")
            whole = {key: left for key, left in model.left.items() if left == model.stored[key]}
            assert {key: left_of_quietly(tier, key) for key in KEYS if tier.holds([key])[0]} == whole
            assert tier.usage().cut_chunks == 0
            lost = next((key for key in model.left if key not in whole), None)
            if lost is not None and len(whole) <= 1:
                assert tier.store([write_of(lost, model.stored[lost])]) == [Stored()]
                assert left_of(tier, lost) == model.stored[lost]
            tier.close()
            tier, model.left = open_disk(path), {}
            model.see(tier)
    tier.close()


@given(
    st.lists(st.tuples(st.integers(0, 23), st.integers(1, 600), st.sampled_from(["put", "drop", "read"])), max_size=80)
)
@settings(max_examples=150, deadline=None)
def test_units_of_cut_chunks_are_given_once(calls: list[tuple[int, int, str]]) -> None:
    """Two media. What is being read keeps all of its units; what was cut keeps its first."""
    index = ExtentIndex([2, 2], Geometry(4096, 12), make_policy("prefix", 100), drops_parts=True)
    units_of: dict[int, tuple[int, ...]] = {}
    reading: list[tuple[int, tuple[int, ...]]] = []
    entry_of: dict[ChunkKey, int] = {}
    decoded = 12 * 4096
    for number, pages, call in calls:
        key = KEYS[number]
        if call == "drop":
            index.discard([key])
        elif call == "read":
            (entry,) = index.begin_load([key])
            if entry is not None:
                reading.append((entry, tuple(index.extent(entry).units)))
            if len(reading) > 2:
                index.end_load([reading.pop(0)[0]])
        else:
            size = min(decoded, pages * 100)
            (place,), evicted, cut = index.reserve([key], [size], None, [decoded if size < decoded else 0])
            for entry in evicted:
                units_of.pop(entry, None)
            for entry, share in cut.items():
                left = tuple(index.extent(entry).units)
                assert share in (2, 4) and left == units_of[entry][: len(left)] and len(left) < len(units_of[entry])
                units_of[entry] = left
            if place is not None:
                index.commit([place], [None])
                units_of[place.entry] = tuple(place.units)
                entry_of[key] = place.entry
        here = {entry_of[key]: key for key, held in zip(KEYS, index.holds(KEYS), strict=True) if held}
        taken = {entry: units for entry, units in units_of.items() if entry in here} | dict(reading)
        flat = [(entry % 2, unit) for entry, units in taken.items() for unit in units]
        assert len(set(flat)) == len(flat) == index.used_units
        for entry, units in reading:
            assert tuple(index.extent(entry).units) == units


def test_a_policy_with_steps_offers_each_chunk_once_a_step_and_forgets_what_left() -> None:
    policy = PartsPolicy(LruPolicy(), 2)
    policy.added(KEYS[:3], [0, 1, 2])
    seen = []
    while (slot := policy.victim()) is not None:
        seen.append(slot)
        if policy.step(slot) < 2:
            policy.lower(slot, policy.step(slot) + 1)
        else:
            policy.removed(slot)
        if len(seen) == 4:
            policy.used(KEYS[:1], [1])  # in its step, the youngest
    assert seen == [2, 1, 0, 2, 0, 1, 2, 0, 1]
    policy.added(KEYS[:1], [2])
    assert policy.step(2) == 0


def test_a_leased_chunk_that_was_cut_is_offered_again_when_it_is_reinserted() -> None:
    policy = PartsPolicy(LruPolicy(), 2)
    policy.added(KEYS[:2], [0, 1])
    policy.lower(1, 1)
    policy.exclude(0)
    assert policy.victim() == 1
    policy.exclude(1)
    assert policy.victim() is None
    policy.used(KEYS[:2], [0, 1])
    policy.reinsert([0, 1])
    assert policy.victim() == 0


# Damage.


def cut_one(path: Path) -> tuple[DiskTier, ChunkKey, Path]:
    """A disk tier with a chunk that was cut to its half, and the file of its bytes."""
    tier = open_disk(path)
    for key in KEYS:
        tier.store([write_of(key, 11 * 4096)])
        cut = [key for key in KEYS if left_of_quietly(tier, key) == HALF]
        if cut:
            (slab,) = path.rglob("slab-0000")
            return tier, cut[0], slab
    raise AssertionError("nothing was cut")


def test_a_slab_that_ends_within_what_is_left_of_a_chunk_is_damage(tmp_path: Path) -> None:
    """And so is one that ends within a whole chunk, even where a cut would have left it."""
    tier, key, slab = cut_one(tmp_path)
    tier.close()
    slab.write_bytes(slab.read_bytes())  # allocated, so the size stays
    tier = open_disk(tmp_path)
    (entry,) = tier._index.begin_load([key], touch=False)
    assert entry is not None
    units = tier._index.extent(entry).units
    tier._index.end_load([entry])
    with slab.open("r+b") as file:
        file.truncate(max(units) * 4096)
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(WHOLE), WHOLE)
    (outcome,) = tier.load([read])
    assert isinstance(outcome, Damaged)
    assert tier.holds([key]) == [False]
    tier.close()


@pytest.mark.parametrize("record_byte", [0, 9, 40, 200, 410, 500, 511])
def test_a_record_of_a_cut_chunk_with_a_bit_flipped_is_no_record(tmp_path: Path, record_byte: int) -> None:
    tier, key, _ = cut_one(tmp_path)
    (entry,) = tier._index.begin_load([key], touch=False)
    assert entry is not None
    tier._index.end_load([entry])
    others = [other for other in KEYS if other != key and tier.holds([other])[0]]
    tier.close()
    (index,) = tmp_path.rglob("index")
    data = bytearray(index.read_bytes())
    data[4096 + 512 * entry + record_byte] ^= 4
    index.write_bytes(data)
    tier = open_disk(tmp_path)
    assert tier.holds([key]) == [False]
    assert tier.holds(others) == [True] * len(others)
    tier.close()
