"""Translates SGLang's interfaces into calls of the cache.

Importing this does not import SGLang; that happens when SGLang loads the backend.
"""

from collections.abc import Iterator
from typing import Final

from kv_connect.interface import version_finding
from kv_core.tools.doctor import DoctorOptions, Finding, version_of

TESTED: Final = "0.5.23"
"""The version of SGLang that this was written for and tested with."""

__all__ = ["TESTED"]


def check(_options: DoctorOptions) -> Iterator[Finding]:
    """For the entry-point group `kv_core.doctor`."""
    yield judged(version_of("sglang"))


def judged(version: str | None) -> Finding:
    """Whether this version of SGLang is the tested one."""
    release = (version or "").partition("+")[0]
    return version_finding(
        "SGLang",
        version,
        package="kv-sglang",
        is_tested=release == TESTED or release.startswith(f"{TESTED}.post"),
        install=f"sglang=={TESTED}",
        untested=f"kv-sglang is tested with SGLang {TESTED}; one with another interface is refused at the start",
    )
