"""A lane never blocks who submits, keeps its order, checks what comes back, and rests a tier that fails."""

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from kv_core.clock import HandClock
from kv_core.errors import MisuseError
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, StoreOutcome
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.faults import FaultyTier
from kv_testing.threads import threads_left
from kv_testing.tower import leading
from kv_testing.wait import until
from kv_tiers import chunk_header
from kv_tiers.lanes import jobs
from kv_tiers.lanes.jobs import Arrival, Outgoing
from kv_tiers.lanes.lane import Health, Lane
from kv_tiers.pool.host_pool import HostPool, slot_bytes_for
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read
from kv_tiers.tiers.dram import DramTier

NBYTES = 500
FORM = chunk_header.format_id("lanes")


class Bench:
    """A lane over a tier that can be told to fail. threads=0: `lane.step` does the jobs, in its order."""

    def __init__(self, threads: int = 0, **options: float) -> None:
        self.clock = HandClock()
        self.tier = FaultyTier(DramTier(HostPool.anonymous("below", NBYTES, 64), LruPolicy()))
        options = {"backoff_s": 1.0, "max_backoff_s": 2.0, "stuck_s": 10.0, **options}
        self.lane = Lane(self.tier, FORM, threads=threads, clock=self.clock, **options)
        self.stored: dict[ChunkKey, StoreOutcome] = {}
        self.arrived: dict[ChunkKey, Arrival] = {}
        self.reads: dict[ChunkKey, Read] = {}

    def store(self, keys: list[ChunkKey]) -> bool:
        chunks = []
        for key, parent in zip(keys, [None, *keys], strict=False):
            pages = aligned_pages(slot_bytes_for(NBYTES))
            pages[:NBYTES] = content(key, NBYTES)
            chunks.append(Outgoing(key, parent, pages, NBYTES))
        return self.lane.store(chunks, lambda outcomes: self.stored.update(zip(keys, outcomes, strict=True)))

    def load(self, keys: list[ChunkKey]) -> bool:
        reads = [
            Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(slot_bytes_for(NBYTES)), NBYTES)
            for key in keys
        ]
        self.reads.update({read.key: read for read in reads})

        def done(arrivals: list[Arrival]) -> None:
            self.arrived.update({arrival.key: arrival for arrival in arrivals})

        return self.lane.load(reads, done)

    def run(self) -> int:
        steps = 0
        while self.lane.step():
            steps += 1
        return steps

    def outcomes(self) -> list[type]:
        return [type(arrival.outcome) for arrival in self.arrived.values()]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.tier.let_go()
    made.lane.close()


def test_what_goes_down_comes_back_checked(bench: Bench) -> None:
    keys = key_chain(3)
    assert bench.store(keys)
    assert leading(bench.lane, keys) == 0
    bench.run()
    assert list(bench.stored.values()) == [Stored()] * 3
    assert leading(bench.lane, [*keys, *key_chain(1, branch="other")]) == 3
    bench.load(keys)
    bench.run()
    for key in keys:
        assert bench.arrived[key].outcome == Loaded(NBYTES)
        assert bytes(bench.reads[key].room) == content(key, NBYTES)
        assert bench.arrived[key].checksum == checksum_of(bench.reads[key].room)
    counts = bench.lane.counts()
    assert (counts.stored, counts.loaded, counts.queued) == (3, 3, 0)


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap"])
def test_wrong_bytes_are_damage_and_never_come_again(bench: Bench, fault: str) -> None:
    keys = key_chain(2)
    bench.store(keys)
    bench.run()
    bench.tier.fault = fault  # type: ignore[assignment]
    bench.load(keys)
    assert bench.lane.step()
    assert bench.outcomes() == [Damaged, Damaged]
    bench.tier.fault = ""
    assert leading(bench.lane, keys) == 0  # at once, before the tier was told
    bench.run()
    assert bench.tier.holds(keys) == [False, False]
    assert bench.lane.counts().damaged == 2


def test_loads_go_before_discards_and_discards_before_stores(bench: Bench) -> None:
    old, new = key_chain(1), key_chain(1, branch="new")
    bench.store(old)
    bench.run()
    bench.tier.calls.clear()
    bench.store(new)
    bench.lane.discard(old)
    bench.load(new)
    bench.run()
    assert bench.tier.calls == ["load", "discard", "store"]


