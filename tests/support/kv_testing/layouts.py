"""Small layouts of every kind that engines use, with tensors, for tests."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from kv_cuda.layout import PagedLayout, PartLayout, Tile, latent, split_parts, tiled_keys_and_values, transposed_keys
from numpy.typing import NDArray

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 7, 4, 2, 8


def reach(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """The reference of the error bounds of `int8` and `fp8`: c · m of docs/formats/quantised.md, for each number.

    numbers: of one chunk, [..., tokens, heads, head_dim].
    """
    magnitudes = np.abs(numbers)
    kept = 4 if numbers.shape[-3] >= 128 else 0
    peaks = magnitudes[..., kept:, :, :].max(-3, keepdims=True)
    exponents = np.where(peaks > 0, np.frexp(peaks)[1], -40).clip(-40, 120)
    top = exponents.max(-1, keepdims=True)
    exponents = np.where(top - exponents.min(-1, keepdims=True) <= 1, top, exponents)
    in_channels = np.ldexp(magnitudes, -exponents)
    reached: NDArray[np.float64] = np.ldexp(in_channels.max(-1, keepdims=True), exponents)
    return reached


def place_of(part: PartLayout, block: int, token: int, head: int, dim: int) -> int:
    """The offset of one element, in elements from the start of its tensor: the definition, in integers."""

    def along(index: int, stride: int, tile: Tile | None) -> int:
        return index * stride if tile is None else index // tile.size * tile.stride + index % tile.size * stride

    tokens, dims = along(token, part.token, part.token_tile), along(dim, part.dim, part.dim_tile)
    return part.offset + block * part.block + tokens + head * part.head + dims


class Make(Protocol):
    def __call__(self, device: str = "cpu") -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class SmallCache:
    """A layout and what makes its layers' tensors, zeroed, on a device."""

    layout: PagedLayout
    make: Make


def small_caches() -> dict[str, SmallCache]:
    """By the name of the order of bytes.

    vLLM's FlashAttention, Triton and FlashInfer have NHD, K‖V; FlashInfer on Blackwell has HND, the CPU K transposed.
    """
    page = 2 * TOKENS * HEADS * DIM
    half = page // 2
    apart = {"block": page, "token": HEADS * DIM, "head": DIM, "dim": 1, "value_offset": half}
    side_by_side = {"token": 2 * HEADS * DIM, "head": 2 * DIM, "dim": 1, "value_offset": DIM}
    by_head = {"token": 2 * DIM, "head": 2 * TOKENS * DIM, "dim": 1, "value_offset": DIM}
    shape = (TOKENS, 2 * HEADS * DIM)
    return {
        "K and V apart": SmallCache(split_parts("apart", **apart, **_sizes("float32")), _together(shape)),
        "apart, bfloat16, a storage a layer": SmallCache(
            split_parts("apart", **apart, **_sizes("bfloat16")), _separate(shape, torch.bfloat16)
        ),
        "NHD, K‖V": SmallCache(split_parts("NHD", block=page, **side_by_side, **_sizes("float32")), _together(shape)),
        "HND, K‖V": SmallCache(split_parts("HND", block=page, **by_head, **_sizes("float32")), _together(shape)),
        "all layers of a block together": SmallCache(
            split_parts("BLHNC", block=LAYERS * page, **by_head, **_sizes("float32")), _interleaved(shape)
        ),
        "fp8 seen as bytes": SmallCache(
            split_parts("HND", block=page, **by_head, **_sizes("uint8")), _together(shape, torch.uint8)
        ),
        "NHD, K‖V, float16": SmallCache(
            split_parts("NHD", block=page, **side_by_side, **_sizes("float16")), _together(shape, torch.float16)
        ),
        "NHD, fp8 seen as bytes": SmallCache(
            split_parts("NHD", block=page, **side_by_side, **_sizes("uint8")), _together(shape, torch.uint8)
        ),
        "K of all blocks, then V": SmallCache(
            split_parts("2NHD", **(apart | {"block": half, "value_offset": BLOCKS * half}), **_sizes("float32")),
            _together((2, half)),
        ),
        "all layers of a block together, NHD": SmallCache(
            split_parts("BLNHC", block=LAYERS * page, **side_by_side, **_sizes("float32")), _interleaved(shape)
        ),
        **_in_bytes(),
        "K transposed": SmallCache(transposed_keys("CPU", block=page, **_sizes("float32")), _together(shape)),
        "K transposed, bfloat16, a storage a layer": SmallCache(
            transposed_keys("CPU", block=page, **_sizes("bfloat16")), _separate(shape, torch.bfloat16)
        ),
        **_tiled(page, shape),
        "MLA": SmallCache(
            latent("MLA", block=TOKENS * DIM, token=DIM, **_sizes("float32", heads=1)), _together((TOKENS, DIM))
        ),
        "blocks further apart than a page": SmallCache(
            split_parts("padded", **(apart | {"block": page + 24}), **_sizes("float32")), _padded(page, 24)
        ),
        **_host_pools(),
        **_device_pools(),
    }


