"""A pool with a name outlives a server that was stopped, and nothing else that a server may have left is believed."""

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from kv_core.errors import ConfigError
from kv_core.hashing import checksum_of
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache
from kv_server.caches import cache_name
from kv_server.succession.channel import FORMAT
from kv_server.succession.saved_pool import open_saved, saved_path
from kv_testing.cache_servers import SLOT_BYTES, fill, join_at, join_server, lose, read, report_of, store
from kv_testing.servers import ValkeyServer
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.upgrades import UpgradedServers
from kv_testing.wait import line, until


class Saved(UpgradedServers):
    """Servers whose pool has a name, and no tiers but those in `more` settings."""

    def __init__(self, home: Path, slots: int = 8, **more: object) -> None:
        self.more = more
        self.name = f"test-{token_hex(6)}"
        self.file = saved_path(self.name, cache_name(((CHUNK_BYTES,), "f")))
        super().__init__(home, self.settings(slots))

    def settings(self, slots: int, most: int = 0) -> dict[str, object]:
        sizes = {"capacity_bytes": slots * SLOT_BYTES, "max_capacity_bytes": most * SLOT_BYTES}
        return {"host": {"name": self.name, **sizes}, **self.more}

    @property
    def index(self) -> Path:
        return self.file.with_name(f"{self.file.name}.index")

    def restart(self) -> None:
        self.process = self.start()
        assert line(self.process.stdout).startswith("READY")


@pytest.fixture
def saved(home: Path) -> Iterator[Saved]:
    servers = Saved(home)
    yield servers
    servers.close()
    servers.file.unlink(missing_ok=True)
    servers.index.unlink(missing_ok=True)


def back(cache: RemoteCache) -> None:
    until(lambda: cache.lookup(key_chain(1, branch="none"), "asker").ended is not Ended.REFUSED)


def test_after_a_stop_everything_is_found_and_copies_go_on(saved: Saved) -> None:
    cache = join_server(saved.home)
    keys, pool = key_chain(3), cache.pool
    store(cache, keys)
    lasting = cache.load(keys, "l", lasting=True)
    writing = cache.begin_store(key_chain(2, branch="w"), "w")
    assert isinstance(lasting, ReadLease)
    saved.close()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (saved.file, saved.index)] == [0o600, 0o600]
    saved.restart()
    back(cache)
    assert not saved.index.exists()
    assert (cache.generation, cache.pool) == (0, pool)
    assert cache.release(lasting)
    fill(cache, writing)
    cache.commit(writing)
    assert read(cache, keys) and read(cache, writing.keys)
    counts = cache.counts()
    assert (counts.slots_used, counts.read_leases, counts.write_leases, counts.chunks_damaged) == (5, 0, 0, 0)
    cache.close()


def test_a_restart_may_change_the_size_up_to_the_same_maximum(saved: Saved) -> None:
    cache = join_server(saved.home)
    store(cache, key_chain(8))
    for slots, found in ((3, 3), (6, 3)):
        saved.close()
        saved.config.write_text(json.dumps(saved.settings(slots, most=8)))
        saved.restart()
        back(cache)
        until(lambda slots=slots: 512 * saved.file.stat().st_blocks <= slots * SLOT_BYTES)
        assert (cache.counts().slots_total, cache.counts().slots_used, cache.generation) == (slots, found, 0)
        assert read(cache, key_chain(3))
    cache.close()


def test_slots_that_a_client_may_be_writing_are_nobody_elses_after_a_restart(saved: Saved) -> None:
    cache = join_server(saved.home)
    writing = cache.begin_store(key_chain(6, branch="w"), "w")
    lose(cache)
    until(lambda: report_of(saved.home / "s").orphans == 1)
    saved.close()
    saved.restart()
    other = join_server(saved.home)
    assert report_of(saved.home / "s").orphans == 1
    assert len(other.begin_store(key_chain(8, branch="o"), "o").keys) == 2
    with cache._lock:
        cache._link.back_off(0)
    back(cache)
    fill(cache, writing)
    cache.commit(writing)
    assert read(cache, writing.keys)
    cache.close()
    other.close()


