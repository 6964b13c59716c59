"""Describes SGLang's pools of pages, in host memory and on the device: the bytes of a page, and its copier.

The content of a pool's buffer follows from its shape, never from the engine's flags. Pools of plain K and V or of MLA
latents are stored in the canonical format, which other host layouts and other engines share. Everything else (states of
linear attention, indexers, quantised pairs) is stored as the bytes to which SGLang itself flattens a page, under an
origin that includes everything that these bytes depend on, so that no incompatible engine can read them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from kv_core.errors import ConfigError, InputError
from kv_core.format import ChunkFormat, FormatSetting
from kv_core.transfer import TransferPlan
from kv_cuda import Copier, PagedLayout, PartLayout, make_copier
from kv_cuda.choose import BoundCopier
from kv_cuda.copy.streams import DoneEvent

from kv_sglang import TESTED

_CANONICAL: Final = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
"""Exactly these classes: subclasses store more than that."""
_DONE: Final = DoneEvent()
_PLAIN: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Exactly these classes: subclasses store their rows differently, or more than rows."""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """One host pool: the format of its pages, and how to make a copier for them.

    dtype: of SGLang's elements; pages quantised from different dtypes are never the same.
    page_slots: how many of SGLang's indices one page has. A copier is for one thread at a time: each makes its own.
    one_page: a zeroed tensor of one page as SGLang flattens it, and a copier between that and chunks; None where the
        pool's own methods must be used.
    """

    format: ChunkFormat
    dtype: str
    page_slots: int
    copier: Callable[[], Copier]
    one_page: Callable[[], tuple[torch.Tensor, Copier]] | None


def describe(pool: Any, name: str, wanted: FormatSetting = "auto") -> PoolPages:
    """
    wanted: the format, as in the settings. Pages that only SGLang can flatten are stored verbatim, whatever is wanted.

    Raises:
        ConfigError: this pool's pages cannot be described.
    """
    kind = type(pool).__name__
    plain = getattr(pool, "storage_format_tag", None) is None and getattr(pool, "dcp_size", 1) == 1
    if kind in _CANONICAL and plain and isinstance(pool.kv_buffer, torch.Tensor):
        layout = _canonical(pool, wanted, mla=kind.startswith("MLA"))
        if layout is not None:
            return layout
    if name == "kv" and wanted != "auto":
        raise ConfigError(
            f"format is {wanted}, and this model's pages ({kind}, layout {getattr(pool, 'layout', '?')}) are ones that "
            "only SGLang can read: leave format out"
        )
    return _opaque(pool, name)


def format_of_pages(layout: PagedLayout, wanted: FormatSetting, page_tokens: int) -> ChunkFormat:
    """The format in which pages of this layout are stored.

    Raises:
        ConfigError: the format in the settings is not possible for them.
    """
    try:
        return layout.format_of_rows(wanted, page_tokens)
    except InputError as error:
        raise ConfigError(str(error)) from None


def _canonical(pool: Any, wanted: FormatSetting, *, mla: bool) -> PoolPages | None:
    """None: the layout is not known here, or the buffer does not have its shape."""
    buffer: torch.Tensor = pool.kv_buffer
    row = pool.kv_cache_dim if mla else 2 * pool.head_num * pool.head_dim
    pages = buffer.numel() // (pool.layer_num * pool.page_size * row)
    shape, layout, step = _layout(pool, pages=pages, mla=mla)
    if layout is None or tuple(buffer.shape) != shape or not buffer.is_contiguous():
        return None
    layers = [buffer.view(-1)[number * step :] for number in range(pool.layer_num)]
    _check_addresses(pool, layout, layers)
    described = format_of_pages(layout, wanted, pool.page_size)

    def one_page() -> tuple[torch.Tensor, Copier]:
        one_shape, one, one_step = _layout(pool, pages=1, mla=mla)
        assert one is not None
        flat = torch.zeros(one_shape, dtype=pool.dtype).view(-1)
        return flat, make_copier(one, [flat[number * one_step :] for number in range(pool.layer_num)], described)

    return PoolPages(described, layout.dtype, pool.page_size, lambda: make_copier(layout, layers, described), one_page)


