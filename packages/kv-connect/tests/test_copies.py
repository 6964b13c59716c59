"""Nothing is given back while a copy uses it, whatever is raised, by which call of which copy, and when.

The device here never finishes a copy by itself. Of two requests, the second one's copies raise; the first one's are
under way all the while. The service looks whenever a lease ends.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from kv_connect.halves.copies import Copies
from kv_connect.halves.step import LoadStep, StepPlan, StoreStep
from kv_connect.halves.worker import WorkerHalf
from kv_core.coverage import ALL
from kv_core.device import LayerwiseCopier
from kv_core.errors import CopyFailed, InputError, MisuseError, TierDown
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace, tenant_tag
from kv_core.service import Holder, ReadLease, WriteLease
from kv_core.shape import ConnectShape, GroupShape
from kv_core.transfer import HostExtent, TransferPlan
from kv_testing.connect import DictService, Layers

CHUNK, LAYERS = 4, 2
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")
SHAPE = ConnectShape(ChainScheme(chunk_tokens=CHUNK), SPACE, (GroupShape(CHUNK, ALL, 0),))
FAMILIES = [CopyFailed, MisuseError, InputError, TierDown, RuntimeError, OSError, MemoryError, ValueError]
Raised = type[Exception]


@dataclass
class Flight:
    """A copy. faults: what its calls raise, once each, by their names. A `CopyFailed` says that it has stopped."""

    extents: frozenset[HostExtent]
    faults: dict[str, Raised] = field(default_factory=dict)
    is_under_way: bool = True

    def done(self) -> bool:
        self.fail("done")
        return not self.is_under_way

    def wait(self) -> None:
        self.fail("wait")
        self.is_under_way = False

    def hold_engine(self) -> None:
        self.fail("hold_engine")

    def fail(self, call: str) -> None:
        if (error := self.faults.pop(call, None)) is not None:
            self.is_under_way = self.is_under_way and error is not CopyFailed
            raise error("raised by the test")


class Device(LayerwiseCopier):
    """A `LayerwiseCopier`. faults: by its calls and those of its copies, what they raise from the second request on."""

    is_queued = stores_behind = True

    def __init__(self, faults: dict[str, Raised]) -> None:
        self.faults = faults
        self.flights: list[Flight] = []
        self.calls = 0

    def fly(self, plan: TransferPlan, call: str) -> Flight:
        is_second = bool(self.flights)
        if is_second and (error := self.faults.get(call)) is not None:
            raise error("raised by the test")
        self.flights.append(
            Flight(frozenset(copy.extent for copy in plan.copies), dict(self.faults) if is_second else {})
        )
        return self.flights[-1]

    def load(self, plan: TransferPlan) -> Flight:
        return self.fly(plan, "load")

    def store(self, plan: TransferPlan) -> Flight:
        return self.fly(plan, "store")

    def load_layers(self, plan: TransferPlan) -> list[Flight]:
        return [self.fly(plan, "load_layers"), *(self.fly(plan, "") for _ in range(LAYERS - 1))]

    def store_layers(self, plan: TransferPlan) -> Layers:
        return Layers(LAYERS, lambda layers: self.fly(plan, "gather"))

    def attach(self, pool: str, view: memoryview) -> None: ...
    def prepare(self, extents: Sequence[HostExtent]) -> None: ...


class Watched(DictService):
    device: Device
    holders: dict[int, Holder]
    given_back_early: list[ReadLease | WriteLease]

    def load(self, keys: Any, holder: Holder, *, lasting: bool = False) -> Any:
        lease = super().load(keys, holder, lasting=lasting)
        self.holders[lease.id] = holder
        return lease

    def begin_store(self, keys: Any, holder: Holder, **options: Any) -> WriteLease:
        lease = super().begin_store(keys, holder, **options)
        self.holders[lease.id] = holder
        return lease

    def ends(self, lease: ReadLease | WriteLease) -> None:
        under_way = [flight for flight in self.device.flights if flight.is_under_way]
        self.given_back_early += [lease for flight in under_way if flight.extents & set(lease.extents)]

    def commit(self, lease: WriteLease) -> None:
        self.ends(lease)
        super().commit(lease)

    def release(self, lease: ReadLease | WriteLease) -> bool:
        self.ends(lease)
        return super().release(lease)

    def end(self, holder: Holder) -> None:
        for lease in [lease for lease in self.open_leases.values() if self.holders[lease.id] == holder]:
            self.release(lease)
        super().end(holder)


class World:
    def __init__(self, faults: dict[str, Raised], *, by_layers: bool = False) -> None:
        self.device = Device(faults)
        self.service = Watched()
        self.service.device, self.service.holders = self.device, {}
        self.service.given_back_early = []
        self.worker = WorkerHalf(self.service, SHAPE, [self.device], shard=0, name="e", stores_layers=by_layers)
        self.off = False

    def guarded(self, call: Callable[[], object]) -> None:
        """As an engine calls: an exception turns the cache off, which closes the worker's half."""
        if not self.off:
            try:
                call()
            except Exception:  # noqa: BLE001
                self.off = True
                self.worker.close()

    def store(self, name: str, number: int, *, trial: int = 0) -> None:
        step = StoreStep(name, (name.encode() * 32,), tenant_tag(None), ((number,),))
        plan = StepPlan(stores=(step,), space_id=SPACE.fingerprint, number=number, trial=trial)
        for layer in range(LAYERS):
            self.guarded(lambda layer=layer: self.worker.stores.layer_computed(plan, 0, layer))  # type: ignore[misc]
        self.guarded(lambda: self.worker.stores.start(plan))
        self.guarded(lambda: self.worker.stores.finish(wait=False))

    def load(self, name: str, number: int, *, layerwise: bool) -> None:
        digest = name.encode() * 32
        keys = SPACE.keys([digest], tenant=tenant_tag(None))
        self.service.held[keys[0]] = 100 + number
        extents = (HostExtent("dict", 100 + number, 1),) if layerwise else ()
        step = LoadStep(name, 0, (digest,), tenant_tag(None), ((number,),), 0, CHUNK, extents)
        plan = StepPlan(loads=(step,), space_id=SPACE.fingerprint)
        self.guarded(lambda: self.worker.start_loads(plan))
        if layerwise:
            for layer in range(LAYERS):
                self.guarded(lambda layer=layer: self.worker.layers.wait_for(layer))  # type: ignore[misc]
            self.guarded(self.worker.layers.forward_ended)

    def at_rest(self) -> None:
        """The device answers again, and ends its copies."""
        assert not self.service.given_back_early
        for flight in self.device.flights:
            flight.faults.clear()
            flight.is_under_way = False
        self.guarded(lambda: self.worker.stores.finish(wait=True))
        self.guarded(self.worker.poll)
        self.worker.close()
        assert not self.service.open_leases and not self.worker.filling


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("call", ["store", "gather", "done", "wait", "hold_engine"])
@pytest.mark.parametrize("by_layers", [False, True])
def test_no_slot_is_given_back_under_a_store(call: str, family: Raised, by_layers: bool) -> None:
    world = World({call: family}, by_layers=by_layers)
    world.store("a", 1)
    world.store("b", 2)
    for _ in range(2):
        world.guarded(lambda: world.worker.stores.finish(wait=False))
        world.guarded(lambda: world.worker.stores.finish(wait=True))
    world.at_rest()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("call", ["load", "load_layers", "done", "wait", "hold_engine"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_no_chunk_and_no_block_is_given_back_under_a_load(call: str, family: Raised, layerwise: bool) -> None:
    world = World({call: family})
    world.load("a", 1, layerwise=layerwise)
    world.load("b", 2, layerwise=layerwise)
    reported = set()
    for _ in range(3):
        if not world.off:
            reported |= world.worker.poll().finished | world.worker.take_layerwise().finished
        under_way = [flight for flight in world.device.flights if flight.is_under_way]
        for name, number in (("a", 1), ("b", 2)):
            lease_extent = HostExtent("dict", 100 + number, 1)
            assert name not in reported or not any(lease_extent in flight.extents for flight in under_way)
    world.at_rest()


@pytest.mark.parametrize("family", [InputError, RuntimeError])
@pytest.mark.parametrize("verb", ["load", "store"])
def test_of_a_steps_requests_the_second_is_not_copied_and_only_that_one_fails(verb: str, family: Raised) -> None:
    world = World({verb: family})
    digests = [name.encode() * 32 for name in "ab"]
    a, b = SPACE.keys(digests, tenant=tenant_tag(None))
    if verb == "load":
        world.service.held.update({a: 100, b: 101})
        loads = [
            LoadStep(digest.decode()[0], 0, (digest,), tenant_tag(None), ((number,),), 0, CHUNK)
            for number, digest in enumerate(digests)
        ]
        plan, start = StepPlan(loads=tuple(loads), space_id=SPACE.fingerprint), world.worker.start_loads
    else:
        stores = [
            StoreStep(digest.decode()[0], (digest,), tenant_tag(None), ((number,),))
            for number, digest in enumerate(digests)
        ]
        plan, start = StepPlan(stores=tuple(stores), space_id=SPACE.fingerprint, number=1), world.worker.stores.start
    with nullcontext() if family is InputError else pytest.raises(family):
        start(plan)
    (flight,) = world.device.flights
    flight.is_under_way = False
    world.worker.stores.finish(wait=True)
    report = world.worker.poll()
    assert (a in world.service.held, b in world.service.held) == (True, False)
    assert report.failed == ({"b"} if verb == "load" else set()) and len(report.finished) == 2 * (verb == "load")


def test_a_copy_that_never_answers_keeps_its_slots_when_the_worker_ends() -> None:
    world = World({"done": RuntimeError, "wait": RuntimeError})
    world.store("a", 1)
    world.store("b", 2)
    for flight in world.device.flights:
        flight.fail = lambda call: (_ for _ in ()).throw(RuntimeError(call))  # type: ignore[method-assign, misc]
    assert not world.worker.close() and len(world.service.open_leases) == 2 and not world.service.ended
    assert world.worker.stores.through == 2  # whatever a failed store reads is discarded: its blocks are free


def test_a_request_whose_load_does_not_answer_is_not_reported_when_the_worker_ends() -> None:
    world = World({})
    world.load("a", 1, layerwise=False)
    flight = world.device.flights[0]
    flight.faults = {"wait": RuntimeError}
    assert not world.worker.close() and world.worker.filling == {"a"}
    flight.is_under_way = False
    assert world.worker.filling == frozenset()


def test_copies_fail_together_and_stop_one_by_one() -> None:
    flights = [Flight(frozenset()), Flight(frozenset(), {"done": OSError}), Flight(frozenset(), {"done": CopyFailed})]
    copies = Copies(flights)
    assert not copies.have_stopped() and copies.are_in_flight
    assert isinstance(copies.failure, OSError)  # the first
    flights[0].is_under_way = False
    assert not copies.have_stopped()
    assert copies.have_stopped(wait=True) and not copies.are_in_flight


@pytest.mark.parametrize("passed", [True, False])
def test_what_is_on_trial_is_committed_when_it_was_passed_and_not_before(passed: bool) -> None:
    world = World({})
    world.store("a", 1, trial=7)
    world.worker.stores.finish(wait=True)
    assert not world.service.held and world.worker.stores.through == 1  # its blocks are free all the same
    world.worker.stores.judge(6, passed=passed)
    assert not world.service.held
    world.worker.stores.judge(7, passed=passed)
    assert bool(world.service.held) == passed and not world.service.open_leases


def test_what_is_on_trial_when_the_worker_ends_is_not_committed() -> None:
    world = World({})
    world.store("a", 1, trial=7)
    assert world.worker.close() and not world.service.held and not world.service.open_leases
