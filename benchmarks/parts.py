"""What a tier gains that drops last parts before chunks: prefill seconds saved and KL divergence, at equal bytes.

    .venv/bin/python benchmarks/parts.py [--plot FILE]    (half a minute)

A full tier of the codec `progressive` can make room in two ways: drop the chunk that was used longest ago, or keep its
first part and drop the rest. A simulation over the traces of benchmarks/policy.py and of coding agents, least
recently used first. `whole share` is the part of the tier's bytes that is kept for whole chunks: 1 drops chunks alone,
0 drops every last part before it drops a chunk. A first part is served as an approximation and stays one.

Seconds are a model's, not measured: a chunk of 512 tokens at depth i takes 512 · (40 µs + 1.31 ns · i), as an 8B model
would. The KL divergence is that of docs/quality.md for a context of first parts alone, times the share of a prompt's
chunks that were first parts: a chunk's harm is taken to be its share.

Value and limit of a row: prefill seconds saved, and those that an unlimited tier would save, as parts of all. Ratio: to
dropping chunks alone.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import heapq
from dataclasses import dataclass
from pathlib import Path

from kv_core.keys import ChunkKey
from kv_tiers.tools import sim_plot
from kv_tiers.watch.trace_file import Trace, read_trace

from benchmarks._report import Row, parser, report

TRACES = Path(__file__).parent / "traces"
SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
"""Of what all chunks of a trace take as they are."""
RAW, WHOLE, FIRST = 160, 109, 40
"""Tenths of a bit that a number takes: as it is, in a whole payload, in a first part."""
KL = 0.00215
"""Of a context of first parts alone, SmolLM2 135M."""
CHUNK_TOKENS, TOKEN_S, PAIR_S = 512, 40e-6, 1.31e-9
WARM_UP = 0.2


@dataclass(frozen=True)
class Keeping:
    """stored: tenths of a bit that a number of a whole chunk takes. whole_share: the part of the tier's bytes for whole
    chunks."""

    name: str
    stored: int
    whole_share: float


WAYS = (
    Keeping("as they are", RAW, 1.0),
    Keeping("progressive, chunks dropped", WHOLE, 1.0),
    Keeping("half of it whole", WHOLE, 0.5),
    Keeping("parts dropped first", WHOLE, 0.0),
)


@dataclass(frozen=True)
class Outcome:
    """saved: of all prefill seconds. kl: mean over the requests."""

    saved: float
    kl: float


class Parts:
    """A tier's chunks, each whole or cut to its first part, by when they were last used."""

    def __init__(self, capacity: float, way: Keeping) -> None:
        """capacity: for each number of a chunk, over all chunks."""
        self._capacity, self._way = capacity, way
        self._used: dict[ChunkKey, int] = {}
        self.is_whole: dict[ChunkKey, bool] = {}
        self._oldest: dict[bool, list[tuple[int, ChunkKey]]] = {True: [], False: []}
        self._taken = {True: 0, False: 0}
        self._now = 0

    def touch(self, keys: list[ChunkKey]) -> None:
        """Use these, of one prompt; those that are not here are stored whole. The last first, as chunks of a prompt
        are worthless without those before them."""
        for key in reversed(keys):
            self._now += 1
            self._used[key] = self._now
            if key not in self.is_whole:
                self._put(key, whole=True)
            heapq.heappush(self._oldest[self.is_whole[key]], (self._now, key))
        while self._taken[True] + self._taken[False] > self._capacity:
            self._make_room()

    def _make_room(self) -> None:
        share = self._way.whole_share
        if share < 1.0 and self._taken[True] > share * self._capacity:
            cut = self._pop(whole=True)
            assert cut is not None
            self._put(cut, whole=False)
            heapq.heappush(self._oldest[False], (self._used[cut], cut))
            return
        key = self._pop(whole=False)
        key = self._pop(whole=True) if key is None else key
        assert key is not None
        del self._used[key]

    def _put(self, key: ChunkKey, *, whole: bool) -> None:
        self.is_whole[key] = whole
        self._taken[whole] += self._way.stored if whole else FIRST

    def _pop(self, *, whole: bool) -> ChunkKey | None:
        """Take out the one of these that was used longest ago."""
        heap = self._oldest[whole]
        while heap:
            used, key = heapq.heappop(heap)
            if self._used.get(key) == used and self.is_whole.get(key) is whole:
                del self.is_whole[key]
                self._taken[whole] -= self._way.stored if whole else FIRST
                return key
        return None


def simulate(trace: Trace, capacity: float, way: Keeping) -> Outcome:
    tier = Parts(capacity, way)
    first_counted = int(WARM_UP * len(trace.prompts))
    all_s = saved_s = kl = 0.0
    counted = 0
    for number, prompt in enumerate(trace.prompts):
        keys = list(prompt)
        hit = next((at for at, key in enumerate(keys) if key not in tier.is_whole), len(keys))
        if number >= first_counted and keys:
            counted += 1
            all_s += seconds(len(keys))
            saved_s += seconds(hit)
            kl += KL * sum(not tier.is_whole[key] for key in keys[:hit]) / len(keys)
        tier.touch(keys)
    return Outcome(saved_s / all_s, kl / counted)


def seconds(chunks: int) -> float:
    """To compute so many leading chunks of a prompt."""
    tokens = chunks * CHUNK_TOKENS
    return tokens * TOKEN_S + PAIR_S * tokens * tokens / 2


def main() -> int:
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--plot", metavar="FILE", help="draw them; .svg, .png or .pdf")
    options = made.parse_args()
    if options.plot:
        sim_plot.check(options.plot)
    rows: list[Row] = []
    pictures = {}
    for path in sorted(TRACES.glob("*/*.jsonl.gz")):
        trace = read_trace(str(path))
        name = path.name.split(".")[0]
        limit = simulate(trace, float("inf"), WAYS[0]).saved
        lines: dict[str, list[tuple[float, float]]] = {way.name: [] for way in WAYS}
        for share in SHARES:
            capacity = share * trace.chunks_unique
            found = {way: simulate(trace, capacity * RAW, way) for way in WAYS}
            best = found[WAYS[1]]
            for way, outcome in found.items():
                lines[way.name].append((capacity, outcome.saved))
                gain = outcome.saved / best.saved if best.saved else 1.0
                label = f"{name} {share:.0%}, {way.name}: KL {outcome.kl:.5f}"
                rows.append(Row(label, outcome.saved, "", limit, gain, 0, at_most=False))
        pictures[name] = (trace.chunks_unique, lines)
    if options.plot:
        sim_plot.draw(options.plot, pictures, "prefill seconds saved, of all")
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
