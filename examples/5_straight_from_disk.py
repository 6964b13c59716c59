"""Blocks to the disk tier's files and back without the host pool: by GPUDirect Storage where it is, else staged."""

import tempfile

import torch
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.sequence import KeySequence
from kv_cuda import split_parts
from kv_cuda.files.direct import make_direct_copier
from kv_eviction.lru import LruPolicy
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for

device = "cuda" if torch.cuda.is_available() else "cpu"
layout = split_parts(
    "an engine's",
    block=2 * 16 * 256, token=256, head=64, dim=1, value_offset=16 * 256,
    dtype="bfloat16", itemsize=2, layers=4, blocks=32, block_tokens=16, heads=4, head_dim=64,
)  # fmt: skip
blocks = torch.randn(4, 32, 2 * 16 * 256, device=device).to(torch.bfloat16)  # [layers, blocks, …]
chunk = layout.canonical_format(chunk_tokens=32)

scheme = ChainScheme(chunk_tokens=32)
space = KeySpace(model="demo", revision="1", dtype="bfloat16", format=chunk.fingerprint, world=1, chain=scheme.name)
keys = list(space.keys(KeySequence(scheme).append(list(range(96)))))
table = [7, 3, 30, 1, 12, 20]  # the request's six blocks, for three chunks

with tempfile.TemporaryDirectory() as scratch:
    context = TierContext(chunk.nbytes, -(-chunk.nbytes // 4096) * 4096, chunk.fingerprint)
    disk = DiskTier(DiskConfig(directory=f"{scratch}/kv", capacity_bytes=bytes_for(context, 8)), context, LruPolicy())
    copier = make_direct_copier(layout, list(blocks), chunk)
    print("direct" if copier.has_direct_path else "staged")

    room = disk.reserve_extents(keys, None)  # nobody finds anything there
    checksums = copier.store(room.extents, table, block_tokens=16)
    print(disk.commit_extents(room, checksums))  # from here they can be found, also after a restart

    computed = blocks.clone()
    blocks.zero_()
    lease = disk.lease_extents(keys)  # their slots stay theirs until the lease ends
    carried = copier.load(lease.extents, table, block_tokens=16, first_token=0, last_token=96)
    disk.end_lease(lease)
    carried.event.wait()
    print(carried.outcomes)
    assert torch.equal(blocks[:, table], computed[:, table])

    copier.close()
    disk.close()
