"""The canary: before the first request, proves that we read and write the engine's cache as the engine does.

A tensor's shape does not say how its content is arranged, and caches come to serve garbage when a layout changes with a
release of the engine. So known rows are written into some blocks by the engine's own cache-update operation, and
every known layout is tried on them in both directions: rows read through it must be the rows written, and rows written
through it must produce the engine's bytes. Exactly one layout must fit. If none does, whole blocks may still be stored
as opaque bytes, provided that an update touches no byte outside its own blocks and that equal rows make equal blocks
wherever they are. The previous content of the blocks is restored.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kv_core.coverage import ALL, Coverage
from kv_core.errors import InputError
from kv_core.format import ChunkFormat, FormatSetting
from kv_core.log import limited_logger

from kv_cuda.layout import PagedLayout
from kv_cuda.reference import kept_pages, pages_of, probe_rows, read_rows, write_rows

_log = limited_logger(__name__)

EngineUpdate = Callable[[int, dict[str, torch.Tensor], torch.Tensor], None]
"""(layer, rows by part as [tokens, heads, head_dim], slots): the engine's own cache update."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the engine's cache cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The layout by which chunks are copied, and the format in which they are stored."""

    layout: PagedLayout
    format: ChunkFormat
    description: str


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table and whose tensors have the same form, as the engine provides them.

    tensors: one per layer. Layers of different groups may share the same bytes; the canary restores what it touches.
    block_tokens: tokens per block of these tensors.
    blocks: number of blocks of each layer.
    candidates: every layout that these tensors could have.
    opaque: a layout that describes only where whole blocks lie, not their content.
    origin: what makes opaque blocks of two engines interchangeable.
    row_dtype: the dtype of the rows that the engine's update takes.
    row_shape: the shape of such a row, (heads, head_dim) per token.
    scales: for each layer of a quantised cache, the divisors of K and V before they are stored. () where the cache
        holds the rows unchanged.
    coverage: which part of a prefix these layers need.
    table: the engine's block table that they use.
    table_tokens: tokens per block of that table, which consists of a whole number of consecutive blocks of the tensors;
        0: the blocks are the same.
    numbers: its layers' numbers in the model, for codecs that treat layers differently; () where the engine does not
        report them.
    """

    tensors: tuple[torch.Tensor, ...]
    block_tokens: int
    blocks: int
    candidates: tuple[PagedLayout, ...]
    opaque: PagedLayout
    origin: str
    row_dtype: torch.dtype
    row_shape: tuple[int, int]
    update: EngineUpdate
    scales: tuple[tuple[float, float], ...] = ()
    coverage: Coverage = ALL
    table: int = 0
    table_tokens: int = 0
    numbers: tuple[int, ...] = ()


def prove(group: LayerGroup, wanted: FormatSetting, chunk_tokens: int) -> Proof | Refusal:
    """Find the layout and the format that prove to be right.

    wanted: the setting `format`. Quantised chunks are made from canonical ones, so the canonical format is proved.
    """
    if group.blocks < 4:
        return Refusal(f"the engine's cache has {group.blocks} blocks, and the canary needs 4")
    fitting = [] if wanted == "blocks" else [layout for layout in group.candidates if _may_fit(group, layout)]
    if len(fitting) == 1:
        (layout,) = fitting
        try:
            chunk_format = layout.format_of_rows(wanted, chunk_tokens)
        except InputError as error:
            return Refusal(str(error))
        return Proof(layout, chunk_format, f"layout {layout.name}, format {chunk_format.kind}")
    if len(fitting) > 1:
        names = ", ".join(layout.name for layout in fitting)
        return Refusal(f"the canary cannot tell the layouts {names} apart in this cache")
    if wanted not in ("auto", "blocks"):
        tried = ", ".join(layout.name for layout in group.candidates) or "none known for this backend"
        return Refusal(
            f"the canary found no layout that fits the engine's cache (tried: {tried}), and format is {wanted}"
        )
    if (why := _why_blocks_cannot(group)) is not None:
        return Refusal(f"the canary found no layout that fits the engine's cache, and {why}")
    chunk_format = group.opaque.blocks_format(chunk_tokens, group.origin)
    return Proof(group.opaque, chunk_format, "whole blocks, format blocks")


