"""Chunks in one byte an element: what comes back is within the documented bound, of every layout, by every copier.

The way back is written down here a second time, from docs/formats/quantised.md alone.
"""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import CopyFailed, InputError
from kv_core.format import QUANTISED, ChunkFormat
from kv_core.transfer import Copy, HostExtent, TransferPlan, plan_transfer
from kv_cuda import CpuCopier, PagedLayout, make_copier, read_rows, write_rows
from kv_cuda.copy.gpu import GpuCopier
from kv_cuda.kernels import installed_kernels
from kv_cuda.quantise import LARGEST_SCALE, Codes, QuantisingCopier
from kv_testing.layouts import BLOCKS, TOKENS, SmallCache, small_caches
from kv_testing.pool_memory import pool_memory

Kind = Literal["int8", "fp8"]
CHUNK = 3 * TOKENS
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place."""
EVERY = small_caches()
FLOATS = {name: cache for name, cache in EVERY.items() if cache.layout.dtype in EPSILON}
NHD = FLOATS["NHD, K‖V"]
every_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])
# Where a number lies has nothing to do with how it is encoded.
every_cache = pytest.mark.parametrize(
    ("cache", "kind"),
    [
        pytest.param(cache, kind, id=f"{name}-{kind}")
        for (name, cache), kind in zip(FLOATS.items(), itertools.cycle(["int8", "fp8"]))
    ],
)


@dataclass(frozen=True)
class Maker:
    """Which exact copier is underneath, and where its tensors are."""

    made: type[CpuCopier] | type[GpuCopier]
    device: str

    def take(self, layout: PagedLayout, tensors: list[torch.Tensor], kind: Kind) -> QuantisingCopier:
        exact = self.made(layout, tensors, layout.canonical_format(CHUNK))
        return QuantisingCopier(layout, layout.quantised_format(kind, CHUNK), exact, tensors[0].device)

    def skip_unless_moved(self, layout: PagedLayout) -> None:
        if self.made is GpuCopier and any(part.dim != 1 for part in layout.parts):
            pytest.skip("the kernel does not take rows that are no runs; `make_copier` gives them to torch")


TORCH = Maker(CpuCopier, "cpu")
every_hand = pytest.mark.parametrize(
    "maker",
    [
        pytest.param(TORCH, id="torch"),
        pytest.param(Maker(GpuCopier, "cpu"), id="kernel"),
        pytest.param(Maker(CpuCopier, "cuda"), id="torch on the GPU", marks=pytest.mark.gpu),
        pytest.param(Maker(GpuCopier, "cuda"), id="kernel on the GPU", marks=pytest.mark.gpu),
    ],
)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor as bytes: what lies between the blocks too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def fill(cache: SmallCache, tensors: list[torch.Tensor], seed: int) -> None:
    """Rows of sizes from 10⁻⁴ to 10⁴, some with one number far from the rest, some zero."""
    layout = cache.layout
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(layout.blocks * layout.block_tokens)
    for layer in range(layout.layers):
        rows = {}
        for part in layout.parts:
            shape = (len(slots), layout.heads, layout.head_dim)
            numbers = torch.randn(shape, generator=generator)
            numbers *= 10 ** (torch.rand(shape[:2], generator=generator) * 8 - 4)[..., None]
            numbers[::5, :, 0] *= 300
            numbers[::7] = 0
            rows[part.name] = numbers.clamp(-6e4, 6e4).to(getattr(torch, layout.dtype)).to(tensors[0].device)
        write_rows(layout, tensors, layer, slots.to(tensors[0].device), rows)


def number_of(code: int, kind: str) -> float:
    if kind == "int8":
        return float(np.int8(np.uint8(code)))
    sign, exponent, fraction = -1 if code >> 7 else 1, (code >> 3) & 15, code & 7
    assert (exponent, fraction) != (15, 7), "not a number"
    return sign * (2.0**-9 * fraction if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))


@dataclass(frozen=True)
class Read:
    """By the page. numbers: [parts, layers, tokens, heads, head_dim] float32. factors: of the channels, [parts, layers,
    1, heads, head_dim]. exact: the first tokens that are kept as they are, or none."""

    numbers: np.ndarray
    factors: np.ndarray
    exact: int


def read_chunk(chunk: bytes, described: ChunkFormat, dtype: str) -> Read:
    """dtype: of the engine's numbers."""
    tokens, heads, dims = described.chunk_tokens, described.heads, described.head_dim
    kept = 4 if tokens >= 128 else 0
    table = np.array([number_of(code, described.kind) if code not in (127, 255) or described.kind == "int8" else np.nan
                      for code in range(256)], np.float32)  # fmt: skip
    at, numbers, factors = 0, [], []
    for _ in range(len(described.parts) * described.layers):
        codes = np.frombuffer(chunk, np.uint8, tokens * heads * dims, at).reshape(tokens, heads, dims)
        at += codes.size
        scales = np.frombuffer(chunk, "<f4", tokens * heads, at).reshape(tokens, heads, 1)
        at += 4 * scales.size
        exact_bytes = kept * heads * dims * (4 if dtype == "float32" else 2)
        exact = torch.frombuffer(bytearray(chunk[at : at + exact_bytes] or b"\0" * 4), dtype=getattr(torch, dtype))
        at += exact_bytes
        exponents = np.frombuffer(chunk, np.int8, heads * dims, at).reshape(1, heads, dims)
        at += -(-heads * dims // 4) * 4
        factors.append(np.ldexp(np.float32(1), exponents.astype(np.int32)))
        numbers.append(table[codes] * scales * factors[-1])
        if kept:
            numbers[-1][:kept] = exact.float().numpy().reshape(kept, heads, dims)
    assert at == len(chunk)
    shape = (len(described.parts), described.layers)
    return Read(
        np.stack(numbers).reshape(*shape, tokens, heads, dims), np.stack(factors).reshape(*shape, 1, heads, dims), kept
    )


def bound(rows: np.ndarray, kind: str, dtype: str, factors: np.ndarray) -> np.ndarray:
    """The page's bound on the error of every number. rows: float64, the last axis a row. factors: of its channels."""
    magnitudes = np.abs(rows)
    in_channel = magnitudes / factors
    largest = np.broadcast_to(in_channel.max(-1, keepdims=True), rows.shape)
    if kind == "int8":
        of_codes = largest / 254
    else:
        of_codes = np.where(in_channel >= largest / 28672, in_channel / 16, largest / 458752)
    smallest = 127 if kind == "int8" else 448
    of_codes = np.where(largest <= smallest * 2.0**-60 * (1 + 1e-6), largest, of_codes * (1 + 1e-4)) * factors
    # The last rounding is of what came back, which may be larger than what was stored; float16 has subnormals.
    return of_codes + (magnitudes + of_codes) * EPSILON[dtype] + (2.0**-25 if dtype == "float16" else 0)


def stored(cache: SmallCache, tensors: list[torch.Tensor], slots: list[int]) -> np.ndarray:
    """What the engine holds at these slots, as `read_chunk` gives it, in float64."""
    where = torch.tensor(slots, device=tensors[0].device)
    layers = [read_rows(cache.layout, tensors, layer, where) for layer in range(cache.layout.layers)]
    return np.stack([
        np.stack([rows[part.name].double().cpu().numpy() for rows in layers]) for part in cache.layout.parts
    ])  # fmt: skip


def slots_of(table: list[int]) -> list[int]:
    return [block * TOKENS + offset for block in table for offset in range(TOKENS)]


def chunks_plan(described: ChunkFormat, table: list[int], first: int = 0, last: int = 2 * CHUNK) -> TransferPlan:
    """Tokens of two chunks, in two pools."""
    extents = [HostExtent("a", 4099, described.nbytes), HostExtent("b", 0, described.nbytes)]
    return plan_transfer(extents, table, chunk_tokens=CHUNK, block_tokens=TOKENS, first_token=first, last_token=last)


def pools_for(described: ChunkFormat) -> dict[str, memoryview]:
    """Of which the first chunk begins at an odd byte."""
    return {name: pool_memory(b"\xee" * (2 * 4099 + described.nbytes)) for name in ("a", "b")}


@every_hand
@every_cache
def test_every_number_comes_back_within_the_bound(maker: Maker, kind: Kind, cache: SmallCache) -> None:
    maker.skip_unless_moved(cache.layout)
    described = cache.layout.quantised_format(kind, CHUNK)
    tensors = cache.make(maker.device)
    fill(cache, tensors, 1)
    before = [raw(tensor).clone() for tensor in tensors]
    copier, pools = maker.take(cache.layout, tensors, kind), pools_for(described)
    for name, pool in pools.items():
        copier.attach(name, pool)
    table = random.Random(3).sample(range(BLOCKS), 6)
    event = copier.store(chunks_plan(described, table))
    event.wait()
    assert event.done()
    assert all(torch.equal(raw(tensor), kept) for tensor, kept in zip(tensors, before, strict=True))
    there, back = [5, 2, 0, 6, 1, 4], cache.make(maker.device)
    loader = maker.take(cache.layout, back, kind)
    for name, pool in pools.items():
        loader.attach(name, pool)
    loader.load(chunks_plan(described, there)).wait()
    for number, (name, offset) in enumerate((("a", 4099), ("b", 0))):
        around = bytes(pools[name][:offset]) + bytes(pools[name][offset + described.nbytes :])
        assert set(around) == {0xEE}
        chunk = read_chunk(bytes(pools[name][offset : offset + described.nbytes]), described, cache.layout.dtype)
        blocks = slice(3 * number, 3 * number + 3)
        given = stored(cache, tensors, slots_of(table[blocks]))
        assert given.any()
        assert (np.abs(chunk.numbers - given) <= bound(given, kind, "float32", chunk.factors)).all()
        loaded = stored(cache, back, slots_of(there[blocks]))
        assert (np.abs(loaded - given) <= bound(given, kind, cache.layout.dtype, chunk.factors)).all()
        assert (loaded[given.max(-1) == given.min(-1)] == 0).all()  # rows of zeros


@every_hand
@every_cache
def test_a_load_of_a_part_writes_exactly_its_tokens_and_exactly_what_the_page_says(
    maker: Maker, kind: Kind, cache: SmallCache
) -> None:
    maker.skip_unless_moved(cache.layout)
    layout = cache.layout
    described = layout.quantised_format(kind, CHUNK)
    pools = pools_for(described)
    source = cache.make()
    fill(cache, source, 2)
    writer = TORCH.take(layout, source, kind)
    for name, pool in pools.items():
        writer.attach(name, pool)
    writer.store(chunks_plan(described, [0, 1, 2, 3, 4, 5])).wait()
    kept = {name: bytes(pool) for name, pool in pools.items()}
    chunks = [
        read_chunk(kept[name][at : at + described.nbytes], described, layout.dtype).numbers
        for name, at in (("a", 4099), ("b", 0))
    ]
    prompt = torch.from_numpy(np.concatenate(chunks, 2)).to(getattr(torch, layout.dtype))
    for seed in range(6 if maker == TORCH else 2):
        chance = random.Random(seed)
        table = chance.sample(range(BLOCKS), 6)
        first = chance.randrange(0, 2 * CHUNK - 1)
        last = chance.randrange(first + 1, 2 * CHUNK + 1)
        ours, expected = cache.make(maker.device), cache.make()
        for tensors in (ours, expected):
            for tensor in tensors:
                raw(tensor).fill_(0x11)
        copier = maker.take(layout, ours, kind)
        for name, pool in pools.items():
            copier.attach(name, pool)
        copier.load(chunks_plan(described, table, first, last)).wait()
        slots = torch.tensor(slots_of(table)[first:last])
        for layer in range(layout.layers):
            rows = {part.name: prompt[number, layer, first:last] for number, part in enumerate(layout.parts)}
            write_rows(layout, expected, layer, slots, rows)
        for loaded, wanted in zip(ours, expected, strict=True):
            assert torch.equal(raw(loaded).cpu(), raw(wanted))
        assert {name: bytes(pool) for name, pool in pools.items()} == kept


def numbers(dtype: str) -> st.SearchStrategy[float]:
    """Every finite number of the dtype that the scales reach, mostly of a size that KV has."""
    largest = {"float32": 1e37, "bfloat16": 1e37, "float16": 65504.0}[dtype]
    return st.one_of(st.floats(-8, 8), st.just(0.0), st.floats(-largest, largest))


def encoded(rows: torch.Tensor, kind: Kind, *, may_compile: bool = True) -> tuple[bytes, torch.Tensor, float]:
    """The bytes of a chunk of one layer of one part with one head, what they come back as, and its largest magnitude
    divided by the largest code.

    rows: [tokens, head_dim]
    """
    tokens, dims = rows.shape
    dtype = str(rows.dtype).removeprefix("torch.")
    exact = ChunkFormat("canonical", ("kv",), 1, tokens, 1, dims, dtype, rows.itemsize)
    described = replace(exact, kind=kind, dtype=QUANTISED[kind], itemsize=1, exact_itemsize=rows.itemsize)
    codes = Codes(exact, described, torch.device("cpu"), may_compile=may_compile)
    chunk, largest = torch.zeros(described.nbytes, dtype=torch.uint8), torch.zeros(())
    codes.encode(rows.contiguous().view(torch.uint8).view(-1), chunk, largest)
    back = torch.zeros(exact.nbytes, dtype=torch.uint8)
    codes.decode(chunk, back, 0, tokens)
    return chunk.numpy().tobytes(), back.view(rows.dtype).view(rows.shape), float(largest)


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kind=st.sampled_from(["int8", "fp8"]), dtype=st.sampled_from(sorted(EPSILON)))
def test_no_row_of_numbers_breaks_the_bound(data: st.DataObject, kind: Kind, dtype: str) -> None:
    dims = data.draw(st.sampled_from([4, 8, 12]))
    row = st.lists(numbers(dtype), min_size=dims, max_size=dims)
    size = data.draw(st.sampled_from([1.0, 1.0, 1e-20, 1e-30, 1e-40]))
    drawn = np.array(data.draw(st.lists(row, min_size=1, max_size=4))) * size
    rows = torch.from_numpy(drawn).to(getattr(torch, dtype))
    given_rows = rows.double().numpy()
    chunk, back, largest = encoded(rows, kind)
    errors = np.abs(back.double().numpy() - given_rows)
    exponents = np.frombuffer(chunk, np.int8, dims, rows.numel() + 4 * len(rows))
    factors = np.ldexp(1.0, exponents.astype(np.int32))
    peaks = np.abs(given_rows).max(0)
    are_alike = (exponents == exponents[0]).all()
    least = factors / (4 if are_alike else 2)
    # No exponent is below -40, however small the numbers; channels that are alike share one at most 1 above that.
    smallest = -39 if are_alike else -40
    assert (((peaks <= factors) & ((peaks >= least) | (exponents <= smallest))) | (exponents == 120)).all()
    assert not are_alike or peaks.max() >= factors[0] / 2 or exponents[0] in (-40, 120)
    # float32 and bfloat16 have numbers below what is kept, where half a unit in the last place is no part of a number.
    assert (errors <= bound(given_rows, kind, dtype, factors)).all()
    assert (back[(rows == 0).all(-1)] == 0).all()
    greatest = np.abs(given_rows).max() / (127 if kind == "int8" else 448)
    assert largest == pytest.approx(greatest, rel=1e-5, abs=2.0**-100)


