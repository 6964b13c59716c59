"""What a lookup costs: 512 resident chunks found, leased to a request, touched, and given back when it ends.

The limit of the first figure is its target itself, half a millisecond; what bare dictionary access to the same keys takes
is shown beside it. A pool of a million slots is reserved but never touched: no chunk's bytes are read or written here.
Every figure is a median over many prompts in turn, each looked up with keys made anew, as an engine would make them.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence

from _report import Row, parser, report
from kv_core import ChunkKey
from kv_tiers import HostPool, LocalCache

CHUNKS = 512
FEW = 1_000
MANY = 1_000_000
ROUNDS = 301
LIMIT_S = 0.5e-3
KEY_HEAD = bytes([1]) + bytes(22)


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    caches = {slots: filled(slots) for slots in (FEW, MANY)}
    rows = []

    medians = lookups_in_turn(caches)
    for slots, (looked_up, plain) in medians.items():
        name = f"lookup, lease and end of {CHUNKS} of {slots} chunks"
        rows.append(Row(name, looked_up * 1e3, "ms", LIMIT_S * 1e3, looked_up / LIMIT_S, 1.0, True))
        rows.append(Row("  the same keys from a dict", plain * 1e3, "ms", LIMIT_S * 1e3, plain / LIMIT_S, 1.0, True))
    few, many = medians[FEW][0], medians[MANY][0]
    rows.append(Row(f"lookup among {MANY} against {FEW}", many * 1e3, "ms", few * 1e3, many / few, 1.5, True))

    pair = pair_s()
    rows.append(Row("pool: allocate and free a slot", pair * 1e6, "us", 2.0, pair / 2e-6, 1.0, True))
    for name, cache, slots in (("room", LocalCache(HostPool.anonymous("room", 4096, MANY)), MANY), ("full", *few_full())):
        stored = store_s(cache, slots)
        name = f"reserve and commit of {CHUNKS} chunks, pool {'with room' if name == 'room' else 'full'}"
        # No target was set; the peer's 30 ms is what to be far from.
        rows.append(Row(name, stored * 1e3, "ms", 30.0, stored / 30e-3, 0.2, True))
        cache.close()
    return report(rows, options.json)


def new_prompt(chunks: int = CHUNKS) -> list[bytes]:
    return [KEY_HEAD + os.urandom(32) for _ in range(chunks)]


def keys_of(prompt: Sequence[bytes]) -> list[ChunkKey]:
    """Keys that no table has seen, hashes not yet computed."""
    return list(map(ChunkKey, prompt))


def filled(slots: int) -> tuple[LocalCache, list[list[bytes]], dict[ChunkKey, int]]:
    """A cache of so many resident chunks, the prompts in it, and a plain dictionary of the same keys."""
    cache = LocalCache(HostPool.anonymous(f"lookup-{slots}", 4096, slots))
    prompts, plain = [], {}
    for start in range(0, slots, CHUNKS):
        prompt = new_prompt(min(CHUNKS, slots - start))
        lease = cache.begin_store(keys_of(prompt), "writer")
        cache.commit(lease)
        plain.update(zip(lease.keys, range(start, start + CHUNKS), strict=False))
        if len(prompt) == CHUNKS:
            prompts.append(prompt)
    assert cache.counts().chunks_resident == slots
    return cache, prompts, plain


def lookups_in_turn(
    caches: dict[int, tuple[LocalCache, list[list[bytes]], dict[ChunkKey, int]]],
) -> dict[int, tuple[float, float]]:
    """Medians for each cache of a lookup with its end, and of a dictionary's; all timed in turn."""
    samples: dict[int, tuple[list[float], list[float]]] = {slots: ([], []) for slots in caches}
    for number in range(ROUNDS):
        for slots, (cache, prompts, plain) in caches.items():
            # A stride that visits prompts far from each other.
            prompt = prompts[number * 619 % len(prompts)]
            samples[slots][0].append(timed_lookup(cache, keys_of(prompt)))
            other = prompts[(number * 619 + 307) % len(prompts)]
            keys = keys_of(other)
            samples[slots][1].append(timed(lambda keys=keys, plain=plain: list(map(plain.get, keys))))
    return {slots: (statistics.median(ours), statistics.median(plain)) for slots, (ours, plain) in samples.items()}


def timed_lookup(cache: LocalCache, keys: list[ChunkKey]) -> float:
    start = time.perf_counter()
    plan = cache.lookup(keys, "request")
    cache.end("request")
    seconds = time.perf_counter() - start
    assert plan.chunks == len(keys)
    return seconds


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def pair_s(pairs: int = 1000) -> float:
    """One allocate and free, in a pool that is half used."""
    pool = HostPool.anonymous("pair", 4096, MANY)
    for _ in range(MANY // 2):
        pool.allocate()

    def run() -> None:
        for _ in range(pairs):
            slot = pool.allocate()
            assert slot is not None
            pool.free(slot)

    seconds = statistics.median(timed(run) for _ in range(21)) / pairs
    pool.close()
    return seconds


def few_full() -> tuple[LocalCache, int]:
    slots = 16 * CHUNKS
    return filled(slots)[0], slots


def store_s(cache: LocalCache, slots: int) -> float:
    samples = []
    for _ in range(min(101, slots // CHUNKS * 4)):
        keys = keys_of(new_prompt())
        start = time.perf_counter()
        lease = cache.begin_store(keys, "writer")
        cache.commit(lease)
        samples.append(time.perf_counter() - start)
        assert len(lease.keys) == CHUNKS
    return statistics.median(samples)


if __name__ == "__main__":
    raise SystemExit(main())
