"""Four real vLLM engines on two hosts, and what routes a trace of coding agents to them: `POST /route` and other rules.

    .venvs/vllm/bin/python benchmarks/route_engines.py

Each host is a kv-server with two engines, which reads what the other host's server holds over loopback. Beside that,
the same four engines without us, each with nothing but its own prefix cache. An engine's own blocks have room for two
long prompts. Forty sessions take turns, two requests at a time, as there are two cores and an engine computes with one
thread. Blocks of 512 tokens of the trace are 16 made-up tokens here.

`value`: the mean time to the first token by `/route`, queues included; `limit`: by another rule; `found`: the share of
all tokens that were not computed. `benchmarks/route.py` has more of the trace, with simulated engines.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import gzip
import itertools
import json
import random
import runpy
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_server import launch
from kv_testing.servers import free_port

from benchmarks import _child, _engines
from benchmarks._child import Child, progress
from benchmarks._report import Row, parser, report
from benchmarks.handover import write_model
from benchmarks.route import TRACE

ROUTER = Path(__file__).parents[1] / "examples" / "10_route.py"
ENGINES, HOSTS, AT_ONCE = 4, 2, 2
BLOCK_TOKENS, MOST_TOKENS = 16, 6000
OWN_TOKENS = 2 * MOST_TOKENS
HOST_BYTES = "768MiB"
PRIME_TOKENS = 1024


@dataclass(frozen=True)
class Request:
    session: int
    tokens: list[int]


@dataclass(frozen=True)
class Outcome:
    """seconds: to the first token, of each request. found: tokens that were not computed, of all."""

    seconds: list[float]
    found: float


Choose = Callable[[Request], int]
"""The number of the engine."""


def requests(count: int) -> list[Request]:
    """All sessions' first turns, then their second ones, and so on."""
    sessions: dict[int, list[Request]] = {}
    with gzip.open(TRACE, "rt") as lines:
        for one in sorted(map(json.loads, lines), key=lambda one: one["timestamp"]):
            blocks = one["hash_ids"][: MOST_TOKENS // BLOCK_TOKENS]
            tokens = [
                token for block in blocks for token in random.Random(block).choices(range(3, 2000), k=BLOCK_TOKENS)
            ]
            sessions.setdefault(one["session"], []).append(Request(one["session"], tokens))
    turns = itertools.zip_longest(*sessions.values())
    return [request for turn in turns for request in turn if request is not None and request.tokens][:count]


def serve(model: str, cache: dict[str, Any] | None, name: str) -> None:
    """A child: one engine."""
    arguments: dict[str, Any] = {"max_model_len": MOST_TOKENS + 64, "max_num_batched_tokens": 2048}
    arguments |= {"enable_prefix_caching": True, "block_size": 128, "num_gpu_blocks_override": OWN_TOKENS // 128}
    engine = _engines.vllm(model, cache, engine_id=name, **arguments)
    _child.serve(lambda prompt: _engines.ask_vllm(engine, prompt, 1)[0])


@contextmanager
def hosts(home: Path) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """The engines' settings, and the servers' URLs with their tokens."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(HOSTS)]
    with ExitStack() as ending:
        settings: list[dict[str, Any]] = []
        tokens: dict[str, str] = {}
        for number, address in enumerate(peers):
            folder = home / str(number)
            folder.mkdir(mode=0o700)
            config = {
                "host": {"capacity_bytes": HOST_BYTES},
                "tiers": [{"type": "peers", "hosts": [one for one in peers if one != address], "unprotected": True}],
                "peers": {"listen": address, "unprotected": True},
                "http": {"listen": "127.0.0.1:0", "token_file": str(folder / "token")},
            }
            server = launch(config, socket=folder / "s")
            ending.callback(server.stop)
            settings.append({"server": {"socket": str(server.socket)}})
            tokens[server.url.rstrip("/")] = (folder / "token").read_text().strip()
        yield settings, tokens


def replay(asked: list[Request], engines: list[Child], choose: Choose, label: str) -> Outcome:
    turns = {id(one): threading.Lock() for one in engines}
    sessions = {one.session: threading.Lock() for one in asked}
    left = iter(enumerate(asked))
    taking = threading.Lock()
    seconds, found = [], []

    def work() -> None:
        while True:
            with taking:
                number, request = next(left, (0, None))
                if request is None:
                    return
                progress(f"{label}: {number + 1} of {len(asked)}")
                session = sessions[request.session]
                session.acquire()
            try:
                began_s = time.perf_counter()
                engine = engines[choose(request)]
                with turns[id(engine)]:
                    _, hit = engine.ask(request.tokens)
                seconds.append(time.perf_counter() - began_s)
                found.append(hit)
            finally:
                session.release()

    with ThreadPoolExecutor(AT_ONCE) as workers:
        for worker in [workers.submit(work) for _ in range(AT_ONCE)]:
            worker.result()
    return Outcome(seconds, sum(found) / sum(len(one.tokens) for one in asked))


def by_turn() -> Choose:
    turns = itertools.count()
    return lambda request: next(turns) % ENGINES


def by_session() -> Choose:
    sessions: dict[int, int] = {}
    return lambda request: sessions.setdefault(request.session, len(sessions) % ENGINES)


def by_route(tokens: dict[str, str]) -> Choose:
    """By the example's router."""
    names = [f"engine-{number}" for number in range(ENGINES)]
    router = runpy.run_path(str(ROUTER))["Router"](tokens, dict.fromkeys(names, ""))
    return lambda request: names.index(router.choose(request.tokens))


def run(rule: str, model: str, asked: list[Request]) -> Outcome:
    environ = _engines.ENVIRON | _engines.threads_environ(1) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as home, ExitStack() as ending:
        settings: list[dict[str, Any] | None] = [None] * HOSTS
        tokens: dict[str, str] = {}
        if "alone" not in rule:
            settings[:], tokens = ending.enter_context(hosts(Path(home)))
        engines = []
        for number in range(ENGINES):
            cache = json.dumps(settings[number // (ENGINES // HOSTS)])
            engines.append(Child(__file__, [model, cache, f"engine-{number}"], environ))
            ending.callback(engines[-1].close)
        for number, engine in enumerate(engines):  # each engine learns what computing takes
            for other in range(6):
                engine.ask(random.Random(f"{number} {other}").choices(range(3, 2000), k=PRIME_TOKENS))
        choose = by_session() if "session" in rule else by_turn() if "turn" in rule else by_route(tokens)
        return replay(asked, engines, choose, rule)


def main() -> int:
    if "--serve" in sys.argv:
        model, cache, name = sys.argv[2:]
        serve(model, json.loads(cache), name)
        return 0
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--requests", type=int, default=240, help="how many (default: 240)")
    options = made.parse_args()
    asked = requests(options.requests)
    outcomes = {}
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as folder:
        model = write_model(Path(folder))
        for rule in ("/route", "in turn", "by session", "alone, in turn", "alone, by session"):
            outcomes[rule] = one = run(rule, model, asked)
            print(
                f"\r{rule}: first token after {statistics.fmean(one.seconds):.2f} s in the mean, 95 % within "
                f"{statistics.quantiles(one.seconds, n=20)[-1]:.2f} s; {one.found:.1%} of the tokens found",
                file=sys.stderr,
            )
    ours_s = statistics.fmean(outcomes.pop("/route").seconds)
    rows = []
    for rule, outcome in outcomes.items():
        mean_s = statistics.fmean(outcome.seconds)
        rows.append(Row(f"/route beside {rule}", ours_s, "s", mean_s, ours_s / mean_s, 1.02, at_most=True))
    return report(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
