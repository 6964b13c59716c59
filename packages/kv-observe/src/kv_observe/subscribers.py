"""Event subscribers from other packages, by name, in the entry-point group `kv_tiers.subscribers`.

An entry point names a `SubscriberFactory`. In settings its parameters stand next to its name: `subscribers: [{name:
mine, url: "https://…"}]`. A bare name is a subscriber without parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from kv_core.errors import ConfigError
from kv_tiers.events.bus import EventBus, Subscriber
from kv_tiers.plugins import load_plugin

GROUP: Final = "kv_tiers.subscribers"

SubscriberFactory = Callable[[Mapping[str, object], EventBus], Subscriber]
"""(the parameters that the user wrote, the bus) → a subscriber, which the bus closes. It raises `ConfigError` for
parameters that it does not take, and must not subscribe to the bus itself."""


def make_subscriber(spec: str | Mapping[str, Any], bus: EventBus) -> Subscriber:
    """
    Raises:
        ConfigError: there is no such subscriber, or it does not take these parameters.
    """
    name, factory, parameters = find_subscriber(spec)
    subscriber = factory(parameters, bus)
    if not isinstance(subscriber, Subscriber):
        raise ConfigError(f"the subscriber {name!r} made a {type(subscriber).__name__}, which is not a subscriber")
    return subscriber


def find_subscriber(spec: str | Mapping[str, Any]) -> tuple[str, SubscriberFactory, dict[str, Any]]:
    """The name of the subscriber, its factory, and the parameters for that.

    Raises:
        ConfigError: there is no such subscriber.
    """
    parameters = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = parameters.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("observe.subscribers: say which, such as subscribers: [mine], or [{name: mine, level: 3}]")
    return name, load_plugin(GROUP, "subscriber", name), parameters
