"""A format says exactly where each byte of a chunk is, and no two that differ share a fingerprint."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from kv_core import ChunkFormat, InputError
from kv_testing.strategies import chunk_formats

relaxed = settings(deadline=None, max_examples=150)
KV = ChunkFormat("canonical", ("k", "v"), 2, 8, 4, 16, "bfloat16", 2)
INT8 = ChunkFormat("int8", ("k", "v"), 2, 8, 4, 16, "int8", 1, exact_itemsize=2)
FP8 = ChunkFormat("fp8", ("k", "v"), 2, 8, 4, 16, "float8_e4m3fn", 1, exact_itemsize=2)
BLOCKS = ChunkFormat("blocks", ("blocks",), 2, 8, 1, 100, "uint8", 1, 4, "engine, strides")


@given(made=chunk_formats())
@relaxed
def test_layers_of_parts_fill_the_chunk_with_no_gap_and_no_overlap(made: ChunkFormat) -> None:
    starts = [made.layer_offset(part, layer) for part in range(len(made.parts)) for layer in range(made.layers)]
    assert starts == list(range(0, made.nbytes, made.layer_bytes))
    assert made.is_quantised or made.layer_bytes == made.chunk_tokens * made.token_bytes


@given(one=chunk_formats(), other=chunk_formats())
@relaxed
def test_formats_share_a_fingerprint_only_if_they_are_equal(one: ChunkFormat, other: ChunkFormat) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert len(one.fingerprint) == 32
    assert set(one.fingerprint) <= set("0123456789abcdef")


CHANGED: dict[str, Any] = {
    "kind": "canonical", "parts": ("x",), "layers": 3, "chunk_tokens": 12, "heads": 2, "head_dim": 101, "dtype": "int8",
    "itemsize": 2, "block_tokens": 2, "origin": "other",
    "exact_itemsize": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(ChunkFormat) if field.init])
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
    int8 = replace(llama, kind="int8", dtype="int8", itemsize=1, exact_itemsize=2)
    assert int8.nbytes == 16 * 2**20 + 2 * 32 * (256 * 8 * 4 + 4 * 8 * 128 * 2 + 8 * 128)
    fp8 = replace(mla, kind="fp8", dtype="float8_e4m3fn", itemsize=1, exact_itemsize=2)
    assert fp8.nbytes == 61 * (64 * (576 + 4) + 576)  # of so few tokens none is kept as it is


def test_what_a_layer_in_one_byte_an_element_consists_of() -> None:
    assert INT8.codes_bytes == 8 * 4 * 16
    assert (INT8.scales_bytes, INT8.exact_bytes, INT8.exponents_bytes) == (8 * 4 * 4, 0, 4 * 16)
    assert INT8.layer_bytes == 8 * 4 * 16 + 8 * 4 * 4 + 4 * 16
    assert INT8.layer_offset(1, 0) == INT8.nbytes // 2
    long = replace(INT8, chunk_tokens=128, heads=1, head_dim=5)
    assert (long.exact_tokens, long.exact_bytes, long.exponents_bytes) == (4, 4 * 5 * 2, 8)
    assert replace(long, chunk_tokens=124).exact_tokens == 0
    assert KV.codes_bytes == KV.layer_bytes


def test_fingerprints_are_what_they_have_always_been() -> None:
    assert tuple(known.fingerprint for known in (KV, BLOCKS, INT8, FP8)) == (
        "318d2d62933382acda71d118c76f9925",
        "4cf5701dddb4d19fcc45ea18acc6a909",
        "77aea88c85115269705cc0d3f337eded",
        "2a172b749550a670c5ceb7c7a855de09",
    )


SIZES = ("layers", "chunk_tokens", "heads", "head_dim", "itemsize", "block_tokens")
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: bad}, f"a chunk format's {name} is {bad!r}") for name in SIZES for bad in (0, -1, 1.5, True)),
    ({"parts": ()}, "at least one part"),
    ({"parts": ("k", "k")}, "named twice"),
    ({"kind": "paged"}, "no kind 'paged'"),
    ({"kind": "int8"}, "format int8 keeps int8 of 1 byte, not bfloat16 of 2"),
    ({"kind": "int8", "dtype": "int8", "itemsize": 1}, "made from elements of 2 or 4 bytes, not of exact_itemsize=0"),
    (
        {"kind": "fp8", "dtype": "float8_e5m2", "itemsize": 1},
        "format fp8 keeps float8_e4m3fn of 1 byte, not float8_e5m2",
    ),
    (
        {
            "kind": "int8",
            "dtype": "int8",
            "itemsize": 1,
            "exact_itemsize": 2,
            "chunk_tokens": 2,
            "heads": 3,
            "head_dim": 5,
        },
        "2 tokens of 3 heads of 5 are not a multiple of 4 bytes",
    ),
    ({"kind": "blocks", "block_tokens": 3}, "not a multiple of the engine's block of 3"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED, ids=[f"{changed}" for changed, _ in REFUSED])
def test_a_format_that_cannot_be_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(KV, **changed)
