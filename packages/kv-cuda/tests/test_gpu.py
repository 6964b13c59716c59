"""What the GPU's copier does besides moving the right bytes, which `test_copier` shows: pieces, layers, pins."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import ConfigError, CopyFailed, InputError
from kv_core.transfer import Copy, HostExtent, Move, TransferPlan, packed, plan_transfer
from kv_cuda import CpuCopier, make_copier
from kv_cuda.copy import gpu
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths, Direction
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.copy.streams import DoneEvent, HostQueue
from kv_cuda.layout import split_parts
from kv_testing.layouts import BLOCKS, LAYERS, TOKENS, small_caches

CACHE = small_caches()["NHD, K‖V"]
CHUNK = 3 * TOKENS
SLOTS = BLOCKS * TOKENS
FORMAT = CACHE.layout.canonical_format(CHUNK)


def only(copy_path: CopyPath) -> CopyPaths:
    return CopyPaths(load=((0, copy_path),), store=((0, copy_path),))


def filled() -> list[torch.Tensor]:
    tensors = CACHE.make()
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return tensors


def whole(pool: str = "pool", table: tuple[int, ...] = (5, 0, 3)) -> TransferPlan:
    extents = [HostExtent(pool, 0, FORMAT.nbytes)]
    return plan_transfer(extents, table, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=CHUNK)


def gathered(copier: GpuCopier | CpuCopier, plan: TransferPlan) -> bytes:
    pool = bytearray(FORMAT.nbytes)
    copier.attach("pool", memoryview(pool))
    copier.store(plan).wait()
    copier.detach("pool")
    return bytes(pool)


def test_a_chunk_larger_than_the_ring_goes_through_it_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six planes through four slots of one plane each, so that the ring turns."""
    monkeypatch.setattr("kv_cuda.copy.gpu._RING_SLOT_BYTES", FORMAT.layer_bytes)
    tensors = filled()
    expected = gathered(CpuCopier(CACHE.layout, tensors, FORMAT), whole())
    staged = GpuCopier(CACHE.layout, tensors, FORMAT, copy_paths=only("staged"))
    assert gathered(staged, whole()) == expected
    pool = bytearray(expected)
    empty = CACHE.make()
    copier = GpuCopier(CACHE.layout, empty, FORMAT, copy_paths=only("staged"))
    copier.attach("pool", memoryview(pool))
    copier.load(whole()).wait()
    assert gathered(CpuCopier(CACHE.layout, empty, FORMAT), whole()) == expected


class Recorded(DoneEvent):
    def __init__(self, *, has_followed: bool) -> None:
        self.has_followed = has_followed


class Following(HostQueue):
    """Its events know whether it had followed the engine's queue by then."""

    def __init__(self) -> None:
        self._has_followed = False

    def follow_current(self) -> None:
        self._has_followed = True

    def record(self) -> Recorded:
        return Recorded(has_followed=self._has_followed)


def test_a_ring_that_is_made_ahead_is_not_filled_while_others_use_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory may have been freed by the engine's step that is still running. The first copy into it waits for
    nothing but these events."""
    monkeypatch.setattr("kv_cuda.copy.gpu.make_queue", lambda device: Following())
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("staged"))
    copier.prepare([])
    free = copier._pipelines["load"]._free
    assert [isinstance(event, Recorded) and event.has_followed for event in free] == [True] * 4


def test_kernels_are_compiled_where_they_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's current device is the first one, whatever the rank's. Only a queue of ours sets it."""
    where: list[str] = []

    class Placed(HostQueue):
        @contextmanager
        def running(self) -> Iterator[None]:
            where.append("ours")
            yield
            where.append("the thread's")

    monkeypatch.setattr("kv_cuda.copy.gpu.make_queue", lambda device: Placed())
    monkeypatch.setattr("kv_cuda.copy.rows.RowKernel.compile", lambda self: where.append("compiled") or {})
    GpuCopier(CACHE.layout, filled(), FORMAT)
    assert where[where.index("compiled") - 1] == "ours"


