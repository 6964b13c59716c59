"""Small models with all kinds of coverage, and the keys of their prompts."""

from hypothesis import strategies as st
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.keys import ChunkKey, KeySpace

CHUNK_TOKENS = 4
COVERAGES = (ALL, STATE, Coverage("window", 3), Coverage("window", 9), Coverage("window", 40), Coverage("local", 8))


def shapes() -> st.SearchStrategy[ChunkShape]:
    """Windows smaller and larger than a chunk, local attention, states, with and without full attention, and shards."""
    groups = st.lists(st.sampled_from(COVERAGES), min_size=1, max_size=4).map(tuple)
    return st.builds(ChunkShape, st.just(CHUNK_TOKENS), groups, st.sampled_from([1, 1, 2]))


def keys_for(shape: ChunkShape, chunks: int, branch: int = 0) -> list[ChunkKey]:
    """All keys of a prompt, chunk-major."""
    space = KeySpace("model", "r", "float32", "f", shape.shards, f"sha256:{shape.chunk_tokens}")
    digests = [bytes([branch]) * 15 + bytes([number]) for number in range(chunks)]
    return space.keys(digests, groups=len(shape.groups))


def column(keys: list[ChunkKey], shape: ChunkShape, group: int, shard: int = 0) -> list[ChunkKey]:
    """One group's and shard's of them: what a rank stores."""
    return keys[group * shape.shards + shard :: shape.keys_per_chunk]
