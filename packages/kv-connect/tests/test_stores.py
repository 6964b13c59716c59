"""Stores that go on behind the engine's steps, against the toy engine with a block pool of its own.

The device's queue reads when the test says so, and so as late as may be. Every block that it reads must still be the
one that was asked for, unless its store has failed and discards what it reads. Nothing may be committed before its
bytes are there, and at the end every block is free.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StateBlock, StepPlan, StoreStep
from kv_connect.halves.stores import HeldBlocks
from kv_connect.halves.worker import WorkerHalf
from kv_core.hashing import ChainScheme
from kv_core.keys import ChunkKey
from kv_core.sequence import digests_of
from kv_core.service import WriteLease
from kv_core.shape import NO_BLOCK, ConnectShape, GroupShape
from kv_core.transfer import HostExtent
from kv_testing.connect import CopyQueue, DictService, LayeredCopier, QueuedCopier, QueuedCopy
from kv_testing.toy_engine import BLOCK, CHUNK, SPACE, Live, ToyHybrid, run, shape_of

BLOCKS = 180
SCHEME = ChainScheme(chunk_tokens=CHUNK)
OTHER_SPACE = replace(SPACE, revision="r2")


class Pool:
    """Blocks as vLLM has them: with owners that are counted, and free without any. A list to the toy engine."""

    def __init__(self) -> None:
        self.free = list(range(1, BLOCKS + 1))
        self.owners: Counter[int] = Counter()
        self.given = [0] * (BLOCKS + 1)
        self.holds = True

    def pop(self) -> int:
        block = self.free.pop()
        self.owners[block], self.given[block] = 1, self.given[block] + 1
        return block

    def append(self, block: int) -> None:
        assert self.owners[block] > 0
        self.owners[block] -= 1
        if not self.owners[block]:
            self.free.append(block)

    def __iadd__(self, blocks: Iterable[int]) -> "Pool":
        for block in blocks:
            self.append(block)
        return self

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks if self.holds else ():
            assert self.owners[block] > 0
            self.owners[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks if self.holds else ():
            self.append(block)

    def is_ours_alone(self, block: int) -> bool:
        return self.owners[block] == 1


class WatchedService(DictService):
    """Looks at each commit. arrived: the extents whose bytes are there. attention: the copiers of these groups.
    stored: how many of a chunk's last tokens each of them keeps."""

    arrived: set[HostExtent]
    attention: Sequence[LayeredCopier]  # of groups of which a hit needs a chunk's last token
    stored: Sequence[int]

    def commit(self, lease: WriteLease) -> None:
        assert self.arrived.issuperset(lease.extents), "committed before its bytes are there"
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            if key.group < len(self.attention):
                self.check(self.attention[key.group], key, extent)
        super().commit(lease)

    def check(self, copier: LayeredCopier, key: ChunkKey, extent: HostExtent) -> None:
        """In every layer, the KV of a chunk's last token is of the very tokens that the key names."""
        layers: Any = copier.pool[extent.offset, self.stored[key.group] - 1]
        assert len(layers) == copier.layers, "committed without a layer"
        for tokens in layers.values():
            is_right = isinstance(tokens, tuple) and key.endswith(
                digests_of(ChainScheme(chunk_tokens=CHUNK), tokens)[-1]
            )
            assert is_right, f"committed before a layer was computed: {layers}"


