"""A real `kv-server` that may open few descriptors: it serves whom it can, tells the others why, and does not spin."""

import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from kv_server import RemoteCache, wire
from kv_server.address import allow_descriptors
from kv_testing.wait import line, until

LIMIT = 64
CLIENTS = 100
WATCHED_S = 3.0


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    socket: Path
    port: int
    log: Path

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def connect(self, kind: str) -> socket.socket:
        if kind == "http":
            made = socket.create_connection(("127.0.0.1", self.port), 10)
        else:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(10)
            made.connect(str(self.socket))
        return made


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        path, log = Path(home) / "s" / "kv.sock", Path(home) / "log"
        command = [sys.executable, "-m", "kv_server", "--capacity", "1MiB", "--http", "127.0.0.1:0"]
        with log.open("w") as errors:
            process = subprocess.Popen(
                ["bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "-", *command, "--socket", str(path)],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        assert process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            assert ready.select(30), log.read_text()
        port = httpx.URL(line(process.stdout).split()[-1]).port
        assert port is not None
        yield Server(process, path, port, log)
        process.terminate()
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.stdout.close()


def heard(connection: socket.socket) -> bytes:
    """What a connection was told when it was turned away; nothing for one that waits to be served."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        return connection.recv(10_000)
    return b""


@pytest.mark.parametrize("kind", ["unix", "http"])
def test_without_descriptors_it_neither_spins_nor_fills_the_log(server: Server, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(server.connect(kind)) for _ in range(CLIENTS)]
        before_s = server.cpu_s()
        with selectors.DefaultSelector() as nobody:
            nobody.select(WATCHED_S)
        assert server.cpu_s() - before_s < WATCHED_S / 4
        assert server.log.stat().st_size < 8 << 10
        told = [data for connection in held if (data := heard(connection))]
        if kind == "http":
            assert all(data.startswith(b"HTTP/1.1 503 ") for data in told)
        else:
            assert told
            frames = wire.Frames(wire.MAX_ANSWER_BYTES)
            frames.feed(told[0])
            body = frames.next()
            assert body is not None
            refused = wire.read_answer(body)
            assert isinstance(refused, wire.Failed) and "ulimit -n" in refused.text
    # They are gone, and everybody is served as before.
    until(lambda: is_served(server))
    RemoteCache(server.socket, group_bytes=(4096,), fingerprint="f").close()


def is_served(server: Server) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{server.port}/status", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_at_the_start_it_says_what_its_limit_is_too_small_for(server: Server) -> None:
    text = server.log.read_text()
    assert f"{LIMIT} descriptors" in text and "max_sessions" in text and "ulimit -n" in text


def test_a_soft_limit_is_raised_as_far_as_may_be() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        assert allow_descriptors(hard + 1) == hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allow_descriptors(16) == 16
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
