"""Fixtures that the tests of several packages use; their conftest.py imports them."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """What a test opens, closed at its end in the reverse order."""
    with ExitStack() as stack:
        yield stack
