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
from kv_tiers.watch.chunk_state import ChunkState, GroupState
from kv_tiers.watch.history import Fate, Memory


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


_Looked = tuple[str, Fate | None, bool]
"""For one chunk: where it is, what happened to it, and whether the prompt diverges there."""


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
    by_group: dict[int, list[list[_Looked]]] = {}
    for keys in columns if chunks else ():
        by_group.setdefault(keys[0].group, []).append(_look(cache, memory, keys))
    looked = {
        group: [_worst(of_shards) for of_shards in zip(*of_group, strict=True)] for group, of_group in by_group.items()
    }
    coverages = {} if shape is None else dict(enumerate(shape.groups))
    whole = [looked[group] for group in looked if coverages.get(group, ALL).kind == "all"]
    worst = [_worst(of_groups) for of_groups in zip(*whole, strict=True)]
    prefix = next((at for at, (where, _, _) in enumerate(worst) if not _holds(where)), chunks)
    if shape is None:
        choice = _choice(cache, columns, prefix) if chunks else None
        return Explanation(_runs(worst, 0, now_s), prefix, prefix, [], choice)
    known = [looked.get(group, [("", None, False)] * chunks) for group in coverages]
    one_shard = ChunkShape(shape.chunk_tokens, shape.groups)
    held, _ = last_boundary(one_shard, prefix, lambda place: _holds(known[place % len(known)][place // len(known)][0]))
    lacking = []
    for group in one_shard.other_groups:
        first = shape.first_chunk(group, prefix)
        needed = [(where, fate, False) for where, fate, _ in known[group][first:prefix]]
        missing = tuple(state for state in _runs(needed, first, now_s) if not is_held(state))
        if missing:
            lacking.append(GroupState(group, str(shape.groups[group]), missing))
    return Explanation(_runs(worst, 0, now_s), held, prefix, lacking, _choice(cache, columns, held))


def _choice(cache: LocalCache, columns: Sequence[Sequence[ChunkKey]], held: int) -> Choice | None:
    """The choice for a hit of this many chunks, with the costs of the latest lookup's engine; None: there was none."""
    known = cache.costs_of(columns[0][0].space_id)
    if known is None:
        return None
    costs = replace(known[0], computed_tokens=0, before_tokens=0)
    return weigh(cache, columns, held, costs, known[1])


def weigh(
    cache: LocalCache, columns: Sequence[Sequence[ChunkKey]], held: int, costs: Costs, shape: ChunkShape
) -> Choice:
    """What a lookup would advise an engine with these costs for a hit of this many chunks.

    columns: for each group and shard, the keys of all chunks from the first.
    """
    nbytes: dict[tuple[int, str], int] = {}  # by chunk and tier
    for keys in columns:
        first = shape.first_chunk(keys[0].group, held) if keys[0].group < len(shape.groups) else held
        needed = keys[first:held]
        for chunk, (key, where) in enumerate(zip(needed, cache.admin.where(needed), strict=True), first):
            if where != TIER:
                nbytes[chunk, where] = nbytes.get((chunk, where), 0) + cache.pool.sizes.of(key)
    parts = [(tier, chunk, chunk + 1, size) for (chunk, tier), size in sorted(nbytes.items())]
    # For groups that need less than the whole prefix, a shorter boundary needs other chunks: it is all or nothing.
    have = (min((chunk for chunk, _ in nbytes), default=held)) if shape.is_plain or not parts else 0
    if costs.compute is None or not parts:
        return choose(costs, shape.chunk_tokens, held)
    worth = cache.lower.worth(parts, shape, have, costs)
    choice = choose(costs, shape.chunk_tokens, worth.chunks, worth.skipped)
    if choice.load_s is None or worth.awaited is None:
        return choice
    return replace(choice, load_s=(costs.load_s(0, have * shape.chunk_tokens) or 0.0) + worth.awaited.load_s)


def is_held(state: ChunkState) -> bool:
    return _holds(state.where)


def _runs(chunks: Sequence[_Looked], first: int, now_s: float) -> list[ChunkState]:
    """first: the place of the first of these in the prompt."""
    starts = [at for at, chunk in enumerate(chunks) if not at or not _are_alike(chunks[at - 1], chunk)]
    ends = [*starts[1:], len(chunks)] if chunks else []
    return [_state(first + at, end - at, chunks[at], now_s) for at, end in zip(starts, ends, strict=True)]


def _look(cache: LocalCache, memory: Memory | None, keys: Sequence[ChunkKey]) -> list[_Looked]:
    places = cache.admin.where(keys)
    if memory is None:
        return [(place, None, False) for place in places]
    looked: list[_Looked] = []
    for number, (key, place) in enumerate(zip(keys, places, strict=True)):
        fate = memory.fate(key)
        diverges = not place and fate is None and number > 0 and memory.diverged_after(keys[number - 1], key)
        looked.append((place, fate, diverges))
    return looked


def _worst(of_shards: Sequence[_Looked]) -> _Looked:
    return next((one for one in of_shards if not _holds(one[0])), of_shards[0])


def _holds(where: str) -> bool:
    return where not in ("", BEING_WRITTEN)


def _state(first: int, chunks: int, chunk: _Looked, now_s: float) -> ChunkState:
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


def _are_alike(one: _Looked, other: _Looked) -> bool:
    """Chunks in the same tier are alike, and others if the same happened to them at about the same time."""
    (where, fate, diverges), (other_where, other_fate, other_diverges) = one, other
    if where != other_where or diverges or other_diverges:
        return False
    if fate is other_fate or _holds(where):
        return True
    if fate is None or other_fate is None:
        return False
    thing, other_thing = ((its.what, its.tier, its.cause, its.policy) for its in (fate, other_fate))
    return thing == other_thing and abs(fate.at_s - other_fate.at_s) < 1.0
