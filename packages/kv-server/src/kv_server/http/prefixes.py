"""`/prefixes`: pin, warm up, export and import prefixes, named by their chunks' keys.

Files have plain names and are in one directory, which the settings name and no request can change.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec
from kv_core.coverage import ChunkShape, Coverage
from kv_core.errors import InputError
from kv_core.keys import KEY_BYTES, KEY_VERSION, ChunkKey
from kv_remote.archive import export_prefix, import_prefix
from kv_tiers.cache.local import LocalCache
from kv_tiers.options import spelled_as
from kv_tiers.payload_sizes import MAX_GROUPS
from msgspec import Meta

from kv_server.http.operation import Operation, Problem
from kv_server.http.relay import FormatSelector, Outcome, PrefixJob, Relay, select_cache, select_caches

MAX_KEYS: Final = 1 << 15
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HEX: Final = rf"{KEY_VERSION:02x}(?:{'|'.join(f'[0-9a-f]{{{2 * nbytes - 2}}}' for nbytes in KEY_BYTES)})"

Name = Annotated[
    str, spelled_as(_NAME, "a name of letters, digits, dots, dashes and underscores", min_length=1, max_length=100)
]
Key = Annotated[str, spelled_as(_HEX, "a key as kv keys prints it", description="As `kv keys` prints it.")]
CoverageText = Annotated[
    str, spelled_as(r"(all|state|(window|local):[1-9][0-9]{0,9})", "all, state, window:TOKENS or local:TOKENS")
]
Keys = Annotated[list[Key], Meta(min_length=1, max_length=MAX_KEYS, description="From the prompt's first chunk on.")]


class Named(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """name: of a pin."""

    name: Name


class Shaped(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """keys: of whole chunks, chunk by chunk: for each chunk those of every group, and for each group those of every
        shard.
    coverages: by group, what a hit needs of a prefix; `kv explain` and docs/formats/wire.md show the notation. A model
        with only full attention needs none of these.
    chunk_tokens: tokens of a chunk.
    shards: the number of shards of every group.
    """

    keys: Keys
    chunk_tokens: Annotated[int, Meta(gt=0, lt=1 << 32)] = 1
    coverages: Annotated[tuple[CoverageText, ...], Meta(min_length=1, max_length=MAX_GROUPS)] = ("all",)
    shards: Annotated[int, Meta(gt=0, le=65535)] = 1

    def shape(self) -> ChunkShape:
        """Raises `InputError`: there is no such coverage. Raises `Problem`: the keys are not those of whole chunks."""
        shape = ChunkShape(self.chunk_tokens, tuple(map(Coverage.parse, self.coverages)), self.shards)
        if len(self.keys) % shape.keys_per_chunk:
            raise Problem(409, f"{len(self.keys)} keys are not whole chunks of {shape.keys_per_chunk} keys")
        return shape


class Prefix(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """name: of a pin."""

    name: Name


class WarmUp(Prefix, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """timeout_s: how long the lower tiers may take."""

    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class Export(Shaped, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """file: a plain name in the server's archive_directory."""

    file: Name