@every_kind
@pytest.mark.parametrize("may_compile", [False, True])
def test_channels_that_are_alike_share_an_exponent_and_one_that_is_not_has_its_own(
    kind: Kind, may_compile: bool
) -> None:
    alike = torch.tensor([[3.0, -5.0, 2.5, 7.0], [1.0, 2.0, -2.25, 0.5]], dtype=torch.bfloat16)
    for outlier, exponents in ((7.0, [3, 3, 3, 3]), (9.0, [2, 3, 2, 4])):
        rows = alike.clone()
        rows[0, 3] = outlier
        chunk, _, _ = encoded(rows, kind, may_compile=may_compile)
        assert list(np.frombuffer(chunk, np.int8, 4, rows.numel() + 4 * len(rows))) == exponents


@pytest.mark.skipif(installed_kernels() is None, reason="there is no C compiler: none were compiled")
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.sampled_from([1, 2, 7, 130]), heads=st.integers(1, 3))
def test_what_runs_in_c_makes_the_same_bytes_as_torch(seed: int, tokens: int, heads: int) -> None:
    """Of any bits, and of numbers such as keys are; and refuses the same."""
    chance = np.random.default_rng(seed)
    dims = int(chance.choice([4, 12, 64, 100]))
    exact = ChunkFormat("canonical", ("k", "v"), 2, tokens, heads, dims, "bfloat16", 2)
    described = replace(exact, kind="int8", dtype="int8", itemsize=1, exact_itemsize=2)
    bits = chance.integers(0, 1 << 16, (4, tokens, heads, dims), dtype=np.uint16)
    if seed % 4:  # mostly of exponents that KV has, with a channel that is far larger; sometimes of any that are finite
        least, most = (100, 130) if seed % 4 > 1 else (0, 252)
        bits = bits & 0x807F | chance.integers(least, most, bits.shape, dtype=np.uint16) << 7
        if seed % 3:
            bits[..., 0] = bits[..., 0] & 0x807F | min(most, 140) << 7
            bits[0, :, :, 1] = 0
    source = torch.from_numpy(bits.view(np.uint8).reshape(-1))
    first = int(chance.integers(0, tokens))
    last = int(chance.integers(first, tokens)) + 1
    made = []
    for may_compile in (False, True):
        codes = Codes(exact, described, torch.device("cpu"), may_compile=may_compile)
        chunk, largest = torch.full((described.nbytes,), 0xA5, dtype=torch.uint8), torch.zeros(())
        codes.encode(source, chunk, largest)
        back = torch.full_like(source, 0xA5)
        if float(largest) <= LARGEST_SCALE:
            codes.decode(chunk, back, first, last)
            made.append((chunk, back, largest))
        else:
            made.append((back, back, torch.tensor(np.inf)))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    if described.exact_tokens and float(made[0][2]) < np.inf:
        kept = [one.view(torch.int16).view(bits.shape)[:, first : min(last, 4)] for one in (made[1][1], source)]
        assert torch.equal(*kept)


