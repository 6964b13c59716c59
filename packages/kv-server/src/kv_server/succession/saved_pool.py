"""A pool that outlives its server's process, for a server whose pool has a name.

Its memory is a private file in shared memory (`pool_path`). A server that stops writes an index beside it: its chunks,
each with the checksum of its bytes, the leases under which clients may still be copying, and what else a live upgrade
passes on. The next server removes the index before it uses the pool. So one that was killed leaves none, and the next
starts with an empty pool, in a new file: clients may still write to the old one.
"""

import fcntl
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Final

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.hashing import checksum_of
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.pool.host_pool import InheritedPool, check_room, pool_path, slot_bytes_for
from kv_tiers.pool.private_files import open_locked, open_own_file, own_directory
from kv_tiers.threads import start_thread

from kv_server.session import OrphanImage
from kv_server.succession.channel import FORMAT, decoded, encoded
from kv_server.succession.image import CacheImage, Passed, PoolImage, end_inherited_leases, restore_cache, restore_pool
from kv_server.wire import Format

_log = limited_logger(__name__)

_REMEDY: Final = "remove it, or write another name for the pool (host.name)"
_THREADS: Final = 8
_AT_ONCE: Final = 32
"""Chunks that are verified, and leased meanwhile, at a time."""


class SavedIndex(msgspec.Struct):
    """The index beside a pool's file. checksums: of the chunks in `pool.keys`."""

    format: int
    pool: PoolImage
    cache: CacheImage
    orphans: list[OrphanImage]
    checksums: list[bytes]


def saved_path(name: str, cache: str) -> Path:
    """The file of the pool of this name, of one of a server's caches. Raises `ConfigError`: not a valid name."""
    return pool_path(f"{name}.{cache}")


def open_saved(path: Path, wanted: Format, slots: int, mapped_slots: int) -> tuple[InheritedPool, SavedIndex | None]:
    """The pool in this file, and what the last server left there. Raises `ConfigError`: another server has it, it is
    not ours alone, or it cannot be made."""
    try:
        own_directory(path.parent, _REMEDY)
        descriptor = _open(path)
        index = _take_index(path, wanted, mapped_slots)
        slot_bytes = slot_bytes_for(max(wanted[0]))
        nbytes = mapped_slots * slot_bytes
        if index is not None and os.fstat(descriptor).st_size == nbytes:
            return InheritedPool(index.pool.name, slots, mapped_slots, descriptor), index
        if os.fstat(descriptor).st_size:
            _log.warning(
                "pool %s starts empty: the last server did not end cleanly, or had another release, another format or "
                "another number of slots",
                path.name,
            )
            path.unlink()
            os.close(descriptor)
            descriptor = _open(path)
        check_room(descriptor, path, slots * slot_bytes)  # of the rest it says so when the capacity is raised
        os.ftruncate(descriptor, nbytes)
        return InheritedPool(f"saved-{token_hex(8)}", slots, mapped_slots, descriptor), None
    except OSError as error:
        raise ConfigError(f"the pool's file {path} cannot be used: {error.strerror}; {_REMEDY}") from None


def restore_saved(cache: LocalCache, index: SavedIndex) -> None:
    """In a new cache on this pool: what the index lists, each chunk to be verified before it is used."""
    restore_pool(cache, index.pool)
    restore_cache(cache, index.cache)
    with cache.parts.host.lock:
        cache.parts.host.doubt(dict(zip(index.pool.at, index.checksums, strict=True)))
    end_inherited_leases(cache)
    cache.admin.trim()
    thread = threading.Thread(target=_verify, args=(cache, index), name="kv-verify", daemon=True)
    if why := start_thread(thread):
        _log.info("the chunks that a server left are verified when they are looked up: %s", why)


