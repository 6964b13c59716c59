"""The halves of a connector against a toy engine whose every context token is checked before it is used."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_connect.halves.request import HOLDING, NEXT, Phase, RequestEvent, RequestTokens, Scheduled, advance
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import LoadStep, StepPlan, StoreStep
from kv_connect.halves.worker import WorkerHalf
from kv_core.errors import ConfigError, InputError, MisuseError
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace, tenant_tag
from kv_core.shape import ConnectShape, GroupShape
from kv_core.transfer import packed
from kv_testing.connect import DictCopier, DictService

BLOCK = 2
CHUNK = 4
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")
SHAPE = ConnectShape(ChainScheme(chunk_tokens=CHUNK), SPACE, (GroupShape(BLOCK),))


def test_a_life_goes_only_where_the_table_says() -> None:
    for phase, event in itertools.product(Phase, RequestEvent):
        if (phase, event) in NEXT:
            assert advance(phase, event) is NEXT[phase, event]
        else:
            with pytest.raises(MisuseError, match=f"{phase.name} cannot {event.name}"):
                advance(phase, event)


def test_every_phase_can_be_reached_and_left_and_only_gone_is_the_end() -> None:
    reached = {Phase.WAITING}
    for _ in Phase:
        reached |= {after for (before, _), after in NEXT.items() if before in reached}
    assert reached == set(Phase)
    assert {phase for phase in Phase if not any(before is phase for before, _ in NEXT)} == {Phase.GONE}
    assert Phase.GONE not in HOLDING


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="write chunk_tokens: 256"):
        ConnectShape(ChainScheme(chunk_tokens=250), SPACE, (GroupShape(128),))


digests = st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple)
tags = st.binary(min_size=7, max_size=7)
tables = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4).map(packed), max_size=2).map(tuple)
names = st.none() | st.lists(st.text(), max_size=2).map(tuple)
stores = st.lists(st.builds(StoreStep, st.text(), digests, tags, tables, tiers=names), max_size=3).map(tuple)
plans = st.builds(
    StepPlan,
    st.lists(
        st.builds(LoadStep, st.text(), st.integers(0, 9), digests, tags, tables, st.just(0), st.just(8)),
        max_size=3,
    ).map(tuple),
    stores,
    st.lists(st.text(), max_size=3).map(tuple),
    st.binary(min_size=16, max_size=16),
    overwritten=stores,
)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=2) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


def only_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and only_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(only_plain, value))
    return value is None or type(value) in (str, int, bool, bytes)


@given(plans)
def test_a_step_plan_is_plain_data_and_comes_back_whole(plan: StepPlan) -> None:
    plain = plan.to_plain()
    assert only_plain(plain)
    assert StepPlan.from_plain(plain) == plan


@given(st.sampled_from(["version", "loads", "stores", "overwritten", "refused", "space_id"]), junk)
def test_a_step_plan_from_elsewhere_is_checked(name: str, wrong: object) -> None:
    good = StepPlan((LoadStep("a", 0, (b"x" * 32,), b"t" * 7, (packed((1,)),), 0, 4),)).to_plain()
    try:
        read = StepPlan.from_plain(good | {name: wrong})
    except InputError:
        return
    assert only_plain(read.to_plain())


def test_what_is_no_step_plan_at_all_is_refused() -> None:
    for wrong in (None, [], {}, {"version": 4}, {"version": 3}, {"version": 2}, {"version": 1}):
        with pytest.raises(InputError):
            StepPlan.from_plain(wrong)


def halves() -> tuple[DictService, DictCopier, SchedulerHalf, WorkerHalf]:
    service, copier = DictService(), DictCopier()
    return (
        service,
        copier,
        SchedulerHalf(service, SHAPE, name="e"),
        WorkerHalf(service, SHAPE, [copier], shard=0, name="e"),
    )


def request(request_id: str, tokens: list[int]) -> RequestTokens:
    return RequestTokens(request_id, tokens, keep_tokens=len(tokens))


def store_all(scheduler: SchedulerHalf, worker: WorkerHalf, copier: DictCopier, wanted: RequestTokens) -> None:
    """Let the request run to its end in blocks of its own."""
    blocks = range(100, 100 + -(-len(wanted.tokens) // BLOCK))
    assert scheduler.match(wanted, 0) == 0
    scheduler.allocated(wanted.request_id, 0, ())
    copier.slots.update((blocks[0] * BLOCK + i, ("kv", *wanted.tokens[: i + 1])) for i in range(len(wanted.tokens)))
    worker.stores.start(scheduler.build_step([Scheduled(wanted, len(wanted.tokens), (blocks,))]))
    worker.stores.finish()
    scheduler.finished(wanted.request_id)


def test_what_blocks_the_engine_gave_is_told_once_a_step() -> None:
    service, _, scheduler, _ = halves()
    for name in ("a", "b"):
        scheduler.match(request(name, list(range(9))), 0)
        scheduler.allocated(name, 0, (range(5),))
    scheduler.allocated("a stranger's", 0, (range(5),))
    assert service.allocations == []
    scheduler.build_step([])
    scheduler.build_step([])
    assert service.allocations == [{"e/a": 5, "e/b": 5}]


def test_a_salted_request_s_keys_carry_its_tenant_in_both_halves() -> None:
    """And the plan between them carries the tag alone: the salt is a secret of the scheduler's."""
    service, copier, scheduler, worker = halves()
    tokens = list(range(8))
    for name, salt in (("a", "hush"), ("b", None)):
        service.held.clear()
        store_all(scheduler, worker, copier, RequestTokens(name, tokens, len(tokens), salt=salt))
        assert {key.tenant for key in service.held} == {tenant_tag(salt)}
        again = RequestTokens(f"{name}2", [*tokens, 9], 8, salt=salt)
        assert scheduler.match(again, 0) == 8
        scheduler.allocated(again.request_id, 8, (range(6),))
        plan = scheduler.build_step([])
        assert "hush" not in repr(plan)
        worker.start_loads(StepPlan.from_plain(plan.to_plain()))
        assert worker.poll().failed == frozenset()
        assert scheduler.match(RequestTokens(f"{name}3", [*tokens, 9], 8, salt="another"), 0) == 0