class Unread:
    """The event of lists that a device has not come to."""

    waits = 0

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits += 1


def test_lists_that_are_still_read_are_not_waited_for_but_joined_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is asked for inside an engine's step."""
    tensors, unread = filled(), Unread()
    expected = gathered(CpuCopier(CACHE.layout, tensors, FORMAT), whole())
    copier = GpuCopier(CACHE.layout, tensors, FORMAT, copy_paths=only("direct"))
    pipeline = copier._pipelines["store"]
    for lists in (2, 2, 3, 4):  # the first two are there from the beginning
        assert gathered(copier, whole()) == expected
        assert len(pipeline._lists) == lists
        pipeline._used[pipeline._list], pipeline._filled = unread, 2 * pipeline.list_tokens
    pipeline._used[0] = DoneEvent()
    assert gathered(copier, whole()) == expected
    assert len(pipeline._lists) == 4 and unread.waits == 0


@pytest.mark.parametrize("direction", ["load", "store"])
def test_what_raises_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    copier = GpuCopier(CACHE.layout, filled(), FORMAT)
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    end = Unread()
    monkeypatch.setattr(copier._pipelines[direction], "end", lambda: end)  # type: ignore[index]

    def fail(*arguments: object, **named: object) -> None:
        raise CopyFailed("the driver refuses")

    monkeypatch.setattr(copier._pipelines[direction], "launch", fail)  # type: ignore[index]
    with pytest.raises(CopyFailed, match="refuses"):
        getattr(copier, direction)(whole())
    assert end.waits == 1


def no_memory(*_arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_without_memory_for_the_ring_only_this_copy_fails() -> None:
    """The engine may leave some later; an error that is not ours would turn its cache off."""
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("staged"))
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    with pytest.MonkeyPatch.context() as patch:
        for pipeline in copier._pipelines.values():
            patch.setattr(pipeline, "make_ring", no_memory)
        for copy in (copier.load, copier.store, copier.load_layers):
            with pytest.raises(CopyFailed, match="no memory left for a copy's buffers: CUDA out of memory"):
                copy(whole())
        with pytest.raises(ConfigError, match="no memory left for a copy's buffers"):
            copier.prepare([HostExtent("pool", 0, FORMAT.nbytes)])
    copier.store(whole()).wait()
    copier.load(whole()).wait()


@pytest.mark.parametrize(
    ("place", "why"),
    [("host", "pinned buffers: CUDA error: out of memory"), ("device", "buffers: CUDA out of memory")],
)
def test_without_memory_for_another_list_only_this_copy_fails(
    place: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For pinned memory the driver's error is none of torch's for the device's memory."""
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("direct"))
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    for direction, copy in (("load", copier.load), ("store", copier.store)):
        pipeline = copier._pipelines[direction]
        for _ in range(2):
            copy(whole()).wait()
            pipeline._used[pipeline._list], pipeline._filled = Unread(), 2 * pipeline.list_tokens
        with monkeypatch.context() as patch:
            if place == "host":
                patch.setattr(torch, "empty", refused)
            else:
                patch.setattr(pipeline, "_add_list", no_memory)
            with pytest.raises(CopyFailed, match=f"no memory left for a copy's {why}"):
                copy(whole())
        copy(whole()).wait()
        assert len(pipeline._lists) == 3


