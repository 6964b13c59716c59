"""Host pools as SGLang has them, without SGLang: the attributes that are read, and its own words on where a page is."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _cache_directory_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LAYERS, PAGES, PAGE, HEADS, DIM = 3, 6, 4, 2, 8


class MHATokenToKVPoolHost:
    """Shapes and addresses of SGLang 0.5.23's class of this name."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32, pages: int = PAGES) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, DIM
        tokens = pages * PAGE
        shapes = {
            "layer_first": (2, LAYERS, tokens, HEADS, DIM),
            "page_first": (2, tokens, LAYERS, HEADS, DIM),
            "page_first_direct": (2, pages, LAYERS, PAGE, HEADS, DIM),
            "page_head": (2, pages, HEADS, PAGE, LAYERS, DIM),
        }
        self.kv_buffer = torch.zeros(shapes[layout], dtype=dtype)

    def row(self, part: int, layer: int, slot: int) -> torch.Tensor:
        """[heads, dim] of one token in one layer: SGLang's own indexing of each shape."""
        buffer, page, offset = self.kv_buffer[part], slot // PAGE, slot % PAGE
        if self.layout == "layer_first":
            return buffer[layer, slot]
        if self.layout == "page_first":
            return buffer[slot, layer]
        if self.layout == "page_first_direct":
            return buffer[page, layer, offset]
        return buffer[page, :, offset, layer]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        parts = [self.kv_buffer[0], self.kv_buffer[1]]
        first = int(indices[0])
        if self.layout == "layer_first":
            addresses = [part[layer, first].data_ptr() for layer in range(LAYERS) for part in parts]
        elif self.layout == "page_first":
            addresses = [part[first].data_ptr() for part in parts]
        else:
            addresses = [part[first // PAGE].data_ptr() for part in parts]
        return addresses, []


class MLATokenToKVPoolHost:
    """The same for latents."""

    def __init__(self, layout: str, dtype: torch.dtype = torch.float32, pages: int = PAGES) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE
        self.layer_num, self.kv_cache_dim = LAYERS, HEADS * DIM
        tokens, dim = pages * PAGE, HEADS * DIM
        shapes = {
            "layer_first": (LAYERS, tokens, 1, dim),
            "page_first": (tokens, LAYERS, 1, dim),
            "page_first_direct": (pages, LAYERS, PAGE, 1, dim),
        }
        self.kv_buffer = torch.zeros(shapes[layout], dtype=dtype)

    def row(self, part: int, layer: int, slot: int) -> torch.Tensor:
        buffer = self.kv_buffer
        if self.layout == "layer_first":
            return buffer[layer, slot]
        return buffer[slot, layer] if self.layout == "page_first" else buffer[slot // PAGE, layer, slot % PAGE]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        first = int(indices[0])
        if self.layout == "layer_first":
            return [self.kv_buffer[layer, first].data_ptr() for layer in range(LAYERS)], []
        at = first if self.layout == "page_first" else first // PAGE
        return [self.kv_buffer[at].data_ptr()], []


class MambaPoolHost:
    """A pool whose pages only SGLang can flatten: two tensors of different dtypes, an odd number of bytes."""

    layout, page_size, layer_num, size_per_token = "layer_first", 1, 2, 22

    def __init__(self) -> None:
        self.kv_buffer = None
        self.conv = torch.zeros(PAGES, 2, dtype=torch.bfloat16)
        self.state = torch.zeros(PAGES, 18, dtype=torch.uint8)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(22, dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return torch.cat([self.conv[index].view(torch.uint8), self.state[index]])

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.conv[index] = page[:4].clone().view(torch.bfloat16)
        self.state[index] = page[4:]


Rows = Callable[[Any, Sequence[int]], torch.Tensor]


@pytest.fixture
def make_pool() -> Callable[..., Any]:
    """make_pool("mha" or "mla" or "mamba", layout, …)."""
    kinds: dict[str, Callable[..., Any]] = {
        "mha": MHATokenToKVPoolHost,
        "mla": MLATokenToKVPoolHost,
        "mamba": MambaPoolHost,
    }
    return lambda kind, *arguments, **named: kinds[kind](*arguments, **named)


@pytest.fixture
def rows_of() -> Rows:
    """[slots, layers, parts, heads, dim] of a pool."""

    def rows(pool: Any, slots: Sequence[int]) -> torch.Tensor:
        parts = range(1 if type(pool).__name__.startswith("MLA") else 2)
        return torch.stack(
            [
                torch.stack([torch.stack([pool.row(part, layer, slot) for part in parts]) for layer in range(LAYERS)])
                for slot in slots
            ]
        )

    return rows
