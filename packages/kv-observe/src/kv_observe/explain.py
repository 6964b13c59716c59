"""Explains a miss: for each chunk of a prompt, where it is now or what happened to it.

The index shows what the pool holds, a local tier what it holds, and the history the rest, as far back as it goes.
Remote tiers are skipped. The history lags a moment behind, so a chunk that was evicted just now may have no reason yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_core.cost import Choice, Costs, choose
from kv_core.coverage import ALL, ChunkShape
from kv_core.keys import ChunkKey
from kv_tiers.cache.hits import last_boundary
from kv_tiers.cache.host import TIER
from kv_tiers.cache.local import LocalCache
from kv_tiers.index.life import BEING_WRITTEN

from kv_observe.chunk_state import ChunkState, GroupState
from kv_observe.history import ChunkFate, Memory


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about a prompt.

    runs: all its chunks in order, equal neighbours combined. If some groups do not need the whole prefix: those of the
        other groups.
    held: number of leading chunks that would hit if all tiers were queried.
    prefix: number of leading chunks of the groups that need the whole prefix.
    lacking: the groups that lack something for a hit of that length.
    choice: what a lookup would advise now, with the costs of the latest engine; None: no engine has stated costs.
    """

    runs: list[ChunkState]
    held: int
    prefix: int
    lacking: list[GroupState]
    choice: Choice | None = None


_Finding = tuple[str, ChunkFate | None, bool]
"""What is known of one chunk: where it is, what happened to it, and whether the prompt diverges there."""