class ToyDevice(ToyHybrid):
    """The toy engine on a device whose copies take as long as they like.

    layers: it stores layers as they are computed; else behind the forward pass.
    pace: how many copies the device makes while a layer is computed.
    says: of so many first layers the engine says nothing, and of one layer in so many it says twice that it is
        computed: in the middle, and at its end.
    """

    holds = True
    early = False  # the engine says that a layer is computed before it is

    @initialize(
        window=st.integers(1, 11),
        room=st.sampled_from([2, 5, 1000]),
        layers=st.booleans(),
        pace=st.integers(0, 3),
        says=st.tuples(st.integers(0, 1), st.integers(2, 4)),
    )
    def start(
        self, window: int, room: int = 1000, layers: bool = False, pace: int = 0, says: tuple[int, int] = (0, 4)
    ) -> None:
        super().start(window)
        self.room, self.layers, self.pace, self.says = room, layers, pace, says
        self.service = WatchedService()
        self.service.arrived = set()
        self.attention = [LayeredCopier(), LayeredCopier()]
        # A window of one token is the token itself: a hit reads nothing of such a chunk, which may be full of holes.
        self.service.attention = self.attention[: 1 if window == 1 else 2]
        shape = shape_of(window)
        self.service.stored = [group.stored_tokens(CHUNK) for group in shape.groups]
        self.queue = CopyQueue(submitted=self.asked, before=self.before, after=self.after)
        self.copiers[:2] = self.attention
        copiers = [
            *(QueuedCopier(copier, self.queue, copier.by_layer()) for copier in self.attention),
            *(QueuedCopier(copier, self.queue) for copier in self.copiers[2:]),
        ]
        self.scheduler = SchedulerHalf(self.service, shape, name="e")
        self.worker = WorkerHalf(
            self.service, shape, copiers, shard=0, name="e", max_in_flight_bytes=room, stores_layers=layers
        )
        self.pool = Pool()
        self.pool.holds = self.holds
        self.free = [self.pool] * 3  # type: ignore[list-item]
        self.held = HeldBlocks(self.pool, shape, ranks=1)
        self.given: dict[QueuedCopy, list[tuple[int, int]]] = {}

    def compute(self, name: str, live: Live, end: int) -> Scheduled:
        before = [dict(copier.slots) for copier in self.attention]
        scheduled = super().compute(name, live, end)
        for copier, slots in zip(self.attention, before, strict=True):
            copier.begin(slots)
        return scheduled

    def forward(self, plan: StepPlan) -> None:
        """Layer by layer, as far as the engine says so."""
        silent, repeats = self.says
        for layer in range(self.attention[0].layers):
            for group, copier in enumerate(self.attention):
                if layer >= silent and ((layer + group) % repeats == 1 or self.early):
                    self.worker.stores.layer_computed(plan, group, layer)
                    self.queue.run(self.pace)
                copier.computed = layer + 1
                if layer >= silent and not self.early:
                    self.worker.stores.layer_computed(plan, group, layer)
                self.queue.run(self.pace)

    def asked(self, copy: QueuedCopy) -> None:
        self.given[copy] = [(block, self.pool.given[block]) for block in blocks_of(copy)]

    def before(self, copy: QueuedCopy) -> None:
        extents = {part.extent for part in copy.plan.copies}
        failed = [store for store in self.worker.stores._storing if store.copies.failure is not None]
        if any(extents.intersection(store.lease.extents) for store in failed):
            return
        for block, given in self.given[copy]:
            assert self.pool.owners[block], f"block {block} is read after it was given away"
            assert self.pool.given[block] == given, f"block {block} is read after it was given to another"

    def after(self, copy: QueuedCopy) -> None:
        self.service.arrived.update(part.extent for part in copy.plan.copies)

    def take(self, table: int) -> int:
        block = super().take(table)
        for copier in self.copiers:  # groups share the pool
            for slot in (block, *range(block * BLOCK, (block + 1) * BLOCK)):
                copier.slots[slot] = "garbage"
        return block

    def carry_out(self, plan: StepPlan) -> None:
        plan = StepPlan.from_plain(self.held.hold(plan).to_plain())
        self.worker.start_loads(plan)
        if self.layers and plan.stores:
            self.forward(plan)
        for copier in self.attention:
            copier.computed = copier.layers
        self.worker.stores.start(plan)
        self.worker.stores.finish(wait=not plan.number)
        self.held.acknowledge({0: self.worker.stores.through})

    @rule(copies=st.integers(1, 6), failure=st.sampled_from(["", "", "", "", "the bus is on fire"]))
    def device_goes_on(self, copies: int, failure: str) -> None:
        self.queue.run(copies, failure=failure)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        super().evict(data)

    @rule()
    def reset(self) -> None:
        self.scheduler.reset()

    @rule()
    def other_weights(self) -> None:
        self.scheduler.weights_changed(OTHER_SPACE if self.scheduler.space == SPACE else SPACE)

    @invariant()
    def only_those_who_hold_are_promised(self) -> None:
        if hasattr(self, "worker"):
            stores = [lease for lease in self.service.open_leases.values() if isinstance(lease, WriteLease)]
            nbytes = sum(len(lease.keys) for lease in stores)
            assert nbytes <= max(self.room, 1), "more is on its way than may be"
            assert self.queue.waits == 0, "a step has waited"

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        for name, live in list(self.live.items()):
            if not live.finished:
                self.scheduler.finished(name)
                live.finished = True
        for _ in range(20):
            self.queue.run(len(self.queue.pending))
            self.carry_out(self.scheduler.build_step([]))
            report = self.worker.poll()
            self.scheduler.loads_ended(report.finished, report.failed)
        for live in self.live.values():
            self.give_back(live)
        assert not self.held.is_waiting and not self.service.open_leases and not self.service.promised
        assert sorted(self.pool.free) == list(range(1, BLOCKS + 1)), "blocks were lost"


