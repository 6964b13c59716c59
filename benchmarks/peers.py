"""What it costs to read from another host's server: chunks over TCP and TLS, lookups, and what its engines notice.

The server is a process of its own, reached over loopback. The reader is a lane as a cache has it: two threads, loads of
eight chunks, and the check of header and bytes, so a checksum is taken on either side. Bare sockets move the same bytes
between two processes in the same run, in turn, from memory into the same pages: without checksums; and with one on
either side, taken piece by piece while the bytes are in the cache, which is what a socket with checksums can move at
most, as both take it from the cores that the kernel copies with. And NIXL over TCP where it is installed
(scripts/setup.sh nixl, beside vLLM), which takes none, and our chunks by NIXL against it, over TCP and within a host.
On two cores both sides share them with all checksums; over a line (`--line`) there is time for these. A lane with one
thread has one connection, as the bare sockets have.

    python benchmarks/peers.py [--json] [--line 1gbit]

--line: on a loopback of that rate, in a network namespace of its own; as `tc` has it.
"""

import sys

# This folder holds a copy.py, which must not stand in for the standard library's.
sys.path[0] = __file__.rsplit("/benchmarks/", 1)[0]

import itertools
import multiprocessing
import os
import shlex
import socket
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import xxhash
from kv_core import ChunkKey
from kv_core.outcome import Loaded, Stored
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch, wire
from kv_server.connection import ask_server
from kv_server.peers.tier import make_peers_tier
from kv_server.peers.wire import PeerStream
from kv_testing.certificates import Authority
from kv_tiers import chunk_header
from kv_tiers.build import build_lane
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.tier import Read, TierContext, Write

from benchmarks._nixl import NixlReader, is_installed
from benchmarks._report import Row, median_s, paired_medians_s, parser, report

CHUNK_BYTES = 4 << 20
BATCH = 8
BATCHES = 4
CHUNKS = BATCH * BATCHES
CONTEXT = TierContext(CHUNK_BYTES, CHUNK_BYTES, "benchmark")
KEYS = key_chain(CHUNKS)
LOOKED_UP = 512
PIECE_BYTES = 1 << 20
"""Of the bare sockets with checksums, as of the protocol."""

_SENDER = """
import mmap, os, socket, ssl, sys, xxhash
chunks, nbytes, piece_bytes, certificate, key = *map(int, sys.argv[1:4]), *sys.argv[4:]
pool = memoryview(mmap.mmap(-1, chunks * nbytes))  # shared memory, as a server's pool is
pool[:] = os.urandom(4096) * (chunks * nbytes // 4096)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    sock = context.wrap_socket(sock, server_side=True)
while asked := sock.recv(1):
    for number in range(chunks):
        data = pool[number * nbytes : (number + 1) * nbytes]
        if asked == b"x":
            sock.sendall(data)
            continue
        running = xxhash.xxh3_128()
        for at in range(0, nbytes, piece_bytes):
            running.update(data[at : at + piece_bytes])
            sock.sendall(data[at : at + piece_bytes])
"""


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--line", metavar="RATE", help="on a loopback of this rate, such as 1gbit")
    arguments.add_argument("--repeats", type=int, default=15, help="of each load; with --line 3")
    options = arguments.parse_args()
    if options.line:
        _begin_again(options.line, ["--repeats", "3", *(["--json"] if options.json else [])])
    with ExitStack() as ending:
        home = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="kv-")))
        rows = _rows(ending, home / "plain", None, options.repeats)
        rows += _rows(ending, home / "tls", Authority(home / "authority"), options.repeats)
        if is_installed():
            rows += [_by_nixl(home / transports, transports, options.repeats) for transports in ("tcp", "all")]
    return report(rows, options.json)


def _begin_again(rate: str, arguments: list[str]) -> None:
    """Become this program where the loopback is as slow as this line."""
    line = f"ip link set lo up && tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst 256kb latency 50ms"
    again = shlex.join([sys.executable, __file__, *arguments])
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", f"{line} && exec {again}"])


