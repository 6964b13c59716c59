"""What the directory of peers costs: memory, lookups, repairs, and a simulation of many servers.

    python benchmarks/directory.py [--json]
    python benchmarks/directory.py --simulate [--hosts 1000] [--chunks 100000000] [--changes 20] [--interval 1 5]

Without --simulate: the bytes of a repair of 100 differences in 10⁶ keys, of a host as a server has it, beside those of
all its names; a lookup of 512 keys; the memory of a mirror; and what a real Valkey serves.

--simulate is one server's mirror of all others, in full size, with the code that servers run. Each other server changes
--changes chunks a second, writes them every --interval seconds at a time of its own, and one entry in a thousand is
lost. Time is simulated, so the processor's time of a simulated second is what the reader needs of a core.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kv_core.testing import key_chain
from kv_remote.host_port import HostPort
from kv_remote.redis_servers import RedisAccess
from kv_server.directory.contents import Contents, KeySource
from kv_server.directory.directory import AT_ONCE, BEGINNING, Stream
from kv_server.directory.entries import (
    NAME_BYTES,
    SUMS_BYTES,
    VERSION,
    Entry,
    Names,
    decode,
    encode,
    names_of,
    no_sums,
    pack,
    root_of,
    shards_of,
    toggle,
    unpack,
)
from kv_server.directory.mirror import Host, Mirror
from kv_server.peers.wire import MAX_LISTED, List, Listed, Sum, Summed, frame
from kv_testing.servers import ValkeyServer
from kv_tiers.index.journal import Journal

from benchmarks._report import Row, median_s, parser, report

KEYS = 1_000_000
DIFFERENCES = 100
LOOKED_UP = 512
LEASE_S = 1e9
NAMESPACE = "0" * 32
LOST = 0.001


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--simulate", action="store_true")
    arguments.add_argument("--hosts", type=int, default=1000)
    arguments.add_argument("--chunks", type=int, default=10**8, help="of all hosts together")
    arguments.add_argument("--changes", type=int, default=20, help="of each host in a second")
    arguments.add_argument("--interval", type=float, nargs="+", default=[1.0, 5.0], help="seconds")
    arguments.add_argument("--seconds", type=int, default=20, help="that are simulated")
    given = arguments.parse_args()
    if given.simulate:
        simulate(given)
        return 0
    return report([*repairs(), *lookups(), *valkey()], given.json)


def new_mirror() -> Mirror:
    return Mirror(lease_s=LEASE_S, max_names=1 << 40, max_hosts=60_000)


# A repair of what a server holds.


def repairs() -> list[Row]:
    keys = key_chain(KEYS)
    held = set(keys)
    journal = Journal()
    contents = Contents(lambda some: [key in held for key in some], [KeySource(journal, lambda: keys)])
    contents.update("127.0.0.1:1")
    mirror = new_mirror()
    mirror.take(contents.update("127.0.0.1:1"), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    began = time.perf_counter()
    snapshot_bytes = repair(mirror, host, contents)
    snapshot_s = time.perf_counter() - began
    new = key_chain(DIFFERENCES // 2, branch="new")
    gone = keys[:: KEYS // (DIFFERENCES // 2)][: DIFFERENCES // 2]
    held.update(new)
    held.difference_update(gone)
    journal.note([*new, *gone])
    assert contents.update("127.0.0.1:1").added  # which nobody reads
    mirror.take(contents.update("127.0.0.1:1"), 1e6)
    (host,) = mirror.begin_repairs(1, 1e6)
    began = time.perf_counter()
    repair_bytes = repair(mirror, host, contents)
    repair_s = time.perf_counter() - began
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(list(held))))
    return [
        row(
            "bytes of a repair of 100 differences in 10⁶ keys, of a snapshot's", repair_bytes, "B", snapshot_bytes, 0.05
        ),
        row("the same, in time", repair_s, "s", snapshot_s, 0.5),
    ]


def repair(mirror: Mirror, host: Host, contents: Contents) -> int:
    """As a directory does it, with the messages that cross; their bytes."""
    sequence, sums = contents.sums()
    asked, said = frame(Sum(NAMESPACE)), frame(Summed(contents.id, sequence, sums, None))
    nbytes = len(asked) + len(said)
    left = mirror.differing(host, sequence, unpack(sums))
    while left:
        sequence, shards, names = contents.names_in(left, MAX_LISTED)
        nbytes += len(frame(List(NAMESPACE, left)))
        nbytes += len(frame(Listed(contents.id, sequence, shards, pack(names))))
        mirror.replace(host, sequence, left[:shards], names)
        left = left[shards:]
    mirror.end_repair(host, 0.0, cleared_s=None, nbytes=nbytes)
    return nbytes


# A lookup, and memory.


def lookups() -> list[Row]:
    rows = []
    for hosts, each in ((10, 10_000), (100, 10_000), (100, 100_000)):
        mirror = new_mirror()
        for number in range(hosts):
            peer = SimulatedHost(number, each)
            peer.join(mirror)
        names = half_held(peer)
        name = f"10^{round(np.log10(hosts * each))} chunks of {hosts} hosts"
        rows.append(row(f"memory a chunk and host, {name}", mirror.nbytes / (hosts * each), "B", 100.0, 1.0))
        seconds = median_s(lambda mirror=mirror, names=names: mirror.holders(names, 8), repeats=41)
        rows.append(row(f"a lookup of {LOOKED_UP} keys, {name}", seconds, "s", 1e-3, 1.0))
    return rows


def half_held(peer: "SimulatedHost") -> Names:
    """Of so many keys as a lookup has; the other half nobody holds."""
    return np.concatenate([peer.names[: LOOKED_UP // 2], names_of(key_chain(LOOKED_UP // 2))])


class SimulatedHost:
    """A server's names without its chunks."""

    def __init__(self, number: int, chunks: int) -> None:
        self.id = number.to_bytes(16, "big")
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:9500"
        self._random = np.random.default_rng(number)
        self.names = np.unique(self._random.integers(0, 1 << 64, chunks, np.uint64))
        self.sums = no_sums()
        toggle(self.sums, self.names)
        self.sequence = 1

    def change(self, count: int) -> Entry:
        """As many chunks come as go."""
        at = self._random.choice(len(self.names), count, replace=False)
        removed, added = self.names[at], np.unique(self._random.integers(0, 1 << 64, count, np.uint64))
        self.names[at] = added
        toggle(self.sums, removed)
        toggle(self.sums, added)
        self.sequence += 1
        return self.entry(added, removed)

    def entry(self, added: Names, removed: Names) -> Entry:
        return Entry(
            VERSION,
            self.id,
            self.address,
            self.sequence,
            len(self.names),
            root_of(self.sums),
            pack(added),
            pack(removed),
        )

    def join(self, mirror: Mirror) -> int:
        """Be heard, and fetched as a whole; the bytes of that."""
        none = np.zeros(0, np.uint64)
        mirror.take(self.entry(none, none), 0.0)
        (host,) = mirror.begin_repairs(1, 0.0)
        return self.repair(mirror, host, 0.0)

    def repair(self, mirror: Mirror, host: Host, now_s: float) -> int:
        left = mirror.differing(host, self.sequence, self.sums)
        names = self.names[np.isin(shards_of(self.names), left)]
        mirror.replace(host, self.sequence, left, names)
        nbytes = SUMS_BYTES + NAME_BYTES * len(names)
        mirror.end_repair(host, now_s, cleared_s=None, nbytes=nbytes)
        return nbytes


