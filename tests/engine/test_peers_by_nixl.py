"""Peers' bytes by real NIXL: whole, or a miss within the deadline, whatever becomes of either side."""

import importlib.util
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from engines import PROMPTS, Answer, started
from kv_core.errors import TierDown
from kv_core.outcome import Absent, Loaded, LoadOutcome
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_remote.messages import HEADER, pack_keys
from kv_remote.nixl import NixlProcess
from kv_remote.staging import BUFFER_BYTES
from kv_server import launch
from kv_server.connection import ask_server
from kv_server.peers import wire
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.process import ServerProcess, environment, module_command
from kv_server.wire import Stated, Status
from kv_testing.cache_servers import held, join_at, store
from kv_testing.forked import in_new_interpreters
from kv_testing.peers import PATIENT, FakePeer, is_whole, own_nobody, reads_of
from kv_testing.two_hosts import ADDRESSES, TwoHosts, available
from kv_testing.wait import until
from kv_tiers.build import build_lane
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier import TierContext

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is missing: scripts/setup.sh nixl"),
]

CHUNK_BYTES = (5 << 20) + 512  # two transfers, and not whole pages
CONTEXT = TierContext(CHUNK_BYTES, slot_bytes_for(CHUNK_BYTES), "f")
KEYS = key_chain(8)
assert CHUNK_BYTES * len(KEYS) > BUFFER_BYTES > CHUNK_BYTES * 6
TIMEOUT_S = 1.0
LONGEST_S = 2 * (TIMEOUT_S + 6)
"""Of a read from a host that is gone: the wait for an answer, and that for a transfer."""


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def _by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    own_nobody(monkeypatch)
    monkeypatch.setenv("UCX_TLS", "tcp")


def holder(ending: ExitStack, home: Path, *, nixl: bool = True) -> ServerProcess:
    """A server that has `KEYS`, and room for no more."""
    peers = {"listen": "127.0.0.1:0", "unprotected": True, "nixl": nixl}
    host = {"capacity_bytes": len(KEYS) * CONTEXT.slot_bytes}
    with in_new_interpreters():  # its only child is NIXL's
        server = launch({"host": host, "peers": peers}, socket=home / "s")
    ending.callback(server.stop)
    fill(server, KEYS)
    return server


def fill(server: ServerProcess, keys: Sequence[bytes]) -> None:
    """All of its pool, which it cannot if anything is leased."""
    cache = join_at(server.socket, group_bytes=(CHUNK_BYTES,), timeout_s=30.0)
    try:
        assert len(store(cache, keys).keys) == len(KEYS)  # type: ignore[arg-type]
    finally:
        cache.close()


