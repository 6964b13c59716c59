"""Prefixes as files, to move them to another machine or to warm up a fleet.

    magic "kvprefix" | version u16 | header size u16 | zero u32 | bytes of all chunks u64 | chunks u64 | format id 16
    | xxh3_64 of the above

and then, for each group and shard, the chunks that a hit needs of it in the prompt's order: each chunk's header
(docs/formats/chunk.md) and its bytes. A header without a parent begins the next group or shard. Little-endian.
A file is trusted no more than a tier: its size must be what its header says before anything is read, and every chunk is
verified before it can be found.
"""

import itertools
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from kv_core.coverage import PLAIN, ChunkShape
from kv_core.errors import InputError, MisuseError
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged
from kv_core.service import ReadLease
from kv_core.transfer import HostExtent
from kv_tiers import chunk_header
from kv_tiers.cache.hits import columns_of
from kv_tiers.cache.local import LocalCache
from kv_tiers.chunk_header import SEAL_BYTES, seal, unseal

VERSION: Final = 3
_MAGIC: Final = b"kvprefix"
_HEADER: Final = struct.Struct("<8sHHIQQ16s")
_HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES
_BATCH_CHUNKS: Final = 8
_numbers: Final = itertools.count(1)
"""Numbers exports and imports: two of the same file are two holders, each of which ends only its own leases."""


@dataclass(frozen=True, slots=True)
class Imported:
    """chunks: how many of the file's first chunks are held now. stopped: why not more; empty if all are."""

    chunks: int
    stopped: str


def export_prefix(
    cache: LocalCache, keys: Sequence[ChunkKey], path: Path, *, fingerprint: str, shape: ChunkShape = PLAIN
) -> int:
    """Write what the longest hit among `keys` in the pool needs to `path`; returns the length of that hit in chunks.

    Chunks of lower tiers are promoted first by `Administration.warm_up`. The file is complete or does not exist; if
    there are no chunks, none is written. Its mode is 0600.

    keys: whole chunks, chunk-major.
    fingerprint: of the cache's chunk format.

    Raises:
        InputError: chunks were forgotten while they were written.
        MisuseError: the cache is closed, or was closed meanwhile.
    """
    holder = f"export/{path}/{next(_numbers)}"
    try:
        chunks = cache.lookup(keys, holder, shape=shape).chunks
        if not chunks:
            return 0
        parents: dict[ChunkKey, ChunkKey | None] = {}
        for group, needed in enumerate(shape.needed(chunks)):
            for column in columns_of(group, shape):
                column_keys = [keys[chunk * shape.keys_per_chunk + column] for chunk in needed]
                parents.update(zip(column_keys, [None, *column_keys], strict=False))
        # A lasting lease: if one expired while the file is written, we would write, and vouch for, later content.
        lease = cache.load(list(parents), holder, lasting=True)
        if not isinstance(lease, ReadLease):
            return 0
        format_id = chunk_header.format_id(fingerprint)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                payload_bytes = cache.pool.sizes.total(lease.keys)
                fields = (_MAGIC, VERSION, _HEADER_BYTES, 0, payload_bytes, len(parents), format_id)
                file.write(seal(_HEADER.pack(*fields)))
                for (key, parent), extent in zip(parents.items(), lease.extents, strict=True):
                    with pool_bytes(cache, extent) as chunk:
                        file.write(chunk_header.pack_header(key, parent, chunk, format_id))
                        file.write(chunk)
                if not cache.release(lease):
                    raise InputError("nothing was exported: chunks of the prefix were forgotten meanwhile")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        return chunks
    finally:
        cache.end(holder)


