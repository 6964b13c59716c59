"""A prefix in a file: for moving it to another machine, and for starting a fleet warm.

    magic "kvprefix" | version u16 | header size u16 | zero u32 | chunk_bytes u64 | chunks u64 | format id 16
    | xxh3_64 of the above

and then, chunk by chunk in the prompt's order, the chunk's header (docs/formats/chunk.md) and its bytes. Little-endian.
A file is believed as little as a tier is: its size must be what its header says before anything is read, and every
chunk is checked before it can be found.
"""

import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kv_core.errors import InputError
from kv_core.keys import ChunkKey
from kv_core.outcome import Damaged
from kv_core.service import ReadLease

from kv_tiers import chunk_header
from kv_tiers.cache.local import LocalCache
from kv_tiers.sealed import SEAL_BYTES, seal, unseal

VERSION: Final = 2
_MAGIC: Final = b"kvprefix"
_HEADER: Final = struct.Struct("<8sHHIQQ16s")
_HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES
_BATCH_CHUNKS: Final = 8


@dataclass(frozen=True, slots=True)
class Imported:
    """chunks: how many leading chunks of the file are held now. stopped: why no more; empty if all are."""

    chunks: int
    stopped: str


def export_prefix(cache: LocalCache, keys: Sequence[ChunkKey], path: Path, *, fingerprint: str) -> int:
    """Write the leading run of `keys` that the pool holds to `path`; how many chunks that was.

    What lies below the pool is brought up first by `Administration.warm_up`. The file is complete or not there, which
    it is not where that would be none; mode 0600.

    fingerprint: of the cache's chunk format.
    """
    holder = f"export/{path}"
    try:
        chain = list(keys[: cache.lookup(keys, holder).chunks])
        if not chain:
            return 0
        lease = cache.load(chain, holder)
        if not isinstance(lease, ReadLease):
            return 0
        form = chunk_header.format_id(fingerprint)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                described = _HEADER.pack(_MAGIC, VERSION, _HEADER_BYTES, 0, cache.pool.chunk_bytes, len(chain), form)
                file.write(seal(described))
                for key, parent, extent in zip(chain, [None, *chain], lease.extents, strict=False):
                    with cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                        file.write(chunk_header.pack_header(key, parent, chunk, form))
                        file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        return len(chain)
    finally:
        cache.end(holder)


def import_prefix(cache: LocalCache, path: Path, *, fingerprint: str) -> Imported:
    """Take what `export_prefix` wrote, as far as it is whole and there is room.

    Raises:
        InputError: no such file, another version, or chunks of another format than this cache's.
    """
    holder = f"import/{path}"
    try:
        with path.open("rb") as file:
            return _Import(cache, file, chunk_header.format_id(fingerprint), holder).run(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        cache.end(holder)


def _read_header(file: BinaryIO, path: Path, chunk_bytes: int, form: bytes) -> int:
    """How many chunks follow."""
    data = file.read(_HEADER_BYTES)
    if len(data) < _HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise InputError(f"{path} is no exported prefix")
    _, version, header_bytes, _, its_bytes, chunks, its_form = _HEADER.unpack(data[: _HEADER.size])
    if unseal(data) is None:
        raise InputError(f"{path} is damaged: the checksum of its header is wrong")
    if version != VERSION or header_bytes != _HEADER_BYTES:
        raise InputError(f"{path} is of version {version}; this release reads version {VERSION}: export it again")
    if its_bytes != chunk_bytes or its_form != form:
        raise InputError(
            f"{path} holds chunks of another format; export it from an engine of the same model, dtype and chunk size"
        )
    wanted = _HEADER_BYTES + chunks * (chunk_header.HEADER_BYTES + chunk_bytes)
    there = os.fstat(file.fileno()).st_size
    if there != wanted:
        raise InputError(f"{path} has {there} bytes where its header says {wanted}: it was cut, or is another file")
    return int(chunks)


@dataclass(frozen=True, slots=True)
class _Import:
    """One file on its way in."""

    cache: LocalCache
    file: BinaryIO
    form: bytes
    holder: str

    def run(self, path: Path) -> Imported:
        chunks = _read_header(self.file, path, self.cache.pool.chunk_bytes, self.form)
        chain: list[ChunkKey] = []
        while len(chain) < chunks:
            headers, stopped = self._headers(chain, min(_BATCH_CHUNKS, chunks - len(chain)))
            stopped = self._take(chain, headers) or stopped
            if stopped:
                return Imported(len(chain), stopped)
        return Imported(len(chain), "")

    def _at(self, number: int) -> int:
        return _HEADER_BYTES + number * (chunk_header.HEADER_BYTES + self.cache.pool.chunk_bytes)

    def _headers(self, chain: Sequence[ChunkKey], chunks: int) -> tuple[dict[ChunkKey, bytes], str]:
        """Of the next few chunks, as far as they continue the prompt; and why not of all."""
        found: dict[ChunkKey, bytes] = {}
        above = chain[-1] if chain else None
        for number in range(len(chain), len(chain) + chunks):
            self.file.seek(self._at(number))
            data = self.file.read(chunk_header.HEADER_BYTES)
            header = chunk_header.read_header(data)
            if isinstance(header, Damaged):
                return found, f"chunk {number} is damaged: {header.reason}"
            if header.parent != above:
                return found, f"chunk {number} is damaged: it follows another chunk than the one before it"
            found[header.key] = data
            above = header.key
        return found, ""

    def _take(self, chain: list[ChunkKey], headers: dict[ChunkKey, bytes]) -> str:
        """Read these chunks into the pool, and extend `chain` by those that are held then. Why not by all, or ""."""
        lease = self.cache.begin_store([*chain, *headers], self.holder)
        number_of = {key: number for number, key in enumerate(headers, len(chain))}
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            self.file.seek(self._at(number_of[key]) + chunk_header.HEADER_BYTES)
            with self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                self.file.readinto(chunk)  # type: ignore[attr-defined]  # what `open` gives has it
                damage = chunk_header.check(headers[key], chunk, key=key, format_id=self.form)
            if damage is not None:
                # A lease is committed whole or not at all, so the few before this chunk are given up with it.
                self.cache.release(lease)
                return f"chunk {number_of[key]} is damaged: {damage.reason}"
        self.cache.commit(lease)
        held = self.cache.lookup([*chain, *headers], self.holder).chunks
        chain += list(headers)[: held - len(chain)]
        return lease.refused