def test_asking_again_while_it_waits_costs_no_lookup_and_gives_the_same() -> None:
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    wanted = request("b", [*range(8), 9])
    assert [scheduler.match(wanted, 0) for _ in range(28)] == [8] * 28
    assert scheduler.match(wanted, 4) == 4  # vLLM found a block by itself meanwhile
    service.promised.clear()  # the lease expired in the queue
    service.held.clear()
    assert scheduler.match(wanted, 0) == 0


def test_while_slower_tiers_bring_up_more_the_engine_is_told_to_ask_again() -> None:
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    wanted = request("b", [*range(13)])
    service.pending = 3
    assert [scheduler.match(wanted, 0) for _ in range(5)] == [None, None, None, 8, 8]
    scheduler.allocated("b", 0, ())  # declined
    assert service.promised == {}
    assert not scheduler.is_waiting()
    service.pending = 1  # preempted: another wait, and it may end while waiting
    assert scheduler.match(wanted, 0) is None
    assert scheduler.is_waiting()
    assert service.promised == {"e/b": 2}
    scheduler.finished("b")
    assert service.promised == {}
    assert scheduler.tracked_phases() == {}
    assert not scheduler.is_waiting()


def test_a_wait_is_had_once() -> None:
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    wanted = request("b", [*range(13)])
    assert scheduler.match(wanted, 0) == 8
    service.promised.clear()  # the lease expired in the queue
    service.pending = 1
    assert scheduler.match(wanted, 0) == 8