# Many servers.


def simulate(given: argparse.Namespace) -> None:
    mirror, began, joined_bytes, hosts = new_mirror(), time.process_time(), 0, []
    for number in range(given.hosts):
        hosts.append(SimulatedHost(number, given.chunks // given.hosts))
        joined_bytes += hosts[-1].join(mirror)
    built_s = time.process_time() - began
    pairs = mirror.counts().names
    print(f"{given.hosts} hosts, {pairs:,} (chunk, host) pairs known to one server")
    print(f"  memory       {mirror.nbytes / 2**20:,.0f} MiB, {mirror.nbytes / pairs:.1f} B a pair")
    print(
        f"  joining      {joined_bytes / 2**20:,.0f} MiB fetched; {built_s:.0f} s of a core, the simulation's part too"
    )
    names = half_held(hosts[-1])
    lookup_s = median_s(lambda: mirror.holders(names, 8), repeats=41)
    print(f"  a lookup     {lookup_s * 1e6:,.0f} µs for {LOOKED_UP} keys, half of them held; no message")
    for interval_s in given.interval:
        live(hosts, mirror, given, interval_s)


def live(hosts: Sequence[SimulatedHost], mirror: Mirror, given: argparse.Namespace, interval_s: float) -> None:
    """Everybody writes at a time of his own, and so does the reader: what changes waits for one, then for the other."""
    rng, before = np.random.default_rng(0), mirror.counts()
    turns, count = round(given.seconds / interval_s), max(1, round(given.changes * interval_s))
    phases = rng.uniform(0, interval_s, len(hosts))
    start_s = 1e6 * 10**interval_s  # long after what went before
    written = sorted(
        (start_s + phases[number] + turn * interval_s, number) for turn in range(turns) for number in range(len(hosts))
    )
    entry_bytes, lost, waits, reading_s, repair_bytes = 0, 0, [], 0.0, 0
    for turn in range(1, turns + 2):
        now_s = start_s + turn * interval_s
        arriving = []
        while written and written[0][0] <= now_s:
            wrote_s, number = written.pop(0)
            entry = encode(hosts[number].change(count))
            entry_bytes += len(entry)
            if rng.uniform() < LOST:
                lost += 1
                continue
            arriving.append(entry)
            waits += list(now_s - wrote_s + rng.uniform(0, interval_s, 10))
        began = time.process_time()
        for entry in arriving:
            mirror.take(decode(entry), now_s)
        reading_s += time.process_time() - began
        for known in mirror.begin_repairs(len(hosts), now_s):
            repair_bytes += hosts[int.from_bytes(known.id, "big")].repair(mirror, known, now_s)
    none = np.zeros(0, np.uint64)
    for host in hosts:  # who lost the last entry learns it from the next
        mirror.take(host.entry(none, none), 2 * start_s)
    for known in mirror.begin_repairs(len(hosts), 3 * start_s):
        repair_bytes += hosts[int.from_bytes(known.id, "big")].repair(mirror, known, 3 * start_s)
    entries = turns * len(hosts)
    counts = mirror.counts()
    differing = 0
    for host in hosts:
        known_host = mirror._by_address.get(HostPort(*split(host.address)))
        assert known_host is not None
        differing += not np.array_equal(known_host.sums, host.sums)
    each, rate = entry_bytes / entries, len(hosts) / interval_s
    repairs = counts.repairs - before.repairs
    print(f"every {interval_s:g} s an entry of {count} chunks in and {count} out, {each:.0f} B; {LOST:.1%} lost")
    print(f"  written      {rate:,.0f} entries a second by all, {rate * each / 1e6:.2f} MB/s")
    print(f"  read         {rate:,.0f} entries a second by each, {rate * each * len(hosts) / 1e9:.2f} GB/s by all")
    half, most = np.quantile(waits, (0.5, 0.99))
    print(f"  staleness    median {half:.2f} s, 99 % within {most:.2f} s, all within {max(waits):.2f} s")
    used_s, entry_s = reading_s / given.seconds, reading_s / entries
    print(f"  a core       {used_s:.2f} of each second at each reader, {entry_s * 1e6:.0f} µs an entry")
    print(f"  lost         {lost} entries, {counts.gaps - before.gaps} gaps, {repairs} repairs", end="")
    print(f" of {repair_bytes / max(1, repairs) / 2**10:.0f} KiB each; hosts not exact at the end: {differing}")


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


# What Valkey serves.


def valkey() -> list[Row]:
    server = ValkeyServer()
    try:
        stream = Stream(RedisAccess(url=server.url), "benchmark", "here")
        host = SimulatedHost(1, 10_000)
        entries = [encode(host.change(20)) for _ in range(4096)]
        began_s, used_s = time.perf_counter(), cpu_s(server.process.pid)
        for at in range(0, len(entries), 64):
            assert stream.append(entries[at : at + 64]) == ""
        write_s = (cpu_s(server.process.pid) - used_s) / len(entries)
        assert time.perf_counter() > began_s
        used_s, read = cpu_s(server.process.pid), 0
        for _ in range(100):
            position = BEGINNING
            while some := stream.read(position):
                position, read = some[-1][0], read + len(some)
                if len(some) < AT_ONCE:
                    break
        read_s = (cpu_s(server.process.pid) - used_s) / read
        stream.close()
    finally:
        server.remove()
    return [
        row("Valkey's processor for an entry of 20 changes written", write_s, "s", 1e-4, 1.0),
        row("and read", read_s, "s", 1e-5, 1.0),
    ]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(name: str, value: float, unit: str, limit: float, target: float) -> Row:
    return Row(name, value, unit, limit, value / limit, target, True)


if __name__ == "__main__":
    raise SystemExit(main())
