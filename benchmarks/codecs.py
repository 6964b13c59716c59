"""Codecs of tiers on numbers such as keys and values are: size, and speed on one core.

    .venv/bin/python benchmarks/codecs.py [--json] [--recorded FILE]

The numbers are drawn for each channel from a normal distribution of its own width. `limit` of speeds is a copy of the
same bytes, with a codec in C as a comparison (zstd at level 1) in rows of their own. Codecs with kernels are measured
with each kind that is here; targets are for the fastest. `int8` is the chunk format, in C and by torch. `kvtc` is
calibrated by what it encodes, so its speed means something here and its ratio does not. --recorded: a file of real keys
and values in bfloat16 instead, in the canonical order; not for `kvtc`.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from kv_codecs.calibration import Learning
from kv_codecs.floats import FloatsCodec
from kv_codecs.kernels import CompiledKernels
from kv_codecs.kvtc import KvtcCodec
from kv_codecs.progressive import ProgressiveCodec
from kv_codecs.zstd import make_zstd_codec
from kv_core.format import ChunkFormat
from kv_cuda.quantise import Codes
from kv_testing.numpy_kernels import kernels_here
from kv_tiers.codec import APPROXIMATE_SHARE, Codec, DecodesPrefixes
from kv_tiers.tier import ANY_CHUNKS

from benchmarks._report import Row, median_s, parser, report

LAYERS, TOKENS, CHANNELS = 16, 256, 512
"""Of one part: an 8 MiB chunk of bfloat16."""
LEAST_RATIO = {"bfloat16": 1.4, "float16": 1.1, "float32": 1.15}
LEAST_ENCODE_GBS, LEAST_DECODE_GBS = 0.8, 2.0
"""Of bfloat16; docs/performance.md says what is reached."""
LEAST_INT8_GBS = 5.0
HEADS, HEAD_DIM = 4, 128


def drawn(dtype: str) -> bytes:
    chance = np.random.default_rng(7)
    widths = np.exp(chance.normal(0, 1, (2 * LAYERS, 1, CHANNELS))).astype(np.float32)
    values = chance.normal(0, 1, (2 * LAYERS, TOKENS, CHANNELS)).astype(np.float32) * widths
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def room(nbytes: int) -> memoryview:
    """Memory that begins with a page, as a pool's slots do."""
    return memoryview(mmap.mmap(-1, nbytes))


