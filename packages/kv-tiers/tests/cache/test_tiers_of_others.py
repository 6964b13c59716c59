"""A tier with `write: never` is of others: what this cache clears or forgets it does not find any more, and nothing is
removed there."""

from pathlib import Path

import pytest
from kv_core.service import LoadFailed, ReadLease
from kv_core.testing import key_chain
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower, leading
from kv_testing.wait import until
from kv_tiers import HostConfig, build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.lanes import jobs
from kv_tiers.lanes.jobs import Outgoing

KEYS = key_chain(4)
ANN, BEN = key_chain(2, salt="ann"), key_chain(2, salt="ben")


def over(directory: Path, write: str) -> LocalCache:
    return build_local_cache(
        HostConfig(capacity_bytes=100_000),
        group_bytes=(5000,),
        fingerprint="f",
        tiers=[{"type": "shared_fs", "directory": str(directory), "write": write}],
    )


def found(cache: LocalCache, holder: str) -> int:
    """How many of the chunks a request gets; it waits for the tier."""
    chunks = cache.admin.warm_up(KEYS, holder, timeout_s=10.0)
    cache.admin.unpin(holder)
    return chunks


def test_clearing_removes_nothing_from_a_bucket_that_others_fill(tmp_path: Path) -> None:
    """On real files: they stay byte for byte, the clearer does not find them, and everybody else does."""
    owner = over(tmp_path, "through")
    owner.commit(owner.begin_store(KEYS, "w"))
    until(lambda: owner.lower.states()[0].lane.stored == len(KEYS))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    reader = over(tmp_path, "never")
    assert found(reader, "before") == len(KEYS)
    reader.clear()
    assert found(reader, "after") == 0
    reader.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    another = over(tmp_path, "never")
    assert found(another, "another") == len(KEYS)
    another.admin.clear_tenant(KEYS[0].tenant)
    assert found(another, "cleared") == 0
    another.forget(KEYS)
    another.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    owner.clear()  # whoever writes there may
    until(lambda: owner.lower.local_lanes() == [] or not any(owner.lower.local_lanes()[0].holds(KEYS)))
    owner.close()


def filled(*keys: list) -> Tower:  # type: ignore[type-arg]
    """A tower whose one tier was filled by others."""
    tower = Tower("never", slots=8)
    for chain in keys:
        tower.store(chain)
        with tower.cache._host.lock:
            slots = [tower.cache._index.find(key) for key in chain]
        pages = [
            Outgoing(key, None, tower.cache.pool.pages(slot), CHUNK_BYTES)
            for key, slot in zip(chain, slots, strict=True)
            if slot is not None
        ]
        assert tower.lanes[0].store(pages, lambda outcomes: None)
        tower.run()
    tower.store(key_chain(8, branch="crowd"))
    return tower


def test_a_tenant_that_is_cleared_is_hidden_and_others_are_not() -> None:
    tower = filled(ANN, BEN)
    tower.cache.admin.clear_tenant(ANN[0].tenant)
    assert (leading(tower.lanes[0], ANN), leading(tower.lanes[0], BEN)) == (0, 2)
    assert (tower.fetch(ANN).chunks, tower.fetch(BEN, "s").chunks) == (0, 2)
    assert tower.tiers[0].holds(ANN + BEN) == [True] * 4
    assert not {"clear", "clear_tenant", "discard"} & set(tower.tiers[0].calls)
    tower.close()


def test_a_load_under_way_when_everything_is_cleared_brings_nothing() -> None:
    tower = filled(KEYS)
    answers: list[list[bool]] = []
    assert tower.lanes[0].ask(KEYS, answers.append)
    plan = tower.ask(KEYS)
    tower.cache.clear()
    tower.run()
    assert plan.chunks == 0
    assert answers == [[False] * 4]  # though it was asked before
    assert tower.fetch(KEYS, "s").chunks == 0
    assert isinstance(tower.cache.load(KEYS, "l"), LoadFailed)
    assert tower.tiers[0].holds(KEYS) == [True] * 4
    tower.close()


def test_a_chunk_whose_bytes_are_wrong_is_not_brought_again_and_stays_where_it_is() -> None:
    tower = filled(KEYS)
    tower.tiers[0].fault = "flip"
    assert tower.fetch(KEYS).chunks < 4
    tower.tiers[0].let_go()
    assert leading(tower.lanes[0], KEYS) < 4
    assert tower.tiers[0].holds(KEYS) == [True] * 4
    assert "discard" not in tower.tiers[0].calls
    tower.close()


def test_a_year_of_discards_hides_nothing_else() -> None:
    tower = filled(KEYS)
    for number in range(365):
        tower.lanes[0].discard(key_chain(1000, branch=f"day {number}"))
    tower.lanes[0].discard(KEYS[3:])
    assert tower.lanes[0].holds(KEYS) == [True, True, True, False]
    tower.close()


def test_more_than_can_be_remembered_hides_everything_and_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "MAX_HIDDEN", 2)
    tower = filled(KEYS)
    tower.cache.forget(KEYS[1:3])
    assert tower.lanes[0].holds(KEYS) == [True, False, False, True]
    assert not caplog.text
    tower.cache.forget(KEYS[3:])
    assert tower.lanes[0].holds(KEYS) == [False] * 4
    assert "tier tier0" in caplog.text and "no longer reads the tier" in caplog.text
    caplog.clear()
    tower.cache.forget([*KEYS, *key_chain(4, branch="others")])
    assert not caplog.text  # it has been said
    tower.close()


def test_what_is_computed_again_after_a_clear_is_found_in_the_pool() -> None:
    tower = filled(KEYS)
    tower.cache.clear()
    tower.store(KEYS)
    assert tower.fetch(KEYS).chunks == 4
    lease = tower.cache.load(KEYS, "l")
    assert isinstance(lease, ReadLease)
    tower.cache.release(lease)
    tower.close()
