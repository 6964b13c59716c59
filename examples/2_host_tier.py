"""Store chunks in the host tier, find their longest prefix again, and read them under a lease. No GPU, no engine."""

from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.sequence import KeySequence
from kv_core.service import LoadReady
from kv_tiers import HostConfig, build_local_cache

CHUNK_NBYTES = 4096
scheme = ChainScheme(chunk_tokens=4)
space = KeySpace(model="demo", revision="1", dtype="float32", format="demo", world=1, chain=scheme.name)
cache = build_local_cache(HostConfig(capacity_bytes=1 << 20), chunk_nbytes=CHUNK_NBYTES, fingerprint="demo")


def keys_of(tokens: list[int]):  # type: ignore[no-untyped-def]
    return space.keys(KeySequence(scheme).append(tokens))


# One request computes 12 tokens, three chunks, and stores them.
lease = cache.begin_store(keys_of(list(range(12))), "request 1")
for number, extent in enumerate(lease.extents):
    cache.pool.view[extent.offset : extent.offset + extent.nbytes] = bytes([number]) * extent.nbytes
cache.commit(lease)

# Another starts with the same 8 tokens and then goes its own way: two chunks are promised to it at once.
wanted = keys_of([*range(8), 99, 99, 99, 99])
plan = cache.lookup(wanted, "request 2")
print(f"{plan.chunks} of {len(wanted)} chunks can be loaded; {plan.ended.value}")

ticket = cache.begin_load(wanted[: plan.chunks], "request 2")
(done,) = cache.poll("request 2")
assert isinstance(done, LoadReady)
assert done.ticket == ticket
print("first bytes:", [cache.pool.view[extent.offset] for extent in done.lease.extents])

cache.end("request 2")  # whatever it still holds is given back
assert cache.counts().read_leases == 0
