"""Whether what slower tiers have is worth waiting for, by what their lanes have measured (`kv_core.cost`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_core.cost import Costs, Left, Wait, choose_wait
from kv_core.coverage import ChunkShape

from kv_tiers.lanes.lane import Lane

_GRACE_S = 0.01
_PROBE_S = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """What one call to a tier would bring.

    tier: its place among the lanes.
    start, end: the chunks that it is of, the last excluded.
    nbytes: of all its keys.
    """

    tier: int
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Worth:
    """chunks: the boundary to wait for; that of what is there already: none is worth it.
    limit_s: how long to wait for it at most.
    left: what is beyond it.
    hoped: what is up to it, from slower tiers.
    """

    chunks: int
    limit_s: float
    left: Left | None
    hoped: Left | None


def worth_waiting(
    lanes: Sequence[Lane],
    parts: Sequence[Part],
    arriving: Mapping[int, float],
    *,
    shape: ChunkShape,
    have: int,
    best: int,
    costs: Costs,
    max_wait_s: float,
) -> Worth:
    """Which boundary up to `best` pays, where `have` chunks are there already. `costs.compute` is known.

    parts: for `best`. arriving: by tier, how long what it needs and is on its way already will take.

    Of groups that need the whole prefix a shorter boundary may do: one at which a part ends. Of others it is all or
    nothing. A tier of which nothing is known is taken to be quick: that is how something is learnt of it.
    """
    waiting = dict(arriving)
    behind: dict[int, int] = {}
    waits: list[Wait] = []
    ordered = sorted(parts, key=lambda part: part.end)
    for at, part in enumerate(ordered):
        behind[part.tier] = behind.get(part.tier, 0) + part.nbytes
        waiting[part.tier] = max(lanes[part.tier].load_s(behind[part.tier]) or 0.0, arriving.get(part.tier, 0.0))
        is_boundary = all(other.start >= part.end for other in ordered[at + 1 :])
        if shape.is_plain and is_boundary and have < part.end < best:
            waits.append(Wait(part.end, max(waiting.values())))
    waits.append(Wait(best, max(waiting.values(), default=0.0)))
    chosen = choose_wait(costs, shape.chunk_tokens, have, waits, max_wait_s)

    def left(first: int, last: int, wait_s: float) -> Left | None:
        if first >= last:
            return None
        tokens = shape.chunk_tokens
        slowest = max(waiting, key=lambda tier: waiting[tier], default=None)
        copy_s = costs.load_s(first * tokens, last * tokens) or 0.0
        compute_s = costs.compute_s(first * tokens, last * tokens) or 0.0
        return Left(last - first, "" if slowest is None else lanes[slowest].name, wait_s + copy_s, compute_s)

    if chosen is None:
        return Worth(have, 0.0, left(have, best, waits[-1].seconds), None)
    limit_s = costs.compute_s(have * shape.chunk_tokens, chosen.chunks * shape.chunk_tokens) or 0.0
    if chosen.seconds:
        # A tier that is late by half is not what it was: then rather compute than wait for it as well.
        limit_s = min(limit_s, 1.5 * chosen.seconds + _GRACE_S)
    return Worth(
        chosen.chunks, limit_s, left(chosen.chunks, best, waits[-1].seconds), left(have, chosen.chunks, chosen.seconds)
    )


def probe_chunks(lane: Lane, chunk_bytes: int) -> int:
    """How many chunks tell how quick the tier is, and keep it busy for a moment only."""
    cost = lane.load_cost()
    return 1 if cost is None else max(1, int(_PROBE_S / max(cost[1] * chunk_bytes, 1e-9)))