def _layout(pool: Any, *, pages: int, mla: bool) -> tuple[tuple[int, ...], PagedLayout | None, int]:
    """The buffer's shape, its layout, and the distance from one layer's start to the next, in elements."""
    page, layers = pool.page_size, pool.layer_num
    heads, dim = (1, pool.kv_cache_dim) if mla else (pool.head_num, pool.head_dim)
    row, tokens = heads * dim, pages * page
    whole = page * layers * row
    # shape without K and V; strides of block, token and head; distance from one layer to the next
    orders: dict[str, tuple[tuple[int, ...], tuple[int, int, int], int]] = {
        "layer_first": ((layers, tokens, heads, dim), (page * row, row, dim), tokens * row),
        "page_first": ((tokens, layers, heads, dim), (whole, layers * row, dim), row),
        "page_first_direct": ((pages, layers, page, heads, dim), (whole, row, dim), page * row),
    }
    if not mla:
        orders["page_head"] = ((pages, heads, page, layers, dim), (whole, layers * dim, page * layers * dim), dim)
    if pool.layout not in orders:
        return (), None, 0
    shape, (block, token, head), step = orders[pool.layout]
    starts = {"kv": 0} if mla else {"k": 0, "v": pages * whole}
    layout = PagedLayout(
        name=f"SGLang {pool.layout}",
        dtype=str(pool.dtype).removeprefix("torch."),
        itemsize=pool.dtype.itemsize,
        layers=layers,
        blocks=pages,
        block_tokens=page,
        heads=heads,
        head_dim=dim,
        parts=tuple(PartLayout(name, start, block, token, head, 1) for name, start in starts.items()),
    )
    return shape if mla else (2, *shape), layout, step


def _check_addresses(pool: Any, layout: PagedLayout, layers: list[torch.Tensor]) -> None:
    """Check that a page begins where we read it, according to SGLang itself.

    Raises:
        ConfigError: it is elsewhere.
    """
    page = layout.blocks - 1
    slots = torch.arange(page * layout.block_tokens, (page + 1) * layout.block_tokens)
    addresses, _ = pool.get_page_buffer_meta(slots)
    size = layout.itemsize
    # One address per part if a page is one run, else one per layer and part.
    starts = layers if len(addresses) > len(layout.parts) else layers[:1]
    expected = [
        layer.data_ptr() + (part.offset + page * part.block) * size for layer in starts for part in layout.parts
    ]
    if list(addresses) != expected:
        raise ConfigError(
            f"SGLang's host pool in layout {pool.layout} does not store its pages where kv-sglang, tested with SGLang "
            f"{TESTED}, reads them; use that version, or leave out --hicache-storage-backend"
        )


