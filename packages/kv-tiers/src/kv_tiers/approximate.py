"""Caches that may hold approximations, and how they are kept apart from exact caches.

A tier with `approximate: true` returns what the first parts of exact chunks decode to, and whatever an engine computes
from such a chunk is no longer exact either. So such a cache is separate as a whole: its fingerprint differs wherever
caches are found by it (a named pool, a server), and none of it is ever written to a tier (docs/adr/0023).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kv_core.errors import ConfigError

_MARK: Final = " approximate"


def is_approximate(tiers: Sequence[Mapping[str, object]]) -> bool:
    """Whether a cache with these tiers may hold approximations."""
    return any(tier.get("approximate") is True for tier in tiers)


def fingerprint_above(tiers: Sequence[Mapping[str, object]], fingerprint: str) -> str:
    """The fingerprint of the cache above these tiers. fingerprint: of the exact format, or this function's result."""
    return exact_fingerprint(fingerprint) + _MARK if is_approximate(tiers) else fingerprint


def exact_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the exact format, under which tiers store chunks."""
    return fingerprint.removesuffix(_MARK)


def check_approximate(tiers: Sequence[Mapping[str, object]], fingerprint: str) -> None:
    """
    Raises:
        ConfigError: approximations could reach a tier, or an engine that did not allow them.
    """
    if not is_approximate(tiers):
        return
    for number, tier in enumerate(tiers):
        if tier.get("write") != "never":
            raise ConfigError(
                f"tiers[{number}]: a cache that reads approximations must not write any: give each of its tiers "
                "write: never, and let engines without `approximate` fill them"
            )
    if exact_fingerprint(fingerprint) == fingerprint:
        raise ConfigError(
            "tiers: approximate is an engine's own to allow: set it in the engine's settings, not in those of a "
            "kv-server that engines join"
        )
