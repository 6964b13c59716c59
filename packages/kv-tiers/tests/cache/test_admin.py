"""What an operator asks of a running cache. Quotas, pins and warming up have files of their own beside this one."""

from collections.abc import Callable

import pytest
from kv_core.errors import ConfigError, MisuseError
from kv_core.testing import key_chain
from kv_testing.tower import Tower
from kv_tiers.cache.admin import quota_slots
from kv_tiers.index.life import BEING_WRITTEN

KEYS = key_chain(4)


def test_where_a_chunk_is_names_the_fastest_tier_and_touches_nothing() -> None:
    """A tier that must be asked over a network is not."""
    tower = Tower("through", "through", remote=(False, True))
    tower.store_below(KEYS)
    tower.store(KEYS[:1])
    tower.cache.begin_store(KEYS[:2], "w")
    before = tower.cache.counts()
    assert tower.cache.admin.where([*KEYS, *key_chain(1, branch="x")]) == ["host", BEING_WRITTEN, "tier0", "tier0", ""]
    assert tower.cache.lower.remote_tiers_skipped() == ["tier1"]
    assert tower.cache.counts() == before
    tower.cache.end("w")
    tower.close()


def test_a_pin_ends_with_what_is_forgotten_of_it() -> None:
    tower = Tower(slots=8)
    tower.store(KEYS)
    assert tower.cache.admin.pin(KEYS, "system") == 4
    tower.cache.forget(KEYS[2:])
    assert tower.cache.admin.pins() == {"system": 2}
    tower.cache.clear()
    assert tower.cache.admin.pins() == {}
    tower.run()  # what was on its way down is leased until it is there
    assert tower.cache.counts().slots_used == 0
    tower.close()


def test_a_closed_cache_says_so() -> None:
    tower = Tower()
    admin = tower.cache.admin
    tower.close()
    calls: list[Callable[[], object]] = [
        lambda: admin.pin(KEYS, "a"),
        lambda: admin.where(KEYS),
        lambda: admin.clear_tenant(bytes(7)),
        lambda: admin.set_quota(bytes(7), None),
        admin.tenants,
        admin.resident_keys,
    ]
    for call in calls:
        with pytest.raises(MisuseError, match="closed"):
            call()
    assert not admin.unpin("a")


def test_a_quota_is_whole_slots_or_none_at_all() -> None:
    assert [quota_slots(size, 4096) for size in (0, 4096, 8191, 8192)] == [0, 1, 1, 2]
    for size in (-4096, -1, 1, 4095):
        with pytest.raises(ConfigError, match="holds no chunk"):
            quota_slots(size, 4096)
