"""Gather and scatter, for every layout, both formats and each copier, against a loop over single elements.

`torch` and `C` are the CPU's copier without and with functions in C; `direct` and `staged` are the GPU's two paths
through its kernel, interpreted on the CPU and on the device with `-m gpu`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import InputError
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, HostExtent, TransferPlan, plan_transfer
from kv_cuda import CpuCopier, PagedLayout, latent, read_rows, split_parts, transposed_keys
from kv_cuda.copy.copy_paths import CopyPath, CopyPaths
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.kernels import installed_kernels
from kv_testing.layouts import BLOCKS, TOKENS, SmallCache, place_of, small_caches
from kv_testing.pool_memory import pool_memory

CHUNK = 3 * TOKENS
CACHES = small_caches()
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
every_format = pytest.mark.parametrize("kind", ["canonical", "blocks"])
every_cache_and_format = pytest.mark.parametrize(
    ("cache", "kind"),
    [
        pytest.param(cache, kind, id=f"{kind}-{name}")
        for kind in ("canonical", "blocks")
        for name, cache in CACHES.items()
        if kind == "canonical" or cache.layout.blocks_are_runs
    ],
)

needs_c = pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler")

Copier = CpuCopier | GpuCopier


@dataclass(frozen=True)
class Maker:
    """A copier by name, and where its tensors are."""

    copy_path: CopyPath | None
    device: str
    compiled: bool = False

    def take(self, layout: PagedLayout, tensors: list[torch.Tensor], described: ChunkFormat) -> Copier:
        if self.copy_path is None:
            return CpuCopier(layout, tensors, described, compiled=self.compiled)
        only = ((0, self.copy_path),)
        return GpuCopier(layout, tensors, described, copy_paths=CopyPaths(load=only, store=only))

    @property
    def is_interpreted(self) -> bool:
        """Whether each copy takes a hundred times as long as another one's."""
        return self.copy_path is not None and self.device == "cpu"

    def cannot(self, layout: PagedLayout, kind: str) -> bool:
        in_order = all(part.dim == 1 and not part.is_tiled for part in layout.parts)
        return self.copy_path is not None and kind == "canonical" and not in_order


every_hand = pytest.mark.parametrize(
    "maker",
    [
        pytest.param(Maker(None, "cpu"), id="torch"),
        pytest.param(Maker(None, "cpu", compiled=True), id="C", marks=needs_c),
        pytest.param(Maker("direct", "cpu"), id="direct"),
        pytest.param(Maker("staged", "cpu"), id="staged"),
        pytest.param(Maker("direct", "cuda"), id="direct on the GPU", marks=pytest.mark.gpu),
        pytest.param(Maker("staged", "cuda"), id="staged on the GPU", marks=pytest.mark.gpu),
        pytest.param(Maker("driver", "cuda"), id="driver on the GPU", marks=pytest.mark.gpu),
    ],
)


def format_of(layout: PagedLayout, kind: str) -> ChunkFormat:
    return layout.canonical_format(CHUNK) if kind == "canonical" else layout.blocks_format(CHUNK, "test")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor as bytes: what lies between the blocks too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def fill(tensors: list[torch.Tensor], seed: int = 0) -> None:
    """Every bit pattern, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    for storage in {raw(tensor).data_ptr(): raw(tensor) for tensor in tensors}.values():
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator))


def places(layout: PagedLayout, kind: str, copy: Copy) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, byte of the engine's tensor, byte of the chunk, bytes), one row or element at a time."""
    described = format_of(layout, kind)
    size = layout.itemsize
    for layer in range(layout.layers):
        for token in range(copy.tokens):
            block, offset = divmod(copy.first_slot + token, layout.block_tokens)
            in_chunk = copy.first_token + token
            if kind == "blocks":
                row = layout.page_bytes // layout.block_tokens
                at = block * layout.parts[0].block * size + offset * row
                yield layer, at, (layer * CHUNK + in_chunk) * row, row
                continue
            for number, part in enumerate(layout.parts):
                tensor = number * layout.layers + layer if layout.own_tensors else layer
                for head in range(layout.heads):
                    for dim in range(layout.head_dim):
                        at = place_of(part, block, offset, head, dim)
                        ours = ((number * layout.layers + layer) * CHUNK + in_chunk) * layout.heads + head
                        yield tensor, at * size, (ours * layout.head_dim + dim) * size, size
    assert described.nbytes


