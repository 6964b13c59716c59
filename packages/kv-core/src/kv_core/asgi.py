"""What middlewares in front of an engine's HTTP server have in common: reading a request's body and passing it on."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def endpoint_of(scope: Scope, endpoints: tuple[str, ...]) -> str:
    """Which of these a request is posted to, whatever the server's root path is; "" for none."""
    if scope["type"] != "http" or scope.get("method") != "POST":
        return ""
    path = str(scope.get("path", ""))
    return next((endpoint for endpoint in endpoints if path.endswith(endpoint)), "")


async def read_body(receive: Receive) -> bytes | None:
    """The whole body. None: the client has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def replay(body: bytes, then: Receive) -> Receive:
    """The body in one message, and then what else comes, such as that the client has gone."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await then()

    return receive


def with_length(scope: Scope, body: bytes) -> dict[str, Any]:
    """The scope of the same request with this body."""
    changed = (b"content-length", b"transfer-encoding")
    headers = [header for header in scope["headers"] if header[0].lower() not in changed]
    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
