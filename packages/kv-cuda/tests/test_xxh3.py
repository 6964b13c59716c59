"""The device's checksum is the one that the host takes, for every length and wherever chunks lie."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import InputError
from kv_core.hashing import checksum_of
from kv_cuda.copy.xxh3 import MIN_BYTES, ChunkSums

CPU = torch.device("cpu")


def rows(count: int, nbytes: int, spare: int, seed: int) -> torch.Tensor:
    """Random bytes, rows at multiples of 16."""
    between = -(-nbytes // 16) * 16 + 16 * spare
    filled = np.random.default_rng(seed).integers(0, 256, (count, between), np.uint8)
    return torch.from_numpy(filled)


def expected(chunks: torch.Tensor, nbytes: int) -> list[bytes]:
    return [xxhash.xxh3_128_digest(row[:nbytes].numpy().tobytes()) for row in chunks]


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.integers(MIN_BYTES, 20_000),
    count=st.integers(1, 3),
    spare=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_hosts_checksum(nbytes: int, count: int, spare: int, seed: int) -> None:
    chunks = rows(count, nbytes, spare, seed)
    assert ChunkSums(CPU, nbytes, count).of(chunks) == expected(chunks, nbytes)


@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 18, 33])
@pytest.mark.parametrize("beyond", [-65, -64, -63, -1, 0, 1, 7, 63, 64, 65])
def test_it_is_right_at_every_edge_of_stripes_blocks_and_tiles(blocks: int, beyond: int) -> None:
    nbytes = 1024 * blocks + beyond
    chunks = rows(1, nbytes, 0, nbytes)
    assert ChunkSums(CPU, nbytes, 1).of(chunks) == expected(chunks, nbytes)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_no_sum_overflows_into_another(byte: int) -> None:
    chunks = torch.full((1, 70_000), byte, dtype=torch.uint8)
    assert ChunkSums(CPU, 70_000, 1).of(chunks) == expected(chunks, 70_000)


def test_the_same_memory_is_summed_anew_each_time() -> None:
    sums = ChunkSums(CPU, 5000, 3)
    for seed, count in ((1, 3), (2, 1), (3, 2)):
        chunks = rows(count, 5000, 1, seed)
        assert sums.of(chunks) == expected(chunks, 5000) == [checksum_of(row[:5000].numpy().data) for row in chunks]


def test_rows_that_the_kernels_could_not_read_are_refused() -> None:
    with pytest.raises(InputError, match=r"chunks of 240 bytes.*of at least 241 bytes"):
        ChunkSums(CPU, 240, 1)
    sums = ChunkSums(CPU, 1000, 2)
    sums.of(torch.zeros(2, 1008, dtype=torch.uint8))
    for wrong in (
        torch.zeros(2, 999, dtype=torch.uint8),
        torch.zeros(2, 1008, dtype=torch.int8),
        torch.zeros(2016, dtype=torch.uint8),
        torch.zeros(2, 2016, dtype=torch.uint8)[:, ::2],
        torch.zeros(2, 1001, dtype=torch.uint8),
        torch.zeros(3, 1008, dtype=torch.uint8),
        torch.zeros(1, 1032, dtype=torch.uint8)[:, 8:],
    ):
        with pytest.raises(InputError, match="rows"):
            sums.of(wrong)


COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kv_cuda.copy.xxh3 import AHEAD, TILE_BLOCKS, fold_blocks, sum_blocks

kernels = {
    "sum_blocks": (sum_blocks, {"TILE": TILE_BLOCKS}, 4),
    "fold_blocks": (fold_blocks, {"AHEAD": AHEAD}, 1),
}
made = {}
for name, (kernel, constants, warps) in kernels.items():
    pointers = {"sums": "*i64", "keys": "*i64", "lanes": "*i64", "chunks": "i64"}
    signature = {one: pointers.get(one, "i32") for one in kernel.arg_names}
    signature |= {constant: "constexpr" for constant in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    for architecture in (80, 90, 100):
        target = GPUTarget("cuda", architecture, 32)
        made[f"{name} {architecture}"] = triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def compiled(compile_kernels: Callable[..., dict[str, str]]) -> dict[str, str]:
    """PTX of both kernels, ahead of time and without a GPU."""
    return compile_kernels(COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_sums_compile_for_every_gpu_and_read_128_bits_at_a_time(
    compiled: dict[str, str], architecture: int
) -> None:
    """A tile is 16 KiB, 128 bytes for each of 128 threads; what else is read, the secret, is one word a thread."""
    ptx = compiled[f"sum_blocks {architecture}"]
    assert f".target sm_{architecture}" in ptx
    reads = re.findall(r"ld\.global\S*", ptx)
    assert len([one for one in reads if re.search(r"\.v(2\.b64|4\.b32)", one)]) == 8
    assert len(reads) == 9


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_fold_compiles_for_every_gpu(compiled: dict[str, str], architecture: int) -> None:
    ptx = compiled[f"fold_blocks {architecture}"]
    assert f".target sm_{architecture}" in ptx
    assert re.search(r"st\.global\S*", ptx)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [MIN_BYTES, 4096, 9001, 4 << 20, 32 << 20])
def test_the_gpu_agrees_with_the_host(nbytes: int) -> None:
    chunks = rows(3, nbytes, 1, nbytes)
    device = torch.device("cuda")
    assert ChunkSums(device, nbytes, 3).of(chunks.to(device)) == expected(chunks, nbytes)
