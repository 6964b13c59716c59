"""Why a prompt was missed: for each of its chunks where it is now, or what became of it.

What is said is what is known: the index says what the pool holds, a tier that answers from memory says what it holds,
and the history says the rest, as far back as it goes. A tier that would have to be asked over a network is not asked.
The history is told a moment after things happen, so what left in the last instant may have no reason yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kv_core.keys import ChunkKey

from kv_tiers.local import LocalCache
from kv_tiers.observe.history import Fate, Memory

BEING_WRITTEN = "being written"


@dataclass(frozen=True, slots=True)
class ChunkState:
    """One chunk, or a run of `chunks` neighbours that are alike.

    where: the tier that holds it, the fastest if several; `BEING_WRITTEN`; or "" for nowhere.
    what, tier, cause, policy: as of `Fate`; what is "" if nothing is known. Said of what is held too.
    seconds_ago: since that, and since it was last stored in the pool. below: tiers where it was stored at some time.
    parts: it was never heard of, and other prompts went on differently after the chunk before.
    """

    first: int
    chunks: int
    where: str
    what: str = ""
    tier: str = ""
    cause: str = ""
    policy: str = ""
    seconds_ago: float | None = None
    stored_seconds_ago: float | None = None
    below: tuple[str, ...] = ()
    parts: bool = False


def explain(cache: LocalCache, memory: Memory | None, keys: Sequence[ChunkKey], now_s: float) -> list[ChunkState]:
    """One a key, in order, of a prompt's keys from its first chunk; of one share of each chunk.

    memory: of this cache (`History.of`), if there is one. now_s: by the bus's clock.
    """
    found = cache.where(keys)
    states = []
    before: ChunkKey | None = None
    for number, (key, where) in enumerate(zip(keys, found, strict=True)):
        fate = None if memory is None else memory.fate(key)
        state = ChunkState(number, 1, where)
        if fate is not None:
            state = _with_fate(state, fate, now_s)
        elif not where and memory is not None and before is not None and memory.goes_on_otherwise(before, key):
            state = replace(state, parts=True)
        states.append(state)
        before = key
    return states


def explain_shares(
    cache: LocalCache, memory: Memory | None, shares: Sequence[Sequence[ChunkKey]], now_s: float
) -> list[ChunkState]:
    """As `explain` for chunks of several shares: a chunk is as badly off as the worst of its shares.

    shares: of each share all chunks' keys.
    """
    explained = [explain(cache, memory, keys, now_s) for keys in shares]
    return [min(states, key=is_held) for states in zip(*explained, strict=True)]


def runs(states: Sequence[ChunkState]) -> list[ChunkState]:
    """Neighbours that are alike as one."""
    joined: list[ChunkState] = []
    for state in states:
        if joined and _are_alike(joined[-1], state):
            joined[-1] = replace(joined[-1], chunks=joined[-1].chunks + state.chunks)
        else:
            joined.append(state)
    return joined


def leading_held(states: Sequence[ChunkState]) -> int:
    """How many leading chunks some tier holds."""
    return next((number for number, state in enumerate(states) if not is_held(state)), len(states))


def is_held(state: ChunkState) -> bool:
    return state.where not in ("", BEING_WRITTEN)


def _with_fate(state: ChunkState, fate: Fate, now_s: float) -> ChunkState:
    return replace(
        state,
        what=fate.what,
        tier=fate.tier,
        cause=fate.cause,
        policy=fate.policy,
        seconds_ago=max(0.0, now_s - fate.at_s),
        stored_seconds_ago=None if fate.stored_s is None else max(0.0, now_s - fate.stored_s),
        below=tuple(tier for tier, _ in fate.below),
    )


def _are_alike(one: ChunkState, other: ChunkState) -> bool:
    """What is held is alike wherever it is the same; what is not, if it happened at about the same time."""
    if is_held(one) or is_held(other):
        return one.where == other.where
    if one.parts or other.parts:
        return False
    if (one.where, one.what, one.tier, one.cause, one.policy) != (
        other.where,
        other.what,
        other.tier,
        other.cause,
        other.policy,
    ):
        return False
    return one.seconds_ago is None or other.seconds_ago is None or abs(one.seconds_ago - other.seconds_ago) < 1.0
