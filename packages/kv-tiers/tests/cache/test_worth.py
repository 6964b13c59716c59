"""A slower tier is waited for where that is quicker than computing, on real tiers that are throttled."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.cost import Choice, Costs
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LookupPlan
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_server import RemoteCache, launch
from kv_testing.throttled import ThrottledTier, offer
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache, chunk_header
from kv_tiers.cache.promote import Probes
from kv_tiers.cache.worth import Part, worth_waiting
from kv_tiers.config import ColdConfig
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import LookedUp
from kv_tiers.lanes.lane import Lane
from kv_tiers.lanes.speed import LoadSpeed
from kv_tiers.tiers.dram import DramTier

CHUNK_BYTES = 256 << 10
SHAPE = ChunkShape(256)
PROMPT = 8
CHUNK_S = 0.03
"""Seconds to compute a chunk: a `SLOW` tier takes 80 ms to bring one up, and one of 33 MB/s 8. A busy machine makes
either longer by a few milliseconds."""
COSTS = Costs(0, (CHUNK_S / 256, 0.0), (1e-4, 1e-9))
FAST = 0.0
SLOW = 3.3e6


class Lookups(Subscriber):
    """The events of final lookups with costs."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []

    def take(self, occurred: Occurred) -> None:
        match occurred.event:
            case LookedUp(ended=ended, choice=Choice() as choice) if ended != "PENDING":
                self.choices.append(choice)


class Slow:
    """A cache above one throttled tier, with prompts that only the tier has."""

    def __init__(self, bytes_per_s: float, prompts: int, wait_s: float = 1.0) -> None:
        self.tier = ThrottledTier(
            DramTier(HostPool.anonymous("b", CHUNK_BYTES, PROMPT * prompts), LruPolicy(), name="slow"), bytes_per_s
        )
        self.lane = Lane(self.tier, chunk_header.format_id("slow"), threads=2)
        self.bus = EventBus(interval_s=0.001)
        self.lookups = Lookups()
        self.bus.subscribe(self.lookups)
        self.cache = LocalCache(
            HostPool.anonymous("host", CHUNK_BYTES, 2 * PROMPT),
            policy=LruPolicy(),
            lanes=[(self.lane, "through")],
            cold=ColdConfig(wait_s=wait_s, batch_bytes=2 * CHUNK_BYTES, prefetch_share=1.0),
            events=self.bus.source("c", (CHUNK_BYTES,)),
        )
        self.prompts = [key_chain(PROMPT, branch=str(number)) for number in range(prompts)]
        for keys in self.prompts:
            store(self.cache, keys)
            self.settle()
        self.crowd_out()

    def serve(self, number: int, costs: Costs | None = COSTS) -> tuple[LookupPlan, float]:
        """The final answer for a prompt, and how long it was waited for. What came up is put out again."""
        plan, seconds = ask(self.cache, self.prompts[number], costs)
        self.cache.end("r")
        self.crowd_out()
        return plan, seconds

    def crowd_out(self) -> None:
        """Fill the pool with other chunks, none of which is being written in the end: those cannot be evicted."""
        self.settle()
        for number in range(2):
            store(self.cache, key_chain(PROMPT, branch=f"crowd {number}"))
        self.settle()

    def settle(self) -> None:
        assert self.lane.drain(5)
        until(lambda: not any(state.spill.under_way for state in self.cache.lower.states()))

    def close(self) -> None:
        self.cache.close()
        self.bus.close()


def store(cache: LocalCache | RemoteCache, keys: Sequence[ChunkKey]) -> None:
    lease = cache.begin_store(list(keys), "w")
    cache.commit(lease)


def ask(cache: LocalCache | RemoteCache, keys: Sequence[ChunkKey], costs: Costs | None) -> tuple[LookupPlan, float]:
    began = time.monotonic()
    while True:
        plan = cache.lookup(keys, "r", shape=SHAPE, wait_for_promotion=True, costs=costs)
        if plan.ended is not Ended.PENDING:
            return plan, time.monotonic() - began
        time.sleep(0.0005)


@contextmanager
def slow(bytes_per_s: float, prompts: int = 24, wait_s: float = 1.0) -> Iterator[Slow]:
    made = Slow(bytes_per_s, prompts, wait_s)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(FAST, True), (3.3e8, True), (3.3e7, True), (SLOW, False)])
