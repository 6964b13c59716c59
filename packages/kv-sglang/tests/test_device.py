"""SGLang's device pools described: the same chunks as its host pools have, and no pool that is not what it seems."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_core.errors import ConfigError
from kv_core.transfer import Copy, HostExtent, TransferPlan
from kv_sglang.pools import describe, describe_device

MakePool = Callable[..., Any]
PAGE, PAGES = 4, 6


class MHATokenToKVPool:
    """What is read of SGLang 0.5.23's class of this name: a tensor a layer for K, and one for V."""

    kv_cache_layout, k_scale_buffer = "nhd", None

    def __init__(self, dtype: torch.dtype = torch.float32, rows: int = PAGES * PAGE, value_dim: int = 8) -> None:
        self.dtype = dtype
        count = 3 * rows * 2 * 8
        self.k_buffer = list(_numbers(count, dtype).view(3, rows, 2, 8).clone())
        self.v_buffer = list(_numbers(3 * rows * 2 * value_dim, dtype).view(3, rows, 2, value_dim).clone() + 1000)


class MLATokenToKVPool:
    def __init__(self) -> None:
        self.dtype = torch.float32
        self.kv_buffer = list(torch.arange(3 * PAGES * PAGE * 16.0).view(3, PAGES * PAGE, 1, 16).clone())


class HND(MHATokenToKVPool):
    """A class of its own, whatever it is derived from."""


def _numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(count).to(dtype)


def chunk_of(pages: Any, page: int) -> bytes:
    pool = bytearray(pages.format.nbytes)
    copier = pages.copier()
    copier.attach("pool", memoryview(pool))
    copier.store(TransferPlan((Copy(HostExtent("pool", 0, len(pool)), 0, page * PAGE, PAGE),), PAGE)).wait()
    copier.detach("pool")
    return bytes(pool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_is_the_chunk_that_the_host_pool_has(make_pool: MakePool, dtype: torch.dtype) -> None:
    device = MHATokenToKVPool(dtype)
    host = make_pool("mha", "page_first", dtype)
    for layer in range(3):
        host.kv_buffer[0][:, layer] = device.k_buffer[layer]
        host.kv_buffer[1][:, layer] = device.v_buffer[layer]
    ours, theirs = describe_device(device, PAGE).pages, describe(host, "kv")
    assert ours.format == theirs.format
    assert ours.dtype == theirs.dtype
    for page in (0, 3, PAGES - 1):
        assert chunk_of(ours, page) == chunk_of(theirs, page)
    assert not describe_device(device, PAGE).replicated


def test_latents_too(make_pool: MakePool) -> None:
    device, host = MLATokenToKVPool(), make_pool("mla", "layer_first")
    host.kv_buffer.copy_(torch.stack(device.kv_buffer))
    ours, theirs = describe_device(device, PAGE), describe(host, "kv")
    assert ours.pages.format == theirs.format
    assert chunk_of(ours.pages, 2) == chunk_of(theirs, 2)
    assert ours.replicated


def test_quantised_when_the_settings_say_so() -> None:
    exact, small = describe_device(MHATokenToKVPool(), PAGE), describe_device(MHATokenToKVPool(), PAGE, "int8")
    assert small.pages.format.kind == "int8"
    assert small.pages.format.nbytes < exact.pages.format.nbytes / 2
    with pytest.raises(ConfigError, match="int8"):
        describe_device(MHATokenToKVPool(torch.uint8), PAGE, "int8")


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (HND(), "of this class"),
        (MHATokenToKVPool(value_dim=4), "not alike"),
        (MHATokenToKVPool(rows=PAGES * PAGE + 1), "not whole pages of 4 rows"),
    ],
)
def test_a_pool_that_is_not_what_it_seems_is_refused_with_the_way_out(pool: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*without --linker"):
        describe_device(pool, PAGE)


@pytest.mark.parametrize("change", [{"kv_cache_layout": "hnd"}, {"k_scale_buffer": [torch.zeros(1)]}])
def test_another_order_or_scales_are_refused(change: dict[str, Any]) -> None:
    pool = MHATokenToKVPool()
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(ConfigError, match="its layout is"):
        describe_device(pool, PAGE)


def test_a_page_has_as_many_bytes_as_its_rows() -> None:
    pages = describe_device(MHATokenToKVPool(), PAGE).pages
    assert pages.format.nbytes == math.prod((2, 3, PAGE, 2, 8)) * 4
    assert pages.page_slots == PAGE
