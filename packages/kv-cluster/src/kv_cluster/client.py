"""Queries a member over HTTP, within limits of time and size: whatever a server answers, it cannot hold up or mislead
the others' verbs."""

import http.client
import io
import socket
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from kv_core.log import on_one_line

from kv_cluster.members import Member

A = TypeVar("A")

ANSWER_S: Final = 5.0
"""For one answer, unless the verb takes longer."""
MAX_ANSWER_BYTES: Final = 16 << 20
_MAX_TEXT: Final = 300
_PIECE_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 0.2
_OTHERS_ISSUED: Final = (18, 19, 20, 21)
"""OpenSSL's codes for a certificate of an authority that it was not told of."""


class NotDone(Exception):  # noqa: N818  # an outcome, and often no fault of ours
    """A member did not do it, or has not said so; the text says why, for people."""


class _Detail(msgspec.Struct):
    detail: str = ""


def shown(text: str) -> str:
    """What another machine said, for a terminal."""
    line = on_one_line(text)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to members. token: empty: there is none.
    tls: for https, by authority: a certificate counts if it is one of the first that knows its issuer. Empty: the
        members have http."""

    token: str
    tls: Sequence[ssl.SSLContext]

    def get(self, member: Member, path: str, wanted: type[A]) -> A:
        """Raises `NotDone`."""
        return self._ask(member, path, None, wanted, ANSWER_S)

    def post(self, member: Member, path: str, body: object, wanted: type[A], *, timeout_s: float | None = None) -> A:
        """With the token. Raises `NotDone`."""
        if member.withheld:
            raise NotDone(f"no request sent: {member.withheld}")
        if not self.token:
            raise NotDone("no request sent: changes need the servers' token: give http.token_file or --token-file")
        return self._ask(member, path, {} if body is None else body, wanted, timeout_s or ANSWER_S)

    def _ask(self, member: Member, path: str, body: object, wanted: type[A], timeout_s: float) -> A:
        """body: None: it is a GET, without the token."""
        if not member.url:
            raise NotDone(
                "no request sent: several servers of the directory are on this host, and share no HTTP address"
            )
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                status, answer = self._exchange(member.url, path, body, until_s)
            except TimeoutError:
                raise NotDone(f"no answer from {member.url} within {timeout_s:g} s") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = shown(str(error) or type(error).__name__)
                raise NotDone(f"{member.url} cannot be reached: {why}") from None
            if status not in (429, 503) or time.monotonic() + _PATIENCE_S > until_s:
                break
            time.sleep(_PATIENCE_S)  # it is busy, and says so
        if status in (200, 202):
            try:
                return msgspec.json.decode(answer, type=wanted)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise NotDone(
                    f"{member.url}{path} answers what this release does not know: {shown(str(error))}"
                ) from None
        raise NotDone(_refusal(status, path, answer))

    def _exchange(self, url: str, path: str, body: object, until_s: float) -> tuple[int, bytes]:
        parts = urlsplit(url)
        assert parts.hostname is not None
        _check_name(parts.hostname, parts.port)
        connection = self._connected(parts.scheme, parts.hostname, parts.port, until_s)
        sock = connection.sock
        connection.sock = _Timed(sock, until_s)
        method, headers, sent = "GET", {}, None
        if body is not None:
            headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
            method, sent = "POST", msgspec.json.encode(body)
        try:
            connection.request(method, path, sent, headers)
            pieces, nbytes = [], 0
            with connection.getresponse() as response:
                while piece := response.read1(_PIECE_BYTES):
                    nbytes += len(piece)
                    if nbytes > MAX_ANSWER_BYTES:
                        raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
                    pieces.append(piece)
                return response.status, b"".join(pieces)
        finally:
            sock.close()

    def _connected(self, scheme: str, host: str, port: int | None, until_s: float) -> http.client.HTTPConnection:
        contexts = list(self.tls)
        while True:
            left_s = max(0.001, until_s - time.monotonic())
            if scheme == "http":
                connection = http.client.HTTPConnection(host, port, timeout=left_s)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=left_s, context=contexts.pop(0))
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as error:
                if not contexts or error.verify_code not in _OTHERS_ISSUED:
                    raise
            else:
                return connection


class _Timed(io.RawIOBase):
    """What `http.client` uses of a socket, up to a deadline: its own time-outs are those of each byte."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Timed(self._sock, self._until_s))

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._armed().recv_into(into)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._armed().send(left) :]

    def _armed(self) -> socket.socket:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._sock


def _check_name(host: str, port: int | None) -> None:
    """Raises `ValueError`: the name stands for several servers. Raises `OSError`: it is not known."""
    found = {(family, address[0]) for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if max(Counter(family for family, _ in found).values()) > 1:
        raise ValueError(f"{host} has {len(found)} addresses, which may be as many servers: name each")


def _refusal(status: int, path: str, answer: bytes) -> str:
    if status == 401:
        return "it has another token: all servers need the one in http.token_file"
    if status == 404 and path.startswith("/endpoints/cluster/") and b"GET /openapi.json" in answer:
        return "it does not serve the endpoint: install kv-cluster there, and write http: {endpoints: [cluster]}"
    try:
        detail = msgspec.json.decode(answer, type=_Detail).detail
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        detail = ""
    return f"refused ({status}): {shown(detail)}" if detail else f"refused with status {status}"
