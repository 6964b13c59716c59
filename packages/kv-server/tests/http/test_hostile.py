"""Who may ask, and requests that are wrong or hostile: the relay never notices them."""

import contextlib
import itertools
import socket
import threading
from pathlib import Path

import httpx
import pytest
from kv_core.errors import ConfigError
from kv_core.testing import key_chain
from kv_server.http import operation as operation_module
from kv_server.http import thread as connections_module
from kv_server.http.start import open_http
from kv_server.http.thread import read_listen
from kv_testing.http import TOKEN, Served, problem, store
from kv_testing.wait import joined, until
from kv_tiers.config import HttpConfig


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "[::2]:80"])
def test_a_page_whose_name_leads_here_reads_nothing(served: Served, host: str) -> None:
    assert "not called" in problem(served.get("/status", host=host), 421)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:9400", "kv.internal"])
def test_the_names_of_this_machine_and_those_that_the_settings_say_are_ours(host: str) -> None:
    served = Served(hosts=["KV.internal"])
    assert served.get("/status", host=host).status_code == 200
    served.close()


def test_no_answer_may_be_framed_sniffed_or_shared_with_another_origin(served: Served) -> None:
    for path in ("/status", "/nothing", "/openapi.json"):
        headers = served.get(path, origin="https://evil.example").headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("0.0.0.0:9400", "token_file"),
        ("[::]:9400", "token_file"),
        ("kv.internal:9400", "token_file"),
        ("9400", "a host and a port"),
        (":9400", "a host and a port"),
        ("127.0.0.1:", "a host and a port"),
        ("127.0.0.1:65536", "a host and a port"),
        ("127.0.0.1:-1", "a host and a port"),
        ("::1:9400", "a host and a port"),
        ("[127.0.0.1]:9400", "a host and a port"),
    ],
)
def test_an_address_that_is_wrong_or_open_without_a_token_is_refused(listen: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_listen(HttpConfig(listen=listen))


def test_an_address_open_to_others_needs_its_token_and_is_asked_by_any_name(tmp_path: Path) -> None:
    served = Served(listen="0.0.0.0:0")
    asked = httpx.get(f"http://127.0.0.1:{served.port()}/status", headers={"host": "kv.example"})
    assert asked.status_code == 200
    served.close()
    named = Served(listen="0.0.0.0:0", hosts=["kv.example"])
    own = httpx.get(f"http://127.0.0.1:{named.port()}/status", headers={"host": f"{socket.gethostname()}:1"})
    assert own.status_code == 200
    asked = httpx.get(f"http://127.0.0.1:{named.port()}/status", headers={"host": "evil.example"})
    assert problem(asked, 421)
    named.close()


def test_an_address_open_to_others_is_asked_by_itself_too_whatever_names_the_settings_say() -> None:
    """A health check of a container knows its address and no name."""
    served = Served(listen="0.0.0.0:0", hosts=["kv.example"])
    url = f"http://127.0.0.1:{served.port()}/healthz"
    assert httpx.get(url).status_code == 200
    assert httpx.get(url, headers={"host": "kv.example"}).status_code == 200
    assert problem(httpx.get(url, headers={"host": "evil.example"}), 421)
    served.close()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9400", "", "10.1.2.3:9400", "10.1.2.3", "[fd00::7]:80"])
@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_get_their_answer_whatever_names_the_settings_say(host: str, path: str) -> None:
    """Load balancers send the address that they connect to, which need not be ours behind a translation, or nothing.
    What else is served is for this machine's own names."""
    served = Served(listen="0.0.0.0:0", hosts=["kv.example"])
    url = f"http://127.0.0.1:{served.port()}"
    assert httpx.get(url + path, headers={"host": host}).status_code == 200
    asked = httpx.get(f"{url}/status", headers={"host": host})
    assert asked.status_code == 200 if host.lower().startswith("localhost") else problem(asked, 421)
    served.close()


def test_an_address_that_is_taken_is_an_error_at_the_start(served: Served) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        open_http(HttpConfig(listen=f"127.0.0.1:{served.port()}"))


def test_what_is_wrong_is_said_with_what_to_do(served: Served) -> None:
    assert "openapi.json" in problem(served.get("/nothing"), 404)
    other_method = served.client.delete("/clear")
    assert "POST" in problem(other_method, 405)
    assert other_method.headers["allow"] == "POST"
    assert "unknown field `x`" in problem(served.post("/clear", {"x": 1}), 400)
    for body in (b"{", b"\xff", b"[" * 100_000, b"[]", b'"x"'):
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        assert problem(served.client.post("/clear", content=body, headers=headers), 400)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "text/plain"}
    assert "application/json" in problem(served.client.post("/clear", content=b"{}", headers=headers), 415)


