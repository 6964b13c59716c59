"""Caches that may hold approximations, and how they are separated from exact caches.

A tier with `approximate: true` returns what the first parts of exact chunks decode to, and whatever an engine computes
from such a chunk is no longer exact either. Such a cache is therefore entirely separate: its fingerprint differs
wherever caches are found by it (a named pool, a server), and none of its chunks are ever written where exact chunks are
(docs/adr/0010).

A tier that drops parts when it is full has only such chunks. It is written to, and is found by the cache's own
fingerprint, so no exact cache ever reads from it (docs/adr/0010).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from kv_core.errors import ConfigError

_MARK: Final = " approximate"
CALIBRATED: Final = "kvtc"
"""The codec whose payloads are approximations, learnt from a calibration (kv-codecs)."""


def is_approximate(tiers: Sequence[Mapping[str, object]]) -> bool:
    """Whether a cache with these tiers may hold approximations."""
    return any(tier.get("approximate") is True for tier in tiers)


def uses_calibration(tiers: Sequence[Mapping[str, object]]) -> bool:
    """Whether a tier of these encodes with a calibration."""
    codecs = (tier.get("codec") for tier in tiers)
    return any(
        codec == CALIBRATED or (isinstance(codec, Mapping) and codec.get("type") == CALIBRATED) for codec in codecs
    )


def fingerprint_above(tiers: Sequence[Mapping[str, object]], fingerprint: str) -> str:
    """The fingerprint of the cache above these tiers. fingerprint: of the exact format, or this function's result."""
    return exact_fingerprint(fingerprint) + _MARK if is_approximate(tiers) else fingerprint


def exact_fingerprint(fingerprint: str) -> str:
    """The fingerprint of the exact format, under which tiers store chunks."""
    return fingerprint.removesuffix(_MARK)


def drops_parts(tier: Mapping[str, object]) -> bool:
    """Whether this tier drops the last parts of chunks when it is full."""
    return tier.get("when_full") == "drop_parts"


def fingerprint_of_tier(tier: Mapping[str, object], fingerprint: str) -> str:
    """The fingerprint under which a tier stores chunks. fingerprint: of the cache above it."""
    return fingerprint if drops_parts(tier) else exact_fingerprint(fingerprint)


def check_parts(tiers: Sequence[Mapping[str, object]]) -> None:
    """Raises `ConfigError`: a tier is set to drop parts, but what is left could not be read, or nothing is stored
    there."""
    for number, tier in enumerate(tiers):
        if not drops_parts(tier):
            continue
        if tier.get("approximate") is not True:
            raise ConfigError(
                f"tiers[{number}]: what is left of a chunk after when_full: drop_parts is an approximation: add "
                "approximate: true if answers may differ a little, or leave out when_full"
            )
        if tier.get("write") == "never":
            raise ConfigError(
                f"tiers[{number}]: nothing is stored in a tier with write: never, so it is never full: leave out "
                "when_full, or write"
            )


def check_approximate(tiers: Sequence[Mapping[str, object]], fingerprint: str) -> None:
    """Raises `ConfigError`: approximations could reach a tier, or an engine that did not allow them."""
    check_parts(tiers)
    if not is_approximate(tiers):
        if exact_fingerprint(fingerprint) != fingerprint:
            raise ConfigError(
                f"the fingerprint {fingerprint!r} is that of a cache that may hold approximations, and no tier has "
                "approximate: true: its chunks would be stored where exact ones are"
            )
        return
    for number, tier in enumerate(tiers):
        if tier.get("write") != "never" and not drops_parts(tier):
            raise ConfigError(
                f"tiers[{number}]: a cache that reads approximations must not write any to a tier of exact chunks: "
                "give the tier write: never, and let engines without `approximate` fill it; only a tier with "
                "when_full: drop_parts belongs to the cache alone"
            )
    if exact_fingerprint(fingerprint) == fingerprint:
        raise ConfigError(
            "tiers: approximate is for each engine to allow: set it in the engine's settings, not in those of a "
            "kv-server that engines join"
        )
