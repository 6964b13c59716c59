"""Policies by name, for settings and command lines: built-in ones, and those in the entry-point group
`kv_eviction.policies`.

An entry point names a `PolicyFactory`. In settings its parameters stand next to its name: `policy: {name: mine,
half_life_s: 30}`. A bare name is a policy without parameters; the built-in ones have none.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kv_core.errors import ConfigError
from kv_core.plugins import load_plugin

from kv_eviction.arc import ArcPolicy
from kv_eviction.policy import EvictionPolicy
from kv_eviction.prefix import PrefixPolicy
from kv_eviction.simple import FifoPolicy, LfuPolicy, LruPolicy, MruPolicy, NoopPolicy

PolicySpec = str | dict[str, Any]
"""As in the settings: a name, or a mapping of `name` and parameters."""

PolicyFactory = Callable[[int, Mapping[str, object]], EvictionPolicy]
"""(the tier's capacity in chunks, the parameters that the user wrote) → a new policy. It raises `ConfigError` for
parameters that it does not take."""

GROUP: Final = "kv_eviction.policies"
DEFAULT_POLICY: Final = "prefix"

_BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity_chunks: LruPolicy(),
    "arc": ArcPolicy,
    "lfu": lambda capacity_chunks: LfuPolicy(),
    "fifo": lambda capacity_chunks: FifoPolicy(),
    "prefix": PrefixPolicy,
    "mru": lambda capacity_chunks: MruPolicy(),
    "noop": lambda capacity_chunks: NoopPolicy(),
}
POLICY_NAMES: tuple[str, ...] = tuple(name for name in _BUILT_IN if name != "noop")
"""Of the built-in ones that rank chunks."""


def make_policy(spec: PolicySpec, capacity_chunks: int) -> EvictionPolicy:
    """A new policy for a tier of this many chunks. Raises `ConfigError`: no installed package has this policy, or it
    does not take these parameters."""
    parameters = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"policy: say its name, such as name: {DEFAULT_POLICY}")
    make_built_in = _BUILT_IN.get(name)
    if make_built_in is None:
        factory: PolicyFactory = load_plugin(GROUP, "eviction policy", name, built_in=_BUILT_IN)
        return factory(capacity_chunks, parameters)
    if parameters:
        raise ConfigError(f"the eviction policy {name!r} has no parameters; leave out {', '.join(sorted(parameters))}")
    return make_built_in(capacity_chunks)