def test_of_several_that_want_the_same_chunks_one_loads_and_the_others_find_its_blocks() -> None:
    service, copier, _, worker = halves()
    scheduler = SchedulerHalf(service, SHAPE, name="e", shares_blocks=True)
    store_all(scheduler, worker, copier, request("a", list(range(16))))
    assert scheduler.match(request("b", [*range(16), 1]), 0) == 16
    scheduler.allocated("b", 16, (range(8),))
    followers = [request("c", [*range(16), 2]), request("d", [*range(12), 3])]
    assert [scheduler.match(one, 0) for one in followers] == [None, None]
    assert "e/c" not in service.promised and scheduler.is_waiting()
    assert scheduler.match(request("e", [*range(4), 4]), 0) == 4  # not for a load of four times its length
    worker.start_loads(scheduler.build_step([]))
    assert [scheduler.match(one, 0) for one in followers] == [None, None]
    report = worker.poll()
    scheduler.loads_ended(report.finished, report.failed)
    assert scheduler.match(followers[0], 16) == 0  # the engine has it all now
    assert scheduler.match(followers[1], 0) == 12  # or has not kept it: then it is loaded
    assert not scheduler.is_waiting()
    assert (scheduler.counts.loads, scheduler.counts.loads_shared) == (1, 2)


@pytest.mark.parametrize("ends", ["fails", "is aborted"])
def test_a_load_that_others_wait_for_and_that_does_not_come_is_theirs(ends: str) -> None:
    service, copier, _, worker = halves()
    scheduler = SchedulerHalf(service, SHAPE, name="e", shares_blocks=True)
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    scheduler.match(request("b", [*range(8), 1]), 0)
    scheduler.allocated("b", 8, (range(4),))
    assert scheduler.match(request("c", [*range(8), 2]), 0) is None
    if ends == "fails":
        scheduler.loads_ended(["b"], ["b"])
    else:
        scheduler.finished("b")
    assert scheduler.match(request("c", [*range(8), 2]), 0) == 8
    assert scheduler.match(request("d", [*range(8), 3]), 0) == 8  # nobody is loading


def test_an_allocation_that_does_not_add_up_is_refused_and_reported() -> None:
    for external, table in ((8, ()), (7, (1, 2, 3, 4)), (8, (1, 2, 3))):
        service, copier, scheduler, worker = halves()
        store_all(scheduler, worker, copier, request("a", list(range(8))))
        assert scheduler.match(request("b", [*range(8), 9]), 0) == 8
        scheduler.allocated("b", external, (table,))
        plan = scheduler.build_step([])
        assert plan.refused == ("b",)
        assert plan.loads == ()
        worker.start_loads(plan)
        report = worker.poll()
        assert report.finished == report.failed == {"b"}
        scheduler.loads_ended(report.finished, report.failed)
        assert service.promised == {}


def test_a_load_that_was_never_offered_is_refused() -> None:
    _, _, scheduler, _ = halves()
    scheduler.allocated("stranger", 8, ((1, 2, 3, 4),))
    assert scheduler.build_step([]).refused == ("stranger",)


def test_a_load_planned_before_a_reset_delivers_nothing_after_it() -> None:
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    scheduler.match(request("b", [*range(8), 9]), 0)
    scheduler.allocated("b", 8, ((1, 2, 3, 4),))
    late = scheduler.build_step([])
    scheduler.reset()
    worker.start_loads(scheduler.build_step([]))
    worker.start_loads(late)
    assert worker.poll().failed == {"b"}
    assert copier.loaded_tokens == 0
    assert service.held == {}


@pytest.mark.parametrize(("fault", "left"), [("fail_loads", 1), ("expire_leases", 0), ("fail_copies", 0)])
def test_a_failed_load_forgets_what_failed_before_it_is_reported(fault: str, left: int) -> None:
    """Only the chunk that has gone, or all that were copied: either way the same load is not offered again."""
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    wanted = request("b", [*range(8), 9])
    scheduler.match(wanted, 0)
    scheduler.allocated("b", 8, ((1, 2, 3, 4, 5),))
    setattr(copier if fault == "fail_copies" else service, fault, 1)
    worker.start_loads(scheduler.build_step([]))
    report = worker.poll()
    assert report.failed == {"b"}
    assert len(service.held) == left
    scheduler.loads_ended(report.finished, report.failed)
    assert (scheduler.counts.loads_failed, scheduler.counts.loads_failed_in_a_row) == (1, 1)
    assert scheduler.match(wanted, 0) == left * CHUNK


def begin_loads(scheduler: SchedulerHalf, *names: str) -> None:
    """Of what `store_all` has stored for `range(8)`."""
    for name in names:
        assert scheduler.match(request(name, [*range(8), 9]), 0) == 8
        scheduler.allocated(name, 8, ((1, 2, 3, 4, 5),))


