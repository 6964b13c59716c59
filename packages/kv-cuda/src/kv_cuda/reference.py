"""Reference gather and scatter of single tokens' rows in a paged cache: slow and simple, for the canary and the tests.

All six axes of a part are in every view: an axis that is not tiled is one tile, [1, length].
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from kv_core.errors import InputError

from kv_cuda.layout import PagedLayout, PartLayout, Tile


def view_shape(part: PartLayout, block_tokens: int, heads: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Size and stride, in elements, of [token // tile, token % tile, heads, dim // tile, dim % tile] in one block."""
    tokens = part.token_tile or Tile(block_tokens, 0)
    dims = part.dim_tile or Tile(head_dim, 0)
    size = [block_tokens // tokens.size, tokens.size, heads, head_dim // dims.size, dims.size]
    return size, [tokens.stride, part.token, part.head, dims.stride, part.dim]


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