def rows_of(codec: Codec, dtype: str, chunk: bytes, kernels: str = "", *, judged: bool = False) -> list[Row]:
    """kernels: their name. judged: it has targets."""
    out, back = room(len(chunk)), room(len(chunk))
    source = memoryview(chunk)
    size = codec.encode(source, out)
    if size is None:
        raise SystemExit(f"{codec.name} made nothing smaller")
    codec.decode(out[:size], back)
    if back != source:
        raise SystemExit(f"{codec.name} made other bytes: the figures would mean nothing")
    copied = np.empty(len(chunk), np.uint8)
    view = np.frombuffer(chunk, np.uint8)
    limit = len(chunk) / median_s(lambda: np.copyto(copied, view)) / 1e9
    encode = len(chunk) / median_s(lambda: codec.encode(source, out)) / 1e9
    decode = len(chunk) / median_s(lambda: codec.decode(out[:size], back)) / 1e9
    bfloat16 = judged and dtype == "bfloat16"
    ratio = len(chunk) / size
    named = f"{codec.name}, {dtype}" + (f", {kernels}" if kernels else "")
    first_parts = []
    if isinstance(codec, DecodesPrefixes):
        quarter = out[: len(chunk) // APPROXIMATE_SHARE]
        speed = len(chunk) / median_s(lambda: codec.decode_prefix(quarter, back)) / 1e9
        first_parts = [Row(f"{named}: decode the first part", speed, "GB/s", limit, speed / limit, None, at_most=False)]
    return [
        Row(f"{named}: times smaller", ratio, "x", 1, ratio, LEAST_RATIO[dtype] if judged else None, at_most=False),
        Row(f"{named}: encode", encode, "GB/s", limit, encode / limit, None, at_most=False),
        Row(f"{named}: decode", decode, "GB/s", limit, decode / limit, None, at_most=False),
        *first_parts,
        *(
            Row(f"{named}: {what} against the target", speed, "GB/s", least, speed / least, 1, at_most=False)
            for what, speed, least in (("encode", encode, LEAST_ENCODE_GBS), ("decode", decode, LEAST_DECODE_GBS))
            if bfloat16
        ),
    ]


def int8_rows(chunk: bytes) -> list[Row]:
    """Of the chunk format `int8`, from bfloat16."""
    torch.set_num_threads(1)
    tokens = 256
    layers = len(chunk) // (4 * tokens * HEADS * HEAD_DIM)
    exact = ChunkFormat("canonical", ("k", "v"), layers, tokens, HEADS, HEAD_DIM, "bfloat16", 2)
    stored = replace(exact, kind="int8", dtype="int8", itemsize=1, exact_itemsize=2)
    source = torch.frombuffer(bytearray(chunk[: exact.nbytes]), dtype=torch.uint8)
    out, back, largest = torch.zeros(stored.nbytes, dtype=torch.uint8), torch.zeros_like(source), torch.zeros(())
    rows = []
    for name, may_compile in (("C", True), ("torch", False)):
        codes = Codes(exact, stored, torch.device("cpu"), may_compile=may_compile)
        for what, work in (
            ("encode", lambda codes=codes: codes.encode(source, out, largest)),
            ("decode", lambda codes=codes: codes.decode(out, back, 0, tokens)),
        ):
            speed = exact.nbytes / median_s(work) / 1e9
            target = 1 if may_compile else None
            label = f"int8, bfloat16, {name}: {what}"
            rows.append(Row(label, speed, "GB/s", LEAST_INT8_GBS, speed / LEAST_INT8_GBS, target, at_most=False))
    return rows


def kvtc_rows(chunk: bytes, step: float, kernels: CompiledKernels) -> list[Row]:
    """Of drawn bfloat16."""
    shape = (2, LAYERS, TOKENS, HEADS, HEAD_DIM)
    numbers = (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    learning = Learning(
        model="drawn",
        dtype="bfloat16",
        heads=HEADS,
        head_dim=HEAD_DIM,
        max_tokens=1 << 17,
        frequencies=[[1e-4 ** (j / (HEAD_DIM // 2)) for j in range(HEAD_DIM // 2)]] * LAYERS,
    )
    for _ in range(4):
        learning.add([(numbers[0, layer], numbers[1, layer]) for layer in range(LAYERS)])
    codec = KvtcCodec(learning.learnt(step), kernels)
    out, back = room(len(chunk)), room(len(chunk))
    source = memoryview(chunk)
    size = codec.encode(source, out)
    if size is None:
        raise SystemExit("kvtc made nothing smaller")
    rows = []
    for what, work, least in (
        ("encode", lambda: codec.encode(source, out), LEAST_ENCODE_GBS),
        ("decode", lambda: codec.decode(out[:size], back), LEAST_DECODE_GBS),
    ):
        speed = len(chunk) / median_s(work) / 1e9
        label = f"kvtc, bfloat16, step {step:g}, {kernels.name}: {what} against the target"
        rows.append(
            Row(label, speed, "GB/s", least, speed / least, 1 if kernels.name == "compiled" else None, at_most=False)
        )
    return rows


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--recorded", type=Path, metavar="FILE", help="real keys and values, bfloat16")
    options = made.parse_args()
    chunks = {dtype: drawn(dtype) for dtype in LEAST_RATIO}
    if options.recorded:
        chunks = {"bfloat16": options.recorded.read_bytes()}
    rows: list[Row] = []
    for number, kernels in enumerate(kernels_here()):
        for dtype, chunk in chunks.items():
            codecs: list[Codec] = [FloatsCodec(kernels)]
            codecs += [ProgressiveCodec(kernels)] if dtype == "bfloat16" else []
            for codec in codecs:
                rows += rows_of(codec, dtype, chunk, kernels.name, judged=number == 0)
    for dtype, chunk in chunks.items():
        rows += rows_of(make_zstd_codec({}, ANY_CHUNKS), dtype, chunk)
    rows += int8_rows(chunks["bfloat16"])
    for kernels in () if options.recorded else kernels_here():
        for step in (0.25, 0.4, 0.8):
            rows += kvtc_rows(chunks["bfloat16"], step, kernels)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
