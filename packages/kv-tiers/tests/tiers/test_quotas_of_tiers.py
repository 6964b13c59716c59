"""Shares of a tier with an index: no tenant evicts what another has there, now or after a restart."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, Refused, Stored
from kv_core.testing import key_chain
from kv_eviction.registry import make_policy
from kv_testing.disk_box import CONTEXT, load, store, writes_of
from kv_testing.tenants import ANN, BEN
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig
from kv_tiers.settings import Layer, resolve
from kv_tiers.tenants import Tenant
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tier_state import TierQuota
from kv_tiers.tiers.disk import bytes_for, make_disk_tier
from kv_tiers.tiers.dram import make_dram_tier
from kv_tiers.tiers.index import MAX_QUOTAS_LISTED, ExtentIndex
from kv_tiers.tiers.space import Geometry, RecoveredChunk, pack
from msgspec.structs import replace

GEOMETRY = Geometry(100, 6)
LEAST_UNITS = 2
"""That a chunk counts as: a share has its part of the entries, four a slot."""
NAMES = {"ann": ANN, "ben": BEN}
SHARED = TierContext(CONTEXT.chunk_bytes, CONTEXT.slot_bytes, CONTEXT.fingerprint, tenants=NAMES)


def index_of(slots: Sequence[int], quota: int, *, drops_parts: bool = False) -> ExtentIndex:
    return ExtentIndex(
        slots,
        GEOMETRY,
        make_policy("prefix", sum(slots)),
        drops_parts=drops_parts,
        quotas={ANN: quota},
        share_policy=partial(make_policy, "prefix"),
    )


CALLS = st.tuples(st.integers(0, 39), st.integers(1, 600), st.sampled_from(["store", "store", "store", "read", "goes"]))


@given(st.lists(CALLS, max_size=80), st.integers(1, 3), st.integers(0, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_shares_keep_their_size_and_their_chunks(
    calls: list[tuple[int, int, str]], media: int, quota: int, drops_parts: bool
) -> None:
    """Chunks of two shares and of any sizes come, are cut, read, and go; then the next process takes over the rest."""
    keys = [*key_chain(20, salt="ann"), *key_chain(20, salt="ben")]
    quota = min(quota, 3 * media)
    index = index_of([3] * media, quota, drops_parts=drops_parts)
    room = {True: quota * 6, False: (3 * media - quota) * 6}
    kept: dict[ChunkKey, int] = {}

    def units(key: ChunkKey) -> Sequence[int]:
        index.begin_load([key], touch=False)
        found = index.extent(kept[key]).units
        index.end_load([kept[key]])
        return found

    for number, size, what in calls:
        key = keys[number]
        if what == "goes":
            index.discard([key])
            kept.pop(key, None)
        elif what == "read":
            index.end_load(index.begin_load([key]))
        else:
            (place,), evicted, cut = index.reserve([key], [size], None, [size])
            key_of = {entry: one for one, entry in kept.items()}
            assert {key_of[entry].tenant for entry in [*evicted, *cut]} <= {key.tenant}
            kept = {one: entry for one, entry in kept.items() if entry not in evicted}
            if place is None:
                assert key in kept or room[key.tenant == ANN] == 0
                continue
            index.commit([place], [None])
            kept[key] = place.entry
        assert index.holds(keys) == [one in kept for one in keys]
        taken = [(kept[one] % media, unit) for one in kept for unit in units(one)]
        assert len(set(taken)) == len(taken) == index.used_units
        used = {
            is_ann: sum(max(LEAST_UNITS, len(units(one))) for one in kept if (one.tenant == ANN) == is_ann)
            for is_ann in room
        }
        assert all(used[is_ann] <= room[is_ann] for is_ann in room)
        assert index.quotas() == (TierQuota(ANN.hex(), 100 * used[True], 100 * room[True]),)
    later = index_of([3] * media, quota // 2, drops_parts=drops_parts)
    gone = later.adopt(
        RecoveredChunk(one, None, entry, 100 * len(units(one)), pack(units(one))) for one, entry in kept.items()
    )
    left = {one: entry for one, entry in kept.items() if entry not in gone}
    assert {one.tenant for one in kept if one not in left} <= {ANN}
    assert later.holds(keys) == [one in left for one in keys]
    assert later.used_units == sum(len(units(one)) for one in left)
    assert later.quotas()[0].used_bytes <= 600 * (quota // 2)


def test_what_is_withheld_when_the_medium_is_exchanged_is_room_again() -> None:
    index, keys = index_of([4], 2), key_chain(2, salt="ann")
    places = [place for place in index.reserve(keys, [600] * 2, None).places if place is not None]
    index.withhold(places)
    index.adopt([])
    index.resume()
    assert index.quotas()[0].used_bytes == 0
    assert index.reserve(keys, [600] * 2, None).evicted == []
    assert index.quotas()[0].used_bytes == 1200


def test_of_many_quotas_those_are_listed_that_are_used_most() -> None:
    tags = [number.to_bytes(7, "big") for number in range(1000)]
    lru = partial(make_policy, "lru")
    index = ExtentIndex([2000], GEOMETRY, lru(1), quotas={ANN: 8, **dict.fromkeys(tags, 1)}, share_policy=lru)
    index.reserve(key_chain(3, salt="ann"), [600] * 3, None)
    assert index.quotas()[0] == TierQuota(ANN.hex(), 1800, 4800)
    assert len(index.quotas()) == MAX_QUOTAS_LISTED  # a report has them, and every scrape of the metrics


@pytest.fixture(params=["disk", "disks", "dram"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """With room for 24 chunks, 8 of them Ann's."""
    if request.param == "dram":
        made = make_dram_tier(with_quotas(24 * SHARED.slot_bytes), SHARED)
    else:
        paths = [str(tmp_path / name) for name in (("a", "b") if request.param == "disks" else ("a",))]
        made = make_disk_tier(
            with_quotas(bytes_for(SHARED, 24, len(paths))) | {"directory": paths, "durability": "process"}, SHARED
        )
    yield made
    made.close()