def test_loads_that_fail_together_count_once_among_those_that_fail_in_a_row() -> None:
    """One restart of a server fails all that are under way, which says nothing about the next."""
    _, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    many = [f"load {number}" for number in range(40)]
    begin_loads(scheduler, *many)
    scheduler.loads_ended(many, many)
    scheduler.loads_ended([], [])
    assert (scheduler.counts.loads_failed, scheduler.counts.loads_failed_in_a_row) == (40, 1)
    begin_loads(scheduler, *many[:2])
    scheduler.loads_ended(many[:2], many[:1])
    assert scheduler.counts.loads_failed_in_a_row == 0


def test_loads_of_other_connectors_say_nothing_about_ours() -> None:
    """Under vLLM's MultiConnector each connector is told how the loads of all have ended."""
    _, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    assert scheduler.match(request("theirs", list(range(20, 29))), 0) == 0
    scheduler.allocated("theirs", 0, ())
    for _ in range(40):
        scheduler.loads_ended(["theirs", "never seen"], ["theirs", "never seen"])
    assert (scheduler.counts.loads_failed, scheduler.counts.loads_failed_in_a_row) == (0, 0)
    begin_loads(scheduler, "ours")
    scheduler.loads_ended(["ours"], ["ours"])
    scheduler.loads_ended(["theirs"], [])
    assert (scheduler.counts.loads_failed, scheduler.counts.loads_failed_in_a_row) == (1, 1)


def test_closing_the_worker_gives_everything_back() -> None:
    service, copier, scheduler, worker = halves()
    store_all(scheduler, worker, copier, request("a", list(range(8))))
    worker.close()
    assert service.ended[-1] == "e/worker0"


@dataclass
class Live:
    tokens: list[int]
    prompt: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)  # for each token, those that its KV must be of
    loading: bool = False
    waiting: bool = True
    finished: bool = False


