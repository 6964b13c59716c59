"""States of linear layers: carried whole and alone, or refused. The engine's own views are the judge."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_core.coverage import ALL, STATE, Coverage
from kv_core.transfer import Copy, HostExtent, TransferPlan
from kv_cuda import make_copier, split_parts
from kv_cuda.bind import BoundGroups, bind_groups
from kv_cuda.canary import LayerGroup, Proof, Refusal
from kv_cuda.states import StateGroup, prove_states

BLOCKS, LAYERS, BLOCK_TOKENS = 7, 3, 16
CONV, SSM = (3, 8), (2, 4, 4)  # of bfloat16, of float32: 48 and 128 bytes
STATE_BYTES, PAGE_BYTES = 48 + 128, 192


def engine() -> tuple[tuple[torch.Tensor, ...], tuple[tuple[torch.Tensor, ...], ...]]:
    """Pages and views as vLLM's `MambaBase.bind_kv_cache` cuts them, padded to a page of attention."""
    storage = torch.arange(LAYERS * BLOCKS * PAGE_BYTES, dtype=torch.int64).to(torch.int8)
    pages = storage.view(LAYERS, BLOCKS, 1, 1, PAGE_BYTES)
    views = []
    for layer in range(LAYERS):
        flat = pages[layer].squeeze(dim=(1, 2))
        conv = flat[:, :48].view(torch.bfloat16).view(-1, *CONV)
        ssm = flat[:, 48:STATE_BYTES].view(torch.float32).view(-1, *SSM)
        views.append((conv, ssm))
    return tuple(pages), tuple(views)


def group(**fields: object) -> StateGroup:
    tensors, views = engine()
    whole = StateGroup(tensors, views, STATE_BYTES, BLOCKS, table_tokens=BLOCK_TOKENS, origin="test", table=2)
    return replace(whole, **fields)


def test_states_are_proved_and_the_cache_is_as_it_was() -> None:
    given = group()
    before = [tensor.clone() for tensor in given.tensors]
    proof = prove_states(given)
    assert isinstance(proof, Proof), proof
    assert proof.format.nbytes == LAYERS * STATE_BYTES and proof.format.chunk_tokens == 1
    assert all(torch.equal(tensor, was) for tensor, was in zip(given.tensors, before, strict=True))


def with_views(change: Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[torch.Tensor, ...]]) -> StateGroup:
    """A group whose last layer has other views."""
    given = group()
    return replace(given, views=(*given.views[:-1], change(given.views[-1], given.tensors[-1])))


