"""What a tier gains that drops last parts before chunks: prefill seconds saved and KL divergence, at equal bytes.

    .venv/bin/python benchmarks/parts.py [--plot FILE]    (half a minute)
    .venv/bin/python benchmarks/parts.py --tier DIRECTORY [--policy NAME]    (some minutes)

A full tier of the codec `progressive` can make room in two ways: drop the chunk that was used longest ago, or keep its
first part and drop the rest. A simulation over the traces of benchmarks/policy.py and of coding agents, least
recently used first. `whole share` is the part of the tier's bytes that is kept for whole chunks: 1 drops chunks alone,
0 drops every last part before it drops a chunk. A first part is served as an approximation and stays one.

Seconds are a model's, not measured: a chunk of 512 tokens at depth i takes 512 · (40 µs + 1.31 ns · i), as an 8B model
would. The KL divergence is that of docs/quality.md for a context of first parts alone, times the share of a prompt's
chunks that were first parts: a chunk's harm is taken to be its share.

With `--tier` the agents' trace is replayed against a real disk tier in that directory as well, with payloads of 44 KiB
for chunks of 64 KiB, which with their headers take 12, 9 and 5 of 17 units: whole, as a half, as a quarter. The
simulation beside it cuts to these 5 at once. What was cut to a half counts as a quarter in the KL divergence.

Value and limit of a row: prefill seconds saved, and those that an unlimited tier would save, as parts of all. Ratio: to
dropping chunks alone. Of a row of the real tier the limit is the simulation's.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import heapq
from dataclasses import dataclass
from pathlib import Path

from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_eviction.registry import make_policy
from kv_observe.sim_cli import check_plot, draw_plot
from kv_observe.trace_file import Trace, read_trace
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read, TierContext, WhenFull, Write
from kv_tiers.tiers.disk import DiskConfig, DiskTier, bytes_for

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
    """stored: what a whole chunk takes: tenths of a bit of each number, or units. whole_share: the part of the tier's
    bytes for whole chunks. first: what a first part takes."""

    name: str
    stored: int
    whole_share: float
    first: int = FIRST


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
        self._taken[whole] += self._way.stored if whole else self._way.first

    def _pop(self, *, whole: bool) -> ChunkKey | None:
        """Take out the one of these that was used longest ago."""
        heap = self._oldest[whole]
        while heap:
            used, key = heapq.heappop(heap)
            if self._used.get(key) == used and self.is_whole.get(key) is whole:
                del self.is_whole[key]
                self._taken[whole] -= self._way.stored if whole else self._way.first
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


CONTEXT = TierContext(64 << 10, 64 << 10, "parts")
STORED_BYTES, QUARTER_BYTES = 44 << 10, 16 << 10
UNITS = {"drop_chunks": Keeping("", 12, 1.0, 5), "drop_parts": Keeping("", 12, 0.0, 5)}
"""The same tier, for the simulation: a slot has 17 units."""


def replay(trace: Trace, slots: int, when_full: WhenFull, policy: str, directory: Path) -> Outcome:
    """Like `simulate`, with a real disk tier of so many slots."""
    config = DiskConfig(
        directory=str(directory / f"{when_full}-{slots}-{policy}"),
        capacity_bytes=bytes_for(CONTEXT, slots),
        durability="process",
        direct="never",
        when_full=when_full,
    )
    tier = DiskTier(config, CONTEXT, make_policy(policy, slots))
    form, pages = chunk_header.format_id(CONTEXT.fingerprint), aligned_pages(CONTEXT.slot_bytes)
    checksum, pieces = chunk_header.checksums_of(pages[:STORED_BYTES], CONTEXT.chunk_bytes)
    size = CONTEXT.chunk_bytes

    def write(key: ChunkKey, parent: ChunkKey | None) -> Write:
        header = chunk_header.Header(key, parent, size, STORED_BYTES, form, "parts", checksum, None, pieces)
        return Write(key, parent, chunk_header.make_header(header), pages, STORED_BYTES)

    first_counted = int(WARM_UP * len(trace.prompts))
    all_s = saved_s = kl = 0.0
    counted = 0
    for number, prompt in enumerate(trace.prompts):
        keys = list(prompt)
        held = tier.holds(keys)
        hit = held.index(False) if False in held else len(keys)
        reads = [Read(key, bytearray(chunk_header.HEADER_BYTES), pages, size) for key in keys[:hit]]
        loaded = tier.load(reads)
        if not all(isinstance(one, Loaded) for one in loaded):
            raise RuntimeError("the tier has lost a chunk that it held")
        if number >= first_counted and keys:
            counted += 1
            all_s += seconds(len(keys))
            saved_s += seconds(hit)
            kl += KL * sum(isinstance(one, Loaded) and one.nbytes < STORED_BYTES for one in loaded) / len(keys)
        for start in range(hit, len(keys), 32):
            parents = [keys[start - 1] if start else None, *keys[start:]]
            tier.store([write(key, parent) for key, parent in zip(keys[start : start + 32], parents, strict=False)])
    tier.close()
    return Outcome(saved_s / all_s, kl / counted)


def real_rows(directory: Path, policy: str) -> list[Row]:
    """The agents' trace on a real tier."""
    (path,) = TRACES.glob("agents/*.jsonl.gz")
    trace = read_trace(str(path))
    rows = []
    for share in SHARES[:3]:
        slots = int(share * trace.chunks_unique)
        ways: tuple[WhenFull, ...] = ("drop_chunks", "drop_parts")
        found = {way: replay(trace, slots, way, policy, directory) for way in ways}
        for way, outcome in found.items():
            simulated = simulate(trace, slots * 17, UNITS[way]).saved
            gain = outcome.saved / found["drop_chunks"].saved
            label = f"agents {share:.0%}, {slots} slots of a real disk tier, {policy}, {way}: KL {outcome.kl:.5f}"
            rows.append(Row(label, outcome.saved, "", simulated, gain, None, at_most=False))
    return rows


def seconds(chunks: int) -> float:
    """To compute so many leading chunks of a prompt."""
    tokens = chunks * CHUNK_TOKENS
    return tokens * TOKEN_S + PAIR_S * tokens * tokens / 2


def main() -> int:
    made = parser(__doc__.split("\n\n")[0])
    made.add_argument("--plot", metavar="FILE", help="draw them; .svg, .png or .pdf")
    made.add_argument("--tier", type=Path, metavar="DIRECTORY", help="replay the agents' trace on a disk tier there")
    made.add_argument("--policy", default="lru", help="the eviction policy of that tier (default: lru)")
    options = made.parse_args()
    if options.tier is not None:
        return report(real_rows(options.tier, options.policy), options.json)
    if options.plot:
        check_plot(options.plot)
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
                rows.append(Row(label, outcome.saved, "", limit, gain, None, at_most=False))
        pictures[name] = (trace.chunks_unique, lines)
    if options.plot:
        draw_plot(options.plot, pictures, "prefill seconds saved, of all")
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
