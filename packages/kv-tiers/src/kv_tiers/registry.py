"""Which code makes a tier of a given type: the entry points of the group `kv_tiers.tiers`, ours and anybody's.

    [project.entry-points."kv_tiers.tiers"]
    my_tier = "my_package.my_module:make_my_tier"

What an entry point names is a `TierFactory`. It is imported only when a tier of its type is asked for.
"""

from importlib.metadata import entry_points
from typing import Final

from kv_core.errors import ConfigError

from kv_tiers.options import nearest
from kv_tiers.tier import TierFactory

GROUP: Final = "kv_tiers.tiers"


def tier_factory(type_name: str) -> TierFactory:
    """What makes tiers of this type.

    Raises:
        ConfigError: nothing installed offers the type, two packages do, or what offers it cannot be imported.
    """
    offered = entry_points(group=GROUP)
    found = {entry.value: entry for entry in offered if entry.name == type_name}
    if not found:
        raise ConfigError(f"there is no tier of type {type_name!r}; {nearest(type_name, {e.name for e in offered})}")
    if len(found) > 1:
        raise ConfigError(f"several packages offer a tier of type {type_name!r}: {', '.join(sorted(found))}")
    (entry,) = found.values()
    try:
        factory: TierFactory = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the tier type {type_name!r} cannot be used: {entry.value}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"the tier type {type_name!r} names {entry.value}, which is no factory")
    return factory