def tier_at(ending: ExitStack, host: str, timeout_s: float = 10.0) -> PeersTier:
    tier = make_peers_tier({"hosts": [host], **PATIENT, "timeout_s": timeout_s, "nixl": True}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    return tier


def staged_by(server: ServerProcess) -> int:
    stated = ask_server(server.socket, Status(), timeout_s=30)
    assert isinstance(stated, Stated)
    assert stated.report.peers is not None
    return stated.report.peers.staged


def load(tier: PeersTier, keys: Sequence[bytes] = KEYS) -> list[LoadOutcome]:
    """What it says, once everything that it says it has loaded has been compared."""
    reads = reads_of(CONTEXT, keys)  # type: ignore[arg-type]
    outcomes = tier.load(reads)
    assert all(
        is_whole(CONTEXT, read) for read, outcome in zip(reads, outcomes, strict=True) if isinstance(outcome, Loaded)
    )
    return outcomes


def warm(tier: PeersTier, server: ServerProcess) -> None:
    """Have the processes of both sides ready: until then chunks come by TCP."""

    def is_staged() -> bool:
        with suppress(TierDown):  # of a busy machine
            load(tier, KEYS[:1])
        assert tier._staged is not None
        tier._staged._use_at_s.clear()  # it would be tried again in five seconds
        return staged_by(server) > 0

    until(is_staged, within_s=60)


def all_loaded(outcomes: Sequence[LoadOutcome]) -> bool:
    return all(isinstance(outcome, Loaded) for outcome in outcomes)


def loads_all(tier: PeersTier) -> bool:
    """Whether it does, or its peer is still backing off."""
    with suppress(TierDown):
        return all_loaded(load(tier))
    return False


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def before_answer(act: Callable[[], None]) -> AbstractContextManager[object]:
    """Act before a buffer is waited for."""
    answer = wire.PeerStream.answer

    def later(stream: wire.PeerStream, wanted: type, deadline: float, **options: int) -> object:
        if wanted is wire.Staging:
            act()
        return answer(stream, wanted, deadline, **options)  # type: ignore[type-var]

    return mock.patch.object(wire.PeerStream, "answer", later)


def before_read(number: int, act: Callable[[], None]) -> AbstractContextManager[object]:
    """Act before the transfer of this number, counted from 1."""
    reads = 0
    read = NixlProcess.read

    def counted(process: NixlProcess, metadata: bytes, address: int, nbytes: int, timeout_s: float) -> None:
        nonlocal reads
        reads += 1
        if reads == number:
            act()
        read(process, metadata, address, nbytes, timeout_s)

    return mock.patch.object(NixlProcess, "read", counted)


@pytest.mark.parametrize("transports", ["tcp", "all"])  # the second copies out of the other process
def test_chunks_come_whole(ending: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transports: str) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers)
    warm(tier, server)
    before = staged_by(server)
    wanted = [*KEYS[:4], *key_chain(2, branch="nobody's"), *KEYS[4:]]
    outcomes = load(tier, wanted)
    assert [isinstance(outcome, Loaded) for outcome in outcomes] == [key in KEYS for key in wanted]
    assert staged_by(server) == before + len(KEYS)
    # Nothing is leased, no buffer is kept, and neither side uses the processor while nothing moves.
    fill(server, key_chain(len(KEYS), branch="others"))
    processes = [*children(server.pid), *(process._process.pid for process in tier._staged._idle)]  # type: ignore[union-attr]
    assert len(processes) >= 2
    began = [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in processes]
    time.sleep(1)
    assert [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in processes] == began


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("moment", ["before the answer", "before the transfer", "within the chunk"])
def test_an_owner_that_is_gone_is_a_miss_in_time(
    ending: ExitStack, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers, TIMEOUT_S)
    warm(tier, server)
    pids = [*children(server.pid), server.pid]

    def stop() -> None:
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGKILL:
            time.sleep(0.1)

    if moment == "before the answer":
        acting = before_answer(stop)
    else:
        acting = before_read({"before the transfer": 1, "within the chunk": 2}[moment], stop)
    began_s = time.monotonic()
    with acting:
        outcomes = load(tier, KEYS[:2])
    took_s = time.monotonic() - began_s
    assert outcomes == [Absent(), Absent()]
    assert took_s < LONGEST_S
    assert not tier._hosts.peers()[0]._idle
    assert tier._staged is not None
    # One with a late transfer is gone. The answer may have been on its way before the owner was.
    assert tier._staged._processes <= (moment == "before the answer")
    if number == signal.SIGSTOP:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        until(lambda: loads_all(tier), within_s=60)  # what was sent meanwhile belongs to connections that are closed
        fill(server, key_chain(len(KEYS), branch="others"))


def test_without_its_process_an_owner_still_sends(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers)
    warm(tier, server)
    (process,) = children(server.pid)
    with before_read(3, lambda: os.kill(process, signal.SIGKILL)):
        outcomes = load(tier)
    assert isinstance(outcomes[0], Loaded)  # what had come before is used
    assert Absent() in outcomes
    until(lambda: loads_all(tier), within_s=30)  # after the back-off, by TCP


def test_a_reader_whose_process_dies_reads_on(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers)
    warm(tier, server)
    assert tier._staged is not None
    for process in tier._staged._idle:
        process._process.kill()
        process._process.wait()
    assert all_loaded(load(tier))


def test_a_readers_process_that_hangs_is_a_miss_in_time(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers, TIMEOUT_S)
    warm(tier, server)
    read = NixlProcess.read

    def hanging(process: NixlProcess, metadata: bytes, address: int, nbytes: int, timeout_s: float) -> None:
        os.kill(process._process.pid, signal.SIGSTOP)
        read(process, metadata, address, nbytes, timeout_s)

    began_s = time.monotonic()
    with mock.patch.object(NixlProcess, "read", hanging):
        assert load(tier, KEYS[:2]) == [Absent(), Absent()]
    assert time.monotonic() - began_s < LONGEST_S
    assert tier._staged is not None and tier._staged._processes == 0
    until(lambda: loads_all(tier), within_s=60)
    fill(server, key_chain(len(KEYS), branch="others"))


def test_readers_that_are_gone_take_nothing_with_them(ending: ExitStack, tmp_path: Path) -> None:
    """Stopped with all buffers, they leave TCP to others, and no chunk leased; killed, the buffers too."""
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers)
    warm(tier, server)
    warmed, gone = staged_by(server), []
    while not gone or gone[-1][1].metadata:
        assert len(gone) <= 8
        sock = socket.create_connection(("127.0.0.1", int(server.peers.rpartition(":")[2])))
        stream = wire.PeerStream(sock)
        ending.callback(stream.close)
        stream.introduce(b"", time.monotonic() + 10)
        stream.send_message(wire.Fetch(CONTEXT.namespace, pack_keys(KEYS[:1]), staged=True), time.monotonic() + 10)
        gone.append((stream, stream.answer(wire.Staging, time.monotonic() + 10)))
    staged = warmed + len(gone) - 1  # the last got none
    until(lambda: staged_by(server) == staged)
    assert all_loaded(load(tier)) and staged_by(server) == staged
    fill(server, key_chain(len(KEYS), branch="others"))
    fill(server, KEYS)
    for stream, _ in gone:
        stream.close()
    warm(tier, server)


