"""Somebody else's endpoints, by their entry points: served, described and refused as the server's own are, and a bad
one is the trouble of those who ask for it alone."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import httpx
import msgspec
import pytest
from kv_core import plugins
from kv_core.errors import ConfigError, InputError
from kv_core.testing import key_chain
from kv_server.http import endpoints, thread
from kv_server.http.endpoints import ServerView
from kv_server.http.operation import MAX_BODY_BYTES, Operation, Problem
from kv_server.http.start import check_http, open_http
from kv_testing.http import Served, problem, store
from kv_testing.wait import until
from kv_tiers.config import HttpConfig

GO = threading.Event()


class Sum(msgspec.Struct, frozen=True):
    pid: int
    resident: int


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


def sums(view: ServerView) -> Sum:
    return Sum(view.report().pid, sum(cache.counts().chunks_resident for cache in view.caches().values()))


def echo(view: ServerView, body: Named, tag: str) -> Named:
    if tag == "none":
        raise Problem(404, "no such tag")
    if tag == "wrong":
        raise InputError("not this tag")
    return Named(f"{body.name} of {tag}")


def names(view: ServerView, **parameters: str) -> Named:
    return Named(" ".join(f"{name}={text}" for name, text in sorted(parameters.items())))


def fails(view: ServerView) -> Sum:
    raise SystemExit(f"secret of {view}")


def lies(view: ServerView) -> Any:
    return object()


def blocks(view: ServerView) -> Sum:
    GO.wait(30)
    return Sum(0, 0)


async def awaits(view: ServerView) -> Sum:
    return Sum(0, 0)


FAULTS: dict[str, Any] = {
    "not an Operation": "text",
    "the method 'HEAD'": Operation("HEAD", "/a", "", sums, Sum),
    "path 'a' is not one": Operation("GET", "a", "", sums, Sum),
    "path None is not one": Operation("GET", None, "", sums, Sum),  # type: ignore[arg-type]
    "path '/../a b' is not one": Operation("GET", "/../a b", "", sums, Sum),
    "write an ordinary one": Operation("GET", "/a", "", awaits, Sum),
    "too many positional arguments": Operation("POST", "/a", "", sums, Sum, Named),
    "missing a required argument: 'tag'": Operation("POST", "/a", "", echo, Named, Named),
    "not supported": Operation("GET", "/a", "", sums, threading.Event),
    "GET /a: KeyError": Operation("GET", "/a", "", sums, None),
    "GET /a: ValueError": Operation("GET", "/a", "", sums, Sum, status=42),
    "POST /a: TypeError": Operation("POST", "/a", "", sums, Sum, int),  # type: ignore[arg-type]
    "two parameters of one name": Operation("GET", "/{a}/{a}", "", sums, Sum),
}


def make_mine(parameters: Mapping[str, object]) -> Sequence[Any]:
    if fault := parameters.get("fault"):
        return [FAULTS[str(fault)]]
    if parameters:
        raise ConfigError(f"endpoint mine takes no {', '.join(parameters)}")
    return [
        Operation("GET", "/sum", "What is held", sums, Sum),
        Operation("POST", "/echo/{tag}", "The same again", echo, Named, Named, failures=(404,)),
        Operation("GET", "/of/{operation}/{self}", "Names that are ours inside", names, Named),
        Operation("GET", "/fails", "Nothing", fails, Sum),
        Operation("GET", "/lies", "Nothing", lies, Sum),
        Operation("GET", "/blocks", "Nothing for a while", blocks, Sum),
    ]


def make_broken(parameters: Mapping[str, object]) -> Sequence[Any]:
    raise ZeroDivisionError("a bug of somebody else")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "somebody_else", sys.modules[__name__])
    offered = EntryPoints(
        EntryPoint(name, f"somebody_else:make_{name.split('/')[0]}", endpoints.GROUP)
        for name in ("mine", "broken", "mine/too")
    )
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered.select(group=group))


@pytest.fixture
def served(installed: None) -> Iterator[Served]:
    made = Served(endpoints=["mine"])
    GO.clear()
    yield made
    GO.set()
    made.close()


def test_they_see_what_the_server_holds_and_are_in_its_document(served: Served) -> None:
    cache = served.join()
    store(cache, 3)
    answer = served.get("/endpoints/mine/sum")
    assert answer.json() == {"pid": served.get("/status").json()["pid"], "resident": 3}
    assert answer.headers["x-content-type-options"] == "nosniff"
    paths = served.get("/openapi.json").json()["paths"]
    assert paths["/endpoints/mine/sum"]["get"]["summary"] == "What is held"
    assert served.get("/endpoints/mine/of/a/b").json() == {"name": "operation=a self=b"}
    described = paths["/endpoints/mine/echo/{tag}"]["post"]
    assert described["security"] == [{"token": []}]
    assert set(described["responses"]) >= {"200", "400", "401", "404", "500", "503"}
    assert cache.lookup(key_chain(3), "r").chunks == 3
    cache.close()


def test_what_may_change_something_needs_the_token_and_has_the_bounds_of_all_bodies(served: Served) -> None:
    assert served.post("/endpoints/mine/echo/a", {"name": "x"}).json() == {"name": "x of a"}
    assert problem(served.post("/endpoints/mine/echo/a", {"name": "x"}, token="another"), 401)
    assert "unknown field" in problem(served.post("/endpoints/mine/echo/a", {"name": "x", "y": 1}), 400)
    assert problem(served.post("/endpoints/mine/echo/a", {"name": "x" * MAX_BODY_BYTES}), 413)
    assert "no such tag" in problem(served.post("/endpoints/mine/echo/none", {"name": "x"}), 404)
    assert "not this tag" in problem(served.post("/endpoints/mine/echo/wrong", {"name": "x"}), 400)


@pytest.mark.parametrize("name", ["fails", "lies"])
def test_one_that_fails_is_answered_and_logged(served: Served, name: str, caplog: pytest.LogCaptureFixture) -> None:
    said = problem(served.get(f"/endpoints/mine/{name}"), 500)
    assert f"/endpoints/mine/{name} has failed" in said and "secret" not in said
    assert f"the endpoint GET /endpoints/mine/{name} has failed" in caplog.text
    assert served.get("/endpoints/mine/sum").status_code == 200


def test_those_that_block_delay_nobody_else(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither engines nor HTTP; and there are only so many of them, which do not outlive their requests' limit."""
    monkeypatch.setattr(thread, "REQUEST_S", 2.0)
    cache = served.join()
    store(cache, 2)
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(httpx.get(f"{served.http.url}endpoints/mine/blocks", timeout=30).status_code)

    asking = [threading.Thread(target=ask) for _ in range(endpoints.MAX_RUNNING)]
    for one in asking:
        one.start()
    until(lambda: sum(one.name == "kv-endpoint" for one in threading.enumerate()) == endpoints.MAX_RUNNING)
    began_s = time.monotonic()
    assert "being answered" in problem(served.get("/endpoints/mine/sum"), 503)
    assert served.get("/status").status_code == 200
    assert cache.lookup(key_chain(2), "r").chunks == 2
    assert time.monotonic() - began_s < 1.5
    for one in asking:
        one.join(30)
    assert statuses == [503] * endpoints.MAX_RUNNING
    GO.set()
    until(lambda: served.get("/endpoints/mine/sum").status_code == 200)
    cache.close()


def test_one_that_is_still_running_when_the_server_stops_is_answered(served: Served) -> None:
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.get, f"{served.http.url}endpoints/mine/blocks", timeout=30)
        until(lambda: any(one.name == "kv-endpoint" for one in threading.enumerate()))
        served.http.stop()
        assert "is stopping" in problem(asked.result(30), 503)


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_cannot_be_served_stops_the_start(fault: str) -> None:
    for begin in (check_http, open_http):
        with pytest.raises(ConfigError, match=f"the endpoint 'mine' cannot be served: .*{fault}"):
            begin(HttpConfig(listen="127.0.0.1:0", endpoints=[{"name": "mine", "fault": fault}]))


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        (["other"], "there is no endpoint 'other'"),
        ([{"level": 3}], "http.endpoints: say which"),
        ([{"name": "mine", "level": 3}], "takes no level"),
        (["broken"], "'broken' cannot be used: a bug of somebody else"),
        (["mine/too"], "its name is part of a path"),
        (["mine", "mine"], "two GET /endpoints/mine/sum"),
    ],
)
def test_what_is_wrong_with_the_setting_is_said(specs: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_http(HttpConfig(listen="127.0.0.1:0", endpoints=specs))
