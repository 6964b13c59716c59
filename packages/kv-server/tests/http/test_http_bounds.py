"""Clients of HTTP that hold connections and give nothing: health is answered, and nothing is held for ever."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import httpx
import pytest
from kv_core.clock import HandClock
from kv_server import ServerConfig, ServerProcess, launch
from kv_server.http import thread as connections_module
from kv_server.http.start import open_http
from kv_server.http.thread import BoundedProtocol, HttpConnections, peer_of
from kv_server.server import CacheServer
from kv_testing.wait import until
from kv_tiers.config import HostConfig, HttpConfig

TOKEN = "a-token-for-these-tests"
HELD = 64
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST /clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n".encode()
PIPELINED = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A real `kv-server`."""
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        token = Path(home) / "token"
        token.touch(0o600)
        token.write_text(TOKEN)
        http = {"listen": "127.0.0.1:0", "token_file": str(token)}
        made = launch({"host": {"capacity_bytes": "1MiB"}, "http": http})
        yield made
        made.stop()


@pytest.fixture
def url() -> Iterator[str]:
    """Of a server on threads of this process, whose limits a test can change."""
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        socket_path = str(Path(home) / "s" / "kv.sock")
        http = HttpConfig(listen="127.0.0.1:0")
        behind = CacheServer(ServerConfig(host=HostConfig(capacity_bytes=1 << 20), socket=socket_path, http=http))
        opened = open_http(http)
        assert opened is not None
        opened.start(behind)
        thread = threading.Thread(target=behind.serve)
        thread.start()
        yield opened.url
        behind.stop()
        thread.join(30)
        opened.stop()
        assert not thread.is_alive()


def connect(url: str) -> socket.socket:
    found = httpx.URL(url)
    assert found.port is not None
    return socket.create_connection((found.host, found.port), 10)


def idle(connection: socket.socket) -> None:
    """Asks once, keeps the connection, and will ask again in a while."""
    connection.sendall(HEAD)
    connection.recv(10_000)


def bodiless(connection: socket.socket) -> None:
    connection.sendall(POST)


def unread(connection: socket.socket) -> None:
    """Asks for more than its socket takes, and reads nothing."""
    connection.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        for _ in range(20):
            connection.sendall(PIPELINED)


def answers(url: str, path: str) -> bool:
    try:
        return httpx.get(f"{url}{path}", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up, which it must."""
    connection.settimeout(10)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


@pytest.mark.parametrize("hold", [idle, bodiless, unread])
def test_health_is_answered_whatever_others_hold(server: ServerProcess, hold: Callable[[socket.socket], None]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(HELD):
            connection = stack.enter_context(connect(server.url))
            with contextlib.suppress(ConnectionError):
                hold(connection)
        assert [answers(server.url, "healthz") for _ in range(5)] == [True] * 5
        assert answers(server.url, "readyz")
        until(lambda: answers(server.url, "status"))  # a client that is only waited for makes room for a newcomer


def cut_off(connection: socket.socket) -> None:
    """In the middle of what it sends, and without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /sta",
        POST + b"{",
        POST.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked") + b"5\r\n{",
        POST.replace(b"Content-Length: 9", b"Content-Length: 9\r\nContent-Length: 8") + b"{",
        HEAD.replace(b"GET", b"BREW"),
        PIPELINED,
    ],
)
@pytest.mark.parametrize("leave", [socket.socket.close, cut_off])
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    server: ServerProcess, sent: bytes, leave: Callable[[socket.socket], None]
) -> None:
    process = Path(f"/proc/{server.pid}")

    def held() -> list[int]:
        return [len(os.listdir(process / kind)) for kind in ("fd", "task")]

    assert answers(server.url, "metrics")  # its threads are there
    until(lambda: answers(server.url, "status"))
    before = held()
    for _ in range(20):
        connection = connect(server.url)
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        leave(connection)
    assert answers(server.url, "healthz")
    until(lambda: all(now <= was for now, was in zip(held(), before, strict=True)))


def test_a_connection_ends_after_its_time_however_busy_it_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "CONNECTION_S", 0.3)
    with httpx.Client(base_url=url, timeout=10) as client:

        def is_told() -> bool:
            return client.get("/healthz").headers.get("connection") == "close"

        assert not is_told()
        until(is_told)


@pytest.mark.parametrize("hold", [idle, bodiless, unread])
def test_no_connection_lasts_beyond_its_last_answer(
    url: str, hold: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "CONNECTION_S", 0.2)
    monkeypatch.setattr(connections_module, "LAST_ANSWER_S", 0.2)
    with connect(url) as connection:
        with contextlib.suppress(ConnectionError):
            hold(connection)
        read_to_the_end(connection)