def test_a_full_lane_refuses_at_once(bench: Bench) -> None:
    small = Bench(max_load_chunks=2, max_store_chunks=3)
    assert small.store(key_chain(3))
    assert not small.store(key_chain(1, branch="more"))
    assert small.lane.room_for_stores() == 0
    assert small.load(key_chain(2))
    assert not small.load(key_chain(1))
    assert not small.lane.ask(key_chain(1), lambda held: None)
    small.run()
    assert small.store(key_chain(1, branch="more"))
    assert small.lane.room_for_stores() == 2
    assert small.lane.close()
    assert isinstance(small.stored[key_chain(1, branch="more")[0]], Refused)


def test_presence_is_asked_on_the_lanes_own_thread(bench: Bench) -> None:
    keys = key_chain(4)
    bench.store(keys[:3])
    bench.run()
    answers: list[list[bool]] = []
    bench.lane.ask(keys, answers.append)
    assert answers == []
    bench.run()
    bench.lane.discard(keys[1:2])
    bench.lane.ask(keys, answers.append)
    bench.lane.step()
    assert answers == [[True, True, True, False], [True, False, True, False]]


@pytest.mark.parametrize("fault", ["down", "bug", "panic"])
def test_a_tier_that_fails_is_rested_and_comes_back_by_itself(bench: Bench, fault: str) -> None:
    keys = key_chain(2)
    bench.store(keys)
    bench.run()
    bench.tier.fault = fault  # type: ignore[assignment]
    bench.load(keys)
    bench.store(key_chain(1, branch="waits"))
    bench.lane.step()
    assert bench.outcomes() == [Absent, Absent]
    assert isinstance(bench.stored[key_chain(1, branch="waits")[0]], Refused)  # what waited is not kept waiting
    assert bench.lane.health()[0] is Health.DOWN
    assert "told to" in bench.lane.health()[1]
    assert not bench.load(keys)
    assert not bench.store(keys)
    assert leading(bench.lane, keys) == 0
    calls = len(bench.tier.calls)
    for backoff_s in (1.0, 2.0, 2.0):  # ever more seldom, up to a limit
        bench.clock.advance(backoff_s - 0.01)
        assert not bench.lane.step()
        bench.clock.advance(0.02)
        assert bench.lane.step()
    assert bench.tier.calls[calls:] == ["probe"] * 3  # nothing else is sent to it
    bench.tier.fault = ""
    bench.clock.advance(2.0)
    bench.run()
    assert bench.lane.health() == (Health.UP, ""), "and not why it was down"
    assert leading(bench.lane, keys) == 2
    assert bench.lane.counts().downs == 1


def test_what_was_discarded_while_the_tier_was_down_is_gone_when_it_is_back(bench: Bench) -> None:
    keys = key_chain(3)
    bench.store(keys)
    bench.run()
    bench.tier.fault = "down"
    bench.lane.discard(keys[1:])
    bench.lane.step()
    bench.tier.fault = ""
    bench.clock.advance(1.0)
    bench.run()
    assert bench.tier.holds(keys) == [True, False, False]


def test_a_chunk_discarded_while_it_is_stored_is_not_found_afterwards() -> None:
    bench = Bench(threads=2)
    keys = key_chain(2)
    bench.tier.fault = "hang"
    bench.store(keys)
    until(lambda: "store" in bench.tier.calls)
    bench.lane.discard(keys[:1])
    bench.tier.let_go()
    assert bench.lane.drain(5)
    assert bench.tier.holds(keys) == [False, True]
    assert bench.lane.close()


def test_a_chunk_discarded_while_it_waits_is_not_stored(bench: Bench) -> None:
    keys = key_chain(2)
    bench.store(keys)
    bench.lane.discard(keys[:1])
    bench.run()
    assert isinstance(bench.stored[keys[0]], Refused)
    assert bench.tier.holds(keys) == [False, True]
    bench.store(keys)  # and after that it is a chunk like any other
    bench.run()
    assert bench.tier.holds(keys) == [True, True]