@every_kind
@pytest.mark.parametrize("dtype", sorted(EPSILON))
def test_numbers_that_are_codes_already_come_back_exactly(kind: Kind, dtype: str) -> None:
    """All of them, by a scale of 1 and by one of a thousandth part of two."""
    every = [number_of(code, kind) for code in range(256) if kind == "int8" or code & 127 != 127]
    every = [number for number in every if number != -128]
    for scale in (1.0, 2.0**-9):
        row = torch.tensor(every + [0.0] * (-len(every) % 4))
        rows = torch.stack((row, torch.full_like(row, max(every)))).mul(scale).to(getattr(torch, dtype))
        if dtype == "float16" and kind == "fp8" and scale < 1:
            rows[rows.abs() < 2.0**-14] = 0  # float16's subnormals have not all of them
        _, back, largest = encoded(rows, kind)
        assert largest == scale
        assert torch.equal(back, rows)


@every_kind
def test_the_page_s_example_is_what_is_written(kind: Kind) -> None:
    page = (Path(__file__).parents[3] / "docs" / "formats" / "quantised.md").read_text(encoding="utf-8")
    examples = re.findall(
        r"^`(\w+)`, with .* back as ([^;:]*) and zeros:\n\n```\n([0-9a-f ]+)\n```", page, re.MULTILINE
    )
    ((back_text, hexadecimal),) = [(back, bytes_) for name, back, bytes_ in examples if name == kind]
    chunk, back, _ = encoded(torch.tensor([[1.0, -0.25, 0.3, 0.001], [0.0] * 4]), kind)
    assert chunk.hex(" ") == hexadecimal
    said = [float(number) for number in back_text.replace("−", "-").split(", ")]
    assert back[0].tolist() == pytest.approx(said, rel=1e-6)
    assert not back[1].any()