def blocks_of(copy: QueuedCopy) -> list[int]:
    """The blocks that a store reads. A state is a slot of its own."""
    size = 1 if copy.plan.chunk_tokens == 1 else BLOCK
    slots = [slot for part in copy.plan.copies for slot in range(part.first_slot, part.first_slot + part.tokens)]
    return sorted({slot // size for slot in slots} - {NO_BLOCK}) if copy.is_store else []


MACHINE = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestToyDevice = ToyDevice.TestCase
TestToyDevice.settings = MACHINE
QUICK = settings(
    max_examples=500,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    database=None,
)


class FreesEarly(ToyDevice):
    holds = False


class SpeaksEarly(ToyDevice):
    early = True


def test_blocks_that_are_not_held_are_read_after_they_were_given_away() -> None:
    """The control: without it the machine could not fail."""
    with pytest.raises(AssertionError, match="is read after it was given"):
        run_state_machine_as_test(FreesEarly, settings=QUICK)


def test_a_commit_before_the_bytes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""
    monkeypatch.setattr(QueuedCopy, "done", lambda copy: True)
    machine = ToyDevice()
    machine.start(window=5)
    with pytest.raises(AssertionError, match="committed before its bytes are there"):
        run(machine, "a", list(range(9)))


def test_a_layer_that_is_stored_before_it_is_computed_is_seen() -> None:
    """Likewise, of layers."""
    machine = SpeaksEarly()
    machine.start(window=5, layers=True, pace=3)
    run(machine, "a", list(range(9)))
    machine.queue.run(99)
    with pytest.raises(AssertionError, match="committed before a layer was computed"):
        machine.worker.stores.finish(wait=False)


@pytest.mark.parametrize(
    ("said", "early", "behind"), [([], 0, 1), ([1], 1, 2), ([0, 1, 2], 3, 0), ([0, 1, 1, 2], 3, 1)]
)
def test_layers_are_stored_as_they_are_computed(said: list[int], early: int, behind: int) -> None:
    """And what the engine says nothing of, or says twice, behind the forward pass."""
    halves = Halves(layers=True)
    copies: list[QueuedCopy] = []
    halves.queue.submitted = copies.append
    plan = halves.plan("a", 2)
    for layer in said:
        halves.worker.stores.layer_computed(plan, 0, layer)
    assert len(copies) == halves.worker.counts.layers_stored_early == early
    halves.queue.run(99)
    halves.worker.stores.start(plan)
    assert len(copies) == early + behind
    halves.worker.stores.finish(wait=False)
    assert len(halves.service.held) == (0 if behind else 2)  # found in the very step, if nothing is left
    halves.queue.run(99)
    halves.go_on()
    assert len(halves.service.held) == 2 and halves.free == BLOCKS
    values: Any = list(halves.copier.pool.values())
    assert len(values) == 8 and all(len(layers) == 3 for layers in values)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_forward_pass_that_fails_leaves_nothing_behind(has_begun: bool) -> None:
    halves = Halves(layers=True)
    plan = halves.plan("a", 2)
    if has_begun:
        halves.worker.stores.layer_computed(plan, 0, 0)
    halves.worker.stores.abandon(plan)
    halves.worker.stores.finish(wait=False)
    halves.queue.run(9)
    halves.go_on()
    assert not halves.service.held and not halves.service.open_leases
    assert halves.worker.stores.through == plan.number


def test_a_step_that_ended_without_a_word_leaves_nothing_behind() -> None:
    halves = Halves(layers=True)
    halves.worker.stores.layer_computed(halves.plan("a", 2), 0, 0)
    halves.worker.stores.finish(wait=False)  # of what was begun before
    halves.store("b", 1, first=50)
    halves.queue.run(9)
    halves.go_on()
    assert len(halves.service.held) == 1 and halves.worker.counts.stores_failed == 1
    assert not halves.service.open_leases


def test_a_layer_that_fails_costs_its_store_alone() -> None:
    halves = Halves(layers=True)
    plan = halves.plan("a", 2)
    halves.worker.stores.layer_computed(plan, 0, 0)
    halves.queue.run(1, failure="the bus is on fire")
    halves.worker.stores.layer_computed(plan, 0, 1)
    halves.worker.stores.start(plan)
    halves.go_on()
    assert halves.service.open_leases, "given back while layers are still copied"
    halves.queue.run(9)
    halves.go_on()
    halves.store("b", 1, first=50)
    halves.queue.run(9)
    halves.go_on()
    assert len(halves.service.held) == 1 and halves.worker.counts.stores_failed == 1


SHAPE = ConnectShape(ChainScheme(chunk_tokens=4), SPACE, (GroupShape(2),))


class Halves:
    """Both halves, a queue between the engine's blocks and the pool, and a request whose chunks are computed."""

    def __init__(self, room: int = 1000, ranks: int = 1, layers: bool = False) -> None:
        self.service, self.copier, self.queue, self.pool = DictService(), LayeredCopier(), CopyQueue(), Pool()
        self.copier.slots.update((slot, slot) for slot in range(2 * BLOCKS + 2))
        self.held = HeldBlocks(self.pool, SHAPE, ranks=ranks)
        self.scheduler = SchedulerHalf(self.service, SHAPE, name="e")
        copier = QueuedCopier(self.copier, self.queue, self.copier.by_layer())
        self.worker = WorkerHalf(
            self.service, SHAPE, [copier], shard=0, name="e", max_in_flight_bytes=room, stores_layers=layers
        )

    def plan(self, name: str, chunks: int, first: int = 0) -> StepPlan:
        """The request computes its first so many chunks, and ends at once."""
        table = [self.pool.pop() for _ in range(2 * chunks)]
        tokens = RequestTokens(name, list(range(first, first + 4 * chunks)), 4 * chunks)
        self.scheduler.match(tokens, 0)
        self.scheduler.allocated(name, 0, ())
        plan = self.held.hold(self.scheduler.build_step([Scheduled(tokens, 4 * chunks, (table,))]))
        self.scheduler.finished(name)
        self.pool += table
        return plan

    def store(self, name: str, chunks: int, first: int = 0) -> None:
        plan = self.plan(name, chunks, first)
        self.worker.stores.start(plan)
        self.worker.stores.finish(wait=not plan.number)

    def go_on(self) -> None:
        self.worker.stores.finish(wait=False)
        self.held.acknowledge({0: self.worker.stores.through})

    @property
    def free(self) -> int:
        return len(self.pool.free)


def test_blocks_are_free_when_every_rank_has_read_them_and_not_before() -> None:
    halves = Halves(ranks=3)
    halves.store("a", 2)
    assert (halves.free, halves.held.will_free()) == (BLOCKS - 4, True)
    halves.queue.run(1)
    halves.go_on()
    assert len(halves.service.held) == 2
    for rank, free in ((1, BLOCKS - 4), (1, BLOCKS - 4), (2, BLOCKS)):
        halves.held.acknowledge({rank: 1})
        assert halves.free == free
    assert not halves.held.is_waiting and not halves.held.will_free()


def test_plans_are_acknowledged_in_their_order_though_copies_arrive_in_another() -> None:
    halves = Halves()
    halves.store("a", 1)
    halves.store("b", 1, first=50)
    halves.queue.pending.reverse()
    halves.queue.run(1)
    halves.go_on()
    assert len(halves.service.held) == 1
    assert halves.worker.stores.through == 0 and halves.free == BLOCKS - 4
    halves.queue.run(1)
    halves.go_on()
    assert halves.worker.stores.through == 2 and halves.free == BLOCKS


def test_blocks_that_two_plans_read_are_held_until_the_second_has_read_them() -> None:
    pool = Pool()
    held = HeldBlocks(pool, SHAPE, ranks=1)
    table = tuple(pool.pop() for _ in range(2))
    plan = StepPlan(stores=(StoreStep("a", (b"d" * 32,), bytes(7), (table,)),))
    assert [held.hold(plan).number, held.hold(plan).number, held.hold(StepPlan()).number] == [1, 2, 2]
    pool += table
    held.acknowledge({0: 1})
    assert len(pool.free) == BLOCKS - 2
    held.acknowledge({0: 2})
    assert len(pool.free) == BLOCKS


def test_the_end_of_a_prefix_is_given_back_first_and_a_null_block_never() -> None:
    pool = Pool()
    held = HeldBlocks(pool, shape_of(4), ranks=1)
    blocks = [pool.pop() for _ in range(4)]
    tables = (tuple(blocks[:2]), (0, blocks[2]), (0, 0))
    held.hold(StepPlan(stores=(StoreStep("a", (b"d" * 32,), bytes(7), tables, (StateBlock(2, blocks[3], 0),)),)))
    pool += blocks
    assert len(pool.free) == BLOCKS - 4
    held.acknowledge({0: 1})
    assert pool.free[-4:] == blocks[::-1]


def test_what_is_beyond_what_may_be_on_its_way_is_dropped_and_counted_and_never_waited_for() -> None:
    halves = Halves(room=5)
    halves.store("a", 3)
    halves.store("b", 4, first=50)  # two of these fit
    halves.store("c", 1, first=90)
    assert (halves.worker.counts.dropped_chunks, halves.queue.waits) == (3, 0)
    halves.queue.run(9)
    halves.go_on()
    assert (len(halves.service.held), halves.free) == (5, BLOCKS)
    assert halves.scheduler.match(RequestTokens("d", list(range(50, 80)), 30), 0) == 8
    halves.scheduler.finished("d")
    halves.store("b again", 4, first=50)
    halves.queue.run(9)
    halves.go_on()
    assert len(halves.service.held) == 7
    assert not halves.service.open_leases


def test_a_chunk_larger_than_what_may_be_on_its_way_goes_alone() -> None:
    halves = Halves(room=0)
    halves.store("a", 2)
    halves.store("b", 1, first=50)
    assert halves.worker.counts.dropped_chunks == 2
    halves.queue.run(9)
    halves.go_on()
    assert len(halves.service.held) == 1


def test_what_is_on_its_way_is_not_stored_a_second_time() -> None:
    halves = Halves()
    halves.store("a", 2)
    halves.store("b", 2)
    assert len(halves.queue.pending) == 1
    halves.queue.run(9)
    halves.go_on()
    assert halves.free == BLOCKS and len(halves.service.held) == 2


def test_a_copy_that_fails_leaves_nothing_and_its_blocks_come_back() -> None:
    halves = Halves()
    halves.store("a", 2)
    halves.queue.run(1, failure="the bus is on fire")
    halves.go_on()
    assert halves.worker.counts.stores_failed == 1 and halves.free == BLOCKS
    assert not halves.service.held and not halves.service.open_leases


def test_a_worker_that_closes_waits_for_what_is_under_way() -> None:
    halves = Halves()
    halves.store("a", 2)
    halves.worker.close()
    halves.held.acknowledge({0: halves.worker.stores.through})
    assert halves.queue.waits == 1 and halves.free == BLOCKS  # a shutdown is no step


def test_without_a_number_the_copies_are_waited_for() -> None:
    """The scheduler's half holds no blocks, and says so."""
    halves = Halves(room=0)
    tokens = RequestTokens("a", list(range(8)), 8)
    halves.scheduler.match(tokens, 0)
    halves.worker.stores.start(halves.scheduler.build_step([Scheduled(tokens, 8, ([1, 2, 3, 4],))]))
    halves.worker.stores.finish()
    assert halves.queue.waits == 1 and len(halves.service.held) == 2  # and nothing of it is too much