def _rows(ending: ExitStack, home: Path, authority: Authority | None, repeats: int) -> list[Row]:
    home.mkdir(mode=0o700)
    files = {} if authority is None else authority.issue("localhost")
    disk = {"type": "disk", "directory": str(home / "disk"), "capacity_bytes": 6 * CHUNKS * CHUNK_BYTES}
    config = {
        "host": {"capacity_bytes": 2 * CHUNKS * CHUNK_BYTES},
        "tiers": [disk],
        "peers": {"listen": "127.0.0.1:0", "take_stores": True, "unprotected": not files, **files},
    }
    server = launch(config, socket=home / "s")
    ending.callback(server.stop)
    cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="benchmark", timeout_s=10)
    ending.callback(cache.close)
    host = f"localhost:{server.peers.rpartition(':')[2]}"
    _store(cache, KEYS)
    lane = _lane(host, files)
    ending.callback(lane.close)
    pool = HostPool.anonymous("benchmark", CHUNK_BYTES, CHUNKS)
    reads = _reads(pool)
    bare = _bare(ending, files)
    name = "TLS" if authority else "TCP"
    (ours_s, bare_s), (again_s, checked_s) = _beside_bare(lane, reads, bare, repeats)
    rows = [
        _rate(f"chunks of 4 MiB from a peer's pool over {name}, against a bare socket", ours_s, bare_s),
        _rate("  the same, against a bare socket with checksums", again_s, checked_s),
    ]
    if authority is None:
        alone = _lane(host, files, threads=1)
        ending.callback(alone.close)
        (one_s, beside_s), (one_again_s, beside_checked_s) = _beside_bare(alone, reads, bare, repeats)
        rows += [
            _rate("  by a lane of one thread, against a bare socket", one_s, beside_s),
            _rate("  by a lane of one thread, against a bare socket with checksums", one_again_s, beside_checked_s),
        ]
        checksums_s, nothing_s = paired_medians_s(
            lambda: _receive(bare, reads, with_checksums=True),
            lambda: _receive(bare, reads, with_checksums=False),
            repeats,
        )
        # What no protocol with checksums can exceed on these cores: there is no target to miss.
        rows.append(_rate("  a bare socket with checksums, against one without", checksums_s, nothing_s, target=0.0))
        if is_installed():
            rows.append(_beside_nixl(lane, reads, repeats))
        rows += [_round_trips(lane), *_engines_wait(cache, host), _from_disk(cache, lane, reads, ours_s)]
    return [*rows, _storing(host, files, bare, reads, repeats)]


def _beside_bare(lane: Lane, reads: Sequence[Read], bare: socket.socket, repeats: int) -> list[tuple[float, float]]:
    """Medians of our loads and of a bare socket's, in turn: of one without checksums, then of one with them."""
    return [
        paired_medians_s(
            lambda: _load(lane, reads),
            lambda: _receive(bare, reads, with_checksums=with_checksums),  # noqa: B023  # it is called at once
            repeats,
        )
        for with_checksums in (False, True)
    ]