@every_hand
@every_kind
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_what_no_scale_reaches_fails_its_store_and_no_other(maker: Maker, kind: Kind, bad: float) -> None:
    """One number among all that are stored; the next store is as good as ever."""
    described = NHD.layout.quantised_format(kind, CHUNK)
    tensors = NHD.make(maker.device)
    fill(NHD, tensors, 3)
    copier, pools = maker.take(NHD.layout, tensors, kind), pools_for(described)
    for name, pool in pools.items():
        copier.attach(name, pool)
    plan = chunks_plan(described, [0, 1, 2, 3, 4, 5])
    copier.store(plan).wait()
    good = bytes(pools["a"][4099:][: described.nbytes]), bytes(pools["b"])
    place = tensors[1].view(-1)[TOKENS * 3 * NHD.layout.page_elements // TOKENS + 5 :][:1]
    kept = place.clone()
    place.fill_(bad)
    event = copier.store(plan)
    for ask in (event.wait, event.done, event.wait):
        with pytest.raises(CopyFailed, match=r"an infinity, a NaN or a number too large"):
            ask()
    place.copy_(kept)
    copier.store(plan).wait()
    assert (bytes(pools["a"][4099:][: described.nbytes]), bytes(pools["b"])) == good


def test_two_stores_are_judged_each_by_its_own_numbers() -> None:
    """Asked in the other order than they were made."""
    described = NHD.layout.quantised_format("int8", CHUNK)
    tensors = NHD.make()
    copier = TORCH.take(NHD.layout, tensors, "int8")
    for name, pool in pools_for(described).items():
        copier.attach(name, pool)
    tensors[0].fill_(float("nan"))
    bad = copier.store(chunks_plan(described, [0, 1, 2, 3, 4, 5]))
    tensors[0].zero_()
    good = copier.store(chunks_plan(described, [0, 1, 2, 3, 4, 5]))
    good.wait()
    with pytest.raises(CopyFailed):
        bad.wait()
    good.wait()


@every_hand
def test_more_chunks_than_staging_holds(maker: Maker) -> None:
    """Five, each of the same blocks but its own bytes: the staging turns, and nothing is taken before it is there."""
    described = NHD.layout.quantised_format("int8", TOKENS)
    layout, tensors = NHD.layout, NHD.make(maker.device)
    fill(NHD, tensors, 4)
    exact = maker.made(layout, tensors, layout.canonical_format(TOKENS))
    copier = QuantisingCopier(layout, described, exact, tensors[0].device)
    pool = pool_memory(5 * described.nbytes)
    copier.attach("pool", pool)
    extents = [HostExtent("pool", number * described.nbytes, described.nbytes) for number in range(5)]

    def plan(table: list[int]) -> TransferPlan:
        return plan_transfer(
            extents, table, chunk_tokens=TOKENS, block_tokens=TOKENS, first_token=0, last_token=5 * TOKENS
        )

    given_rows = stored(NHD, tensors, slots_of([6, 5, 4, 3, 2]))
    copier.store(plan([6, 5, 4, 3, 2])).wait()
    for tensor in tensors:
        raw(tensor).zero_()
    copier.load(plan([0, 2, 4, 6, 1])).wait()
    back = stored(NHD, tensors, slots_of([0, 2, 4, 6, 1]))
    chunks = [bytes(pool[at : at + described.nbytes]) for at in range(0, len(pool), described.nbytes)]
    factors = [read_chunk(chunk, described, layout.dtype).factors.repeat(TOKENS, 2) for chunk in chunks]
    assert (np.abs(back - given_rows) <= bound(given_rows, "int8", "float32", np.concatenate(factors, 2))).all()


def test_without_memory_for_staging_only_this_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    described = NHD.layout.quantised_format("int8", CHUNK)
    copier = TORCH.take(NHD.layout, NHD.make(), "int8")
    for name, pool in pools_for(described).items():
        copier.attach(name, pool)
    plan = chunks_plan(described, [0, 1, 2, 3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr("kv_cuda.quantise.Codes", no_memory)
        for copy in (copier.load, copier.store):
            with pytest.raises(CopyFailed, match="no memory left for a copy's buffers: CUDA out of memory"):
                copy(plan)
    empty = torch.empty

    def refused(*arguments: Any, **named: Any) -> torch.Tensor:
        if "pin_memory" in named:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refused)
        with pytest.raises(CopyFailed, match="no memory left for a copy's pinned buffers: CUDA error"):
            copier.store(plan)
    copier.store(plan).wait()
    copier.load(plan).wait()


def test_a_part_of_a_chunk_is_not_stored() -> None:
    """It would take the other tokens' codes from what the staging held before."""
    described = NHD.layout.quantised_format("int8", CHUNK)
    tensors = NHD.make()
    copier, pool = TORCH.take(NHD.layout, tensors, "int8"), bytearray(2 * described.nbytes)
    copier.attach("pool", memoryview(pool))
    whole = Copy(HostExtent("pool", 0, described.nbytes), 0, 0, CHUNK)
    part = Copy(HostExtent("pool", described.nbytes, described.nbytes), 0, 0, CHUNK - 1)
    with pytest.raises(InputError, match=f"stores {CHUNK - 1} tokens of a chunk of {CHUNK}, and format int8 is stored"):
        copier.store(TransferPlan((whole, part), CHUNK))
    assert not any(pool)


GOOD = HostExtent("pool", 0, NHD.layout.quantised_format("int8", CHUNK).nbytes)
SLOTS = BLOCKS * TOKENS


@pytest.mark.parametrize(
    ("copy", "said"),
    [
        (Copy(GOOD, 0, SLOTS - CHUNK + 1, CHUNK), f"a cache with {SLOTS} slots"),
        (Copy(replace(GOOD, pool="other"), 0, 0, CHUNK), "'other' is not attached"),
        (Copy(replace(GOOD, nbytes=GOOD.nbytes - 4), 0, 0, CHUNK), "an extent of"),
        (Copy(replace(GOOD, offset=8), 0, 0, CHUNK), "an extent at 8 of a pool"),
        (Copy(GOOD, 0, CHUNK, CHUNK), "writes .* twice"),
    ],
)
def test_a_plan_that_reaches_outside_is_refused_whole(copy: Copy, said: str) -> None:
    tensors = NHD.make()
    fill(NHD, tensors, 5)
    before = [raw(tensor).clone() for tensor in tensors]
    copier, pool = TORCH.take(NHD.layout, tensors, "int8"), bytearray(GOOD.nbytes)
    copier.attach("pool", memoryview(pool))
    plan = TransferPlan((Copy(GOOD, 0, 0, CHUNK), copy), CHUNK)
    moves: list[Callable[[TransferPlan], object]] = [copier.store, copier.load]
    if "twice" in said:  # the same bytes may be loaded into two places
        moves.remove(copier.load)
    for move in moves:
        with pytest.raises(InputError, match=said):
            move(plan)
    assert not any(pool)
    assert all(torch.equal(raw(tensor), kept) for tensor, kept in zip(tensors, before, strict=True))


def test_a_format_that_is_not_this_layout_s_is_refused() -> None:
    layout, tensors = NHD.layout, NHD.make()
    right = layout.quantised_format("int8", CHUNK)
    for wrong in (layout.canonical_format(CHUNK), replace(right, layers=1), replace(right, heads=1)):
        with pytest.raises(InputError, match="not one of layout NHD with one byte per element"):
            QuantisingCopier(
                layout, wrong, CpuCopier(layout, tensors, layout.canonical_format(CHUNK)), tensors[0].device
            )
    for exact in (CpuCopier, GpuCopier):
        with pytest.raises(InputError, match="the format is not that of layout NHD"):
            exact(layout, tensors, right)
    with pytest.raises(InputError, match="keeps uint8, and format fp8 is made from float32, bfloat16, float16"):
        EVERY["fp8 seen as bytes"].layout.quantised_format("fp8", CHUNK)


@every_kind
def test_make_copier_gives_this_one_for_a_quantised_format(kind: Kind) -> None:
    copier = make_copier(NHD.layout, NHD.make(), NHD.layout.quantised_format(kind, CHUNK))
    assert isinstance(copier, QuantisingCopier)


def test_a_detached_pool_can_be_closed_and_is_unknown() -> None:
    copier, pool = TORCH.take(NHD.layout, NHD.make(), "int8"), bytearray(GOOD.nbytes)
    copier.attach("pool", memoryview(pool))
    plan = TransferPlan((Copy(GOOD, 0, 0, CHUNK),), CHUNK)
    copier.store(plan).wait()
    copier.detach("pool")
    pool.clear()  # raises BufferError while anybody looks at it
    with pytest.raises(InputError, match="not attached"):
        copier.store(plan)
    for refused in (memoryview(b"read-only"), memoryview(bytearray())):
        with pytest.raises(InputError, match="read-only or empty"):
            copier.attach("pool", refused)


@pytest.mark.parametrize("exact", [CpuCopier, GpuCopier])
def test_staging_must_be_bytes_where_the_engine_s_tensors_are(exact: type[CpuCopier] | type[GpuCopier]) -> None:
    copier = exact(NHD.layout, NHD.make(), NHD.layout.canonical_format(CHUNK))
    memory = torch.zeros(1024, dtype=torch.uint8)
    for wrong in (memory.view(torch.int8), memory.view(32, 32), memory[::2], memory.to("meta")):
        with pytest.raises(InputError, match="must be a run of uint8 on cpu"):
            copier.attach_tensor("staging", wrong)
    with pytest.raises(InputError, match="does not begin at"):
        copier.attach_tensor("staging", memory[1:])


@every_kind
def test_once_warm_no_memory_is_taken(kind: Kind) -> None:
    """Of the size of anything that is copied: torch's own bookkeeping of a reduction is a few bytes."""
    described = NHD.layout.quantised_format(kind, CHUNK)
    tensors = NHD.make()
    copier, pools = TORCH.take(NHD.layout, tensors, kind), pools_for(described)
    for name, pool in pools.items():
        copier.attach(name, pool)
    plan = chunks_plan(described, [0, 1, 2, 3, 4, 5])

    def both() -> None:
        copier.store(plan).wait()
        copier.load(plan).wait()

    both()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        both()
    taken = max(event.self_cpu_memory_usage for event in seen.events() or ())
    assert taken < CHUNK * NHD.layout.heads * 4  # the smallest of what is kept: a plane's scales