def test_a_path_with_a_slash_at_its_end_is_not_redirected(served: Served) -> None:
    """curl and scripts take a redirection for success, and nothing would have been done."""
    cache = served.join()
    store(cache, 2)
    assert "openapi.json" in problem(served.post("/clear/"), 404)
    assert problem(served.get("/status/"), 404)
    assert cache.lookup(key_chain(2), "r").chunks == 2
    cache.close()


def test_a_body_has_bounds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    many = b" " * (operation_module.MAX_BODY_BYTES + 1)
    assert "at most" in problem(served.client.post("/clear", content=many, headers=headers), 413)
    in_parts = (many[start : start + 65536] for start in range(0, len(many), 65536))
    assert "at most" in problem(served.client.post("/clear", content=in_parts, headers=headers), 413)
    endless = itertools.repeat(many)
    with contextlib.suppress(httpx.TransportError):  # it hangs up on who goes on, and not all then see the answer
        assert "at most" in problem(served.client.post("/clear", content=endless, headers=headers), 413)
    head = (
        f"POST /clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99999999\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port()), 10) as much:
        much.sendall(head.encode())  # and no byte of it
        assert much.recv(100).startswith(b"HTTP/1.1 413")
    monkeypatch.setattr(operation_module, "BODY_S", 0.2)
    head = f"POST /clear HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 2\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port()), 10) as slow:
        slow.sendall(head.encode() + b"{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
    with socket.create_connection(("127.0.0.1", served.port()), 10) as gone:
        gone.sendall(head.encode() + b"{")
    assert served.get("/healthz").status_code == 200


@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_has_bounds(served: Served, at_once: bool) -> None:
    """However it comes: in one piece, or byte by byte as far as the limit."""
    for size, answers in ((15_000, b"HTTP/1.1 200"), (60_000, b"HTTP/1.1 4")):
        head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Filling: " + b"x" * size + b"\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port()), 10) as sock:
            if at_once:
                sock.sendall(head)
            else:
                with contextlib.suppress(OSError):
                    for start in range(0, len(head), 1000):
                        sock.sendall(head[start : start + 1000])
            assert sock.recv(100).startswith(answers)
    target = b"GET /healthz?" + b"x" * 30_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port()), 10) as sock:
        sock.sendall(target)
        assert sock.recv(100).startswith(b"HTTP/1.1 4")


def test_who_sends_no_whole_head_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "HEAD_S", 0.2)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as silent:
        assert hung_up(silent)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as dribbling:
        dribbling.sendall(b"GET /healthz HTTP/1.1\r\nHost: localh")
        assert hung_up(dribbling)
    with socket.create_connection(("127.0.0.1", served.port()), 10) as again:
        again.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(10_000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /healthz HTTP/1.1\r\n")
        while not hung_up(again):
            pass


def test_there_are_so_many_connections_and_no_more(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", served.port()), 10)) for _ in range(5)]
        assert hung_up(held[-1])
        held[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert held[0].recv(10_000).startswith(b"HTTP/1.1 200")
    until(lambda: can_ask(served))


def can_ask(served: Served) -> bool:
    try:
        return httpx.get(f"{served.http.url}healthz").status_code == 200
    except httpx.HTTPError:
        return False


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(10_000) == b""
    except ConnectionResetError:
        return True


def test_garbage_ends_its_own_connection_only(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "HEAD_S", 0.5)
    for garbage in (
        b"\x00" * 1000,
        b"GET / HTTP\r\n\r\n",
        b"G" * 100_000,
        b"GET /" + b"x" * 50_000 + b" HTTP/1.1\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port()), 10) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(garbage)
            while not hung_up(connection):
                pass
    assert served.get("/status").status_code == 200


def test_a_bug_in_an_answer_is_that_requests_trouble_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(served.server, "report", lambda: 1 / 0)
        assert "bug" in problem(served.get("/status"), 500)
    until(lambda: "ZeroDivisionError" in caplog.text)  # which comes after the answer
    until(lambda: served.get("/status").status_code == 200)


def test_the_relay_serves_engines_while_http_is_flooded(served: Served) -> None:
    cache = served.join()
    store(cache, 5)
    stop = threading.Event()

    def flood() -> None:
        with httpx.Client(base_url=served.http.url, timeout=30) as client:
            while not stop.is_set():
                client.get("/status")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    answered = [cache.lookup(key_chain(5), "r").chunks for _ in range(500)]
    stop.set()
    for thread in threads:
        joined(thread)
    assert answered == [5] * 500
    cache.close()