def test_a_store_that_waits_for_long_remembers_only_its_own_chunks_of_those_discarded(bench: Bench) -> None:
    """Behind a call that hangs it waits for as long as that does, and chunks go on being discarded."""
    keys = key_chain(3)
    bench.store(keys)
    bench.lane.discard([keys[1], *key_chain(100, branch="others")])
    (store,) = bench.lane._jobs._stores
    assert store.dropped == {keys[1]}


def test_cleared_hides_everything_at_once_and_what_is_on_its_way(bench: Bench) -> None:
    keys, waiting = key_chain(3), key_chain(2, branch="waiting")
    bench.store(keys)
    bench.run()
    bench.store(waiting)
    bench.lane.clear()
    assert leading(bench.lane, keys) == 0
    assert not bench.load(keys)
    bench.run()
    assert bench.tier.holds([*keys, *waiting]) == [False] * 5
    bench.store(keys)
    bench.run()
    assert leading(bench.lane, keys) == 3


def test_more_discards_than_can_be_remembered_clear_the_tier(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_DISCARDS", 3)
    keys = key_chain(6)
    bench.store(keys)
    bench.run()
    bench.lane.discard(keys[2:])
    assert leading(bench.lane, keys) == 0
    bench.run()
    assert bench.tier.holds(keys) == [False] * 6


def test_what_may_not_be_removed_is_hidden_until_it_may(bench: Bench) -> None:
    """A tier that lets us read but not remove goes on serving the rest, whatever has to be forgotten."""
    keys = key_chain(3)
    bench.store(keys)
    bench.run()
    bench.tier.fault = "add_only"
    bench.lane.discard(keys[1:2])
    assert bench.run() == 1  # it is not asked over and over
    assert bench.lane.health()[0] is Health.UP
    assert bench.lane.holds(keys) == [True, False, True]
    bench.load(keys)
    bench.run()
    assert bench.outcomes() == [Loaded, Absent, Loaded]
    assert bench.lane.drain(60)
    bench.lane.clear_tenant(keys[0].tenant)
    assert bench.lane.holds(keys) == [False] * 3
    bench.tier.fault = ""
    bench.clock.advance(jobs.REMOVE_AGAIN_S)
    bench.run()
    assert bench.tier.holds(keys) == [False] * 3
    bench.store(keys)
    bench.run()
    assert bench.lane.holds(keys) == [True] * 3


def test_what_waited_to_be_stored_does_not_wait_for_a_clear_that_is_refused(bench: Bench) -> None:
    """It was cleared with the rest, and its slots in the pool are in use for as long as it waits."""
    keys, waiting = key_chain(3), key_chain(2, branch="waiting")
    bench.store(keys)
    bench.run()
    bench.store(waiting)
    bench.tier.fault = "add_only"
    bench.lane.clear()
    bench.run()
    assert [type(bench.stored[key]) for key in waiting] == [Refused] * 2
    assert bench.lane.counts().queued == 0
    assert bench.tier.holds(waiting) == [False] * 2
    assert bench.lane.holds(keys) == [False] * 3
    assert not bench.store(waiting)


def test_what_stays_hidden_because_it_may_not_be_removed_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than can be remembered is everything, and then nothing is read or stored there: an operator must know."""
    monkeypatch.setattr(jobs, "MAX_DISCARDS", 3)
    bench, keys = Bench(), key_chain(6)
    bench.store(keys)
    bench.run()
    bench.tier.fault = "add_only"
    for some, said in ((keys[:2], "2 discarded chunks"), (keys[2:], "all of its chunks")):
        caplog.clear()
        bench.clock.advance(jobs.REMOVE_AGAIN_S)
        bench.lane.discard(some)
        bench.run()
        assert f"hidden instead until it does: {said}" in caplog.text
    assert not bench.store(key_chain(1, branch="new"))
    assert bench.lane.close()


@pytest.mark.parametrize("fault", ["down", "hang", "add_only"])
def test_what_a_tier_has_not_removed_when_it_is_closed_is_said(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing hides it from the next process: whoever cleared a tenant has to do that again."""
    bench, keys = Bench(threads=1), key_chain(3)
    bench.store(keys)
    assert bench.lane.drain(5)
    bench.tier.fault = fault  # type: ignore[assignment]
    bench.lane.clear_tenant(keys[0].tenant)
    until(lambda: "clear_tenant" in bench.tier.calls)
    bench.lane.discard(key_chain(2, salt="another's"))
    assert bench.lane.close(timeout_s=0) == (fault != "hang")
    assert f"the chunks of tenant {keys[0].tenant.hex()}, 2 discarded chunks" in caplog.text
    bench.tier.let_go()
    caplog.clear()
    assert bench.lane.close()
    assert ("discarded chunks" in caplog.text) and ("of tenant" in caplog.text) == (fault != "hang")


def test_that_a_tier_is_back_is_as_visible_as_that_it_was_down(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """`kv-server` logs warnings, unless it is told otherwise."""
    bench.tier.fault = "down"
    bench.load(key_chain(1))
    with caplog.at_level("WARNING"):
        bench.run()
        bench.tier.fault = ""
        bench.clock.advance(1.0)
        bench.run()
    assert [record.getMessage() for record in caplog.records] == [
        "tier dram is down: told to be down",
        "tier dram is back",
    ]


def test_a_tier_that_fails_on_a_callers_thread_is_probed_though_no_thread_has_anything_to_do() -> None:
    bench = Bench(threads=1, backoff_s=0.01, max_backoff_s=0.01)
    keys = key_chain(2)
    bench.store(keys)
    assert bench.lane.drain(5)
    for _ in range(5):
        bench.tier.fault = "down"
        assert leading(bench.lane, keys) == 0
        assert bench.lane.health()[0] is Health.DOWN
        bench.tier.fault = ""
        bench.clock.advance(0.01)
        until(lambda: bench.lane.health()[0] is Health.UP)
        assert leading(bench.lane, keys) == 2
    bench.lane.close()


def test_a_call_that_hangs_is_bypassed_and_holds_nobody_up() -> None:
    bench = Bench(threads=2)
    keys = key_chain(2)
    bench.store(keys)
    assert bench.lane.drain(5)
    bench.tier.fault = "hang"
    bench.load(keys)
    until(lambda: "load" in bench.tier.calls)
    assert bench.lane.health()[0] is Health.UP
    bench.clock.advance(10.1)
    assert bench.lane.health()[0] is Health.STUCK
    assert leading(bench.lane, keys) == 0
    assert not bench.load(keys)
    assert not bench.lane.close(timeout_s=0.1)  # its memory is lent still
    assert bench.arrived == {}
    assert "close" not in bench.tier.calls
    bench.tier.let_go()
    assert bench.lane.close()
    assert "close" in bench.tier.calls
    assert bench.outcomes() == [Loaded, Loaded]


class ShowingTier(FaultyTier):
    on_progress: Callable[[], object] = staticmethod(lambda: None)


def test_a_call_in_which_bytes_arrive_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FaultyTier", ShowingTier)
    bench = Bench(threads=2)
    assert isinstance(bench.tier, ShowingTier)
    keys = key_chain(2)
    bench.store(keys)
    assert bench.lane.drain(5)
    bench.tier.fault = "hang"
    bench.load(keys[:1])
    until(lambda: "load" in bench.tier.calls)
    for _ in range(3):
        bench.clock.advance(9.0)
        bench.tier.on_progress()
        assert bench.lane.health()[0] is Health.UP and not bench.lane.hangs()
    bench.clock.advance(10.1)
    assert bench.lane.health()[0] is Health.STUCK and bench.lane.hangs()
    bench.tier.on_progress()
    assert bench.lane.health()[0] is Health.UP and bench.load(keys[1:])
    bench.tier.let_go()
    until(lambda: bench.outcomes() == [Loaded, Loaded])
    assert bench.lane.close()


@pytest.mark.parametrize(("threads", "health"), [(2, Health.UP), (1, Health.STUCK)])
def test_clearing_a_tenant_takes_its_time_and_the_others_are_served(threads: int, health: Health) -> None:
    """A million files take minutes. Only where no thread is left is that the same as a tier that hangs."""
    bench = Bench(threads=threads)
    keys = key_chain(2)
    bench.store(keys)
    assert bench.lane.drain(5)
    has_begun, go_on = threading.Event(), threading.Event()

    def clear_tenant(_: bytes) -> None:
        has_begun.set()
        assert go_on.wait(30)

    bench.tier.clear_tenant = clear_tenant  # type: ignore[method-assign]
    bench.lane.clear_tenant(key_chain(1, salt="theirs")[0].tenant)
    assert has_begun.wait(30)
    bench.clock.advance(60.0)
    assert bench.lane.health()[0] is health
    assert bench.load(keys) == (health is Health.UP)
    if health is Health.UP:
        until(lambda: bench.arrived)
        assert bench.outcomes() == [Loaded, Loaded]
    go_on.set()
    assert bench.lane.close()


def test_a_load_does_not_wait_for_stores_that_take_long() -> None:
    bench = Bench(threads=2)
    keys = key_chain(2)
    bench.store(keys)
    assert bench.lane.drain(5)
    bench.tier.fault = "hang"
    bench.store(key_chain(1, branch="one"))
    bench.store(key_chain(1, branch="two"))
    until(lambda: bench.tier.calls.count("store") == 2)
    bench.tier.fault = ""  # for the calls to come
    bench.load(keys)
    until(lambda: bench.arrived)
    assert bench.outcomes() == [Loaded, Loaded]
    assert len(bench.stored) == 2
    bench.tier.let_go()
    assert bench.lane.close()
    assert len(bench.stored) == 4


def test_an_idle_lane_closes_even_with_no_time_to_wait() -> None:
    """As with `cold.drain_s: 0`: its threads need a moment to end, and the tier would stay open and the pool mapped."""
    bench = Bench(threads=2)
    assert bench.lane.close(timeout_s=0)


def test_closing_refuses_what_waits_and_ends_the_threads() -> None:
    bench = Bench(threads=2)
    bench.tier.fault = "hang"
    for number in range(8):
        assert bench.store(key_chain(2, branch=str(number)))
    until(lambda: "store" in bench.tier.calls)
    before = threading.active_count()
    assert not bench.lane.close(timeout_s=0)
    bench.tier.let_go()
    assert bench.lane.close()
    assert threading.active_count() == before - 2
    assert len(bench.stored) == 16
    assert any(isinstance(outcome, Refused) for outcome in bench.stored.values())
    assert not bench.store(key_chain(1))
    assert bench.lane.close()


def test_a_bug_in_what_waits_for_a_job_is_logged_and_the_tier_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Were the thread to end, every chunk of a later load would count as arriving for good."""

    def told(_: object) -> NoReturn:
        raise MisuseError("a bug in the cache")

    bench = Bench(threads=1)
    keys, others = key_chain(2), key_chain(1, branch="other")
    bench.store(keys)
    assert bench.lane.drain(5)
    bench.lane.ask(keys, told)
    bench.load(keys)
    until(lambda: bench.outcomes() == [Loaded, Loaded])
    assert caplog.text.count("in told") == 1
    bench.lane.when_idle = lambda: told(None)
    bench.lane.has_remainders()
    until(lambda: caplog.text.count("in told") == 2)
    bench.tier.fault = "hang"
    bench.load(keys)
    until(lambda: bench.tier.calls.count("load") == 2)
    bench.lane.ask(keys, told)
    bench.load(others)
    assert not bench.lane.close(timeout_s=0)
    assert caplog.text.count("in told") == 3
    assert bench.arrived[others[0]].outcome == Absent()  # it is refused after the one whose answer was not taken
    bench.tier.let_go()
    assert bench.lane.close()


def test_a_lane_without_all_its_threads_is_none_and_closes_its_tier() -> None:
    """Else the tier's files would stay locked, and a second attempt find them in use."""
    before = threading.active_count()
    tier = FaultyTier(DramTier(HostPool.anonymous("below", NBYTES, 64), LruPolicy()))
    with threads_left(1), pytest.raises(RuntimeError, match="can't start new thread"):
        Lane(tier, FORM, threads=2)
    assert tier.calls == ["close"]
    assert threading.active_count() == before