def slow(
    layout: PagedLayout,
    kind: str,
    tensors: list[torch.Tensor],
    pools: dict[str, memoryview],
    plan: TransferPlan,
    *,
    to_engine: bool,
) -> None:
    for copy in plan.copies:
        pool = pools[copy.extent.pool]
        for number, at, in_chunk, nbytes in places(layout, kind, copy):
            tensor = tensors[number]
            engine = raw(tensor).numpy()
            start = tensor.storage_offset() * tensor.element_size() + at
            ours = slice(copy.extent.offset + in_chunk, copy.extent.offset + in_chunk + nbytes)
            if to_engine:
                engine[start : start + nbytes] = list(pool[ours])
            else:
                pool[ours] = engine[start : start + nbytes].tobytes()


def random_plan(layout: PagedLayout, kind: str, chance: random.Random) -> TransferPlan:
    """Some tokens of two chunks in two pools, from a shuffled block table."""
    described = format_of(layout, kind)
    table = chance.sample(range(BLOCKS), 6)
    first = chance.randrange(0, 2 * CHUNK - 1)
    last = chance.randrange(first + 1, 2 * CHUNK + 1)
    if kind == "blocks":
        first, last = first // TOKENS * TOKENS, -(-last // TOKENS) * TOKENS
    extents = [HostExtent("a", 4096, described.nbytes), HostExtent("b", 0, described.nbytes)]
    return plan_transfer(extents, table, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=first, last_token=last)


def pools_for(described: ChunkFormat, seed: int) -> dict[str, memoryview]:
    chance = random.Random(seed)
    return {name: pool_memory(chance.randbytes(2 * 4096 + described.nbytes)) for name in ("a", "b")}


@every_hand
@every_cache_and_format
@pytest.mark.parametrize("to_engine", [False, True], ids=["gather", "scatter"])
def test_a_plan_moves_exactly_its_tokens_and_touches_nothing_else(
    maker: Maker, cache: SmallCache, kind: str, to_engine: bool
) -> None:
    """Both sides are compared whole, gaps between blocks and pools' other bytes included."""
    layout = cache.layout
    if maker.cannot(layout, kind):
        with pytest.raises(InputError, match="do not lie side by side"):
            maker.take(layout, cache.make(maker.device), format_of(layout, kind))
        return
    for seed in range(2 if maker.is_interpreted else 6):
        plan = random_plan(layout, kind, random.Random(seed))
        fast_side, slow_side = cache.make(maker.device), cache.make()
        fill(fast_side, seed)
        fill(slow_side, seed)
        fast_pools, slow_pools = (pools_for(format_of(layout, kind), seed) for _ in range(2))
        copier = maker.take(layout, fast_side, format_of(layout, kind))
        for name, pool in fast_pools.items():
            copier.attach(name, pool)
        event = copier.load(plan) if to_engine else copier.store(plan)
        event.wait()
        assert event.done()
        slow(layout, kind, slow_side, slow_pools, plan, to_engine=to_engine)
        assert fast_pools == slow_pools
        for fast, reference in zip(fast_side, slow_side, strict=True):
            assert torch.equal(raw(fast).cpu(), raw(reference))


