"""Pins, warming up, and a prefix that leaves in a file and comes back checked."""

import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.errors import InputError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.service import Ended, Holder, WriteLease
from kv_core.testing import key_chain
from kv_remote.archive import Imported, export_prefix, import_prefix
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.shapes import keys_for
from kv_testing.tower import FINGERPRINT, Tower
from kv_tiers import chunk_header
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import HostPool

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
    tower.settle()
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


def test_an_import_whose_first_chunks_are_forgotten_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read a few chunks at a time, and operators may clear the cache in between."""
    keys, path = key_chain(12), tmp_path / "prompt.kv"
    tower = Tower(slots=16)
    tower.store(keys)
    assert export_prefix(tower.cache, keys, path, fingerprint=FINGERPRINT) == 12
    tower.cache.clear()
    real = tower.cache.begin_store

    def begin_store(chain: Sequence[ChunkKey], holder: Holder) -> WriteLease:
        if len(chain) == 12:
            tower.cache.forget(keys[:1])
        return real(chain, holder)

    monkeypatch.setattr(tower.cache, "begin_store", begin_store)
    imported = import_prefix(tower.cache, path, fingerprint=FINGERPRINT)
    assert imported.chunks == tower.cache.lookup(keys, "r").chunks == 0
    assert "chunk 0" in imported.stopped and "forgotten" in imported.stopped
    monkeypatch.undo()
    assert import_prefix(tower.cache, path, fingerprint=FINGERPRINT) == Imported(12, "")
    tower.close()


def test_two_imports_of_one_file_write_into_their_own_slots_only(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of one gave back the slots that the other was about to write to, and which others had filled since."""
    tower = Tower(slots=8)
    real, others = tower.cache.begin_store, key_chain(2, branch="others")

    def begin_store(keys: Sequence[ChunkKey], holder: Holder) -> WriteLease:
        lease = real(keys, holder)
        monkeypatch.undo()
        again = import_prefix(tower.cache, exported, fingerprint=FINGERPRINT)
        assert again.chunks == 0 and "being stored by another client" in again.stopped
        tower.store(others)
        return lease

    monkeypatch.setattr(tower.cache, "begin_store", begin_store)
    assert import_prefix(tower.cache, exported, fingerprint=FINGERPRINT) == Imported(6, "")
    tower.read(KEYS)
    tower.read(others)
    tower.close()