class ToyEngine(RuleBasedStateMachine):
    """Requests arrive, match, load, compute in pieces, are preempted, aborted and finished, in any order.

    The KV of a token is the tuple of all tokens up to it, and of the weights that computed it, which change too. Before
    anything is computed, all that it would attend to is compared; at the end nobody holds anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.service, self.copier, self.scheduler, self.worker = halves()
        self.live: dict[str, Live] = {}
        self.numbers = itertools.count()
        self.free = list(range(1, 40))
        self.weights = 0

    def tokens_of(self, name: str) -> RequestTokens:
        return RequestTokens(name, self.live[name].tokens, keep_tokens=self.live[name].prompt)

    @rule(shared=st.integers(0, 14), own=st.integers(0, 4))
    def arrive(self, shared: int, own: int) -> None:
        if shared + own:
            tokens = [*range(100, 100 + shared), *range(own)]
            self.live[f"r{next(self.numbers)}"] = Live(tokens, len(tokens))

    def pick(self, data: st.DataObject, **wanted: bool) -> str | None:
        names = [
            name
            for name, live in self.live.items()
            if all(getattr(live, key) == value for key, value in wanted.items())
        ]
        return data.draw(st.sampled_from(names)) if names else None

    @rule(data=st.data(), gives_up=st.booleans(), pending=st.booleans())
    def schedule_waiting(self, data: st.DataObject, gives_up: bool, pending: bool) -> None:
        """Match; then it must wait for slower tiers, or no blocks are free and it stays queued, or it is allocated."""
        name = self.pick(data, waiting=True, loading=False, finished=False)
        if name is None:
            return
        live = self.live[name]
        self.service.pending = pending
        external = self.scheduler.match(self.tokens_of(name), 0)
        assert self.scheduler.is_waiting() == (Phase.PENDING in self.scheduler.tracked_phases().values())
        if external is None:
            return
        assert 0 <= external < len(live.tokens)
        needed = -(-len(live.tokens) // BLOCK)
        if gives_up or len(self.free) < needed:
            return
        live.blocks = [self.free.pop() for _ in range(needed)]
        for block in live.blocks:
            for slot in range(block * BLOCK, (block + 1) * BLOCK):
                self.copier.slots[slot] = "garbage"
        self.scheduler.allocated(name, external, (live.blocks,))
        live.computed, live.loading, live.waiting = external, external > 0, False
        live.weights = [self.weights] * external

    @rule(data=st.data(), tokens=st.integers(1, 6), fault=st.sampled_from(["", "", "gone", "copy", "expire", "room"]))
    def step(self, data: st.DataObject, tokens: int, fault: str) -> None:
        name = self.pick(data, waiting=False, loading=False, finished=False)
        scheduled = []
        if name is not None:
            live = self.live[name]
            if live.computed == 0:
                self.scheduler.allocated(name, 0, ())
            end = min(len(live.tokens), live.computed + tokens)
            for at in range(end):
                slot = live.blocks[at // BLOCK] * BLOCK + at % BLOCK
                if at >= live.computed:
                    live.weights[at:] = [self.weights]
                    self.copier.slots[slot] = (self.weights, *live.tokens[: at + 1])
                right = (live.weights[at], *live.tokens[: at + 1])
                assert self.copier.slots[slot] == right, f"{name} attends to wrong bytes"
            scheduled.append(Scheduled(self.tokens_of(name), end, (live.blocks,)))
            live.computed = end
        self.service.fail_loads = fault == "gone"
        self.copier.fail_copies = fault == "copy"
        self.service.expire_leases = fault == "expire"
        self.service.refuse_stores = fault == "room"
        plan = StepPlan.from_plain(self.scheduler.build_step(scheduled).to_plain())
        self.worker.start_loads(plan)
        self.worker.stores.start(plan)
        self.worker.stores.finish()
        report = self.worker.poll()
        assert report.failed <= report.finished
        self.scheduler.loads_ended(report.finished, report.failed)
        for ended in report.finished:
            live = self.live[ended]
            assert live.loading
            live.loading = False
            if ended in report.failed:
                live.computed = 0
                self.give_back(live)
                live.waiting = True
            if live.finished:
                self.give_back(live)
                del self.live[ended]

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = self.pick(data, waiting=False, loading=False, finished=False)
        if name is not None and self.live[name].computed:
            live = self.live[name]
            live.tokens.append(7)
            live.computed, live.waiting = 0, True
            self.give_back(live)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = self.pick(data, finished=False)
        if name is None:
            return
        live = self.live[name]
        self.scheduler.finished(name)
        if live.loading:
            live.finished = True  # its blocks stay until the load is reported
        else:
            self.give_back(live)
            del self.live[name]

    @precondition(lambda self: not any(live.loading for live in self.live.values()))
    @rule()
    def reset(self) -> None:
        self.scheduler.reset()

    @precondition(lambda self: not any(live.loading for live in self.live.values()))
    @rule(known=st.booleans(), back=st.booleans())
    def change_weights(self, known: bool, back: bool) -> None:
        """Those that run go on: their blocks are of both, and of no worth to anyone else."""
        self.weights = self.weights - 1 if back and self.weights else self.weights + 1
        self.scheduler.weights_changed(self.space() if known else None)

    @precondition(lambda self: self.scheduler.space is None)
    @rule()
    def know_weights(self) -> None:
        self.scheduler.name_weights(self.space())

    def space(self) -> KeySpace:
        return replace(SPACE, revision=f"r{self.weights}")

    def give_back(self, live: Live) -> None:
        self.free += live.blocks
        live.blocks = []

    @invariant()
    def only_those_who_hold_are_promised(self) -> None:
        phases = self.scheduler.tracked_phases()
        holding = {f"e/{name}" for name, phase in phases.items() if phase in HOLDING}
        assert set(self.service.promised) <= holding
        assert not self.service.open_leases

    def teardown(self) -> None:
        for _ in range(3):
            report_of = self.scheduler.build_step([])
            self.worker.start_loads(report_of)
            report = self.worker.poll()
            self.scheduler.loads_ended(report.finished, report.failed)
        for name in list(self.live):
            self.scheduler.finished(name)
        assert self.scheduler.tracked_phases() == {}
        assert self.service.promised == {}
        assert self.service.open_leases == {}


TestToyEngine = ToyEngine.TestCase
TestToyEngine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