def _storing(host: str, files: dict[str, str], bare: socket.socket, reads: Sequence[Read], repeats: int) -> Row:
    """Chunks that an engine keeps in a server of another host, where they push others out. The bare socket carries them
    the other way."""
    options = {"hosts": [host], "stores": True, "unprotected": not files, **files}
    tier = make_peers_tier(options, CONTEXT)
    turns = itertools.count()
    pages = [read.pages for read in _reads(HostPool.anonymous("stored", CHUNK_BYTES, CHUNKS))]
    for page in pages:
        page[:] = os.urandom(4096) * (CHUNK_BYTES // 4096)
    checksums = [chunk_header.checksums_of(page, CHUNK_BYTES)[0] for page in pages]
    format_id = chunk_header.format_id(CONTEXT.fingerprint)

    def store() -> None:
        keys = key_chain(CHUNKS, branch=f"stored {next(turns)}")  # what is there already would not be sent
        writes = [
            Write(key, None, chunk_header.pack_header(key, None, page, format_id, checksum), page, CHUNK_BYTES)
            for key, page, checksum in zip(keys, pages, checksums, strict=True)
        ]
        outcomes = tier.store(writes)
        assert outcomes == [Stored()] * CHUNKS, outcomes

    name = "TLS" if files else "TCP"
    ours_s, bare_s = paired_medians_s(store, lambda: _receive(bare, reads, with_checksums=True), repeats)
    tier.close()
    return _rate(
        f"stored at a peer over {name} by one thread, against a bare socket with checksums", ours_s, bare_s, 0.6
    )


def _beside_nixl(lane: Lane, reads: Sequence[Read], repeats: int) -> Row:
    with ExitStack() as ending:
        nixl = NixlReader(ending, CHUNKS, CHUNK_BYTES)
        ours_s, nixl_s = paired_medians_s(lambda: _load(lane, reads), nixl.read, repeats)
        nixl.close()
    return _rate("  the same, against NIXL over TCP", ours_s, nixl_s)


def _by_nixl(home: Path, transports: str, repeats: int) -> Row:
    """Our chunks by NIXL against NIXL alone, by the same transports of UCX."""
    home.mkdir(mode=0o700)
    with ExitStack() as ending, mock.patch.dict(os.environ, UCX_TLS=transports):
        peers = {"listen": "127.0.0.1:0", "unprotected": True, "nixl": True}
        server = launch({"host": {"capacity_bytes": 2 * CHUNKS * CHUNK_BYTES}, "peers": peers}, socket=home / "s")
        ending.callback(server.stop)
        cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="benchmark", timeout_s=10)
        ending.callback(cache.close)
        _store(cache, KEYS)
        lane = _lane(server.peers, {}, nixl=True)
        ending.callback(lane.close)
        reads, staged = _reads(HostPool.anonymous("nixl", CHUNK_BYTES, CHUNKS)), 0
        while staged < CHUNKS:  # until the processes are ready chunks come by TCP
            before = _staged(server.socket)
            _load(lane, reads)
            staged = _staged(server.socket) - before
            time.sleep(0.2)
        nixl = NixlReader(ending, CHUNKS, CHUNK_BYTES, transports)
        before = _staged(server.socket)
        ours_s, nixl_s = paired_medians_s(lambda: _load(lane, reads), nixl.read, repeats)
        assert _staged(server.socket) >= before + repeats * CHUNKS
        nixl.close()
    way = {"tcp": "over TCP", "all": "within a host"}[transports]
    return _rate(f"chunks of 4 MiB by NIXL {way}, against NIXL alone", ours_s, nixl_s)


def _staged(server: Path) -> int:
    answer = ask_server(server, wire.Status())
    assert isinstance(answer, wire.Stated)
    assert answer.report.peers is not None
    return answer.report.peers.staged


def _lane(host: str, files: dict[str, str], threads: int = 2, **more: object) -> Lane:
    options = {"type": "peers", "hosts": [host], "threads": threads, "unprotected": not files, **files, **more}
    lane, _ = build_lane(options, CONTEXT, where="benchmark")
    return lane


def _load(lane: Lane, reads: Sequence[Read]) -> None:
    """All of them, in batches, as a long prompt's chunks are brought up."""
    arrivals: list[Arrival] = []
    ended = threading.Semaphore(0)

    def done(some: list[Arrival]) -> None:
        arrivals.extend(some)
        ended.release()

    for at in range(0, CHUNKS, BATCH):
        assert lane.load(reads[at : at + BATCH], done)
    for _ in range(BATCHES):
        ended.acquire()
    assert all(arrival.outcome == Loaded(CHUNK_BYTES) for arrival in arrivals), arrivals[0]


def _rate(name: str, ours_s: float, limit_s: float, target: float = 0.9) -> Row:
    nbytes = CHUNKS * CHUNK_BYTES
    return Row(name, nbytes / ours_s / 1e9, "GB/s", nbytes / limit_s / 1e9, limit_s / ours_s, target, False)


