"""Decides whether chunks in lower tiers are worth waiting for, from what their lanes measured (`kv_core.cost`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kv_core.cost import Costs, Skipped, Wait, choose_wait, won_by
from kv_core.coverage import ChunkShape

from kv_tiers.lanes.lane import Lane

_EXACTNESS_WORTH = 0.02
"""A fraction of the time to compute: how much later the first token may come so that more of each chunk is read, where
approximations are allowed. A smaller difference is a tie, which goes to the more exact plan."""
_LATE = 1.5
_GRACE_S = 0.01
_PATIENCE = 0.25
"""A fraction of the time to compute: how much longer than expected to wait in any case. Where computing takes many
times as long as the load, a load that is a little late still arrives far sooner."""
_UNMEASURED_S = 0.1
"""How long to wait for an unmeasured tier if that is more than `_PATIENCE` allows. What it delivers later measures it
all the same, so a tier that turns out to be slow costs its first requests a part of the time to compute, not all of it.
"""
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

    chunks: the boundary to wait for; the one already reached if none is worth it.
    limit_s: how long to wait for it at most.
    skipped: the chunks beyond it.
    awaited: the chunks up to it that lower tiers deliver.
    divisor: of each chunk one of this many parts is read (`Lane.divisors`); None: the smallest.
    """

    chunks: int
    limit_s: float
    skipped: Skipped | None
    awaited: Skipped | None
    divisor: int | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The best choice if one of this many parts of each chunk is read.

    chosen: what is worth waiting for; None: nothing.
    won_s: seconds saved until the first token, compared with computing.
    waiting: by tier, the seconds until it has delivered all that `best` needs.
    all_s: the seconds of the slowest tier.
    is_known: all of these tiers have been measured.
    """

    divisor: int | None
    chosen: Wait | None
    won_s: float
    waiting: Mapping[int, float]
    all_s: float
    is_known: bool


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
    """Which boundary up to `best` pays, given that `have` chunks are there already, and how much of each chunk to read
    for it: the combination that brings the first token soonest. `costs.compute` is known.

    parts: the loads that `best` needs. arriving: by tier, how long the loads take that are already in flight.

    If all groups need the whole prefix, a shorter boundary may do: any at which a part ends. Else it is all or nothing.
    An unmeasured tier is assumed to be quick, so that it is measured, by reading as little as allowed. It is not waited
    for as long as computing takes.
    """
    ordered = sorted(parts, key=lambda part: part.end)
    later_starts = [*accumulate((part.start for part in reversed(ordered)), min, initial=best)][-2::-1]
    is_boundary = [part.end <= later for part, later in zip(ordered, later_starts, strict=True)]

    def plan(divisor: int | None) -> _Plan:
        waiting = dict(arriving)
        queued_bytes: dict[int, int] = {}
        waits: list[Wait] = []
        is_known = True
        for position, part in enumerate(ordered):
            queued_bytes[part.tier] = queued_bytes.get(part.tier, 0) + part.nbytes
            load_s = lanes[part.tier].load_s(queued_bytes[part.tier], divisor, part.nbytes)
            is_known = is_known and load_s is not None
            waiting[part.tier] = max(load_s or 0.0, arriving.get(part.tier, 0.0))
            if shape.is_plain and is_boundary[position] and have < part.end < best:
                waits.append(Wait(part.end, max(waiting.values())))
        waits.append(Wait(best, max(waiting.values(), default=0.0)))
        chosen = choose_wait(costs, shape.chunk_tokens, have, waits, max_wait_s)
        won_s = 0.0 if chosen is None else won_by(costs, shape.chunk_tokens, have, chosen)
        return _Plan(divisor, chosen, won_s, waiting, waits[-1].seconds, is_known)

    least = plan(None)
    divisors = max((lanes[part.tier].divisors for part in parts), key=len, default=())
    plans = [plan(divisor) for divisor in divisors] if divisors and least.is_known else [least]
    tie_s = _EXACTNESS_WORTH * (costs.compute_s(have * shape.chunk_tokens, best * shape.chunk_tokens) or 0.0)
    most_won_s = max(candidate.won_s for candidate in plans)
    ties = [candidate for candidate in plans if candidate.won_s >= most_won_s - tie_s]
    best_plan = next(candidate for candidate in ties if candidate.chosen or most_won_s <= 0.0)
    chosen, waiting = best_plan.chosen, best_plan.waiting

    def skipped(first: int, last: int, wait_s: float) -> Skipped | None:
        if first >= last:
            return None
        tokens = shape.chunk_tokens
        slowest = max(waiting, key=lambda tier: waiting[tier], default=None)
        copy_s = costs.load_s(first * tokens, last * tokens) or 0.0
        compute_s = costs.compute_s(first * tokens, last * tokens) or 0.0
        return Skipped(last - first, "" if slowest is None else lanes[slowest].name, wait_s + copy_s, compute_s)

    if chosen is None:
        return Worth(have, 0.0, skipped(have, best, least.all_s), None)
    compute_s = costs.compute_s(have * shape.chunk_tokens, chosen.chunks * shape.chunk_tokens) or 0.0
    # Late by half means that the tier has become slower than measured: stop waiting and compute. Not sooner, even
    # if computing would be done by now: most loads that are a little late arrive a moment later, and giving up
    # costs the whole computation on top.
    late_s = max(_LATE * chosen.seconds + _GRACE_S, chosen.seconds + _PATIENCE * compute_s)
    if best_plan.is_known and chosen.seconds:
        limit_s = min(_LATE * compute_s, late_s)
    else:
        limit_s = min(compute_s, max(_UNMEASURED_S, late_s))
    return Worth(
        chosen.chunks,
        limit_s,
        skipped(chosen.chunks, best, best_plan.all_s),
        skipped(have, chosen.chunks, chosen.seconds),
        best_plan.divisor,
    )


def probe_chunks(lane: Lane, chunk_bytes: int) -> int:
    """How many chunks to load to measure the tier without keeping it busy for long."""
    cost = lane.load_cost()
    return 1 if cost is None else max(1, int(_PROBE_S / max(cost[1] * chunk_bytes, 1e-9)))
