"""The canary: before the first request, proves that we read and write the engine's cache as the engine does.

A tensor's shape does not say how its content is arranged, and caches come to serve garbage when a layout changes with a
release of the engine. So known rows are written into some blocks by the engine's own cache-update operation, and
every known layout is tried on them in both directions: rows read through it must be the rows written, and rows written
through it must produce the engine's bytes. Exactly one layout must fit. If none does, whole blocks may still be stored
as opaque bytes, provided that an update touches no byte outside its own blocks and that equal rows make equal blocks
wherever they are. The previous content of the blocks is restored. A cache that is written within larger kernels, such
as an index, has no update to try: its whole blocks are stored if the engine's own view of them shows the same bytes.

Here are also the reference gather and scatter of single tokens' rows (`read_rows`, `write_rows`), slow and simple.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kv_core.coverage import ALL, Coverage
from kv_core.errors import InputError
from kv_core.format import ChunkFormat, FormatSetting
from kv_core.log import limited_logger

from kv_cuda.layout import PagedLayout, PartLayout, view_shape

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
    update: None: the engine has none that could be called by itself; then there are no candidates.
    views: without an update, each layer's tensor as the engine's kernels get it, the first axis blocks.
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
    update: EngineUpdate | None
    scales: tuple[tuple[float, float], ...] = ()
    coverage: Coverage = ALL
    table: int = 0
    table_tokens: int = 0
    numbers: tuple[int, ...] = ()
    views: tuple[torch.Tensor, ...] = ()


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
    assert group.update is not None
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
    if group.update is None:
        return _why_others_are_seen(group)
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


def _why_others_are_seen(group: LayerGroup) -> str | None:
    """None if the engine's view of every block is a leading part of the bytes that we copy of it."""
    for tensor, view in zip(group.tensors, group.views, strict=True):
        stride = tensor.stride(0) * tensor.element_size()
        if (view.data_ptr(), view.shape[0]) != (tensor.data_ptr(), group.blocks):
            return "the engine's kernels see other blocks"
        if view.stride(0) * view.element_size() != stride or not view[0].is_contiguous():
            return "the engine's kernels see blocks that are not one run of bytes"
        if not view[0].numel() * view.element_size() <= group.opaque.page_bytes <= stride:
            return f"the engine's kernels see {view[0].numel() * view.element_size()} bytes of a block"
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


def _part_view(layout: PagedLayout, part: PartLayout, tensor: torch.Tensor) -> torch.Tensor:
    """[blocks, token // tile, token % tile, heads, dim // tile, dim % tile] over one layer, in the layout's dtype.

    Raises:
        InputError: the layout is not one of this tensor.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    first, remainder = divmod(int(tensor.storage_offset()) * tensor.element_size(), dtype.itemsize)
    if remainder:
        raise InputError(f"a tensor of layout {layout.name} starts inside an element of {layout.dtype}")
    base = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
    size, stride = view_shape(part, layout.block_tokens, layout.heads, layout.head_dim)
    try:
        return base.as_strided((layout.blocks, *size), (part.block, *stride), first + part.offset)
    except RuntimeError:
        raise InputError(f"layout {layout.name} reaches beyond the tensor's storage") from None


def pages_of(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """[blocks, page bytes] uint8: each block of one layer as bytes. The first axis of `tensor` is blocks.

    Raises:
        InputError: the first axis is not `blocks` long, or a block is not one run of bytes.
    """
    if tensor.shape[0] != blocks:
        raise InputError(f"the tensor has {tensor.shape[0]} blocks, not {blocks}")
    expected = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            raise InputError(f"a block of shape {tuple(tensor.shape[1:])} is not one run of bytes")
        expected *= size
    page = tensor[0].numel() * tensor.element_size()
    base = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return base.as_strided(
        (blocks, page), (tensor.stride(0) * tensor.element_size(), 1), tensor.storage_offset() * tensor.element_size()
    )


@contextmanager
def kept_pages(tensors: Sequence[torch.Tensor], blocks: Iterable[int], count: int) -> Iterator[None]:
    """Restore the content of these blocks in each layer, even where layers share bytes. count: blocks per layer."""
    saved = [(pages_of(tensor, count), block) for tensor in tensors for block in blocks]
    contents = [pages[block].clone() for pages, block in saved]
    try:
        yield
    finally:
        for (pages, block), page in zip(saved, contents, strict=True):
            pages[block] = page


def probe_rows(
    parts: Iterable[str], shape: tuple[int, int, int], *, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Known rows for every part, [tokens, heads, head_dim]: random enough that any mix-up of places shows."""
    generator = torch.Generator().manual_seed(seed)
    return {part: torch.randn(shape, generator=generator).to(dtype).to(device) for part in parts}


def read_rows(
    layout: PagedLayout, tensors: Sequence[torch.Tensor], layer: int, slots: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Rows at `slots` of one layer, [slots, heads, head_dim] for each part.

    Raises:
        InputError: a slot does not exist.
    """
    blocks, offsets = _split(layout, slots)
    rows = {}
    for number, part in enumerate(layout.parts):
        view = _part_view(layout, part, layout.of_part(tensors, number)[layer])
        tile = view.shape[2]
        rows[part.name] = view[blocks, offsets // tile, offsets % tile].flatten(2)
    return rows


def write_rows(
    layout: PagedLayout,
    tensors: Sequence[torch.Tensor],
    layer: int,
    slots: torch.Tensor,
    rows: Mapping[str, torch.Tensor],
) -> None:
    """The inverse of `read_rows`."""
    blocks, offsets = _split(layout, slots)
    for number, part in enumerate(layout.parts):
        view = _part_view(layout, part, layout.of_part(tensors, number)[layer])
        tile, dims = view.shape[2], view.shape[4:]
        view[blocks, offsets // tile, offsets % tile] = rows[part.name].unflatten(-1, dims)  # type: ignore[no-untyped-call]


def _split(layout: PagedLayout, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Torch would count a negative block from the end.
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < layout.blocks * layout.block_tokens:
        raise InputError(f"slots {int(slots.min())} to {int(slots.max())} of {layout.blocks * layout.block_tokens}")
    return slots // layout.block_tokens, slots % layout.block_tokens
