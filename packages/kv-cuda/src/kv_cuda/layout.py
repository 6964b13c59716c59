"""Layouts: an engine's paged cache, described as named axes and strides.

A layout does not say where the memory is: the layers' tensors are passed to the copier separately. All numbers are in
elements of the layout's dtype, counted from the first element of a layer's tensor, so one layout serves all layers of a
group. If K and V are in separate tensors (`own_tensors`), they count from the first of those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from kv_core.errors import InputError
from kv_core.format import QUANTISED, ChunkFormat, FormatSetting, QuantisedKind, is_quantised_kind

_QUANTISABLE: Final = ("float32", "bfloat16", "float16")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Tile:
    """An axis split in two, as matrix units need it: [index // size][index % size], each with a stride.

    size: number of indices in a tile, which lie at the axis's own stride.
    stride: distance from one tile to the next, in elements.
    """

    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Where K, V or MLA's latent is: element (block, token, head, dim) is at offset + Σ index × stride.

    token_tile, dim_tile: None if one stride describes that axis. Otherwise index i of it adds (i // size) × tile stride
        + (i % size) × stride.
    """

    name: str
    offset: int
    block: int
    token: int
    head: int
    dim: int
    token_tile: Tile | None = None
    dim_tile: Tile | None = None

    @property
    def is_tiled(self) -> bool:
        return self.token_tile is not None or self.dim_tile is not None

    def is_in_words(self, elements: int) -> bool:
        """Whether the tiles along dim are words of `elements` neighbours, and all else is a whole number of words."""
        dims, tokens = self.dim_tile, self.token_tile
        if self.dim != 1 or dims is None or dims.size != elements:
            return False
        strides = (self.offset, self.block, self.token, self.head, dims.stride, tokens.stride if tokens else 0)
        return not any(stride % elements for stride in strides)

    def in_words(self, elements: int) -> "PartLayout":
        """The same part, counted in words of `elements` neighbours."""
        assert self.is_in_words(elements) and self.dim_tile is not None
        offset, block, token, head = (stride // elements for stride in (self.offset, self.block, self.token, self.head))
        tokens = self.token_tile
        token_tile = Tile(tokens.size, tokens.stride // elements) if tokens else None
        return PartLayout(self.name, offset, block, token, head, self.dim_tile.stride // elements, token_tile)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The layers that share one block table.

    name: the common name of this order of bytes.
    dtype: the elements' dtype, as torch spells it.
    itemsize: size of an element, bytes.
    layers: number of layers that share the table.
    blocks: number of blocks of each layer.
    heads, head_dim: the shape of a token's row in one layer of one part.
    parts: where K and V, or MLA's latent, lie in a block of a layer.
    own_tensors: whether each part has separate tensors. They are passed part by part: K of all layers, then V.
    """

    name: str
    dtype: str
    itemsize: int
    layers: int
    blocks: int
    block_tokens: int
    heads: int
    head_dim: int
    parts: tuple[PartLayout, ...]
    own_tensors: bool = False

    def __post_init__(self) -> None:
        for axis in ("itemsize", "layers", "blocks", "block_tokens", "heads", "head_dim"):
            if getattr(self, axis) < 1:
                raise InputError(f"layout {self.name}: {axis} is {getattr(self, axis)}; it must be at least 1")
        if not self.parts:
            raise InputError(f"layout {self.name} has no parts")
        for part in self.parts:
            for axis in ("offset", "block", "token", "head", "dim"):
                if getattr(part, axis) < 0:
                    raise InputError(f"layout {self.name}: part {part.name} has a negative {axis}")
            self._check_tile(part, "token_tile", part.token_tile, self.block_tokens)
            self._check_tile(part, "dim_tile", part.dim_tile, self.head_dim)
        self._refuse_overlaps()

    def _check_tile(self, part: PartLayout, name: str, tile: Tile | None, length: int) -> None:
        if tile is not None and (tile.size < 1 or tile.stride < 0 or length % tile.size):
            raise InputError(
                f"layout {self.name}: part {part.name} has {name} {tile.size} at {tile.stride}; tiles must divide the "
                f"axis's {length} and must not have a negative stride"
            )

    @property
    def page_elements(self) -> int:
        return len(self.parts) * self.block_tokens * self.heads * self.head_dim

    @property
    def page_bytes(self) -> int:
        return self.page_elements * self.itemsize

    @property
    def blocks_are_runs(self) -> bool:
        """Whether a block of one layer is one run of bytes, and so can be stored verbatim."""
        return not self.own_tensors and int(self._places().max()) + 1 == self.page_elements

    @property
    def tensors(self) -> int:
        """Number of tensors: one per layer, or one per layer and part."""
        return self.layers * (len(self.parts) if self.own_tensors else 1)

    def of_part(self, tensors: Sequence[_T], number: int) -> Sequence[_T]:
        """The tensors of one part, by layer."""
        return tensors[number * self.layers :][: self.layers] if self.own_tensors else tensors

    def canonical_format(self, chunk_tokens: int) -> ChunkFormat:
        """K part then V part, each [layers, tokens, heads, head_dim]: the format that engines share."""
        return ChunkFormat(
            kind="canonical",
            parts=tuple(part.name for part in self.parts),
            layers=self.layers,
            chunk_tokens=chunk_tokens,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            itemsize=self.itemsize,
        )

    def quantised_format(self, kind: QuantisedKind, chunk_tokens: int) -> ChunkFormat:
        """Like `canonical_format`, with one byte per element and scales.

        Raises:
            InputError: the elements are not floating-point numbers of 2 or 4 bytes, or there are too few for aligned
                scales.
        """
        if self.dtype not in _QUANTISABLE:
            raise InputError(
                f"layout {self.name} keeps {self.dtype}, and format {kind} is made from {', '.join(_QUANTISABLE)}"
            )
        exact = self.canonical_format(chunk_tokens)
        return replace(exact, kind=kind, dtype=QUANTISED[kind], itemsize=1, exact_itemsize=exact.itemsize)

    def format_of_rows(self, wanted: FormatSetting, chunk_tokens: int) -> ChunkFormat:
        """The canonical format, or the quantised one if that is wanted.

        Raises:
            InputError: as for `quantised_format`.
        """
        if is_quantised_kind(wanted):
            return self.quantised_format(wanted, chunk_tokens)
        return self.canonical_format(chunk_tokens)

    def blocks_format(self, chunk_tokens: int, origin: str) -> ChunkFormat:
        """Whole blocks as opaque bytes, [layers, blocks, page bytes]. origin: what makes them interchangeable.

        Raises:
            InputError: a block of one layer is not one run of bytes.
        """
        if not self.blocks_are_runs:
            raise InputError(
                f"layout {self.name}: a block of one layer is not one run of {self.page_elements} elements"
            )
        return ChunkFormat(
            kind="blocks",
            parts=("blocks",),
            layers=self.layers,
            chunk_tokens=chunk_tokens,
            heads=1,
            head_dim=self.page_bytes // self.block_tokens,
            dtype="uint8",
            itemsize=1,
            block_tokens=self.block_tokens,
            origin=origin,
        )

    def _places(self) -> npt.NDArray[np.int64]:
        """[parts, block_tokens × heads × head_dim]: the places of the elements of block 0."""
        token, head, dim = np.ogrid[: self.block_tokens, : self.heads, : self.head_dim]
        places = [
            part.offset
            + _along(token, part.token, part.token_tile)
            + head * part.head
            + _along(dim, part.dim, part.dim_tile)
            for part in self.parts
        ]
        return np.stack([place.reshape(-1) for place in places]).astype(np.int64)

    def _refuse_overlaps(self) -> None:
        """No two elements of a layer may share a place. Checked by enumeration, because a page is small."""
        if self.own_tensors:
            for part in self.parts:
                replace(self, parts=(part,), own_tensors=False)  # `__post_init__` checks the part
            return
        page = self._places()
        if len(np.unique(page)) != page.size:
            raise InputError(f"layout {self.name}: two elements of a block overlap")
        same_stride = len({part.block for part in self.parts}) == 1
        for part in self.parts:
            # K and V at different distances are only tried by a canary: their blocks must be at least a page apart.
            overlap = _coincide(page.reshape(-1), part.block, self.blocks) if same_stride else part.block <= page.max()
            if self.blocks > 1 and overlap:
                raise InputError(f"layout {self.name}: the blocks of part {part.name} overlap")


def view_shape(part: PartLayout, block_tokens: int, heads: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Size and stride, in elements, of [token // tile, token % tile, heads, dim // tile, dim % tile] in one block:
    an axis that is not tiled is one tile."""
    tokens = part.token_tile or Tile(block_tokens, 0)
    dims = part.dim_tile or Tile(head_dim, 0)
    size = [block_tokens // tokens.size, tokens.size, heads, head_dim // dims.size, dims.size]
    return size, [tokens.stride, part.token, part.head, dims.stride, part.dim]


def _along(index: npt.NDArray[np.int64], stride: int, tile: Tile | None) -> npt.NDArray[np.int64]:
    return index * stride if tile is None else index // tile.size * tile.stride + index % tile.size * stride


def _coincide(places: npt.NDArray[np.int64], distance: int, blocks: int) -> bool:
    """Whether two of `places`, each repeated `blocks` times at `distance`, are ever the same.

    So it is if two have the same remainder by the distance and are less than `blocks` distances apart.
    """
    if distance < 1:
        return True
    number, remainder = np.divmod(places, distance)
    order = np.lexsort((number, remainder))
    return bool(((np.diff(remainder[order]) == 0) & (np.diff(number[order]) < blocks)).any())


def split_parts(
    name: str, *, block: int, token: int, head: int, dim: int, value_offset: int, **sizes: int | str
) -> PagedLayout:
    """K and V with the same strides, V `value_offset` elements behind K. sizes: the other fields of the layout."""
    parts = (
        PartLayout("k", 0, block, token, head, dim),
        PartLayout("v", value_offset, block, token, head, dim),
    )
    return PagedLayout(name=name, parts=parts, **sizes)  # type: ignore[arg-type]


def transposed_keys(name: str, *, block: int, **sizes: int | str) -> PagedLayout:
    """vLLM's CPU backend: in each head of a block K as [head_dim, token], then V as [token, head_dim]."""
    tokens, dims = int(sizes["block_tokens"]), int(sizes["head_dim"])
    head = 2 * tokens * dims
    parts = (
        PartLayout("k", 0, block, token=1, head=head, dim=tokens),
        PartLayout("v", tokens * dims, block, token=dims, head=head, dim=1),
    )
    return PagedLayout(name=name, parts=parts, **sizes)  # type: ignore[arg-type]


def tiled_keys_and_values(
    name: str, *, block: int, keys: tuple[int, int], values: tuple[int, int], **sizes: int | str
) -> PagedLayout:
    """CPU backends with matrix units: in each head of a block K and then V, both cut into tiles.

    keys: (tokens, dims) of a tile of K, which lies as [token // tokens][dim // dims][token % tokens][dim % dims].
    values: (tokens, dims) of a tile of V: [dim // dims][token // tokens][dim % dims][token % tokens].

    Raises:
        InputError: the tiles do not divide the block or the head.
    """
    tokens, dims = int(sizes["block_tokens"]), int(sizes["head_dim"])
    head = 2 * tokens * dims
    parts = (
        PartLayout(
            "k",
            0,
            block,
            token=keys[1],
            head=head,
            dim=1,
            token_tile=Tile(keys[0], keys[0] * dims),
            dim_tile=Tile(keys[1], keys[0] * keys[1]),
        ),
        PartLayout(
            "v",
            tokens * dims,
            block,
            token=1,
            head=head,
            dim=values[0],
            token_tile=Tile(values[0], values[0] * values[1]),
            dim_tile=Tile(values[1], values[1] * tokens),
        ),
    )
    return PagedLayout(name=name, parts=parts, **sizes)  # type: ignore[arg-type]


def latent(name: str, *, block: int, token: int, **sizes: int | str) -> PagedLayout:
    """MLA: one part, one head."""
    return PagedLayout(name=name, parts=(PartLayout("kv", 0, block, token, token, 1),), **sizes)  # type: ignore[arg-type]
