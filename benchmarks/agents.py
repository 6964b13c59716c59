"""Coding agents' sessions on real vLLM: time to the first token where the host's memory is smaller than they are.

    python benchmarks/agents.py --model DIRECTORY [--trace FILE] [--chunks 2000] [--json]      (in .venvs/vllm)

A slice of a trace (`traces/agents`), scaled to the model: its sessions begin together and keep their pauses, a chunk of
512 tokens becomes one of 16, and what prompts share in the trace they share here. Requests are asked one after the
other, each for one token, until they have asked for the working set; the memory given to caches holds 0.55 of that, and
disks are larger. Each cache is an engine in a process of its own, and has the same bytes:

    alone      without a cache; every eighth request only, from which a prompt's cost by its length is fitted
    ours       the default policy, a disk below
    lru        ours with `policy: lru`
    stops      ours, told which answers call a tool
    own file   vLLM's own offloading with its `fs` tier below

`found` is the part of all prompts' tokens that was not computed, and does not depend on the machine's load. `kv sim`
replays what `observe.record` wrote of ours and `lru`, and has to predict what is found, and the seconds saved.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import gzip
import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _child, _engines
from benchmarks._child import Child, progress
from benchmarks._report import Row, parser, report

TRACE_TOKENS, CHUNK_TOKENS, OWN_TOKENS = 16, 32, 8
"""Of a chunk of the trace, of ours and of vLLM's blocks, and at each prompt's end."""
LONGEST_CHUNKS, LEAST_TURNS = 248, 12
"""What a session of the slice asks for at most, and how often at least."""
LONGEST = TRACE_TOKENS * LONGEST_CHUNKS + 64
MEMORY = 0.55
"""Of the working set."""
CALL, OTHER = 7, 5
"""Tokens that stand for an answer with a call of a tool and for one without."""
SAMPLED = 8
TARGET = 0.8
WAYS = ("alone", "ours", "lru", "stops", "own file")
OURS = ("ours", "lru", "stops")


@dataclass(frozen=True)
class Asked:
    turn: int
    chunks: list[int]
    ends_turn: bool

    def prompt(self) -> list[int]:
        """Tokens that every chunk has wherever it is found, and some that no other prompt has."""
        own = hash((self.turn, *self.chunks[-1:]))
        chunks = [[3 + (7919 * (chunk + 1) + 104729 * i) % 2000 for i in range(TRACE_TOKENS)] for chunk in self.chunks]
        return [token for chunk in chunks for token in chunk] + [3 + (own + 31 * i) % 2000 for i in range(OWN_TOKENS)]


def work(trace: str, working_set: int) -> list[Asked]:
    """Requests until they have asked for so many different chunks."""
    sessions: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with gzip.open(trace, "rt") as lines:
        for line in map(json.loads, lines):
            sessions[line["session"]].append(line)
    slices = []
    for requests in sessions.values():
        if len(requests) < LEAST_TURNS or max(len(one["hash_ids"]) for one in requests) > LONGEST_CHUNKS:
            continue
        began = requests[0]["timestamp"]
        for turn, one in enumerate(requests):
            slices.append((one["timestamp"] - began, Asked(turn, one["hash_ids"], one.get("stop") == "end_turn")))
    chosen: list[Asked] = []
    seen: set[int] = set()
    for _, asked in sorted(slices, key=lambda entry: entry[0]):
        seen.update(asked.chunks)
        if len(seen) > working_set:
            break
        chosen.append(asked)
    return chosen


def settings(way: str, home: Path, pool_bytes: int) -> dict[str, Any]:
    """Of ours."""
    disk = {"type": "disk", "directory": str(home / "disk"), "capacity_bytes": 8 * pool_bytes}
    host = {"capacity_bytes": pool_bytes} | ({"policy": "lru"} if way == "lru" else {})
    return {"host": host, "tiers": [disk], "observe": {"record": str(home / "requests.jsonl")}}


def token_bytes(model: str) -> int:
    """Of a token's KV in float32."""
    config = json.loads((Path(model) / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size)


def serve(model: str, way: str, home: Path, pool_bytes: int, asked: list[Asked]) -> None:
    from kv_connect.turns import Turns
    from vllm import SamplingParams, TokensPrompt

    if way == "stops":  # the model has no tokens for calls
        Turns.of = classmethod(lambda turns, _: turns([CALL]))  # type: ignore[method-assign]
    cache = settings(way, home, pool_bytes) | {"chunk_tokens": CHUNK_TOKENS} if way in OURS else None
    own = _engines.own_offloading(pool_bytes, str(home / "own")) if way == "own file" else None
    engine = _engines.vllm(
        model, cache, own=own, max_model_len=LONGEST, max_num_batched_tokens=2048, block_size=CHUNK_TOKENS
    )

    def ask(numbers: list[int]) -> int:
        one = asked[numbers[0]]
        answer = OTHER if one.ends_turn else CALL
        sampling = SamplingParams(
            temperature=0, max_tokens=2, detokenize=False, allowed_token_ids=[answer], stop_token_ids=[answer]
        )
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=one.prompt())], sampling, use_tqdm=False)
        return output.num_cached_tokens or 0

    _child.serve(ask)


@dataclass
class Measured:
    """By request: seconds, and tokens that were found."""

    seconds: list[float]
    found: list[int]


def measure(way: str, words: list[str], home: Path, requests: range) -> Measured:
    """Of one engine, which is alive alone."""
    child = Child(__file__, [way, str(home), *words], _engines.ENVIRON)
    measured = Measured([], [])
    try:
        child.ask([-1])
        for number in requests:
            progress(f"{way}: {number + 1} of {requests.stop}    ")
            seconds, found = child.ask([number])
            measured.seconds.append(seconds)
            measured.found.append(found)
    finally:
        child.close()
    return measured


