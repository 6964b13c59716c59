"""Triton's kernels are interpreted on the CPU, except where the tests that need a GPU were asked for.

Triton reads this variable when a kernel is first seen, so it is said before any test is imported.
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
