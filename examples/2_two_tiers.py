"""Store chunks, let them leave the pool, and find them again: first in memory, then on disk. No GPU, no engine."""

import tempfile

from kv_core import ChunkKey
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.sequence import KeySequence
from kv_core.service import Ended, LookupPlan, ReadLease
from kv_tiers import HostConfig, LocalCache, build_local_cache

CHUNK_BYTES = 4096
scheme = ChainScheme(chunk_tokens=4)
space = KeySpace(model="demo", revision="1", dtype="float32", format="demo", world=1, chain=scheme.name)


def keys_of(tokens: list[int]) -> list[ChunkKey]:
    return list(space.keys(KeySequence(scheme).append(tokens)))


def store(cache: LocalCache, keys: list[ChunkKey]) -> None:
    """What an engine's worker does after it has computed a prompt."""
    lease = cache.begin_store(keys, "writer")
    for number, extent in enumerate(lease.extents):
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = bytes([number]) * extent.nbytes
    cache.commit(lease)  # only from here does a lookup find it; it goes down to the disk by itself


def look_up(cache: LocalCache, keys: list[ChunkKey]) -> LookupPlan:
    """What an engine's scheduler does before it computes one: ask in every step until the answer is final."""
    while (plan := cache.lookup(keys, "request", wait_for_promotion=True)).ended is Ended.PENDING:
        pass
    return plan


with tempfile.TemporaryDirectory() as scratch:
    disk = {"type": "disk", "directory": f"{scratch}/kv", "capacity_bytes": "64MiB"}
    pool = HostConfig(capacity_bytes=8 * CHUNK_BYTES)
    cache = build_local_cache(pool, group_bytes=(CHUNK_BYTES,), fingerprint="demo", tiers=[disk])

    store(cache, keys_of(list(range(16))))
    plan = look_up(cache, keys_of([*range(12), 99, 99, 99, 99]))  # the same 12 tokens, then its own way
    print(f"{plan.chunks} of 4 chunks, from {', '.join(plan.tiers)}")
    cache.end("request")  # whatever it holds is given back

    cache.lower.drain(10)
    store(cache, keys_of(list(range(1000, 1032))))  # another prompt fills the pool
    plan = look_up(cache, keys_of(list(range(16))))
    print(f"{plan.chunks} of 4 chunks, from {', '.join(plan.tiers)}")

    lease = cache.load(keys_of(list(range(16)))[: plan.chunks], "request")
    assert isinstance(lease, ReadLease)
    print("first bytes:", [cache.pool.view[extent.offset] for extent in lease.extents])
    cache.end("request")
    cache.close()

    again = build_local_cache(pool, group_bytes=(CHUNK_BYTES,), fingerprint="demo", tiers=[disk])
    plan = look_up(again, keys_of(list(range(16))))
    print(f"after a restart: {plan.chunks} of 4 chunks, from {', '.join(plan.tiers)}")
    again.end("request")
    again.close()