def refused(*_arguments: object, **_named: object) -> None:
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_more_tokens_than_a_launch_holds_are_several_launches(
    monkeypatch: pytest.MonkeyPatch, copy_path: CopyPath
) -> None:
    monkeypatch.setattr("kv_cuda.copy.gpu._LIST_TOKENS", 1)  # then a launch holds one chunk
    tensors = filled()
    extents = [HostExtent("pool", number * FORMAT.nbytes, FORMAT.nbytes) for number in range(2)]
    plan = plan_transfer(
        extents, [6, 1, 4, 0, 2, 5], chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=2 * CHUNK
    )
    results = []
    for copier in (
        CpuCopier(CACHE.layout, tensors, FORMAT),
        GpuCopier(CACHE.layout, tensors, FORMAT, copy_paths=only(copy_path)),
    ):
        pool = bytearray(2 * FORMAT.nbytes)
        copier.attach("pool", memoryview(pool))
        copier.store(plan).wait()
        results.append(pool)
    assert results[0] == results[1]
    assert any(results[0])


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_layer_by_layer_is_the_same_in_the_end(copy_path: CopyPath) -> None:
    tensors = filled()
    chunk = gathered(CpuCopier(CACHE.layout, tensors, FORMAT), whole())
    empty = CACHE.make()
    copier = GpuCopier(CACHE.layout, empty, FORMAT, copy_paths=only(copy_path))
    copier.attach("pool", memoryview(bytearray(chunk)))
    events = copier.load_layers(whole())
    assert len(events) == LAYERS
    events[-1].wait()
    assert gathered(CpuCopier(CACHE.layout, empty, FORMAT), whole()) == chunk


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_layers_are_stored_one_by_one_and_each_as_it_is_then(copy_path: CopyPath) -> None:
    tensors = filled()
    chunk = gathered(CpuCopier(CACHE.layout, tensors, FORMAT), whole())
    copier = GpuCopier(CACHE.layout, tensors, FORMAT, copy_paths=only(copy_path))
    pool = bytearray(FORMAT.nbytes)
    copier.attach("pool", memoryview(pool))
    store = copier.store_layers(whole())
    assert not any(pool) and store.layers == LAYERS
    store.gather((LAYERS - 1,)).wait()
    assert any(pool) and pool != chunk
    store.gather(range(LAYERS - 1)).wait()
    assert pool == chunk
    copier.detach("pool")
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    with pytest.raises(CopyFailed, match="was detached"):  # its memory may not be there any more
        store.gather((0,))


def test_lists_of_blocks_cross_the_bus_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number for each block and each chunk."""
    uploads: list[int] = []
    room = gpu._KernelPipeline.room

    def counted(self: Any, count: int) -> Any:
        uploads.append(count)
        return room(self, count)

    monkeypatch.setattr(gpu._KernelPipeline, "room", counted)
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("direct"))
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    copier.prepare([HostExtent("pool", 0, FORMAT.nbytes)])
    assert len(copier.load_layers(whole())) == LAYERS > 1
    assert uploads == [CHUNK // TOKENS + 1]


@st.composite
def moves(draw: st.DrawFn) -> TransferPlan:
    """Of one or two prompts, and mostly right."""
    step, parts = draw(st.sampled_from([TOKENS, TOKENS, 1, CHUNK])), []
    for _ in range(draw(st.integers(1, 2))):
        chunks = draw(st.integers(1, 2))
        first = draw(st.integers(0, chunks * CHUNK - 1))
        blocks = st.integers(0, SLOTS // step - 1) if draw(st.integers(0, 3)) else st.integers(-1, SLOTS // step)
        table = draw(st.lists(blocks, min_size=chunks * CHUNK // step, max_size=40, unique=draw(st.booleans())))
        last = draw(st.integers(first + 1, chunks * CHUNK))
        pools = st.sampled_from(["pool"] * 9 + ["other"])
        extents = [
            HostExtent(draw(pools), draw(st.integers(0, 4)) * FORMAT.nbytes, FORMAT.nbytes) for _ in range(chunks)
        ]
        parts.append(Move(extents, packed(table), step, first, last))
    return TransferPlan(tuple(parts), CHUNK)


@settings(deadline=None)
@given(moves(), st.sampled_from(["load", "store"]))
def test_what_is_listed_in_one_call_is_what_is_listed_copy_by_copy(plan: TransferPlan, direction: Direction) -> None:
    """And what is refused there is not listed."""
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("direct"))
    copier.attach("pool", memoryview(bytearray(4 * FORMAT.nbytes)))
    listed = copier._listed([plan], direction)
    is_valid = listed is not None and copier._submit(listed, []) is not None
    try:
        checked = copier._checked(TransferPlan(plan.copies, CHUNK), direction)
    except InputError:
        assert not is_valid
        return
    if listed is None or not is_valid:
        return  # a plan that takes a closer look
    numbers = copier._pipelines[direction]._lists[0].tolist()
    slots, rows = copier._lists([group for groups in checked.launches for group in groups], checked)
    found = []
    for tokens, blocks_at, places_at, first, per_slot, _ in (move for move, _ in listed.listings(0, CHUNK)):
        for at in range(first, first + tokens):
            slot = numbers[blocks_at + at // per_slot] * per_slot + at % per_slot
            found.append((slot, numbers[places_at + at // CHUNK] + at % CHUNK * copier._kernel.row_bytes))
    assert sorted(found) == sorted(zip(slots.tolist(), rows.tolist(), strict=True))


def test_a_profiler_sees_a_range_around_each_load_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder is in the place of NVTX, which needs a CUDA device."""
    seen: list[str] = []

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", recorded)
    copier = GpuCopier(CACHE.layout, filled(), FORMAT, copy_paths=only("direct"))
    gathered(copier, whole())
    assert not seen, "a range on a CPU"
    copier._range = torch.cuda.nvtx.range
    gathered(copier, whole())
    copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
    copier.load(whole()).wait()
    ranges = [f"kv {direction}: {CHUNK} tokens" for direction in ("store", "load")]
    assert seen == [f"{edge} {name}" for name in ranges for edge in ("begin", "end")]


