"""Pins, warming up, and a prefix that leaves in a file and comes back checked."""

import os
import stat
from pathlib import Path

import pytest
from kv_core.errors import InputError
from kv_core.lookup import Ended
from kv_core.testing import key_chain
from kv_tiers.cache.archive import Imported, export_prefix, import_prefix
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.contract import CHUNK_BYTES
from kv_tiers.testing.tower import FINGERPRINT, Tower

KEYS = key_chain(6)


def test_pinned_chunks_stay_while_others_come_and_go() -> None:
    tower = Tower(slots=16)
    tower.store(KEYS)
    assert tower.cache.admin.pin(KEYS, "system prompt") == 6
    for number in range(6):
        tower.store(key_chain(9, branch=str(number)))
        tower.run()
    assert tower.cache.lookup(KEYS, "r").chunks == 6
    assert tower.cache.admin.pins() == {"system prompt": 6}
    assert tower.cache.admin.unpin("system prompt")
    assert not tower.cache.admin.unpin("system prompt")
    tower.cache.end("r")
    tower.crowd_out()
    tower.store(key_chain(16, branch="more"))
    assert tower.cache.lookup(KEYS, "r").chunks == 0
    tower.close()


def test_pins_never_take_more_than_half_the_pool() -> None:
    tower = Tower(slots=8)
    tower.store(KEYS)
    assert tower.cache.admin.pin(KEYS, "a") == 4
    other = key_chain(3, branch="other")
    tower.store(other)
    assert tower.cache.admin.pin(other, "b") == 0
    assert tower.cache.admin.pin(KEYS[:2], "a") == 2  # replaced
    assert tower.cache.admin.pin(other, "b") == 2
    for name in ("a", "b"):
        tower.cache.admin.unpin(name)
    tower.close()


def test_a_prefix_is_warmed_up_from_below_and_kept() -> None:
    tower = Tower("through", slots=16, threads=1)
    tower.store(KEYS)
    assert tower.lanes[0].drain(5)
    for number in range(3):
        tower.store(key_chain(16, branch=f"crowd {number}"))
    assert tower.cache.lookup(KEYS, "r").chunks == 0
    assert tower.cache.admin.warm_up(KEYS, "warm", timeout_s=10) == 6
    tower.store(key_chain(10, branch="after"))
    plan = tower.cache.lookup(KEYS, "r")
    assert (plan.chunks, plan.ended) == (6, Ended.ALL_HELD)
    tower.cache.end("r")
    tower.cache.admin.unpin("warm")
    tower.close()


def test_warming_up_what_nobody_has_ends() -> None:
    tower = Tower("through", threads=1)
    assert tower.cache.admin.warm_up(KEYS, "warm", timeout_s=10) == 0
    tower.close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    tower = Tower(slots=16)
    tower.store(KEYS)
    path = tmp_path / "prompt.kv"
    assert export_prefix(tower.cache, [*KEYS, *key_chain(2, branch="absent")], path, fingerprint=FINGERPRINT) == 6
    tower.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["prompt.kv"]
    return path


def test_an_exported_prefix_is_a_hit_in_another_cache(exported: Path) -> None:
    tower = Tower(slots=16)
    tower.store(KEYS[:2])
    assert import_prefix(tower.cache, exported, fingerprint=FINGERPRINT) == Imported(6, "")
    assert tower.cache.lookup(KEYS, "r").chunks == 6
    tower.read(KEYS)
    assert import_prefix(tower.cache, exported, fingerprint=FINGERPRINT) == Imported(6, "")
    tower.close()


def test_where_there_is_no_room_the_head_is_kept(exported: Path) -> None:
    tower = Tower(slots=4)
    imported = import_prefix(tower.cache, exported, fingerprint=FINGERPRINT)
    assert imported.chunks == 4
    assert "no room" in imported.stopped
    tower.read(KEYS[:4])
    tower.close()


def test_every_flipped_bit_is_noticed(exported: Path) -> None:
    whole = exported.read_bytes()
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        exported.write_bytes(broken)
        cache = LocalCache(HostPool.anonymous("h", CHUNK_BYTES, 8))
        try:
            imported = import_prefix(cache, exported, fingerprint=FINGERPRINT)
        except InputError:
            imported = Imported(0, "refused")
        assert imported.stopped
        assert cache.lookup(KEYS, "r").chunks == imported.chunks < 6
        cache.close()


def test_what_is_no_export_of_this_format_is_refused(exported: Path, tmp_path: Path) -> None:
    cache = LocalCache(HostPool.anonymous("h", CHUNK_BYTES, 8))
    with pytest.raises(InputError, match="another format"):
        import_prefix(cache, exported, fingerprint="other")
    exported.write_bytes(exported.read_bytes()[:-1])
    with pytest.raises(InputError, match="it was cut"):
        import_prefix(cache, exported, fingerprint=FINGERPRINT)
    exported.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(InputError, match="no exported prefix"):
        import_prefix(cache, exported, fingerprint=FINGERPRINT)
    with pytest.raises(InputError, match="cannot be read"):
        import_prefix(cache, tmp_path / "nowhere", fingerprint=FINGERPRINT)
    cache.close()
