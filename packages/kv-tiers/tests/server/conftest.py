"""What the tests of servers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_tiers.testing.cache_servers import ThreadedServer


@pytest.fixture
def served() -> Iterator[ThreadedServer]:
    server = ThreadedServer()
    yield server
    server.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory for a server's socket."""
    tmp_path.chmod(0o700)
    return tmp_path