@pytest.mark.skipif(not available(), reason="no network namespaces for us")
def test_chunks_come_from_one_network_namespace_to_another(ending: ExitStack, tmp_path: Path) -> None:
    hosts = TwoHosts()
    ending.callback(hosts.close)
    tier = {"type": "peers", "hosts": [f"{ADDRESSES[0]}:9500"], "nixl": True, **PATIENT}
    servers, caches = [], []
    for host, tiers in enumerate(([], [tier])):
        (home := tmp_path / str(host)).mkdir(mode=0o700)
        config = {"host": {"capacity_bytes": len(KEYS) * CONTEXT.slot_bytes}, "tiers": tiers}
        servers.append(hosts.serve(host, config, home / "s", nixl=True))
        ending.callback(servers[-1].stop)
        caches.append(join_at(servers[-1].socket, group_bytes=(CHUNK_BYTES,), timeout_s=30.0))
        ending.callback(caches[-1].close)
    turns = count()

    def comes_staged() -> bool:
        keys = key_chain(2, branch=str(next(turns)))
        before = staged_by(servers[0])
        store(caches[0], keys)
        assert held(caches[1], keys) == 2
        lease = caches[1].load(keys, "reader")
        assert isinstance(lease, ReadLease)
        view = caches[1].pool.view
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            assert view[extent.offset : extent.offset + extent.nbytes] == content(key, CHUNK_BYTES)
        assert caches[1].release(lease)
        return staged_by(servers[0]) > before

    until(comes_staged, within_s=60)


def test_a_byte_that_is_flipped_in_the_room_is_refused(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path)
    options = {"type": "peers", "hosts": [server.peers], **PATIENT, "timeout_s": 10.0, "nixl": True}
    lane, _ = build_lane(options, CONTEXT, where="test")
    ending.callback(lane.close)
    assert isinstance(lane.tier, PeersTier)
    warm(lane.tier, server)
    (process,) = children(server.pid)
    buffers = next(
        one for one in Path(f"/proc/{process}/fd").iterdir() if os.readlink(one).startswith("/memfd:kv-nixl")
    )

    def flip() -> None:
        with buffers.open("r+b") as memory:
            memory.seek(1000)
            byte = memory.read(1)[0]
            memory.seek(1000)
            memory.write(bytes([byte ^ 1]))

    arrivals: list[Arrival] = []
    with before_read(1, flip):
        assert lane.load(reads_of(CONTEXT, KEYS[:2]), arrivals.extend)
        until(lambda: len(arrivals) == 2, within_s=30)
    assert [type(arrival.outcome).__name__ for arrival in arrivals] == ["Damaged", "Loaded"]


def test_a_peer_without_nixl_sends_as_before(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path, nixl=False)
    tier = tier_at(ending, server.peers)
    for _ in range(10):
        assert all_loaded(load(tier))
        assert tier._staged is not None
        tier._staged._use_at_s.clear()
        time.sleep(0.2)
    assert staged_by(server) == 0


# Peers that lie.


