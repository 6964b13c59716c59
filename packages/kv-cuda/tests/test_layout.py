"""A layout says where every element is, and refuses to be one that cannot be."""

from dataclasses import replace

import pytest
import torch
from kv_core.errors import InputError
from kv_core.transfer import Copy, HostExtent, TransferPlan
from kv_cuda import PartLayout, pages_of, read_rows, split_parts, transposed_keys, write_rows
from kv_cuda.copy.plan import WholeBlocks, validate_and_split
from kv_testing.layouts import BLOCKS, DIM, HEADS, LAYERS, TOKENS, SmallCache, place_of, small_caches

CACHES = small_caches()
RUNS = {name: cache for name, cache in CACHES.items() if cache.layout.blocks_are_runs}
TRUE = CACHES["K transposed"].layout
k, v = TRUE.parts


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((k, replace(v, offset=0)), "two elements of a block overlap"),
        ((k, replace(v, offset=1)), "overlap"),
        ((replace(k, token=0), v), "overlap"),
        ((replace(k, dim=1), v), "overlap"),
        ((k, replace(v, offset=-1)), "part v has a negative offset"),
        ((replace(k, head=-8), v), "part k has a negative head"),
        ((k, replace(v, offset=TRUE.page_elements)), "the blocks of part k overlap"),
        ((replace(k, block=TRUE.page_elements - 1), v), "the blocks of part k overlap"),
        ((replace(k, block=8), replace(v, block=8)), "the blocks of part k overlap"),
        ((), "has no parts"),
    ],
)
def test_a_layout_whose_elements_share_places_is_refused(parts: tuple[PartLayout, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(TRUE, parts=parts)


def test_parts_and_blocks_may_lie_anywhere_as_long_as_they_do_not_meet() -> None:
    """As in SGLang's host pools: then canonical chunks can be copied, and whole blocks cannot be kept as they are."""
    far = replace(TRUE, parts=(k, replace(v, offset=BLOCKS * TRUE.page_elements)))
    assert far.canonical_format(8) == TRUE.canonical_format(8)
    with pytest.raises(InputError, match="not one run"):
        far.blocks_format(8, "x")
    with pytest.raises(InputError, match="the blocks of part k overlap"):
        replace(far, blocks=BLOCKS + 1)
    assert not any(cache.layout.blocks_are_runs for name, cache in CACHES.items() if name.startswith("SGLang"))


def test_in_tensors_of_their_own_parts_may_have_the_same_places_but_no_two_elements_of_one() -> None:
    layout = CACHES["SGLang on the device, float32"].layout
    key, value = layout.parts
    assert (key.offset, key.block) == (value.offset, value.block)
    with pytest.raises(InputError, match="overlap"):
        replace(layout, own_tensors=False)
    with pytest.raises(InputError, match="the blocks of part v overlap"):
        replace(layout, parts=(key, replace(value, block=value.block - 1)))


@pytest.mark.parametrize("axis", ["itemsize", "layers", "blocks", "block_tokens", "heads", "head_dim"])
def test_an_axis_of_nothing_is_refused_by_name(axis: str) -> None:
    with pytest.raises(InputError, match=f"{axis} is 0"):
        replace(TRUE, **{axis: 0})


def test_opaque_chunks_of_other_origins_never_match() -> None:
    assert TRUE.blocks_format(8, "vllm/a").fingerprint != TRUE.blocks_format(8, "vllm/b").fingerprint
    assert TRUE.blocks_format(8, "vllm/a").fingerprint != TRUE.canonical_format(8).fingerprint


def test_slots_beyond_two_to_the_31_elements_are_planned_right() -> None:
    """Pure arithmetic: such a cache is 16 GiB and more, and no tensor of it is made."""
    sizes = {"dtype": "bfloat16", "itemsize": 2, "layers": 2, "block_tokens": 16, "heads": 8, "head_dim": 128}
    page = 2 * 16 * 8 * 128
    large = split_parts(
        "large", block=page, token=1024, head=128, dim=1, value_offset=page // 2, blocks=200_000, **sizes
    )
    described = large.canonical_format(256)
    last = 199_999 * 16
    pool = {"pool": 2**40}
    extent = HostExtent("pool", 2**40 - described.nbytes, described.nbytes)
    (work,) = validate_and_split(
        TransferPlan((Copy(extent, 240, last, 16),), 256), large, described, pool, to_engine=True
    )
    assert work.whole == (WholeBlocks(240, 199_999, 1),)
    assert work.whole[0].first_block * page > 2**31
    meta = torch.empty(200_000 * page, dtype=torch.bfloat16, device="meta")
    assert meta.as_strided((200_000, 16), (page, 1024))[199_999, 15].storage_offset() == 199_999 * page + 15 * 1024


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_rows_are_where_the_strides_say(cache: SmallCache) -> None:
    layout, tensors = cache.layout, cache.make()
    slots = torch.tensor([5, BLOCKS * TOKENS - 1, 0, 9])
    dtype = getattr(torch, layout.dtype)
    rows = {
        part.name: torch.arange(4 * layout.heads * layout.head_dim)
        .reshape(4, layout.heads, layout.head_dim)
        .add(number)
        .to(dtype)
        for number, part in enumerate(layout.parts)
    }
    write_rows(layout, tensors, 1, slots, rows)
    for of_part, part in enumerate(layout.parts):
        tensor = layout.of_part(tensors, of_part)[1]
        storage = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
        for number, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, layout.block_tokens)
            for head in range(layout.heads):
                for dim in range(layout.head_dim):
                    at = place_of(part, block, offset, head, dim)
                    assert storage[tensor.storage_offset() + at] == rows[part.name][number, head, dim]
    read = read_rows(layout, tensors, 1, slots)
    assert all(torch.equal(read[name], rows[name]) for name in rows)
    untouched = read_rows(layout, tensors, 0, slots)
    assert not any(bool(part.any()) for part in untouched.values())


def test_pages_are_the_bytes_of_whole_blocks() -> None:
    for cache in RUNS.values():
        tensors = cache.make()
        pages = pages_of(tensors[1], BLOCKS)
        assert pages.shape == (BLOCKS, cache.layout.page_bytes)
        pages[2] = 255
        flat = torch.empty(0, dtype=torch.uint8).set_(tensors[1].untyped_storage())
        assert int((flat == 255).sum()) == cache.layout.page_bytes
    with pytest.raises(ValueError, match="7 blocks, not 6"):
        pages_of(CACHES["MLA"].make()[0], 6)


def test_the_cpu_layout_of_vllm_is_k_transposed_then_v() -> None:
    made = transposed_keys(
        "x",
        block=2 * TOKENS * HEADS * DIM,
        dtype="float32",
        itemsize=4,
        layers=LAYERS,
        blocks=BLOCKS,
        block_tokens=TOKENS,
        heads=HEADS,
        head_dim=DIM,
    )
    tensor = torch.arange(LAYERS * BLOCKS * made.page_elements, dtype=torch.float32).reshape(
        LAYERS, BLOCKS, HEADS, 2, -1
    )
    read = read_rows(made, list(tensor.reshape(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)), 2, torch.tensor([TOKENS + 1]))
    inside = tensor[2, 1]
    assert torch.equal(read["k"][0], inside[:, 0].reshape(HEADS, DIM, TOKENS)[:, :, 1])
    assert torch.equal(read["v"][0], inside[:, 1].reshape(HEADS, TOKENS, DIM)[:, 1])
