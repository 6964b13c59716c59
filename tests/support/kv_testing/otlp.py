"""An OTLP/HTTP collector for tests, which listens on a free port and keeps what it receives."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TypeVar

from kv_testing.wait import joined

Request = TypeVar("Request")


@contextmanager
def otlp_collector(path: str, parse: Callable[[bytes], Request]) -> Iterator[tuple[str, list[Request]]]:
    """The collector's address, and the requests that have arrived so far.

    path: the only one that is served. parse: makes a request of its body.
    """
    received: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == path and self.headers["Content-Type"] == "application/x-protobuf"
            received.append(parse(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        joined(thread)
        server.server_close()
