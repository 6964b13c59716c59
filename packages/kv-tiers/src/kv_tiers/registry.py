"""Which code makes a tier of a given type: an entry point of the group `kv_tiers.tiers`, a `TierFactory`."""

from typing import Final

from kv_tiers.plugins import load_plugin
from kv_tiers.tier import TierFactory

GROUP: Final = "kv_tiers.tiers"


def tier_factory(type_name: str) -> TierFactory:
    """What makes tiers of this type.

    Raises:
        ConfigError: nothing installed offers the type, two packages do, or what offers it cannot be imported.
    """
    return load_plugin(GROUP, "tier of type", type_name)
