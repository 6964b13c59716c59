"""Layerwise loads in the two halves: what is promised for the step itself, and when its chunks are given back."""

from collections.abc import Sequence

import pytest
from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.layerwise import LayerwiseRule, RanksReports
from kv_connect.halves.request import Phase, RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import NO_REPORT, StepPlan, StepReport
from kv_connect.halves.worker import WorkerHalf
from kv_core.cost import Costs
from kv_core.errors import InputError
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.shape import ConnectShape, GroupShape
from kv_core.transfer import HostExtent
from kv_testing.connect import CopyQueue, DictCopier, DictService, QueuedCopier

SPACE = KeySpace("model", "r1", "float32", "f", 1, "sha256:4")
SHAPE = ConnectShape(ChainScheme(chunk_tokens=4), SPACE, (GroupShape(2),))
TOKENS = list(range(8))
BLOCKS = ([1, 2, 3, 4, 5],)


class Clock:
    now = 0.0

    def now_s(self) -> float:
        return self.now


class Halves:
    """Both, on a device with a queue, and a cache that holds TOKENS."""

    def __init__(self, *, always: bool = True, is_ready: bool = True, costs: EngineCosts | None = None) -> None:
        self.service = DictService()
        self.copier = DictCopier({slot: f"kv {slot}" for slot in range(2, 10)})
        self.queue = CopyQueue()
        self.prepared: list[HostExtent] = []
        self.is_ready = is_ready
        rule = LayerwiseRule(always, self.prepare)
        self.scheduler = SchedulerHalf(self.service, SHAPE, name="e", costs=costs, layerwise=rule)
        self.worker = WorkerHalf(self.service, SHAPE, [QueuedCopier(self.copier, self.queue)], shard=0, name="e")
        stores = RequestTokens("stores", TOKENS, 8)
        self.scheduler.match(stores, 0)
        self.scheduler.allocated("stores", 0, ())
        self.worker.stores.start(self.scheduler.build_step([Scheduled(stores, 8, BLOCKS)]))
        self.worker.stores.finish()
        self.scheduler.finished("stores")
        self.copier.slots.clear()

    def prepare(self, extents: Sequence[HostExtent]) -> bool:
        self.prepared += extents
        return self.is_ready

    def asks(self, name: str = "a") -> int | None:
        return self.scheduler.match(RequestTokens(name, [*TOKENS, 99], 9), 0)

    def hear(self) -> None:
        report = self.worker.take_layerwise()
        self.scheduler.loads_ended(report.finished, report.failed)

    def is_at_rest(self) -> bool:
        return not (self.service.promised or self.queue.pending)


def test_chunks_are_leased_until_their_copies_have_ended() -> None:
    halves = Halves()
    assert halves.asks() == 8 and halves.scheduler.is_layerwise("a") and len(halves.prepared) == 2
    halves.scheduler.allocated("a", 8, BLOCKS)
    plan = StepPlan.from_plain(halves.scheduler.build_step([]).to_plain())
    halves.worker.start_loads(plan)
    assert halves.asks() is None  # preempted, and its blocks are still being filled
    halves.scheduler.reset()
    halves.scheduler.finished("a")
    halves.hear()
    assert halves.scheduler.tracked_phases() == {"a": Phase.DRAINING} and halves.service.promised
    assert halves.asks() is None  # another request with its id, which vLLM may be told not to make unique
    halves.worker.layers.wait_for(0)
    assert halves.worker.layers.forward_ended()
    halves.hear()
    assert halves.copier.slots == {slot: f"kv {slot}" for slot in range(2, 10)}
    assert halves.scheduler.tracked_phases() == {} and halves.is_at_rest()
    assert halves.worker.poll().finished == frozenset()  # the engine did not wait, and must not hear that it may go on


def test_a_promise_that_is_asked_for_again_is_leased_once() -> None:
    halves = Halves()
    for _ in range(3):
        assert halves.asks() == 8
    assert len(halves.prepared) == 2
    halves.scheduler.reset()
    assert halves.asks() == 0 and not halves.scheduler.is_layerwise("a")
    halves.scheduler.finished("a")
    assert halves.is_at_rest()


def test_memory_that_is_not_ready_is_loaded_between_steps() -> None:
    halves = Halves(is_ready=False)
    assert halves.asks() == 8 and not halves.scheduler.is_layerwise("a")
    assert not halves.service.open_leases


def test_other_weights_after_the_promise_leave_the_load_and_store_nothing_of_it() -> None:
    halves = Halves()
    assert halves.asks() == 8
    halves.scheduler.allocated("a", 8, BLOCKS)
    halves.scheduler.weights_changed(None)
    plan = halves.scheduler.build_step([Scheduled(RequestTokens("a", [*TOKENS, *TOKENS], 16), 16, BLOCKS)])
    assert [load.request_id for load in plan.loads] == ["a"] and plan.refused == () and plan.stores == ()


def test_an_allocation_that_does_not_add_up_is_not_planned() -> None:
    halves = Halves()
    assert halves.asks() == 8
    halves.scheduler.allocated("a", 6, BLOCKS)
    plan = halves.scheduler.build_step([])
    assert plan.loads == plan.refused == () and halves.scheduler.counts.loads_refused == 1
    halves.scheduler.finished("a")
    assert halves.is_at_rest()


