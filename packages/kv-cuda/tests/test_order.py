"""Copies on streams, in every order that streams and events allow: each moves the bytes that were there when the engine
got to it, whatever else is under way. A copier that lacks an edge is found out."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.device import CopyEvent
from kv_core.errors import CopyFailed, InputError, KVError
from kv_core.transfer import HostExtent, TransferPlan, packed, plan_transfer
from kv_cuda import CpuCopier
from kv_cuda.copy import driver, gpu
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.layout import split_parts
from kv_testing.calls import calls_of
from kv_testing.fake_device import FakeDevice
from kv_testing.layouts import BLOCKS, LAYERS, TOKENS, small_caches

CACHE = small_caches()["NHD, K‖V"]
CHUNK = 2 * TOKENS
FORMAT = CACHE.layout.canonical_format(CHUNK)
SLOTS = 3


class Engine:
    """An engine whose forward passes write to blocks that it owns, beside a copier on the same device.

    at_once: how many requests load or store in a step, if there is room. now: what the blocks will hold when all that
    is enqueued has been done. chunks: the same of the pool's slots.
    """

    def __init__(
        self, device: FakeDevice, copy_path: CopyPath, patch: pytest.MonkeyPatch, at_once: int, *, has_driver: bool
    ) -> None:
        device.install(patch, has_driver=has_driver)
        patch.setattr(gpu, "_LIST_TOKENS", 1)
        patch.setattr(gpu, "_RING_SLOT_BYTES", 2 * FORMAT.layer_bytes)
        table = ((0, copy_path),)
        self.device, self.chance, self.at_once = device, device.chance, at_once
        self.blocks, self.now = CACHE.make(), CACHE.make()
        self.pool, self.chunks = bytearray(SLOTS * FORMAT.nbytes), bytearray(SLOTS * FORMAT.nbytes)
        self.copier = GpuCopier(CACHE.layout, self.blocks, FORMAT, copy_paths=CopyPaths(load=table, store=table))
        self.copier.attach("pool", memoryview(self.pool))
        self.reference = CpuCopier(CACHE.layout, self.now, FORMAT)
        self.reference.attach("pool", memoryview(self.chunks))
        self.free_blocks, self.free_slots = set(range(BLOCKS)), set(range(SLOTS))
        self.copies: list[tuple[Sequence[CopyEvent], list[int], int, bool]] = []

    def step(self) -> None:
        """A forward pass, the loads or the stores of one or two requests, and then the device goes on for a while."""
        chance = self.chance
        for block in chance.sample(sorted(self.free_blocks), min(2, len(self.free_blocks))):
            self.compute(block)
        requests: list[tuple[list[int], int]] = []
        while len(requests) < self.at_once and len(self.free_blocks) >= 2 and self.free_slots:
            blocks, slot = chance.sample(sorted(self.free_blocks), 2), chance.choice(sorted(self.free_slots))
            self.free_blocks -= set(blocks)
            self.free_slots.remove(slot)
            requests.append((blocks, slot))
        self.copy(requests, is_load=chance.random() < 0.5, by_layers=chance.random() < 0.3)
        self.device.go_on(chance.randrange(12))
        self.poll()

    def compute(self, block: int) -> None:
        marks = torch.rand(
            self.blocks[0][block].shape, generator=torch.Generator().manual_seed(self.chance.getrandbits(32))
        )
        for layer, (ours, model) in enumerate(zip(self.blocks, self.now, strict=True)):
            model[block] = marks + layer
            self.device.engine.copy(ours[block], marks + layer)

    def copy(self, requests: Sequence[tuple[list[int], int]], *, is_load: bool, by_layers: bool) -> None:
        if not requests:
            return
        plans = [self.plan(blocks, slot) for blocks, slot in requests]
        if is_load and by_layers:
            of_requests = [self.copier.load_layers(plan) for plan in plans]
        elif by_layers:
            stores = [self.copier.store_layers(plan) for plan in plans]
            of_requests = [[store.gather((layer,)) for layer in range(LAYERS)] for store in stores]
        else:
            started = (self.copier.load_each if is_load else self.copier.store_each)(plans)
            of_requests = [[event] for event in started if not isinstance(event, KVError)]
        for plan, events, (blocks, slot) in zip(plans, of_requests, requests, strict=True):
            (self.reference.load if is_load else self.reference.store)(plan)
            self.follow(events, blocks, slot, is_load=is_load)

    def follow(self, events: Sequence[CopyEvent], blocks: list[int], slot: int, *, is_load: bool) -> None:
        """What was begun is looked at as soon as it is said to be done."""
        if is_load and self.chance.random() < 0.5:  # the forward pass waits for it on the device, and reads
            for event in events:
                event.hold_engine()
            for layer, block in ((layer, block) for layer in range(LAYERS) for block in blocks):
                expected = self.now[layer][block].clone()
                self.device.engine.enqueue(lambda ours=self.blocks[layer][block], then=expected: same(ours, then))  # type: ignore[misc]
        self.copies.append((events, blocks, slot, is_load))

    def poll(self) -> None:
        """What has been reported as done is where it belongs, at once."""
        for copy in list(self.copies):
            events, blocks, slot, is_load = copy
            if not all(event.done() for event in events):
                continue
            self.copies.remove(copy)
            for layer, block in ((layer, block) for layer in range(LAYERS) for block in blocks if is_load):
                same(self.blocks[layer][block], self.now[layer][block])
            part = slice(slot * FORMAT.nbytes, (slot + 1) * FORMAT.nbytes)
            assert self.pool[part] == self.chunks[part], "a chunk holds something else"
            self.free_blocks |= set(blocks)
            self.free_slots.add(slot)

    def finish(self) -> None:
        self.device.finish()
        self.poll()
        assert not self.copies and self.pool == self.chunks
        for ours, expected in zip(self.blocks, self.now, strict=True):
            same(ours, expected)

    @staticmethod
    def plan(blocks: Sequence[int], slot: int) -> TransferPlan:
        extents = [HostExtent("pool", slot * FORMAT.nbytes, FORMAT.nbytes)]
        return plan_transfer(extents, blocks, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=CHUNK)


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(ours, expected), "a block holds something else"


def run(seed: int, copy_path: CopyPath, at_once: int, *, has_driver: bool, drop: str = "") -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(FakeDevice(seed, drop=drop), copy_path, patch, at_once, has_driver=has_driver)
        for _ in range(25):
            engine.step()
        engine.finish()


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["direct", "staged"]), st.integers(1, 2), st.booleans())
def test_in_any_order_every_copy_moves_what_was_there_when_the_engine_came_to_it(
    seed: int, copy_path: CopyPath, at_once: int, has_driver: bool
) -> None:
    run(seed, copy_path, at_once, has_driver=has_driver)


@pytest.mark.parametrize("has_driver", [True, False], ids=["by C", "by Python"])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(
    ("copy_path", "drop"),
    [*product(("direct", "staged"), ("follow_current", "record")), ("staged", "follow"), ("direct", "reuse")],
)
def test_without_an_edge_between_streams_some_order_moves_other_bytes(
    copy_path: CopyPath, drop: str, at_once: int, has_driver: bool
) -> None:
    def is_wrong(seed: int) -> bool:
        try:
            run(seed, copy_path, at_once, has_driver=has_driver, drop=drop)
        except AssertionError:
            return True
        return False

    assert any(is_wrong(seed) for seed in range(100))


def sixteen_chunks(
    blocks: int, verb: str, device: FakeDevice, requests: int = 1, copy_path: CopyPath = "direct"
) -> Callable[[], None]:
    """Plans and copies 16 chunks of so many blocks each, for each request."""
    tokens, sizes = 64 // blocks, {"dtype": "float32", "itemsize": 4, "layers": 2, "heads": 1, "head_dim": 4}
    strides = {"block": 8 * tokens, "token": 4, "head": 4, "dim": 1, "value_offset": 4 * tokens}
    chunks, count = 16 * requests, 16 * blocks
    layout = split_parts("apart", blocks=chunks * blocks, block_tokens=tokens, **strides, **sizes)
    described = layout.canonical_format(64)
    table, tensors = ((0, copy_path),), [torch.zeros(chunks * blocks, 8 * tokens) for _ in range(2)]
    copier = GpuCopier(layout, tensors, described, copy_paths=CopyPaths(load=table, store=table))
    copier.attach("pool", memoryview(bytearray(chunks * described.nbytes)))
    extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(chunks)]
    order = device.chance.sample(range(chunks * blocks), chunks * blocks)
    tables = [packed(order[at * count :][:count]) for at in range(requests)]

    def copy() -> None:
        span = {"chunk_tokens": 64, "block_tokens": tokens, "first_token": 0, "last_token": 16 * 64}
        plans = [plan_transfer(extents[16 * at :][:16], table, **span) for at, table in enumerate(tables)]
        assert len(list(getattr(copier, f"{verb}_each")(plans))) == requests

    return copy


@pytest.mark.parametrize("verb", ["load", "store"])
def test_sixteen_chunks_take_as_many_calls_whatever_their_blocks_and_three_of_the_device(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edge, the lists' way over the bus, a launch and an event."""
    device = FakeDevice(1)
    device.install(monkeypatch)
    taken = []
    for blocks in (1, 16, 64):
        copy = sixteen_chunks(blocks, verb, device)
        copy()
        device.calls.clear()
        taken.append(calls_of(copy))
        assert device.calls == {"follow_current": 1, "work": 2, "record": 1}
    assert len(set(taken)) == 1 and taken[0] <= 150, taken