@pytest.mark.parametrize("streams", [False, True])
@every_cache_and_format
def test_what_was_gathered_scatters_back_into_other_blocks(
    cache: SmallCache, kind: str, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the processor's caches, and around them as if the copy were a large one."""
    if streams:
        monkeypatch.setattr("kv_cuda.copy.cpu._MIN_STREAMED_BYTES", 0)
    layout, described = cache.layout, format_of(cache.layout, kind)
    tensors = cache.make()
    fill(tensors)
    copier = CpuCopier(layout, tensors, described)
    pools = {name: pool_memory(described.nbytes) for name in ("there", "back")}
    for name, pool in pools.items():
        copier.attach(name, pool)

    def plan(pool: str, table: list[int]) -> TransferPlan:
        extents = [HostExtent(pool, 0, described.nbytes)]
        return plan_transfer(extents, table, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=0, last_token=CHUNK)

    copier.store(plan("there", [5, 0, 3]))
    copier.load(plan("there", [1, 6, 2]))
    copier.store(plan("back", [1, 6, 2]))
    assert pools["there"] == pools["back"]
    assert any(pools["there"])


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(CACHES)),
    table=st.permutations(range(BLOCKS)),
    cut=st.tuples(st.integers(0, 2 * CHUNK), st.integers(0, 2 * CHUNK)).map(sorted),
)
def test_a_round_trip_restores_exactly_the_asked_tokens(name: str, table: list[int], cut: list[int]) -> None:
    cache = CACHES[name]
    described = format_of(cache.layout, "canonical")
    extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(2)]
    plan = plan_transfer(extents, table, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=cut[0], last_token=cut[1])
    pool = pool_memory(2 * described.nbytes)
    full, empty, expected = cache.make(), cache.make(), cache.make()
    fill(full)
    for tensors, load in ((full, False), (empty, True)):
        copier = CpuCopier(cache.layout, tensors, described)
        copier.attach("pool", pool)
        (copier.load if load else copier.store)(plan)
    slow(cache.layout, "canonical", expected, {"pool": pool}, plan, to_engine=True)
    for ours, wanted in zip(empty, expected, strict=True):
        assert torch.equal(raw(ours), raw(wanted))


