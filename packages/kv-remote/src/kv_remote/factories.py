"""The factories of tiers that touch nothing until their first call, so that options are checked by making one."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from kv_tiers.options import read_options
from kv_tiers.tier import ANY_CHUNKS, CheckedFactory, Tier, TierContext

Config = TypeVar("Config", bound=msgspec.Struct)


def factory_of(make: Callable[[Config, TierContext], Tier], config: type[Config], type_name: str) -> CheckedFactory:
    """config: describes the options. type_name: that of the tier, for errors."""

    def make_tier(options: Mapping[str, object], context: TierContext) -> Tier:
        return make(read_options(config, options, type_name), context)

    return CheckedFactory(make_tier, lambda options: make_tier(options, ANY_CHUNKS).close())
