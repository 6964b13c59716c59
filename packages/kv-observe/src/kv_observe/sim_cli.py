"""`kv sim`: what a cache of a given size and policy would have served of a trace."""

import argparse
import importlib.util
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv_core.errors import InputError
from kv_core.log import say
from kv_core.tools.cli import add_command
from kv_eviction import DEFAULT_POLICY, POLICY_NAMES, make_policy
from kv_tiers.pool.machine import spelled

from kv_observe.sim import WARM_UP, PrefillCost, Served, TierCounts, TierPlan, optimum, simulate
from kv_observe.trace_file import Trace, read_trace

_ABOUT = """\
Replay a trace of requests over a simulated cache: which part of the prompts would have come from it, how
many bytes would have moved and how long that would have taken. The eviction policies are those of the cache itself.

TRACE is Mooncake's JSON lines (hash_ids, timestamp in ms) or plain text: one request per line, its chunk ids separated
by spaces, optionally after @SECONDS. Either may be gzipped. Equal ids must mean equal prefixes. A trace of
`observe.record` states how many tokens and bytes a chunk has.

A CAPACITY is a number of chunks (5000), bytes with a unit (64GiB, 2TB), or a part of the trace's unique chunks (5%).
"""
_EXAMPLES = """\
examples:
  kv sim requests.jsonl --capacity 64GiB
  kv sim requests.jsonl --capacity 1%,2%,5%,10%,20%,40% --policy lru,arc,opt --plot hits.svg
  kv sim requests.jsonl --capacity 5% --below disk=40% --bandwidth disk=6 --json

The hit ratio is by tokens: the leading chunks of each prompt that are held, over all chunks requested. Saved is the
part of all seconds of prefill that they save. opt is Belady's optimum, which knows the future: over a whole trace
(--warm-up 0%) no policy has more hits, and after a warm-up hardly any. With several tiers, a hit counts for the
fastest that has the chunk, and chunks that one tier evicts are demoted to the next. --json says too how
long chunks lived in the first tier (docs/observability.md).

The exit status is 0, or 2 if an input or option is wrong; the text on standard error says what to do.
"""
_OPT = "opt"
_STOPS, _HINTS = "+stops", "+hints"
_CHUNK_TOKENS = 512
_MAX_CHUNK_TOKENS = 1 << 20
_DEFAULT_KV = "128KiB"
_GBPS = {"host": 40.0, "disk": 3.0}
_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Run:
    policy: str
    capacity_chunks: int
    served: Served


def register(commands: Any) -> None:
    """Add `kv sim`; called by the `kv` command."""
    parser = add_command(commands, "sim", _ABOUT, _EXAMPLES, help="hit ratios of policies and capacities on a trace")
    parser.set_defaults(run=_sim)
    parser.add_argument("trace", metavar="TRACE", help="the trace file")
    parser.add_argument(
        "--capacity", required=True, metavar="CAPACITY[,…]", help="of the host tier; several are compared"
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        metavar="NAME[,…]",
        help=f"{', '.join(POLICY_NAMES)} or {_OPT} (default: {DEFAULT_POLICY}); {DEFAULT_POLICY}{_STOPS}: knows "
        f"which answers called no tool, as from vLLM, for a trace with stop; {DEFAULT_POLICY}{_HINTS}: knows from KV "
        "hints what of each prompt no later one has",
    )
    parser.add_argument(
        "--below",
        action="append",
        default=[],
        metavar="NAME=CAPACITY[:POLICY]",
        help=f"a tier below the host's and those given before; repeatable (default policy: {DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--warm-up",
        default=f"{WARM_UP:.0%}",
        metavar="PART",
        help="requests that fill the tiers before hits count (default: 20%%)",
    )
    cost = parser.add_argument_group("bytes and time")
    cost.add_argument(
        "--chunk-tokens", type=int, metavar="N", help=f"tokens per chunk (default: the trace's, else {_CHUNK_TOKENS})"
    )
    cost.add_argument(
        "--token-bytes",
        metavar="BYTES",
        help=f"KV of one token over all layers (default: the trace's, else {_DEFAULT_KV}, that of Llama 3.1 8B in "
        "16 bits)",
    )
    cost.add_argument(
        "--bandwidth",
        action="append",
        default=[],
        metavar="NAME=GB/S",
        help="what a tier reads and writes per second, in 10^9 bytes; repeatable (default: host=40, any other 3)",
    )
    cost.add_argument(
        "--prefill",
        default="40,1.31",
        metavar="US,NS",
        help="what the engine computes a prompt in: microseconds a token, and nanoseconds more for each token before "
        "it (default: 40,1.31, about an 8B model on one GPU)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object per line for each policy and capacity")
    output.add_argument("--plot", metavar="FILE", help="draw hit ratio over capacity; .svg, .png or .pdf")


