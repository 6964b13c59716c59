"""Tiers and codecs by type: entry points, built-in or from other packages."""

from typing import Final

from kv_tiers.codec import CodecFactory
from kv_tiers.plugins import load_plugin
from kv_tiers.tier import TierFactory

TIERS: Final = "kv_tiers.tiers"
CODECS: Final = "kv_tiers.codecs"


def tier_factory(type_name: str) -> TierFactory:
    """What makes tiers of this type.

    Raises:
        ConfigError: nothing installed offers the type, two packages do, or what offers it cannot be imported.
    """
    return load_plugin(TIERS, "tier of type", type_name)


def codec_factory(name: str) -> CodecFactory:
    """What makes the codec of this name.

    Raises:
        ConfigError: as of `tier_factory`.
    """
    return load_plugin(CODECS, "codec", name)
