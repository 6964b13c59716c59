"""A prompt that one engine computes and another goes on with: the last, partial chunk, and what is waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import MIN_TAIL_TOKENS, HandOvers, SchedulerHalf
from kv_connect.halves.step import StepPlan, StepReport
from kv_connect.halves.worker import WorkerHalf
from kv_connect.request_options import Controls
from kv_core.clock import HandClock
from kv_core.coverage import Coverage
from kv_core.hashing import ChainScheme
from kv_core.keys import ChunkKey, KeySpace
from kv_core.service import LookupPlan, WriteLease
from kv_core.shape import ConnectShape, GroupShape
from kv_core.transfer import HostExtent, plan_transfer
from kv_testing.connect import DictCopier, DictService

BLOCK, CHUNK = 8, 32
PROMPT = list(range(100, 100 + 2 * CHUNK + 20))
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")


def shape_of(*groups: GroupShape, **more: bool) -> ConnectShape:
    return ConnectShape(ChainScheme(chunk_tokens=CHUNK), SPACE, groups or (GroupShape(BLOCK),), **more)


class Engine:
    """Both halves of one. Its blocks are 1, 2, 3, …"""

    def __init__(self, service: DictService, name: str, shape: ConnectShape, costs: EngineCosts | None = None) -> None:
        self.clock = HandClock()
        self.copier = DictCopier()
        handovers = HandOvers(shape, self.clock, wait_s=1.0, hold_s=30.0)
        self.scheduler = SchedulerHalf(service, shape, name=name, costs=costs, handovers=handovers)
        self.worker = WorkerHalf(service, shape, [self.copier] * len(shape.groups), shard=0, name=name)
        self.tables = [list(range(1, 20)) for _ in shape.groups]

    def compute(self, prompt: Sequence[int], steps: Sequence[int], **controls: object) -> tuple[list[StepPlan], int]:
        """A request whose steps end at these tokens. The plans, and how many tokens another engine can go on from."""
        self.copier.slots = {BLOCK + at: token for at, token in enumerate(prompt)}  # and no others: none may be read
        request = RequestTokens("p", list(prompt), len(prompt), controls=Controls(**controls))  # type: ignore[arg-type]
        assert self.scheduler.match(request, 0) == 0
        self.scheduler.allocated("p", 0, ())
        plans = []
        for computed in steps:
            scheduled = []
            if self.scheduler.completes_chunk(request, computed):
                blocks = -(-computed // BLOCK)
                scheduled = [Scheduled(request, computed, tuple(table[:blocks] for table in self.tables))]
            plans.append(self.scheduler.build_step(scheduled))
            self.worker.stores.start(plans[-1])
            self.worker.stores.finish()
        given = self.scheduler.given_tokens("p")
        self.scheduler.finished("p")
        return plans, given

    def match(self, prompt: Sequence[int], tokens: int, name: str = "d") -> int | None:
        request = RequestTokens(name, list(prompt), len(prompt), controls=Controls(awaits_tokens=tokens))
        return self.scheduler.match(request, 0)


@pytest.fixture
def service() -> DictService:
    return DictService()


def test_a_prompt_that_is_handed_over_is_found_to_its_last_token_but_one(service: DictService) -> None:
    plans, given = Engine(service, "p", shape_of()).compute(PROMPT, [40, 84], hands_over_tokens=84)
    assert given == 84
    assert [(len(step.digests), step.tail_tokens) for plan in plans for step in plan.stores] == [(1, 0), (3, 20)]
    assert set(service.hold_s) == {30.0}
    decoder = Engine(service, "d", shape_of())
    assert decoder.match(PROMPT, given) == 83
    decoder.scheduler.allocated("d", 83, (list(range(1, 12)),))
    (load,) = decoder.scheduler.build_step([]).loads
    assert load.digests == plans[-1].stores[0].digests
    assert load.last_token == 88  # the whole block that the last token is in
    assert (decoder.scheduler.counts.handovers_received, decoder.scheduler.counts.handovers_late) == (1, 0)
    # Nobody else finds the partial chunk, nor is anything else of the kind stored.
    assert Engine(service, "e", shape_of()).match(PROMPT, 0) == 64
    assert len(service.held) == 3


@pytest.mark.parametrize(
    ("sizes", "blocks"), [((8, 8), (11, 11)), ((8, 32), (11, 3)), ((32, 8), (3, 11)), ((None, 8), (3, 11))]
)
def test_a_partial_chunk_fits_tables_of_different_blocks(
    service: DictService, sizes: tuple[int | None, ...], blocks: tuple[int, ...]
) -> None:
    """The blocks of one table end before those of the other, and a table may have none of our layers."""
    groups = [GroupShape(size, table=table) for table, size in enumerate(sizes) if size is not None]
    alike = [GroupShape(BLOCK, table=number) for number in range(len(groups))]
    prefill, decoder = Engine(service, "p", shape_of(*alike)), Engine(service, "d", shape_of(*groups))
    prefill.compute(PROMPT, [84], hands_over_tokens=84)
    decoder.copier.pool = prefill.copier.pool
    assert decoder.match(PROMPT, 84) == 83
    decoder.scheduler.allocated("d", 83, tuple(list(range(1, 1 + count)) for count in blocks))
    plan = decoder.scheduler.build_step([])
    assert plan.refused == ()
    assert [load.last_token for load in plan.loads] == [88]
    decoder.worker.start_loads(plan)
    assert decoder.worker.poll() == StepReport(frozenset({"d"}), frozenset())


def test_a_request_that_is_not_handed_over_stores_whole_chunks_and_holds_none(service: DictService) -> None:
    plans, _ = Engine(service, "p", shape_of()).compute(PROMPT, [84])
    assert [(len(step.digests), step.tail_tokens) for step in plans[0].stores] == [(2, 0)]
    assert service.hold_s == [0.0]


@pytest.mark.parametrize(
    ("prompt_tokens", "shape", "controls", "given"),
    [
        (64, shape_of(), {}, 64),
        (64 + MIN_TAIL_TOKENS - 1, shape_of(), {}, 64),
        (64 + MIN_TAIL_TOKENS, shape_of(), {}, 64 + MIN_TAIL_TOKENS),
        (20, shape_of(), {}, 20),
        (84, shape_of(cuts_chunks=False), {}, 64),
        (84, shape_of(GroupShape(BLOCK), GroupShape(BLOCK, Coverage("window", 16), 1)), {}, 64),
        (84, shape_of(), {"max_store_tokens": 70}, 64),
        (84, shape_of(), {"store": False}, 0),
        (84, shape_of(stores=False), {}, 0),
    ],
)
def test_what_can_be_handed_over(
    service: DictService, prompt_tokens: int, shape: ConnectShape, controls: dict[str, object], given: int
) -> None:
    prompt = PROMPT[:prompt_tokens]
    _, tokens = Engine(service, "p", shape).compute(
        prompt, [prompt_tokens], hands_over_tokens=prompt_tokens, **controls
    )
    assert tokens == given


def test_what_is_repeated_fills_the_chunk_with_nobody_elses_tokens() -> None:
    extent = HostExtent("pool", 0, 32)
    for tokens in range(1, CHUNK + 1):
        plan = plan_transfer(
            [extent], [5, 9, 2, 7], chunk_tokens=CHUNK, block_tokens=BLOCK, first_token=0, last_token=tokens
        )
        slots = {copy.first_slot + at for copy in plan.copies for at in range(copy.tokens)}
        filled = plan.repeated()
        places = sorted(copy.first_token + at for copy in filled.copies for at in range(copy.tokens))
        assert places == list(range(CHUNK))
        assert {copy.first_slot + at for copy in filled.copies for at in range(copy.tokens)} == slots


def test_a_request_waits_for_what_is_being_stored_and_no_longer_than_it_may(service: DictService) -> None:
    _, given = Engine(service, "p", shape_of()).compute(PROMPT, [84], hands_over_tokens=84)
    last = list(service.held)[-1]
    offset = service.held.pop(last)
    decoder = Engine(service, "d", shape_of())
    assert decoder.match(PROMPT, given) is None
    asked = len(service.ended)
    assert decoder.match(PROMPT, given) is None
    assert len(service.ended) == asked  # too soon to ask the cache again
    assert decoder.scheduler.is_waiting()
    service.held[last] = offset
    decoder.clock.advance(0.1)
    assert decoder.match(PROMPT, given) == 83

    del service.held[last]
    assert decoder.match(PROMPT, given, "late") is None
    decoder.clock.advance(0.9)
    assert decoder.match(PROMPT, given, "late") is None
    decoder.clock.advance(0.1)
    assert decoder.match(PROMPT, given, "late") == 64
    assert (decoder.scheduler.counts.handovers_received, decoder.scheduler.counts.handovers_late) == (2, 1)
    decoder.scheduler.allocated("late", 0, ())
    assert decoder.match(PROMPT, given, "late") == 64  # preempted: it has waited once


@dataclass
class Asking(DictService):
    """One whose lower tiers answer a holder from its second lookup on, as remote tiers and other nodes do."""

    asked: set[str] = field(default_factory=set)

    def lookup(self, keys: Sequence[ChunkKey], holder: str, **arguments: Any) -> LookupPlan:
        self.pending = int(holder not in self.asked)
        self.asked.add(holder)
        return super().lookup(keys, holder, **arguments)

    def end(self, holder: str) -> None:
        self.asked.discard(holder)
        super().end(holder)


@pytest.mark.parametrize("arrives", [True, False])
def test_slower_tiers_are_left_to_answer_while_a_request_waits(service: DictService, arrives: bool) -> None:
    """A lookup that ended before they had would be a new one in every step, and the request would wait for ever."""
    _, given = Engine(service, "p", shape_of()).compute(PROMPT, [84], hands_over_tokens=84)
    late = Asking(held=service.held)
    last = list(late.held)[-1]
    offset = late.held.pop(last)
    decoder = Engine(late, "d", shape_of())
    found = decoder.match(PROMPT, given)
    for step in range(300):
        if arrives and step == 50:
            late.held[last] = offset
        decoder.clock.advance(0.01)
        if (found := decoder.match(PROMPT, given)) is not None:
            break
    assert found == (83 if arrives else 64)
    assert decoder.scheduler.counts.handovers_late == (not arrives)


def test_what_was_kept_for_a_request_is_given_back_once_when_it_waits_no_more(service: DictService) -> None:
    producer, decoder = Engine(service, "p", shape_of()), Engine(service, "d", shape_of())
    assert decoder.match(PROMPT, 84) is None
    assert service.received_keys == []
    producer.compute(PROMPT, [84], hands_over_tokens=84)
    decoder.clock.advance(0.01)
    assert decoder.match(PROMPT, 84) == decoder.match(PROMPT, 84) == 83
    (keys,) = service.received_keys
    assert set(keys) == set(service.held) and len(keys) == 3
    assert producer.match(PROMPT, 0, "not handed over") == 64
    assert len(service.received_keys) == 1


def test_what_an_engine_has_in_its_own_blocks_is_given_back_too(service: DictService) -> None:
    """It is not even looked up."""
    Engine(service, "p", shape_of()).compute(PROMPT, [84], hands_over_tokens=84)
    decoder = Engine(service, "d", shape_of())
    request = RequestTokens("d", PROMPT, len(PROMPT), controls=Controls(awaits_tokens=84))
    assert decoder.scheduler.match(request, 83) == 0
    assert decoder.scheduler.counts.lookups == 0
    assert set(service.received_keys[0]) == set(service.held)


def test_nobody_waits_longer_than_computing_takes(service: DictService) -> None:
    costs = EngineCosts(HandClock(), prefill_tokens_per_second=1000.0)
    decoder = Engine(service, "d", shape_of(), costs)
    assert decoder.match(PROMPT, 84) is None
    decoder.clock.advance(0.083)
    assert decoder.match(PROMPT, 84) is None
    decoder.clock.advance(0.002)
    assert decoder.match(PROMPT, 84) == 0


@pytest.mark.parametrize("tokens", [83, 90, 10**9])
def test_a_count_that_is_not_the_prompts_finds_whole_chunks_only(service: DictService, tokens: int) -> None:
    Engine(service, "p", shape_of()).compute(PROMPT, [84], hands_over_tokens=84)
    decoder = Engine(service, "d", shape_of())
    found = decoder.match(PROMPT, tokens)
    decoder.clock.advance(1.0)
    assert (found, decoder.match(PROMPT, tokens)) in ((64, 64), (None, 64))


def test_a_model_with_windows_does_not_wait_for_what_is_never_looked_up(service: DictService) -> None:
    shape = shape_of(GroupShape(BLOCK), GroupShape(BLOCK, Coverage("window", 16), 1))
    _, given = Engine(service, "p", shape).compute(PROMPT[:64], [64], hands_over_tokens=64)
    assert given == 64
    assert Engine(service, "d", shape).match(PROMPT[:64], given) == 32  # windows are held for whole chunks


def test_a_model_with_states_takes_the_hit_that_there_is(service: DictService) -> None:
    shape = shape_of(GroupShape(BLOCK), GroupShape(CHUNK, Coverage("state"), 1))
    Engine(service, "p", shape).compute(PROMPT, [84], hands_over_tokens=84)  # of which no state was kept
    assert Engine(service, "d", shape).match(PROMPT, 64) == 0


def test_a_request_that_ends_while_it_waits_leaves_nothing(service: DictService) -> None:
    decoder = Engine(service, "d", shape_of())
    assert decoder.match(PROMPT, 84) is None
    decoder.scheduler.finished("d")
    assert decoder.scheduler.tracked_phases() == {}
    assert not decoder.scheduler.is_waiting()
    assert not any(isinstance(lease, WriteLease) for lease in service.open_leases.values())
