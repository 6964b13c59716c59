"""Answers `Explain`: the state of a prompt's chunks in every cache of the server and every key space that could hold
them. Anything here may run on any thread.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from kv_core.keys import ChunkKey
from kv_observe.explain import explain
from kv_observe.history import History, KnownKeySpace, Memory
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.threads import start_thread

from kv_server import wire
from kv_server.peers.side import directories_of
from kv_server.report import Registration
from kv_server.wire import Format

MAX_RUNS = 1024
MAX_EXPLAINED_KEY_SPACES = 16
_MAX_RUNS_OF_GROUP = 64
_FIRST_CHUNKS = 4
"""If none of the first chunks is known in a key space, the prompt is not known there."""


def explain_elsewhere(
    explaining: Callable[[], wire.Explanations], then: Callable[["Future[wire.Explanations]"], object]
) -> None:
    """Do this on a thread of its own, and call `then` there with its outcome. A prompt of thousands of chunks with many
    groups and shards takes tenths of a second, and all engines would wait for the serving thread as long."""
    explained: Future[wire.Explanations] = Future()

    def run() -> None:
        try:
            explained.set_result(explaining())
        except Exception as error:  # noqa: BLE001  # the client that asked gets it
            explained.set_exception(error)
        then(explained)

    if start_thread(threading.Thread(target=run, name="kv-explain", daemon=True)):
        run()


def explain_prompt(
    request: wire.Explain,
    caches: Mapping[Format, LocalCache],
    sessions: Sequence[Registration],
    history: History | None,
    now_s: float,
) -> wire.Explanations:
    """Raises `InputError`: the request's digests and key prefixes form no keys."""
    digests, key_prefixes = request.unpack()
    explained_spaces: list[wire.Explained] = []
    is_whole = True
    for (group_bytes, fingerprint), cache in caches.items():
        memory = None if history is None else history.of(cache.events.name)
        is_whole = is_whole and memory is not None and memory.is_whole
        engines = {one.engine for one in sessions if (one.group_bytes, one.fingerprint) == (group_bytes, fingerprint)}
        remote_tiers_skipped = cache.lower.remote_tiers_skipped()
        directories = directories_of(cache)
        for known, was_asked in _key_spaces(key_prefixes, memory):
            if len(explained_spaces) == MAX_EXPLAINED_KEY_SPACES:
                break
            try:
                if not _is_known(cache, memory, known, digests):
                    continue
                shares = [_keys(prefix, digests) for prefix in known.key_prefixes]
                explained = explain(cache, memory, shares, now_s)
            except ClosedError:  # it had no client, and made room for another format meanwhile
                break
            explained_spaces.append(
                wire.Explained(
                    group_bytes,
                    fingerprint,
                    known.space.hex(),
                    known.tenant.hex(),
                    sorted(engines),
                    was_asked,
                    len(shares),
                    explained.held,
                    explained.prefix,
                    [replace(group, states=group.states[:_MAX_RUNS_OF_GROUP]) for group in explained.lacking],
                    remote_tiers_skipped,
                    explained.runs[:MAX_RUNS],
                    len(explained.runs) > MAX_RUNS,
                    explained.choice,
                    directories,
                )
            )
    remembered_s = 0.0 if history is None else max(0.0, now_s - history.began_s)
    history_keys = 0 if history is None else history.max_keys
    return wire.Explanations(len(caches), history_keys, remembered_s, is_whole, explained_spaces)


def _key_spaces(key_prefixes: Sequence[bytes], memory: Memory | None) -> list[tuple[KnownKeySpace, bool]]:
    """First those of the request, each with its groups and shards as far as known; then all others."""
    known = {} if memory is None else {(one.space, one.tenant): one for one in memory.known_key_spaces()}
    requested: dict[tuple[bytes, bytes], set[bytes]] = {}
    for prefix in key_prefixes:
        key = ChunkKey(prefix)
        requested.setdefault((key.space_id, key.tenant), set()).add(prefix)
    found = []
    for (space, tenant), own in requested.items():
        others = known.pop((space, tenant), None)
        prefixes = own | set(others.key_prefixes if others else ())
        found.append((KnownKeySpace(space, tenant, tuple(sorted(prefixes))), True))
    return found + [(one, False) for one in known.values()]


def _is_known(cache: LocalCache, memory: Memory | None, known: KnownKeySpace, digests: Sequence[bytes]) -> bool:
    """Looks at little: it is called on the serving thread for every key space that is remembered."""
    if not digests:
        return False
    shape = cache.shape_of(known.space)
    groups = () if shape is None else shape.groups
    whole = {group for group, coverage in enumerate(groups) if coverage.kind == "all"}
    prefixes = [prefix for prefix in known.key_prefixes if shape is None or ChunkKey(prefix).group in whole]
    # If a model has only windows and states, the first chunks may never have been stored.
    looked_at, most = (prefixes, _FIRST_CHUNKS) if prefixes else (known.key_prefixes, len(digests))
    keys = [key for prefix in looked_at for key in _keys(prefix, digests[:most])]
    return any(cache.admin.where(keys)) or (memory is not None and any(memory.fate(key) for key in keys))


def _keys(prefix: bytes, digests: Sequence[bytes]) -> list[ChunkKey]:
    return [ChunkKey(prefix + digest) for digest in digests]