def with_quotas(capacity_bytes: int, part: float = 1 / 3) -> dict[str, object]:
    return {"capacity_bytes": capacity_bytes, "quota_bytes": {"ann": int(part * capacity_bytes) + 1}}


def fill(tier: Tier, chunks: int, **of: str) -> None:
    for number in range(chunks // 8):
        tier.store(writes_of(key_chain(8, branch=f"noise {number}", **of)))


def test_a_noisy_tenant_evicts_nothing_of_a_quiet_one(tier: Tier) -> None:
    quiet, others = key_chain(8, salt="ann"), key_chain(8, salt="ben")
    store(tier, quiet)  # type: ignore[arg-type]
    fill(tier, 2000, salt="cyd")
    assert tier.holds(quiet) == [True] * 8
    store(tier, others)  # type: ignore[arg-type]
    fill(tier, 200, salt="ann")
    assert tier.holds(others) == [True] * 8
    assert [type(load(tier, key)) for key in others] == [Loaded] * 8  # type: ignore[arg-type]
    (quota,) = tier.usage().quotas
    assert quota.tenant == ANN.hex() and 0 < quota.used_bytes <= quota.quota_bytes


def test_a_restart_counts_what_it_finds_and_a_lower_quota_evicts_the_excess(tmp_path: Path) -> None:
    options = with_quotas(bytes_for(SHARED, 24)) | {"directory": str(tmp_path / "a")}
    made = make_disk_tier(options, SHARED)
    quiet, others = key_chain(8, salt="ann"), key_chain(8, salt="ben")
    for keys in (quiet, others):
        store(made, keys)  # type: ignore[arg-type]
    made.close()
    made = make_disk_tier(options, SHARED)
    fill(made, 400, salt="cyd")
    assert made.holds(quiet) == [True] * 8
    made.close()
    for _ in range(2):  # what has left stays away
        made = make_disk_tier(options | with_quotas(bytes_for(SHARED, 24), 1 / 8), SHARED)
        assert made.holds(quiet) == [True] * 3 + [False] * 5
        made.close()
    made = make_disk_tier(options, SHARED)
    assert sum(made.holds(quiet)) == 3
    made.close()


def wait_an_hour(tier: Tier) -> None:
    """For room, longer than settings allow: a test in which a store waits does not end."""
    tier._config = replace(tier._config, wait_s=3600)  # type: ignore[attr-defined]


def test_a_tenant_without_room_is_refused_at_once(tmp_path: Path) -> None:
    options: dict[str, object] = {"capacity_bytes": bytes_for(SHARED, 24), "directory": str(tmp_path / "a")}
    made = make_disk_tier(options | {"quota_bytes": {"ann": 0}}, SHARED)
    wait_an_hour(made)
    others = key_chain(1, salt="ben")
    store(made, others)  # type: ignore[arg-type]
    lease = made.lease_extents(others)  # type: ignore[attr-defined]
    assert isinstance(made.store(writes_of(key_chain(1, salt="ann")))[0], Refused)  # and not after an hour
    made.end_lease(lease)  # type: ignore[attr-defined]
    made.close()


def test_a_prompt_longer_than_its_quota_waits_for_no_other_tenant(tmp_path: Path) -> None:
    """Only what its share has could make room for it, and that is the prompt itself."""
    options = with_quotas(bytes_for(SHARED, 24)) | {"directory": str(tmp_path / "a")}
    made = make_disk_tier(options, SHARED)
    wait_an_hour(made)
    others = key_chain(1, salt="ben")
    store(made, others)  # type: ignore[arg-type]
    lease = made.lease_extents(others)  # type: ignore[attr-defined]
    outcomes = made.store(writes_of(key_chain(12, salt="ann")))
    assert [type(outcome) for outcome in outcomes] == [Stored] * 8 + [Refused] * 4
    made.end_lease(lease)  # type: ignore[attr-defined]
    made.close()


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        ({"ann": 1 << 40, "ben": 1}, "has 1; write at least"),
        ({"ann": "900KiB", "ben": "200KiB"}, "1126400 bytes .* in all, and the tier's capacity_bytes is 1048576"),
        ({"ann": -1}, "has -1"),
        ({"dan": "900KiB"}, "no tenant is called 'dan'; list it in tenants"),
        ({"ann": "much"}, "quota_bytes: ann is 'much'"),
    ],
)
def test_quotas_that_cannot_be_had_are_refused(tmp_path: Path, quotas: Mapping[str, object], message: str) -> None:
    disk = {"type": "disk", "directory": str(tmp_path / "a"), "capacity_bytes": "1MiB", "quota_bytes": quotas}
    for tier in (disk, {"type": "dram", "capacity_bytes": "1MiB", "quota_bytes": quotas}):
        with pytest.raises(ConfigError, match=message):
            build_local_cache(
                HostConfig(capacity_bytes=1 << 20),
                group_bytes=(4096,),
                fingerprint="f",
                tiers=[tier],
                tenants=[Tenant(name, tag) for name, tag in NAMES.items()],
            )


def test_a_wrong_name_is_found_in_the_settings() -> None:
    tier = {"type": "dram", "capacity_bytes": "1MiB", "quota_bytes": {"ann": "100KiB"}}
    file = {"tiers": [tier], "tenants": [{"name": "ann", "salt": "ann"}]}
    resolve([Layer("file", file)], {})
    with pytest.raises(ConfigError, match=r"tiers\[0\]: quota_bytes: no tenant is called 'ann'"):
        resolve([Layer("file", file | {"tenants": []})], {})
