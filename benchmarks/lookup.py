"""What a lookup costs: 512 resident chunks found, leased to a request, touched, and given back when it ends.

For each of the eviction policies that are fit to be a default. And of hybrid models, beside a plain one, where the
target is twice its time.

The limit of the first figure is its target itself, half a millisecond; what bare dictionary access to as many keys
takes is shown beside it. The pool of a million slots is reserved and never touched: no chunk's bytes are read or
written here. Every figure is a median over many prompts in turn, each looked up with keys made anew, as an engine
makes them.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

from kv_connect.halves.engine_costs import EngineCosts
from kv_core import ChunkKey
from kv_core.coverage import ALL, PLAIN, STATE, ChunkShape, Coverage
from kv_eviction import make_policy
from kv_tiers import HostPool, LocalCache
from kv_tiers.clock import MonotonicClock
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import LookedUp

from benchmarks._report import Row, parser, report

CHUNKS = 512
CHUNK_TOKENS = 256
FEW = 1_000
MANY = 1_000_000
ROUNDS = 301
LIMIT_S = 0.5e-3
MIN_CHURNED = 30
"""Prompts, that a median over them says something."""
POLICIES = ("lru", "prefix")
KEY_HEAD = bytes([1]) + bytes(29)


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    rows = [row for policy in POLICIES for row in policy_rows(policy)]
    watched, publish = watched_lookup_s(), publish_s()
    rows.append(
        Row("lru: lookup, watched by a subscriber", watched * 1e3, "ms", LIMIT_S * 1e3, watched / LIMIT_S, 1.0, True)
    )
    rows.append(Row("bus: make and publish an event", publish * 1e6, "us", 1.0, publish / 1e-6, 1.0, True))
    costed, plain = costed_lookup_s()
    extra = max(0.0, costed - plain)
    rows.append(Row("prefix: what an engine's costs add to a lookup", extra * 1e6, "us", 5.0, extra / 5e-6, 1.0, True))
    rows += hybrid_rows()
    pair = pair_s()
    rows.append(Row("pool: allocate and free a slot", pair * 1e6, "us", 2.0, pair / 2e-6, 1.0, True))
    return report(rows, options.json)


def policy_rows(policy: str) -> list[Row]:
    caches = {slots: filled(slots, policy) for slots in (FEW, MANY)}
    rows = []
    medians = lookups_in_turn(caches)
    for slots, (looked_up, plain) in medians.items():
        name = f"{policy}: lookup, lease and end of {CHUNKS} of {slots} chunks"
        rows.append(Row(name, looked_up * 1e3, "ms", LIMIT_S * 1e3, looked_up / LIMIT_S, 1.0, True))
        rows.append(Row("  the same keys from a dict", plain * 1e3, "ms", LIMIT_S * 1e3, plain / LIMIT_S, 1.0, True))
    few, many = medians[FEW][0], medians[MANY][0]
    name = f"{policy}: lookup among {MANY} against {FEW}"
    rows.append(Row(name, many * 1e3, "ms", few * 1e3, many / few, 1.5, True))

    cache, prompts, _ = caches[MANY]
    churned = churned_lookup_s(cache, len(prompts))
    name = f"{policy}: lookup among {MANY} after churn"
    rows.append(Row(name, churned * 1e3, "ms", LIMIT_S * 1e3, churned / LIMIT_S, 1.0, True))

    # No target was set for stores; a tenth of what the peer takes (3 ms of its 30) is one we can be held to.
    for room, pool in (
        ("with room", new_cache("room", MANY, policy)),
        ("full", filled(16 * CHUNKS, policy)[0]),
    ):
        stored = store_s(pool)
        name = f"{policy}: reserve and commit of {CHUNKS} chunks, pool {room}"
        rows.append(Row(name, stored * 1e3, "ms", 3.0, stored / 3e-3, 1.0, True))
        pool.close()
    for cache, _, _ in caches.values():
        cache.close()
    return rows


def new_cache(name: str, slots: int, policy: str) -> LocalCache:
    return LocalCache(HostPool.anonymous(name, 4096, slots), policy=make_policy(policy, slots))


def new_prompt(chunks: int = CHUNKS) -> list[bytes]:
    return [KEY_HEAD + os.urandom(32) for _ in range(chunks)]


def keys_of(prompt: Sequence[bytes]) -> list[ChunkKey]:
    """Keys that no table has seen, hashes not yet computed."""
    return list(map(ChunkKey, prompt))


def filled(slots: int, policy: str) -> tuple[LocalCache, list[list[bytes]], dict[ChunkKey, int]]:
    """A cache of so many resident chunks, the prompts in it, and a plain dictionary of the same keys."""
    cache = new_cache(f"lookup-{slots}", slots, policy)
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
            seconds, chunks = timed_lookup(cache, keys_of(prompt))
            assert chunks == CHUNKS
            samples[slots][0].append(seconds)
            other = prompts[(number * 619 + 307) % len(prompts)]
            keys = keys_of(other)
            samples[slots][1].append(timed(lambda keys=keys, plain=plain: list(map(plain.get, keys))))
    return {slots: (statistics.median(ours), statistics.median(plain)) for slots, (ours, plain) in samples.items()}


def churned_lookup_s(cache: LocalCache, prompts: int) -> float:
    """Median lookup once half of the pool was replaced by prompts of all lengths, eight at a time, piece by piece.

    Their slots come from whatever was evicted, a few chunks here and a few there. What counts is the lookups of
    those that the policy kept whole: chunks that are not there would only make it quicker.
    """
    chance = random.Random(7)
    growing: list[tuple[list[bytes], int]] = []
    whole: list[list[bytes]] = []
    while len(whole) < prompts // 2:
        while len(growing) < 8:
            growing.append((new_prompt(chance.randrange(64, 2 * CHUNKS)), 0))
        prompt, stored = growing.pop(chance.randrange(8))
        stored = min(len(prompt), stored + 64)
        cache.commit(cache.begin_store(keys_of(prompt[:stored]), "writer"))
        if stored < len(prompt):
            growing.append((prompt, stored))
        elif len(prompt) >= CHUNKS:
            whole.append(prompt[:CHUNKS])
        else:
            whole.append([])
    # Each once: the first lookup of a prompt makes the next one quicker.
    lookups = [timed_lookup(cache, keys_of(prompt)) for prompt in whole if prompt]
    samples = [seconds for seconds, chunks in lookups if chunks == CHUNKS]
    assert len(samples) >= MIN_CHURNED
    return statistics.median(samples)


def timed_lookup(cache: LocalCache, keys: list[ChunkKey], shape: ChunkShape = PLAIN) -> tuple[float, int]:
    """Seconds, and the chunks found."""
    start = time.perf_counter()
    plan = cache.lookup(keys, "request", shape=shape)
    cache.end("request")
    return time.perf_counter() - start, plan.chunks


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Listener(Subscriber):
    """Takes what it is told and does nothing with it, so that what is measured is the publisher."""

    def take(self, occurred: Occurred) -> None:
        pass


def watched_lookup_s() -> float:
    """Median of a lookup of 512 of few chunks, with its end, while somebody listens: two events."""
    bus = EventBus()
    bus.subscribe(Listener())
    cache = LocalCache(HostPool.anonymous("watched", 4096, FEW), events=bus.source())
    prompt = new_prompt()
    cache.commit(cache.begin_store(keys_of(prompt), "writer"))
    median = statistics.median(timed_lookup(cache, keys_of(prompt))[0] for _ in range(ROUNDS))
    cache.close()
    bus.close()
    return median


def costed_lookup_s() -> tuple[float, float]:
    """Medians of a lookup of 512 that comes with an engine's costs, and of one that does not, in turn."""
    cache = new_cache("costed", FEW, "prefix")
    prompt = new_prompt()
    cache.commit(cache.begin_store(keys_of(prompt), "writer"))
    engine = EngineCosts(MonotonicClock())
    for tokens in (100, 2000, 700, 5000, 300):  # so that there is something to decide by
        engine.step_scheduled(tokens, tokens * tokens / 2, counts=True)
        engine.step_ended()
        engine.load_began("r", tokens)
        engine.load_ended("r", failed=False)
    assert engine.of(0) is not None
    shape = ChunkShape(CHUNK_TOKENS)
    costed, plain = [], []
    for _ in range(10 * ROUNDS):
        keys = keys_of(prompt)
        costed.append(timed(lambda keys=keys: cache.lookup(keys, "request", shape=shape, costs=engine.of(0))))
        keys = keys_of(prompt)
        plain.append(timed(lambda keys=keys: cache.lookup(keys, "request", shape=shape)))
    cache.close()
    return statistics.median(costed), statistics.median(plain)