def test_a_part_of_a_chunk_never_leaves_through_the_ring() -> None:
    """It would carry the ring's old bytes into the chunk's other tokens."""
    tensors = filled()
    copier = GpuCopier(CACHE.layout, tensors, FORMAT, copy_paths=only("staged"))
    pool = bytearray(b"\xee" * FORMAT.nbytes)
    copier.attach("pool", memoryview(pool))
    copier.store(whole()).wait()
    kept = bytes(pool)
    pool[:] = b"\xee" * FORMAT.nbytes
    copier.store(TransferPlan((Copy(HostExtent("pool", 0, FORMAT.nbytes), 0, 5 * TOKENS, 1),), CHUNK)).wait()
    row = FORMAT.token_bytes
    assert pool[:row] == kept[:row]
    assert pool[row : FORMAT.layer_bytes] == b"\xee" * (FORMAT.layer_bytes - row)


@pytest.mark.parametrize("copy_path", ["direct", "staged"])
def test_slots_beyond_two_to_the_31_elements_are_reached(copy_path: CopyPath) -> None:
    """Memory that nobody touches costs nothing, so a cache of 2 GiB and more fits on any machine."""
    page = 2 * TOKENS * 2 * 64
    blocks = 2**31 // page + 3
    layout = split_parts(
        "large",
        block=page, token=2 * 64, head=64, dim=1, value_offset=page // 2,
        dtype="uint8", itemsize=1, layers=1, blocks=blocks, block_tokens=TOKENS, heads=2, head_dim=64,
    )  # fmt: skip
    tensor = torch.empty(blocks * page, dtype=torch.uint8)
    last = tensor[(blocks - 1) * page :]
    last.copy_(torch.randint(0, 256, last.shape, dtype=torch.uint8))
    described = layout.canonical_format(TOKENS)
    copier = GpuCopier(layout, [tensor], described, copy_paths=only(copy_path))
    pool = bytearray(described.nbytes)
    copier.attach("pool", memoryview(pool))
    copier.store(
        TransferPlan((Copy(HostExtent("pool", 0, described.nbytes), 0, (blocks - 1) * TOKENS, TOKENS),), TOKENS)
    ).wait()
    assert bytes(pool) == last.numpy().tobytes()


