"""One cache at two addresses: the same calls, the same answers.

Each scenario is a list of verbs, played through a `LocalCache` and through a `RemoteCache` whose server has an equal
one. Every answer is compared, and at the end the counts: chunks, tiers, reasons, the numbers of leases, and
the bytes that are read. Where in which pool a chunk lies is not: slots given back together come again in any order.
"""

import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.coverage import ALL, PLAIN, STATE, ChunkShape, Coverage
from kv_core.errors import MisuseError
from kv_core.keys import ChunkKey
from kv_core.service import CacheService, Ended, LoadFailed, ReadLease, WriteLease
from kv_core.testing import key_chain, keys_of
from kv_core.transfer import HostExtent
from kv_server import RemoteCache, ServerConfig
from kv_server.server import CacheServer
from kv_testing.service_contract import CHUNK_BYTES, GROUP_BYTES
from kv_testing.shapes import keys_for
from kv_tiers import ColdConfig, HostConfig, LocalCache, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import content

SLOTS = 8
Tiers = list[dict[str, object]]


@dataclass
class Address:
    """A cache somewhere. lanes_rest: wait until the tiers below have done all there is to do."""

    service: CacheService
    view: memoryview
    behind: LocalCache
    clock: HandClock
    close: Callable[[], None]

    def let_lanes_rest(self) -> None:
        self.behind.lower.drain(10)
        end = time.monotonic() + 10
        while any(state.lane.queued or state.spill.under_way for state in self.behind.lower.states()):
            assert time.monotonic() < end


def config(policy: str) -> HostConfig:
    return HostConfig(capacity_bytes=SLOTS * slot_bytes_for(CHUNK_BYTES), policy=policy)


COLD = ColdConfig(batch_bytes=1 << 20, prefetch_share=1.0, spill_share=1.0)


def in_process(tiers: Tiers, policy: str) -> Address:
    clock = HandClock()
    cache = build_local_cache(
        config(policy), group_bytes=GROUP_BYTES, fingerprint="f", tiers=tiers, cold=COLD, clock=clock
    )
    return Address(cache, cache.pool.view, cache, clock, cache.close)


def at_a_server(tiers: Tiers, policy: str) -> Address:
    clock = HandClock()
    home = tempfile.TemporaryDirectory(prefix="kv-")
    path = Path(home.name) / "s"
    server = CacheServer(ServerConfig(host=config(policy), tiers=tiers, cold=COLD, socket=str(path)), clock=clock)
    thread = threading.Thread(target=server.serve)
    thread.start()
    cache = RemoteCache(path, group_bytes=GROUP_BYTES, fingerprint="f", timeout_s=10)
    (behind,) = server.caches.values()

    def close() -> None:
        cache.close()
        server.stop()
        thread.join()
        home.cleanup()

    return Address(cache, cache.pool.view, behind, clock, close)


@dataclass
class Player:
    """Plays a scenario at one address and writes down what is answered, with nothing that names the address."""

    at: Address
    heard: list[object] = field(default_factory=list)
    leases: dict[str, ReadLease | WriteLease] = field(default_factory=dict)

    def play(self, scenario: Sequence[tuple[object, ...]]) -> list[object]:
        for verb, *arguments in scenario:
            try:
                answer = getattr(self, str(verb))(*arguments)
            except MisuseError as refusal:
                answer = ("misuse", re.sub(r" (in this session|committed|released|:).*", "", str(refusal)))
            self.heard.append((verb, without_pool(answer)))
        counts = self.at.service.counts()
        if any(verb == "fetch" for verb, *_ in scenario):  # how often one must ask is the tiers' pace
            counts = replace(counts, lookups=0, chunks_asked=0, chunks_hit=0)
        self.heard.append(counts)
        return self.heard

    def lookup(self, keys: list[ChunkKey], holder: str, shape: int | ChunkShape = 1) -> object:
        """shape: a number is of shards."""
        shape = keys_of(shape) if isinstance(shape, int) else shape
        return self.at.service.lookup(keys, holder, shape=shape)

    def fetch(self, keys: list[ChunkKey], holder: str, shape: ChunkShape = PLAIN) -> object:
        """Ask patiently until the answer is final."""
        end = time.monotonic() + 10
        ask = partial(self.at.service.lookup, keys, holder, shape=shape, wait_for_promotion=True)
        while (plan := ask()).ended is Ended.PENDING:
            assert time.monotonic() < end
        return plan

    def renew(self, holder: str) -> object:
        return self.at.service.renew(holder)

    def load(self, keys: list[ChunkKey], holder: str, name: str = "") -> object:
        answer = self.at.service.load(keys, holder)
        if isinstance(answer, ReadLease) and name:
            self.leases[name] = answer
        return answer

    def begin_store(self, keys: list[ChunkKey], holder: str, name: str) -> object:
        lease = self.leases[name] = self.at.service.begin_store(keys, holder)
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            self.at.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
        return lease

    def read(self, name: str) -> object:
        extents = self.leases[name].extents
        return [bytes(self.at.view[extent.offset : extent.offset + extent.nbytes]) for extent in extents]

    def commit(self, name: str) -> object:
        lease = self.leases[name]
        assert isinstance(lease, WriteLease)
        return self.at.service.commit(lease)

    def release(self, name: str) -> object:
        return self.at.service.release(self.leases[name])

    def forget(self, keys: list[ChunkKey]) -> object:
        return self.at.service.forget(keys)

    def end(self, holder: str) -> object:
        return self.at.service.end(holder)

    def clear(self) -> object:
        return self.at.service.clear()

    def counts(self) -> object:
        return self.at.service.counts()

    def advance(self, seconds: float) -> object:
        return self.at.clock.advance(seconds)

    def rest(self) -> object:
        return self.at.let_lanes_rest()