def _sim(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot)
    if args.chunk_tokens is not None and not 1 <= args.chunk_tokens <= _MAX_CHUNK_TOKENS:
        raise InputError(
            f"--chunk-tokens {args.chunk_tokens}: a chunk has at least one token, and at most {_MAX_CHUNK_TOKENS}"
        )
    policies = list(dict.fromkeys(args.policy.split(",")))
    for name in policies:
        if name != _OPT:
            make_policy(_plain(name), 1)  # refuse unknown policies before the trace is read
    warm_up = _part(args.warm_up, "--warm-up")
    trace = read_trace(args.trace)
    if trace.half_lines:
        say(f"kv sim: {trace.half_lines} incomplete lines of {args.trace} are left out", file=sys.stderr)
    if not trace.turn_ends and any(_STOPS in name for name in policies):
        raise InputError(f"{args.trace} does not say why answers ended (stop); leave out {_STOPS}")
    chunk_tokens, chunk_bytes = _sizes(trace, args.chunk_tokens, args.token_bytes)
    capacities = [_chunks(text, trace, chunk_bytes, "--capacity") for text in args.capacity.split(",")]
    lower = [_below(text, trace, chunk_bytes) for text in args.below]
    names = ["host", *(plan.name for plan in lower)]
    if len(set(names)) < len(names):
        raise InputError(f"--below: the tiers' names must differ, and not be host: {', '.join(names)}")
    prefill = _prefill(args.prefill)
    gbps = _bandwidths(args.bandwidth, names)
    if lower and _OPT in policies:
        raise InputError("opt is for one tier; leave out --below, or opt")
    clock = _Clock(len(trace.prompts) * len(capacities) * len(policies))
    runs = []
    for policy in policies:
        for capacity in capacities:
            if policy == _OPT:
                best = optimum(trace.prompts, capacity, warm_up=warm_up, cost=prefill, chunk_tokens=chunk_tokens)
                runs.append(_Run(policy, capacity, best))
            else:
                plans = [TierPlan("host", capacity, _plain(policy)), *lower]
                served = simulate(
                    trace.prompts, plans,
                    warm_up=warm_up, progress=clock.progress, cost=prefill, chunk_tokens=chunk_tokens,
                    turn_ends=trace.turn_ends if _STOPS in policy else (), times_s=trace.times_s,
                    hinted_share=1.0 if _HINTS in policy else 0.0,
                )  # fmt: skip
                runs.append(_Run(policy, capacity, served))
            clock.finish(len(trace.prompts))
    if args.json:
        for run in runs:
            say(json.dumps(_described(run, trace, chunk_bytes, chunk_tokens, gbps)))
    else:
        _print_table(runs, trace, chunk_bytes, gbps)
    if args.plot is not None:
        lines = {name: [(r.capacity_chunks, r.served.hit_ratio) for r in runs if r.policy == name] for name in policies}
        draw_plot(args.plot, {trace.name: (trace.chunks_unique, lines)})
    return 0


def _plain(policy: str) -> str:
    """Its name, without what else it knows."""
    return policy.replace(_STOPS, "").replace(_HINTS, "")


def _sizes(trace: Trace, tokens_option: int | None, bytes_option: str | None) -> tuple[int, int]:
    """Tokens and bytes of a chunk: from the options, else from the trace, else Mooncake's."""
    if trace.chunk_bytes and not trace.chunk_tokens and tokens_option is None:
        raise InputError(
            f"{trace.name} does not say how many tokens a chunk has, as no engine had registered; give --chunk-tokens"
        )
    tokens = tokens_option or trace.chunk_tokens or _CHUNK_TOKENS
    if bytes_option is None and trace.chunk_bytes:
        return tokens, trace.chunk_bytes
    return tokens, _bytes(bytes_option or _DEFAULT_KV, "--token-bytes") * tokens