@pytest.mark.parametrize("heads_apart", [False, True])
def test_rows_longer_than_a_tile_are_moved_in_pieces(heads_apart: bool) -> None:
    """The last piece is not full, nor is any a whole number of rows."""
    tokens, heads, dim = 2, 21, 256
    row = heads * dim
    strides = {"token": 2 * dim, "head": 2 * tokens * dim, "value_offset": dim} if heads_apart else {}
    layout = split_parts(
        "long rows",
        block=2 * tokens * row,
        dim=1,
        **{"token": row, "head": dim, "value_offset": tokens * row} | strides,
        dtype="float32",
        itemsize=4,
        layers=2,
        blocks=4,
        block_tokens=tokens,
        heads=heads,
        head_dim=dim,
    )
    described = layout.canonical_format(2 * tokens)
    tensors = list(torch.arange(2 * 4 * 2 * tokens * row, dtype=torch.float32).view(2, 4, -1))
    plan = plan_transfer(
        [HostExtent("pool", 0, described.nbytes)],
        (3, 1),
        chunk_tokens=2 * tokens,
        block_tokens=tokens,
        first_token=0,
        last_token=2 * tokens,
    )
    chunks = []
    for made in (CpuCopier, GpuCopier):
        pool = bytearray(described.nbytes)
        copier = made(layout, tensors, described)
        copier.attach("pool", memoryview(pool))
        copier.store(plan).wait()
        empty = [torch.zeros_like(tensor) for tensor in tensors]
        back = made(layout, empty, described)
        back.attach("pool", memoryview(pool))
        back.load(plan).wait()
        for tensor, again in zip(tensors, empty, strict=True):
            assert torch.equal(again[[1, 3]], tensor[[1, 3]]) and not bool(again[[0, 2]].any())
        chunks.append(bytes(pool))
    assert chunks[0] == chunks[1]


def test_places_that_would_be_written_twice_are_refused() -> None:
    extent = HostExtent("pool", 0, FORMAT.nbytes)
    for copier in (CpuCopier(CACHE.layout, CACHE.make(), FORMAT), GpuCopier(CACHE.layout, CACHE.make(), FORMAT)):
        copier.attach("pool", memoryview(bytearray(FORMAT.nbytes)))
        with pytest.raises(InputError, match="writes slot 6 twice"):
            copier.load(TransferPlan((Copy(extent, 0, 4, 3), Copy(extent, 4, 6, 2)), CHUNK))
        with pytest.raises(InputError, match="writes token of a chunk 2 twice"):
            copier.store(TransferPlan((Copy(extent, 0, 4, 3), Copy(extent, 2, 8, 2)), CHUNK))


def test_what_the_kernel_could_not_check_is_checked_before() -> None:
    with pytest.raises(InputError, match="reaches beyond the tensor's storage"):
        GpuCopier(CACHE.layout, [tensor[:-1].clone() for tensor in CACHE.make()], FORMAT)
    wrong = replace(CACHE.layout, itemsize=2)
    with pytest.raises(InputError, match="an element of float32 does not have 2 bytes"):
        GpuCopier(wrong, CACHE.make(), wrong.canonical_format(CHUNK))
    copier = GpuCopier(CACHE.layout, CACHE.make(), FORMAT)
    memory = bytearray(FORMAT.nbytes + 64)
    with pytest.raises(InputError, match="read-only or empty"):
        copier.attach("pool", memoryview(bytes(64)))
    copier.attach("pool", memoryview(memory))
    with pytest.raises(InputError, match="an extent at 4 is not aligned to 16 bytes"):
        copier.store(TransferPlan((Copy(HostExtent("pool", 4, FORMAT.nbytes), 0, 0, 1),), CHUNK))
    with pytest.raises(InputError, match=f"a cache with {SLOTS} slots"):
        copier.store(TransferPlan((Copy(HostExtent("pool", 0, FORMAT.nbytes), 0, SLOTS, 1),), CHUNK))


def test_tensors_on_a_cpu_get_the_cpus_copier() -> None:
    assert isinstance(make_copier(CACHE.layout, CACHE.make(), FORMAT), CpuCopier)


RUNS = {"a head a run": (32, 256), "a row": (256, 256), "MLA": (72, 72), "a state": (268_288, 268_288)}
"""Words of 8 bytes in a run and in a row."""
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_cuda.copy.rows import RowKernel, is_for_driver, move_rows

