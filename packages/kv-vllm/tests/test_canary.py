"""The canary, lied to in each way: a layout that is permuted, offset or of another dtype is never used."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from kv_cuda import PagedLayout, latent, split_parts, transposed_keys
from kv_cuda.canary import LayerGroup, Proof, Refusal, prove

BLOCKS, TOKENS, HEADS, DIM, LAYERS = 6, 8, 2, 4, 3
PAGE = 2 * TOKENS * HEADS * DIM
SIZES = {
    "dtype": "float32",
    "itemsize": 4,
    "layers": LAYERS,
    "blocks": BLOCKS,
    "block_tokens": TOKENS,
    "heads": HEADS,
    "head_dim": DIM,
}
TRUE = transposed_keys("K transposed", block=PAGE, **SIZES)
SIDE_BY_SIDE = split_parts("K‖V", block=PAGE, token=2 * DIM, head=2 * TOKENS * DIM, dim=1, value_offset=DIM, **SIZES)
Update = Callable[[int, dict[str, torch.Tensor], torch.Tensor], None]


def engine(update: Callable[[torch.Tensor], Update] | None = None) -> tuple[tuple[torch.Tensor, ...], Update]:
    """An engine that keeps K transposed, written down here a second time, element by element."""
    storage = torch.arange(LAYERS * BLOCKS * PAGE, dtype=torch.float32).reshape(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM)

    def write(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        flat = storage[layer].reshape(BLOCKS, HEADS, 2, TOKENS * DIM)
        for number, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, TOKENS)
            for head in range(HEADS):
                for dim in range(DIM):
                    flat[block, head, 0, dim * TOKENS + token] = rows["k"][number, head, dim]
                    flat[block, head, 1, token * DIM + dim] = rows["v"][number, head, dim]

    return tuple(storage), write if update is None else update(storage)


def group(candidates: tuple[PagedLayout, ...], update: Callable[[torch.Tensor], Update] | None = None) -> LayerGroup:
    tensors, write = engine(update)
    return LayerGroup(
        tensors=tensors,
        block_tokens=TOKENS,
        blocks=BLOCKS,
        candidates=candidates,
        opaque=SIDE_BY_SIDE,
        origin="test",
        row_dtype=torch.float32,
        row_shape=(HEADS, DIM),
        update=write,
    )


def test_of_all_layouts_the_true_one_is_found_and_the_cache_is_as_it_was() -> None:
    given = group((SIDE_BY_SIDE, TRUE))
    before = torch.stack(given.tensors).clone()
    proof = prove(given, "auto", 16)
    assert isinstance(proof, Proof)
    assert proof.layout is TRUE
    assert proof.format.kind == "canonical"
    assert torch.equal(torch.stack(given.tensors), before)


def changed(part: int, **fields: int) -> PagedLayout:
    """The true layout with one part told wrongly."""
    parts = list(TRUE.parts)
    parts[part] = replace(parts[part], **fields)
    return replace(TRUE, name=f"lie {part} {fields}", parts=tuple(parts))


k, v = TRUE.parts
LIES = {
    "K and V swapped": replace(
        TRUE, parts=(replace(v, name="k", token=DIM, dim=1), replace(k, name="v", token=1, dim=TOKENS))
    ),
    "K not transposed": changed(0, token=DIM, dim=1),
    "V transposed": changed(1, token=1, dim=TOKENS),
    "the other arrangement of heads": replace(
        TRUE,
        parts=(
            replace(k, head=TOKENS * DIM),
            replace(v, offset=HEADS * TOKENS * DIM, head=TOKENS * DIM),
        ),
    ),
    "as the shape reads": SIDE_BY_SIDE,
    "blocks one page further": changed(0, block=2 * PAGE, offset=0),
    "half the heads, twice the size": replace(
        TRUE,
        heads=1,
        head_dim=2 * DIM,
        parts=(replace(k, dim=TOKENS), replace(v, token=2 * DIM, offset=2 * TOKENS * DIM)),
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_about_the_order_is_never_used(lie: PagedLayout) -> None:
    refused = prove(group((lie,)), "canonical", 16)
    assert isinstance(refused, Refusal)
    assert "no layout that fits" in refused.reason
    fallback = prove(group((lie,)), "auto", 16)
    assert isinstance(fallback, Proof)
    assert fallback.format.kind == "blocks"


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16"])
def test_a_lie_about_the_dtype_is_never_used(dtype: str) -> None:
    itemsize = getattr(torch, dtype).itemsize
    lie = replace(TRUE, dtype=dtype, itemsize=itemsize)
    assert isinstance(prove(group((lie,)), "canonical", 16), Refusal)


def test_a_lie_about_where_it_starts_is_never_used() -> None:
    """Every offset that stays inside the storage."""
    given = group(())
    for offset in range(1, PAGE):
        shifted = replace(TRUE, name=f"from {offset}", blocks=BLOCKS - 1)
        tensors = tuple(
            tensor.reshape(-1)[offset : offset + (BLOCKS - 1) * PAGE].reshape(BLOCKS - 1, HEADS, TOKENS, 2 * DIM)
            for tensor in given.tensors
        )
        late = replace(given, tensors=tensors, blocks=BLOCKS - 1, candidates=(shifted,))
        assert isinstance(prove(late, "canonical", 16), Refusal), offset


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_quantised_is_proved_as_canonical(kind: Literal["int8", "fp8"]) -> None:
    proof = prove(group((SIDE_BY_SIDE, TRUE)), kind, 16)
    assert isinstance(proof, Proof)
    assert proof.layout is TRUE
    assert proof.format == TRUE.quantised_format(kind, 16)
    refused = prove(group((SIDE_BY_SIDE,)), kind, 16)
    assert isinstance(refused, Refusal)
    assert f"no layout that fits the engine's cache (tried: K‖V), and format is {kind}" in refused.reason
    exact = prove(group((TRUE,)), "auto", 16)
    assert isinstance(exact, Proof)
    assert not exact.format.is_quantised  # never chosen by itself
    assert exact.format.fingerprint != proof.format.fingerprint


def test_a_cache_of_other_than_floating_point_numbers_is_not_quantised() -> None:
    given = group((replace(TRUE, dtype="int32"),))

    def write(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        given.update(layer, {name: values.view(torch.float32) for name, values in rows.items()}, slots)

    tensors = tuple(tensor.view(torch.int32) for tensor in given.tensors)
    refused = prove(replace(given, tensors=tensors, update=write, row_dtype=torch.int32), "int8", 16)
    assert isinstance(refused, Refusal)
    assert "keeps int32, and format int8 is made from float32, bfloat16, float16" in refused.reason


def test_two_layouts_that_both_fit_are_refused() -> None:
    refused = prove(group((TRUE, replace(TRUE, name="a twin"))), "auto", 16)
    assert isinstance(refused, Refusal)
    assert "cannot tell" in refused.reason


def careless(storage: torch.Tensor) -> Update:
    def write(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        storage[layer, slots // TOKENS, 0, 0, 0] = 1.0
        storage[layer, 0, 0, 0, 0] += 1.0  # some bookkeeping in block 0

    return write


def placed(storage: torch.Tensor) -> Update:
    def write(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        storage[layer, slots // TOKENS, 0, 0, 0] = (slots // TOKENS).float()  # bytes that know where they lie

    return write


def idle(storage: torch.Tensor) -> Update:
    return lambda layer, rows, slots: None


@pytest.mark.parametrize(
    ("update", "why"), [(careless, "other blocks"), (placed, "unequal bytes"), (idle, "as they were")]
)
def test_blocks_that_do_not_stand_alone_are_not_carried_as_blocks_either(
    update: Callable[[torch.Tensor], Update], why: str
) -> None:
    refused = prove(group((), update), "auto", 16)
    assert isinstance(refused, Refusal)
    assert why in refused.reason


def pages(view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> LayerGroup:
    """A cache that nothing but the engine's kernels can write, and what they see of it."""
    given = group(())
    return replace(given, update=None, views=tuple(view(tensor) for tensor in given.tensors))


