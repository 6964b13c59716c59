"""Triton's kernels are interpreted on the CPU, as in kv-cuda's own tests."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
