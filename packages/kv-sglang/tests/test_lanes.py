"""Pages between a real cache and device blocks, on threads: what was taken lands, and every offer gets its answer."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_core.clock import HandClock
from kv_core.errors import InputError, MisuseError
from kv_cuda import PagedLayout, PartLayout, make_copier
from kv_sglang import lanes
from kv_sglang.lanes import LoadLane, StoreLane
from kv_sglang.pages import PageStore
from kv_sglang.pools import PoolPages
from kv_tiers import ColdConfig, HostConfig, LocalCache, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for

WEIGHTS = LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0))
PAGE, PAGES, ROW, LAYERS = 4, 8, 16, 3
SOON_S = 10.0
LAYOUT = PagedLayout(
    name="device",
    dtype="float32",
    itemsize=4,
    layers=LAYERS,
    blocks=PAGES,
    block_tokens=PAGE,
    heads=1,
    head_dim=ROW,
    parts=(PartLayout("kv", 0, PAGE * ROW, ROW, ROW, 1),),
)
FORMAT = LAYOUT.canonical_format(PAGE)


def hashes(count: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Now:
    """The device has done all of its work."""

    def synchronize(self) -> None:
        return None


class Held:
    """The device has not, until `release`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._go = threading.Event()

    def synchronize(self) -> None:
        self.reached.set()
        assert self._go.wait(SOON_S)

    def release(self) -> None:
        self._go.set()


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("the device failed")


class Engine:
    """Device tensors, a cache of some pages, and both lanes between them."""

    def __init__(self, pages: int = 32, tiers: list[dict[str, Any]] | None = None) -> None:
        self.tensors = [torch.zeros(PAGES, PAGE * ROW) for _ in range(LAYERS)]
        self.clock = HandClock()
        self.cache: LocalCache = build_local_cache(
            HostConfig(capacity_bytes=pages * slot_bytes_for(FORMAT.nbytes)),
            group_bytes=(FORMAT.nbytes,),
            fingerprint=FORMAT.fingerprint,
            tiers=tiers or [],
            cold=ColdConfig(wait_s=5.0),
            clock=self.clock,
        )
        described = PoolPages(FORMAT, "float32", PAGE, self.copier, None)
        space = LiveKeySpace(
            WEIGHTS, kv_dtype="float32", format_fingerprint=FORMAT.fingerprint, world=1, chain=f"sha256:{PAGE}"
        )
        self.store = PageStore(self.cache, space, described, shard=0, wait_s=0.0)
        self.errors: list[str] = []
        self.loads = LoadLane(self.store, self.copier(), self.turn_off)
        self.stores = StoreLane(self.store, self.turn_off)

    def copier(self) -> Any:
        return make_copier(LAYOUT, self.tensors, FORMAT)

    def turn_off(self, why: str, error: BaseException) -> None:
        self.errors.append(why)

    def fill(self) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 10_000.0 * layer)

    def page(self, number: int) -> torch.Tensor:
        return torch.stack([tensor[number] for tensor in self.tensors])

    def stored(self, names: list[str], *pages: int) -> None:
        self.stores.offer(names, [], indices(*pages), [Now()])
        assert self.answers(1) == [True]

    def answers(self, count: int) -> list[bool]:
        with self.stores._changed:
            assert self.stores._changed.wait_for(lambda: len(self.stores._answers) >= count, SOON_S)
        assert self.stores.answered() == count
        return [self.stores.take_answer() for _ in range(count)]

    def close(self) -> None:
        self.loads.close()
        self.stores.close()
        self.store.close()
        counts = self.cache.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0, counts
        self.cache.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    made.fill()
    yield made
    made.close()


def test_what_was_offered_lands_in_the_slots_that_were_given(engine: Engine) -> None:
    names = hashes(3)
    before = [engine.page(page).clone() for page in (5, 0, 2)]
    engine.stored(names, 5, 0, 2)
    for tensor in engine.tensors:
        tensor.zero_()
    assert engine.loads.ready("r", [*names, "ff" * 32]) == 3
    assert engine.loads.take("r", names[:2], indices(1, 7))
    number = engine.loads.start([Now()])
    engine.loads.gate.set_consumer(number)
    for layer in range(LAYERS):
        engine.loads.gate.wait_until(layer)
    assert engine.loads.gate.finish(number)
    assert torch.equal(engine.page(1), before[0])
    assert torch.equal(engine.page(7), before[1])
    assert not any(bool(engine.page(page).any()) for page in (0, 2, 3, 4, 5, 6))


def test_several_requests_are_one_batch(engine: Engine) -> None:
    names = hashes(4)
    engine.stored(names, 0, 1, 2, 3)
    for tensor in engine.tensors:
        tensor[4:].zero_()
    assert engine.loads.take("one", names[:1], indices(6))
    assert engine.loads.take("two", names[1:3], indices(4, 5))
    assert engine.loads.gate.finish(engine.loads.start([Now()]))
    assert torch.equal(engine.page(6), engine.page(0))
    assert torch.equal(engine.page(5), engine.page(2))
    assert engine.loads.start([Now()]) == -1