def _opaque(pool: Any, name: str) -> PoolPages:
    try:
        page = pool.get_dummy_flat_data_page()
        slots = int(getattr(pool, "page_size", 1) or 1)
        parts = [
            TESTED,
            name,
            type(pool).__name__,
            getattr(pool, "layout", ""),
            getattr(pool, "storage_format_tag", None) or "",
            str(page.dtype),
            str(slots),
            str(getattr(pool, "layer_num", "")),
            str(getattr(pool, "size_per_token", "")),
            # A page of states is bytes to SGLang, and does not describe the numbers in it.
            *(str(getattr(pool, name, "")) for name in ("dtype", "temporal_dtype", "conv_dtype")),
        ]
    except Exception as error:
        raise ConfigError(f"SGLang's host pool {name} ({type(pool).__name__}) cannot be described: {error}") from error
    described = ChunkFormat(
        kind="blocks",
        parts=("blocks",),
        layers=1,
        chunk_tokens=slots,
        heads=1,
        head_dim=-(-page.nbytes // slots),
        dtype="uint8",
        itemsize=1,
        block_tokens=slots,
        origin="sglang/" + "/".join(parts),
    )
    return PoolPages(described, "uint8", slots, lambda: _FlatPages(pool, page.dtype, page.nbytes), None)


def first_slots(indices: torch.Tensor | None, pages: int, page_slots: int) -> list[int] | None:
    """The first slot of each page; None if the indices are not those of whole pages."""
    if indices is None or indices.numel() != pages * page_slots:
        return None
    table = indices.reshape(pages, page_slots)
    first = table[:, :1]
    if not bool((table == first + torch.arange(page_slots)).all()) or bool((first % page_slots).any()):
        return None
    return [int(slot) for slot in first[:, 0].tolist()]


class _FlatPages:
    """A copier for pages whose structure only SGLang knows: through its own flattening, page by page."""

    is_queued = False
    stores_behind = False

    def __init__(self, pool: Any, dtype: torch.dtype, nbytes: int) -> None:
        self._pool = pool
        self._dtype = dtype
        self._page_bytes = nbytes
        self._pools: dict[str, torch.Tensor] = {}

    def attach(self, pool: str, view: memoryview) -> None:
        self._pools[pool] = torch.frombuffer(view, dtype=torch.uint8)

    def detach(self, pool: str) -> None:
        self._pools.pop(pool, None)

    def load(self, plan: TransferPlan) -> DoneEvent:
        for copy in plan.copies:
            # Cloned, so that the elements are aligned whatever the chunk's size.
            page = self._bytes(copy.extent.pool, copy.extent.offset).clone().view(self._dtype)
            self._pool.set_from_flat_data_page(copy.first_slot, page)
        return _DONE

    def store(self, plan: TransferPlan) -> DoneEvent:
        for copy in plan.copies:
            page = self._pool.get_data_page(copy.first_slot, flat=True).contiguous().view(torch.uint8)
            if page.numel() != self._page_bytes:
                raise InputError(f"a page of {page.numel()} bytes where {self._page_bytes} were described")
            self._bytes(copy.extent.pool, copy.extent.offset).copy_(page)
        return _DONE

    def _bytes(self, pool: str, offset: int) -> torch.Tensor:
        return self._pools[pool][offset : offset + self._page_bytes]


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One pool of the device.

    copier: makes a copier for one thread.
    replicated: every rank has the same bytes (MLA).
    """

    pages: PoolPages
    copier: Callable[[], BoundCopier]
    replicated: bool


def describe_device(pool: Any, page_size: int, wanted: FormatSetting = "auto") -> DevicePool:
    """
    wanted: the format, as in the settings.

    Raises:
        ConfigError: this pool's pages cannot be described.
    """
    kind = type(pool).__name__
    mla = kind.startswith("MLA")
    if kind not in _PLAIN:
        raise _refused(pool, "a pool of this class stores its rows differently")
    if not mla and (pool.kv_cache_layout != "nhd" or getattr(pool, "k_scale_buffer", None) is not None):
        raise _refused(pool, f"its layout is {pool.kv_cache_layout}, or it stores scales beside its rows")
    tensors: list[torch.Tensor] = [*pool.kv_buffer] if mla else [*pool.k_buffer, *pool.v_buffer]
    layers = len(tensors) // (1 if mla else 2)
    rows, heads, dim = tensors[0].shape
    alike = all(each.shape == (rows, heads, dim) and each.is_contiguous() for each in tensors)
    if not alike or rows % page_size or tensors[0].dtype.itemsize != pool.dtype.itemsize:
        raise _refused(pool, f"its tensors are not alike, or not whole pages of {page_size} rows")
    row = heads * dim
    layout = PagedLayout(
        name=f"SGLang {kind}",
        dtype=str(pool.dtype).removeprefix("torch."),
        itemsize=pool.dtype.itemsize,
        layers=layers,
        blocks=rows // page_size,
        block_tokens=page_size,
        heads=heads,
        head_dim=dim,
        parts=tuple(PartLayout(part, 0, page_size * row, row, dim, 1) for part in (["kv"] if mla else ["k", "v"])),
        own_tensors=not mla,
    )
    described = format_of_pages(layout, wanted, page_size)

    copier = partial(make_copier, layout, tensors, described)
    return DevicePool(PoolPages(described, layout.dtype, page_size, copier, None), copier, mla)


def _refused(pool: Any, why: str) -> ConfigError:
    return ConfigError(
        f"SGLang keeps this model's KV in a {type(pool).__name__}, which the linker of kv-sglang, tested with SGLang "
        f"{TESTED}, cannot read: {why}; use the storage of HiCache, `python -m kv_sglang flags` without --linker"
    )
