"""Describes SGLang's own blocks on the device. Their chunks are those of its host pools, so both integrations share
them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from kv_core.errors import ConfigError
from kv_core.format import FormatSetting
from kv_cuda import PagedLayout, PartLayout, make_copier
from kv_cuda.choose import BoundCopier

from kv_sglang import TESTED
from kv_sglang.pools import PoolPages, format_of_pages

_PLAIN: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""Exactly these classes: subclasses store their rows differently, or more than rows."""


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