def test_a_tier_is_used_where_it_is_quicker_than_computing(bytes_per_s: float, pays: bool) -> None:
    with slow(bytes_per_s) as made:
        served = [made.serve(number) for number in range(12)]
        learnt = served[6:]
        if pays:
            assert sum(plan.chunks == PROMPT for plan, _ in learnt) >= len(learnt) - 1  # a noisy machine may spoil one
        else:
            assert all(plan.chunks < PROMPT for plan, _ in learnt)
            assert max(seconds for _, seconds in learnt) < PROMPT * CHUNK_S
            assert made.bus.flush()
            skipped = made.lookups.choices[-1].skipped
            assert skipped is not None and skipped.tier == "slow" and skipped.load_s > skipped.compute_s


def test_not_even_the_first_wait_is_longer_than_computing() -> None:
    with slow(SLOW) as made:
        _, seconds = made.serve(0)
        assert seconds < PROMPT * CHUNK_S + 0.05


@pytest.mark.parametrize("is_arriving", [False, True])
@pytest.mark.parametrize(("compute_s", "limit_s"), [(8.0, 2.0), (0.2, 0.1), (0.05, 0.05)])
def test_a_tier_that_was_never_measured_is_not_waited_for_as_long_as_computing_takes(
    compute_s: float, limit_s: float, is_arriving: bool
) -> None:
    """is_arriving: another request has all chunks loaded already."""
    worth = worth_waiting(
        [Simulated(0)],  # type: ignore[list-item]
        [] if is_arriving else [Part(0, 0, PROMPT, PROMPT * CHUNK_BYTES)],
        {0: 0.0} if is_arriving else {},
        shape=SHAPE,
        have=0,
        best=PROMPT,
        costs=Costs(0, (compute_s / PROMPT / 256, 0.0)),
        max_wait_s=10.0,
    )
    assert (worth.chunks, worth.limit_s) == (PROMPT, pytest.approx(limit_s))


def test_without_costs_it_is_waited_for_as_configured() -> None:
    with slow(SLOW, wait_s=2.0) as made:
        for number in range(6):
            made.serve(number)
        plan, _ = made.serve(6, costs=None)
        assert plan.chunks == PROMPT and plan.choice is None


def test_what_does_not_pay_is_not_brought_up_but_for_a_probe() -> None:
    with slow(SLOW) as made:
        for number in range(6):
            made.serve(number)
        before = made.tier.loaded_bytes
        for number in range(6, 18):
            made.serve(number)
        assert made.tier.loaded_bytes - before <= 3 * 10 * CHUNK_BYTES  # a probe is a quarter of a second at most


def test_an_engine_that_stores_nothing_finds_it_the_next_time() -> None:
    with slow(SLOW) as made:
        for number in range(6):
            made.serve(number)
        costs = Costs(0, COSTS.compute, COSTS.load, stores=False)
        plan, seconds = ask(made.cache, made.prompts[6], costs)
        assert plan.chunks == 0 and seconds < PROMPT * CHUNK_S
        made.cache.end("r")
        made.settle()
        plan, _ = ask(made.cache, made.prompts[6], costs)
        assert plan.chunks == PROMPT
        made.cache.end("r")