def test_who_does_not_read_is_hung_up_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "UNREAD_S", 0.3)
    with connect(url) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(10)
        while True:  # until the other side has closed, which shows at a write: there is always more to write
            connection.sendall(PIPELINED)


def test_who_does_not_read_the_end_is_hung_up_on_too(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What uvicorn closes when there are bytes to send stays open until they are sent."""
    monkeypatch.setattr(connections_module, "UNREAD_S", 0.3)
    ended = threading.Event()
    lost = BoundedProtocol.connection_lost

    def noted(self: BoundedProtocol, error: Exception | None) -> None:
        lost(self, error)
        ended.set()

    monkeypatch.setattr(BoundedProtocol, "connection_lost", noted)
    with connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(PIPELINED[:-2] + b"Connection: close\r\n\r\n")
        assert ended.wait(10)


def test_the_reserve_answers_for_health_alone_and_not_for_long(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connections_module, "PATIENCE_S", 1000.0)
    monkeypatch.setattr(connections_module, "HEALTH_S", 0.5)
    with connect(url) as first:
        idle(first)
        for path, status in ((b"/healthz", b" 200 "), (b"/readyz", b" 200 "), (b"/status", b" 503 ")):
            with connect(url) as other:
                other.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = read_to_the_end(other)
                assert status in answer.splitlines()[0], answer
                assert b"connection: close" in answer
        with connect(url) as silent:
            assert read_to_the_end(silent) == b""
        idle(first)


def test_a_connection_that_fails_as_it_is_accepted_leaves_its_place(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as short:
        short.setattr(asyncio.BaseEventLoop, "connect_accepted_socket", failing)
        for _ in range(connections_module.MAX_OF_A_PEER):
            with connect(url) as lost:
                assert read_to_the_end(lost) == b""
    assert httpx.get(f"{url}openapi.json").status_code == 200  # which is not only health


# Who makes room.


class Held(BoundedProtocol):
    """A connection of which only the table's business is real."""

    class _Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    def __init__(self, peer: str, awaited_since_s: float | None, *, is_health_only: bool = False) -> None:
        self.peer, self.awaited_since_s, self.is_health_only = peer, awaited_since_s, is_health_only
        self.transport = self._Transport()  # type: ignore[assignment]

    @property
    def is_given_up(self) -> bool:
        return self.transport.aborted  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> HttpConnections:
    for name, value in (("MAX_CONNECTIONS", 6), ("MAX_OF_A_PEER", 4), ("HEALTH_CONNECTIONS", 2)):
        monkeypatch.setattr(connections_module, name, value)
    return HttpConnections(HandClock(100.0).now_s)


def fill(room: HttpConnections, *held: Held) -> tuple[Held, ...]:
    for one in held:
        room.open.add(one)
    return held


def test_who_waits_longest_of_the_most_crowded_address_makes_room(room: HttpConnections) -> None:
    held = fill(room, *(Held("a", at) for at in (9.0, 5.0, None)), *(Held("b", 1.0) for _ in range(2)))
    assert room.admit("c") is False
    fill(room, Held("c", 99.9))
    assert room.admit("c") is False
    assert [one.is_given_up for one in held] == [False, True, False, False, False]


def test_an_address_with_its_share_takes_no_place_from_others(room: HttpConnections) -> None:
    mine = fill(room, *(Held("a", None) for _ in range(3)), Held("a", 50.0))
    yours = fill(room, Held("b", 1.0))
    assert room.admit("a") is False
    assert mine[3].is_given_up
    fill(room, Held("a", None))
    assert room.admit("a") is True  # for health
    assert not any(one.is_given_up for one in (*mine[:3], *yours))
    fill(room, Held("c", 1.0))
    assert room.admit("b") is False  # of the address that has more, the server works for all
    assert yours[0].is_given_up


def test_nobody_is_given_up_who_is_worked_for_or_came_just_now(room: HttpConnections) -> None:
    held = fill(room, *(Held(peer, since) for peer in "abc" for since in (None, 99.5)))
    assert room.admit("d") is True
    assert not any(one.is_given_up for one in held)


def test_in_the_reserve_the_first_makes_room(room: HttpConnections) -> None:
    fill(room, *(Held(peer, None) for peer in "abcdef"))
    reserve = fill(room, Held("a", 99.9, is_health_only=True), Held("a", 99.8, is_health_only=True))
    assert room.admit("b") is True
    assert [one.is_given_up for one in reserve] == [False, True]
    fill(room, Held("b", None, is_health_only=True))
    reserve[0].awaited_since_s = None
    assert room.admit("b") is None


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        (("127.0.0.1", 1), "127.0.0.1"),
        (("::ffff:10.0.0.1", 1, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3::4", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_one_network_of_a_customer_is_one_address(address: object, peer: str) -> None:
    assert peer_of(address) == peer
