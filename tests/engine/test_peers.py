"""Real vLLM on two hosts: what one computed is a hit on the other, with the same tokens or not at all.

The hosts are two network namespaces where this machine lets us have them, else both are this one.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Answer, Engine, started
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import CacheReport
from kv_testing.peers import PATIENT
from kv_testing.servers import Proxy
from kv_testing.two_hosts import Disturbance, TwoHosts, available
from kv_testing.wait import until
from kv_tiers.tier_state import SpillCounts

SMALL = "2MiB"  # four of the six chunks that the prompts make
LARGE = "64MiB"


class Hosts:
    """`serve` starts a server of either, with a peer or without. apart: None where both are this machine."""

    def __init__(self, ending: ExitStack, home: Path, apart: TwoHosts | None) -> None:
        self._ending, self._home, self.apart = ending, home, apart

    def serve(self, host: int, capacity_bytes: str, *, peer: str = "", disk: bool = True) -> ServerProcess:
        home = self._home / str(host)
        home.mkdir(mode=0o700)
        tiers: list[dict[str, Any]] = []
        if disk:
            tiers.append({"type": "disk", "directory": str(home / "kv"), "capacity_bytes": "64MiB"})
        if peer:
            tiers.append({"type": "peers", "hosts": [peer], **PATIENT})
        config = {"host": {"capacity_bytes": capacity_bytes}, "tiers": tiers, "cold": {"wait_s": 20.0}}
        if self.apart is None:
            server = launch({**config, "peers": {"listen": "127.0.0.1:0", "unprotected": True}}, socket=home / "s")
        else:
            server = self.apart.serve(host, config, home / "s")
        self._ending.callback(server.stop)
        return server


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def hosts(request: pytest.FixtureRequest, ending: ExitStack, tmp_path: Path) -> Hosts:
    """Its parameter: a `Disturbance` of the line between the two."""
    try:
        apart = TwoHosts(getattr(request, "param", None))
    except (OSError, subprocess.SubprocessError):
        return Hosts(ending, tmp_path, None)
    ending.callback(apart.close)
    return Hosts(ending, tmp_path, apart)


def joined(server: ServerProcess) -> dict[str, Any]:
    return {"server": {"socket": str(server.socket)}}


def spills_of(server: ServerProcess) -> SpillCounts:
    """To its first lower tier."""
    return cache_of(server).tiers[0].spill


def cache_of(server: ServerProcess) -> CacheReport:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return answer.report.caches[0]


BETWEEN_SITES = Disturbance(delay_s=0.02, jitter_s=0.01, loss=0.03)


@pytest.mark.parametrize(
    ("capacity_bytes", "hosts"),
    [
        pytest.param(LARGE, None, id="from the pool"),
        pytest.param(SMALL, None, id="from the disk", marks=pytest.mark.slow),
        pytest.param(
            LARGE,
            BETWEEN_SITES,
            id="over a line that delays, reorders and loses packets",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not available(BETWEEN_SITES), reason="this machine has no TUN devices for us"),
            ],
        ),
    ],
    indirect=["hosts"],
)
def test_what_an_engine_computed_is_a_hit_of_another_hosts(
    tiny_llama: str, reference: list[Answer], hosts: Hosts, capacity_bytes: str
) -> None:
    there = hosts.serve(0, capacity_bytes)
    with started(tiny_llama, cache=joined(there)) as first:
        for prompt, answer in zip(PROMPTS, reference, strict=True):
            assert first.ask([prompt]) == [answer]
            until(lambda: spills_of(there).waiting == spills_of(there).under_way == 0)
    assert cache_of(there).counts.chunks_resident == (6 if capacity_bytes == LARGE else 4)
    here = hosts.serve(1, LARGE, peer=there.peers)
    with started(tiny_llama, cache=joined(here)) as second:
        assert second.ask_in_turn(PROMPTS) == reference
        assert second.hits == WARM_HITS
        second.assert_at_rest()
        assert cache_of(here).tiers[1].lane.loaded == 6
        if hosts.apart is not None:  # what came is here, and what has not is a miss
            hosts.apart.cut()
            assert second.ask([PROMPTS[0]]) == [reference[0]]
            assert second.hits == [512]
        # Without this the comparisons above could not fail.
        second.inside("kv_corrupt")
        assert second.ask([PROMPTS[2]]) != [reference[2]]


def test_a_peer_that_dies_costs_its_hits_only(tiny_llama: str, reference: list[Answer], hosts: Hosts) -> None:
    there = hosts.serve(0, LARGE)
    with started(tiny_llama, cache=joined(there)) as first:
        assert first.ask_in_turn(PROMPTS) == reference
    here = hosts.serve(1, LARGE, peer=there.peers)
    with started(tiny_llama, cache=joined(here)) as second:
        assert second.ask(PROMPTS[:1]) == reference[:1]
        assert second.hits == [512]
        there.stop(timeout_s=0)
        assert second.ask_in_turn(PROMPTS) == reference
        assert second.hits == [512, 512, 512, 768, 0, 0]
        second.assert_at_rest()


@pytest.mark.slow
def test_bytes_that_are_flipped_on_the_way_are_a_miss_and_the_same_tokens(
    tiny_llama: str, reference: list[Answer], ending: ExitStack, tmp_path: Path
) -> None:
    def flipped(data: bytes) -> bytes:
        at = len(data) - 1000
        return data if at < 0 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    loopback = Hosts(ending, tmp_path, None)
    there = loopback.serve(0, LARGE)
    line = Proxy(int(there.peers.rpartition(":")[2]))
    ending.callback(line.close)
    line.spoil = flipped
    with started(tiny_llama, cache=joined(there)) as first:
        assert first.ask_in_turn(PROMPTS) == reference
    here = loopback.serve(1, LARGE, peer=f"127.0.0.1:{line.port}")
    with started(tiny_llama, cache=joined(here)) as second:
        assert second.ask_in_turn(PROMPTS) == reference
        assert second.hits == [0, 512, 512, 768, 0, 0]  # as if there were no peer
        second.assert_at_rest()
        assert cache_of(here).tiers[1].lane.damaged >= 1
        assert cache_of(here).tiers[1].lane.loaded == 0


@pytest.mark.slow
def test_over_a_slow_line_what_is_quicker_to_compute_is_computed(tiny_llama: str, hosts: Hosts) -> None:
    """The pool has room for one prompt, so each of the others is at the peer when it is asked for again."""
    if hosts.apart is None:
        pytest.skip("this machine has no network namespaces for us")
    prompts = [[3 + (7919 * i + 101 * number * (i + 7)) % 2000 for i in range(1024 + 40)] for number in range(6)]
    there = hosts.serve(0, LARGE)
    with started(tiny_llama, cache=joined(there)) as first:
        expected = first.ask_in_turn(prompts)
    here = hosts.serve(1, SMALL, peer=there.peers, disk=False)
    with started(tiny_llama, cache={"use": "auto", **joined(here)}) as second:
        for _ in range(2):  # it is learnt what loading and computing take
            assert second.ask_in_turn(prompts) == expected
        assert sum(second.hits[3:]) >= 2 * 1024  # a busy machine may be late once
        hosts.apart.throttle("5mbit")  # three seconds for a prompt
        for _ in range(2):
            assert second.ask_in_turn(prompts) == expected
        assert sum(second.hits[3:]) <= 1024
        until(lambda: cache_of(here).counts.chunks_reserved == 0, within_s=30)  # what is on its way still arrives
        second.assert_at_rest()


# An engine whose own host has no server.


def keeper(ending: ExitStack, home: Path, listen: str = "127.0.0.1:0") -> ServerProcess:
    """A server that keeps what engines of other hosts store."""
    peers = {"listen": listen, "unprotected": True, "take_stores": True}
    server = launch({"host": {"capacity_bytes": LARGE}, "cold": {"wait_s": 20.0}, "peers": peers}, socket=home / "s")
    ending.callback(server.stop)
    return server


def kept_at(server: ServerProcess) -> dict[str, Any]:
    """Settings of an engine whose own pool has four of the six chunks that the prompts make."""
    elsewhere = {"url": f"kvs://{server.peers}", "answer_s": 10.0}
    small, patient = {"capacity_bytes": SMALL}, {"wait_s": 20.0}
    return {"host": small, "server": elsewhere, "peers": {"unprotected": True}, "cold": patient}


def test_an_engine_keeps_its_chunks_in_another_hosts_server(
    tiny_llama: str, reference: list[Answer], ending: ExitStack, tmp_path: Path
) -> None:
    server = keeper(ending, tmp_path)
    with started(tiny_llama, cache=kept_at(server)) as first:
        assert first.ask_in_turn(PROMPTS, settles=True) == reference
        first.assert_at_rest()
    assert cache_of(server).counts.chunks_resident == 6
    with started(tiny_llama, cache=kept_at(server)) as second:  # as after a restart
        assert second.ask_in_turn(PROMPTS, settles=True) == reference
        assert second.hits == WARM_HITS
        second.assert_at_rest()
        # Without this the comparisons above could not fail.
        second.inside("kv_corrupt")
        assert second.ask([PROMPTS[5]]) != [reference[5]]


@pytest.mark.slow
def test_a_server_elsewhere_that_dies_and_returns_costs_hits_only(
    tiny_llama: str, reference: list[Answer], ending: ExitStack, tmp_path: Path
) -> None:
    server = keeper(ending, tmp_path)
    with started(tiny_llama, cache=kept_at(server)) as engine:
        assert engine.ask_in_turn(PROMPTS, settles=True) == reference
        server.stop(timeout_s=0)
        assert engine.ask_in_turn(PROMPTS) == reference
        again = keeper(ending, tmp_path, server.peers)
        # What the small pool has lost is computed and stored again, what it still has stays there.
        until(lambda: is_stored_at(again, engine, reference), within_s=60)
        engine.assert_at_rest()


def is_stored_at(server: ServerProcess, engine: Engine, reference: list[Answer]) -> bool:
    """Whether chunks have come to this server; the engine is asked again until they have."""
    assert engine.ask_in_turn(PROMPTS) == reference
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return any(one.counts.chunks_resident for one in answer.report.caches)
