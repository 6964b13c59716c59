"""Why a prompt was missed: for each of its chunks where it is now, or what became of it.

What is said is what is known: the index says what the pool holds, a tier that answers from memory says what it holds,
and the history says the rest, as far back as it goes. A tier that would have to be asked over a network is not asked.
The history is told a moment after things happen, so what left in the last instant may have no reason yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.keys import ChunkKey

from kv_tiers.cache.local import LocalCache
from kv_tiers.watch.history import Fate, Memory

BEING_WRITTEN = "being written"


@dataclass(frozen=True, slots=True)
class ChunkState:
    """A run of `chunks` neighbours that are alike, as the first of them is.

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


@dataclass(frozen=True, slots=True)
class Explanation:
    """runs: all chunks of the prompt in order, neighbours that are alike as one. held: the leading ones that a tier
    holds."""

    runs: list[ChunkState]
    held: int


_Looked = tuple[str, Fate | None, bool]
"""Of one chunk: where it is, what became of it, and whether prompts part there."""


def explain(
    cache: LocalCache, memory: Memory | None, shares: Sequence[Sequence[ChunkKey]], now_s: float
) -> Explanation:
    """What is known of a prompt. A chunk of several shares is as badly off as the worst of them.

    shares: of each share the keys of all chunks, from the first.
    memory: of this cache (`History.of`), if there is one. now_s: by the bus's clock.
    """
    looked = [_look(cache, memory, keys) for keys in shares]
    chunks = [_worst(of_shares) for of_shares in zip(*looked, strict=True)]
    starts = [at for at, chunk in enumerate(chunks) if not at or not _are_alike(chunks[at - 1], chunk)]
    ends = [*starts[1:], len(chunks)]
    runs = [_state(at, end - at, chunks[at], now_s) for at, end in zip(starts, ends, strict=True)]
    held = next((at for at, (where, _, _) in enumerate(chunks) if not _holds(where)), len(chunks))
    return Explanation(runs, held)


def is_held(state: ChunkState) -> bool:
    return _holds(state.where)


def _look(cache: LocalCache, memory: Memory | None, keys: Sequence[ChunkKey]) -> list[_Looked]:
    places = cache.where(keys)
    if memory is None:
        return [(place, None, False) for place in places]
    looked: list[_Looked] = []
    for number, (key, place) in enumerate(zip(keys, places, strict=True)):
        fate = memory.fate(key)
        parts = not place and fate is None and number > 0 and memory.goes_on_otherwise(keys[number - 1], key)
        looked.append((place, fate, parts))
    return looked


def _worst(of_shares: Sequence[_Looked]) -> _Looked:
    return next((one for one in of_shares if not _holds(one[0])), of_shares[0])


def _holds(where: str) -> bool:
    return where not in ("", BEING_WRITTEN)


def _state(first: int, chunks: int, chunk: _Looked, now_s: float) -> ChunkState:
    where, fate, parts = chunk
    if fate is None:
        return ChunkState(first, chunks, where, parts=parts)
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
    """What is held is alike wherever it is the same; what is not, if the same happened at about the same time."""
    (where, fate, parts), (other_where, other_fate, other_parts) = one, other
    if where != other_where or parts or other_parts:
        return False
    if fate is other_fate or _holds(where):
        return True
    if fate is None or other_fate is None:
        return False
    same = (fate.what, fate.tier, fate.cause, fate.policy) == (
        other_fate.what,
        other_fate.tier,
        other_fate.cause,
        other_fate.policy,
    )
    return same and abs(fate.at_s - other_fate.at_s) < 1.0
