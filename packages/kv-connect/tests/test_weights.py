"""Other weights in a running engine: nothing of before is loaded after, nothing mixed stored, and names may be late."""

from dataclasses import replace

from kv_connect.halves.request import Phase, RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import NO_SPACE, StepPlan
from kv_connect.halves.worker import WorkerHalf
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.shape import ConnectShape, GroupShape
from kv_testing.connect import DictCopier, DictService

OLD = KeySpace("model", "old", "float32", "f", 1, "sha256:4")
NEW = replace(OLD, revision="new")
TOKENS = list(range(9))
BLOCKS = (range(10, 15),)


def halves(space: KeySpace | None = OLD) -> tuple[DictService, DictCopier, SchedulerHalf, WorkerHalf]:
    service, copier = DictService(), DictCopier()
    shape = ConnectShape(ChainScheme(chunk_tokens=4), space, (GroupShape(2),))
    scheduler = SchedulerHalf(service, shape, name="e")
    return service, copier, scheduler, WorkerHalf(service, replace(shape, space=None), [copier], shard=0, name="e")


def request(name: str) -> RequestTokens:
    return RequestTokens(name, TOKENS, len(TOKENS))


def run(scheduler: SchedulerHalf, worker: WorkerHalf, copier: DictCopier, name: str, computed: int = 9) -> StepPlan:
    """One step of a request that has been matched and has nothing to load."""
    scheduler.allocated(name, 0, BLOCKS)
    copier.slots.update((20 + i, ("kv", *TOKENS[: i + 1])) for i in range(computed))
    plan = StepPlan.from_plain(scheduler.build_step([Scheduled(request(name), computed, BLOCKS)]).to_plain())
    worker.stores.start(plan)
    worker.stores.finish()
    return plan


def test_before_the_weights_are_known_nothing_is_found_or_stored_and_afterwards_all_is() -> None:
    service, copier, scheduler, worker = halves(None)
    assert scheduler.match(request("a"), 0) == 0
    assert not scheduler.completes_chunk(request("a"), 9)
    plan = run(scheduler, worker, copier, "a", computed=4)
    assert (plan.stores, plan.space_id) == ((), NO_SPACE)
    assert service.held == {}
    scheduler.name_weights(OLD)
    assert scheduler.completes_chunk(request("a"), 9)  # the same request goes on, and its first chunk is kept too
    assert run(scheduler, worker, copier, "a").space_id == OLD.fingerprint
    assert {key.space_id for key in service.held} == {OLD.fingerprint}
    assert scheduler.match(request("b"), 0) == 8


def test_other_weights_find_nothing_of_before_and_the_first_find_theirs_again() -> None:
    service, copier, scheduler, worker = halves()
    assert scheduler.match(request("a"), 0) == 0
    run(scheduler, worker, copier, "a")
    scheduler.finished("a")
    assert scheduler.match(request("b"), 0) == 8
    scheduler.weights_changed(NEW)
    assert service.promised == {}  # what "b" was promised is of other weights
    assert scheduler.match(request("b"), 0) == 0
    run(scheduler, worker, copier, "b")
    assert {key.space_id for key in service.held} == {OLD.fingerprint, NEW.fingerprint}
    assert scheduler.match(request("c"), 0) == 8
    scheduler.weights_changed(OLD)
    assert scheduler.match(request("d"), 0) == 8


def test_a_request_that_runs_across_the_change_is_never_stored_until_it_begins_anew() -> None:
    service, copier, scheduler, worker = halves()
    scheduler.match(request("a"), 0)
    run(scheduler, worker, copier, "a", computed=3)
    scheduler.weights_changed(NEW)
    assert not scheduler.completes_chunk(request("a"), 9)
    run(scheduler, worker, copier, "a")
    assert service.held == {}
    assert scheduler.match(request("a"), 0) == 0  # preempted
    run(scheduler, worker, copier, "a")
    assert {key.space_id for key in service.held} == {NEW.fingerprint}


def test_a_load_that_was_allocated_before_the_change_is_refused() -> None:
    _, copier, scheduler, worker = halves()
    scheduler.match(request("a"), 0)
    run(scheduler, worker, copier, "a")
    assert scheduler.match(request("b"), 0) == 8
    scheduler.allocated("b", 8, BLOCKS)
    scheduler.weights_changed(NEW)
    plan = scheduler.build_step([])
    assert (plan.loads, plan.refused) == ((), ("b",))
    worker.start_loads(plan)
    report = worker.poll()
    scheduler.loads_ended(report.finished, report.failed)
    assert scheduler.tracked_phases()["b"] is Phase.WAITING
    assert scheduler.match(request("b"), 0) == 0


def test_what_the_engine_finds_in_its_own_blocks_may_be_of_before_and_is_not_stored_until_it_has_forgotten_them() -> (
    None
):
    service, copier, scheduler, worker = halves()
    scheduler.weights_changed(NEW)
    scheduler.match(request("a"), 4)  # the engine found the first chunk by itself
    run(scheduler, worker, copier, "a")
    scheduler.finished("a")
    assert service.held == {}
    scheduler.reset()  # the engine could not empty its own
    scheduler.match(request("b"), 4)
    run(scheduler, worker, copier, "b")
    scheduler.finished("b")
    assert service.held == {}
    scheduler.engine_emptied()
    scheduler.match(request("c"), 4)
    run(scheduler, worker, copier, "c")
    assert len(service.held) == 2