@every_hand
@pytest.mark.parametrize("block_tokens", [1, 2, 16, 32, 64])
@pytest.mark.parametrize("order", ["NHD", "HND", "K transposed", "MLA"])
def test_blocks_of_every_size_move_whole_and_in_part(maker: Maker, order: str, block_tokens: int) -> None:
    """Two chunks of 64 tokens out of 192 slots, of the second only a part: gathered, and scattered elsewhere."""
    sizes = {"dtype": "float32", "itemsize": 4, "layers": 2, "blocks": 192 // block_tokens}
    sizes |= {"block_tokens": block_tokens, "heads": 1 if order == "MLA" else 2, "head_dim": 4}
    page = (1 if order == "MLA" else 4) * block_tokens * 4
    layout = {
        "NHD": lambda: split_parts(order, block=page, token=16, head=8, dim=1, value_offset=4, **sizes),
        "HND": lambda: split_parts(order, block=page, token=8, head=8 * block_tokens, dim=1, value_offset=4, **sizes),
        "K transposed": lambda: transposed_keys(order, block=page, **sizes),
        "MLA": lambda: latent(order, block=page, token=4, **sizes),
    }[order]()
    if maker.cannot(layout, "canonical"):
        pytest.skip("the kernel does not take rows that are no runs")
    described = layout.canonical_format(64)
    blocks = random.Random(block_tokens).sample(range(layout.blocks), layout.blocks)
    extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(2)]
    plans = [
        plan_transfer(extents, table, chunk_tokens=64, block_tokens=block_tokens, first_token=0, last_token=101)
        for table in (blocks, blocks[::-1])
    ]
    slots = [
        torch.tensor([table[token // block_tokens] * block_tokens + token % block_tokens for token in range(101)])
        for table in (blocks, blocks[::-1])
    ]
    tensors = list(torch.randn(2, layout.blocks, page).to(maker.device))
    copier = maker.take(layout, tensors, described)
    pool = pool_memory(2 * described.nbytes)
    copier.attach("pool", pool)
    before = [read_rows(layout, tensors, layer, slots[0].to(maker.device)) for layer in range(2)]
    copier.store(plans[0]).wait()
    for tensor in tensors:
        tensor.fill_(-1)
    copier.load(plans[1]).wait()
    untouched = torch.ones(192, dtype=torch.bool)
    untouched[slots[1]] = False
    for layer, rows in enumerate(before):
        after = read_rows(layout, tensors, layer, slots[1].to(maker.device))
        rest = read_rows(layout, tensors, layer, untouched.nonzero().flatten().to(maker.device))
        assert all(torch.equal(after[name], rows[name]) for name in rows)
        assert all(bool((part == -1).all()) for part in rest.values())


@every_hand
def test_a_manager_s_block_of_two_kernel_blocks_is_the_same_slots(maker: Maker) -> None:
    """vLLM's tables speak of the manager's blocks and its tensors of the kernel's: what joins them is the slot."""
    cache, manager = CACHES["NHD, K‖V"], 2 * TOKENS
    described = cache.layout.canonical_format(2 * manager)
    extents = [HostExtent("pool", 0, described.nbytes)]
    coarse = plan_transfer(
        extents, [2, 0], chunk_tokens=2 * manager, block_tokens=manager, first_token=3, last_token=2 * manager
    )
    fine = plan_transfer(
        extents, [4, 5, 0, 1], chunk_tokens=2 * manager, block_tokens=TOKENS, first_token=3, last_token=2 * manager
    )
    assert coarse.copies == fine.copies
    tensors = cache.make(maker.device)
    fill(tensors)
    copier, pool = maker.take(cache.layout, tensors, described), pool_memory(described.nbytes)
    copier.attach("pool", pool)
    copier.store(coarse).wait()
    slots = torch.tensor([16 + token if token < manager else token - manager for token in range(3, 2 * manager)])
    keys = read_rows(cache.layout, tensors, 1, slots.to(maker.device))["k"].cpu().numpy().tobytes()
    row = described.token_bytes
    assert pool[described.layer_offset(0, 1) :][3 * row : 2 * manager * row] == keys


def test_one_slot_may_be_gathered_twice() -> None:
    cache = CACHES["K transposed"]
    described = format_of(cache.layout, "canonical")
    tensors = cache.make()
    fill(tensors)
    extent = HostExtent("pool", 0, described.nbytes)
    plan = TransferPlan((Copy(extent, 0, 5, 2), Copy(extent, 2, 5, 2)), CHUNK)
    pool, expected = pool_memory(described.nbytes), pool_memory(described.nbytes)
    copier = CpuCopier(cache.layout, tensors, described)
    copier.attach("pool", pool)
    copier.store(plan)
    slow(cache.layout, "canonical", tensors, {"pool": expected}, plan, to_engine=False)
    assert pool == expected


GOOD = HostExtent("pool", 0, CACHES["K transposed"].layout.canonical_format(CHUNK).nbytes)
SLOTS = BLOCKS * TOKENS


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        (Copy(GOOD, 0, SLOTS - 1, 2), f"a cache with {SLOTS} slots"),
        (Copy(GOOD, 0, -1, 2), "slots -1"),
        (Copy(GOOD, 0, 0, 0), "slots 0 to 0"),
        (Copy(GOOD, CHUNK - 1, 0, 2), f"a chunk of {CHUNK}"),
        (Copy(GOOD, -1, 0, 2), "tokens -1"),
        (Copy(HostExtent("other", 0, GOOD.nbytes), 0, 0, 1), "'other' is not attached"),
        (Copy(HostExtent("pool", 0, GOOD.nbytes - 4), 0, 0, 1), "an extent of"),
        (Copy(HostExtent("pool", 8, GOOD.nbytes), 0, 0, 1), "an extent at 8 of a pool"),
        (Copy(HostExtent("pool", -4, GOOD.nbytes), 0, 0, 1), "an extent at -4"),
        (Copy(HostExtent("pool", 2, GOOD.nbytes), 0, 0, 1), "an extent at 2 is not aligned"),
    ],
)
def test_a_plan_that_reaches_outside_is_refused_whole(copy: Copy, said: str) -> None:
    """Before anything is copied, the good part of it too."""
    cache = CACHES["K transposed"]
    tensors = cache.make()
    fill(tensors)
    before = [raw(tensor).clone() for tensor in tensors]
    copier = CpuCopier(cache.layout, tensors, format_of(cache.layout, "canonical"))
    pool = pool_memory(GOOD.nbytes + 4)
    copier.attach("pool", pool)
    plan = TransferPlan((Copy(GOOD, 0, 0, 4), copy), CHUNK)
    for move in (copier.load, copier.store):
        with pytest.raises(InputError, match=said):
            move(plan)
    assert not any(pool)
    assert all(torch.equal(raw(tensor), kept) for tensor, kept in zip(tensors, before, strict=True))


def test_a_plan_for_chunks_of_another_length_is_refused() -> None:
    cache = CACHES["K transposed"]
    copier = CpuCopier(cache.layout, cache.make(), format_of(cache.layout, "canonical"))
    with pytest.raises(InputError, match="the plan's chunks have 8 tokens"):
        copier.load(TransferPlan((), 8))


@pytest.mark.parametrize(("first_token", "first_slot", "tokens"), [(0, 0, TOKENS - 1), (1, 0, TOKENS), (0, 1, TOKENS)])
def test_opaque_blocks_are_never_cut(first_token: int, first_slot: int, tokens: int) -> None:
    cache = CACHES["K transposed"]
    described = format_of(cache.layout, "blocks")
    copier = CpuCopier(cache.layout, cache.make(), described)
    copier.attach("pool", memoryview(bytearray(described.nbytes)))
    plan = TransferPlan((Copy(HostExtent("pool", 0, described.nbytes), first_token, first_slot, tokens),), CHUNK)
    with pytest.raises(InputError, match="opaque block"):
        copier.load(plan)


def test_a_detached_pool_can_be_closed_and_is_unknown() -> None:
    cache = CACHES["MLA"]
    described = format_of(cache.layout, "canonical")
    copier = CpuCopier(cache.layout, cache.make(), described)
    pool = bytearray(described.nbytes)
    copier.attach("pool", memoryview(pool))
    copier.detach("pool")
    pool.clear()  # raises BufferError while anybody looks at it
    with pytest.raises(InputError, match="not attached"):
        copier.load(TransferPlan((Copy(HostExtent("pool", 0, described.nbytes), 0, 0, 1),), CHUNK))


def test_layout_tensors_and_format_must_agree() -> None:
    cache, other = CACHES["K transposed"], CACHES["MLA"]
    with pytest.raises(InputError, match="2 tensors for a layout of 3 layers"):
        CpuCopier(cache.layout, cache.make()[:2], format_of(cache.layout, "canonical"))
    apart = CACHES["SGLang on the device, float32"]
    with pytest.raises(InputError, match="3 tensors for a layout of 3 layers, 2 a layer"):
        CpuCopier(apart.layout, apart.make()[:3], format_of(apart.layout, "canonical"))
    for kind in ("canonical", "blocks"):
        with pytest.raises(InputError, match="format"):
            CpuCopier(cache.layout, cache.make(), format_of(other.layout, kind))
    with pytest.raises(InputError, match="reaches beyond the tensor's storage"):
        CpuCopier(cache.layout, [tensor[:-1].clone() for tensor in cache.make()], format_of(cache.layout, "canonical"))


@pytest.mark.parametrize("change", [{"head_dim": 64, "layers": 6}, {"block_tokens": 2}], ids=["shape", "block"])
def test_an_opaque_format_of_the_same_size_but_another_shape_is_refused(change: dict[str, int]) -> None:
    """Equal bytes in total would copy layers into each other without a word."""
    cache = CACHES["K and V apart"]
    described = format_of(cache.layout, "blocks")
    if "layers" in change:
        change = {"layers": 2 * described.layers, "head_dim": described.head_dim // 2}
    with pytest.raises(InputError, match="the format is not that of layout"):
        CpuCopier(cache.layout, cache.make(), replace(described, **change))


@pytest.mark.parametrize("itemsize", [2, 3])
def test_an_itemsize_that_is_not_the_dtypes_is_refused(itemsize: int) -> None:
    layout = replace(CACHES["K and V apart"].layout, itemsize=itemsize)
    with pytest.raises(InputError, match=f"an element of float32 does not have {itemsize} bytes"):
        CpuCopier(layout, CACHES["K and V apart"].make(), layout.canonical_format(CHUNK))


def test_tensors_that_start_inside_an_element_are_refused() -> None:
    layout = CACHES["K and V apart"].layout
    size = layout.blocks * layout.page_bytes
    memory = torch.zeros(3 * size + 4, dtype=torch.uint8)
    tensors = [memory[2 + layer * size :][:size] for layer in range(3)]
    with pytest.raises(InputError, match="starts inside an element"):
        CpuCopier(layout, tensors, layout.canonical_format(CHUNK))


@every_format
@pytest.mark.parametrize("order", [[2, 1, 0], [0, 2, 1], [0, 0, 0]], ids=["reversed", "uneven", "one shared tensor"])
def test_layers_may_lie_in_any_order_and_share_a_tensor(kind: str, order: list[int]) -> None:
    cache = CACHES["K transposed"]
    described, plan = format_of(cache.layout, kind), random_plan(cache.layout, kind, random.Random(4))
    for to_engine in (False, True):
        sides = []
        for _ in range(2):
            tensors = cache.make()
            fill(tensors)
            sides.append([tensors[layer] for layer in order])
        # A shared tensor is loaded with what it stored: other bytes for each layer would have no right answer.
        pools = [{name: pool_memory(len(pool)) for name, pool in pools_for(described, 0).items()} for _ in range(2)]
        copier = CpuCopier(cache.layout, sides[0], described)
        for name, pool in pools[0].items():
            copier.attach(name, pool)
        (copier.load if to_engine else copier.store)(plan)
        slow(cache.layout, kind, sides[1], pools[1], plan, to_engine=to_engine)
        assert pools[0] == pools[1]
        assert torch.equal(raw(sides[0][0]), raw(sides[1][0]))


def test_a_pool_may_end_inside_an_element_and_must_be_writable() -> None:
    cache = CACHES["K and V apart"]
    described = format_of(cache.layout, "canonical")
    copier = CpuCopier(cache.layout, cache.make(), described)
    copier.attach("odd", memoryview(bytearray(described.nbytes + 3)))
    copier.store(TransferPlan((Copy(HostExtent("odd", 0, described.nbytes), 0, 0, 1),), CHUNK))
    for refused in (memoryview(bytes(described.nbytes)), memoryview(bytearray(3))):
        with pytest.raises(InputError, match="read-only or too small"):
            copier.attach("pool", refused)


@every_format
def test_parts_whose_blocks_are_at_different_distances_are_refused(kind: str) -> None:
    layout = CACHES["K and V apart"].layout
    k, v = layout.parts
    layout = replace(layout, blocks=2, parts=(k, replace(v, block=v.block + 8)))
    with pytest.raises(InputError, match="at different distances"):
        CpuCopier(layout, CACHES["K and V apart"].make(), format_of(layout, kind))


@needs_c
def test_only_large_copies_to_the_engine_go_around_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CACHES["K transposed"]
    described = format_of(cache.layout, "canonical")
    monkeypatch.setattr("kv_cuda.copy.cpu._MIN_STREAMED_BYTES", 2 * described.nbytes)
    ways: list[int] = []
    kernels = installed_kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "call", lambda _name, way, *_rest: ways.append(way) or 0)
    copier = CpuCopier(cache.layout, cache.make(), described)
    copier.attach("pool", memoryview(bytearray(2 * described.nbytes)))
    for chunks, copy, expected in ((1, copier.load, 1), (2, copier.load, 2), (2, copier.store, 0)):
        extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(chunks)]
        sizes = {"chunk_tokens": CHUNK, "block_tokens": TOKENS}
        copy(plan_transfer(extents, list(range(chunks * 3)), first_token=0, last_token=chunks * CHUNK, **sizes))
        assert set(ways) == {expected}
        ways.clear()