def _prefill(text: str) -> PrefillCost:
    match = re.fullmatch(r"(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", text)
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--prefill {text}: give microseconds and nanoseconds, such as 40,1.31")
    return PrefillCost(float(match[1]) * 1e-6, float(match[2]) * 1e-9)


def _print_table(runs: Sequence[_Run], trace: Trace, chunk_bytes: int, gbps: dict[str, float]) -> None:
    span = "" if trace.span_s is None else f" in {trace.span_s:.0f} s"
    say(f"{trace.name}: {len(trace.prompts)} requests{span}, {trace.chunks_unique} unique chunks", end="")
    say(f" of {spelled(chunk_bytes)}: {spelled(trace.chunks_unique * chunk_bytes)}")
    width = max(8, *(len(run.policy) for run in runs))
    say(f"{'policy':<{width}} {'chunks':>9} {'share':>7} {'hit ratio':>9} {'saved':>7}", end="")
    say(f"  {'tier':<8} {'hit ratio':>9} {'read':>10} {'in':>9} {'written':>10} {'in':>9}")
    for run in runs:
        share = run.capacity_chunks / trace.chunks_unique
        say(
            f"{run.policy:<{width}} {run.capacity_chunks:>9} {share:>7.2%}",
            f"{run.served.hit_ratio:>9.4f} {run.served.saved_ratio:>7.4f}",
            end="",
        )
        if run.policy == _OPT:
            say()
            continue
        for place, tier in enumerate(run.served.tiers):
            cost = _Cost.of(tier, chunk_bytes, gbps)
            ratio = tier.chunks_hit / max(1, run.served.chunks_asked)
            say(" " * (36 + width) if place else "", end="")
            say(f"  {tier.name:<8} {ratio:>9.4f} {spelled(cost.bytes_read):>10} {cost.read_s:>7.1f} s", end="")
            say(f" {spelled(cost.bytes_written):>10} {cost.write_s:>7.1f} s")


def _described(
    run: _Run, trace: Trace, chunk_bytes: int, chunk_tokens: int, gbps: dict[str, float]
) -> dict[str, object]:
    described: dict[str, object] = {
        "trace": trace.name,
        "policy": run.policy,
        "capacity_chunks": run.capacity_chunks,
        "capacity_bytes": run.capacity_chunks * chunk_bytes,
        "capacity_share": run.capacity_chunks / trace.chunks_unique,
        "hit_ratio": run.served.hit_ratio,
        "prefill_saved_ratio": run.served.saved_ratio,
        "prefill_saved_s": run.served.saved_s,
    }
    if run.policy != _OPT:
        described["requests"] = run.served.requests
        described["tokens_asked"] = run.served.chunks_asked * chunk_tokens
        described["tokens_hit"] = run.served.chunks_hit * chunk_tokens
        described["tiers"] = [
            {
                "name": tier.name,
                "hit_ratio": tier.chunks_hit / max(1, run.served.chunks_asked),
                **asdict(tier),
                **asdict(_Cost.of(tier, chunk_bytes, gbps)),
            }
            for tier in run.served.tiers
        ]
        described["life_s"] = [
            {"span": span, "role": role, "mean": found.sum / sum(found.counts), "buckets": dict(found.buckets())}
            for (span, role), found in run.served.lives.items()
            if any(found.counts)
        ]
    return described


@dataclass(frozen=True, slots=True)
class _Cost:
    bytes_read: int
    bytes_written: int
    read_s: float
    write_s: float

    @classmethod
    def of(cls, tier: TierCounts, chunk_bytes: int, gbps: dict[str, float]) -> "_Cost":
        read, written = tier.chunks_hit * chunk_bytes, tier.chunks_stored * chunk_bytes
        bytes_per_s = gbps[tier.name] * 1e9
        return cls(read, written, read / bytes_per_s, written / bytes_per_s)


