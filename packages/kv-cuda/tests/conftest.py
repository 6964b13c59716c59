"""Triton's kernels are interpreted on the CPU, except where the tests that need a GPU were asked for.

Triton reads this variable when a kernel is first seen, so it is said before any test is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")


@pytest.fixture(scope="session")
def compile_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """compile_kernels(script, arguments…): what a script prints as JSON that compiles kernels ahead of time.

    In a process of its own, because in this one they are interpreted.
    """

    def run(script: str, *arguments: str) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, str] = json.loads(done.stdout)
        return told

    return run