def _in_bytes() -> dict[str, SmallCache]:
    """A layout whose elements have scales next to them, as one byte per element: opaque to us."""
    scaled = 128 + 4  # a head's numbers and their scale, as vLLM keeps int8 and fp8 a token and head
    latent_bytes = 656  # DeepSeek's packed fp8: 512 numbers, 4 scales, 64 numbers of bfloat16
    strides = {"block": 2 * TOKENS * HEADS * scaled, "dim": 1, "value_offset": scaled}
    orders = {
        "NHD": {"token": 2 * HEADS * scaled, "head": 2 * scaled},
        "HND": {"token": 2 * scaled, "head": 2 * TOKENS * scaled},
    }
    return {
        f"{name}, K‖V with a scale each": SmallCache(
            split_parts(name, **strides, **order, **_sizes("uint8", dim=scaled)),
            _together((TOKENS, 2 * HEADS * scaled), torch.uint8),
        )
        for name, order in orders.items()
    } | {
        "MLA, packed fp8": SmallCache(
            latent("MLA", block=TOKENS * latent_bytes, token=latent_bytes, **_sizes("uint8", 1, latent_bytes)),
            _together((TOKENS, latent_bytes), torch.uint8),
        )
    }


def _tiled(page: int, shape: tuple[int, ...]) -> dict[str, SmallCache]:
    """vLLM's blocks on CPUs with matrix units, in smaller tiles: AMX's and, with other tiles, NEON's."""
    amx, neon = ((2, 2), (2, 4)), ((2, 4), (4, 2))
    return {
        f"tiles, {name}, {dtype}": SmallCache(
            tiled_keys_and_values(name, block=page, keys=keys, values=values, **_sizes(dtype)),
            _separate(shape, getattr(torch, dtype)),
        )
        for name, (keys, values), dtype in (
            ("AMX", amx, "bfloat16"),
            ("AMX", amx, "float8_e5m2"),
            ("NEON", neon, "bfloat16"),
        )
    }


def _host_pools() -> dict[str, SmallCache]:
    """SGLang's host pools: K of everything and then V, and in each the order that the name says."""
    tokens, row = BLOCKS * TOKENS, HEADS * DIM
    everything = LAYERS * tokens * row
    pages = {
        "layer first": ((LAYERS, tokens, HEADS, DIM), {"block": TOKENS * row, "token": row, "head": DIM}, tokens * row),
        "page first": (
            (tokens, LAYERS, HEADS, DIM),
            {"block": TOKENS * LAYERS * row, "token": LAYERS * row, "head": DIM},
            row,
        ),
        "page first direct": (
            (BLOCKS, LAYERS, TOKENS, HEADS, DIM),
            {"block": TOKENS * LAYERS * row, "token": row, "head": DIM},
            TOKENS * row,
        ),
        "page head": (
            (BLOCKS, HEADS, TOKENS, LAYERS, DIM),
            {"block": TOKENS * LAYERS * row, "token": LAYERS * DIM, "head": TOKENS * LAYERS * DIM},
            DIM,
        ),
    }
    return {
        f"SGLang, {name}": SmallCache(
            split_parts(name, dim=1, value_offset=everything, **strides, **_sizes("float32")), _host_pool(shape, layer)
        )
        for name, (shape, strides, layer) in pages.items()
    }


def _device_pools() -> dict[str, SmallCache]:
    """SGLang's pools on the device: K and V of each layer in a tensor of its own, or MLA's latents in one."""
    row = HEADS * DIM
    strides = {"block": TOKENS * row, "token": row, "head": DIM, "dim": 1, "value_offset": 0}
    return {
        f"SGLang on the device, {dtype}": SmallCache(
            split_parts("NHD", **strides, own_tensors=True, **_sizes(dtype)),
            _separate((TOKENS, row), getattr(torch, dtype), parts=2),
        )
        for dtype in ("float32", "bfloat16")
    }


def _sizes(dtype: str, heads: int = HEADS, dim: int = DIM) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "itemsize": getattr(torch, dtype).itemsize,
        "layers": LAYERS,
        "blocks": BLOCKS,
        "block_tokens": TOKENS,
        "heads": heads,
        "head_dim": dim,
    }


def _together(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Make:
    return lambda device="cpu": list(torch.zeros(LAYERS, BLOCKS, *shape, dtype=dtype, device=device))


def _separate(shape: tuple[int, ...], dtype: torch.dtype, parts: int = 1) -> Make:
    return lambda device="cpu": [torch.zeros(BLOCKS, *shape, dtype=dtype, device=device) for _ in range(parts * LAYERS)]


def _interleaved(shape: tuple[int, ...]) -> Make:
    return lambda device="cpu": list(torch.zeros(BLOCKS, LAYERS, *shape, device=device).transpose(0, 1))


def _host_pool(shape: tuple[int, ...], layer: int) -> Make:
    """Layers that begin `layer` elements apart in one storage of K and V."""

    def make(device: str = "cpu") -> list[torch.Tensor]:
        both = torch.zeros(2, *shape, device=device).view(-1)
        return [both[number * layer :] for number in range(LAYERS)]

    return make


def _padded(page: int, padding: int) -> Make:
    return lambda device="cpu": list(torch.zeros(LAYERS, BLOCKS, page + padding, device=device)[:, :, :page])
