from collections.abc import Iterator

import pytest
from kv_testing.approximations import Small


@pytest.fixture
def small() -> Iterator[Small]:
    """A cache of approximations, which is at rest when the test ends."""
    made = Small()
    yield made
    made.at_rest()
    made.close()
