"""Four engines on two hosts and a router that asks `POST /route`: times to the first token beside other ways to route.

Coding agents' sessions (`traces/agents`) are replayed against two real caches, one a host, with the code that answers
`/route`. The engines are simulated: each computes one prompt after the other by the costs that it reports, give or take
20 %, on a clock that the replay advances. A session's next request comes when it has its answer, and after the trace's
pause, shortened by the pace.

value and limit: the mean time to the first token with `/route` and with another rule. `round robin` knows nothing,
`least busy` the queues, `most held` the caches (among equals the least busy), and with `sticky` a session stays with
the engine of its first turn.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import gzip
import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kv_core.clock import HandClock
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey, keys_in
from kv_server.engine_loads import EngineLoads, estimate
from kv_tiers.build import build_local_cache
from kv_tiers.config import HostConfig

from benchmarks._report import Row, parser, report

TRACE = Path(__file__).parent / "traces/agents/agents_a.jsonl.gz"
CHUNK_TOKENS, SLOT_BYTES, SPACE = 512, 4096, b"made-up-model-16"
HOSTS, ENGINES_OF_HOST = 2, 2
HOST_SHARE = 0.10
"""Of the trace's unique chunks, how many a host has room for."""
COSTS = Costs(0, (1e-4, 1e-9), (0.005, 2e-6))
"""10,000 tokens a second, less far into a prompt; loads at 500,000."""
SHAPE = ChunkShape(CHUNK_TOKENS)
PACES = (3, 10, 30)
"""Round robin keeps its engines busy 10, 42 and 74 % of the time."""
ALLOWED = {"round robin": 0.5, "least busy": 0.7, "most held": 1.02, "sticky": 1.02}


@dataclass
class Request:
    at_s: float
    session: int
    tokens: int
    digests: list[bytes]


@dataclass
class Engine:
    """busy_until_s: when it has computed what it was sent."""

    name: str
    host: "Host"
    busy_until_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Outcome:
    """seconds: to the first token, of each request.
    found: the part of the chunks that were not computed.
    busy: the part of the time that the engines computed.
    """

    seconds: list[float]
    found: float
    busy: float


class Host:
    """A cache, its engines, and what their lookups have left them to compute."""

    def __init__(self, number: int, slots: int, clock: HandClock) -> None:
        self.clock = clock
        self.cache = build_local_cache(
            HostConfig(capacity_bytes=slots * SLOT_BYTES), group_bytes=(SLOT_BYTES,), fingerprint="f", clock=clock
        )
        self.loads = EngineLoads(clock)
        self.engines = [Engine(f"{number}.{one}", self) for one in range(ENGINES_OF_HOST)]

    def expected_s(self, engine: Engine, request: Request) -> tuple[float, int]:
        """As `/route` says it: the time to the first token, and how many chunks are held."""
        for served in self.loads.spaces():
            if served.engine == engine.name:
                queue_s = self.loads.queue_s(engine.name)
                answer = estimate(self.cache, served, request.digests, tokens=request.tokens, queue_s=queue_s)
                assert answer.ttft_s is not None
                return answer.ttft_s, answer.held_chunks
        return 0.0, 0

    def serve(self, engine: Engine, request: Request, noise: random.Random) -> tuple[float, int]:
        """The time to the first token, and the chunks that were not computed."""
        keys: list[ChunkKey] = keys_in(SPACE, request.digests)
        plan = self.cache.lookup(keys, "r", shape=SHAPE, costs=COSTS)
        self.loads.looked_up(engine.name, ((SLOT_BYTES,), "f"), keys, SHAPE, COSTS, plan)
        assert plan.choice is not None
        loaded = plan.choice.chunks * CHUNK_TOKENS
        load_s = COSTS.load_s(0, loaded) or 0.0
        compute_s = COSTS.compute_s(min(loaded, request.tokens - 1), request.tokens) or 0.0
        work_s = (load_s + compute_s) * noise.lognormvariate(0.0, 0.2)
        now_s = self.clock.now_s()
        engine.busy_until_s = max(now_s, engine.busy_until_s) + work_s
        engine.busy_s += work_s
        self.cache.end("r")
        self.cache.commit(self.cache.begin_store(keys, "r"))
        return engine.busy_until_s - now_s, plan.choice.chunks


