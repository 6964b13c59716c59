"""The Redis tier against servers that are not healthy, and its options."""

import contextlib
import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import kv_remote
import pytest
import redis
from kv_core.clock import HandClock
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Damaged, Loaded, Refused, Stored, StoreOutcome, Unstorable
from kv_core.testing import key_chain
from kv_remote.redis import RedisTier, make_redis_tier
from kv_remote.redis_servers import RedisConfig
from kv_testing.redis_servers import VALKEY, AskedServer, end_all, running
from kv_testing.servers import Proxy, free_port
from kv_testing.wait import joined, until
from kv_tiers import chunk_header
from kv_tiers.build import tier_factory
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.testing.tier_contract import TierContract, aligned_pages
from kv_tiers.tier import Read, RemovalRefusedError, TierContext
from kv_tiers.tier_state import Health


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    end_all()


class Liar:
    """A server that answers every connection with the same bytes, whatever it is asked."""

    def __init__(self, answer: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.answer = answer
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(2)
                client.recv(1 << 16)
                self.say(client)
                while client.recv(1 << 16):
                    pass

    def say(self, client: socket.socket) -> None:
        client.sendall(self.answer)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        joined(self.thread)


class Dribbler(Liar):
    """One that says it byte by byte."""

    def say(self, client: socket.socket) -> None:
        for byte in self.answer:
            client.sendall(bytes([byte]))
            time.sleep(0.1)  # the client's time-out, which this is to outlast in pieces, is of the real clock


class TestTroubles:
    """What the world does to servers, and what must not come of it: wrong bytes, hanging, growing without bound."""

    bench = TierContract()  # for its writes and checked loads
    nbytes = 300_000
    numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _close(self) -> Iterator[None]:
        self.closing: list[Any] = []
        yield
        for thing in reversed(self.closing):
            thing.close()

    def tier(self, url: str, **options: object) -> RedisTier:
        self.bench.context = TierContext(self.nbytes, 303_104, "troubles")
        options = {
            "url": url,
            "prefix": f"trouble{next(self.numbers)}",
            "piece_bytes": 65536,
            "timeout_s": 0.5,
        } | options
        tier = make_redis_tier(options, self.bench.context)
        assert isinstance(tier, RedisTier)
        self.bench.tier = tier
        self.closing.append(tier)
        return tier

    def behind(self, server: AskedServer) -> Proxy:
        proxy = Proxy(server.port)
        self.closing.append(proxy)
        return proxy

    @pytest.mark.parametrize("host", ["x" * 300, "a..b"])
    def test_a_cluster_that_names_what_is_no_host_is_down(self, host: str) -> None:
        node = f"*2\r\n${len(host)}\r\n{host}\r\n:6379\r\n"
        liar = Liar(f"*1\r\n*3\r\n:0\r\n:16383\r\n{node}".encode())
        self.closing.append(liar)
        tier = self.tier(f"redis://127.0.0.1:{liar.port}", mode="cluster")
        for call in (tier.probe, lambda: tier.holds(key_chain(2))):
            with pytest.raises(TierDown, match="is no name of a host"):
                call()

    def test_a_server_that_starts_anew_is_used_again_at_once(self) -> None:
        server = AskedServer(VALKEY)
        try:
            tier = self.tier(f"redis://127.0.0.1:{server.port}")
            keys = key_chain(4)
            self.bench.store(keys)
            server.stop()
            server.start()
            assert tier.holds(keys) == [False] * 4  # over a connection that was dead and is not any more
            self.bench.store(keys)
            server.stop()
            with pytest.raises(TierDown, match="refused"):
                tier.holds(keys)
            with pytest.raises(TierDown):
                tier.probe()
            server.start()
            tier.probe()
            self.bench.store(keys)
            assert self.bench.loaded(keys) == [True] * 4
        finally:
            server.remove()

    def test_a_server_killed_under_load_costs_misses_and_time_outs_only(self) -> None:
        server = AskedServer(VALKEY)
        try:
            tier = self.tier(f"redis://127.0.0.1:{server.port}")
            ended = threading.Event()
            bad: list[BaseException] = []
            done, downs, longest_s = [0], [0], [0.0]

            def work(number: int) -> None:
                for turn in itertools.count():
                    if ended.is_set():
                        return
                    keys = key_chain(3, branch=f"{number} {turn % 3}")
                    start = time.monotonic()
                    try:
                        tier.store(self.bench.writes(keys))
                        self.bench.load(keys)  # which checks what is loaded
                        done[0] += 1
                    except TierDown:
                        downs[0] += 1
                        ended.wait(0.005)  # leave the processor to the server that is to start
                    except BaseException as error:  # noqa: BLE001
                        bad.append(error)
                        return
                    longest_s[0] = max(longest_s[0], time.monotonic() - start)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(3):
                before = done[0]
                until(lambda before=before: done[0] > before + 20 or bad)
                server.stop()
                before = downs[0]
                until(lambda before=before: downs[0] > before or bad)
                server.start()
            before = done[0]
            until(lambda: done[0] > before + 20 or bad)
            ended.set()
            for thread in threads:
                joined(thread)
            assert not bad
            assert longest_s[0] < 4
        finally:
            server.remove()

    def test_a_server_that_stands_still_is_down_after_the_time_out(self) -> None:
        server = AskedServer(VALKEY)
        try:
            tier = self.tier(f"redis://127.0.0.1:{server.port}")
            keys = key_chain(4)
            self.bench.store(keys)
            server.process.send_signal(signal.SIGSTOP)
            for call in (lambda: tier.holds(keys), lambda: self.bench.load(keys), tier.probe, tier.clear):
                start = time.monotonic()
                with pytest.raises(TierDown):
                    call()
                assert time.monotonic() - start < 1.2
            server.process.send_signal(signal.SIGCONT)
            assert self.bench.loaded(keys) == [True] * 4
        finally:
            server.remove()

    def test_a_reply_that_dribbles_in_is_as_late_as_none(self) -> None:
        proxy = self.behind(running("valkey"))
        tier = self.tier(f"redis://127.0.0.1:{proxy.port}")
        keys = key_chain(1)
        self.bench.store(keys)

        def dribble(data: bytes) -> bytes:
            time.sleep(0.1)  # the client's time-out, which this is to outlast in pieces, is of the real clock
            return data[:100]

        proxy.spoil = dribble
        start = time.monotonic()
        with pytest.raises(TierDown, match="in time"):
            self.bench.load(keys)
        assert time.monotonic() - start < 1.2
        proxy.spoil = lambda data: data
        assert tier.holds(keys) == [True]

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_a_login_that_dribbles_in_is_as_late_as_none(self, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """redis-py's own time-out begins anew with every byte."""
        monkeypatch.setenv("KV_TEST_PASSWORD", "s3cret")
        dribbler = Dribbler(b"+" + b"O" * 100)
        self.closing.append(dribbler)
        url = f"redis://127.0.0.1:{dribbler.port}?protocol={protocol}"
        tier = self.tier(url, password_env="KV_TEST_PASSWORD")
        start = time.monotonic()
        with pytest.raises(TierDown, match="Timeout"):
            tier.probe()
        assert time.monotonic() - start < 1.2

    def test_a_value_that_nobody_takes_is_as_late_as_no_answer(self) -> None:
        """The server answers what comes before, then reads nothing more: sending must end as well."""
        proxy = self.behind(running("valkey"))
        self.bench.context = TierContext(64 << 20, 64 << 20, "troubles")
        tier = make_redis_tier({"url": f"redis://127.0.0.1:{proxy.port}", "timeout_s": 0.5}, self.bench.context)
        self.closing.append(tier)
        (write,) = self.bench.writes(key_chain(1))
        proxy.spoil = lambda data: proxy.stall() or data  # type: ignore[func-returns-value]
        start = time.monotonic()
        with pytest.raises(TierDown, match="in time"):
            tier.store([write])
        assert time.monotonic() - start < 2.4
        proxy.flow()

    @pytest.mark.parametrize("answer", [b"+PONG\r\n", b"%1\r\n+proto\r\n:2\r\n", b":1\r\n", b"*0\r\n", b"_\r\n"])
    def test_an_answer_to_hello_that_is_none_is_a_server_that_is_down(self, answer: bytes) -> None:
        liar = Liar(answer)
        self.closing.append(liar)
        tier = self.tier(f"redis://127.0.0.1:{liar.port}?protocol=3")
        for _ in range(2):  # the connection is not taken for one that has logged in
            with pytest.raises(TierDown, match=r"login|RESP"):
                tier.probe()

    def test_a_password_may_be_of_any_bytes(self, tmp_path: Path) -> None:
        server = running("bytes", VALKEY)
        server.ask("ACL", "SETUSER", "bytes", "reset", "on", b">\xff\xfe", "+@all", "~*")
        (tmp_path / "password").write_bytes(b"\xff\xfe\n")
        (tmp_path / "password").chmod(0o600)
        for protocol in (2, 3):
            url = f"redis://127.0.0.1:{server.port}?protocol={protocol}"
            self.tier(url, username="bytes", password_file=str(tmp_path / "password")).probe()

    def test_connections_beyond_those_to_keep_are_closed_after_their_use(self) -> None:
        server = running("valkey")
        tier = self.tier(f"redis://127.0.0.1:{server.port}", connections=2, timeout_s=30)
        meeting, keys = threading.Barrier(5), key_chain(1)
        tier.probe()
        (pool,) = tier._servers._pools.values()
        threads = [threading.Thread(target=lambda: pool.talk(lambda _: meeting.wait(30))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            joined(thread)
        assert len(pool._available_connections) == 2 and all(one._sock for one in pool._available_connections)
        before = [connection._sock for connection in pool._available_connections]
        assert tier.holds(keys) == [False]
        assert {connection._sock for connection in pool._available_connections} == set(before)

    def direct_and_spoilt(self, prefix: str) -> tuple[RedisTier, RedisTier, Proxy]:
        """Two tiers over one server's chunks: one that nothing disturbs, with time for a busy machine, and one behind
        a proxy that soon takes a swallowed answer for lost."""
        server = running("valkey")
        proxy = self.behind(server)
        direct = self.tier(f"redis://127.0.0.1:{server.port}", prefix=prefix, timeout_s=30)
        return direct, self.tier(f"redis://127.0.0.1:{proxy.port}", prefix=prefix, timeout_s=0.2), proxy

    def test_flipped_cut_and_swallowed_bytes_never_pass_for_a_chunk(self) -> None:
        direct, tier, proxy = self.direct_and_spoilt("spoilt-answers")
        (key,) = key_chain(1)
        direct.store([self.bench.write(key)])
        whole = bytes(self.bench.write(key).payload)
        chance = random.Random(7)

        def spoil(data: bytes) -> bytes | None:
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
                case 1:
                    return data[:at] if chance.random() < 0.3 else data
                case 2:
                    return None if chance.random() < 0.3 else data
                case _:
                    return data

        seen = {"right": 0, "caught by the checksum": 0, "not loaded": 0, "down": 0}
        proxy.spoil = spoil
        for _ in range(100):
            read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(303_104), self.nbytes)
            try:
                (outcome,) = tier.load([read])
            except TierDown:
                seen["down"] += 1
            else:
                if not isinstance(outcome, Loaded):
                    seen["not loaded"] += 1
                elif chunk_header.check(read.header, read.room, key=key, format_id=chunk_header.format_id("troubles")):
                    seen["caught by the checksum"] += 1
                else:
                    assert bytes(read.room) == whole
                    seen["right"] += 1
            assert bytes(read.pages[self.nbytes :]) == bytes(303_104 - self.nbytes)
            direct.store([self.bench.write(key)])  # if it was found damaged it is gone
        assert min(seen["caught by the checksum"], seen["down"]) > 5

    def test_what_was_spoilt_on_its_way_to_the_server_never_passes_for_a_chunk(self) -> None:
        direct, tier, proxy = self.direct_and_spoilt("spoilt-questions")
        (key,) = key_chain(1)
        write = self.bench.write(key)
        chance = random.Random(11)

        def flip(data: bytes) -> bytes:
            at = chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]

        proxy.spoil_questions = flip
        caught, rounds = 0, 0
        while caught <= 5:  # how often depends on how the kernel cuts what is sent
            rounds += 1
            assert rounds < 1000
            direct.discard([key])
            with contextlib.suppress(TierDown):
                tier.store([write])
            read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(303_104), self.nbytes)
            if isinstance(direct.load([read])[0], Loaded):
                assert (
                    chunk_header.check(read.header, read.room, key=key, format_id=chunk_header.format_id("troubles"))
                    is not None
                )
                caught += 1

    @pytest.mark.parametrize(
        "answer",
        [
            b"$999999999999\r\n",
            b"$-7\r\n",
            b"$ 5\r\n",
            b"$99999999999999999999999999999999\r\n",
            b"*1000000000\r\n",
            b":12345\r\n",
            b"x" * 100_000,
            b"$65792\r\n" + b"x" * 70_000,
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"\0\xff" * 10,
            b"",
        ],
    )
    def test_a_server_that_lies_is_down_and_costs_no_memory(self, answer: bytes) -> None:
        liar = Liar(answer)
        self.closing.append(liar)
        self.tier(f"redis://127.0.0.1:{liar.port}", timeout_s=0.2)
        keys = key_chain(2)
        with pytest.raises(TierDown):
            self.bench.load(keys)
        if answer[:1] != b":":
            with pytest.raises(TierDown):
                self.bench.tier.holds(keys)
            with pytest.raises(TierDown):
                self.bench.tier.store(self.bench.writes(keys))
            with pytest.raises(TierDown):
                self.bench.tier.probe()

    @pytest.mark.parametrize("mode", ["single", "cluster", "sentinel"])
    @pytest.mark.parametrize(
        "answer",
        [
            b"*2\r\n$1\r\n5\r\n*1\r\n$900000000000\r\n" + b"x" * (64 << 20),
            b"*2\r\n$1\r\n5\r\n*900000000\r\n" + b"$1\r\na\r\n" * (1 << 20),
            b"*1\r\n" * 100_000,
            b"*1\r\n$3\r\nabc\r\n",
            b"*2\r\n$9\r\n127.0.0.1\r\n$7\r\n9999999\r\n",
            b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$9\r\n127.0.0.1\r\n:1\r\n",
        ],
        ids=["long name", "many names", "nested", "of one", "no port", "no slots"],
    )
    def test_a_server_that_lies_about_names_and_places_is_down_and_costs_no_memory(
        self, answer: bytes, mode: str
    ) -> None:
        liar = Liar(answer)
        self.closing.append(liar)
        master = {"sentinel_master": "m"} if mode == "sentinel" else {}
        tier = self.tier(f"redis://127.0.0.1:{liar.port}", mode=mode, **master)
        tracemalloc.start()
        try:
            for call in (tier.clear, lambda: tier.some_keys(3), lambda: tier.holds(key_chain(1))):
                with pytest.raises(TierDown):
                    call()
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()

    def test_a_master_that_became_a_replica_is_left_for_the_one_now_at_its_address(self) -> None:
        """A managed service moves a name to the new master and leaves connections at the old one."""
        old, new = running("valkey"), running("another")
        proxy = self.behind(old)
        tier = self.tier(f"redis://127.0.0.1:{proxy.port}")
        keys = key_chain(2)
        self.bench.store(keys)
        old.ask("REPLICAOF", "127.0.0.1", free_port())
        proxy.port_behind = new.port
        try:
            (outcome,) = tier.store(self.bench.writes(key_chain(1, branch="b")))
            assert isinstance(outcome, Refused)
            assert tier.usage().full.startswith("READONLY")
            self.bench.store(keys)
            assert len(new.ask("KEYS", tier._prefix + b"*")) == 10
            assert tier.usage().full == ""
            proxy.port_behind = old.port
            with pytest.raises(RemovalRefusedError, match="READONLY"):
                self.tier(f"redis://127.0.0.1:{old.port}").discard(keys)
        finally:
            old.ask("REPLICAOF", "NO", "ONE")

    def test_a_piece_that_is_gone_or_not_what_it_was_takes_the_chunk_with_it(self) -> None:
        server = running("valkey")
        tier = self.tier(f"unix://{server.unix}")
        keys = key_chain(4)
        self.bench.store(keys)
        heads = [tier._head(key) for key in keys]
        server.ask("DEL", heads[0] + b":3")
        server.ask("DEL", heads[1])
        server.ask("APPEND", heads[2] + b":1", "more")
        server.ask("DEL", heads[3] + b":2")
        server.ask("RPUSH", heads[3] + b":2", "a list")
        assert tier.holds(keys) == [False, False, True, True]
        outcomes = self.bench.load(keys)
        assert outcomes[:2] == [Absent(), Absent()]
        assert [type(outcome) for outcome in outcomes[2:]] == [Damaged, Damaged]
        assert server.ask("KEYS", tier._prefix + b"*") == []
        self.bench.store(keys)
        server.ask("DEL", heads[0] + b":4")
        self.bench.store(keys)  # what is incomplete is written anew
        assert self.bench.loaded(keys) == [True] * 4

    def test_a_server_that_evicts_serves_whole_chunks_or_none(self) -> None:
        server = running("evicting", VALKEY, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random")
        tier = self.tier(f"unix://{server.unix}")
        for branch in range(30):
            keys = key_chain(4, branch=str(branch))
            tier.store(self.bench.writes(keys))
        server.ask("CONFIG", "SET", "maxmemory", "0")  # or its answers take room, for which it evicts more
        keys = [key for branch in range(30) for key in key_chain(4, branch=str(branch))]
        held = tier.holds(keys)
        assert 0 < sum(held) < 30
        assert self.bench.loaded(keys) == held
        assert len(server.ask("KEYS", "*")) == 5 * sum(held)  # the rest of what lost a piece is gone as well

    def test_a_full_server_refuses_and_keeps_nothing_of_what_it_refused(self) -> None:
        server = running("full", VALKEY, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
        tier = self.tier(f"unix://{server.unix}")
        keys = key_chain(40)
        outcomes = tier.store(self.bench.writes(keys))
        kept = [isinstance(outcome, Stored) for outcome in outcomes]
        assert 3 < sum(kept) < 30
        assert all(isinstance(outcome, Refused) for outcome, is_kept in zip(outcomes, kept, strict=True) if not is_kept)
        assert tier.holds(keys) == self.bench.loaded(keys) == kept
        assert len(server.ask("KEYS", "*")) == 5 * sum(kept)

    @pytest.mark.parametrize("over", ["unix", "tcp"])
    @pytest.mark.parametrize("limit", ["proto-max-bulk-len", "client-query-buffer-limit"])
    def test_a_value_above_the_servers_limit_is_refused_and_the_tier_stays_up(
        self, over: str, limit: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It closed the connection: the tier was down, its probe succeeded, and so on for ever, 0 chunks stored."""
        server = running(f"limited by {limit}", VALKEY, f"--{limit}", "1mb")
        url = f"unix://{server.unix}" if over == "unix" else f"redis://127.0.0.1:{server.port}"
        clock = HandClock()
        config = RedisConfig(url=url, prefix=f"limit{next(self.numbers)}")
        self.bench.context = TierContext(3 << 20, 3 << 20, "troubles")
        tier = self.bench.tier = RedisTier(config, self.bench.context, clock=clock)
        self.closing.append(tier)
        keys = key_chain(4)
        writes = [self.bench.write(key, stored_bytes=1000 if number == 2 else None) for number, key in enumerate(keys)]
        lane = Lane(tier, chunk_header.format_id("troubles"), clock=clock)
        self.closing.append(lane)
        for _ in range(2):
            outcomes = tier.store(writes)
            assert [type(outcome) for outcome in outcomes] == [Unstorable, Unstorable, Stored, Unstorable]
            assert isinstance(outcomes[0], Unstorable)
            assert "proto-max-bulk-len" in outcomes[0].reason and "piece_bytes" in outcomes[0].reason
        assert tier.usage().full == ""
        answered: list[list[StoreOutcome]] = []
        slot = aligned_pages(3 << 20)
        assert lane.store([Outgoing(keys[0], None, slot, 3 << 20)], answered.append)
        assert lane.drain(60)
        assert [type(outcome) for outcome in answered[0]] == [Unstorable]
        assert lane.health()[0] is Health.UP and lane.counts().downs == 0
        assert limit in caplog.text
        assert self.bench.load(keys[2:3]) == [Loaded(1000)]
        server.ask("CONFIG", "SET", limit, "512mb")
        try:
            assert isinstance(tier.store(writes)[0], Unstorable)
            clock.advance(61)
            assert tier.store(writes) == [Stored()] * 4
        finally:
            server.ask("CONFIG", "SET", limit, "1mb")

    def test_a_proxy_that_refuses_one_value_in_words_takes_the_others(self) -> None:
        server = running("valkey")
        proxy = self.behind(server)
        tier = self.tier(f"redis://127.0.0.1:{proxy.port}", piece_bytes=1 << 20)
        keys = key_chain(2)
        answers = [b"-ERR max request size exceeded\r\n"]
        proxy.spoil = lambda data: data.replace(b"+OK\r\n", answers.pop(), 1) if b"+OK" in data and answers else data
        first, second = tier.store(self.bench.writes(keys))
        assert isinstance(first, Unstorable) and "max request size exceeded" in first.reason
        assert second == Stored() and tier.holds(keys) == [False, True]

    def test_a_writer_that_is_killed_while_it_stores_leaves_nothing(self) -> None:
        """Pieces without a head stayed for ever: no lookup finds them, and nothing expired them."""
        server = running("valkey")
        proxy = self.behind(server)
        tier = self.tier(f"redis://127.0.0.1:{proxy.port}")
        (key,) = key_chain(1)
        for cut_after in range(0, 300_000, 65536):
            passed = [0]

            def cut(data: bytes, passed: list[int] = passed, cut_after: int = cut_after) -> bytes | None:
                passed[0] += len(data)
                return data if passed[0] <= cut_after + 1000 else None

            proxy.spoil_questions = cut
            with pytest.raises(TierDown):
                tier.store([self.bench.write(key)])
            proxy.spoil_questions = lambda data: data
            assert server.ask("KEYS", tier._prefix + b"*") == []
        self.bench.store([key])
        assert self.bench.loaded([key]) == [True]

    @pytest.mark.parametrize("rights", [[], ["+multi"]])
    def test_without_the_right_to_transactions_pieces_come_one_by_one_and_it_is_said(
        self, rights: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = running("valkey")
        few = ["+get", "+strlen", "+exists", "+set", "+unlink", "+scan", "+ping"]
        server.ask("ACL", "SETUSER", "plain", "reset", "on", ">s3cret", "~*", *few, *rights)
        monkeypatch.setenv("KV_TEST_PASSWORD", "s3cret")
        self.tier(f"redis://127.0.0.1:{server.port}", username="plain", password_env="KV_TEST_PASSWORD")
        for branch in ("a", "b"):
            keys = key_chain(3, branch=branch)
            self.bench.store(keys)
            assert self.bench.loaded(keys) == [True] * 3
        assert caplog.text.count("+multi and +exec") == 1

    @pytest.mark.parametrize("end", ["\n", "\r\n", ""])
    def test_a_newline_after_a_password_in_the_environment_is_none_of_it(
        self, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = running("closed", VALKEY, "--requirepass", "s3cret")
        monkeypatch.setenv("KV_TEST_PASSWORD", "s3cret" + end)
        self.tier(f"redis://127.0.0.1:{server.port}", password_env="KV_TEST_PASSWORD").probe()
        monkeypatch.setenv("KV_TEST_PASSWORD", end)
        with pytest.raises(ConfigError, match="KV_TEST_PASSWORD is empty"):
            self.tier(f"redis://127.0.0.1:{server.port}", password_env="KV_TEST_PASSWORD")

    def test_chunks_end_with_their_time_unless_they_are_used(self) -> None:
        server = running("valkey")
        for refresh in (False, True):
            tier = self.tier(f"unix://{server.unix}", ttl_s=1000, refresh_ttl=refresh)
            keys = key_chain(1)
            self.bench.store(keys)
            for name in tier._names(keys[0]):
                assert 990 < server.ask("TTL", name) <= 1000
                server.ask("EXPIRE", name, 500)
            assert self.bench.loaded(keys) == [True]
            for name in tier._names(keys[0]):
                assert (server.ask("TTL", name) > 900) == refresh
                server.ask("EXPIRE", name, 500)
            wanted_bytes = chunk_header.prefix_bytes(self.nbytes // 4, self.nbytes)
            read = Read(keys[0], bytearray(chunk_header.HEADER_BYTES), aligned_pages(303_104), wanted_bytes)
            assert tier.load_prefixes([read]) == [Loaded(wanted_bytes)]
            for name in tier._names(keys[0]):  # also of the pieces that were not read
                assert (server.ask("TTL", name) > 900) == refresh

    def test_a_user_needs_few_rights_and_fewer_to_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        server = running("valkey")
        rights = ["+get", "+strlen", "+exists", "+set", "+unlink", "+scan", "+ping"]
        server.ask("ACL", "SETUSER", "writer", "on", ">s3cret", "~mine:*", *rights)
        server.ask("ACL", "SETUSER", "reader", "on", ">s3cret", "~mine:*", "+get", "+strlen", "+exists", "+ping")
        (tmp_path / "password").write_text("s3cret\n")
        (tmp_path / "password").chmod(0o600)
        monkeypatch.setenv("KV_TEST_PASSWORD", "s3cret")
        url, keys = f"redis://127.0.0.1:{server.port}", key_chain(2)
        writer = self.tier(url, username="writer", password_file=str(tmp_path / "password"), prefix="mine")
        writer.clear()
        self.bench.store(keys)
        writer.discard(keys[1:])
        writer.probe()
        reader = self.tier(url, username="reader", password_env="KV_TEST_PASSWORD", prefix="mine")
        reader.probe()
        assert self.bench.loaded(keys) == [True, False]
        refused = reader.store([self.bench.write(keys[1])])
        assert isinstance(refused[0], Refused)
        for remove in (lambda: reader.discard(keys), reader.clear, lambda: reader.clear_tenant(keys[0].tenant)):
            with pytest.raises(RemovalRefusedError, match="NOPERM"):
                remove()
        (tmp_path / "password").write_text("another one")
        server.ask("CLIENT", "KILL", "USER", "writer")
        for call in (writer.probe, writer.clear, lambda: writer.holds(keys)):
            with pytest.raises(TierDown, match=r"log in|invalid username") as raised:
                call()
            assert "another one" not in str(raised.value)
        stranger = self.tier(url, username="reader", password_env="KV_TEST_PASSWORD", prefix="theirs")
        with pytest.raises(TierDown, match="NOPERM"):
            stranger.holds(keys)

    def test_clearing_takes_all_of_its_namespace_and_nothing_else(self) -> None:
        server = running("valkey")
        tier, other = self.tier(f"unix://{server.unix}"), self.tier(f"unix://{server.unix}")
        self.bench.store(key_chain(2))
        mine = [b"%b{%d}" % (tier._prefix, number) for number in range(3000)]
        with closing(redis.Redis(unix_socket_path=server.unix)) as client:
            client.mset(dict.fromkeys(mine, b"x"))
        tier.clear()
        assert server.ask("EXISTS", *mine) == 0
        assert other.holds(key_chain(2)) == [True, True]

    def test_a_tenant_is_cleared_whatever_base64_makes_of_its_tag_and_of_the_key_space(self) -> None:
        """A tenant's names have no common first letters across key spaces, so they are found by a pattern."""
        tier = self.tier(f"unix://{running('valkey').unix}")
        tags = [
            bytes([first, *others]) for first in (0x00, 0x7F, 0xBE, 0xFF) for others in (bytes(6), b"\xfb\xef\xbe" * 2)
        ]
        spaces = [bytes([last]) * 16 for last in range(0, 256, 17)]
        keys = [ChunkKey(b"\x01" + space + tag + bytes(6) + bytes(32)) for space in spaces for tag in tags]
        self.bench.store(keys)
        for cleared, tag in enumerate(tags):
            tier.clear_tenant(tag)
            assert tier.holds(keys) == [key.tenant not in tags[: cleared + 1] for key in keys]

    def test_a_server_that_wants_a_password_is_down_without_one(self) -> None:
        server = running("closed", VALKEY, "--requirepass", "s3cret")
        self.tier(f"redis://127.0.0.1:{server.port}")
        for call in (self.bench.tier.probe, self.bench.tier.clear, lambda: self.bench.load(key_chain(1))):
            with pytest.raises(TierDown, match=r"NOAUTH|[Aa]uthentication required"):
                call()

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            ("ERR max number of clients reached", "max number of clients reached"),
            ("ERR AUTH <password> called without any password configured", "without any password configured"),
            ("ERR unknown command 'AUTH', with args beginning with: 's3cret' ", "unknown command 'AUTH'$"),
            ("WRONGPASS it is not s3cret", "log in: WRONGPASS$"),
        ],
    )
    def test_why_a_server_allows_no_login_is_said_without_the_password(
        self, answer: str, says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KV_TEST_PASSWORD", "s3cret")
        liar = Liar(f"-{answer}\r\n".encode())
        self.closing.append(liar)
        self.tier(f"redis://127.0.0.1:{liar.port}", password_env="KV_TEST_PASSWORD")
        with pytest.raises(TierDown, match=says) as raised:
            self.bench.tier.probe()
        assert "s3cret" not in str(raised.value)

    def test_connections_to_a_server_that_is_no_master_any_more_are_closed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier = self.tier("redis://127.0.0.1", mode="sentinel", sentinel_master="m")
        for _ in range(2):
            liar = Liar(b"+PONG\r\n")
            self.closing.append(liar)
            master = [b"127.0.0.1", b"%d" % liar.port]
            monkeypatch.setattr(tier._servers, "_ask", lambda *_, master=master, **__: master)
            tier.probe()
        assert [address.port for address in tier._servers._pools] == [liar.port]

    def test_an_idle_connection_is_not_forgotten_on_its_way(self) -> None:
        liar = Liar(b"+PONG\r\n")
        self.closing.append(liar)
        tier = self.tier(f"redis://127.0.0.1:{liar.port}")
        tier.probe()
        (pool,) = tier._servers._pools.values()
        (connection,) = pool._available_connections
        sock = connection._sock._sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120

    def test_a_dead_server_is_no_reason_not_to_start(self) -> None:
        tier = self.tier(f"redis://127.0.0.1:{free_port()}")
        with pytest.raises(TierDown, match="refused"):
            tier.probe()
        assert tier.usage().chunks is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "url"),
        ({"url": "redis://h", "ttl": 3}, "did you mean 'ttl_s'"),
        ({"url": "http://h"}, "redis://"),
        ({"url": "redis://me:secret@h"}, "password_file"),
        ({"url": "redis://:se/secret@h"}, "password_file"),
        ({"url": "rediss://me:secret?1@h:6379/0"}, "password_file"),
        ({"url": "unix://me:secret@/s"}, "password_file"),
        ({"url": "redis://h/x"}, "database"),
        ({"url": "redis://h?db=1"}, "a database is written after a /"),
        ({"url": "redis://h?protocol=4"}, "protocol=3"),
        ({"url": "redis://h/1#secret"}, "protocol=3"),
        ({"url": "unix:///s?db=1&password=secret1"}, "db=number"),
        ({"url": "redis://h:99999"}, "port|Port"),
        ({"url": "redis://"}, "no host"),
        ({"url": "redis://a,b"}, "several hosts"),
        ({"url": "redis://a,b/1", "mode": "cluster"}, "database 0"),
        ({"url": "redis://a", "mode": "sentinel"}, "sentinel_master"),
        ({"url": "redis://a", "mode": "sentinal"}, "mode"),
        ({"url": "unix:///s", "mode": "cluster"}, "unix"),
        ({"url": "redis://a", "piece_bytes": "4 MB!"}, "4MiB"),
        ({"url": "redis://a", "piece_bytes": 0}, "4KiB"),
        ({"url": "redis://a", "prefix": "a{b"}, "prefix"),
        ({"url": "redis://a", "password_env": "NOT_THERE_AT_ALL"}, "NOT_THERE_AT_ALL"),
        ({"url": "redis://a", "password_file": "/not/there"}, "/not/there"),
        ({"url": "rediss://a", "tls_ca_file": "/not/there"}, "tls"),
        ({"url": "redis://a", "refresh_ttl": True}, "ttl_s"),
        ({"url": "redis://a", "ttl_s": 1 << 60}, "ttl_s"),
        ({"url": "redis://a", "username": "me"}, "password_file"),
        ({"url": "redis://a", "timeout_s": 0}, r">= 0\.001 - at `timeout_s`"),
    ],
)
def test_options_that_cannot_be_honoured_say_what_to_write(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        tier_factory("redis")(options, TierContext(4096, 4096, "options"))
    assert "secret" not in str(raised.value)


def test_both_names_make_the_same_tier() -> None:
    assert tier_factory("redis") is tier_factory("valkey") is make_redis_tier
    with pytest.raises(ConfigError, match="did you mean 'redis'"):
        tier_factory("reddis")


@pytest.mark.parametrize("options", [{"url": "redis://h"}, {"url": "redis://h", "mode": "cluster"}])
def test_without_redis_py_the_error_says_what_to_install(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [name for name in sys.modules if name.startswith("redis.") or name.endswith(".redis_connection")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(kv_remote, "redis_connection", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'kv-remote\[redis\]'"):
        tier_factory("valkey")(options, TierContext(4096, 4096, "options"))


def test_no_client_library_is_imported_before_its_tier_is_made() -> None:
    modules = "kv_remote.redis, kv_remote.objects, kv_remote.shared_fs, kv_tiers.build"
    program = f"import sys, {modules}; print([name for name in ('redis', 'obstore', 'moto') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"
