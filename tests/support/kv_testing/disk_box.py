"""A disk tier in a directory that can be reopened as after a restart, and chunks of one small format for it."""

from pathlib import Path
from typing import Final

import msgspec
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, LoadOutcome, Stored
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import aligned_pages, content
from kv_tiers.tier import Read, TierContext, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier
from kv_tiers.tiers.disk_chunks import bytes_for

CONTEXT: Final = TierContext(5000, 8192, "disk")
FORMAT: Final = chunk_header.format_id("disk")
CHUNK_AT: Final = 4096
"""Bytes of a slot before the chunk's own."""


class DiskBox:
    """A tier in a directory, made anew as a restart would."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tier: DiskTier | None = None

    @property
    def inside(self) -> Path:
        return self.path / CONTEXT.namespace

    def start(self, chunks: int = 16, **settings: object) -> DiskTier:
        self.stop()
        given = {"directory": str(self.path), "capacity_bytes": bytes_for(CONTEXT, chunks), **settings}
        self.tier = DiskTier(msgspec.convert(given, DiskConfig), CONTEXT, LruPolicy())
        return self.tier

    def stop(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None


def writes_of(keys: list[ChunkKey], parent: ChunkKey | None = None) -> list[Write]:
    made = []
    for above, key in zip([parent, *keys], keys, strict=False):
        pages = aligned_pages(CONTEXT.slot_bytes)
        pages[: CONTEXT.chunk_bytes] = content(key, CONTEXT.chunk_bytes)
        chunk = pages[: CONTEXT.chunk_bytes]
        made.append(Write(key, above, chunk_header.pack_header(key, above, chunk, FORMAT), pages, len(chunk)))
    return made


def store(tier: DiskTier, keys: list[ChunkKey], parent: ChunkKey | None = None) -> None:
    assert tier.store(writes_of(keys, parent)) == [Stored()] * len(keys)


def load(tier: DiskTier, key: ChunkKey) -> LoadOutcome:
    """Load as the lane does: a chunk is loaded if its checksum is right."""
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CONTEXT.slot_bytes), CONTEXT.chunk_bytes)
    (outcome,) = tier.load([read])
    if isinstance(outcome, Loaded):
        return chunk_header.check(read.header, read.room, key=key, format_id=FORMAT) or outcome
    return outcome


def flip(path: Path, at: int, bit: int) -> None:
    """Calling it again undoes it."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
