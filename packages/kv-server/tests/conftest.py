"""What the tests of servers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_testing.cache_servers import ThreadedServer
from kv_testing.fixtures import ending, forked_servers
from kv_testing.peers import own_nobody
from kv_testing.redis_servers import end_all

__all__ = ["ending", "forked_servers"]


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


@pytest.fixture
def peers_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers of this process treat servers of this process as peers."""
    own_nobody(monkeypatch)


@pytest.fixture(scope="module")
def redis_servers_end() -> Iterator[None]:
    """When the module's tests are over."""
    yield
    end_all()
