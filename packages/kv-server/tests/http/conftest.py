"""What the tests of HTTP share."""

from collections.abc import Iterator

import pytest
from kv_testing.http import Served


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()
