"""What the tests of a fleet share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_testing.fleet import FourServers, Load
from kv_testing.forked import forking
from kv_testing.forked_servers import SERVERS
from kv_testing.redis_servers import end_all


@pytest.fixture(scope="module")
def fleet() -> Iterator[FourServers]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home, forking(SERVERS):
        made = FourServers(Path(home))
        yield made
        made.close()
    end_all()


@pytest.fixture
def load(fleet: FourServers) -> Iterator[Load]:
    made = Load(fleet)
    yield made
    made.close()
