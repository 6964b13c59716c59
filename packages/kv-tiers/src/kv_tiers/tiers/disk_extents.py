"""Extents of a disk tier's files, leased to callers that read the bytes (`kv_tiers.tier.SupportsFileExtents`).

Only chunks that are stored unencoded and contiguously have an extent; the others need the tier's own `load`.
"""

import itertools
from collections.abc import Sequence

from kv_core.errors import MisuseError
from kv_core.keys import ChunkKey
from kv_core.transfer import FileExtent

from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.tier import FileLease
from kv_tiers.tiers.disk_chunks import DiskChunks
from kv_tiers.tiers.disk_record import header_of


class LendsExtents:
    """A disk tier as `SupportsFileExtents`: its leases. Safe to call from any thread."""

    def __init__(self, chunks: DiskChunks) -> None:
        self._chunks = chunks
        self._context = chunks.context
        self._format_id = chunk_header.format_id(self._context.fingerprint)
        self._ids = itertools.count()
        self._reads_failed = False  # since the last probe that found something readable
        self._leases: dict[int, list[int | None]] = {}  # under the lock of the chunks

    def lease_extents(self, keys: Sequence[ChunkKey]) -> FileLease:
        entries = self._chunks.begin_load(keys)
        try:
            extents = [
                None if entry is None else self._lease_of(key, entry) for key, entry in zip(keys, entries, strict=True)
            ]
        except BaseException as error:
            self._chunks.index.end_load(entries)
            if isinstance(error, OSError):
                raise self._chunks.down(error) from error
            raise
        lease = FileLease(next(self._ids), tuple(extents))
        with self._chunks.lock:
            self._leases[lease.id] = entries
        return lease

    def end_lease(self, lease: FileLease, failed: Sequence[ChunkKey] = ()) -> None:
        with self._chunks.lock:
            entries = self._leases.pop(lease.id, None)
            self._chunks.pass_over(failed)
            self._reads_failed = self._reads_failed or bool(failed)
        if entries is None:
            raise MisuseError(f"file lease {lease.id} is not open")
        self._chunks.index.end_load(entries)

    def _lease_of(self, key: ChunkKey, entry: int) -> FileExtent | None:
        """The extent to lease. None: the chunk is encoded or in pieces, or its record was wiped meanwhile or is
        damaged; a load may report which."""
        extent = self._chunks.index.extent(entry)
        if not isinstance(extent.units, range):
            return None
        local_entry = entry // len(self._chunks.directories)
        stored_header = header_of(self._chunks.directory(entry).record_at(local_entry), local_entry)
        header = None if stored_header is None else chunk_header.read_header(stored_header)
        if not isinstance(header, chunk_header.Header) or header.key != key or header.codec:
            return None
        if (header.decoded_bytes, header.format_id) != (self._context.chunk_bytes, self._format_id):
            return None
        return self._extent(entry, extent.units, header.checksum)

    def _extent(self, entry: int, units: Sequence[int], checksum: bytes) -> FileExtent:
        ((file, offset, _),) = self._chunks.segments(entry, units, PAGE_BYTES)
        return FileExtent(str(file.path.absolute()), offset + PAGE_BYTES, self._context.chunk_bytes, checksum)