def test_a_client_that_copies_in_another_format_meanwhile_loses_no_slot_of_either(saved: Saved) -> None:
    """Its session of before is that of a pool that nobody has opened since."""
    cache = join_server(saved.home)
    cache.begin_store(key_chain(6, branch="w"), "w")
    lose(cache)
    until(lambda: report_of(saved.home / "s").orphans == 1)
    saved.close()
    saved.restart()
    changed = join_at(saved.home / "s", "g")
    lose(changed)
    with changed._lock:
        changed._token = cache._token
        changed._link.back_off(0)
    back(changed)
    assert len(changed.begin_store(key_chain(2, branch="g"), "g").keys) == 2
    other = join_server(saved.home)
    lose(changed)
    until(lambda: report_of(saved.home / "s").orphans == 2)
    with cache._lock:
        cache._link.back_off(0)
    back(cache)
    assert report_of(saved.home / "s").orphans == 0
    cache.end("w")
    until(lambda: other.counts().write_leases == 0)
    store(other, key_chain(8, branch="all"))
    for one in (changed, other, cache):
        one.close()


def test_a_chunk_whose_bytes_have_changed_meanwhile_is_not_found(saved: Saved) -> None:
    cache = join_server(saved.home)
    keys = key_chain(3)
    lease = store(cache, keys)
    saved.close()
    with saved.file.open("r+b") as file:
        file.seek(lease.extents[1].offset)
        file.write(b"wrong")
    saved.restart()
    back(cache)
    assert cache.lookup(keys, "r").chunks == 1
    assert cache.counts().chunks_damaged == 1
    cache.close()


def test_what_a_tier_could_not_get_before_a_stop_it_gets_after_it(home: Path) -> None:
    """Or it would be lost with its place in the pool."""
    valkey = ValkeyServer()
    valkey.stop()
    servers = Saved(home, tiers=[{"type": "redis", "url": valkey.url}], cold={"drain_s": 0.1})
    try:
        cache = join_server(home)
        store(cache, key_chain(3))
        servers.close()
        valkey.start()
        servers.restart()
        back(cache)
        until(lambda: report_of(home / "s").caches[0].tiers[0].spill.stored == 3)
        cache.close()
    finally:
        servers.close()
        servers.file.unlink(missing_ok=True)
        servers.index.unlink(missing_ok=True)
        valkey.remove()


def test_it_outlives_live_upgrades_too(saved: Saved) -> None:
    cache = join_server(saved.home)
    store(cache, key_chain(3))
    saved.upgrade()
    store(cache, key_chain(2, branch="later"))
    saved.close()
    saved.restart()
    back(cache)
    assert read(cache, key_chain(3)) and read(cache, key_chain(2, branch="later"))
    cache.close()


@pytest.mark.parametrize("how", ["killed", "no index", "half an index", "another format", "another size"])
def test_what_was_not_left_by_a_clean_stop_is_an_empty_pool_in_another_file(saved: Saved, how: str) -> None:
    cache = join_server(saved.home)
    keys = key_chain(3)
    store(cache, keys)
    number = saved.file.stat().st_ino
    if how == "killed":
        os.kill(saved.process.pid, signal.SIGKILL)
    saved.close()
    if how == "no index":
        saved.index.unlink()
    elif how == "half an index":
        saved.index.write_bytes(saved.index.read_bytes()[:50])
    elif how == "another format":
        data = saved.index.read_bytes()
        ours, others = (b"\xa6format" + bytes([FORMAT + more]) for more in (0, 1))
        assert ours in data[16:]
        body = data[16:].replace(ours, others)
        saved.index.write_bytes(checksum_of(memoryview(body)) + body)
    elif how == "another size":
        saved.config.write_text(saved.config.read_text().replace(str(8 * SLOT_BYTES), str(9 * SLOT_BYTES)))
    saved.restart()
    back(cache)
    assert cache.generation == 1
    assert cache.lookup(keys, "r").chunks == 0
    assert saved.file.stat().st_ino != number and "starts empty" in saved.log.read_text()
    store(cache, keys)
    assert read(cache, keys)
    cache.close()


def test_a_second_server_cannot_have_the_same_pool(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = join_server(saved.home)
    second = tmp_path_factory.mktemp("second")
    second.chmod(0o700)
    servers = UpgradedServers(second, saved.settings(8))
    with pytest.raises(Exception, match="another server has the pool"):
        join_server(second)
    store(cache, key_chain(1))
    assert read(cache, key_chain(1))
    cache.close()
    servers.close()


def test_a_pool_larger_than_its_file_system_is_refused(tmp_path: Path) -> None:
    """It would take chunks until that is full, and refuse them then."""
    of_all = os.statvfs(tmp_path)
    slots = 2 * of_all.f_blocks * of_all.f_frsize // SLOT_BYTES
    with pytest.raises(ConfigError, match="and its file system has"):
        open_saved(tmp_path / "saved" / "pool", ((CHUNK_BYTES,), "f"), slots, slots)
