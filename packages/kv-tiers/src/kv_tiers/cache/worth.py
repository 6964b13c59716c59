"""Decides whether chunks in slower tiers are worth waiting for, from what their lanes measured (`kv_core.cost`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kv_core.cost import Costs, Skipped, Wait, choose_wait
from kv_core.coverage import ChunkShape

from kv_tiers.lanes.lane import Lane

PRECISION_WORTH = 0.1
"""Of what computing takes: how long a load may take for more of a chunk to be read than an approximation needs, where
approximations may be read. A tenth costs a request little, and is worth the exact bytes."""
_LATE = 1.5
_GRACE_S = 0.01
_PROBE_S = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """One load that a boundary needs.

    tier: the index of its lane.
    start, end: the range of chunks that it is for, end excluded.
    nbytes: the size of all its keys' chunks.
    """

    tier: int
    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Worth:
    """What is worth waiting for.

    chunks: the boundary to wait for; the one that is reached already if none is worth it.
    limit_s: how long to wait for it at most.
    skipped: the chunks beyond it.
    awaited: the chunks up to it that slower tiers bring.
    """

    chunks: int
    limit_s: float
    skipped: Skipped | None
    awaited: Skipped | None


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

    parts: the loads that `best` needs. arriving: by tier, how long those loads take that are under way already.

    If all groups need the whole prefix, a shorter boundary may do: any at which a part ends. Else it is all or nothing.
    An unmeasured tier is assumed to be quick: that is how it is first measured.
    """
    waiting = dict(arriving)
    queued_bytes: dict[int, int] = {}
    waits: list[Wait] = []
    ordered = sorted(parts, key=lambda part: part.end)
    for at, part in enumerate(ordered):
        queued_bytes[part.tier] = queued_bytes.get(part.tier, 0) + part.nbytes
        waiting[part.tier] = max(lanes[part.tier].load_s(queued_bytes[part.tier]) or 0.0, arriving.get(part.tier, 0.0))
        is_boundary = all(other.start >= part.end for other in ordered[at + 1 :])
        if shape.is_plain and is_boundary and have < part.end < best:
            waits.append(Wait(part.end, max(waiting.values())))
    waits.append(Wait(best, max(waiting.values(), default=0.0)))
    chosen = choose_wait(costs, shape.chunk_tokens, have, waits, max_wait_s)

    def skipped(first: int, last: int, wait_s: float) -> Skipped | None:
        if first >= last:
            return None
        tokens = shape.chunk_tokens
        slowest = max(waiting, key=lambda tier: waiting[tier], default=None)
        copy_s = costs.load_s(first * tokens, last * tokens) or 0.0
        compute_s = costs.compute_s(first * tokens, last * tokens) or 0.0
        return Skipped(last - first, "" if slowest is None else lanes[slowest].name, wait_s + copy_s, compute_s)

    if chosen is None:
        return Worth(have, 0.0, skipped(have, best, waits[-1].seconds), None)
    limit_s = costs.compute_s(have * shape.chunk_tokens, chosen.chunks * shape.chunk_tokens) or 0.0
    if chosen.seconds:
        # Late by half means that the tier has become slower than measured: stop waiting and compute. Not sooner, though
        # computing would be done by now: most loads that are a little late arrive in the next moment, and giving up
        # costs the whole computation besides.
        limit_s = min(_LATE * limit_s, _LATE * chosen.seconds + _GRACE_S)
    return Worth(
        chosen.chunks,
        limit_s,
        skipped(chosen.chunks, best, waits[-1].seconds),
        skipped(have, chosen.chunks, chosen.seconds),
    )


def probe_chunks(lane: Lane, chunk_bytes: int) -> int:
    """How many chunks to load to measure the tier without keeping it busy for long."""
    cost = lane.load_cost()
    return 1 if cost is None else max(1, int(_PROBE_S / max(cost[1] * chunk_bytes, 1e-9)))
