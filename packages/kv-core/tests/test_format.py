"""A format says exactly where each byte of a chunk is, and no two that differ share a fingerprint."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from kv_core import ChunkFormat, InputError
from kv_core.testing import chunk_formats

relaxed = settings(deadline=None, max_examples=150)
KV = ChunkFormat("canonical", ("k", "v"), 2, 8, 4, 16, "bfloat16", 2)
INT8 = ChunkFormat("int8", ("k", "v"), 2, 8, 4, 16, "int8", 1)
FP8 = ChunkFormat("fp8", ("k", "v"), 2, 8, 4, 16, "float8_e4m3fn", 1)
BLOCKS = ChunkFormat("blocks", ("blocks",), 2, 8, 1, 100, "uint8", 1, 4, "engine, strides")


@given(made=chunk_formats())
@relaxed
def test_layers_of_parts_fill_the_chunk_with_no_gap_and_no_overlap(made: ChunkFormat) -> None:
    starts = [made.layer_offset(part, layer) for part in range(len(made.parts)) for layer in range(made.layers)]
    assert starts == list(range(0, made.nbytes, made.layer_bytes))
    assert made.layer_bytes == made.chunk_tokens * made.token_bytes


@given(one=chunk_formats(), other=chunk_formats())
@relaxed
def test_formats_share_a_fingerprint_only_if_they_are_equal(one: ChunkFormat, other: ChunkFormat) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert len(one.fingerprint) == 32
    assert set(one.fingerprint) <= set("0123456789abcdef")


CHANGED: dict[str, Any] = {
    "kind": "canonical", "parts": ("x",), "layers": 3, "chunk_tokens": 12, "heads": 2, "head_dim": 101, "dtype": "int8",
    "itemsize": 2, "block_tokens": 2, "origin": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(ChunkFormat)])
def test_each_field_is_in_the_fingerprint(name: str) -> None:
    assert replace(BLOCKS, **{name: CHANGED[name]}).fingerprint != BLOCKS.fingerprint


def test_the_engine_s_block_does_not_change_canonical_bytes() -> None:
    """Engines with blocks of 16 and of 64 tokens share what they store."""
    assert replace(KV, block_tokens=4).fingerprint == KV.fingerprint


def test_the_sizes_of_a_known_model() -> None:
    llama = ChunkFormat("canonical", ("k", "v"), 32, 256, 8, 128, "bfloat16", 2)
    assert llama.nbytes == 32 * 2**20
    assert llama.layer_offset(1, 0) == 16 * 2**20
    mla = ChunkFormat("canonical", ("kv",), 61, 64, 1, 576, "bfloat16", 2)
    assert mla.nbytes == 61 * 64 * 576 * 2
    assert replace(llama, kind="int8", dtype="int8", itemsize=1).nbytes == 16 * 2**20 + 2 * 32 * 256 * 8 * 4
    assert replace(mla, kind="fp8", dtype="float8_e4m3fn", itemsize=1).nbytes == 61 * 64 * (576 + 4)


def test_a_layer_in_one_byte_an_element_is_codes_and_then_scales() -> None:
    assert INT8.codes_bytes == 8 * 4 * 16
    assert INT8.layer_bytes == 8 * 4 * 16 + 8 * 4 * 4
    assert INT8.layer_offset(1, 0) == INT8.nbytes // 2
    assert KV.codes_bytes == KV.layer_bytes


def test_fingerprints_are_what_they_have_always_been() -> None:
    assert tuple(known.fingerprint for known in (KV, BLOCKS, INT8, FP8)) == (
        "318d2d62933382acda71d118c76f9925",
        "4cf5701dddb4d19fcc45ea18acc6a909",
        "23d7b0ddcc9cd2761f706347464d5510",
        "da6ba476b317377538aa002d35a3046f",
    )


SIZES = ("layers", "chunk_tokens", "heads", "head_dim", "itemsize", "block_tokens")
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: bad}, f"a chunk format's {name} is {bad!r}") for name in SIZES for bad in (0, -1, 1.5, True)),
    ({"parts": ()}, "at least one part"),
    ({"parts": ("k", "k")}, "named twice"),
    ({"kind": "paged"}, "no kind 'paged'"),
    ({"kind": "int8"}, "format int8 keeps int8 of 1 byte, not bfloat16 of 2"),
    (
        {"kind": "fp8", "dtype": "float8_e5m2", "itemsize": 1},
        "format fp8 keeps float8_e4m3fn of 1 byte, not float8_e5m2",
    ),
    (
        {"kind": "int8", "dtype": "int8", "itemsize": 1, "chunk_tokens": 2, "heads": 3, "head_dim": 5},
        "2 tokens of 3 heads of 5 are no multiple of 4 bytes",
    ),
    ({"kind": "blocks", "block_tokens": 3}, "not a multiple of the engine's block of 3"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED, ids=[f"{changed}" for changed, _ in REFUSED])
def test_a_format_that_cannot_be_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(KV, **changed)