class _Clock:
    """Reports the progress of a long run on standard error, and nothing for a short one."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._before = 0
        self._next_s = time.monotonic() + _PROGRESS_EVERY_S
        self._shown = False

    def progress(self, done: int) -> None:
        if done % 64 == 0 and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_EVERY_S
            self._shown = True
            end = "\r" if sys.stderr.isatty() else "\n"
            say(f"kv sim: {(self._before + done) / self._total:4.0%} done", end=end, file=sys.stderr, flush=True)

    def finish(self, done: int) -> None:
        self._before += done
        if self._before >= self._total and self._shown and sys.stderr.isatty():
            say(file=sys.stderr)


def _chunks(text: str, trace: Trace, chunk_bytes: int, option: str) -> int:
    if text.endswith("%"):
        chunks = int(round(_part(text, option) * trace.chunks_unique, 6))  # 29 % of 100 are 28.999…96 as floats
    elif re.fullmatch(r"[0-9]{1,15}", text):
        chunks = int(text)
    else:
        chunks = _bytes(text, option, or_else="; or chunks, or 5%") // chunk_bytes
    if chunks < 1:
        raise InputError(f"{option} {text} holds no chunk; one takes {spelled(chunk_bytes)}")
    return min(chunks, trace.chunks_unique)  # more than all unique chunks makes no difference


def _bytes(text: str, option: str, *, or_else: str = "") -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})", text)
    unit = None if match is None else _UNITS.get(match[2].upper())
    nbytes = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if not nbytes:
        raise InputError(f"{option} {text}: write a number with a unit, such as 64GiB, 2TB or 512B{or_else}")
    return nbytes


def _part(text: str, option: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%", text)
    if match is None or float(match[1]) > 100:
        raise InputError(f"{option} {text}: write a part of the whole, from 0% to 100%")
    return float(match[1]) / 100


def _below(text: str, trace: Trace, chunk_bytes: int) -> TierPlan:
    match = re.fullmatch(r"([A-Za-z0-9_-]{1,16})=([^:]+)(?::([^:]+))?", text)
    if match is None:
        raise InputError(f"--below {text}: write NAME=CAPACITY, such as disk=2TB, or disk=40%:lru")
    policy = match[3] or DEFAULT_POLICY
    make_policy(policy, 1)
    return TierPlan(match[1], _chunks(match[2], trace, chunk_bytes, "--below"), policy)


def _bandwidths(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    gbps = {name: _GBPS.get(name, _GBPS["disk"]) for name in names}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=([0-9]{1,6}(?:\.[0-9]{1,6})?)", text)
        if match is None or float(match[2]) <= 0:
            raise InputError(f"--bandwidth {text}: write NAME=GB/S, such as disk=6.5")
        if match[1] not in gbps:
            raise InputError(f"--bandwidth {text}: there is no such tier; there are {', '.join(names)}")
        gbps[match[1]] = float(match[2])
    return gbps


Lines = Mapping[str, Sequence[tuple[float, float]]]
"""By policy: capacity in chunks, and the hit ratio at it."""

_KINDS = (".svg", ".png", ".pdf")


def check_plot(path: str) -> None:
    """Check, before the work, which would be in vain, whether `draw_plot` can make this file. Raises `InputError`: it
    is not a kind of picture that we draw, or matplotlib is missing."""
    if Path(path).suffix not in _KINDS:
        raise InputError(f"--plot {path}: end the name in one of {', '.join(_KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs the package matplotlib: pip install 'kv-observe[plot]'")


def draw_plot(path: str, traces: Mapping[str, tuple[int, Lines]], what: str = "hit ratio by tokens") -> None:
    """One panel per trace: the gain over capacity in % of unique chunks, one line per policy. Raises `OSError`: the
    file cannot be written.

    traces: by name, how many unique chunks it has, and the lines. what: the name of their axis. Call `check_plot`
    first.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with mpl.rc_context({"svg.hashsalt": "kv", "svg.fonttype": "none"}):  # the same figures, the same file
        figure = Figure(figsize=(5.2 * len(traces), 4.0), layout="constrained")
        panels = figure.subplots(1, len(traces), squeeze=False)[0]
        for panel, (name, (unique, lines)) in zip(panels, traces.items(), strict=True):
            for policy, points in lines.items():
                shares = [100 * chunks / unique for chunks, _ in points]
                style = "k--" if policy == "opt" else "o-"
                panel.plot(shares, [ratio for _, ratio in points], style, label=policy, markersize=4, linewidth=1.4)
            panel.set_xscale("log")
            panel.set_xticks(sorted({round(100 * chunks / unique, 3) for line in lines.values() for chunks, _ in line}))
            panel.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g} %"))
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.set_xlabel("capacity, of the unique chunks")
            panel.set_title(name)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel(what)
        panels[0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
