"""Triton's kernels are interpreted on the CPU, except where the tests that need a GPU were asked for.

Triton reads this variable when a kernel is first seen, so it is said before any test is imported.
"""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
