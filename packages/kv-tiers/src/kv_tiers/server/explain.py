"""The answer to `Explain`: a prompt's chunks in every cache of the server, under every name they may have there."""

from collections.abc import Mapping, Sequence

from kv_core.keys import ChunkKey

from kv_tiers.cache.local import LocalCache
from kv_tiers.server import wire
from kv_tiers.server.caches import Format
from kv_tiers.server.report import Registration
from kv_tiers.watch.explain import explain
from kv_tiers.watch.history import History, Memory, Naming

MAX_RUNS = 1024
MAX_TOLD = 16
_LOOKED_AT_FIRST = 4
"""A key space in which none of the first chunks is known does not know the prompt."""


def explain_prompt(
    request: wire.Explain,
    caches: Mapping[Format, LocalCache],
    sessions: Sequence[Registration],
    history: History | None,
    now_s: float,
) -> wire.Explanations:
    """
    Raises:
        InputError: the request's digests and heads make no keys.
    """
    digests, heads = request.unpack()
    told: list[wire.Explained] = []
    is_whole = True
    for (nbytes, fingerprint), cache in caches.items():
        memory = None if history is None else history.of(cache.events.name)
        is_whole = is_whole and memory is not None and memory.is_whole
        engines = {one.engine for one in sessions if (one.chunk_bytes, one.fingerprint) == (nbytes, fingerprint)}
        remote_tiers_skipped = cache.below.remote_tiers_skipped()
        for naming, was_asked in _namings(heads, memory):
            if len(told) == MAX_TOLD:
                break
            shares = [[ChunkKey(head + digest) for digest in digests] for head in naming.heads]
            if not _is_known(cache, memory, [keys[:_LOOKED_AT_FIRST] for keys in shares], now_s):
                continue
            explained = explain(cache, memory, shares, now_s)
            told.append(
                wire.Explained(
                    nbytes,
                    fingerprint,
                    naming.space.hex(),
                    naming.tenant.hex(),
                    sorted(engines),
                    was_asked,
                    len(shares),
                    explained.held,
                    remote_tiers_skipped,
                    explained.runs[:MAX_RUNS],
                    len(explained.runs) > MAX_RUNS,
                )
            )
    remembered_s = 0.0 if history is None else max(0.0, now_s - history.began_s)
    history_keys = 0 if history is None else history.max_keys
    return wire.Explanations(len(caches), history_keys, remembered_s, is_whole, told)


def _namings(heads: Sequence[bytes], memory: Memory | None) -> list[tuple[Naming, bool]]:
    """Those that were asked for first, with the shares that are known beside; then all others."""
    known = {} if memory is None else {(naming.space, naming.tenant): naming for naming in memory.namings()}
    asked: dict[tuple[bytes, bytes], set[bytes]] = {}
    for head in heads:
        key = ChunkKey(head)
        asked.setdefault((key.space_id, key.tenant), set()).add(head)
    found = []
    for (space, tenant), own in asked.items():
        others = known.pop((space, tenant), None)
        found.append((Naming(space, tenant, tuple(sorted(own | set(others.heads if others else ())))), True))
    return found + [(naming, False) for naming in known.values()]


def _is_known(cache: LocalCache, memory: Memory | None, shares: list[list[ChunkKey]], now_s: float) -> bool:
    return any(state.where or state.what for state in explain(cache, memory, shares, now_s).runs)
