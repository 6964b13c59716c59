"""What every eviction policy saves of all seconds of prefill, and its hit ratio, on four public traces, beside Belady's
optimum: an hour of a chat service, public data sets, and two of coding agents' sessions.

limit: the optimum by hits at the same capacity. ratio: what part of it a policy reaches. target, of `prefix` only: not
more than 2 % behind the better of LRU and ARC, in any cell; and over all cells 5 % ahead. +stops: knows which answers
called no tool, where the trace says so. +hints, +half: knows from KV hints, of each or of every second request, what
of its prompt no later one has. Takes some ten minutes. Needs matplotlib for the plot (--plot FILE).

With --generated instead on a trace made here, which no policy was made for: sessions of agents, questions about
documents, and prompts that come once.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import heapq
import json
import random
from collections.abc import Sequence
from pathlib import Path

from kv_core.keys import ChunkKey
from kv_eviction import POLICY_NAMES
from kv_observe.sim import Served, TierPlan, optimum, simulate
from kv_observe.sim_cli import check_plot, draw_plot
from kv_observe.trace_file import Trace, read_trace, trace_key

from benchmarks._report import parser

TRACES = Path(__file__).parent / "traces"
NAMES = ("mooncake/conversation_trace", "mooncake/synthetic_trace", "agents/agents_a", "agents/agents_b")
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.40)
OURS = "prefix"
HINTED = {"+stops": 0.0, "+half": 0.5, "+hints": 1.0}
"""Ours with stops, and the part of the requests whose clients send hints besides."""
REFERENCES = ("lru", "arc")
OPT = "opt"
BEHIND = 0.98
"""Of the better reference: the least in any cell."""
AHEAD = 1.05
"""The mean over all cells."""


def main() -> int:
    asked = parser(__doc__ or "")
    asked.add_argument("--plot", metavar="FILE", help="draw them; .svg, .png or .pdf")
    asked.add_argument("--generated", action="store_true", help="on a trace made here, instead of the public ones")
    options = asked.parse_args()
    if options.plot:
        check_plot(options.plot)
    gains: list[float] = []
    pictures = {}
    for path in ("generated",) if options.generated else NAMES:
        trace = generated() if options.generated else read_trace(str(TRACES / f"{path}.jsonl.gz"))
        name = Path(path).name.removesuffix("_trace")
        capacities = [int(share * trace.chunks_unique) for share in SHARES]
        served = {policy: [serve(trace, policy, capacity) for capacity in capacities] for policy in POLICY_NAMES}
        for suffix, hinted in HINTED.items():
            if hinted or trace.turn_ends:
                row = [serve(trace, OURS, capacity, hinted, trace.turn_ends) for capacity in capacities]
                served[OURS + suffix] = row
        served[OPT] = [optimum(trace.prompts, capacity) for capacity in capacities]
        saved = {policy: [cell.saved_ratio for cell in row] for policy, row in served.items()}
        best = [max(saved[policy][place] for policy in REFERENCES) for place in range(len(SHARES))]
        gains += [ours / other for ours, other in zip(saved[OURS], best, strict=True)]
        pictures[name] = (
            trace.chunks_unique,
            {policy: list(zip(capacities, row, strict=True)) for policy, row in saved.items()},
        )
        if options.json:
            report(name, served, best)
        else:
            print(f"{name:<14}" + "".join(f"{share:>8.0%}" for share in SHARES) + "   of the prefill saved, and hits")
            for policy, row in served.items():
                print(f"  {policy:<12}" + "".join(f"{cell.saved_ratio:>8.4f}" for cell in row), end="   ")
                print("".join(f"{cell.hit_ratio:>8.4f}" for cell in row))
            print(f"  {OURS} / best" + "".join(f"{gain:>8.3f}" for gain in gains[-len(SHARES) :]))
        sys.stdout.flush()
    mean = sum(gains) / len(gains)
    passes = min(gains) >= BEHIND and (mean >= AHEAD or options.generated)
    if options.json:
        described = {"name": "mean over all cells", "value": mean, "unit": "of the better reference", "limit": None}
        print(json.dumps({**described, "ratio": mean, "target": AHEAD, "pass": mean >= AHEAD}))
    else:
        print(f"{OURS} / the better of {', '.join(REFERENCES)}: mean {mean:.3f}, worst {min(gains):.3f}", end="  ")
        print("pass" if passes else "MISS")
    if options.plot:
        draw_plot(options.plot, pictures)
    return 0 if passes else 1


def report(name: str, served: dict[str, list[Served]], best: list[float]) -> None:
    """One JSON object a policy and capacity."""
    for policy, row in served.items():
        for place, (share, cell) in enumerate(zip(SHARES, row, strict=True)):
            limit = served[OPT][place].saved_ratio
            target = BEHIND * best[place] / limit if policy == OURS else None
            described = {
                "name": f"{name} {share:.0%} {policy}",
                "value": cell.saved_ratio,
                "unit": "of the prefill saved",
                "limit": limit,
                "ratio": cell.saved_ratio / limit,
                "target": target,
                "pass": None if target is None else cell.saved_ratio / limit >= target,
                "hit_ratio": cell.hit_ratio,
            }
            print(json.dumps(described))


def serve(
    trace: Trace, policy: str, capacity_chunks: int, hinted_share: float = 0.0, turn_ends: Sequence[bool] = ()
) -> Served:
    plans = [TierPlan("host", capacity_chunks, policy)]
    return simulate(trace.prompts, plans, turn_ends=turn_ends, hinted_share=hinted_share)


def generated(requests: int = 8000, seed: int = 11) -> Trace:
    """Half of what arrives are single prompts, the rest new sessions of agents and questions about documents."""
    chance = random.Random(seed)
    number = 0

    def new(chunks: int) -> list[ChunkKey]:
        nonlocal number
        number += chunks
        return [trace_key(str(number - chunk)) for chunk in range(chunks)]

    tools = [new(chance.randrange(4, 12)) for _ in range(5)]
    documents = [new(chance.randrange(10, 60)) for _ in range(300)]
    popularity = [1 / rank for rank in range(1, len(documents) + 1)]
    # Sessions by the time of their next request: now and then one comes to an end, or is left for long.
    waiting: list[tuple[float, int, list[ChunkKey]]] = []
    prompts: list[list[ChunkKey]] = []
    now = 0.0
    while len(prompts) < requests:
        now += chance.expovariate(1.0)
        while waiting and waiting[0][0] <= now:
            at, _, prompt = heapq.heappop(waiting)
            prompts.append(prompt)
            if chance.random() < 0.85:
                pause = chance.expovariate(1 / 20 if chance.random() < 0.9 else 1 / 400)
                # The last chunk was partial, and is another one now.
                heapq.heappush(waiting, (at + pause, number, prompt[:-1] + new(chance.randrange(2, 6))))
        kind = chance.random()
        if kind < 0.5:
            prompts.append(new(chance.randrange(1, 40)))
        elif kind < 0.9:
            prompts.append(chance.choices(documents, popularity)[0] + new(1))
        else:
            heapq.heappush(waiting, (now, number, chance.choice(tools) + new(chance.randrange(2, 10))))
    return Trace("generated", prompts, len({key for prompt in prompts for key in prompt}), None)


if __name__ == "__main__":
    raise SystemExit(main())
