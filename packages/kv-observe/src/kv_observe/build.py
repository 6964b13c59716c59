"""Builds a bus and the subscribers that the settings name.

Those of other packages are entry points in the group `kv_tiers.subscribers`, each a `SubscriberFactory`. In settings
their parameters stand next to their name: `subscribers: [{name: mine, url: "https://…"}]`. A bare name is a subscriber
without parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kv_core.errors import ConfigError
from kv_core.plugins import load_plugin, name_and_parameters
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ObserveConfig
from kv_tiers.events.bus import EventBus, Subscriber

from kv_observe.history import History
from kv_observe.log import LogLines, log_json, log_text
from kv_observe.trace_file import Recorder, check_record

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

GROUP: Final = "kv_tiers.subscribers"

SubscriberFactory = Callable[[Mapping[str, object], EventBus], Subscriber]
"""(the parameters that the user wrote, the bus) → a subscriber, which the bus closes. It raises `ConfigError` for
parameters that it does not take, and must not subscribe to the bus itself."""


def build_bus(
    config: ObserveConfig,
    caches: Callable[[], Iterable[LocalCache]] = tuple,
    others: "Callable[[], Iterable[Metric]]" = tuple,
) -> tuple[EventBus, History | None]:
    """The bus, which its owner closes after its caches; and the history on it, if one is configured. Raises
    `ConfigError`: a setting that cannot be honoured; the text says what to change.

    caches: those on this bus that exist now, for metrics that are pushed. Called from any thread.
    others: metrics that are pushed besides those of caches. Called from any thread.
    """
    bus = EventBus()
    subscribers: list[Subscriber] = []
    if config.log != "none":
        subscribers.append(LogLines(bus, log_json if config.log == "json" else log_text))
    if config.record:
        subscribers.append(Recorder(bus, config.record, config.record_bytes))
    if config.otel:
        from kv_observe.otel import make_pushed_metrics, make_spans

        subscribers.append(make_spans(bus))
        make_pushed_metrics(bus, caches, others)  # which subscribe themselves
    history = History(config.history_keys, bus.now_s()) if config.history_keys else None
    if history is not None:
        subscribers.append(history)
    subscribers += [make_subscriber(spec, bus) for spec in config.subscribers]
    for subscriber in subscribers:
        bus.subscribe(subscriber)
    return bus, history


def check_observe(config: ObserveConfig) -> None:
    """Check what `build_bus` would refuse, without writing or sending anything. What a subscriber of another package
    thinks of its parameters is known only once it is made. Raises `ConfigError`: a setting that cannot be honoured; the
    text says what to change."""
    if config.record:
        check_record(config.record, config.record_bytes)
    if config.otel:
        from kv_observe.otel import export_interval_s, metric_exporter, span_exporters

        for span_exporter in span_exporters():
            span_exporter.shutdown()
        export_interval_s()
        if (exporter := metric_exporter()) is not None:
            exporter.shutdown()
    for spec in config.subscribers:
        find_subscriber(spec)


def make_subscriber(spec: str | Mapping[str, Any], bus: EventBus) -> Subscriber:
    """Raises `ConfigError`: there is no such subscriber, or it does not take these parameters."""
    name, factory, parameters = find_subscriber(spec)
    subscriber = factory(parameters, bus)
    if not isinstance(subscriber, Subscriber):
        raise ConfigError(f"the subscriber {name!r} made a {type(subscriber).__name__}, which is not a subscriber")
    return subscriber


def find_subscriber(spec: str | Mapping[str, Any]) -> tuple[str, SubscriberFactory, dict[str, Any]]:
    """The name of the subscriber, its factory, and the parameters for that. Raises `ConfigError`: there is no such
    subscriber."""
    name, parameters = name_and_parameters(spec, "observe.subscribers")
    return name, load_plugin(GROUP, "subscriber", name), parameters