class Import(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """file: a plain name in the server's archive_directory."""

    file: Name


class Pinned(msgspec.Struct, frozen=True):
    """chunks: how many leading chunks stay until they are unpinned. Pins take at most half the pool."""

    chunks: int


class Unpinned(msgspec.Struct, frozen=True):
    """caches: how many had a pin of this name."""

    caches: int


class Pin(msgspec.Struct, frozen=True):
    chunk_bytes: int
    fingerprint: str
    name: str
    chunks: int


class Prefixes(msgspec.Struct, frozen=True):
    """Pins, the files of the archive_directory, and recent jobs, oldest first."""

    pins: list[Pin]
    files: list[str]
    jobs: list[PrefixJob]


def prefix_operations(relay: Relay, archive_directory: str) -> list[Operation]:
    jobs = relay.jobs

    async def prefixes() -> Prefixes:
        pins = []
        for (group_bytes, fingerprint), cache in (await relay.caches()).items():
            held = await relay.call(cache.admin.pins)
            pins += [Pin(max(group_bytes), fingerprint, name, chunks) for name, chunks in held.items()]
        return Prefixes(pins, await relay.on_archive(partial(_files, archive_directory)), jobs.all())

    async def pin(body: Prefix) -> Pinned:
        _, cache = await select_cache(relay, body)
        pinning = partial(cache.admin.pin, keys_of(body.keys), _plain(body.name), shape=body.shape())
        return Pinned(await relay.call(pinning))

    async def unpin(body: Named) -> Unpinned:
        caches = (await select_caches(relay, body)).values()
        unpinned = [await relay.call(partial(cache.admin.unpin, _plain(body.name))) for cache in caches]
        if not any(unpinned):
            raise Problem(404, f"nothing is pinned as {body.name!r}; GET /prefixes lists what is")
        return Unpinned(sum(unpinned))

    async def warm_up(body: WarmUp) -> PrefixJob:
        _, cache = await select_cache(relay, body)
        keys, name = keys_of(body.keys), _plain(body.name)
        return jobs.start("warm-up", name, partial(_warm_up, cache, keys, name, body.timeout_s, body.shape()))

    async def export(body: Export) -> PrefixJob:
        (_, fingerprint), cache = await select_cache(relay, body)
        path = _archived(archive_directory, body.file)
        exporting = partial(_export, cache, keys_of(body.keys), path, fingerprint, body.shape())
        return jobs.start("export", body.file, exporting)

    async def import_(body: Import) -> PrefixJob:
        (_, fingerprint), cache = await select_cache(relay, body)
        path = _archived(archive_directory, body.file)
        if not await relay.on_archive(path.is_file):
            raise Problem(404, f"there is no file {body.file!r} in the archive_directory; GET /prefixes lists what is")
        return jobs.start("import", body.file, partial(_import, cache, path, fingerprint))

    async def job(id: str) -> PrefixJob:  # the name in the path
        if not re.fullmatch("[0-9]{1,18}", id):
            raise Problem(404, f"jobs have numbers; there is no job {id[:100]!r}")
        return jobs.find(int(id))

    about = "Unpin a prefix, which may then be evicted like any other"
    one = (404, 409, 503)
    starts = partial(Operation, "POST", answer=PrefixJob, status=202, failures=(*one, 429))
    return [
        Operation("GET", "/prefixes", "Pins, files and recent jobs", prefixes, Prefixes, failures=(503,)),
        Operation("GET", "/prefixes/jobs/{id}", "The state of a job", job, PrefixJob, failures=(404,)),
        Operation("POST", "/prefixes/pin", "Keep a prefix in the pool", pin, Pinned, Prefix, failures=one),
        Operation("POST", "/prefixes/unpin", about, unpin, Unpinned, Named, failures=(404, 503)),
        starts("/prefixes/warm-up", "Promote a prefix from the lower tiers, and pin it", warm_up, body=WarmUp),
        starts("/prefixes/export", "Write what the pool holds of a prefix to a file", export, body=Export),
        starts("/prefixes/import", "Import an exported prefix from its file", import_, body=Import),
    ]


def keys_of(texts: Sequence[str]) -> list[ChunkKey]:
    return [ChunkKey.from_hex(text) for text in texts]


def _plain(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise InputError(f"{name!r} is not a plain name: letters, digits and . _ -, the first a letter or digit")
    return name


def _archived(archive_directory: str, file: str) -> Path:
    if not archive_directory:
        raise Problem(409, "this server has nowhere to keep files; start it with http.archive_directory")
    return Path(archive_directory) / _plain(file)


def _files(archive_directory: str) -> list[str]:
    """Those that a request can name: an export that is not complete yet has a name of its own, and others may be no
    text at all."""
    try:
        found = [path for path in Path(archive_directory).iterdir() if path.is_file()] if archive_directory else []
    except OSError:
        return []
    return sorted(path.name for path in found if re.fullmatch(_NAME, path.name))


def _warm_up(cache: LocalCache, keys: Sequence[ChunkKey], name: str, timeout_s: float, shape: ChunkShape) -> Outcome:
    chunks = cache.admin.warm_up(keys, name, timeout_s=timeout_s, shape=shape)
    requested = len(keys) // shape.keys_per_chunk
    if not chunks:
        raise _nothing(
            "nothing was warmed up or pinned: no tier holds", requested, "see what pins keep (GET /prefixes)"
        )
    return chunks, "" if chunks == requested else f"{chunks} of {requested} chunks could be promoted and pinned"


def _nothing(what: str, chunks: int, otherwise: str) -> InputError:
    return InputError(
        f"{what} the first of these {chunks} chunks. Have an engine serve the prompt; give kv keys that engine's key "
        f"space (--space, as kv explain --json shows it) and the salt; or {otherwise}"
    )


def _export(cache: LocalCache, keys: Sequence[ChunkKey], path: Path, fingerprint: str, shape: ChunkShape) -> Outcome:
    chunks = export_prefix(cache, keys, path, fingerprint=fingerprint, shape=shape)
    requested = len(keys) // shape.keys_per_chunk
    if not chunks:
        raise _nothing("nothing was exported or written: the pool does not hold", requested, "warm the prefix up first")
    return chunks, "" if chunks == requested else f"the pool holds {chunks} of {requested} chunks; warm up the rest"


def _import(cache: LocalCache, path: Path, fingerprint: str) -> Outcome:
    imported = import_prefix(cache, path, fingerprint=fingerprint)
    return imported.chunks, imported.stopped
