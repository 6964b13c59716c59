"""A toy engine with three groups of layers (full attention, a sliding window and a linear layer) for testing the
halves.

Like vLLM's hybrid managers, it gives away blocks that the window has passed, and keeps one state where a forward pass
ends. Everything that a token attends to is checked before it is used. It is a Hypothesis state machine.
"""

import itertools
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_connect.halves.request import HOLDING, EngineState, RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StepPlan
from kv_connect.halves.worker import WorkerHalf
from kv_core.coverage import ALL, STATE, Coverage
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.shape import NO_BLOCK, ConnectShape, GroupShape

from kv_testing.connect import DictCopier, DictService

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
    """Like `ToyEngine` of test_connect.py, with three block tables."""

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
        """A block with another request's leftover content."""
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
        self.carry_out(self.scheduler.build_step(scheduled))
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

    def carry_out(self, plan: StepPlan) -> None:
        plan = StepPlan.from_plain(plan.to_plain())
        self.worker.start_loads(plan)
        self.worker.stores.start(plan)
        self.worker.stores.finish()

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

    @rule()
    def reset(self) -> None:
        """What was stored is stored again, also by requests whose windows have passed it."""
        self.scheduler.reset()

    @invariant()
    def only_those_who_hold_are_promised(self) -> None:
        if hasattr(self, "scheduler"):
            holding = {f"e/{n}" for n, phase in self.scheduler.tracked_phases().items() if phase in HOLDING}
            assert set(self.service.promised) <= holding
            assert not self.service.open_leases


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
        machine.carry_out(machine.scheduler.build_step([scheduled]))
    machine.scheduler.finished(name)
    machine.give_back(live)
    del machine.live[name]
    return external
