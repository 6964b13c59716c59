"""Extents of a disk tier's files, leased to callers that move the bytes (`kv_tiers.tier.SupportsFileExtents`).

Only chunks that are stored unencoded and contiguously have an extent; the others need the tier's own `load` and
`store`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.errors import MisuseError
from kv_core.extent import FileExtent
from kv_core.keys import ChunkKey
from kv_core.outcome import Refused, Stored, StoreOutcome

from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import PAGE_BYTES
from kv_tiers.tier import FileLease, FileReservation
from kv_tiers.tiers.disk_chunks import DiskChunks
from kv_tiers.tiers.disk_files import File
from kv_tiers.tiers.disk_record import header_of
from kv_tiers.tiers.disk_transfer import HeaderPages
from kv_tiers.tiers.extents import Place


@dataclass(frozen=True, slots=True)
class _Written:
    """A chunk whose bytes the caller has written into its place."""

    place: Place
    parent: ChunkKey | None
    checksum: bytes


class LendsExtents:
    """A disk tier as `SupportsFileExtents`: its leases and reservations. Safe to call from any thread."""

    def __init__(self, chunks: DiskChunks) -> None:
        self._chunks = chunks
        self._context = chunks.context
        self._format_id = chunk_header.format_id(self._context.fingerprint)
        self._pages = HeaderPages()
        self._ids = itertools.count()
        self._reads_failed = False  # since the last probe that found something readable
        # Under the lock of the chunks.
        self._leases: dict[int, list[int | None]] = {}
        self._reservations: dict[int, list[tuple[Place | None, ChunkKey | None]]] = {}

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

    def reserve_extents(self, keys: Sequence[ChunkKey], parent: ChunkKey | None) -> FileReservation:
        sizes = [self._context.chunk_bytes] * len(keys)
        places = self._chunks.reserve(keys, sizes, parent, durable=True)  # perhaps none will be committed
        scattered = [place for place in places if place is not None and not isinstance(place.units, range)]
        if scattered:
            with self._chunks.lock:
                self._chunks.abort(scattered)
        ready = [place for place in places if place is not None and place not in scattered]
        with self._chunks.aborting(ready):
            self._chunks.make_ready(ready)
            extents = {place.entry: self._extent(place.entry, place.units, None) for place in ready}
        usable = [place if place is not None and place.entry in extents else None for place in places]
        reservation = FileReservation(
            next(self._ids), tuple(None if place is None else extents[place.entry] for place in usable)
        )
        with self._chunks.lock:
            self._reservations[reservation.id] = list(zip(usable, [parent, *keys], strict=False))
        return reservation

    def commit_extents(self, reservation: FileReservation, checksums: Sequence[bytes | None]) -> list[StoreOutcome]:
        if len(checksums) != len(reservation.extents):
            raise MisuseError(f"{len(checksums)} checksums for a reservation of {len(reservation.extents)} chunks")
        with self._chunks.lock:
            reserved = self._reservations.pop(reservation.id, None)
            if reserved is None:
                raise MisuseError(f"file reservation {reservation.id} is not open")
            written = [
                _Written(place, parent, checksum)
                for (place, parent), checksum in zip(reserved, checksums, strict=True)
                if place is not None and checksum is not None
            ]
            stored = {chunk.place.entry for chunk in written}
            self._chunks.abort([place for place, _ in reserved if place is not None and place.entry not in stored])
        if written:
            self._commit_written(written)
        why = "there was no room for it, or it was not written"
        return [Stored() if place is not None and place.entry in stored else Refused(why) for place, _ in reserved]

    def _commit_written(self, written: Sequence[_Written]) -> None:
        """The remaining steps of the order of writes, once the bytes are there.

        Raises:
            TierDown: no chunk was stored.
        """
        places = [chunk.place for chunk in written]
        files: set[File] = set()
        records = []
        with self._chunks.aborting(places):
            self._chunks.refuse_vanished(places)
            for chunk in written:
                place, nbytes = chunk.place, self._context.chunk_bytes
                header = chunk_header.make_header(
                    chunk_header.Header(
                        place.key, chunk.parent, nbytes, nbytes, self._format_id, "", chunk.checksum, chunk.checksum, ()
                    )
                )
                records.append((place, header))
                ((file, offset, _),) = self._chunks.segments(place.entry, place.units, PAGE_BYTES)
                self._write_header(file, offset, header)
                files.add(file)
            self._chunks.sync_files(files)
            self._chunks.write_records(records, written[0].parent)
        self._chunks.make_findable(places, [chunk.parent for chunk in written])

    def _write_header(self, file: File, offset: int, header: bytes) -> None:
        (page,) = self._pages.take(1)
        page[: chunk_header.HEADER_BYTES] = header
        try:
            file.write([page], offset)
            if not file.direct:
                file.drop_cached(offset, PAGE_BYTES)
        finally:
            self._pages.give([page])

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

    def _extent(self, entry: int, units: Sequence[int], checksum: bytes | None) -> FileExtent:
        ((file, offset, _),) = self._chunks.segments(entry, units, PAGE_BYTES)
        return FileExtent(str(file.path.absolute()), offset + PAGE_BYTES, self._context.chunk_bytes, checksum)