def test_a_tier_that_becomes_slow_and_quick_again_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_tiers.cache.promote._FIRST_S", 0.1)
    monkeypatch.setattr("kv_tiers.cache.promote._SOON_S", 0.01)
    with slow(FAST) as made:
        assert [made.serve(number)[0].chunks for number in range(8)][-3:] == [PROMPT] * 3
        made.tier.load_bytes_per_s = SLOW
        served = [made.serve(number) for number in range(8, 16)]
        assert max(seconds for _, seconds in served) < 2 * PROMPT * CHUNK_S  # however it finds out
        assert served[-1][0].chunks < PROMPT
        made.tier.load_bytes_per_s = FAST
        until(lambda: made.serve(16)[0].chunks == PROMPT, within_s=20)
        assert made.serve(17)[0].chunks == PROMPT


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(FAST, True), (SLOW, False)])
def test_the_same_at_a_server(bytes_per_s: float, pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = {
        "host": {"capacity_bytes": 2 * PROMPT * CHUNK_BYTES, "policy": "lru"},
        "cold": {"batch_bytes": 2 * CHUNK_BYTES, "prefetch_share": 1.0},
        "tiers": [
            {
                "type": "throttled",
                "load_bytes_per_s": bytes_per_s,
                "tier": {"type": "dram", "capacity_bytes": 40 * PROMPT * CHUNK_BYTES},
            }
        ],
    }
    server = launch(config, socket=tmp_path / "s")
    try:
        cache = RemoteCache(tmp_path / "s", group_bytes=(CHUNK_BYTES,), fingerprint="f", engine="e")
        prompts = [key_chain(PROMPT, branch=str(number)) for number in range(14)]
        for keys in prompts:
            store(cache, keys)
            time.sleep(0.05)
        plans = []
        for keys in prompts[:12]:
            plans.append(ask(cache, keys, COSTS))
            cache.end("r")
        choices = [plan.choice for plan, _ in plans[-5:]]
        if pays:
            assert sum(plan.chunks == PROMPT for plan, _ in plans[-5:]) >= 4
            assert choices[-1] is not None and choices[-1].compute_s == pytest.approx(PROMPT * CHUNK_S)
        else:
            assert max(seconds for _, seconds in plans) < 2 * PROMPT * CHUNK_S
            skipped = [choice.skipped for choice in choices if choice is not None and choice.skipped is not None]
            assert skipped and skipped[-1].tier == "throttled" and skipped[-1].load_s > skipped[-1].compute_s
        cache.close()
    finally:
        server.stop()


def test_a_queue_is_part_of_what_is_expected() -> None:
    speed = LoadSpeed()
    for number in range(6):
        speed.began(number, 1 << 20, float(number))
        speed.ended(number, number + 0.1, loaded=True)
    alone = speed.seconds(1 << 20, 10.0)
    assert alone == pytest.approx(0.1, rel=0.3)
    for number in range(10, 14):
        speed.began(number, 1 << 20, 10.0)
    behind = speed.seconds(1 << 20, 10.0)
    assert behind is not None and alone is not None and behind > 2.5 * alone
    overdue = speed.seconds(1 << 20, 11.0)
    assert overdue is not None and overdue > 3 * behind


def test_of_an_unknown_tier_a_load_that_does_not_come_says_something() -> None:
    speed = LoadSpeed()
    assert speed.seconds(1000, 0.0) is None
    speed.began(1, 1000, 0.0)
    assert speed.seconds(1000, 0.01) is None
    assert speed.seconds(1000, 1.0) == pytest.approx(2.0)
    speed.ended(1, 2.0, loaded=False)
    assert speed.seconds(1000, 2.0) is None


def test_a_load_that_brought_nothing_says_nothing_before_it_has_ended() -> None:
    """A lookup may ask between the tier's answer and the load's end, which another thread reports."""
    speed = LoadSpeed()
    speed.began(1, 1000, 0.0)
    speed.was_read(1, 0, 0.9)
    assert speed.seconds(1000, 1.0) is None
    speed.ended(1, 1.0, loaded=False)
    assert speed.seconds(1000, 1.0) is None


def test_probes_become_rare_and_come_back() -> None:
    probes = Probes()
    times = []
    for now in range(3000):
        if probes.is_due(float(now)):
            times.append(now)
            probes.ended(float(now), was_right=True)
    assert 8 <= len(times) <= 20 and times[-1] - times[-2] >= 300
    assert probes.is_due(4000.0)
    probes.ended(4000.0, was_right=False)
    assert probes.is_due(4001.0)
    assert not probes.is_due(4002.0)
    assert probes.is_due(4020.0)  # for the one before, the pool had no room


class Simulated:
    """A lane whose loads take what a bandwidth and some noise make of them, in no time at all."""

    name = "simulated"
    divisors = (1,)

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.bytes_per_s = 0.0
        self.speed = LoadSpeed()
        self.probes = Probes()
        self._rng = random.Random(seed)
        self._number = 0

    def load_s(self, nbytes: int, divisor: int | None = None, last_bytes: int | None = None) -> float | None:
        return self.speed.seconds(nbytes, self.now_s)

    def bring(self, nbytes: int) -> float:
        """How long it takes."""
        took_s = (0.0005 + nbytes / self.bytes_per_s) * self._rng.lognormvariate(0.0, 0.2)
        self._number += 1
        self.speed.began(self._number, nbytes, self.now_s)
        self.speed.ended(self._number, self.now_s + took_s, loaded=True)
        return took_s

    def serve(self, chunks: int, costs: Costs, max_wait_s: float = 10.0) -> tuple[float, float]:
        """What a request took whose chunks are all in the tier, and what computing would have."""
        parts = [Part(0, at, at + 1, CHUNK_BYTES) for at in range(chunks)]
        worth = worth_waiting(
            [self],  # type: ignore[list-item]
            parts,
            {},
            shape=SHAPE,
            have=0,
            best=chunks,
            costs=costs,
            max_wait_s=max_wait_s,
        )
        compute_s = costs.compute_s(0, chunks * 256) or 0.0
        took_s = compute_s
        if worth.chunks:
            before = self.load_s(worth.chunks * CHUNK_BYTES)
            bring_s = self.bring(worth.chunks * CHUNK_BYTES)
            rest_s = compute_s - (costs.compute_s(0, worth.chunks * 256) or 0.0)
            took_s = bring_s + rest_s if bring_s <= worth.limit_s else worth.limit_s + compute_s
            assert before is None or before <= worth.limit_s  # what is estimated slower is never waited for
        elif self.probes.is_due(self.now_s):
            estimate, probe_s = self.load_s(CHUNK_BYTES), self.bring(CHUNK_BYTES)
            self.probes.ended(self.now_s, was_right=not estimate or probe_s > 0.67 * estimate)
        self.now_s += took_s + 1.0
        return took_s, compute_s


@given(
    st.lists(st.floats(1e6, 1e10), min_size=1, max_size=4),
    st.floats(1e-4, 1e-1),
    st.integers(1, 64),
    st.integers(0, 100),
)
# Always the same examples: of random ones right at the edge about one in 4,000 loses a little more than this by chance.
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_the_bandwidth_and_however_it_changes_no_more_is_lost_than_learning_takes(
    bandwidths: list[float], chunk_s: float, chunks: int, seed: int
) -> None:
    lane, costs = Simulated(seed), Costs(0, (chunk_s / 256, 0.0), (0.0, 0.0))
    for lane.bytes_per_s in bandwidths:
        taken = [lane.serve(chunks, costs) for _ in range(80)]
        late = taken[20:]
        assert sum(took for took, _ in taken) <= 1.15 * sum(compute for _, compute in taken)
        # At the very edge noise of 20 % makes some waits longer than was expected, and others shorter.
        assert sum(took for took, _ in late) <= 1.05 * sum(compute for _, compute in late)


@pytest.mark.parametrize("slower", [0.85, 0.95, 1.0, 1.05, 1.15])
@pytest.mark.parametrize("seed", range(4))
def test_a_tier_that_is_about_as_quick_as_computing_loses_next_to_nothing(slower: float, seed: int) -> None:
    """Loads vary by 20 %, so half of the awaited ones arrive after computing would have been done. Giving those up
    would cost the wait and the computation."""
    chunk_s, chunks = 0.02, 16
    lane, costs = Simulated(seed), Costs(0, (chunk_s / 256, 0.0), (0.0, 0.0))
    lane.bytes_per_s = CHUNK_BYTES / chunk_s / slower
    taken = [lane.serve(chunks, costs) for _ in range(200)][20:]
    assert sum(took for took, _ in taken) <= 1.05 * sum(compute for _, compute in taken)


@given(st.floats(2.0, 100.0), st.integers(2, 64), st.integers(0, 100))
@settings(max_examples=8, deadline=None)
def test_a_tier_that_is_clearly_quicker_is_used_again_after_it_was_slow(times: float, chunks: int, seed: int) -> None:
    chunk_s = 0.05
    lane, costs = Simulated(seed), Costs(0, (chunk_s / 256, 0.0), (0.0, 0.0))
    for lane.bytes_per_s in (CHUNK_BYTES / chunk_s / 20, 2 * times * CHUNK_BYTES / chunk_s):
        taken = [lane.serve(chunks, costs) for _ in range(400)]
    assert sum(took < compute for took, compute in taken[-20:]) >= 18
