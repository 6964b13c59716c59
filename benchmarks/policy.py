"""Hit ratios of every eviction policy on two public traces, against Belady's optimum and a cache without end.

limit: the optimum at the same capacity. ratio: what part of it a policy reaches. target, of `prefix` only: what the
better of LRU and ARC reaches in the same run; and of the gap between that and the optimum at 5 %, how much it has to
close. Needs matplotlib for the plot (--plot FILE), and a minute and a half.

With --generated instead on a trace made here, which no policy was made for: sessions of agents, questions about
documents, and prompts that come once.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import heapq
import json
import random
from pathlib import Path

from kv_core.keys import ChunkKey
from kv_eviction import POLICY_NAMES
from kv_observe import sim_plot
from kv_observe.sim import TierPlan, optimum, simulate
from kv_observe.trace_file import Trace, read_trace

from benchmarks._report import parser

TRACES = Path(__file__).parent / "traces/mooncake"
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.40)
OURS = "prefix"
REFERENCES = ("lru", "arc")
GAP_AT = 0.05
GAP_CLOSED = 0.3
"""Of the gap between the better reference and the optimum, at that share: the least that is asked for."""


def main() -> int:
    asked = parser(__doc__ or "")
    asked.add_argument("--plot", metavar="FILE", help="draw them; .svg, .png or .pdf")
    asked.add_argument("--generated", action="store_true", help="on a trace made here, instead of the public ones")
    options = asked.parse_args()
    if options.plot:
        sim_plot.check(options.plot)
    won = []
    pictures = {}
    for name in ("generated",) if options.generated else ("conversation", "synthetic"):
        trace = generated() if options.generated else read_trace(str(TRACES / f"{name}_trace.jsonl.gz"))
        capacities = [int(share * trace.chunks_unique) for share in SHARES]
        table = {policy: [hit_ratio(trace, policy, capacity) for capacity in capacities] for policy in POLICY_NAMES}
        table["opt"] = [optimum(trace.prompts, capacity) for capacity in capacities]
        infinite = hit_ratio(trace, "lru", trace.chunks_unique)
        best = [max(table[policy][place] for policy in REFERENCES) for place in range(len(SHARES))]
        won += [ours > other for ours, other in zip(table[OURS], best, strict=True)]
        at = SHARES.index(GAP_AT)
        closed = (table[OURS][at] - best[at]) / (table["opt"][at] - best[at])
        won.append(closed >= GAP_CLOSED)
        pictures[name] = (
            trace.chunks_unique,
            {policy: list(zip(capacities, row, strict=True)) for policy, row in table.items()},
        )
        if options.json:
            for policy, row in table.items():
                for place, (share, ratio) in enumerate(zip(SHARES, row, strict=True)):
                    limit = table["opt"][place]
                    described = {
                        "name": f"{name} {share:.0%} {policy}",
                        "value": ratio,
                        "unit": "hit ratio",
                        "limit": limit,
                        "ratio": ratio / limit,
                        "target": best[place] / limit if policy == OURS else None,
                        "pass": ratio > best[place] if policy == OURS else None,
                    }
                    print(json.dumps(described))
            described = {"name": f"{name} infinite", "value": infinite, "unit": "hit ratio", "limit": infinite}
            print(json.dumps({**described, "ratio": 1.0, "target": None, "pass": None}))
            described = {"name": f"{name} {GAP_AT:.0%} gap closed", "value": closed, "unit": "of the gap", "limit": 1.0}
            print(json.dumps({**described, "ratio": closed, "target": GAP_CLOSED, "pass": won[-1]}))
        else:
            print(f"{name:<14}" + "".join(f"{share:>8.0%}" for share in SHARES))
            for policy, row in table.items():
                print(f"  {policy:<12}" + "".join(f"{ratio:>8.4f}" for ratio in row))
            verdicts = ["pass" if ours > other else "MISS" for ours, other in zip(table[OURS], best, strict=True)]
            print(f"  {'infinite':<12}{infinite:>8.4f}")
            print(
                f"  {OURS} > {', '.join(REFERENCES)}" + " " * 2 + "".join(f"{verdict:>8}" for verdict in verdicts)[4:]
            )
            verdict = "pass" if won[-1] else "MISS"
            print(f"  gap to opt closed at {GAP_AT:.0%}: {closed:.1%}, asked for: {GAP_CLOSED:.0%}  {verdict}")
        sys.stdout.flush()
    if options.plot:
        sim_plot.draw(options.plot, pictures)
    return 0 if all(won) else 1


def hit_ratio(trace: Trace, policy: str, capacity_chunks: int) -> float:
    return simulate(trace.prompts, [TierPlan("host", capacity_chunks, policy)]).hit_ratio


def generated(requests: int = 8000, seed: int = 11) -> Trace:
    """Half of what arrives are single prompts, the rest new sessions of agents and questions about documents."""
    chance = random.Random(seed)
    number = 0

    def new(chunks: int) -> list[ChunkKey]:
        nonlocal number
        number += chunks
        return [ChunkKey(str(number - chunk).encode()) for chunk in range(chunks)]

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
