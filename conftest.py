"""For all tests outside the engines' environments: Hypothesis on a machine that is shared and sometimes slow, and a log
that leaves no line out for another test's sake."""

import pytest
from hypothesis import HealthCheck, settings
from kv_core.log import LIMIT

# How fast examples are made says nothing of our code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _unlimited_by_other_tests() -> None:
    LIMIT.reset()
