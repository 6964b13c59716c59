"""What the tests of servers share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_testing.cache_servers import ThreadedServer
from kv_testing.fixtures import ending
from kv_testing.forked import forking
from kv_testing.forked_servers import SERVERS
from kv_testing.peers import own_nobody
from kv_testing.redis_servers import end_all

__all__ = ["ending"]

_HOW_THEY_START = {
    "test_command_start",
    "test_private_modules",
    "test_private_server",
    "test_process",
    "test_supervised",
}


@pytest.fixture(autouse=True)
def _forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unless a module is about how servers start, their processes are forked."""
    if request.path.stem in _HOW_THEY_START:
        yield
        return
    with forking(SERVERS):
        yield


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