def import_prefix(cache: LocalCache, path: Path, *, fingerprint: str) -> Imported:
    """Read a file of `export_prefix` into the pool, as far as it is intact and there is room.

    Raises:
        InputError: no such file, another version, or chunks of another format than this cache's.
        MisuseError: the cache is closed, or was closed meanwhile.
    """
    holder = f"import/{path}/{next(_numbers)}"
    try:
        with path.open("rb") as file:
            return _Import(cache, file, chunk_header.format_id(fingerprint), holder).run(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        cache.end(holder)


@contextmanager
def pool_bytes(cache: LocalCache, extent: HostExtent) -> Iterator[memoryview]:
    """The bytes of this extent, while the body runs. Raises `MisuseError`: the cache is closed. This is checked before
    each chunk, because a server that stops does not wait until a file is complete."""
    cache.admin.check_open()
    try:
        chunk = cache.pool.view[extent.offset : extent.offset + extent.nbytes]
    except ValueError:  # it was unmapped just now
        raise MisuseError("the cache is closed") from None
    with chunk:
        yield chunk


def _read_header(file: BinaryIO, path: Path, format_id: bytes) -> int:
    """How many chunks follow."""
    data = file.read(_HEADER_BYTES)
    if len(data) < _HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise InputError(f"{path} is not an exported prefix")
    _, version, header_bytes, _, payload_bytes, chunks, file_format_id = _HEADER.unpack(data[: _HEADER.size])
    if unseal(data) is None:
        raise InputError(f"{path} is damaged: the checksum of its header is wrong")
    if version != VERSION or header_bytes != _HEADER_BYTES:
        raise InputError(f"{path} is of version {version}; this release reads version {VERSION}: export it again")
    if file_format_id != format_id:
        raise InputError(
            f"{path} holds chunks of another format; export it from an engine of the same model, dtype and chunk size"
        )
    expected_bytes = _HEADER_BYTES + chunks * chunk_header.HEADER_BYTES + payload_bytes
    actual_bytes = os.fstat(file.fileno()).st_size
    if actual_bytes != expected_bytes:
        raise InputError(
            f"{path} has {actual_bytes} bytes where its header says {expected_bytes}: it was truncated, or is a "
            "different file"
        )
    return int(chunks)


@dataclass(frozen=True, slots=True)
class _FileChunk:
    """A chunk of the file. header: as in the file. offset: where its bytes begin."""

    key: ChunkKey
    header: bytes
    offset: int


@dataclass(slots=True)
class _Import:
    """The import of one file.

    chain: the held keys of the group and shard that is being read.
    done: number of chunks of the file that are held.
    offset: where the next chunk begins.
    """

    cache: LocalCache
    file: BinaryIO
    format_id: bytes
    holder: str
    chain: list[ChunkKey] = field(default_factory=list)
    done: int = 0
    offset: int = _HEADER_BYTES

    def run(self, path: Path) -> Imported:
        chunks = _read_header(self.file, path, self.format_id)
        while self.done < chunks:
            batch, stopped = self._next_few(min(_BATCH_CHUNKS, chunks - self.done))
            stopped = self._take(batch) or stopped
            if stopped:
                return Imported(self.done, stopped)
        return Imported(self.done, "")

    def _next_few(self, at_most: int) -> tuple[list[_FileChunk], str]:
        """The next chunks of one group and shard, as far as they continue its chain; and what is wrong, if anything."""
        batch: list[_FileChunk] = []
        while len(batch) < at_most:
            number = self.done + len(batch)
            self.file.seek(self.offset)
            data = self.file.read(chunk_header.HEADER_BYTES)
            header = chunk_header.read_header(data)
            if isinstance(header, Damaged):
                return batch, f"chunk {number} is damaged: {header.reason}"
            if header.parent is None and (batch or self.chain):
                if batch:
                    break
                self.chain.clear()
            previous = batch[-1].key if batch else self.chain[-1] if self.chain else None
            if header.parent != previous:
                return batch, f"chunk {number} is damaged: it does not follow the chunk before it"
            nbytes = self.cache.pool.sizes.of(header.key)
            if header.decoded_bytes != nbytes:
                return batch, f"chunk {number} has {header.decoded_bytes} bytes, and its group's have {nbytes} here"
            batch.append(_FileChunk(header.key, data, self.offset + chunk_header.HEADER_BYTES))
            self.offset += chunk_header.HEADER_BYTES + nbytes
        return batch, ""

    def _take(self, batch: Sequence[_FileChunk]) -> str:
        """Read these chunks into the pool, and count those that are then held. Returns why not all are, or ""."""
        chain = [*self.chain, *(entry.key for entry in batch)]
        lease = self.cache.begin_store(chain, self.holder)
        number_of = {entry.key: number for number, entry in enumerate(batch)}
        if not number_of.keys() >= set(lease.keys):
            # Chunks before these were forgotten meanwhile, and their bytes are not at hand.
            self.cache.release(lease)
            return self._count_held(chain)
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            entry = batch[number_of[key]]
            self.file.seek(entry.offset)
            with pool_bytes(self.cache, extent) as chunk:
                self.file.readinto(chunk)  # type: ignore[attr-defined]  # files from `open` have it
                damage = chunk_header.check(entry.header, chunk, key=key, format_id=self.format_id)
            if damage is not None:
                # A lease is committed as a whole or not at all, so the few chunks before this one are given up too.
                self.cache.release(lease)
                return f"chunk {self.done + number_of[key]} is damaged: {damage.reason}"
        self.cache.commit(lease)
        stopped = self._count_held(chain)
        return lease.refused or stopped

    def _count_held(self, chain: list[ChunkKey]) -> str:
        """Count the chunks of this chain that are held, and keep them. Returns why not all are, or ""."""
        held = self.cache.lookup(chain, self.holder).chunks
        self.done += held - len(self.chain)
        self.chain = chain[:held]
        if held == len(chain):
            return ""
        return (
            f"chunk {self.done} is being stored by another client too, or was forgotten immediately; import the file "
            "again"
        )
