"""Pages are there before they are written or read, others only a bounded distance ahead, and nothing outlives a pool.

What is there is asked of the kernel: /proc/self/pagemap, which says it of this process's own table of pages.
"""

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kv_core.keys import ChunkKey
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch
from kv_server.remote_cache import MappedPool
from kv_testing.threads import threads_left
from kv_testing.wait import until
from kv_tiers import HostPool
from kv_tiers.pool import host_pool, populated
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.pool.populated import LEAST_AHEAD, MOST_AHEAD, WORTH_BYTES, distance

MIB = 1 << 20
SLOTS = 160  # of a MiB
KINDS = ("anonymous", "named", "shared")
HUGE = 2 * MIB  # more than was asked for is there where a page is this large

pytestmark = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="the kernel cannot populate"
)


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostPool]:
    if request.param == "named":
        monkeypatch.setattr(host_pool, "_parent", lambda: Path("/dev/shm"))
    made = getattr(HostPool, request.param)(name := f"test-{uuid.uuid4().hex}", MIB, SLOTS)
    yield made
    made.close()
    if request.param == "named":
        HostPool.unlink(name)


def there(view: memoryview) -> list[bool]:
    """Of each MiB whether all its pages are there, or none. Raises where it is some."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = pagemap.read(len(view) // PAGE_BYTES * 8)
    present = [bool(entry >> 63) for entry in memoryview(entries).cast("Q")]
    pages = MIB // PAGE_BYTES
    return [all(present[at : at + pages]) for at in range(0, len(present), pages)]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-populate"]


def at_rest() -> bool:
    return not threads()


def test_what_is_handed_out_next_is_there_already(pool: HostPool) -> None:
    """And it stays so while slots are handed out, as long as the thread keeps up."""
    ahead_at_start = LEAST_AHEAD // MIB
    until(at_rest)
    for _ in range(SLOTS):
        slot = pool.allocate()
        assert slot is not None
        until(at_rest)
        pages = there(pool.view)
        assert pages[slot]
        assert sum(pages) >= min(SLOTS, slot + ahead_at_start // 2)  # one less: a thread that ends may miss a call
        assert sum(pages) * MIB <= (slot + 1) * MIB + LEAST_AHEAD + HUGE
    assert all(there(pool.view))


def test_a_pool_that_is_not_used_takes_the_least(pool: HostPool) -> None:
    until(at_rest)
    for _ in range(5):
        pool.free(pool.allocate() or 0)
    until(at_rest)
    assert LEAST_AHEAD <= sum(there(pool.view)) * MIB <= LEAST_AHEAD + HUGE
    assert not any(pool.view[:: PAGE_BYTES // 2])


def test_what_is_written_meanwhile_stays(pool: HostPool) -> None:
    """A store may be ahead of the thread, and the thread never writes."""
    for slot in range(SLOTS):
        assert pool.allocate() == slot
        with pool.chunk(slot, MIB) as chunk:
            chunk[:] = bytes([slot + 1]) * MIB
    until(at_rest)
    for slot in range(SLOTS):
        with pool.chunk(slot, MIB) as chunk:
            assert bytes(chunk) == bytes([slot + 1]) * MIB


def test_the_distance_is_bounded_and_grows_with_use() -> None:
    used = [0, 1, LEAST_AHEAD, 3 * LEAST_AHEAD, 4 * LEAST_AHEAD, MOST_AHEAD, 3 * MOST_AHEAD, 100 << 30]
    distances = [distance(nbytes) for nbytes in used]
    assert distances == sorted(distances)
    assert distances[0] == LEAST_AHEAD
    assert distances[-1] == MOST_AHEAD
    assert distance(1 << 30) <= 1 << 28, "a pool of 100 GiB of which 1 GiB is used takes a quarter of that more"


@pytest.fixture
def small_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populated, "LEAST_AHEAD", 4 * MIB)
    monkeypatch.setattr(populated, "MOST_AHEAD", 8 * MIB)
    monkeypatch.setattr(populated, "PAUSE_S", 0.02)


@pytest.mark.usefixtures("small_distance")
def test_what_an_earlier_process_filled_is_mapped_too() -> None:
    """And no more than the distance after it."""
    pool = HostPool.anonymous("p", MIB, SLOTS)
    until(at_rest)
    pool.take(range(100))
    until(at_rest)
    pages = there(pool.view)
    assert all(pages[:108])
    assert sum(pages) <= 110
    pool.close()


@pytest.mark.usefixtures("small_distance")
def test_what_is_written_next_goes_before_what_others_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that starts in the middle of a large pool begins there."""
    pool = HostPool.anonymous("p", MIB, SLOTS)
    until(at_rest)
    monkeypatch.setattr(populated, "_MADV_POPULATE_READ", 9999)
    pool.take(range(100))
    until(at_rest)
    pages = there(pool.view)
    assert sum(pages[:100]) <= 6
    assert all(pages[100:108])
    assert sum(pages[100:]) <= 10
    pool.close()


