"""Malformed and fuzzed messages, and versions that do not fit."""

import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.cost import Costs, Measured
from kv_core.errors import ConfigError
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch, wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess
from kv_testing.cache_servers import (
    SLOT_BYTES,
    ThreadedServer,
    answers_on,
    join_server,
    peak_rss_bytes,
    raw_connection,
    register,
    report_of,
)
from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up
from kv_testing.wait import joined, until


@pytest.fixture(scope="module")
def sturdy() -> Iterator[ServerProcess]:
    """A server that hostile clients share: in a process of its own, so that its memory can be seen."""
    server = launch({"host": {"capacity_bytes": 64 * SLOT_BYTES}, "server": {"max_sessions": 64}}, log_level="error")
    yield server
    server.stop()


REQUESTS: list[wire.Request] = [
    wire.Hello("t"),
    register(),
    wire.Unregister(),
    wire.Registered("e"),
    wire.Ping(),
    wire.Status(),
    wire.Lookup(wire.pack_keys(key_chain(2)), "h", 1, ("all",), 1, {"wait_for_promotion": True}),
    wire.Renew("h"),
    wire.Load(wire.pack_keys(key_chain(2)), "h", False),
    wire.BeginStore(wire.pack_keys(key_chain(2)), "h", {}),
    wire.Commit(1),
    wire.Release(1),
    wire.Forget(wire.pack_keys(key_chain(1))),
    wire.End("h"),
    wire.Clear(),
    wire.Counts(),
    wire.ChangesSince(0),
]


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Requests in any order, some bent out of shape; or just bytes."""
    sent = b""
    for request in draw(st.lists(st.sampled_from(REQUESTS), max_size=6)):
        data = bytearray(wire.frame(request))
        match draw(st.sampled_from(["whole", "whole", "flip", "cut", "length", "body"])):
            case "flip":
                data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
            case "length":
                data[:4] = draw(st.binary(min_size=4, max_size=4))
            case "body":
                body = draw(st.binary(max_size=40))
                data = bytearray(wire.HEADER.pack(len(body), wire.VERSION) + body)
        sent += bytes(data)
    return wire.frame(wire.Hello("t")) * draw(st.booleans()) + sent + draw(st.binary(max_size=20))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_what_is_no_duration_is_no_cost_and_no_measurement(served: ThreadedServer, seconds: float) -> None:
    """An estimate with it compares with nothing: each later one, of others too, would be a bug in the server."""
    keys = wire.pack_keys(key_chain(2))
    for request in (
        wire.Lookup(keys, "h", 1, ("all",), 1, {"costs": Costs(0, (seconds, 0.0), (0.0, 0.0))}),
        wire.Lookup(keys, "h", 1, ("all",), 1, {"costs": Costs(0, (0.1, 0.0), (0.0, seconds))}),
        wire.MeasuredSamples([Measured("load", 1.0, seconds)]),
    ):
        with served.raw(wire.Hello("t"), register(), request) as connection:
            connection.shutdown(socket.SHUT_WR)
            *_, answer = answers_on(connection)
            assert isinstance(answer, wire.Failed) and answer.kind == "malformed"
            assert "seconds" in answer.text


@pytest.mark.parametrize("tiers", [["disk"] * 65, ["d" * 257]])
def test_options_of_a_request_have_bounds(served: ThreadedServer, tiers: list[str]) -> None:
    keys = wire.pack_keys(key_chain(2))
    for request, text in (
        (wire.Lookup(keys, "h", 1, ("all",), 1, {"tiers": tiers}), "at most 64 tiers"),
        (wire.BeginStore(keys, "h", {"tiers": tiers}), "at most 64 tiers"),
        (wire.BeginStore(keys, "h", {"hold_s": 3601.0}), "held from 0 to 3600 seconds"),
        (wire.BeginStore(keys, "h", {"hold_s": float("nan")}), "held from 0 to 3600 seconds"),
    ):
        with served.raw(wire.Hello("t"), register(), request) as connection:
            connection.shutdown(socket.SHUT_WR)
            *_, answer = answers_on(connection)
            assert isinstance(answer, wire.Failed) and answer.kind == "malformed"
            assert text in answer.text


@settings(max_examples=400, deadline=None)
@given(hostile())
def test_hostile_bytes_neither_crash_nor_wedge_it(sturdy: ServerProcess, sent: bytes) -> None:
    with raw_connection(sturdy.socket) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        for answer in answers_on(connection):
            assert not isinstance(answer, wire.Failed) or answer.kind != "fault"
    assert ask_server(sturdy.socket, wire.Ping(), timeout_s=10) == wire.Done()


def test_fuzzed_messages_by_the_thousand() -> None:
    """By the million: `python test_server.py bend 1000000`, some two minutes; benchmarks/results has one run."""
    done = subprocess.run([sys.executable, __file__, "20000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    counted = json.loads(done.stdout)
    assert counted["refused"] > 2000
    assert counted["grown_bytes"] < 8 << 20


def fuzz_often(messages: int) -> dict[str, int]:
    """Bent and cut requests, many to a connection, until it is ended: nothing must be left of them."""
    rng = random.Random(messages)
    server = launch({"host": {"capacity_bytes": 64 * SLOT_BYTES}}, log_level="error")
    stays = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f", timeout_s=30)
    whole = [wire.frame(request) for request in REQUESTS]
    sent = refused = connections = grown_from = 0
    while sent < messages:
        with contextlib.suppress(BrokenPipeError), raw_connection(server.socket, whole[0], whole[1]) as connection:
            batch = b""
            for _ in range(6):
                data = bytearray(rng.choice(whole))
                for _ in range(rng.choice([0, 0, 1, 1, 2, 9])):
                    data[rng.randrange(5, max(6, len(data))) % len(data)] = rng.randrange(256)
                if rng.random() < 0.02:
                    del data[rng.randrange(len(data)) :]
                batch += bytes(data)
            sent += 6
            connections += 1
            connection.sendall(batch)
            connection.shutdown(socket.SHUT_WR)
            refused += any(isinstance(answer, wire.Failed) for answer in answers_on(connection))
        if connections == 100:
            grown_from = peak_rss_bytes(server.pid)
    until(lambda: len(report_of(server.socket).sessions) == 1)
    assert stays.counts().read_leases == 0
    assert_adds_up(stays.counts())
    grown = peak_rss_bytes(server.pid) - grown_from
    stays.close()
    server.stop()
    return {"sent": sent, "connections": connections, "refused": refused, "grown_bytes": grown}


def test_hostile_bytes_left_nothing_behind(sturdy: ServerProcess) -> None:
    until(lambda: not report_of(sturdy.socket).sessions)
    cache = RemoteCache(sturdy.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    until(lambda: cache.counts().write_leases == 0 or bool(report_of(sturdy.socket).orphans))
    assert cache.counts().read_leases == 0
    assert_adds_up(cache.counts())
    cache.close()


def test_lengths_that_are_lies_set_no_memory_aside(sturdy: ServerProcess) -> None:
    before = peak_rss_bytes(sturdy.pid)
    for nbytes in (wire.MAX_REQUEST_BYTES + 1, 2**32 - 1):
        with raw_connection(sturdy.socket, wire.HEADER.pack(nbytes, wire.VERSION)) as connection:
            (refused,) = answers_on(connection)
            assert isinstance(refused, wire.Failed)
            assert "at most" in refused.text
    for body in (
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa6lookup\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xc6\xff\xff\xff\xff",
    ):
        with raw_connection(sturdy.socket, wire.HEADER.pack(len(body), wire.VERSION) + body) as connection:
            (refused,) = answers_on(connection)
            assert isinstance(refused, wire.Failed)
            assert refused.kind == "malformed"
    head = wire.HEADER.pack(wire.MAX_REQUEST_BYTES, wire.VERSION)
    waiting = [raw_connection(sturdy.socket, head, b"x" * 1000) for _ in range(30)]
    assert ask_server(sturdy.socket, wire.Ping()) == wire.Done()
    for connection in waiting:
        connection.close()
    assert peak_rss_bytes(sturdy.pid) - before < 16 << 20


def test_another_version_is_refused_and_told_which(served: ThreadedServer) -> None:
    with served.raw(wire.HEADER.pack(1, wire.VERSION + 1) + b"x") as connection:
        (refused,) = answers_on(connection)
    assert isinstance(refused, wire.Failed)
    assert f"speaks version {wire.VERSION}" in refused.text and "the same release" in refused.text


def test_a_server_of_another_version_is_refused_with_words(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "s"))
        listener.listen()
        listener.settimeout(60)

        def answer() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(60)
            with accepted:
                accepted.sendall(wire.HEADER.pack(3, 99) + b"abc")
                while accepted.recv(999):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="the other 99"):
            join_server(home)
        joined(thread)


def test_the_first_message_is_a_hello_and_caches_are_registered_once(served: ThreadedServer) -> None:
    for sent, kind, text in (
        ([wire.Ping()], "malformed", "hello"),
        ([wire.Hello("t"), wire.Counts()], "misuse", "registered no cache"),
        ([wire.Hello("t"), register(), register()], "misuse", "already"),
    ):
        with served.raw(*sent) as connection:
            connection.shutdown(socket.SHUT_WR)
            said = answers_on(connection)
        assert isinstance(said[-1], wire.Failed)
        assert (said[-1].kind, text in said[-1].text) == (kind, True)


def test_a_bug_in_the_server_ends_one_session_only(served: ThreadedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = served.join()
    (behind,) = served.server.caches.values()
    with monkeypatch.context() as broken:
        broken.setattr(behind, "lookup", lambda *args, **options: 1 / 0)
        assert cache.lookup(key_chain(1), "r").ended is Ended.REFUSED
    until(lambda: cache.lookup(key_chain(1), "r").ended is Ended.ABSENT)
    cache.close()


if __name__ == "__main__":
    print(json.dumps(fuzz_often(int(sys.argv[1]))))