def without_pool(answer: object) -> object:
    match answer:
        case ReadLease() | WriteLease():
            return replace(answer, extents=tuple(HostExtent("", 0, one.nbytes) for one in answer.extents))
    return answer


def store(keys: list[ChunkKey], name: str, holder: str = "w") -> list[tuple[object, ...]]:
    return [("begin_store", keys, holder, name), ("commit", name)]


A, B, C = (key_chain(5, branch=branch) for branch in "abc")
SHARDED = key_chain(3, shards=2)
HYBRID = ChunkShape(4, (ALL, STATE))
WINDOWS = ChunkShape(4, (ALL, Coverage("window", 5)))
STATES = ChunkShape(4, (STATE,))
MIXED = keys_for(HYBRID, 4)

SCENARIOS: Mapping[str, tuple[Tiers, list[tuple[object, ...]]]] = {
    "store, load, read": (
        [],
        [
            ("lookup", A, "r"),
            *store(A, "1"),
            ("lookup", A, "r"),
            ("load", A, "r", "2"),
            ("read", "2"),
            ("release", "2"),
            ("release", "2"),
            ("end", "r"),
        ],
    ),
    "eviction": (
        [],
        [
            *store(A, "1"),
            ("lookup", A, "keeps"),
            *store(B, "2"),
            ("lookup", B, "r"),
            ("lookup", C, "r"),
            ("end", "keeps"),
            *store(C, "3"),
            *store(key_chain(12), "4"),
            ("lookup", key_chain(12), "r"),
            ("lookup", A, "r"),
        ],
    ),
    "expiry": (
        [],
        [
            *store(A, "1"),
            ("lookup", A, "r"),
            ("load", A[:2], "l", "2"),
            ("advance", 200.0),
            ("renew", "r"),
            ("advance", 100.0),
            ("release", "2"),
            ("renew", "r"),
            ("begin_store", B, "w", "3"),
            ("advance", 10_000.0),
            ("renew", "r"),
            ("commit", "3"),
            ("counts",),
        ],
    ),
    "forget": (
        [],
        [
            *store(A, "1"),
            ("load", A, "l", "2"),
            ("begin_store", B, "w", "3"),
            ("forget", [A[2], *B[3:]]),
            ("lookup", A, "r"),
            ("commit", "3"),
            ("lookup", B, "r"),
            ("release", "2"),
            ("load", A, "l"),
            ("clear",),
            ("lookup", A, "r"),
        ],
    ),
    "failures": (
        [],
        [
            ("load", A, "l"),
            ("load", A[:1], "l"),
            ("lookup", A, "r", 2),
            ("begin_store", A, "w", "1"),
            ("release", "1"),
            ("release", "1"),
            ("commit", "1"),
            *store(A, "2"),
            ("commit", "2"),
            ("begin_store", B, "x", "3"),
            ("end", "x"),
            ("release", "3"),
            ("commit", "3"),
            ("renew", "nobody"),
            ("end", "nobody"),
            ("begin_store", [], "w", "4"),
            ("lookup", [], "r"),
            ("commit", "4"),
        ],
    ),
    "windows and states": (
        [],
        [
            *store(MIXED[0::2], "1"),
            ("lookup", MIXED, "r", HYBRID),
            *store(MIXED[5::2], "2"),
            ("lookup", MIXED, "r", HYBRID),
            ("load", [*MIXED[0::2], MIXED[7]], "l", "3"),
            ("read", "3"),
            ("release", "3"),
            ("lookup", MIXED[:6], "r", HYBRID),
            ("forget", MIXED[7:8]),
            ("lookup", MIXED, "r", HYBRID),
            ("lookup", MIXED[1::2], "s", STATES),
            ("renew", "s"),
            ("end", "s"),
            ("lookup", MIXED, "r", WINDOWS),
        ],
    ),
    "windows and states below": (
        [{"type": "dram", "capacity_bytes": 64 * 4096}],
        [
            *store(MIXED[0::2], "1"),
            ("rest",),
            *store(MIXED[1::2], "2"),
            ("rest",),
            *store(key_chain(8, branch="crowd"), "3"),
            ("rest",),
            ("fetch", MIXED, "r", HYBRID),
            ("load", [*MIXED[0::2], MIXED[7]], "l", "4"),
            ("read", "4"),
        ],
    ),
    "shards": (
        [],
        [
            *store(SHARDED[0::2], "1"),
            ("lookup", SHARDED, "r", 2),
            *store(SHARDED[1::2], "2"),
            ("lookup", SHARDED, "r", 2),
            ("lookup", [*A, A[0]], "r", 3),
        ],
    ),
    "a tier below": (
        [{"type": "dram", "capacity_bytes": 64 * 4096}],
        [
            *store(A, "1"),
            ("rest",),
            *store(B, "2"),
            ("rest",),
            *store(C, "3"),
            ("rest",),
            ("lookup", A, "r"),
            ("fetch", A, "r"),
            ("load", A, "l", "4"),
            ("read", "4"),
            ("release", "4"),
            ("end", "r"),
            ("rest",),
            ("forget", B[1:]),
            ("rest",),
            ("fetch", B, "s"),
            ("end", "s"),
            ("clear",),
            ("rest",),
            ("fetch", A, "s"),
        ],
    ),
}


