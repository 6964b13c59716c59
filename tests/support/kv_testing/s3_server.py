"""A server that speaks S3, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from moto.server import ThreadedMotoServer


@contextmanager
def s3_server(directory: Path) -> Iterator[dict[str, object]]:
    """It runs until the context ends. Yields the options of a tier in a bucket of it, without a prefix.

    directory: for the secret.
    """
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        secret = directory / "s3-secret"
        secret.write_text("a secret\n")
        secret.chmod(0o600)
        httpx.put(f"{endpoint}/chunks").raise_for_status()
        yield {
            "bucket": "chunks",
            "endpoint": endpoint,
            "access_key_id": "someone",
            "secret_access_key_file": str(secret),
        }
    finally:
        server.stop()
