"""Two servers with a line between them that is cut, throttled, slow and lossy: two network namespaces."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv_core.keys import ChunkKey
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_server import RemoteCache, wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess
from kv_server.report import DrainState
from kv_testing.cache_servers import SLOT_BYTES, held, join_server, read, report_of, settings_for, store
from kv_testing.two_hosts import ADDRESSES, Disturbance, TwoHosts, available
from kv_testing.wait import until
from kv_tiers.testing.tier_contract import content

pytestmark = pytest.mark.skipif(not available(), reason="this machine has no network namespaces for us")


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    """Its parameter: a `Disturbance` of the line."""
    made = TwoHosts(getattr(request, "param", None))
    yield made
    made.close()


@pytest.fixture
def ending(hosts: TwoHosts) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(ending: ExitStack, hosts: TwoHosts, home: Path, host: int, slots: int = 16, **cold: object) -> ServerProcess:
    """With a disk, and the other host's server as its peer. Its socket is `home`'s."""
    home.mkdir(mode=0o700, exist_ok=True)
    config = settings_for(home, slots, disk=True)
    peers = {
        "type": "peers",
        "hosts": [f"{ADDRESSES[1 - host]}:9500"],
        "unprotected": True,
        "connect_timeout_s": 2.0,  # a busy machine may be late, and a cut line is never in time
        "answer_timeout_s": 2.0,
    }
    tiers = [*config["tiers"], peers]  # type: ignore[misc]
    server = hosts.serve(host, {**config, "tiers": tiers, "cold": {"wait_s": 10.0, **cold}}, home / "s")
    ending.callback(server.stop)
    return server


def test_what_is_on_one_host_is_found_on_the_other_but_while_the_line_is_cut(
    ending: ExitStack, hosts: TwoHosts, home: Path
) -> None:
    """From the pool and from the disk of the other; a line that is cut says nothing, not even that it is."""
    serve(ending, hosts, home / "one", 0, slots=4)
    serve(ending, hosts, home / "two", 1)
    one, two = join_server(home / "one"), join_server(home / "two")
    ending.callback(one.close)
    ending.callback(two.close)
    prompts = [key_chain(4, branch=str(number)) for number in range(6)]
    for number, keys in enumerate(prompts):  # the pool has room for one of them
        store(one, keys)
        until(lambda stored=4 * (number + 1): disk_chunks(home / "one") == stored)  # type: ignore[misc]
    for keys in prompts[:2]:
        until(lambda keys=keys: held(two, keys) == 4, within_s=60)  # type: ignore[misc]
        assert read(two, keys)
    hosts.cut()
    assert held(two, prompts[2]) == 0
    assert held(two, prompts[0]) == 4  # what came is here
    hosts.mend()
    until(lambda: held(two, prompts[3]) == 4, within_s=60)
    assert read(two, prompts[3])
    # And the other way round, as each is the other's peer.
    store(two, keys := key_chain(3, branch="of the other"))
    until(lambda: held(one, keys) == 3, within_s=60)
    assert read(one, keys)


def disk_chunks(home: Path) -> int:
    (cache,) = report_of(home / "s").caches
    return cache.tiers[0].usage.chunks or 0


def test_a_throttled_line_carries_what_it_can(ending: ExitStack, hosts: TwoHosts, home: Path) -> None:
    serve(ending, hosts, home / "one", 0)
    serve(ending, hosts, home / "two", 1)
    hosts.throttle("1mbit")
    one, two = join_server(home / "one"), join_server(home / "two")
    ending.callback(one.close)
    ending.callback(two.close)
    store(one, keys := key_chain(8))
    until(lambda: held(two, keys) == 8, within_s=60)
    assert read(two, keys)


LARGE = 1 << 16


def has_content(cache: RemoteCache, keys: list[ChunkKey]) -> bool:
    """Whether a load brings the bytes of chunks of this size."""
    lease = cache.load(keys, "reader")
    assert isinstance(lease, ReadLease)
    right = all(
        bytes(cache.pool.view[extent.offset : extent.offset + extent.nbytes]) == content(key, LARGE)
        for key, extent in zip(keys, lease.extents, strict=True)
    )
    return cache.release(lease) and right


DISTURBED = Disturbance(delay_s=0.02, jitter_s=0.01, loss=0.03)


@pytest.mark.skipif(not available(DISTURBED), reason="this machine has no TUN devices for us")
@pytest.mark.parametrize("hosts", [DISTURBED], indirect=True)
def test_a_line_that_delays_reorders_and_loses_packets_brings_right_bytes(
    ending: ExitStack, hosts: TwoHosts, home: Path
) -> None:
    """A round trip takes 40 to 60 ms, as between two sites, and one packet of 33 never arrives."""
    serve(ending, hosts, home / "one", 0, slots=4 * LARGE // SLOT_BYTES)
    serve(ending, hosts, home / "two", 1, slots=16 * LARGE // SLOT_BYTES)
    one, two = join_server(home / "one", group_bytes=(LARGE,)), join_server(home / "two", group_bytes=(LARGE,))
    ending.callback(one.close)
    ending.callback(two.close)
    prompts = [key_chain(4, branch=str(number)) for number in range(3)]
    for number, keys in enumerate(prompts):  # the pool has room for one of them
        store(one, keys)
        until(lambda stored=4 * (number + 1): disk_chunks(home / "one") == stored)  # type: ignore[misc]
    for keys in prompts:
        until(lambda keys=keys: held(two, keys) == 4, within_s=60)  # type: ignore[misc]
        assert has_content(two, keys)


@pytest.mark.slow
def test_a_drain_over_a_throttled_line_ends_in_time_and_goes_on_where_it_was(
    ending: ExitStack, hosts: TwoHosts, home: Path
) -> None:
    leaving = serve(ending, hosts, home / "one", 0, slots=64 * LARGE // SLOT_BYTES)
    # It fetches one chunk after the other, and lets the rest of what it is offered wait.
    serve(ending, hosts, home / "two", 1, slots=128 * LARGE // SLOT_BYTES, prefetch_share=0.001)
    hosts.throttle("2mbit")
    one, two = join_server(home / "one", group_bytes=(LARGE,)), join_server(home / "two", group_bytes=(LARGE,))
    ending.callback(one.close)
    ending.callback(two.close)
    prompts = [key_chain(4, branch=str(number)) for number in range(10)]
    for keys in prompts:
        store(one, keys)
    first = drained(home / "one", 0.6)
    assert first.phase == "stopped" and first.why == "the time is up"
    assert first.left == 40 - first.moved > 0
    again = drained(home / "one", 80.0)
    assert again.phase == "drained" and again.moved + again.elsewhere == 40
    assert again.elsewhere >= first.moved
    leaving.stop()
    for keys in prompts:
        assert held(two, keys) == 4
        assert has_content(two, keys)


def drained(home: Path, timeout_s: float) -> DrainState:
    ask_server(home / "s", wire.Drain(True, timeout_s, None), timeout_s=10.0)
    states: list[DrainState] = []

    def has_ended() -> bool:
        state = report_of(home / "s").caches[0].drain
        assert state is not None
        states.append(state)
        return state.phase != "draining"

    until(has_ended, within_s=90)
    return states[-1]