@pytest.mark.parametrize("verb", ["load", "store"])
def test_long_runs_are_one_batch_and_a_piece_of_a_ring_takes_six_calls_of_the_device(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides an edge and an event, and for the ring the lists' way over the bus."""
    device, batches = FakeDevice(1), list[int]()
    device.install(monkeypatch)
    monkeypatch.setattr(driver, "is_available", lambda _: True)
    monkeypatch.setattr(driver, "copy_runs", lambda to, *_: batches.append(len(to)))
    copy = sixteen_chunks(16, verb, device, copy_path="driver")
    device.calls.clear()
    copy()
    assert batches == [16 * 16 * 2 * 2] and device.calls == {"follow_current": 1, "record": 1}
    copy = sixteen_chunks(16, verb, device, copy_path="staged")
    copy()
    device.calls.clear()
    copy()
    # Each chunk is one piece here. The event of a store follows the ring's last one.
    assert sum(device.calls.values()) == 3 + 6 * 16 + 2 * (verb == "store"), device.calls


@pytest.mark.parametrize("verb", ["load", "store"])
def test_eight_requests_are_listed_by_one_call_of_c_behind_one_edge_and_each_is_a_launch_and_an_event(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(1)
    device.install(monkeypatch)
    copy = sixteen_chunks(16, verb, device, requests=8)
    copy()
    device.calls.clear()
    lists: list[str] = []
    kernels = gpu.installed_kernels()
    if kernels is None:
        pytest.skip("there is no compiler, so Python lists them, one by one")
    invoke = kernels.invoke
    monkeypatch.setattr(kernels, "invoke", lambda name, arrays: (lists.append(name), invoke(name, arrays))[1])
    copy()
    assert lists == ["submit"] and device.calls == {"follow_current": 1, "work": 1 + 8, "record": 8}
    monkeypatch.undo()
    device.install(monkeypatch)
    alone = sixteen_chunks(16, verb, device)
    alone()
    assert calls_of(copy) <= 5 * calls_of(alone)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_what_the_driver_refuses_has_ended_when_that_is_known(verb: str) -> None:
    """Its memory goes to others then. Nor does it harm what comes after it."""
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(FakeDevice(1), "direct", patch, 1, has_driver=True)
        for block in range(BLOCKS):
            engine.compute(block)
        engine.device.status = 700
        with pytest.raises(CopyFailed, match="the driver refuses: CUresult 700"):
            getattr(engine.copier, verb)(engine.plan([0, 1], 0))
        ours = engine.device.streams[1:]
        assert all(stream.done == len(stream.work) for stream in ours)
        engine.device.status = 0
        engine.copy([([0, 1], 0)], is_load=verb == "load", by_layers=False)
        engine.finish()


@pytest.mark.parametrize("verb", ["load", "store"])
def test_what_is_interrupted_has_ended(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tells of a signal when C returns, with the copies under way."""
    kernels = gpu.installed_kernels()
    if kernels is None:
        pytest.skip("there is no compiler, so Python enqueues")
    engine = Engine(FakeDevice(1), "direct", monkeypatch, 1, has_driver=True)
    invoke = kernels.invoke

    def interrupted(name: str, arguments: Sequence[int | bytes]) -> int:
        invoke(name, arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "invoke", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(engine.copier, verb)(engine.plan([0, 1], 0))
    ours = engine.device.streams[1:]
    assert any(stream.work for stream in ours) and all(stream.done == len(stream.work) for stream in ours)


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_request_that_is_refused_leaves_the_others_of_its_step_alone(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(FakeDevice(1), "direct", patch, 1, has_driver=True)
        for block in range(BLOCKS):
            engine.compute(block)
        plans = [engine.plan([0, 1], 0), engine.plan([2, BLOCKS], 1), engine.plan([3, 4], 2)]
        started = list((engine.copier.load_each if verb == "load" else engine.copier.store_each)(plans))
        assert [isinstance(copy, InputError) for copy in started] == [False, True, False]
        for number in (0, 2):
            (engine.reference.load if verb == "load" else engine.reference.store)(plans[number])
        engine.finish()


@pytest.mark.parametrize("has_driver", [True, False], ids=["by C", "by Python"])
@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_request_of_no_tokens_has_an_event_of_its_own(verb: str, has_driver: bool) -> None:
    """It takes none from those behind it, who would count as done too early."""
    with pytest.MonkeyPatch.context() as patch:
        engine = Engine(FakeDevice(1), "direct", patch, 1, has_driver=has_driver)
        for block in range(BLOCKS):
            engine.compute(block)
        engine.pool[:] = engine.chunks[:] = b"<" * len(engine.pool)
        plans = [engine.plan([0, 1], 0), TransferPlan((), CHUNK), engine.plan([3, 4], 2)]
        events = list(getattr(engine.copier, f"{verb}_each")(plans))
        assert len(events) == len(plans)
        for plan in plans:
            getattr(engine.reference, verb)(plan)
        for number, blocks, slot in ((2, [3, 4], 2), (0, [0, 1], 0)):
            event = events[number]
            assert not isinstance(event, KVError)
            event.wait()
            engine.copies.append(([event], blocks, slot, verb == "load"))
            engine.poll()
        engine.finish()
