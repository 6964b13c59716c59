"""Hit ratios of every eviction policy on two public traces, against Belady's optimum and a cache without end.

limit: the optimum at the same capacity. ratio: what part of it a policy reaches. target, of `prefix` only: what the
better of LRU and ARC reaches in the same run. Needs matplotlib for the plot (--plot FILE), and a minute.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
from pathlib import Path

from kv_tiers import sim_plot
from kv_tiers.eviction import POLICY_NAMES
from kv_tiers.sim import TierPlan, optimum, simulate
from kv_tiers.sim_trace import Trace, read_trace

from benchmarks._report import parser

TRACES = Path(__file__).parent / "traces/mooncake"
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.40)
OURS = "prefix"
REFERENCES = ("lru", "arc")


def main() -> int:
    asked = parser(__doc__ or "")
    asked.add_argument("--plot", metavar="FILE", help="draw them; .svg, .png or .pdf")
    options = asked.parse_args()
    if options.plot:
        sim_plot.check(options.plot)
    won = []
    pictures = {}
    for name in ("conversation", "synthetic"):
        trace = read_trace(str(TRACES / f"{name}_trace.jsonl.gz"))
        capacities = [int(share * trace.chunks_unique) for share in SHARES]
        table = {policy: [hit_ratio(trace, policy, capacity) for capacity in capacities] for policy in POLICY_NAMES}
        table["opt"] = [optimum(trace.prompts, capacity) for capacity in capacities]
        infinite = hit_ratio(trace, "lru", trace.chunks_unique)
        best = [max(table[policy][place] for policy in REFERENCES) for place in range(len(SHARES))]
        won += [ours > other for ours, other in zip(table[OURS], best, strict=True)]
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
        else:
            print(f"{name:<14}" + "".join(f"{share:>8.0%}" for share in SHARES))
            for policy, row in table.items():
                print(f"  {policy:<12}" + "".join(f"{ratio:>8.4f}" for ratio in row))
            verdicts = ["pass" if ours > other else "MISS" for ours, other in zip(table[OURS], best, strict=True)]
            print(f"  {'infinite':<12}{infinite:>8.4f}")
            print(
                f"  {OURS} > {', '.join(REFERENCES)}" + " " * 2 + "".join(f"{verdict:>8}" for verdict in verdicts)[4:]
            )
        sys.stdout.flush()
    if options.plot:
        sim_plot.draw(options.plot, pictures)
    return 0 if all(won) else 1


def hit_ratio(trace: Trace, policy: str, capacity_chunks: int) -> float:
    return simulate(trace.prompts, [TierPlan("host", capacity_chunks, policy)]).hit_ratio


if __name__ == "__main__":
    raise SystemExit(main())
