"""What a tier of type `gds` does: chunks go to files through the pool, and come back without it, by GPUDirect Storage
where there is one. In vLLM the setting is all that it takes."""

import tempfile
from pathlib import Path

import torch
from kv_connect.halves.direct_reads import DirectReads
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.sequence import KeySequence
from kv_core.service import Ended
from kv_core.transfer import plan_transfer
from kv_cuda import make_copier, split_parts
from kv_cuda.files.direct import ThreadReader
from kv_tiers import HostConfig, LocalCache, build_local_cache

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


def opened(directory: Path) -> tuple[LocalCache, ThreadReader]:
    reader = ThreadReader(layout, list(blocks), chunk, directory)
    tier = {"type": "gds", "directory": str(directory), "capacity_bytes": 1 << 20}
    cache = build_local_cache(
        HostConfig(capacity_bytes=1 << 20), group_bytes=(chunk.nbytes,), fingerprint=chunk.fingerprint,
        tiers=[tier], extensions=[DirectReads("gds", reader)],
    )  # fmt: skip
    return cache, reader


with tempfile.TemporaryDirectory() as scratch:
    cache, _ = opened(Path(scratch) / "kv")
    copier = make_copier(layout, list(blocks), chunk)
    copier.attach(cache.pool.name, cache.pool.view)
    lease = cache.begin_store(keys, "a request")
    plan = plan_transfer(lease.extents, table, chunk_tokens=32, block_tokens=16, first_token=0, last_token=96)
    copier.store(plan).wait()
    cache.commit(lease)  # spilled to the files from here on
    copier.detach(cache.pool.name)
    cache.close()  # and with it the pool

    computed = blocks.clone()
    blocks.zero_()
    cache, reader = opened(Path(scratch) / "kv")
    while (hit := cache.lookup(keys, "another", wait_for_promotion=True, reads_files=True)).ended is Ended.PENDING:
        pass  # the files' places are being leased: they stay until the request ends
    print(hit.chunks, hit.tiers)
    read = reader.read(hit.files, table, block_tokens=16, first_token=0, last_token=96)
    read.wait()
    print(read.outcomes)
    cache.end("another")
    assert torch.equal(blocks[:, table], computed[:, table])
    cache.close()
