"""Fixtures that the tests of several packages use; their conftest.py imports them."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """What a test opens, closed at its end in the reverse order."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def forked_servers() -> Iterator[None]:
    """The processes of servers are forked: for tests of what servers do, not of how they are started."""
    from kv_testing.forked import forking
    from kv_testing.forked_servers import SERVERS

    with forking(SERVERS):
        yield