made = {}
for name, (run, row) in json.loads(sys.argv[1]).items():
    kernel = RowKernel(None, None, 64, 0, row * 8, 16, run, row, 8, 16)
    for to_engine in (True, False):
        constants = dict(kernel.constants, TO_ENGINE=to_engine)
        signature = {"planes": "*i64", "slots": "*i64", "rows": "*i64", "base": "i64", "tokens": "i32",
                     "slots_at": "i32", "rows_at": "i32", "first": "i32", "per_slot": "i32", "per_row": "i32",
                     "first_plane": "i32", "plane_count": "i32", "plane_step": "i32",
                     "plane_bytes": "i64"}
        signature |= {constant: "constexpr" for constant in constants}
        source = ASTSource(fn=move_rows, signature=signature, constexprs=constants)
        for architecture in (80, 90, 100):
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            made[f"{name} {to_engine} {architecture}"] = compiled.asm["ptx"]
            assert is_for_driver(compiled)
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def compiled(compile_kernels: Callable[..., dict[str, str]]) -> dict[str, str]:
    """PTX of the kernel, ahead of time and without a GPU."""
    return compile_kernels(COMPILE, json.dumps(RUNS))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("to_engine", [True, False], ids=["scatter", "gather"])
@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_compiles_for_every_gpu_and_moves_128_bits_at_a_time(
    compiled: dict[str, str], run: str, to_engine: bool, architecture: int
) -> None:
    """What moves chunks is 128 bits wide; the lists of slots are read 64 bits wide. C can launch it."""
    ptx = compiled[f"{run} {to_engine} {architecture}"]
    assert f".target sm_{architecture}" in ptx
    # What csrc/plans.c launches it with: addresses, counts, the distance of planes, and Triton's two scratch areas.
    assert re.findall(r"\.param \.(\w+) .*move_rows_param_", ptx) == ["u64"] * 4 + ["u32"] * 9 + ["u64"] * 3
    stores = re.findall(r"st\.global\S*", ptx)
    assert stores
    assert all(one in ("st.global.v2.b64", "st.global.v4.b32") for one in stores)
    assert len(re.findall(r"ld\.global\S*\.v[24]\.b(?:64|32)", ptx)) == len(stores)


SPECIALISED = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from kv_cuda.copy import rows

kinds = []

class Launched:
    def __init__(self, kernel):
        hopper = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, hopper)

    def __getitem__(self, grid):
        return lambda *arguments, **constants: kinds.append(repr(self.bind(*arguments, **constants)[1]))

rows.move_rows = Launched(rows.move_rows)
kernel = rows.RowKernel(torch.empty(8, 4, dtype=torch.int64), None, 8, 1 << 20, 2048, 16, 32, 256, 8, 16)
kernel.compile()
at_start = set(kinds)
tokens = torch.zeros(512, dtype=torch.int64)
for to_engine in (True, False):
    for first, end in ((0, 256), (1, 2), (16, 512), (17, 33)):
        for base in (1, 16, 1 << 20, 0x7F00_0000_1000):
            for span in ((0, 8, 1), (1, 1, 1), (7, 1, 1), (1, 2, 4)):
                lists = tokens[first:end]
                for listing in (None, rows.Listing(9, first, end, 3, 16, 256), rows.Listing(1, 1, 16, 0, 1, 1)):
                    named = dict(base=base, span=span, to_engine=to_engine, programs=16, listing=listing)
                    kernel.move(lists, lists, **named)
later = set(kinds) - at_start
print(json.dumps({"at the start": str(len(at_start)), "later": str(len(later)), "calls": str(len(kinds))}))
"""


@pytest.mark.slow
def test_no_call_compiles_a_kernel_that_was_not_compiled_at_the_start(
    compile_kernels: Callable[..., dict[str, str]],
) -> None:
    """Whatever the addresses, places in the lists of tokens and numbers of planes: Triton's own rule is asked."""
    assert compile_kernels(SPECIALISED) == {"at the start": "2", "later": "0", "calls": "386"}
