"""Keys for tests and examples, the same at every call."""

import hashlib

from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey, KeySpace, tenant_tag


def key_chain(chunks: int, *, branch: str = "", shards: int = 1, salt: str | None = None) -> list[ChunkKey]:
    """A prompt's keys, chunk-major."""
    space = KeySpace("model", "revision", "float32", "format", shards, "sha256:256")
    root = "" if salt is None else f"salted {salt}:"
    digests = [hashlib.sha256(f"{root}{branch}/{chunk}".encode()).digest() for chunk in range(chunks)]
    return space.keys(digests, tenant=tenant_tag(salt))


def keys_of(keys_per_chunk: int) -> ChunkShape:
    """Chunks with the given number of keys, one per shard, all of which every hit needs."""
    return ChunkShape(1, shards=keys_per_chunk)