def both(tiers: Tiers, policy: str, scenario: Sequence[tuple[object, ...]]) -> tuple[list[object], list[object]]:
    heard = []
    for make in (in_process, at_a_server):
        address = make(tiers, policy)
        try:
            heard.append(Player(address).play(scenario))
        finally:
            address.close()
    local, remote = heard
    return local, remote


@pytest.mark.parametrize("policy", ["lru", "prefix"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_answers_at_both_addresses(name: str, policy: str) -> None:
    tiers, scenario = SCENARIOS[name]
    local, remote = both(tiers, policy, scenario)
    for ours, theirs in zip(local, remote, strict=True):
        assert theirs == ours


@pytest.mark.parametrize("seed", range(20))
def test_the_same_answers_to_anything(seed: int) -> None:
    rng = random.Random(seed)
    chains = [*(key_chain(7, branch=branch) for branch in "abcd"), key_chain(4, shards=2), MIXED, MIXED[1::2]]
    scenario: list[tuple[object, ...]] = []
    names: list[str] = []
    for number in range(300):
        chain = rng.choice(chains)
        keys = chain[: rng.randint(0, len(chain))]
        holder = rng.choice("xyz")
        match rng.randrange(12):
            case 0 | 1:
                scenario.append(("lookup", keys, holder, rng.choice([1, 1, 2, HYBRID, WINDOWS, STATES])))
            case 2 | 3 | 4:
                names.append(str(number))
                scenario.append(("begin_store", keys, holder, names[-1]))
            case 5 | 6 if names:
                scenario.append(("commit", rng.choice(names[-4:])))
            case 7:
                names.append(str(number))
                scenario += [*store(A, names[-1]), ("load", A[:3], holder)]
            case 8 if names:
                scenario.append(("release", rng.choice(names)))
            case 9:
                scenario.append(rng.choice([("renew", holder), ("end", holder)]))
            case 10:
                scenario.append(("forget", keys[rng.randint(0, len(keys)) :]))
            case _:
                scenario.append(rng.choice([("advance", 150.0), ("counts",), ("end", holder), ("clear",)]))
    # A commit of what was no write lease any more is told so at both; only the words differ.
    local, remote = both([], "lru", scenario)
    for ours, theirs in zip(local, remote, strict=True):
        assert theirs == ours


def test_a_player_sees_failures_as_they_are() -> None:
    """The comparison would be worth nothing if it compared nothing."""
    local, _ = both([], "lru", SCENARIOS["failures"][1])
    said = [answer for _, answer in local[:-1] if isinstance(answer, tuple) and answer[0] == "misuse"]  # type: ignore[misc]
    assert len(said) == 4
    failed = [answer for verb, answer in local[:-1] if verb == "load"]  # type: ignore[misc]
    assert len(failed) == 2 and all(isinstance(one, LoadFailed) for one in failed)
