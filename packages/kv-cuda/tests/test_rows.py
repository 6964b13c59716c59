"""Single tokens' rows, as a canary compares them: what is read is what the strides say, and a wrong guess shows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kv_core.errors import InputError
from kv_cuda import PagedLayout, PartLayout, pages_of, probe_rows, read_rows, write_rows
from kv_testing.layouts import BLOCKS, DIM, LAYERS, TOKENS, SmallCache, small_caches

CACHES = small_caches()
RUNS = {name: cache for name, cache in CACHES.items() if cache.layout.blocks_are_runs}
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
SLOTS = torch.arange(BLOCKS * TOKENS)


def rows_for(cache: SmallCache, seed: int = 0) -> dict[str, torch.Tensor]:
    layout = cache.layout
    dtype = getattr(torch, layout.dtype)
    shape = (len(SLOTS), layout.heads, layout.head_dim)
    return probe_rows([part.name for part in layout.parts], shape, seed=seed, dtype=dtype, device=torch.device("cpu"))


def filled(cache: SmallCache) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    tensors, rows = cache.make(), rows_for(cache)
    for layer in range(LAYERS):
        write_rows(cache.layout, tensors, layer, SLOTS, rows)
    return tensors, rows


@pytest.mark.parametrize("cache", RUNS.values(), ids=RUNS.keys())
def test_a_layers_rows_fill_its_pages_and_no_byte_between_them(cache: SmallCache) -> None:
    tensors, ones = cache.make(), {name: torch.ones_like(rows) for name, rows in rows_for(cache).items()}
    write_rows(cache.layout, tensors, 1, SLOTS, ones)
    assert bool((tensors[1] == 1).all())
    assert not bool(tensors[0].any()) and not bool(tensors[2].any())
    whole = torch.empty(0, dtype=tensors[1].dtype).set_(tensors[1].untyped_storage())
    assert int(whole.to(torch.float64).count_nonzero()) == BLOCKS * cache.layout.page_elements


@every_cache
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_read_in_the_order_of_the_slots_and_repeats_are_fine(cache: SmallCache, seed: int) -> None:
    tensors, rows = filled(cache)
    chosen = torch.randint(0, len(SLOTS), (9,), generator=torch.Generator().manual_seed(seed))
    read = read_rows(cache.layout, tensors, 2, chosen)
    assert read.keys() == rows.keys()
    for name, part in read.items():
        assert torch.equal(part, rows[name][chosen])


GUESSES: dict[str, Callable[[PartLayout], PartLayout]] = {
    "token and head": lambda part: replace(part, token=part.head, head=part.token),
    "head and dim": lambda part: replace(part, head=part.dim, dim=part.head),
    "token and dim": lambda part: replace(part, token=part.dim, dim=part.token),
    "offset": lambda part: replace(part, offset=part.offset + 1),
    "block": lambda part: replace(part, block=part.block - 1),
}
CONFUSED = [
    pytest.param(cache, tuple(map(guess, cache.layout.parts)), id=f"{order}: {name}")
    for order, cache in CACHES.items()
    for name, guess in GUESSES.items()
    if tuple(map(guess, cache.layout.parts)) != cache.layout.parts  # two equal strides cannot be confused
]


@pytest.mark.parametrize(("cache", "parts"), CONFUSED)
def test_one_wrong_stride_reads_other_values(cache: SmallCache, parts: tuple[PartLayout, ...]) -> None:
    """What the canary rests on. Where other values would lie outside the storage, it is refused."""
    tensors, rows = filled(cache)
    wrong = _unchecked(cache.layout, parts)
    some = SLOTS[: 2 * TOKENS]
    try:
        read = read_rows(wrong, tensors, 0, some)
    except InputError:
        return
    assert any(not torch.equal(read[name], rows[name][some]) for name in rows)


def test_another_dtype_of_the_same_size_reads_other_values() -> None:
    cache = CACHES["apart, bfloat16, a storage a layer"]
    tensors, rows = filled(cache)
    read = read_rows(replace(cache.layout, dtype="float16"), tensors, 0, SLOTS)
    assert not torch.equal(read["k"].float(), rows["k"].float())


@pytest.mark.parametrize("slot", [-1, BLOCKS * TOKENS])
def test_a_slot_that_does_not_exist_is_refused_and_never_counted_from_the_end(slot: int) -> None:
    cache = CACHES["NHD, K‖V"]
    tensors, rows = filled(cache)
    before = tensors[0].clone()
    asked = torch.tensor([0, slot])
    with pytest.raises(InputError, match=f"{slot}"):
        read_rows(cache.layout, tensors, 0, asked)
    with pytest.raises(InputError, match=f"{slot}"):
        write_rows(cache.layout, tensors, 0, asked, {name: part[:2] + 1 for name, part in rows.items()})
    assert torch.equal(tensors[0], before)


def test_a_tensor_that_starts_inside_an_element_is_refused() -> None:
    layout = CACHES["K and V apart"].layout
    memory = torch.zeros(layout.blocks * layout.page_bytes + 4, dtype=torch.uint8)
    with pytest.raises(InputError, match="starts inside an element"):
        read_rows(layout, [memory[2:]], 0, torch.tensor([0]))


def test_a_layout_that_reaches_beyond_the_storage_is_refused() -> None:
    cache = CACHES["MLA"]
    with pytest.raises(InputError, match="reaches beyond the tensor's storage"):
        read_rows(replace(cache.layout, blocks=3 * BLOCKS + 1), cache.make(), 0, torch.tensor([0]))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(BLOCKS, 2 * DIM)[:, ::2], torch.zeros(BLOCKS, 3, 8)[:, :, :4], torch.zeros(BLOCKS, 1).expand(-1, 4)],
    ids=["every second element", "rows with gaps", "one element many times"],
)
def test_pages_that_are_not_one_run_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(InputError, match="not one run of bytes"):
        pages_of(tensor, BLOCKS)


def test_pages_permuted_inside_and_apart_from_each_other_are_one_run_each() -> None:
    memory = torch.arange(BLOCKS * 40, dtype=torch.uint8).reshape(BLOCKS, 40)
    pages = pages_of(memory[:, :24].unflatten(1, (2, 3, 4)).permute(0, 3, 1, 2), BLOCKS)
    assert torch.equal(pages, memory[:, :24])


def _unchecked(layout: PagedLayout, parts: tuple[PartLayout, ...]) -> PagedLayout:
    """A guess need not be a possible layout for the question what it would read; two blocks of it stay inside."""
    wrong = replace(layout, blocks=2)
    object.__setattr__(wrong, "parts", parts)
    return wrong