def image_to_save(path: Path, wanted: Format, cache: LocalCache, orphans: Sequence[OrphanImage]) -> SavedIndex | None:
    """What a server that stops leaves to the next. None: nothing. From then on the cache takes nothing new: a slot that
    is overwritten before its checksum is taken would have the checksum of another chunk's bytes."""
    try:
        if not os.path.samestat(os.fstat(cache.pool.descriptor), path.stat()):
            return None  # taken over from a server whose pool had another name, or none
        passed = Passed(wanted, cache)
        pool = passed.pool_image()
        with cache.parts.host.lock:
            image = passed.cache_image()
            cache.parts.host.stop()
    except (OSError, TierDown) as error:
        _log.warning("the next server finds pool %s empty: %s", path.name, error)
        return None
    at_last = dict(zip(pool.keys, pool.at, strict=True)) | dict(image.changed)
    pairs = [(key, slot) for key, slot in at_last.items() if slot >= 0]
    pool = replace(pool, keys=[key for key, _ in pairs], at=[slot for _, slot in pairs])
    unverified, view = image.unverified, cache.pool
    image = replace(image, changed=[], removals={}, removed={}, cleared_s=None, unverified={})

    def checksum(pair: tuple[ChunkKey, int]) -> bytes:
        key, slot = pair
        if (claimed := unverified.get(slot)) is not None:  # one of the bytes would vouch for what nobody has verified
            return claimed
        with view.chunk(slot, view.sizes.of(key)) as chunk:
            return checksum_of(chunk)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        checksums = list(threads.map(checksum, pairs))
    return SavedIndex(FORMAT, pool, image, list(orphans), checksums)


def write_index(path: Path, index: SavedIndex) -> None:
    """After the cache is closed: nothing changes the pool any more."""
    body = encoded(index)
    written = path.with_name(f"{path.name}.new")
    try:
        with suppress(FileNotFoundError):
            written.unlink()
        with open(open_own_file(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _REMEDY), "wb") as file:
            file.write(checksum_of(memoryview(body)) + body)
        written.rename(_index_path(path))
    except (OSError, ConfigError) as error:
        _log.warning("the next server finds pool %s empty: %s", path.name, error)


def _verify(cache: LocalCache, index: SavedIndex) -> None:
    """Before requests need them, the most valuable first. Then the tiers below get what they had not got yet."""
    parts, wanted = cache.parts, list(reversed(index.pool.at))
    with suppress(ClosedError):
        for at in range(0, len(wanted), _AT_ONCE):
            with parts.host.lock:
                parts.host.check_open()
                doubtful = parts.host.lease_doubtful(wanted[at : at + _AT_ONCE])
            if doubtful:
                parts.verify(doubtful)
        with parts.host.lock:
            parts.host.check_open()
            for number, name in enumerate(cache.tiers[1:]):
                waiting = index.cache.waiting.get(name, ())
                there = [one for one in waiting if parts.index.key_at(one[0]) == one[1]]  # no other chunk, nor damaged
                parts.lower.spills.restore(number, there)


def _take_index(path: Path, wanted: Format, mapped_slots: int) -> SavedIndex | None:
    """Read the index and remove it."""
    index_path = _index_path(path)
    try:
        with open(open_own_file(index_path, os.O_RDONLY, _REMEDY), "rb") as file:
            data = file.read()
        index_path.unlink()
        checksum, body = data[:16], data[16:]
        if checksum_of(memoryview(body)) != checksum or msgspec.msgpack.decode(body)["format"] != FORMAT:
            return None
        index = decoded(body, SavedIndex)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return None
    return index if (index.pool.format, index.pool.mapped_slots) == (wanted, mapped_slots) else None


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def _open(path: Path) -> int:
    """Raises `ConfigError`: another server has it, or it is not ours alone."""
    file = open_locked(path, lambda: open_own_file(path, os.O_RDWR | os.O_CREAT, _REMEDY))
    if file is None:
        raise ConfigError(f"another server has the pool {path.name!r}: stop that one, or write another host.name")
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    return file
