"""The halves with a model of three groups, full attention, a window and a linear layer, against a toy engine.

The engine does what vLLM's hybrid managers do: it gives away blocks that the window has left, and keeps one state where
a forward pass ends. Everything that a token attends to is compared before it is used.
"""

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.connect.admission import StateAdmission, StateKind
from kv_core.connect.request import HOLDING
from kv_core.connect.scheduler import EngineState, RequestTokens, Scheduled, SchedulerHalf
from kv_core.connect.shape import NO_BLOCK, ConnectShape, GroupShape, load_from, stored_from, without_holes
from kv_core.connect.step import StepPlan
from kv_core.connect.testing import DictCopier, DictService
from kv_core.connect.worker import WorkerHalf
from kv_core.coverage import ALL, STATE, Coverage
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace

BLOCK, CHUNK = 2, 4
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")
FULL, WINDOW, LINEAR = range(3)


def shape_of(window: int) -> ConnectShape:
    return ConnectShape(
        ChainScheme(chunk_tokens=CHUNK),
        SPACE,
        (
            GroupShape(BLOCK, ALL, FULL),
            GroupShape(BLOCK, Coverage("window", window), WINDOW),
            GroupShape(CHUNK, STATE, LINEAR),
            GroupShape(CHUNK, STATE, LINEAR),  # the same layers' states, cut in two
        ),
    )


@dataclass
class Live:
    tokens: list[int]
    computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[], [], []])
    loading: bool = False
    waiting: bool = True
    finished: bool = False