@needs_c
@pytest.mark.parametrize(("threads", "chunks", "in_c"), [(4, 9, True), (5, 1, True), (5, 9, False)])
def test_copies_of_many_bytes_are_shared_among_torchs_threads_where_there_are_many(
    threads: int, chunks: int, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, tokens = CACHES["K transposed"], 64 * TOKENS
    layout = replace(cache.layout, blocks=64, layers=1)
    described = layout.canonical_format(tokens)
    tensors = [torch.randn(64, layout.page_elements)]
    monkeypatch.setattr("kv_cuda.copy.cpu._MAX_BYTES_OF_ONE_THREAD", 8 * described.nbytes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    copier = CpuCopier(layout, tensors, described)
    called: list[str] = []
    kernels = installed_kernels()
    assert kernels is not None
    real = kernels.call
    monkeypatch.setattr(kernels, "call", lambda name, *arguments: called.append(name) or real(name, *arguments))
    pool = pool_memory(chunks * described.nbytes)
    copier.attach("pool", pool)
    extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(chunks)]
    table = [*range(64)] * chunks
    copier.store(
        plan_transfer(
            extents, table, chunk_tokens=tokens, block_tokens=TOKENS, first_token=0, last_token=chunks * tokens
        )
    )
    assert called == (["copy_blocks"] * 2 if in_c else [])
    keys = read_rows(layout, tensors, 0, torch.arange(tokens))["k"].reshape(-1)
    for number in range(chunks):
        stored = torch.frombuffer(pool, dtype=torch.float32, count=keys.numel(), offset=number * described.nbytes)
        assert torch.equal(stored, keys)
