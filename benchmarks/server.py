"""What it costs to have the cache in another process: a lookup with its lease through the socket, stores, many clients.

The server is a real process with a pool of 65,536 slots; no chunk's bytes are written, as that is the engine's copy and
costs the same at either address. A lookup's limit is its target, one millisecond, for 512 chunks found and leased; its
rows also say what an empty round trip takes and what the same lookup takes in this process. A load of what was looked
up is one round trip, which is counted. Keys are made anew each
time, as an engine makes them. Medians, and where it says so the 99th percentile.

An upgrade's pause is how long clients waited while a new server took over from the old one, with a disk behind the pool
and two clients that store and load without pause, none of whose loads may fail (`--upgrades 0` leaves it out).
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kv_core import ChunkKey
from kv_core.service import CacheService, ReadLease
from kv_server import RemoteCache, ServerProcess, launch, wire
from kv_testing.cache_servers import join_server, settings_for
from kv_testing.upgrades import Loads, UpgradedServers
from kv_tiers import HostPool, LocalCache

from benchmarks._report import Row, parser, report

CHUNKS = 512
CHUNK_BYTES = 4096
SLOTS = 1 << 16
ROUNDS = 1001
CLIENTS = 8
SECONDS = 2.0
KEY_HEAD = bytes([1]) + bytes(29)
CONFIG = {"host": {"capacity_bytes": SLOTS * CHUNK_BYTES}}
UPGRADED_CHUNKS = 4096


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--upgrades", type=int, default=100, help="how many; a second each, or two")
    options = made.parse_args()
    rows = []
    ready_s = statistics.median(time_to_ready_s() for _ in range(5))
    rows.append(Row("start to ready", ready_s, "s", 1.0, ready_s, 1.0, True))
    server = launch(CONFIG)
    cache = join(server)
    prompts = [new_prompt() for _ in range(SLOTS // CHUNKS)]
    for prompt in prompts:
        cache.commit(cache.begin_store(keys_of(prompt), "w"))
    resident = rss_bytes(server.pid)
    rows.append(
        Row(
            f"its memory beside the pool, {SLOTS} chunks known",
            resident / 2**20,
            "MiB",
            100.0,
            resident / 100 / 2**20,
            1,
            True,
        )
    )

    local = LocalCache(HostPool.anonymous("local", CHUNK_BYTES, SLOTS))
    for prompt in prompts:
        local.commit(local.begin_store(keys_of(prompt), "w"))
    looked_up, in_process, pings = lookups_in_turn(cache, local, prompts)
    median, last = statistics.median(looked_up), percentile(looked_up, 99)
    empty, plain = statistics.median(pings), statistics.median(in_process)
    rows += [
        Row(f"lookup with lease of {CHUNKS} chunks", median * 1e3, "ms", 1.0, median / 1e-3, 1.0, True),
        Row("  99th percentile", last * 1e3, "ms", 2.0, last / 2e-3, 1.0, True),
        # No target was set for what comes on top of the work and the way; that it is no more than both again and a
        # half is one we can be held to.
        Row(
            "  against in process and an empty round trip",
            median * 1e3,
            "ms",
            (plain + empty) * 1e3,
            median / (plain + empty),
            2.5,
            True,
        ),
        Row("an empty round trip", empty * 1e6, "us", 250.0, empty / 250e-6, 1.0, True),
    ]
    loaded, trips = loads(cache, prompts)
    rows += [
        Row(f"load of {CHUNKS} chunks, leased", loaded * 1e3, "ms", 1.0, loaded / 1e-3, 1.0, True),
        Row("  its round trips", trips, "", 1.0, trips, 1.0, True),
    ]
    stored = store_s(cache)
    rows.append(Row(f"reserve and commit of {CHUNKS} chunks", stored * 1e3, "ms", 3.0, stored / 3e-3, 1.0, True))
    local.close()

    # One client alone and the server take turns. Many keep the server busy, and share the rest of the machine.
    rate, last = crowd(server, prompts)
    alone = 1 / median
    rows += [
        Row(f"lookups a second, {CLIENTS} clients", rate, "/s", alone, rate / alone, 0.75, False),
        Row("  99th percentile of one lookup", last * 1e3, "ms", CLIENTS * 2.0, last / (CLIENTS * 2e-3), 1.0, True),
    ]
    cache.close()
    server.stop()
    return report([*rows, *upgrade_rows(options.upgrades)], options.json)


def join(server: ServerProcess) -> RemoteCache:
    return RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="benchmark", timeout_s=10)


def new_prompt() -> list[bytes]:
    return [KEY_HEAD + os.urandom(32) for _ in range(CHUNKS)]


def keys_of(prompt: list[bytes]) -> list[ChunkKey]:
    return list(map(ChunkKey, prompt))


def time_to_ready_s() -> float:
    start = time.perf_counter()
    server = launch(CONFIG)
    ready_s = time.perf_counter() - start
    server.stop()
    return ready_s


def rss_bytes(pid: int) -> int:
    """Beside the pool, whose pages a server populates before they are needed."""
    with open(f"/proc/{pid}/status") as status:
        kib = {
            name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in status) if "Rss" in name
        }
    return (kib["RssAnon"] + kib["RssFile"]) * 1024


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def timed_lookup(cache: CacheService, prompt: list[bytes]) -> float:
    keys = keys_of(prompt)
    start = time.perf_counter()
    plan = cache.lookup(keys, "r")
    spent = time.perf_counter() - start
    assert plan.chunks == CHUNKS
    return spent


def lookups_in_turn(
    cache: RemoteCache, local: LocalCache, prompts: list[list[bytes]]
) -> tuple[list[float], list[float], list[float]]:
    looked_up, in_process, pings = [], [], []
    for number in range(ROUNDS):
        prompt = prompts[number * 19 % len(prompts)]
        looked_up.append(timed_lookup(cache, prompt))
        in_process.append(timed_lookup(local, prompt))
        pings.append(timed(lambda: cache.renew("nobody")))
    return looked_up, in_process, pings


def loads(cache: RemoteCache, prompts: list[list[bytes]]) -> tuple[float, float]:
    """How long a load takes, without its release, and how many questions cross the socket for one."""
    connection = cache._link.connection
    assert connection is not None
    asked, send = 0, connection.send

    def count(request: wire.Request) -> None:
        nonlocal asked
        asked += 1
        send(request)

    samples = []
    for number in range(ROUNDS):
        keys = keys_of(prompts[number * 19 % len(prompts)])
        connection.send = count  # type: ignore[method-assign]
        start = time.perf_counter()
        lease = cache.load(keys, "l")
        samples.append(time.perf_counter() - start)
        connection.send = send  # type: ignore[method-assign]
        assert isinstance(lease, ReadLease)
        cache.release(lease)
    return statistics.median(samples), asked / ROUNDS


def store_s(cache: RemoteCache) -> float:
    samples = []
    for _ in range(101):
        keys = keys_of(new_prompt())
        samples.append(timed(lambda keys=keys: cache.commit(cache.begin_store(keys, "w"))))
    return statistics.median(samples)


def crowd(server: ServerProcess, prompts: list[list[bytes]]) -> tuple[float, float]:
    """Lookups a second of all clients together, and the 99th percentile of how long one took."""
    readers = []
    for number in range(CLIENTS):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.close(reader)
                with os.fdopen(writer, "w") as pipe:
                    pipe.write(" ".join(map(str, one_of_many(server, prompts[-20 + number]))))
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
    samples: list[float] = []
    for reader in readers:
        with os.fdopen(reader) as pipe:
            samples += map(float, pipe.read().split())
        os.wait()
    return len(samples) / SECONDS, percentile(samples, 99)


def one_of_many(server: ServerProcess, prompt: list[bytes]) -> list[float]:
    cache, samples = join(server), []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        keys = keys_of(prompt)
        samples.append(timed(lambda keys=keys: cache.lookup(keys, "r")))
    return samples


def upgrade_rows(upgrades: int) -> list[Row]:
    if upgrades < 2:
        return []
    with tempfile.TemporaryDirectory(prefix="kv-upgrades-") as path:
        home = Path(path)
        servers = UpgradedServers(home, settings_for(home, UPGRADED_CHUNKS, disk=True, disk_chunks=UPGRADED_CHUNKS))
        keeper = join_server(home)
        for _ in range(UPGRADED_CHUNKS // CHUNKS):
            keeper.commit(keeper.begin_store(keys_of(new_prompt()), "w"))
        loads = Loads(home / "s")
        for _ in range(upgrades):
            servers.upgrade()
        loads.stop()
        assert not loads.failures, loads.failures
        keeper.close()
        servers.close()
        pauses_ms = servers.pauses_ms()
    p99 = percentile(pauses_ms, 99)
    what = f"pause of {upgrades} upgrades under load, {UPGRADED_CHUNKS} chunks"
    return [
        Row(what, statistics.median(pauses_ms), "ms", 50.0, statistics.median(pauses_ms) / 50, None, True),
        Row("  99th percentile", p99, "ms", 50.0, p99 / 50, 1.0, True),
        Row("  longest", max(pauses_ms), "ms", 50.0, max(pauses_ms) / 50, None, True),
    ]


def percentile(samples: list[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1]


if __name__ == "__main__":
    sys.exit(main())