class ToyHybrid(RuleBasedStateMachine):
    """As `ToyEngine` of test_connect.py, with three block tables."""

    @initialize(window=st.integers(1, 11))
    def start(self, window: int) -> None:
        shape = shape_of(window)
        self.window = window
        self.service = DictService()
        self.copiers = [DictCopier() for _ in shape.groups]
        self.scheduler = SchedulerHalf(self.service, shape, name="e")
        self.worker = WorkerHalf(self.service, shape, self.copiers, shard=0, name="e")
        self.live: dict[str, Live] = {}
        self.numbers = itertools.count()
        self.free = [list(range(1, 60)) for _ in range(3)]

    def tokens_of(self, name: str) -> RequestTokens:
        tokens = self.live[name].tokens
        return RequestTokens(name, tokens, keep_tokens=len(tokens))

    def take(self, table: int) -> int:
        """A block full of what somebody else left there."""
        block = self.free[table].pop()
        for slot in range(block * BLOCK, (block + 1) * BLOCK):
            for copier in self.copiers[:2][table : table + 1]:
                copier.slots[slot] = "garbage"
        if table == LINEAR:
            for copier in self.copiers[2:]:
                copier.slots[block] = "garbage"
        return block

    def allocate(self, live: Live, external: int) -> None:
        """Blocks for what is to be loaded, as far as each group needs it."""
        if external:
            live.tables[FULL] = [self.take(FULL) for _ in range(external // BLOCK)]
            left = max(0, external - self.window + 1) // BLOCK
            live.tables[WINDOW] = [NO_BLOCK] * left + [self.take(WINDOW) for _ in range(external // BLOCK - left)]
            live.tables[LINEAR] = [NO_BLOCK] * (external // CHUNK - 1) + [self.take(LINEAR)]

    def give_back(self, live: Live) -> None:
        for table, blocks in enumerate(live.tables):
            self.free[table] += [block for block in blocks if block != NO_BLOCK]
        live.tables = [[], [], []]

    def pick(self, data: st.DataObject, **wanted: bool) -> str | None:
        names = [n for n, live in self.live.items() if all(getattr(live, k) == v for k, v in wanted.items())]
        return data.draw(st.sampled_from(names)) if names else None

    @rule(shared=st.integers(0, 17), own=st.integers(0, 6))
    def arrive(self, shared: int, own: int) -> None:
        if shared + own and len(self.live) < 4:
            self.live[f"r{next(self.numbers)}"] = Live([*range(100, 100 + shared), *range(own)])

    @rule(data=st.data(), pending=st.booleans())
    def schedule_waiting(self, data: st.DataObject, pending: bool) -> None:
        name = self.pick(data, waiting=True, loading=False, finished=False)
        if name is None:
            return
        live = self.live[name]
        self.service.pending = pending
        external = self.scheduler.match(self.tokens_of(name), 0)
        if external is None:
            return
        assert external % CHUNK == 0 and external < len(live.tokens)
        self.allocate(live, external)
        self.scheduler.allocated(name, external, tuple(live.tables))
        live.computed, live.loading, live.waiting = external, external > 0, False

    @rule(
        data=st.data(), tokens=st.integers(1, 9), fault=st.sampled_from(["", "", "", "gone", "copy", "expire", "room"])
    )
    def step(self, data: st.DataObject, tokens: int, fault: str) -> None:
        name = self.pick(data, waiting=False, loading=False, finished=False)
        scheduled = []
        if name is not None and self.live[name].computed < len(self.live[name].tokens):
            live = self.live[name]
            if live.computed == 0:
                self.scheduler.allocated(name, 0, ())
            scheduled.append(self.compute(name, live, min(len(live.tokens), live.computed + tokens)))
        self.service.fail_loads = fault == "gone"
        for copier in self.copiers:
            copier.fail_copies = fault == "copy"
        self.service.expire_leases = fault == "expire"
        self.service.refuse_stores = fault == "room"
        plan = StepPlan.from_plain(self.scheduler.build_step(scheduled).to_plain())
        self.worker.start_loads(plan)
        self.worker.start_stores(plan)
        self.worker.finish_stores()
        report = self.worker.poll()
        self.scheduler.loads_ended(report.finished, report.failed)
        for ended in report.finished:
            live = self.live[ended]
            live.loading = False
            if ended in report.failed:
                live.computed, live.waiting = 0, True
                self.give_back(live)
            if live.finished:
                self.give_back(live)
                del self.live[ended]

    def compute(self, name: str, live: Live, end: int) -> Scheduled:
        """A forward pass over tokens `live.computed … end`."""
        for at in range(min(max(0, live.computed - self.window + 1) // BLOCK, len(live.tables[WINDOW]))):
            if live.tables[WINDOW][at] != NO_BLOCK:
                self.free[WINDOW].append(live.tables[WINDOW][at])
                live.tables[WINDOW][at] = NO_BLOCK
        for table in (FULL, WINDOW):
            while len(live.tables[table]) * BLOCK < end:
                live.tables[table].append(self.take(table))
        if live.computed:
            state = live.tables[LINEAR][-1]
            for copier in self.copiers[2:]:
                assert copier.slots[state] == tuple(live.tokens[: live.computed]), f"{name} goes on from a wrong state"
        for group, copier in enumerate(self.copiers[:2]):
            first = 0 if group == FULL else max(0, live.computed - self.window + 1)
            for at in range(first, end):
                slot = live.tables[group][at // BLOCK] * BLOCK + at % BLOCK
                if at >= live.computed:
                    copier.slots[slot] = tuple(live.tokens[: at + 1])
                assert copier.slots[slot] == tuple(live.tokens[: at + 1]), f"{name} attends to wrong bytes in {group}"
        before = live.tables[LINEAR][-1:]
        block = self.take(LINEAR)
        for copier in self.copiers[2:]:
            copier.slots[block] = tuple(live.tokens[:end])
        live.tables[LINEAR] = [NO_BLOCK] * (-(-end // CHUNK) - 1) + [block]
        self.free[LINEAR] += [old for old in before if old != NO_BLOCK]
        live.computed = end
        return Scheduled(self.tokens_of(name), end, tuple(live.tables), (EngineState(LINEAR, block, end),))

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
            live.finished = True
        else:
            self.give_back(live)
            del self.live[name]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Any key may leave at any time: a state without its prefix, the middle of a window."""
        if self.service.held and not self.service.promised:
            self.service.forget([data.draw(st.sampled_from(sorted(self.service.held)))])

    @invariant()
    def only_those_who_hold_are_promised(self) -> None:
        if hasattr(self, "scheduler"):
            holding = {f"e/{n}" for n, phase in self.scheduler.tracked_phases().items() if phase in HOLDING}
            assert set(self.service.promised) <= holding
            assert not self.service.open_leases


TestToyHybrid = ToyHybrid.TestCase
TestToyHybrid.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def run(machine: ToyHybrid, name: str, tokens: list[int], *, budget: int = 100) -> int:
    """One request from its arrival to its end; how many tokens it loaded."""
    live = machine.live[name] = Live(tokens)
    external = machine.scheduler.match(machine.tokens_of(name), 0)
    assert external is not None
    junction = machine.scheduler.junction(name)
    machine.allocate(live, external)
    machine.scheduler.allocated(name, external, tuple(live.tables))
    machine.worker.start_loads(machine.scheduler.build_step([]))
    report = machine.worker.poll()
    machine.scheduler.loads_ended(report.finished, report.failed)
    assert not report.failed
    live.computed = external
    while live.computed < len(tokens):
        if live.computed == 0:
            machine.scheduler.allocated(name, 0, ())
        # As vLLM splits a prefill: at the junction, and at the last block boundary of the prompt.
        stops = [live.computed + budget, (len(tokens) - 1) // CHUNK * CHUNK, junction, len(tokens)]
        end = min(stop for stop in stops if stop > live.computed)
        scheduled = machine.compute(name, live, end)
        machine.worker.start_stores(machine.scheduler.build_step([scheduled]))
        machine.worker.finish_stores()
    machine.scheduler.finished(name)
    machine.give_back(live)
    del machine.live[name]
    return external


def started(window: int) -> ToyHybrid:
    machine = ToyHybrid()
    machine.start(window)
    return machine


def test_a_load_moves_what_the_groups_need_and_no_more() -> None:
    machine = started(window=5)
    prompt = list(range(100, 121))
    assert run(machine, "a", prompt) == 0
    assert run(machine, "b", prompt) == 20
    assert [copier.loaded_tokens for copier in machine.copiers] == [20, 4, 1, 1]


def test_prompts_that_part_at_any_place_hit_from_the_third_on() -> None:
    """The first leaves a state at its own end only, the second finds that prompts part and leaves one there."""
    for shared in range(4, 40):
        machine = started(window=5)
        hits = [run(machine, f"r{n}", [*range(100, 100 + shared), *range(n * 50, n * 50 + 20)]) for n in range(5)]
        assert hits[2:] == [shared // CHUNK * CHUNK] * 3, (shared, hits)


def test_a_window_far_smaller_than_a_chunk_is_stored_from_small_steps() -> None:
    """By the time that a chunk is complete, the engine has given its head away."""
    machine = started(window=2)
    prompt = list(range(100, 117))
    run(machine, "a", prompt, budget=1)
    assert run(machine, "b", prompt) == 16


@given(st.integers(1, 12), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_what_is_stored_covers_every_load(window: int, chunks: int, data: st.DataObject) -> None:
    """Of each boundary whose chunks were all stored, every block that a load fills was there."""
    group = GroupShape(BLOCK, Coverage("window", window), WINDOW)
    start = data.draw(st.integers(0, chunks * CHUNK - 1))
    left = max(0, start - window + 1) // BLOCK
    table = [NO_BLOCK] * left + list(range(1, chunks * CHUNK // BLOCK - left + 1))
    first = stored_from(group, table, chunks, CHUNK)
    assert first <= -(-start // CHUNK) or window == 1  # nothing that this step computed is left out
    for boundary in range(1, chunks + 1):
        since = load_from(group, 0, boundary * CHUNK)
        if since // CHUNK >= first:
            assert NO_BLOCK not in table[since // BLOCK : boundary * CHUNK // BLOCK]


def test_holes_are_filled_with_the_request_s_own_blocks() -> None:
    assert without_holes([0, 0, 5, 0, 7]) == [5, 5, 5, 7, 7]


def test_a_kind_of_state_that_brings_no_hits_is_stored_now_and_then() -> None:
    admission = StateAdmission()
    for number in range(400):
        digest = number.to_bytes(16, "big")
        if admission.admits(digest, StateKind.TAIL):
            admission.hit(digest)
        admission.admits(b"step" + digest, StateKind.STEP)
    before = admission.worth(StateKind.STEP)
    admitted = sum(admission.admits(b"more" + n.to_bytes(16, "big"), StateKind.STEP) for n in range(160))
    assert 0 < admitted <= 20
    for number in range(400):  # and when they begin to bring hits, it learns that
        digest = b"hits" + number.to_bytes(16, "big")
        if admission.admits(digest, StateKind.STEP):
            for _ in range(3):
                admission.hit(digest)
    assert admission.worth(StateKind.STEP) > before
    assert all(admission.admits(b"last" + n.to_bytes(16, "big"), StateKind.STEP) for n in range(10))


def test_gemma_3_270m_loads_what_it_needs_of_8192_tokens() -> None:
    """15 layers with a window of 512 and 3 with full attention, as vLLM groups them: 21.9 % of layers × tokens."""
    window = Coverage("window", 512)
    shape = ConnectShape(
        ChainScheme(chunk_tokens=256),
        SPACE,
        (GroupShape(16, ALL, 0), *(GroupShape(16, window, table) for table in range(1, 6))),
    )
    service, copiers = DictService(), [DictCopier() for _ in shape.groups]
    scheduler = SchedulerHalf(service, shape, name="e")
    worker = WorkerHalf(service, shape, copiers, shard=0, name="e")
    tokens, blocks = list(range(8193)), range(1, 513)
    for copier in copiers:
        copier.slots.update(dict.fromkeys(range(16, 513 * 16), "kv"))
    scheduler.match(RequestTokens("a", tokens, 8193), 0)
    scheduler.allocated("a", 0, ())
    worker.start_stores(scheduler.build_step([Scheduled(RequestTokens("a", tokens, 8193), 8193, (blocks,) * 6)]))
    worker.finish_stores()
    assert scheduler.match(RequestTokens("b", tokens, 8193), 0) == 8192
    seen = [NO_BLOCK] * (480) + list(range(1, 33))
    scheduler.allocated("b", 8192, (blocks, *[seen] * 5))
    worker.start_loads(scheduler.build_step([]))
    assert worker.poll().failed == frozenset()
    moved = 3 * sum(copier.loaded_tokens for copier in copiers)
    needed = 3 * 8192 + 15 * 511
    assert moved / (18 * 8192) == 0.21875
    assert moved / needed <= 1.02
