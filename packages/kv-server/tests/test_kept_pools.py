"""A pool with a name outlives a server that was stopped, and nothing else that a server may have left is believed."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from kv_core.lookup import Ended
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache
from kv_server.caches import cache_name
from kv_server.succession.kept import kept_path
from kv_testing.cache_servers import SLOT_BYTES, fill, join_server, lose, read, report_of, store
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.upgrades import UpgradedServers
from kv_testing.wait import line, until


class Kept(UpgradedServers):
    """Servers whose pool has a name, without a disk."""

    def __init__(self, home: Path, slots: int = 8) -> None:
        self.name = f"test-{token_hex(6)}"
        self.file = kept_path(self.name, cache_name(((CHUNK_BYTES,), "f")))
        super().__init__(home, self.settings(slots))

    def settings(self, slots: int) -> dict[str, object]:
        return {"host": {"name": self.name, "capacity_bytes": slots * SLOT_BYTES}}

    @property
    def index(self) -> Path:
        return self.file.with_name(f"{self.file.name}.index")

    def restart(self) -> None:
        self.process = self.start()
        assert line(self.process.stdout).startswith("READY")


@pytest.fixture
def kept(home: Path) -> Iterator[Kept]:
    servers = Kept(home)
    yield servers
    servers.close()
    servers.file.unlink(missing_ok=True)
    servers.index.unlink(missing_ok=True)


def back(cache: RemoteCache) -> None:
    until(lambda: cache.lookup(key_chain(1, branch="none"), "asker").ended is not Ended.REFUSED)


def test_after_a_stop_everything_is_found_and_copies_go_on(kept: Kept) -> None:
    cache = join_server(kept.home)
    keys, pool = key_chain(3), cache.pool
    store(cache, keys)
    lasting = cache.load(keys, "l", lasting=True)
    writing = cache.begin_store(key_chain(2, branch="w"), "w")
    assert isinstance(lasting, ReadLease)
    kept.close()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.file, kept.index)] == [0o600, 0o600]
    kept.restart()
    back(cache)
    assert not kept.index.exists()
    assert (cache.generation, cache.pool) == (0, pool)
    assert cache.release(lasting)
    fill(cache, writing)
    cache.commit(writing)
    assert read(cache, keys) and read(cache, writing.keys)
    counts = cache.counts()
    assert (counts.slots_used, counts.read_leases, counts.write_leases, counts.chunks_damaged) == (5, 0, 0, 0)
    cache.close()


def test_slots_that_a_client_may_be_writing_are_nobody_elses_after_a_restart(kept: Kept) -> None:
    cache = join_server(kept.home)
    writing = cache.begin_store(key_chain(6, branch="w"), "w")
    lose(cache)
    until(lambda: report_of(kept.home / "s").orphans == 1)
    kept.close()
    kept.restart()
    other = join_server(kept.home)
    assert report_of(kept.home / "s").orphans == 1
    assert len(other.begin_store(key_chain(8, branch="o"), "o").keys) == 2
    with cache._lock:
        cache._link.back_off(0)
    back(cache)
    fill(cache, writing)
    cache.commit(writing)
    assert read(cache, writing.keys)
    cache.close()
    other.close()


def test_a_chunk_whose_bytes_have_changed_meanwhile_is_not_found(kept: Kept) -> None:
    cache = join_server(kept.home)
    keys = key_chain(3)
    lease = store(cache, keys)
    kept.close()
    with kept.file.open("r+b") as file:
        file.seek(lease.extents[1].offset)
        file.write(b"wrong")
    kept.restart()
    back(cache)
    assert cache.lookup(keys, "r").chunks == 1
    assert cache.counts().chunks_damaged == 1
    cache.close()


def test_it_outlives_live_upgrades_too(kept: Kept) -> None:
    cache = join_server(kept.home)
    store(cache, key_chain(3))
    kept.upgrade()
    store(cache, key_chain(2, branch="later"))
    kept.close()
    kept.restart()
    back(cache)
    assert read(cache, key_chain(3)) and read(cache, key_chain(2, branch="later"))
    cache.close()


@pytest.mark.parametrize("how", ["killed", "no index", "half an index", "another format", "another size"])
def test_what_was_not_left_by_a_clean_stop_is_an_empty_pool_in_another_file(kept: Kept, how: str) -> None:
    cache = join_server(kept.home)
    keys = key_chain(3)
    store(cache, keys)
    number = kept.file.stat().st_ino
    if how == "killed":
        os.kill(kept.process.pid, signal.SIGKILL)
    kept.close()
    if how == "no index":
        kept.index.unlink()
    elif how == "half an index":
        kept.index.write_bytes(kept.index.read_bytes()[:50])
    elif how == "another format":
        data = kept.index.read_bytes()
        kept.index.write_bytes(data[:16] + data[16:].replace(b"\xa6format\x01", b"\xa6format\x02"))
    elif how == "another size":
        kept.config.write_text(kept.config.read_text().replace(str(8 * SLOT_BYTES), str(9 * SLOT_BYTES)))
    kept.restart()
    back(cache)
    assert cache.generation == 1
    assert cache.lookup(keys, "r").chunks == 0
    assert kept.file.stat().st_ino != number and "starts empty" in kept.log.read_text()
    store(cache, keys)
    assert read(cache, keys)
    cache.close()


def test_a_second_server_cannot_have_the_same_pool(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = join_server(kept.home)
    second = tmp_path_factory.mktemp("second")
    second.chmod(0o700)
    servers = UpgradedServers(second, kept.settings(8))
    with pytest.raises(Exception, match="another server has the pool"):
        join_server(second)
    store(cache, key_chain(1))
    assert read(cache, key_chain(1))
    cache.close()
    servers.close()