HYBRIDS = {
    "1 full, 5 windows of 512": ChunkShape(CHUNK_TOKENS, (ALL, *[Coverage("window", 512)] * 5)),
    "1 full, 3 states": ChunkShape(CHUNK_TOKENS, (ALL, *[STATE] * 3)),
}


def hybrid_rows() -> list[Row]:
    """A hybrid model's lookup beside a plain one's: of everything held, and with what it needs only at the third chunk
    from the end, so that it has to go back."""
    rows = []
    for name, shape in HYBRIDS.items():
        for back in (0, 3):
            hybrid, plain = hybrid_lookup_s(shape, back)
            about = f"prefix: lookup of {CHUNKS} chunks of a hybrid ({name})" + (
                f", {back} chunks back" if back else ""
            )
            rows.append(Row(about, hybrid * 1e3, "ms", plain * 1e3, hybrid / plain, 2.0, True))
    return rows


def hybrid_lookup_s(shape: ChunkShape, back: int) -> tuple[float, float]:
    """Medians, in turn, of a hybrid's lookup with its end and of a plain one's.

    back: how many chunks before the end the boundary is at which all is held.
    """
    groups = len(shape.groups)
    slots = FEW * (groups + 1)
    caches = [LocalCache(HostPool.anonymous(f"hybrid-{number}", 4096, slots)) for number in range(2)]
    digests = [os.urandom(32) for _ in range(CHUNKS)]
    prompt = [group_head(group) + digest for digest in digests for group in range(groups)]
    caches[1].commit(caches[1].begin_store(keys_of(prompt[::groups]), "writer"))
    caches[0].lookup(keys_of(prompt[:groups]), "request", shape=shape)  # as an engine does before it stores
    for group in range(groups):
        held = prompt[group::groups][: CHUNKS - back if group else CHUNKS]
        caches[0].commit(caches[0].begin_store(keys_of(held), "writer"))
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for at, (cache, keys, asked) in enumerate(
            ((caches[0], keys_of(prompt), shape), (caches[1], keys_of(prompt[::groups]), PLAIN))
        ):
            seconds, chunks = timed_lookup(cache, keys, asked)
            assert chunks == CHUNKS - (0 if at else back)
            samples[at].append(seconds)
    for cache in caches:
        cache.close()
    return statistics.median(samples[0]), statistics.median(samples[1])


def group_head(group: int) -> bytes:
    return KEY_HEAD[:24] + group.to_bytes(2, "big") + KEY_HEAD[26:]


def publish_s(events: int = 1000) -> float:
    """One event made and published to a queue that has room."""
    bus = EventBus()
    bus.subscribe(Listener())
    source = bus.source()
    keys = keys_of(new_prompt())

    def run() -> None:
        for _ in range(events):
            source.publish(LookedUp("request", keys, PLAIN, CHUNKS, (), "ALL_HELD"))

    samples = []
    for _ in range(21):
        samples.append(timed(run) / events)
        bus.flush()
    bus.close()
    return statistics.median(samples)


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


def store_s(cache: LocalCache) -> float:
    samples = []
    for _ in range(101):
        keys = keys_of(new_prompt())
        start = time.perf_counter()
        lease = cache.begin_store(keys, "writer")
        cache.commit(lease)
        samples.append(time.perf_counter() - start)
        assert len(lease.keys) == CHUNKS
    return statistics.median(samples)


if __name__ == "__main__":
    raise SystemExit(main())