@pytest.mark.usefixtures("small_distance")
@pytest.mark.parametrize("seed", range(12))
def test_all_that_others_have_written_is_mapped_whatever_the_order(seed: int) -> None:
    """Slots are used in any order, by several processes, so that what is ahead has gaps."""
    chosen = random.Random(seed)
    pool = HostPool.shared("p", MIB, SLOTS)
    written = chosen.randrange(1, SLOTS)
    for slot in range(written):
        with pool.chunk(slot, MIB) as chunk:
            chunk[:] = bytes([1]) * MIB
    mapped = MappedPool("p", (MIB,), SLOTS, os.dup(pool.descriptor))
    most = 0
    for _ in range(chosen.randrange(12)):
        slot = chosen.randrange(min(SLOTS, most + 40))
        chosen.choice([mapped.will_write, mapped.will_read])([slot])
        most = max(most, slot)
        if chosen.random() < 0.5:
            until(at_rest)
    until(at_rest)
    mapped.will_read([most])  # a thread that was about to end may have missed the last
    until(at_rest)
    pages = there(mapped.view)
    at_end = min(SLOTS, most + 1 + populated.MOST_AHEAD // MIB)
    assert all(pages[: most + 1])
    assert not any(pages[max(at_end, written + populated.MOST_AHEAD // MIB) :])
    mapped.close()
    pool.close()


def test_who_maps_a_servers_pool_has_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool.shared("p", MIB, SLOTS)
    mapped = MappedPool("p", (MIB,), SLOTS, os.dup(pool.descriptor))
    until(at_rest)
    assert LEAST_AHEAD <= sum(there(mapped.view)) * MIB <= LEAST_AHEAD + HUGE
    mapped.will_write(range(50, 60))
    until(at_rest)
    assert all(there(mapped.view)[60:100])
    assert LEAST_AHEAD <= sum(there(pool.view)) * MIB <= LEAST_AHEAD + HUGE, "a table of pages is each process's own"
    mapped.close()
    mapped.will_write([SLOTS - 1])
    assert at_rest()
    pool.close()


def test_a_store_through_a_server_finds_its_pages(tmp_path: Path) -> None:
    """A real server in a process of its own: what a client is handed to write in is mapped before it writes."""
    server = launch({"host": {"capacity_bytes": SLOTS * MIB}}, socket=tmp_path / "s")
    cache = RemoteCache(tmp_path / "s", group_bytes=(MIB,), fingerprint="f")
    until(at_rest)
    for number in range(4):
        lease = cache.begin_store(key_chain(30, branch=str(number)), f"holder {number}")
        pages = there(cache.pool.view)
        assert len(lease.keys) == 30
        assert all(pages[extent.offset // MIB] for extent in lease.extents)
        cache.commit(lease)
        until(at_rest)
    cache.close()
    server.stop()


def test_a_load_through_a_server_finds_its_pages(tmp_path: Path) -> None:
    """Of one that only reads, as the engine of a decode server: what was stored before it came, and what comes next."""
    server = launch({"host": {"capacity_bytes": SLOTS * MIB}}, socket=tmp_path / "s")
    writer, reader = (RemoteCache(tmp_path / "s", group_bytes=(MIB,), fingerprint="f") for _ in range(2))
    stored = [key_chain(40, branch=str(number)) for number in range(4)]

    def store(keys: Sequence[ChunkKey]) -> None:
        writer.commit(writer.begin_store(keys, "writer"))

    def load(cache: RemoteCache, keys: Sequence[ChunkKey]) -> bool:
        """Whether all pages of these chunks were mapped when they were leased."""
        pages = there(cache.pool.view)
        lease = cache.load(keys, "reader")
        assert isinstance(lease, ReadLease)
        until(at_rest)
        return all(pages[extent.offset // MIB] for extent in lease.extents)

    for keys in stored[:3]:
        store(keys)
        until(at_rest)
    assert load(reader, stored[0]), "the least distance is more"
    assert load(reader, stored[1])
    assert load(reader, stored[2])
    store(stored[3])
    assert load(reader, stored[3])
    late = RemoteCache(tmp_path / "s", group_bytes=(MIB,), fingerprint="f")
    until(at_rest)
    assert load(late, stored[3]), "stored before it came"
    for cache in (writer, reader, late):
        cache.close()
    server.stop()


def test_a_store_does_not_wait_for_what_others_have_written() -> None:
    """What is ahead is populated at once although the thread pauses before it maps the rest."""
    pool = HostPool.shared("p", MIB, SLOTS)
    mapped = MappedPool("p", (MIB,), SLOTS, os.dup(pool.descriptor))
    until(at_rest)
    mapped.will_read([90])
    began_s = time.monotonic()
    mapped.will_write([100])
    until(lambda: there(mapped.view)[120])
    assert not any(there(mapped.view)[70:90]) or time.monotonic() - began_s > populated.PAUSE_S
    mapped.close()
    assert at_rest()
    pool.close()


@pytest.mark.parametrize("kind", ["anonymous", "shared"])
def test_a_pool_can_be_closed_in_every_phase(kind: str) -> None:
    """Before the thread began, between any two of its slices, and when it has ended: it goes first."""
    chosen = random.Random(11)
    for _ in range(40):
        pool = getattr(HostPool, kind)("p", MIB, SLOTS)
        for _ in range(chosen.randrange(60)):
            pool.allocate()
        time.sleep(chosen.random() * 0.03)
        began = time.monotonic()
        pool.close()
        assert at_rest()
        assert time.monotonic() - began < 5


def test_a_pool_that_could_not_be_closed_still_works() -> None:
    pool = HostPool.anonymous("p", MIB, SLOTS)
    lent = pool.view[:5]
    with pytest.raises(BufferError):
        pool.close()
    assert [pool.allocate() for _ in range(SLOTS)] == list(range(SLOTS))
    lent.release()
    pool.close()


def test_a_kernel_without_the_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populated, "_MADV_POPULATE_WRITE", 9999)
    pool = HostPool.anonymous("p", MIB, SLOTS)
    until(at_rest)
    assert [pool.allocate() for _ in range(SLOTS)] == list(range(SLOTS))
    assert at_rest()
    assert not any(there(pool.view))
    pool.close()


def test_a_system_without_threads_costs_only_the_pages_that_are_there_already() -> None:
    with threads_left(0):
        pool = HostPool.anonymous("p", MIB, SLOTS)
        assert pool.allocate() == 0
        HostPool.anonymous("q", MIB, SLOTS).close()
    assert not any(there(pool.view))
    assert pool.allocate() == 1
    until(at_rest)
    assert sum(there(pool.view)) * MIB >= LEAST_AHEAD // 2
    pool.close()


def test_a_small_pool_has_no_thread() -> None:
    pool = HostPool.anonymous("p", WORTH_BYTES, 1)
    pool.allocate()
    assert at_rest()
    pool.close()


def test_a_forked_child_goes_on_by_itself() -> None:
    """The thread is not there in the child, whatever it was about to do."""
    script = f"""
import os, time
from kv_tiers import HostPool
from kv_tiers.pool.populated import LEAST_AHEAD
for pause in range(12):
    pool = HostPool.shared("p", {MIB}, {SLOTS})
    time.sleep(pause / 1000)
    child = os.fork()
    if child == 0:
        for _ in range({SLOTS}):
            pool.allocate()
        pool.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pool.close()
print("done")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