def test_pages_that_are_gone_are_not_taken(engine: Engine) -> None:
    names = hashes(2)
    engine.stored(names, 0, 1)
    assert engine.loads.ready("r", names) == 2
    engine.cache.clear()
    assert not engine.loads.take("r", names, indices(2, 3))
    assert engine.loads.ready("r", names) == 0
    assert engine.loads.start([Now()]) == -1


def test_what_was_handed_over_is_kept_until_it_is_taken(engine: Engine) -> None:
    names = hashes(3)
    lease = engine.cache.begin_store(engine.store.keys(names), "prefill", hold_s=3600.0)
    engine.cache.commit(lease)
    engine.cache.end("prefill")
    engine.store._requests.note("r", {"do_remote_prefill": True}, 3 * PAGE, lambda: names)
    assert engine.loads.ready("r", names) == 3
    assert engine.cache.holds.chunks == 3
    assert engine.loads.take("r", names[:2], indices(0, 1))
    assert engine.cache.holds.chunks == 1
    assert engine.loads.give_back("r")


def test_what_was_taken_can_be_given_back_until_it_starts(engine: Engine) -> None:
    names = hashes(1)
    engine.stored(names, 0)
    assert engine.loads.take("r", names, indices(1))
    assert engine.cache.counts().read_leases == 1
    assert engine.loads.give_back("r")
    assert engine.cache.counts().read_leases == 0
    assert not engine.loads.give_back("r")


def test_the_slots_are_read_when_the_device_has_written_them(engine: Engine) -> None:
    names, held = hashes(1), Held()
    engine.stored(names, 0)
    slots = indices(7)
    assert engine.loads.take("r", names, slots)
    number = engine.loads.start([held])
    assert held.reached.wait(SOON_S)
    slots.copy_(indices(4))
    held.release()
    assert engine.loads.gate.finish(number)
    assert torch.equal(engine.page(4), engine.page(0))


def test_nothing_is_written_to_slots_while_a_forward_pass_in_flight_may_write_to_them(engine: Engine) -> None:
    """They may be those of a request that has just ended, whose last token it still computes."""
    names, in_flight = hashes(1), Held()
    engine.stored(names, 0)
    assert engine.loads.take("r", names, indices(7))
    number = engine.loads.start([Now(), in_flight])
    assert in_flight.reached.wait(SOON_S)
    for tensor in engine.tensors:
        tensor[7] = -1.0
    in_flight.release()
    assert engine.loads.gate.finish(number)
    assert torch.equal(engine.page(7), engine.page(0))


def test_stores_are_settled_once_nothing_is_read_from_the_device_and_are_answered_later(engine: Engine) -> None:
    held = Held()
    engine.stores.offer(hashes(1), [], indices(0), [held])
    settling = threading.Thread(target=engine.stores.settle)
    settling.start()
    assert held.reached.wait(SOON_S)
    assert settling.is_alive()
    held.release()
    settling.join(SOON_S)
    assert not settling.is_alive()
    assert engine.answers(1) == [True]


def test_a_lease_that_ends_while_it_is_read_is_a_batch_that_did_not_land(engine: Engine) -> None:
    names, held = hashes(1), Held()
    engine.stored(names, 0)
    assert engine.loads.take("r", names, indices(1))
    number = engine.loads.start([held])
    assert held.reached.wait(SOON_S)
    engine.clock.advance(HostConfig(capacity_bytes=0).lease_s + 1)
    held.release()
    assert not engine.loads.gate.finish(number)
    assert engine.errors == []  # bad luck, and no reason to turn the cache off


def test_a_device_that_fails_is_a_batch_that_did_not_land_and_the_end_of_the_cache(engine: Engine) -> None:
    names = hashes(1)
    engine.stored(names, 0)
    assert engine.loads.take("r", names, indices(1))
    assert not engine.loads.gate.finish(engine.loads.start([Broken()]))
    assert engine.errors == ["pages could not be loaded: the device failed"]
    engine.stores.offer(hashes(2), [], indices(0, 1), [Broken()])
    assert engine.answers(1) == [False]
    assert engine.errors[1:] == ["pages could not be stored: the device failed"]


def test_slots_that_are_no_whole_pages_are_never_written_to(engine: Engine) -> None:
    names = hashes(1)
    engine.stored(names, 0)
    before = [tensor.clone() for tensor in engine.tensors]
    assert engine.loads.take("r", names, indices(1) + 1)
    assert not engine.loads.gate.finish(engine.loads.start([Now()]))
    assert all(torch.equal(*pair) for pair in zip(engine.tensors, before, strict=True))
    assert "not those of 1 whole pages" in engine.errors[0]