def _store(cache: RemoteCache, keys: Sequence[ChunkKey]) -> None:
    lease = cache.begin_store(keys, "w")
    for extent in lease.extents:
        cache.pool.view[extent.offset : extent.offset + extent.nbytes] = os.urandom(4096) * (extent.nbytes // 4096)
    cache.commit(lease)


def _bare(ending: ExitStack, files: dict[str, str]) -> socket.socket:
    """A connection to a process that sends a batch for each byte it gets."""
    certificate = [files.get(f"tls_{name}_file", "") for name in ("cert", "key")]
    command = [sys.executable, "-c", _SENDER, str(CHUNKS), str(CHUNK_BYTES), str(PIECE_BYTES), *certificate]
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ending.callback(sender.communicate)
    assert sender.stdout is not None
    sock = socket.create_connection(("127.0.0.1", int(sender.stdout.readline())))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if files:
        sock = ssl.create_default_context(cafile=files["tls_ca_file"]).wrap_socket(sock, server_hostname="localhost")
    ending.callback(sock.close)
    return sock


def _receive(sock: socket.socket, reads: Sequence[Read], *, with_checksums: bool) -> None:
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    sock.sendall(b"c" if with_checksums else b"x")
    piece_bytes = PIECE_BYTES if with_checksums else CHUNK_BYTES
    for read in reads:
        running = xxhash.xxh3_128()
        for at in range(0, CHUNK_BYTES, piece_bytes):
            piece, received = read.pages[at : at + piece_bytes], 0
            while received < piece_bytes:
                received += sock.recv_into(piece[received:], 0, flags)
            if with_checksums:
                running.update(piece)
        running.digest()


def _round_trips(lane: Lane) -> Row:
    """What a lookup of many chunks sends to a peer."""
    keys = key_chain(LOOKED_UP, branch="nobody's")
    with mock.patch.object(PeerStream, "send_message", autospec=True, side_effect=PeerStream.send_message) as sent:
        assert lane.tier.holds(keys) == [False] * LOOKED_UP
    return Row(f"round trips for {LOOKED_UP} chunks", sent.call_count, "", 1.0, sent.call_count, 1.0, True)


def _engines_wait(cache: RemoteCache, host: str) -> list[Row]:
    """Lookups of an engine beside a peer, another process, that reads as fast as it can."""
    alone = [_lookup_s(cache) for _ in range(501)]
    reader = multiprocessing.get_context("fork").Process(target=_read_on, args=(host,), daemon=True)
    reader.start()
    time.sleep(0.5)
    beside = [_lookup_s(cache) for _ in range(501)]
    reader.kill()
    reader.join()
    alone_s, beside_s = statistics.median(alone), statistics.median(beside)
    last_s = statistics.quantiles(beside, n=100)[98]
    return [
        Row(
            "an engine's lookup while a peer reads", beside_s * 1e3, "ms", alone_s * 1e3, beside_s / alone_s, 5.0, True
        ),
        Row("  99th percentile", last_s * 1e3, "ms", 10.0, last_s / 10e-3, 1.0, True),
    ]


def _read_on(host: str) -> None:
    lane, reads = _lane(host, {}), _reads(HostPool.anonymous("reader", CHUNK_BYTES, CHUNKS))
    while True:
        _load(lane, reads)


def _reads(pool: HostPool) -> list[Read]:
    return [
        Read(key, bytearray(chunk_header.HEADER_BYTES), pool.pages(slot), CHUNK_BYTES, CHUNK_BYTES)
        for slot, key in enumerate(KEYS)
    ]


def _lookup_s(cache: RemoteCache) -> float:
    start = time.perf_counter()
    assert cache.lookup(KEYS, "r").chunks == CHUNKS
    return time.perf_counter() - start


def _from_disk(cache: RemoteCache, lane: Lane, reads: Sequence[Read], pooled_s: float) -> Row:
    """Chunks that have left the peer's pool."""
    cache.end("r")
    for number in range(3):  # more than the pool has room for
        _store(cache, key_chain(CHUNKS, branch=str(number)))
        time.sleep(0.5)
    assert not cache.lookup(KEYS[:1], "r").chunks
    disk_s = median_s(lambda: _load(lane, reads), repeats=3)
    # What the disk alone gives is a row of benchmarks/tiers.py.
    return _rate("  from its disk, against its pool", disk_s, pooled_s, target=0.2)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # NIXL 1.5 crashes where a process ends that had an agent