def explain(
    cache: LocalCache, memory: Memory | None, columns: Sequence[Sequence[ChunkKey]], now_s: float
) -> Explanation:
    """Explain a prompt. If chunks have several groups or shards, the worst of them counts.

    columns: for each group and shard, the keys of all chunks from the first.
    memory: of this cache (`History.of`), if there is one.
    now_s: the time on the bus's clock.
    """
    chunks = len(columns[0])
    shape = cache.shape_of(columns[0][0].space_id) if chunks else None
    by_group: dict[int, list[list[_Finding]]] = {}
    for keys in columns if chunks else ():
        by_group.setdefault(keys[0].group, []).append(_find_all(cache, memory, keys))
    findings = {
        group: [_worst(shard_findings) for shard_findings in zip(*group_findings, strict=True)]
        for group, group_findings in by_group.items()
    }
    coverages = {} if shape is None else dict(enumerate(shape.groups))
    whole = [findings[group] for group in findings if coverages.get(group, ALL).kind == "all"]
    worst = [_worst(alternatives) for alternatives in zip(*whole, strict=True)]
    prefix = next((chunk for chunk, (where, _, _) in enumerate(worst) if not _holds(where)), chunks)
    if shape is None:
        choice = _choice(cache, columns, prefix) if chunks else None
        return Explanation(_runs(worst, 0, now_s), prefix, prefix, [], choice)
    rows = [findings.get(group, [("", None, False)] * chunks) for group in coverages]
    one_shard = ChunkShape(shape.chunk_tokens, shape.groups)
    held, _ = last_boundary(one_shard, prefix, lambda number: _holds(rows[number % len(rows)][number // len(rows)][0]))
    lacking_groups = []
    for group in one_shard.other_groups:
        first = shape.first_chunk(group, prefix)
        needed = [(where, fate, False) for where, fate, _ in rows[group][first:prefix]]
        missing = tuple(state for state in _runs(needed, first, now_s) if not is_held(state))
        if missing:
            lacking_groups.append(GroupState(group, str(shape.groups[group]), missing))
    return Explanation(_runs(worst, 0, now_s), held, prefix, lacking_groups, _choice(cache, columns, held))


def _choice(cache: LocalCache, columns: Sequence[Sequence[ChunkKey]], held: int) -> Choice | None:
    """The choice for a hit of this many chunks, with the costs of the latest lookup's engine; None: there was none."""
    stated = cache.costs_of(columns[0][0].space_id)
    if stated is None:
        return None
    tokens = len(columns[0]) * stated[1].chunk_tokens
    costs = stated[0].of_prompt(tokens)
    return weigh(cache, columns, held, costs, stated[1])


def weigh(
    cache: LocalCache, columns: Sequence[Sequence[ChunkKey]], held: int, costs: Costs, shape: ChunkShape
) -> Choice:
    """What a lookup would advise an engine with these costs for a hit of this many chunks.

    columns: for each group and shard, the keys of all chunks from the first.
    """
    lower_bytes: dict[tuple[int, str], int] = {}  # by chunk and tier
    for keys in columns:
        first = shape.first_chunk(keys[0].group, held) if keys[0].group < len(shape.groups) else held
        needed = keys[first:held]
        for chunk, (key, where) in enumerate(zip(needed, cache.admin.where(needed), strict=True), first):
            if where != TIER:
                lower_bytes[chunk, where] = lower_bytes.get((chunk, where), 0) + cache.pool.sizes.of(key)
    parts = [(tier, chunk, chunk + 1, size) for (chunk, tier), size in sorted(lower_bytes.items())]
    # For groups that need less than the whole prefix, a shorter boundary needs other chunks: it is all or nothing.
    pool_chunks = (min((chunk for chunk, _ in lower_bytes), default=held)) if shape.is_plain or not parts else 0
    if costs.compute is None or not parts:
        return choose(costs, shape.chunk_tokens, held)
    worth = cache.lower.worth(parts, shape, pool_chunks, costs)
    choice = choose(costs, shape.chunk_tokens, worth.chunks, worth.skipped)
    if choice.load_s is None or worth.awaited is None:
        return choice
    return replace(choice, load_s=(costs.load_s(0, pool_chunks * shape.chunk_tokens) or 0.0) + worth.awaited.load_s)


def is_held(state: ChunkState) -> bool:
    return _holds(state.where)


def _runs(chunks: Sequence[_Finding], first: int, now_s: float) -> list[ChunkState]:
    """Equal neighbours combined. first: the place of the first of these chunks in the prompt."""
    starts = [index for index, chunk in enumerate(chunks) if not index or not _are_alike(chunks[index - 1], chunk)]
    ends = [*starts[1:], len(chunks)] if chunks else []
    return [_state(first + start, end - start, chunks[start], now_s) for start, end in zip(starts, ends, strict=True)]


def _find_all(cache: LocalCache, memory: Memory | None, keys: Sequence[ChunkKey]) -> list[_Finding]:
    locations = cache.admin.where(keys)
    if memory is None:
        return [(location, None, False) for location in locations]
    findings: list[_Finding] = []
    for number, (key, location) in enumerate(zip(keys, locations, strict=True)):
        fate = memory.fate(key)
        diverges = not location and fate is None and number > 0 and memory.diverged_after(keys[number - 1], key)
        findings.append((location, fate, diverges))
    return findings


def _worst(findings: Sequence[_Finding]) -> _Finding:
    return next((finding for finding in findings if not _holds(finding[0])), findings[0])


def _holds(where: str) -> bool:
    return where not in ("", BEING_WRITTEN)


def _state(first: int, chunks: int, chunk: _Finding, now_s: float) -> ChunkState:
    where, fate, diverges = chunk
    if fate is None:
        return ChunkState(first, chunks, where, diverges=diverges)
    return ChunkState(
        first,
        chunks,
        where,
        fate.what,
        fate.tier,
        fate.cause,
        fate.policy,
        max(0.0, now_s - fate.at_s),
        None if fate.stored_s is None else max(0.0, now_s - fate.stored_s),
        tuple(tier for tier, _ in fate.below),
    )


def _are_alike(previous: _Finding, current: _Finding) -> bool:
    """Chunks in the same tier are alike, and others if the same happened to them at about the same time."""
    (where, fate, diverges), (other_where, other_fate, other_diverges) = previous, current
    if where != other_where or diverges or other_diverges:
        return False
    if fate is other_fate or _holds(where):
        return True
    if fate is None or other_fate is None:
        return False
    story, other_story = ((known.what, known.tier, known.cause, known.policy) for known in (fate, other_fate))
    return story == other_story and abs(fate.at_s - other_fate.at_s) < 1.0
