"""The halves with a model of three groups, full attention, a window and a linear layer, against a toy engine."""

from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf, StateAdmission, StateKind
from kv_connect.halves.worker import WorkerHalf
from kv_core.coverage import ALL, Coverage
from kv_core.hashing import ChainScheme
from kv_core.shape import NO_BLOCK, ConnectShape, GroupShape, load_from, stored_from, without_holes
from kv_testing.connect import DictCopier, DictService
from kv_testing.toy_engine import BLOCK, CHUNK, SPACE, WINDOW, ToyHybrid, run

TestToyHybrid = ToyHybrid.TestCase
TestToyHybrid.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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


def test_all_groups_of_a_step_are_stored_by_one_lease() -> None:
    machine = started(window=5)
    run(machine, "a", list(range(100, 117)))
    assert len(machine.service.hold_s) == 1
    assert {key.group for key in machine.service.held} == {0, 1, 2, 3}


def test_nothing_is_found_of_a_step_of_which_one_group_could_not_be_stored() -> None:
    machine = started(window=5)
    machine.copiers[1].fail_copies = 1
    run(machine, "a", list(range(100, 117)))
    assert not machine.service.held and not machine.service.open_leases
    assert (machine.worker.counts.stores_failed, machine.worker.counts.stored_bytes) == (1, 0)


@given(st.sampled_from(["window", "local"]), st.integers(1, 12), st.integers(1, 8), st.integers(0, 32))
@example("window", 1, 2, 0)
@example("local", 8, 2, 0)
@settings(deadline=None)
def test_what_is_stored_covers_every_load(
    kind: Literal["window", "local"], size: int, chunks: int, computed: int
) -> None:
    """Of each boundary whose chunks were all stored, every block that a load fills was there, and no chunk is stored
    of which no block was.

    computed: tokens of the step that stores them; 0, if they are stored again by a later one.
    """
    group = GroupShape(BLOCK, Coverage(kind, size), WINDOW)
    start = max(0, chunks * CHUNK - computed)
    left = group.coverage.first_token(start) // BLOCK
    table = [NO_BLOCK] * left + list(range(1, chunks * CHUNK // BLOCK - left + 1))
    first = stored_from(group, table, chunks, CHUNK)
    assert first <= -(-start // CHUNK)  # nothing that this step computed is left out
    assert NO_BLOCK not in without_holes(table)[first * CHUNK // BLOCK :]
    stored = group.stored_tokens(CHUNK)
    for boundary in range(1, chunks + 1):
        since, end = load_from(group, 0, boundary * CHUNK), boundary * CHUNK
        if since // CHUNK >= first:
            assert NO_BLOCK not in table[since // BLOCK : end // BLOCK]
        if stored < CHUNK:
            assert since >= end - stored
            if boundary > first:
                assert NO_BLOCK not in table[(end - stored) // BLOCK : end // BLOCK]


@pytest.mark.parametrize(
    ("coverage", "tokens"),
    [("window:1", 16), ("window:8", 16), ("window:17", 16), ("window:18", 32), ("window:65", 64), ("window:300", 64)],
)
def test_of_a_short_window_a_chunk_keeps_the_blocks_that_a_hit_needs(coverage: str, tokens: int) -> None:
    assert GroupShape(16, Coverage.parse(coverage)).stored_tokens(64) == tokens


@pytest.mark.parametrize("coverage", ["all", "local:16", "state"])
def test_of_other_coverages_a_chunk_keeps_all(coverage: str) -> None:
    assert GroupShape(16, Coverage.parse(coverage)).stored_tokens(64) == 64


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
    worker.stores.start(scheduler.build_step([Scheduled(RequestTokens("a", tokens, 8193), 8193, (blocks,) * 6)]))
    worker.stores.finish()
    assert scheduler.match(RequestTokens("b", tokens, 8193), 0) == 8192
    seen = [NO_BLOCK] * (480) + list(range(1, 33))
    scheduler.allocated("b", 8192, (blocks, *[seen] * 5))
    worker.start_loads(scheduler.build_step([]))
    assert worker.poll().failed == frozenset()
    moved = 3 * sum(copier.loaded_tokens for copier in copiers)
    needed = 3 * 8192 + 15 * 511
    assert moved / (18 * 8192) == 0.21875
    assert moved / needed <= 1.02