def fitted(asked: list[Asked], alone: Measured) -> tuple[float, float, float]:
    """Seconds of a request without a cache: fixed, for each token, and for each pair of tokens."""
    import numpy as np

    tokens = np.array([len(one.prompt()) for one in asked[::SAMPLED]], dtype=float)
    known = np.stack([np.ones_like(tokens), tokens, tokens * tokens / 2], axis=1)
    fixed, token_s, pair_s = np.linalg.lstsq(known, np.array(alone.seconds), rcond=None)[0]
    if pair_s < 0 or fixed < 0:  # what is noise in so few samples
        fixed, pair_s = 0.0, 0.0
        token_s = sum(alone.seconds) / tokens.sum()
    return float(fixed), float(token_s), float(pair_s)


def predicted(home: Path, policy: str, pool_bytes: int, cost: tuple[float, float, float]) -> dict[str, Any]:
    """What `kv sim` says of the trace that an engine has recorded."""
    (recorded,) = home.glob("requests*.jsonl")
    command = [str(Path(sys.executable).parent / "kv"), "sim", str(recorded), "--json", "--warm-up", "0%"]
    command += ["--capacity", f"{pool_bytes}B", "--below", f"disk={8 * pool_bytes}B", "--policy", policy]
    command += ["--prefill", f"{cost[1] * 1e6:.6f},{cost[2] * 1e9:.6f}"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def turns_of(asked: list[Asked]) -> dict[str, list[int]]:
    """Requests by how far their sessions are."""
    groups: dict[str, list[int]] = {"first turns": [], "turns 2–5": [], "turns 6–20": [], "later turns": []}
    for number, one in enumerate(asked):
        place = sum(one.turn >= begin for begin in (1, 5, 20))
        list(groups.values())[place].append(number)
    return {name: numbers for name, numbers in groups.items() if numbers}


def rows_of(asked: list[Asked], by_way: dict[str, Measured], home: Path, pool: int) -> list[Row]:
    cost = fitted(asked, by_way["alone"])
    lengths = [len(one.prompt()) for one in asked]
    alone = [cost[0] + cost[1] * tokens + cost[2] * tokens**2 / 2 for tokens in lengths]
    seconds = {way: measured.seconds for way, measured in by_way.items()} | {"alone": alone}
    others = min(statistics.mean(seconds[way]) for way in seconds if way not in OURS)
    rows = []
    for way, of in seconds.items():
        mean = statistics.mean(of)
        target = TARGET if way in ("ours", "stops") else None
        rows.append(Row(way, mean * 1e3, "ms", others * 1e3, mean / others, target, at_most=True))
        for turns, numbers in turns_of(asked).items():
            here, computed = (statistics.mean(one[number] for number in numbers) for one in (of, alone))
            rows.append(Row(f"{way}: {turns}", here * 1e3, "ms", computed * 1e3, here / computed, None, at_most=True))
        if way == "alone":
            continue
        found = sum(by_way[way].found)
        rows.append(Row(f"{way}: found", found, "tokens", sum(lengths), found / sum(lengths), None, at_most=False))
        if way in ("ours", "lru"):
            said = predicted(home / way, "lru" if way == "lru" else "prefix", pool, cost)
            real, sim = found / said["tokens_asked"], said["hit_ratio"]
            saved = sum(computed - here for computed, here in zip(alone, of, strict=True))
            guess = said["prefill_saved_s"] - sum(tier["read_s"] for tier in said["tiers"])
            for what, unit, value, limit, target in (
                ("found", "of all", sim, real, 0.02),
                ("saved", "s", guess, saved, 0.1),
            ):
                off = abs(value / limit - 1)
                rows.append(Row(f"{way}: {what}, by kv sim, off by", value, unit, limit, off, target, at_most=True))
    return rows


def main() -> int:
    if "--serve" in sys.argv:
        way, home, model, trace, chunks, pool_bytes = sys.argv[2:]
        asked = work(trace, int(chunks))
        asked.append(Asked(0, [10**9 + chunk for chunk in range(20)], ends_turn=False))  # at -1, to warm up
        serve(model, way, Path(home), int(pool_bytes), asked)
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--model", required=True, help="a model's folder, as `scripts/setup.sh smollm2` prints it")
    made.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="these beside alone")
    made.add_argument("--trace", default=str(Path(__file__).parent / "traces/agents/agents_a.jsonl.gz"))
    made.add_argument("--chunks", type=int, default=2000, help="of the trace, in the working set (default: 2,000)")
    chosen = made.parse_args()
    if not (asked := work(chosen.trace, chosen.chunks)):
        made.error(f"--chunks {chosen.chunks}: no request of {chosen.trace} fits; give more")
    working_set = len({chunk for one in asked for chunk in one.chunks}) * TRACE_TOKENS
    pool = int(MEMORY * working_set * token_bytes(chosen.model))
    print(f"{len(asked)} requests, a working set of {working_set} tokens, memory of {pool} bytes", file=sys.stderr)
    words = [chosen.model, chosen.trace, str(chosen.chunks), str(pool)]
    by_way = {}
    with tempfile.TemporaryDirectory(prefix="kv-agents-") as directory:
        for way in (way for way in WAYS if way == "alone" or way in chosen.way):
            home = Path(directory) / way
            home.mkdir()
            by_way[way] = measure(way, words, home, range(0, len(asked), SAMPLED if way == "alone" else 1))
        return report(rows_of(asked, by_way, Path(directory), pool), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
