"""HTTP beside the relay: what it tells is true."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from contextlib import closing

import httpx
import msgspec
import pytest
import uvicorn
from kv_core.errors import TierDown
from kv_core.testing import key_chain
from kv_server import caches as caches_module
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.http import relay as relay_module
from kv_server.http.operation import Problem
from kv_server.report import Report
from kv_testing.cache_servers import ThreadedServer
from kv_testing.http import SLOT_BYTES, Served, problem, store
from kv_testing.wait import joined, until


def test_status_is_what_the_socket_says_too(served: Served) -> None:
    cache = served.join()
    store(cache, 3)
    assert cache.lookup(key_chain(5), "r").chunks == 3
    cache.end("r")
    over_socket = ask_server(served.path, wire.Status())
    assert isinstance(over_socket, wire.Stated)
    over_http = msgspec.json.decode(served.get("/status").content, type=Report)
    assert over_http == over_socket.report
    counts = over_http.caches[0].counts
    assert (counts.chunks_resident, counts.chunks_hit, counts.chunks_asked) == (3, 3, 5)
    cache.close()


def test_alive_and_ready_are_two_things(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, build = threading.Event(), caches_module.build_local_cache

    def slow(*args: object, **options: object) -> object:
        assert go_on.wait(10)
        return build(*args, **options)  # type: ignore[arg-type]

    assert served.get("/readyz").json() == {"ready": True}
    monkeypatch.setattr(caches_module, "build_local_cache", slow)
    joining = threading.Thread(target=lambda: served.join().close())
    joining.start()
    until(lambda: served.get("/readyz").status_code == 503)
    assert "being opened" in problem(served.get("/readyz"), 503)
    assert served.get("/healthz").json() == {"alive": True}
    go_on.set()
    joined(joining)
    until(lambda: served.get("/readyz").status_code == 200)


def test_while_it_stops_it_is_alive_and_not_ready() -> None:
    """Stopping may take as long as the tiers below take to store."""
    served = Served()
    served.join().close()
    (cache,) = served.server.caches.values()
    go_on, close = threading.Event(), cache.close
    cache.close = lambda: go_on.wait(10) and close()  # type: ignore[method-assign, func-returns-value]
    served.server.stop()
    until(lambda: served.get("/readyz").status_code == 503)
    assert "stopping" in problem(served.get("/readyz"), 503)
    until(lambda: served.get("/status").status_code == 503)
    assert "stopping" in problem(served.get("/status"), 503)
    assert "stopping" in problem(served.post("/clear", {"everything": True}), 503)
    assert served.get("/healthz").status_code == 200
    go_on.set()
    served.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.http.url)


def test_a_cache_that_makes_room_for_another_during_a_request_is_no_bug() -> None:
    server = ThreadedServer(max_formats=1)
    relay = relay_module.Relay(server.server)
    server.join("one").close()
    until(lambda: not server.report().sessions)

    async def clear() -> None:
        (cache,) = (await relay.caches()).values()
        server.clock.advance(301)
        with closing(server.join("two")):
            await relay.call(cache.clear)

    try:
        with pytest.raises(Problem, match="closed meanwhile; ask again") as raised:
            asyncio.run(clear())
        assert raised.value.status == 503
    finally:
        server.close()
        relay.close()


def test_http_is_served_before_clients_of_the_socket_can_take_the_last_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It imports modules and opens an event loop, and ended for good where no descriptor was left for these."""
    startup = uvicorn.Server.startup

    async def slow(server: uvicorn.Server, sockets: object = None) -> None:
        await asyncio.sleep(0.5)
        await startup(server, [])

    monkeypatch.setattr(uvicorn.Server, "startup", slow)
    served = Served()
    try:
        assert served.http._server is not None and served.http._server.started
        assert served.get("/readyz").status_code == 200
    finally:
        served.close()


def test_a_relay_that_hangs_is_told_as_not_ready(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    go_on = threading.Event()
    hanging = served.server.submit(lambda: go_on.wait(30))
    late = served.get("/readyz")
    assert "not answered" in problem(late, 503) and late.headers["retry-after"] == "1"
    assert served.get("/healthz").status_code == 200
    for _ in range(3):
        problem(served.get("/status"), 503)
    assert len(served.server._mailbox._submitted) == 1  # a thread that hangs is not asked for more and more reports
    go_on.set()
    assert hanging.result(10)
    until(lambda: served.get("/readyz").status_code == 200)


def test_what_was_answered_with_503_is_not_done_later(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.join().close()
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.2)
    go_on = threading.Event()
    hanging = served.server.submit(lambda: go_on.wait(30))
    late = served.post("/drain")
    assert "not answered" in problem(late, 503) and late.headers["retry-after"] == "1"
    go_on.set()
    assert hanging.result(10)
    assert served.get("/drain").json() == {"caches": []}


def test_what_has_begun_when_its_time_is_over_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedServer()
    relay = relay_module.Relay(server.server)
    monkeypatch.setattr(relay_module, "ANSWER_S", 0.05)
    go_on = threading.Event()

    async def slow() -> str:
        asyncio.get_running_loop().call_later(0.5, go_on.set)
        return await relay.on_server(lambda _: "waited" if go_on.wait(10) else "")

    try:
        assert asyncio.run(slow()) == "waited"
    finally:
        server.close()
        relay.close()


def test_what_is_asked_of_a_server_that_has_ended_is_refused_at_once(served: Served) -> None:
    def wrong() -> None:
        raise KeyError("a bug of whoever asks")

    assert served.server.submit(lambda: 3).result(10) == 3
    with pytest.raises(KeyError):
        served.server.submit(wrong).result(10)
    assert served.get("/readyz").status_code == 200
    served.server.stop()
    served.thread.join(10)
    with pytest.raises(TierDown, match="stopping"):
        served.server.submit(lambda: 3).result(0)


def test_metrics_are_what_happened(served: Served) -> None:
    cache = served.join()
    store(cache, 3)
    assert cache.lookup(key_chain(5), "r").chunks == 3
    cache.end("r")
    (behind,) = served.server.caches.values()
    label = f'cache="{behind.events.name}"'
    until(lambda: f"kv_chunks_asked_total{{{label}}} 5.0" in served.get("/metrics").text)
    told = served.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=")
    assert f'kv_chunks_hit_total{{{label},tier="host"}} 3.0' in told.text
    assert f'kv_pool_bytes{{{label},state="resident"}} {3.0 * SLOT_BYTES}' in told.text
    cache.close()


def test_the_page_asks_beside_itself_so_that_a_proxy_may_serve_it_behind_a_prefix() -> None:
    """Nothing in it has an address from the root of its host, which is another's then."""
    served = Served()
    text = served.get("/").text
    served.close()
    asked = re.findall(r"fetch\(([^,]*),", text)
    assert asked == ['HERE + "history/" + wanted', 'HERE + "status"', "HERE + path"]
    assert not re.findall(r"""(?:href|src|action)=["']/|(?:fetch|open|EventSource)\(["'`]/""", text)
    (here,) = re.findall(r"const HERE = (.*);", text)
    if (node := shutil.which("node")) is None:
        pytest.skip("no JavaScript engine to ask where that leads")
    for page, beside in {"/": "/", "/kv": "/kv/", "/kv/": "/kv/", "/a/b": "/a/b/"}.items():
        program = f"const location = {{pathname: {json.dumps(page)}}}; process.stdout.write({here})"
        assert subprocess.check_output([node, "-e", program], text=True, timeout=60) == beside