def test_what_a_liar_says_is_checked_or_is_a_miss(ending: ExitStack) -> None:
    """Sizes, places and metadata of its own making. The process that reads may die of them, and we do not."""
    owner = NixlProcess(module_command("kv_remote.nixl"), environment(), 1 << 20)
    ending.callback(owner.close)
    until(owner.is_ready, within_s=60)
    owner.serve(True)
    drawn = random.Random(7)
    true, size = owner.metadata, wire.SIZE.pack(CHUNK_BYTES)
    header = bytes(384)
    fine = wire.Staging(true, owner.address)
    says: list[tuple[wire.Staging, bytes, bool]] = [
        # Before anything is read: sizes that have no room here, and what is no message.
        (fine, wire.SIZE.pack(CHUNK_BYTES + 1) + header, False),
        (fine, wire.SIZE.pack((1 << 64) - 3) + header, False),
        (fine, wire.SIZE.pack(wire.NOT_STAGED), False),
        # Beyond what is registered there, at addresses that nobody has, and by metadata of no agent.
        (fine, size + header, True),
        (wire.Staging(true, 8), size + header, True),
        (wire.Staging(true, (1 << 62) - 1), size + header, True),
        (wire.Staging(b"x", owner.address), size + header, True),
        (wire.Staging(drawn.randbytes(300), owner.address), size + header, True),
        (wire.Staging(true[: len(true) // 2], owner.address), size + header, True),
    ]
    for _ in range(4):
        at = drawn.randrange(len(true))
        flipped = true[:at] + bytes([true[at] ^ 1 << drawn.randrange(8)]) + true[at + 1 :]
        says.append((wire.Staging(flipped, owner.address), size + header, True))
    staging, after, _ = says[0]

    def answer(stream: wire.PeerStream, request: wire.Request) -> None:
        assert isinstance(request, wire.Fetch)
        if request.staged:
            stream.send_message(staging, time.monotonic() + 5)
            stream.send([after], time.monotonic() + 5)
        else:
            stream.send([wire.SIZE.pack(wire.NOT_HERE)] * len(wire.unpack_keys(request)), time.monotonic() + 5)

    liar = FakePeer(answer)
    ending.callback(liar.close)
    tier = tier_at(ending, liar.address, TIMEOUT_S)
    staged = tier._staged
    assert staged is not None
    for staging, after, is_read in says:  # noqa: B007  # `answer` sends it
        with mock.patch.object(NixlProcess, "read", autospec=True, side_effect=NixlProcess.read) as read:

            def is_tried() -> bool:
                with staged._lock:
                    staged._use_at_s.clear()
                    staged._start_at_s = 0.0
                tier._hosts.peers()[0]._retry_at_s = 0.0
                before = sum(isinstance(request, wire.Fetch) and request.staged for request in liar.asked)
                chunks = reads_of(CONTEXT, KEYS[:1])
                began_s = time.monotonic()
                assert not isinstance(tier.load(chunks)[0], Loaded) or not is_whole(CONTEXT, chunks[0])
                assert time.monotonic() - began_s < LONGEST_S
                return before < sum(isinstance(request, wire.Fetch) and request.staged for request in liar.asked)

            until(is_tried, within_s=60)
        assert bool(read.call_count) == is_read, staging


def test_what_is_no_answer_is_a_miss(ending: ExitStack, tmp_path: Path) -> None:
    server = holder(ending, tmp_path)
    tier = tier_at(ending, server.peers)
    warm(tier, server)
    drawn = random.Random(11)

    def answer(stream: wire.PeerStream, request: wire.Request) -> None:
        body = drawn.randbytes(drawn.randrange(60))
        header = HEADER.pack(len(body), wire.VERSION) if drawn.random() < 0.7 else b""
        message = wire.frame(wire.Staging(drawn.randbytes(20), drawn.randrange(1 << 62)))
        cut = message[: drawn.randrange(len(message))]
        stream.send([drawn.choice([header + body, cut + body])], time.monotonic() + 5)
        stream.close()

    liar = FakePeer(answer)
    ending.callback(liar.close)
    other = tier_at(ending, liar.address)
    other._staged = tier._staged  # whose process is ready
    for _ in range(200):
        other._hosts.peers()[0]._retry_at_s = 0.0
        assert not all_loaded(load(other, KEYS[:1]))
        assert tier._staged is not None
        tier._staged._use_at_s.clear()
    assert sum(isinstance(request, wire.Fetch) and request.staged for request in liar.asked) > 100
    other._staged = None
    assert all_loaded(load(tier))


def test_engines_of_two_hosts_give_the_same_tokens(
    tiny_llama: str, reference: list[Answer], ending: ExitStack, tmp_path: Path
) -> None:
    def serve(name: str, capacity_bytes: str, **tier: object) -> ServerProcess:
        (tmp_path / name).mkdir(mode=0o700)
        peers = {"listen": "127.0.0.1:0", "unprotected": True, "nixl": True}
        tiers = [{"type": "peers", "nixl": True, **PATIENT, **tier}] if tier else []
        config = {"host": {"capacity_bytes": capacity_bytes}, "tiers": tiers, "cold": {"wait_s": 20.0}, "peers": peers}
        server = launch(config, socket=tmp_path / name / "s")
        ending.callback(server.stop)
        return server

    there = serve("there", "64MiB")
    with started(tiny_llama, cache={"server": {"socket": str(there.socket)}}) as first:
        assert first.ask_in_turn(PROMPTS) == reference
    here = serve("here", "2MiB", hosts=[there.peers])  # so small that chunks are read again and again
    with started(tiny_llama, cache={"server": {"socket": str(here.socket)}}) as second:

        def is_staged() -> bool:
            assert second.ask_in_turn(PROMPTS) == reference
            return staged_by(there) >= 6

        until(is_staged, within_s=120)
        assert sum(second.hits) > 0
        second.assert_at_rest()
        second.inside("kv_corrupt")  # or the comparisons above could not fail
        assert second.ask([PROMPTS[2]]) != [reference[2]]
