"""Hypothesis strategies for everything that kv-core names.

Sizes are small on purpose: a chunk of four tokens has every boundary that a chunk of 256 has.
"""

from typing import get_args

from hypothesis import strategies as st
from kv_core.format import QUANTISED, ChunkFormat, Kind
from kv_core.hashing import Algorithm, ChainScheme, Item
from kv_core.keys import NO_TENANT, TENANT_BYTES, ChunkKey, KeySpace, tenant_tag
from kv_core.transfer import HostExtent

SECRET = b"a secret for testing only"


def token_ids(*, wide: bool = True) -> st.SearchStrategy[int]:
    """One token: mostly from a few values, so that prompts share prefixes; sometimes at the edges of u32 and u64."""
    edges = [0, 1, 255, 2**31, 2**32 - 1] + ([2**32, 2**63, 2**64 - 1] if wide else [])
    return st.one_of(st.integers(0, 3), st.integers(0, 200_000), st.sampled_from(edges))


def prompts(*, max_tokens: int = 24, wide: bool = True) -> st.SearchStrategy[list[int]]:
    return st.lists(token_ids(wide=wide), max_size=max_tokens)


@st.composite
def schemes(draw: st.DrawFn, *, max_chunk_tokens: int = 5) -> ChainScheme:
    algorithm: Algorithm = draw(st.sampled_from(get_args(Algorithm)))
    chunk_tokens = draw(st.integers(1, max_chunk_tokens))
    return ChainScheme(algorithm, chunk_tokens, SECRET if algorithm == "blake2b" else b"")


def items(*, max_tokens: int = 24) -> st.SearchStrategy[list[Item]]:
    contents = st.one_of(st.sampled_from(["cat", "dog", b"cat"]), st.binary(min_size=1, max_size=4))
    item = st.builds(Item, contents, st.integers(0, max_tokens), st.integers(1, max_tokens))
    return st.lists(item, max_size=3)


def texts(*, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[str]:
    """Text that a key space accepts, with many characters that its spelling must escape."""
    letters = st.characters(exclude_categories=("Cc", "Cs"))
    return st.text(st.one_of(st.sampled_from("@%/.=:- é\u0660"), letters), min_size=min_size, max_size=max_size)


@st.composite
def key_spaces(draw: st.DrawFn) -> KeySpace:
    names = st.from_regex(r"[A-Za-z0-9._-]{1,6}", fullmatch=True)
    reserved = {"revision", "format", "chain", "tenant", "group", "layer"}
    tags = draw(st.dictionaries(names.filter(lambda name: name not in reserved), texts(), max_size=3))
    return KeySpace(
        model=draw(texts(min_size=1)),
        revision=draw(texts()),
        dtype=draw(texts()),
        format=draw(texts()),
        world=draw(st.sampled_from([1, 2, 8, 65535])),
        chain=draw(texts()),
        tags=tuple(tags.items()),
    )


def digests() -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16))


def tenants() -> st.SearchStrategy[bytes]:
    """Tags: mostly none, as with most keys."""
    tags = st.binary(min_size=TENANT_BYTES, max_size=TENANT_BYTES)
    return st.one_of(st.just(NO_TENANT), texts().map(tenant_tag), tags)


@st.composite
def chunk_keys(draw: st.DrawFn, space: KeySpace | None = None) -> ChunkKey:
    """A key of `space`, or of any space: for the whole chunk or for one layer."""
    space = draw(key_spaces()) if space is None else space
    shard = draw(st.integers(0, space.world - 1))
    key = space.key(draw(digests()), draw(st.integers(0, 65534)), shard, tenant=draw(tenants()))
    layer = draw(st.one_of(st.none(), st.integers(0, 300)))
    return key if layer is None else key.split_layers(layer + 1)[layer]


@st.composite
def chunk_formats(draw: st.DrawFn) -> ChunkFormat:
    """Small formats of every kind: K and V, MLA's single part, opaque blocks, and quantised to one byte per element."""
    kind = draw(st.sampled_from(["kv", "mla", "blocks"]))
    block_tokens = draw(st.sampled_from([1, 2, 4]))
    chunk_tokens = block_tokens * draw(st.integers(1, 4))
    layers = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 2, 8]))
    if kind == "blocks":
        return ChunkFormat(
            "blocks", ("blocks",), layers, chunk_tokens, 1, head_dim, "uint8", 1, block_tokens, draw(texts())
        )
    dtype, itemsize = draw(st.sampled_from([("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1)]))
    heads = 1 if kind == "mla" else draw(st.integers(1, 3))
    parts = ("kv",) if kind == "mla" else ("k", "v")
    quantised: Kind | None = draw(st.sampled_from([None, "int8", "fp8"]))
    if quantised is not None:
        exact_itemsize = draw(st.sampled_from([2, 4]))
        return ChunkFormat(
            quantised,
            parts,
            layers,
            4 * chunk_tokens,
            heads,
            head_dim,
            QUANTISED[quantised],
            1,
            exact_itemsize=exact_itemsize,
        )
    return ChunkFormat("canonical", parts, layers, chunk_tokens, heads, head_dim, dtype, itemsize)


def extents(chunks: int, nbytes: int = 4096, pool: str = "pool") -> list[HostExtent]:
    """Adjacent extents for the given number of chunks."""
    return [HostExtent(pool, chunk * nbytes, nbytes) for chunk in range(chunks)]