@pytest.mark.parametrize(
    ("token_s", "others", "is_layerwise"), [(0.0, 0, False), (3.0, 1, True), (0.5, 1, False), (0.5, 0, True)]
)
def test_auto_takes_what_is_hidden_or_makes_nobody_else_wait(token_s: float, others: int, is_layerwise: bool) -> None:
    """A load of a second each here, beside one token to compute; and nothing before both are known."""
    clock = Clock()
    rate = 1 / token_s if token_s else 0.0
    costs = EngineCosts(clock, use="always", prefill_tokens_per_second=rate)
    for number in range(6):
        costs.load_began(str(number), 4 + number)
        clock.now += 1.0
        costs.load_ended(str(number), failed=False)
    halves = Halves(always=False, costs=costs)
    for number in range(others):
        halves.scheduler.match(RequestTokens(f"other {number}", [7], 1), 0)
        halves.scheduler.allocated(f"other {number}", 0, ())
    assert halves.asks() == 8
    assert halves.scheduler.is_layerwise("a") is is_layerwise


def test_what_is_computed_meanwhile_is_no_part_of_a_loads_price() -> None:
    costs = Costs(0, (1.0, 0.0), (2.0, 0.5), layerwise_tokens=20)
    assert costs.load_s(0, 16) == 2.0 + 8.0 - 4.0
    assert costs.load_s(0, 8) == 0.0


@pytest.mark.parametrize(
    "extent",
    [
        {"pool": "p", "offset": -1, "nbytes": 4},
        {"pool": "p", "offset": 0},
        {"pool": 1, "offset": 0, "nbytes": 4},
        {"pool": "p", "offset": 0, "nbytes": 4.0},
        "p",
    ],
)
def test_a_plan_with_other_extents_is_refused(extent: object) -> None:
    halves = Halves()
    halves.asks()
    halves.scheduler.allocated("a", 8, BLOCKS)
    plain = halves.scheduler.build_step([]).to_plain()
    plain["loads"][0]["extents"] = [extent]
    with pytest.raises(InputError):
        StepPlan.from_plain(plain)


def test_a_load_has_ended_when_it_has_on_every_rank() -> None:
    reports = RanksReports()
    a, b = frozenset("a"), frozenset("b")
    assert reports.receive({0: StepReport(a)}, ranks=2) == NO_REPORT
    assert reports.receive({0: StepReport(b)}, ranks=2) == NO_REPORT
    assert reports.receive({1: StepReport(b, b)}, ranks=2) == StepReport(b, b)
    assert reports.receive({1: StepReport(a)}, ranks=2) == StepReport(a)
    assert reports.receive({0: StepReport(a), 1: StepReport(a)}, ranks=2) == StepReport(a)


def test_a_plan_has_all_shards_and_a_rank_takes_its_own() -> None:
    space = KeySpace("model", "r1", "float32", "f", 2, "sha256:4")
    shape = ConnectShape(ChainScheme(chunk_tokens=4), space, (GroupShape(2),), shards=2)
    service = DictService()
    copiers = [DictCopier({slot: f"{shard}: {slot}" for slot in range(2, 10)}) for shard in range(2)]
    rule = LayerwiseRule(True, lambda _extents: True)
    scheduler = SchedulerHalf(service, shape, name="e", layerwise=rule)
    ranks = [WorkerHalf(service, shape, [copier], shard=shard, name="e") for shard, copier in enumerate(copiers)]
    stores = RequestTokens("stores", TOKENS, 8)
    scheduler.match(stores, 0)
    scheduler.allocated("stores", 0, ())
    plan = scheduler.build_step([Scheduled(stores, 8, BLOCKS)])
    for rank, copier in zip(ranks, copiers, strict=True):
        rank.stores.start(plan)
        rank.stores.finish()
        copier.slots.clear()
    assert scheduler.match(RequestTokens("a", [*TOKENS, 99], 9), 0) == 8 and scheduler.is_layerwise("a")
    scheduler.allocated("a", 8, BLOCKS)
    plan = StepPlan.from_plain(scheduler.build_step([]).to_plain())
    assert len(plan.loads[0].extents) == 4
    for rank in ranks:
        rank.start_loads(plan)
    assert [copier.slots for copier in copiers] == [
        {slot: f"{shard}: {slot}" for slot in range(2, 10)} for shard in range(2)
    ]


def test_a_scheduler_that_closes_leaves_leased_what_is_copied_elsewhere() -> None:
    halves = Halves()
    for name in ("planned", "not yet", "only promised"):
        assert halves.asks(name) == 8
    halves.scheduler.allocated("planned", 8, BLOCKS)
    halves.worker.start_loads(halves.scheduler.build_step([]))
    halves.scheduler.allocated("not yet", 8, BLOCKS)
    halves.scheduler.close(but_filling=True)
    assert set(halves.service.promised) == {"e/planned"}
    halves.worker.close()
    report = halves.worker.layers.give_up()
    assert report == NO_REPORT  # nobody told it what is expected
    halves.worker.layers.expected.add("planned")
    report = halves.worker.layers.give_up()
    assert report.finished == report.failed == {"planned"} and halves.worker.layers.give_up() == NO_REPORT
    halves.scheduler.loads_ended(report.finished, report.failed)
    assert halves.is_at_rest()
