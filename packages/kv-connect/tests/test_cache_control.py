"""Marks of clients become `retain_s`, and no other request is changed by a byte."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_connect.cache_control import RETAIN_S, CacheControlMiddleware, Engine
from kv_core.asgi import Message, Receive, Scope, Send

MARK = {"type": "ephemeral"}
HOUR = MARK | {"ttl": "1h"}


def passed(
    body: bytes, path: str = "/v1/messages", *, pieces: int = 1, method: str = "POST", engine: Engine = "vllm"
) -> tuple[bytes, Any]:
    """The body that the engine gets, and what its scope says that marks ask for."""
    got: list[tuple[bytes, int, Any]] = []
    size = -(-len(body) // pieces) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        taken = bytearray()
        while (message := await receive())["type"] == "http.request":
            taken += message["body"]
        got.append((bytes(taken), int(dict(scope["headers"])[b"content-length"]), scope.get(RETAIN_S)))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(CacheControlMiddleware(app, engine)(scope, receive, send))
    ((taken, length, seconds),) = got
    assert length == len(taken)
    return taken, seconds


def retained(request: dict[str, Any]) -> object:
    body, _ = passed(json.dumps(request).encode(), pieces=3)
    after = json.loads(body)
    options = (after.pop("kv_transfer_params", None) or {}).get("kv_tiers", {})
    assert after == {name: value for name, value in request.items() if name != "kv_transfer_params"}
    return options.get("retain_s")


def text(value: str, mark: object = None) -> dict[str, Any]:
    return {"type": "text", "text": value} | ({} if mark is None else {"cache_control": mark})


@pytest.mark.parametrize(
    ("request_", "seconds"),
    [
        ({"system": [text("rules", MARK)], "messages": []}, 300),
        ({"messages": [{"role": "user", "content": [text("a"), text("b", HOUR)]}]}, 3600),
        ({"messages": [{"role": "user", "content": [text("a", MARK), text("b", MARK | {"ttl": "5m"})]}]}, 300),
        ({"system": [text("rules", HOUR)], "messages": [{"role": "user", "content": [text("a", MARK)]}]}, 3600),
        ({"tools": [{"name": "grep", "input_schema": {}, "cache_control": HOUR}], "messages": []}, 3600),
        ({"cache_control": MARK, "messages": []}, 300),
        ({"messages": [{"content": [{"type": "tool_result", "content": [text("out", HOUR)]}]}]}, 3600),
        ({"messages": [{"role": "user", "content": 'say "cache_control"'}]}, None),
        ({"system": [text("rules", MARK | {"ttl": "1y"})]}, None),
        ({"system": [text("rules", MARK | {"ttl": ["1h"]})]}, None),
        ({"system": [text("rules", {"type": "persistent"})]}, None),
        ({"system": [text("rules", "ephemeral")]}, None),
    ],
)
def test_a_request_is_retained_for_the_longest_time_of_its_marks(request_: dict[str, Any], seconds: int | None) -> None:
    assert retained(request_) == seconds


def test_what_a_request_says_itself_is_kept() -> None:
    marked: dict[str, Any] = {"system": [text("rules", HOUR)]}
    assert retained(marked | {"kv_transfer_params": {"kv_tiers": {"retain_s": 5}}}) == 5
    body = marked | {"kv_transfer_params": {"do_remote_decode": True, "kv_tiers": {"store": False}}}
    after = json.loads(passed(json.dumps(body).encode())[0])["kv_transfer_params"]
    assert after == {"do_remote_decode": True, "kv_tiers": {"store": False, "retain_s": 3600}}
    for params in ([], "x", {"kv_tiers": []}, {"kv_tiers": None}):
        sent = json.dumps(marked | {"kv_transfer_params": params or 1}).encode()
        assert passed(sent)[0] == sent, "the engine says what is wrong with it"


@given(st.binary(max_size=60), st.integers(1, 4))
def test_what_is_no_request_of_ours_passes_as_it_came(noise: bytes, pieces: int) -> None:
    for body in (noise, b'"cache_control"' + noise, b'["cache_control", 1]', b"[" * 3000 + b'"cache_control"'):
        assert passed(body, pieces=pieces)[0] == body


def test_sglang_gets_the_body_as_it_came_and_the_time_beside_it() -> None:
    for request, seconds in (({"system": [text("rules", HOUR)], "messages": []}, 3600), ({"system": "rules"}, None)):
        body = json.dumps(request).encode()
        assert passed(body, engine="sglang") == (body, seconds)


def test_only_endpoints_with_prompts_are_read() -> None:
    body = json.dumps({"system": [text("rules", MARK)]}).encode()
    assert passed(body, "/v1/embeddings")[0] == body
    assert passed(body, method="PUT")[0] == body
    for path in ("/v1/chat/completions", "/v1/completions", "/root/v1/messages"):
        assert b"retain_s" in passed(body, path)[0]


def test_a_client_that_has_gone_is_not_passed_on() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def never(*_: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
    asyncio.run(CacheControlMiddleware(never)(scope, receive, never))