@pytest.mark.parametrize(
    "view",
    [lambda tensor: tensor, lambda tensor: tensor.flatten(1), lambda tensor: tensor[:, :1]],
    ids=["all", "flat", "beginning"],
)
def test_blocks_of_a_cache_without_an_update_are_stored_as_its_kernels_see_them(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """All of a block, or its beginning: the rest is padding."""
    proof = prove(pages(view), "auto", 16)
    assert isinstance(proof, Proof)
    assert proof.format.kind == "blocks"
    assert isinstance(prove(pages(view), "canonical", 16), Refusal)


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (lambda tensor: tensor[1:], "see other blocks"),
        (lambda tensor: tensor.clone(), "see other blocks"),
        (lambda tensor: tensor[:, 1:], "see other blocks"),
        (lambda tensor: tensor.transpose(2, 3), "not one run of bytes"),
        (lambda tensor: tensor.as_strided(tensor.shape, (PAGE // 2, *tensor.stride()[1:])), "not one run of bytes"),
    ],
)
def test_blocks_of_a_cache_whose_kernels_see_other_bytes_are_refused(
    view: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    refused = prove(pages(view), "auto", 16)
    assert isinstance(refused, Refusal)
    assert why in refused.reason


def test_blocks_of_which_the_kernels_see_more_than_is_copied_are_refused() -> None:
    part = latent("a part", block=PAGE, token=DIM, **(SIZES | {"heads": 1}))
    refused = prove(replace(pages(), opaque=part), "auto", 16)
    assert isinstance(refused, Refusal)
    assert f"see {4 * PAGE} bytes of a block" in refused.reason


def test_a_cache_too_small_for_the_canary_is_refused() -> None:
    refused = prove(replace(group((TRUE,)), blocks=3), "auto", 16)
    assert isinstance(refused, Refusal)
    assert "needs 4" in refused.reason


def test_a_latent_cache_is_proved_too() -> None:
    storage = torch.zeros(LAYERS, BLOCKS, 1, TOKENS, DIM)

    def write(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        for number, slot in enumerate(slots.tolist()):
            storage[layer, slot // TOKENS, 0, slot % TOKENS] = rows["kv"][number, 0]

    sizes = SIZES | {"heads": 1}
    layout = latent("MLA", block=TOKENS * DIM, token=DIM, **sizes)
    given = replace(group(()), tensors=tuple(storage), candidates=(layout,), opaque=layout, update=write)
    given = replace(given, row_shape=(1, DIM))
    proof = prove(given, "auto", 16)
    assert isinstance(proof, Proof)
    assert proof.format.parts == ("kv",)
