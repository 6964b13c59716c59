"""For all tests outside the engines' environments: Hypothesis on a machine that is shared and sometimes slow, and a log
that leaves no line out for another test's sake."""

import math
import os

import pytest
from hypothesis import HealthCheck, settings
from kv_core.log import LIMIT
from kv_testing.order import longest_first

# How fast examples are made says nothing of our code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

SHRINKING_S = 480
"""For one test of Hypothesis's: it takes up to five minutes to make a failing example small, and a worker that is ended
before says nothing of what failed."""
TIMES = float(os.environ.get("KV_EXAMPLES", "1"))
"""Tests of Hypothesis's are run with so many times their examples: fewer in `make test`, more by `make test-deep`."""
_SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps those of a test: it has no public way to change them once the test is made."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)
    scaled: dict[object, str] = {}  # what has settings: a machine is a class, with all of its examples in one test
    for item in items:
        if not isinstance(item, pytest.Function) or not item.get_closest_marker("hypothesis"):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SHRINKING_S * max(1.0, TIMES)))
        if isinstance(getattr(item.cls, "settings", None), settings):
            scaled[item.cls] = "settings"
        else:
            scaled[getattr(item.obj, "__func__", item.obj)] = _SETTINGS
    for test, name in scaled.items():
        its_own = getattr(test, name)
        setattr(test, name, settings(its_own, max_examples=math.ceil(TIMES * its_own.max_examples)))


@pytest.fixture(autouse=True)
def _unlimited_by_other_tests() -> None:
    LIMIT.reset()
