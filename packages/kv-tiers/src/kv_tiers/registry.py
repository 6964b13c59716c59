"""Tiers and codecs by type: entry points, built-in or from other packages."""

from typing import Final

from kv_core.plugins import load_plugin

from kv_tiers.codec import CodecFactory
from kv_tiers.tier import TierFactory

TIERS: Final = "kv_tiers.tiers"
CODECS: Final = "kv_tiers.codecs"


def tier_factory(type_name: str) -> TierFactory:
    """The factory of tiers of this type.

    Raises:
        ConfigError: no installed package has the type, two do, or importing it fails.
    """
    return load_plugin(TIERS, "tier of type", type_name)


def codec_factory(name: str) -> CodecFactory:
    """The factory of the codec with this name.

    Raises:
        ConfigError: as for `tier_factory`.
    """
    return load_plugin(CODECS, "codec", name)