def _shifted(views: tuple[torch.Tensor, ...], page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = page.squeeze(dim=(1, 2))
    return views[0], flat[:, 64:PAGE_BYTES].view(torch.float32).view(-1, *SSM)


def _overlapping(views: tuple[torch.Tensor, ...], page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = page.squeeze(dim=(1, 2))
    return views[0], flat[:, 32:160].view(torch.float32).view(-1, *SSM)


def _one_block_on(views: tuple[torch.Tensor, ...], page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return views[0], torch.roll(views[1], 1, 0)


def _short(views: tuple[torch.Tensor, ...], page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return views[:1]


def _transposed(views: tuple[torch.Tensor, ...], page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return views[0].transpose(1, 2), views[1]


@pytest.mark.parametrize("change", [_shifted, _overlapping, _one_block_on, _short, _transposed])
def test_views_of_other_bytes_are_refused(
    change: Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[torch.Tensor, ...]],
) -> None:
    assert isinstance(prove_states(with_views(change)), Refusal)


def test_layers_on_the_same_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the memory through which their states were moved is let go: on a GPU the driver knows it."""
    copiers: list[Any] = []

    def made(*arguments: Any, **options: Any) -> Any:
        copiers.append(make_copier(*arguments, **options))
        return copiers[-1]

    monkeypatch.setattr("kv_cuda.states.make_copier", made)
    tensors, views = engine()
    refused = prove_states(group(tensors=(tensors[0],) * 2, views=(views[0],) * 2))
    assert isinstance(refused, Refusal) and "overlaps other states" in refused.reason
    assert [copier._pool_bytes for copier in copiers] == [{}]


@pytest.mark.parametrize("fields", [{"state_bytes": 200}, {"state_bytes": 160}, {"blocks": 6}, {"blocks": 3}])
def test_a_description_that_does_not_fit_is_refused(fields: dict[str, int]) -> None:
    assert isinstance(prove_states(group(**fields)), Refusal)


def attention(layers: int, coverage: Coverage = ALL) -> LayerGroup:
    """Layers of a plain layout, written by an update that is the layout."""
    heads, dim = 1, 8
    row = heads * dim
    sizes: dict[str, int | str] = {
        "dtype": "float32",
        "itemsize": 4,
        "layers": layers,
        "blocks": BLOCKS,
        "block_tokens": BLOCK_TOKENS,
        "heads": heads,
        "head_dim": dim,
    }
    layout = split_parts("K‖V", block=2 * BLOCK_TOKENS * row, token=2 * dim, head=row, dim=1, value_offset=dim, **sizes)
    storage = torch.zeros(layers, BLOCKS, BLOCK_TOKENS, 2 * dim)

    def update(layer: int, rows: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
        both = torch.cat([rows["k"][:, 0], rows["v"][:, 0]], dim=1)
        storage[layer].view(-1, 2 * dim)[slots] = both

    return LayerGroup(
        tensors=tuple(storage),
        block_tokens=BLOCK_TOKENS,
        blocks=BLOCKS,
        candidates=(layout,),
        opaque=layout,
        origin="test",
        row_dtype=torch.float32,
        row_shape=(heads, dim),
        update=update,
        coverage=coverage,
    )


def bound(*groups: LayerGroup | StateGroup) -> BoundGroups:
    made = bind_groups(groups, "auto", 32)
    assert isinstance(made, BoundGroups), made
    return made


def test_groups_keep_their_coverage_and_table_when_they_are_cut() -> None:
    made = bound(replace(attention(3), numbers=(1, 4, 5)), group())
    assert [(each.coverage, each.table, len(each.tensors), each.numbers) for each in made.groups] == [
        (ALL, 0, 1, (1,)),
        (ALL, 0, 1, (4,)),
        (ALL, 0, 1, (5,)),
        (STATE, 2, 3, ()),
    ]
    assert made.group_bytes == (2048, 2048, 2048, LAYERS * STATE_BYTES)
    assert [shape.block_tokens for shape in made.shapes] == [BLOCK_TOKENS] * 4
    assert made.kv_dtype == "float32" and made.kind == "canonical"


def test_a_cut_groups_copiers_move_each_its_own_layers() -> None:
    made = bound(attention(3), group())
    pool = bytearray(max(made.group_bytes))
    for layer, each in enumerate(made.groups[:3]):
        each.tensors[0][2] = layer + 1
        each.copier.attach("pool", memoryview(pool))
        extent = HostExtent("pool", 0, each.format.nbytes)
        each.copier.store(TransferPlan((Copy(extent, 0, 2 * BLOCK_TOKENS, BLOCK_TOKENS),), 32)).wait()
        each.copier.load(TransferPlan((Copy(extent, 0, 3 * BLOCK_TOKENS, BLOCK_TOKENS),), 32)).wait()
    assert [each.tensors[0][3].unique().tolist() for each in made.groups[:3]] == [[1], [2], [3]]


def test_every_copier_knows_how_far_apart_the_chunks_of_all_groups_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is pinned in slices that no chunk may lie across, and all groups' copiers share them."""
    told: list[int] = []

    def made(*arguments: Any, largest_chunk_bytes: int, **options: Any) -> Any:
        told.append(largest_chunk_bytes)
        return make_copier(*arguments, largest_chunk_bytes=largest_chunk_bytes, **options)

    monkeypatch.setattr("kv_cuda.bind.make_copier", made)
    made_groups = bound(group(), attention(1))
    assert made_groups.group_bytes == (LAYERS * STATE_BYTES, 2048)
    assert told == [2048, 2048]


def test_the_fingerprint_says_what_a_window_is_and_is_unchanged_without_one() -> None:
    plain = bound(attention(2))
    assert plain.fingerprint == plain.formats[0].fingerprint
    windows = [bound(attention(2, Coverage("window", tokens))).fingerprint for tokens in (64, 128)]
    assert len({plain.fingerprint, *windows, bound(attention(2, Coverage("local", 64))).fingerprint}) == 4


def test_a_refused_group_is_named_among_several() -> None:
    refused = bind_groups([attention(2), replace(group(), state_bytes=160)], "auto", 32)
    assert isinstance(refused, Refusal) and refused.reason.startswith("group 2 of this model's layers (state): ")