Choose = Callable[[Request, list[Engine]], Engine]


def rules() -> dict[str, Choose]:
    turns = itertools.count()
    sessions: dict[int, int] = {}

    def by_turn(request: Request, engines: list[Engine]) -> Engine:
        return engines[next(turns) % len(engines)]

    def sticky(request: Request, engines: list[Engine]) -> Engine:
        return engines[sessions.setdefault(request.session, len(sessions) % len(engines))]

    return {
        "/route": lambda request, engines: min(engines, key=lambda one: one.host.expected_s(one, request)[0]),
        "round robin": by_turn,
        "least busy": lambda request, engines: min(engines, key=lambda one: one.busy_until_s),
        "most held": lambda request, engines: max(
            engines, key=lambda one: (one.host.expected_s(one, request)[1], -one.busy_until_s)
        ),
        "sticky": sticky,
    }


def replay(sessions: list[list[Request]], choose: Choose, slots: int, pace: float) -> Outcome:
    clock, noise = HandClock(), random.Random(3)
    hosts = [Host(number, slots, clock) for number in range(HOSTS)]
    engines = [engine for host in hosts for engine in host.engines]
    seconds, found, wanted = [], 0, 0
    # A session's next request comes when it has its answer, and after what its agent does in between.
    next_turns = [(session[0].at_s / pace, number, 0) for number, session in enumerate(sessions)]
    heapq.heapify(next_turns)
    while next_turns:
        at_s, number, turn = heapq.heappop(next_turns)
        clock.advance(at_s - clock.now_s())
        request = sessions[number][turn]
        engine = choose(request, engines)
        took_s, chunks = engine.host.serve(engine, request, noise)
        seconds.append(took_s)
        found, wanted = found + chunks, wanted + len(request.digests)
        if turn + 1 < len(sessions[number]):
            pause_s = (sessions[number][turn + 1].at_s - request.at_s) / pace
            heapq.heappush(next_turns, (at_s + took_s + pause_s, number, turn + 1))
    for host in hosts:
        host.cache.close()
    return Outcome(seconds, found / wanted, sum(one.busy_s for one in engines) / len(engines) / clock.now_s())


def read(path: Path) -> list[list[Request]]:
    """The requests of each session, in their order."""
    sessions: dict[int, list[Request]] = {}
    with gzip.open(path, "rt") as lines:
        for one in map(json.loads, lines):
            tokens = one["input_length"]
            digests = [number.to_bytes(16, "big") for number in one["hash_ids"][: tokens // CHUNK_TOKENS]]
            if digests:
                session = one["session"]
                sessions.setdefault(session, []).append(Request(one["timestamp"] / 1000, session, tokens, digests))
    return list(sessions.values())


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    sessions = read(TRACE)
    slots = int(HOST_SHARE * len({digest for session in sessions for one in session for digest in one.digests}))
    rows = []
    for pace in PACES:
        means: dict[str, float] = {}
        for name, choose in rules().items():
            outcome = replay(sessions, choose, slots, pace)
            means[name] = statistics.fmean(outcome.seconds)
            late_s = statistics.quantiles(outcome.seconds, n=20)[-1]
            print(
                f"pace {pace}, {name}: first token after {means[name]:.2f} s in the mean, 95 % within {late_s:.2f} s; "
                f"{outcome.found:.1%} of the chunks not computed; engines busy {outcome.busy:.0%} of the time",
                file=sys.stderr,
            )
        ours_s = means.pop("/route")
        for name, mean_s in means.items():
            label, ratio = f"pace {pace}: beside {name}", ours_s / mean_s
            rows.append(Row(label, ours_s, "s", mean_s, ratio, ALLOWED[name], at_most=True))
    return report(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
