"""Side by side with LMCache 0.5.6, in one run: the same work by each, in turn.

    make bench-peer [JSON=1]

limit: what LMCache takes, by its own classes, in an environment of its own (`_lmcache.py`). Both are asked for one
measurement after the other, three times over; the medians count. Its faults are no part of this: docs/faults.md.

    keys        131,072 tokens to 512 chunk keys: SHA-256 chained here, BLAKE3 there, which is its server's way
    short_keys  the same where all callers are trusted: xxh3 of 128 bits here; there Python's hash of 64 bits, its
                default in process, which differs between processes unless PYTHONHASHSEED is set
    lookup      512 resident chunks found from those tokens, leased (there: pinned), and given back
    allocate    room for a chunk of 4 MiB taken and given back
    store       eight chunks of 4 MiB to disk until they are durable; a checksum of each is made here, none there
    load        eight of them, past the page cache; a checksum of each is verified here, none there
    full        one chunk of 64 KiB put into a full disk tier of 10,000
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import json
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from kv_core import ChainScheme, KeySequence, KeySpace
from kv_eviction import make_policy
from kv_eviction.simple import LruPolicy
from kv_tiers import HostPool, LocalCache
from kv_tiers.tiers.disk import DiskConfig, DiskTier
from kv_tiers.tiers.disk_chunks import bytes_for

from benchmarks._report import Row, median_s, parser, report
from benchmarks.tiers import MIB, Traffic

PEER = Path(__file__).parents[1] / ".venvs/lmcache/bin/python"
ROUNDS = 3
PROMPT_TOKENS, CHUNK_TOKENS = 131_072, 256
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
BATCH, REPEATS, DISK_REPEATS = 8, 31, 9
FULL_CHUNKS = 10_000


class Ours:
    """What is measured here, by the names that the peer knows too."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        chance = random.Random(7)
        self._prompt = [chance.randrange(128_256) for _ in range(PROMPT_TOKENS)]
        self._scheme = ChainScheme(chunk_tokens=CHUNK_TOKENS)
        self._space = KeySpace("a-model", "a-revision", "bfloat16", "a-format", 1, self._scheme.name)

    def keys(self) -> float:
        return self._keys(self._scheme)

    def short_keys(self) -> float:
        return self._keys(ChainScheme("xxh3_128", CHUNK_TOKENS))

    def _keys(self, scheme: ChainScheme) -> float:
        return median_s(lambda: self._space.keys(KeySequence(scheme).append(self._prompt)), REPEATS)

    def lookup(self) -> float:
        cache = LocalCache(HostPool.anonymous("peer", 4096, 2 * CHUNKS), policy=make_policy("prefix", 2 * CHUNKS))
        cache.commit(cache.begin_store(self._space.keys(KeySequence(self._scheme).append(self._prompt)), "writer"))

        def once() -> None:
            keys = self._space.keys(KeySequence(self._scheme).append(self._prompt))
            assert cache.lookup(keys, "request").chunks == CHUNKS
            cache.end("request")

        seconds = median_s(once, REPEATS)
        cache.close()
        return seconds

    def allocate(self) -> float:
        pool = HostPool.anonymous("peer", 4 * MIB, 256)

        def many() -> None:
            for _ in range(1000):
                slot = pool.allocate()
                assert slot is not None
                pool.free(slot)

        seconds = median_s(many, REPEATS) / 1000
        pool.close()
        return seconds

    def store(self) -> float:
        traffic, tier = self._disk(4 * MIB, 64 * BATCH)

        def once() -> None:
            writes = next(batches)
            traffic.make_headers(writes)
            traffic.store(tier, writes)

        batches = iter([traffic.prepare() for _ in range(DISK_REPEATS + 2)])
        return self._closed(traffic, tier, median_s(once, DISK_REPEATS))

    def load(self) -> float:
        traffic, tier = self._disk(4 * MIB, 64 * BATCH)
        for _ in range(DISK_REPEATS + 2):
            traffic.store(tier, traffic.prepare())
        batches = iter(traffic.stored)
        seconds = median_s(lambda: traffic.check(traffic.load(tier, next(batches))), DISK_REPEATS)
        return self._closed(traffic, tier, seconds)

    def full(self) -> float:
        traffic, tier = self._disk(MIB // 16, FULL_CHUNKS, batch=100)
        for _ in range(FULL_CHUNKS // 100 + 1):
            traffic.store(tier, traffic.prepare())
        batches = iter([[write] for write in traffic.prepare()])
        return self._closed(traffic, tier, median_s(lambda: tier.store(next(batches)), DISK_REPEATS))

    def _disk(self, chunk_bytes: int, slots: int, batch: int = BATCH) -> tuple[Traffic, DiskTier]:
        traffic = Traffic(chunk_bytes, batch)
        path = tempfile.mkdtemp(dir=self._directory)
        config = DiskConfig(directory=path, capacity_bytes=bytes_for(traffic.context, slots))
        return traffic, DiskTier(config, traffic.context, LruPolicy())

    @staticmethod
    def _closed(traffic: Traffic, tier: DiskTier, seconds: float) -> float:
        tier.close()
        traffic.close()
        return seconds


class Theirs:
    def __init__(self, directory: Path) -> None:
        if not PEER.exists():
            raise SystemExit(f"{PEER} is not there: `make bench-peer` installs LMCache into an environment of its own")
        script = Path(__file__).with_name("_lmcache.py")
        self._process = subprocess.Popen(
            [str(PEER), str(script), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, name: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> float | str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("LMCache ended; run it by hand to see why: " + " ".join(map(str, self._process.args)))
        answer: float | str = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    made = parser((__doc__ or "").split("\n\n")[0])
    made.add_argument("--path", default=tempfile.gettempdir(), help="where to measure disks; needs 4 GiB for a while")
    chosen = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv-peer-", dir=chosen.path) as home:
        ours, theirs = Ours(Path(home)), Theirs(Path(home))
        measured: dict[str, Callable[[], float]] = {
            "keys": ours.keys,
            "short_keys": ours.short_keys,
            "lookup": ours.lookup,
            "allocate": ours.allocate,
            "store": ours.store,
            "load": ours.load,
            "full": ours.full,
        }
        try:
            rows = [_row(name, [(run(), theirs.ask(name)) for _ in range(ROUNDS)]) for name, run in measured.items()]
        finally:
            theirs.close()
    return report(rows, chosen.json)


def _row(name: str, samples: list[tuple[float, float]]) -> Row:
    ours, theirs = (statistics.median(side) for side in zip(*samples, strict=True))
    return Row(name, ours * 1e3, "ms", theirs * 1e3, ours / theirs, 1.0, at_most=True)


if __name__ == "__main__":
    sys.exit(main())