def test_answers_come_in_the_order_of_the_offers(engine: Engine) -> None:
    held = Held()
    engine.stores.offer(hashes(1), [], indices(0), [held])
    engine.stores.answer_in_turn(False)
    engine.stores.answer_in_turn(True)
    assert held.reached.wait(SOON_S)
    assert engine.stores.answered() == 0
    held.release()
    assert engine.answers(3) == [True, False, True]


def test_a_page_that_is_held_is_not_copied_again(engine: Engine) -> None:
    engine.stored(hashes(2), 0, 1)
    engine.tensors[0].zero_()
    engine.stored(hashes(2), 0, 1)
    assert engine.cache.counts().chunks_reserved_ever == 2
    assert engine.loads.take("r", hashes(2), indices(4, 5))
    assert engine.loads.gate.finish(engine.loads.start([Now()]))
    assert bool(engine.page(5)[0].any())


def test_offers_that_wait_have_a_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING_PAGES", 3)
    held, names = Held(), hashes(4)
    engine.stores.offer(names[:2], [], indices(0, 1), [held])
    engine.stores.offer(names[2:], [], indices(2, 3), [Now()])  # four would wait
    engine.stores.offer(names[2:3], [], indices(2), [Now()])
    held.release()
    assert engine.answers(3) == [True, False, True]
    assert engine.loads.ready("r", names) == 3


def test_a_reset_waits_for_what_is_under_way_and_keeps_what_is_stored(engine: Engine) -> None:
    held, names = Held(), hashes(2)
    engine.stored(names[:1], 0)
    assert engine.loads.take("r", names[:1], indices(1))
    engine.stores.offer(names[1:], [], indices(1), [held])
    assert held.reached.wait(SOON_S)
    resetting = threading.Thread(target=lambda: (engine.loads.reset(), engine.stores.reset()))
    resetting.start()
    assert resetting.is_alive()
    held.release()
    resetting.join(SOON_S)
    assert not resetting.is_alive()
    assert engine.stores.answered() == 0
    assert engine.loads.start([Now()]) == -1
    assert engine.loads.ready("r", names) == 2


def test_what_only_a_slower_tier_has_is_a_miss_that_brings_it_up(tmp_path: Path) -> None:
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "1MiB"}
    first = Engine(tiers=[tier])
    first.fill()
    first.stored(hashes(3), 0, 1, 2)
    first.close()
    second = Engine(tiers=[tier])
    assert second.loads.ready("r", hashes(3)) == 0
    came_up = threading.Event()

    def ask() -> None:
        while second.loads.ready("r", hashes(3)) < 3:
            pass
        came_up.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert came_up.wait(SOON_S)
    asking.join(SOON_S)
    assert second.loads.take("r", hashes(3), indices(0, 1, 2))
    assert second.loads.gate.finish(second.loads.start([Now()]))
    assert torch.equal(second.page(2), first.page(2))
    second.close()


class Unsure:
    """The copy of a layer, which ends when `landed` is set. Asked before that, it raises."""

    def __init__(self, family: type[Exception]) -> None:
        self.family = family
        self.landed, self.asked = threading.Event(), threading.Event()

    def done(self) -> bool:
        return self.landed.is_set()

    def wait(self) -> None:
        if not self.landed.is_set():
            self.asked.set()
            raise self.family("the device does not answer")

    def hold_engine(self) -> None:
        self.wait()


FAMILIES = [RuntimeError, OSError, MemoryError, InputError, MisuseError]


@pytest.mark.parametrize("family", FAMILIES)
def test_pages_stay_leased_while_a_copy_of_any_layer_may_read_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, family: type[Exception]
) -> None:
    """And the batch has not ended, so that SGLang keeps the slots too."""
    engine.stored(hashes(1), 0)
    layers = [Unsure(family) for _ in range(LAYERS)]
    monkeypatch.setattr(type(engine.loads._binding._copier), "load_layers", lambda self, plan: layers)
    assert engine.loads.take("r", hashes(1), indices(1))
    number = engine.loads.start([Now()])
    assert layers[-1].asked.wait(SOON_S)  # though the first has raised
    assert engine.cache.counts().read_leases == 1
    assert not engine.loads.gate._batches[number].over
    for layer in layers:
        layer.landed.set()
    assert not engine.loads.gate.finish(number)
    assert "the device does not answer" in engine.errors[0]
    assert engine.cache.counts().read_leases == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_room_stays_reserved_while_a_copy_may_write_to_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, family: type[Exception]
) -> None:
    copy = Unsure(family)
    monkeypatch.setattr(type(engine.copier()), "store", lambda self, plan: copy)
    engine.stores.offer(hashes(1), [], indices(0), [Now()])
    assert copy.asked.wait(SOON_S)
    assert engine.cache.counts().chunks_reserved == 1
    copy.landed.set()
    assert engine.answers(1) == [False]
    counts = engine.cache.counts()
    assert counts.chunks_reserved == counts.chunks_resident == 0
