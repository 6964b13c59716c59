"""What becomes of chunks that are read from peers: hosts of one cluster on a trace, with the index and the policies of
the real cache. Time and links are not simulated.

Each request goes to one host, which finds chunks in its pool, then at its peers, and computes the rest. What it
computes it keeps. What it read from a peer it

  keeps     keeps like what it computed
  never     does not keep
  second    keeps as the first to leave, until it is used once more
  yields    keeps as the first to leave, as long as a peer holds it as well
  moves     keeps like what it computed, and the host that it was read from has it leave first, until it is used there

`hit` is the part of the chunks that were not computed, `local` the part found in the host's own pool, `read` the rest
of the hits, which cross the network. `cost` is (computed + read / SPEED) / asked: a chunk is read so much faster than
it is computed. One of two routers gives requests to hosts in turn; the other leaves sessions where they are, but for
one request in ten.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kv_core.keys import ChunkKey
from kv_eviction import make_policy
from kv_observe.trace_file import read_trace
from kv_tiers.index.residency import Residency

from benchmarks._report import parser

TRACES = Path(__file__).parent / "traces"
HOSTS = 4
SPEED = 8
WAYS = ("keeps", "never", "second", "yields", "moves")
ROUTERS = ("round robin", "sticky")
SHARES = (0.05, 0.2, 0.5)
WARM_UP = 0.2


class Host:
    """One pool."""

    def __init__(self, chunks: int, policy: str, cluster: "Cluster") -> None:
        self.index = Residency(chunks, make_policy(policy, chunks))
        self._free = list(range(chunks - 1, -1, -1))
        self._cluster = cluster
        self.first_to_leave: dict[ChunkKey, None] = {}
        self.copies: set[ChunkKey] = set()

    def has(self, key: ChunkKey) -> bool:
        return self.index.find(key) is not None

    def serve(self, prompt: Sequence[ChunkKey], way: str) -> tuple[int, int]:
        """The chunks found here, and those read from peers."""
        holders = self._cluster.holders
        hit = next((at for at, key in enumerate(prompt) if not holders[key]), len(prompt))
        local = [self.has(key) for key in prompt[:hit]]
        leading = next((at for at, is_here in enumerate(local) if not is_here), hit)
        if leading:
            slots = [slot for key in prompt[:leading] if (slot := self.index.find(key)) is not None]
            self.index.touch(prompt, slots)
        read = [key for key, is_here in zip(prompt, local, strict=False) if not is_here]
        for key in prompt[:hit]:
            if way != "yields" or key not in self.copies:
                self.first_to_leave.pop(key, None)
        lent = set(read)
        self._store([key for key in prompt if way != "never" or key not in lent], way)
        tails_first = [key for key in reversed(read) if self.has(key)]
        if way in ("second", "yields"):
            self.copies.update(tails_first)
            self.first_to_leave.update(dict.fromkeys(tails_first))
        if way == "moves":
            for host in self._cluster.hosts:
                if host is not self:
                    host.first_to_leave.update(dict.fromkeys(key for key in tails_first if host.has(key)))
        return sum(local), len(read)

    def _store(self, prompt: Sequence[ChunkKey], way: str) -> None:
        own = self._extend(prompt)
        protected, skipped = frozenset(own), set[int]()
        keys: list[ChunkKey] = []
        slots: list[int] = []
        for key in prompt:
            if self.index.is_held(key):
                continue
            slot = self._free.pop() if self._free else self._victim(protected, skipped, way)
            if slot is None:
                break
            if (gone := self.index.key_at(slot)) is not None:
                self.index.empty(slot)
                self.first_to_leave.pop(gone, None)
                self.copies.discard(gone)
                self._cluster.holders[gone] -= 1
            self.index.reserve([key], [slot])
            keys.append(key)
            slots.append(slot)
        if skipped:
            self.index.reinsert([slot for slot in own if slot in skipped])
        if keys:
            self.index.commit(keys, slots)
            self._cluster.holders.update(keys)
            self._extend(prompt)

    def _victim(self, protected: frozenset[int], skipped: set[int], way: str) -> int | None:
        for key in self.first_to_leave:
            slot = self.index.find(key)
            if slot is not None and slot not in protected and (way != "yields" or self._cluster.holders[key] > 1):
                return slot
        return self.index.victim(protected, skipped)

    def _extend(self, chain: Sequence[ChunkKey]) -> list[int]:
        there = [(key, slot) for key in chain if (slot := self.index.find(key)) is not None]
        slots = [slot for _, slot in there]
        if slots:
            self.index.extend([key for key, _ in there], slots)
        return slots


class Cluster:
    def __init__(self, chunks: int, policy: str) -> None:
        """chunks: of each pool."""
        self.holders: Counter[ChunkKey] = Counter()
        self.hosts = [Host(chunks, policy, self) for _ in range(HOSTS)]

    def choose(self, prompt: Sequence[ChunkKey], number: int, router: str, chance: random.Random) -> Host:
        if router == "round robin":
            return self.hosts[number % HOSTS]

        # A session stays where it is, but for one request in ten.
        host = zlib.crc32(prompt[0]) if chance.random() < 0.9 else chance.randrange(HOSTS)
        return self.hosts[host % HOSTS]


def simulate(
    prompts: Sequence[Sequence[ChunkKey]], chunks: int, policy: str, way: str, router: str
) -> dict[str, float]:
    chance = random.Random(17)
    cluster = Cluster(chunks, policy)
    asked = local = read = 0
    for number, prompt in enumerate(prompts):
        if number == int(WARM_UP * len(prompts)):
            asked = local = read = 0
        found = cluster.choose(prompt, number, router, chance).serve(prompt, way)
        asked += len(prompt)
        local += found[0]
        read += found[1]
    computed = asked - local - read
    return {
        "hit": (local + read) / asked,
        "local": local / asked,
        "read": read / asked,
        "cost": (computed + read / SPEED) / asked,
    }


def main() -> int:
    asked = parser(__doc__ or "")
    asked.add_argument("--policy", default="prefix")
    asked.add_argument("--trace", default="agents/agents_a.jsonl.gz")
    asked.add_argument("--requests", type=int, default=4000)
    options = asked.parse_args()
    trace = read_trace(str(TRACES / options.trace))
    prompts = trace.prompts[: options.requests]
    unique = len({key for prompt in prompts for key in prompt})
    print(f"{options.trace}, {len(prompts)} requests, {unique} unique chunks, {HOSTS} hosts, policy {options.policy}")
    for router in ROUTERS:
        for share in SHARES:
            for way in WAYS:
                got = simulate(prompts, int(share * unique / HOSTS), options.policy, way, router)
                print(
                    f"{router:<12} all pools {share:>4.0%} of unique  {way:<8}"
                    + "".join(f"  {name} {value:.4f}" for name, value in got.items()),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