def _may_fit(group: LayerGroup, layout: PagedLayout) -> bool:
    try:
        return _fits(group, layout)
    except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        # A layout of another shape: the engine's operation or torch refuses its rows, so it does not fit.
        _log.info("the canary tried layout %s: %s", layout.name, error)
        return False


def _fits(group: LayerGroup, layout: PagedLayout) -> bool:
    """Whether engine and layout agree in every layer and both directions."""
    in_order = torch.arange(group.block_tokens)
    first, second = blocks = [1, group.blocks - 1]
    # A whole block in order, then part of another in random order: a wrong offset, stride or permutation shows.
    scattered = torch.randperm(group.block_tokens, generator=torch.Generator().manual_seed(1))[
        : group.block_tokens // 2 + 1
    ]
    slots = torch.cat([first * group.block_tokens + in_order, second * group.block_tokens + scattered])
    for layer, tensor in enumerate(group.tensors):
        engine_rows, cached_rows = _rows(group, layout, len(slots), layer)
        with kept_pages([tensor], blocks, group.blocks):
            pages = pages_of(tensor, group.blocks)
            pages[blocks] = 0
            group.update(layer, engine_rows, slots.to(tensor.device))
            read = read_rows(layout, group.tensors, layer, slots)
            if any(not _same_bits(read[part], cached_rows[part]) for part in cached_rows):
                return False
            by_engine = pages[blocks]
            pages[blocks] = 0
            write_rows(layout, group.tensors, layer, slots, cached_rows)
            if not torch.equal(pages[blocks], by_engine):
                return False
    return True


def _why_blocks_cannot(group: LayerGroup) -> str | None:
    """None if whole blocks can be stored as opaque bytes, else why not."""
    try:
        return _why_blocks_do_not_stand_alone(group)
    except (RuntimeError, ValueError, LookupError, TypeError, AssertionError) as error:
        return f"its update cannot be tested: {error}"


def _why_blocks_do_not_stand_alone(group: LayerGroup) -> str | None:
    slots = torch.arange(group.block_tokens)
    source, copy = 1, group.blocks - 1
    for layer, tensor in enumerate(group.tensors):
        rows = _rows_of_model(group, group.opaque, group.block_tokens, layer)
        with kept_pages([tensor], (0, source, 2, copy), group.blocks):
            pages = pages_of(tensor, group.blocks)
            neighbours = pages[[0, 2]]
            for block in (source, copy):
                pages[block] = 0
                group.update(layer, rows, (slots + block * group.block_tokens).to(tensor.device))
            if not torch.equal(pages[source], pages[copy]):
                return "equal rows make unequal bytes in different blocks"
            if not bool(pages[source].any()):
                return "an update leaves its blocks as they were"
            if not torch.equal(pages[[0, 2]], neighbours):
                return "an update changes bytes of other blocks"
    return None


def _rows(
    group: LayerGroup, layout: PagedLayout, tokens: int, layer: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Rows for the engine's update, and the rows that its cache then holds by this layout.

    A quantised cache gets numbers that it can hold exactly, so that its content is known without repeating the engine's
    arithmetic.
    """
    if (layout.heads, layout.head_dim) != group.row_shape:
        raise ValueError(f"its rows are {(layout.heads, layout.head_dim)} and the model's are {group.row_shape}")
    rows = _rows_of_model(group, layout, tokens, layer)
    if not group.scales:
        return rows, rows
    exact = {part: _exact_in(values, getattr(torch, layout.dtype)) for part, values in rows.items()}
    scale_of = dict(zip(("k", "v") if len(rows) > 1 else tuple(rows), group.scales[layer], strict=False))
    engine_rows = {part: (values.float() * scale_of[part]).to(group.row_dtype) for part, values in exact.items()}
    return engine_rows, exact


def _rows_of_model(group: LayerGroup, layout: PagedLayout, tokens: int, layer: int) -> dict[str, torch.Tensor]:
    """Rows as the model passes them to its cache."""
    parts, device = [part.name for part in layout.parts], group.tensors[layer].device
    return probe_rows(parts, (tokens, *group.row_shape), seed=layer, dtype=group.row_dtype, device=device)


def _exact_in(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of `dtype` that no rounding mode and no flushing of denormals changes."""
    normal = torch.where(values.abs() < 0.1, torch.ones_like(values), values)
    return normal.to(dtype)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
