"""Named where SGLang imports its layers with states; each raises when it is called."""

from collections.abc import Callable
from typing import Any

from sgl_kernel import missing


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"mamba.{name}")