@pytest.mark.parametrize("meanwhile", ["another export", "a long time", "forgotten"])
def test_an_export_vouches_for_no_bytes_but_the_chunks_own(
    exported: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    tower, path = Tower(slots=8), exported.with_name("again.kv")
    tower.store(KEYS)
    real = chunk_header.pack_header

    def pack_header(*arguments: Any) -> bytes:
        monkeypatch.undo()
        if meanwhile == "another export":
            assert export_prefix(tower.cache, KEYS, path, fingerprint=FINGERPRINT) == 6
        elif meanwhile == "a long time":
            tower.clock.advance(1e6)
        else:
            tower.cache.forget(KEYS)
        tower.store(key_chain(8, branch="others"))
        return real(*arguments)

    monkeypatch.setattr(chunk_header, "pack_header", pack_header)
    if meanwhile == "forgotten":
        with pytest.raises(InputError, match="forgotten meanwhile"):
            export_prefix(tower.cache, KEYS, path, fingerprint=FINGERPRINT)
        assert not path.exists()
    else:
        assert export_prefix(tower.cache, KEYS, path, fingerprint=FINGERPRINT) == 6
        assert path.read_bytes() == exported.read_bytes()
    tower.run()
    assert tower.store(key_chain(8, branch="after")) == 8  # nothing is leased any more
    tower.close()


@pytest.mark.parametrize("meanwhile", ["before a chunk", "during a chunk"])
@pytest.mark.parametrize("what", ["export", "import"])
def test_what_is_under_way_when_the_cache_is_closed_ends_and_leaves_nothing(
    exported: Path, monkeypatch: pytest.MonkeyPatch, what: str, meanwhile: str
) -> None:
    """A server that stops does not wait for it, and an operator must not read of a bug."""
    tower, path = Tower(slots=8), exported.with_name("again.kv")
    if what == "export":
        tower.store(KEYS)
    owner: Any = tower.cache
    name = "load" if what == "export" else "begin_store"
    if meanwhile == "during a chunk":
        owner, name = chunk_header, "pack_header" if what == "export" else "check"
    real = getattr(owner, name)

    def close(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        result = real(*arguments, **options)
        if meanwhile == "during a chunk":
            with pytest.raises(BufferError):
                tower.cache.close()
        else:
            tower.cache.close()
        return result

    monkeypatch.setattr(owner, name, close)
    work: Any = partial(export_prefix, tower.cache, KEYS, path)
    if what == "import":
        work = partial(import_prefix, tower.cache, exported)
    with pytest.raises(MisuseError, match="closed"):
        work(fingerprint=FINGERPRINT)
    assert os.listdir(exported.parent) == [exported.name]
    tower.cache.close()


def test_where_there_is_no_room_the_head_is_kept(exported: Path) -> None:
    tower = Tower(slots=4)
    imported = import_prefix(tower.cache, exported, fingerprint=FINGERPRINT)
    assert imported.chunks == 4
    assert "no room" in imported.stopped
    tower.read(KEYS[:4])
    tower.close()


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed(exported: Path, step: int) -> None:
    whole = exported.read_bytes()
    for at in range(0, len(whole), step):
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
    with pytest.raises(InputError, match="it was truncated"):
        import_prefix(cache, exported, fingerprint=FINGERPRINT)
    exported.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(InputError, match="not an exported prefix"):
        import_prefix(cache, exported, fingerprint=FINGERPRINT)
    with pytest.raises(InputError, match="cannot be read"):
        import_prefix(cache, tmp_path / "nowhere", fingerprint=FINGERPRINT)
    cache.close()


HYBRID = ChunkShape(4, (ALL, Coverage("window", 5), STATE))
SIZES = (CHUNK_BYTES, 10, 33)


def test_what_a_hybrid_hit_needs_is_pinned_and_travels_in_a_file(tmp_path: Path) -> None:
    """Chunks of three sizes, of a window only the last, and of the states one; and the file is as checked as any."""
    keys = keys_for(HYBRID, 5)
    tower, path = Tower(slots=20, group_bytes=SIZES), tmp_path / "prompt.kv"
    tower.store(keys)
    assert tower.cache.admin.pin(keys, "a", shape=HYBRID) == 5
    assert tower.cache.admin.pins() == {"a": 7}
    assert export_prefix(tower.cache, keys, path, fingerprint=FINGERPRINT, shape=HYBRID) == 5
    tower.store(key_chain(20, branch="crowd"))
    assert tower.cache.lookup(keys, "r", shape=HYBRID).chunks == 5
    tower.cache.admin.unpin("a")
    tower.close()

    other = Tower(slots=20, group_bytes=SIZES)
    assert import_prefix(other.cache, path, fingerprint=FINGERPRINT) == Imported(7, "")
    assert other.cache.lookup(keys, "r", shape=HYBRID).chunks == 5
    other.read([keys[place] for place in HYBRID.needed_places(5)])
    assert set(other.cache.admin.resident_keys()) == {keys[place] for place in HYBRID.needed_places(5)}
    other.close()

    of_other_sizes = Tower(slots=20, group_bytes=(CHUNK_BYTES, 11, 33))
    imported = import_prefix(of_other_sizes.cache, path, fingerprint=FINGERPRINT)
    assert imported.chunks == 5 and "10 bytes, and its group's have 11" in imported.stopped
    of_other_sizes.close()


def test_a_hybrid_pin_too_large_for_half_the_pool_is_of_a_shorter_hit() -> None:
    keys = keys_for(HYBRID, 5)
    tower = Tower(slots=12, group_bytes=SIZES)
    for group in range(3):
        tower.store(keys[group::3][0 if group == 0 else 2 :])
    assert tower.cache.admin.pin(keys, "a", shape=HYBRID) == 4  # five chunks need seven slots, four need six
    tower.cache.admin.unpin("a")
    tower.close()
