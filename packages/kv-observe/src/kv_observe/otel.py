"""What is sent by OpenTelemetry: events as spans, and the metrics of `kv_observe.metrics`, for a collector.

The standard OTEL_… environment variables configure destination, service name, sampling, the interval of metrics
(OTEL_METRIC_EXPORT_INTERVAL, in milliseconds) and whether anything is sent (OTEL_TRACES_EXPORTER,
OTEL_METRICS_EXPORTER).
"""

import itertools
import math
import os
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Final, TypeVar

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_core.service import Holder
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import (
    Aborted,
    BlocksAllocated,
    Committed,
    Evicted,
    HolderEnded,
    LeaseExpired,
    LoadBegun,
    LoadEnded,
    LoadEnding,
    LookedUp,
    Promoted,
    Spilled,
    StoreBegun,
)
from kv_tiers.threads import must_start

from kv_observe.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        ConsoleMetricExporter,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricExporter,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
except ImportError:
    raise ConfigError("spans and metrics by OTLP need the OpenTelemetry SDK: pip install 'kv-observe[otel]'") from None

_log = limited_logger(__name__)

MAX_OPEN: Final = 4096
"""Limit of open spans. Beyond it the oldest is ended."""

INTERVAL_S: Final = 60.0
_LAST_S: Final = 5.0
"""How long `close` waits for the last metrics to be sent."""

_Labels = tuple[tuple[str, str], ...]
_Value = str | int | float | Sequence[str] | Sequence[int]
_Key = TypeVar("_Key")
Exporter = TypeVar("Exporter")
_LOAD_ERRORS: Final[Mapping[LoadEnding, str]] = {
    "released": "",
    "forgotten": "its chunks were forgotten while they were read",
    "ended": "its holder ended",
}


class Spans(Subscriber):
    """One span per holder from its first lookup to its end, with loads, stores and promotions as children. Owns the
    provider and shuts it down.

    Spans are created on the bus's thread with the times of the events, so no request waits for them. A load or store of
    a holder without lookups, such as an engine's worker that acts for many requests, has a trace of its own, and so has
    a spill, which has no holder.
    """

    def __init__(self, bus: EventBus, provider: TracerProvider) -> None:
        self._bus = bus
        self._provider = provider
        self._tracer = provider.get_tracer("kv_tiers", version("kv-tiers"))
        self._requests: OrderedDict[tuple[str, Holder], Span] = OrderedDict()
        self._transfers: OrderedDict[tuple[str, int], Span] = OrderedDict()  # loads and stores, by lease

    def take(self, occurred: Occurred) -> None:
        cache, sizes = occurred.source.name, occurred.source.sizes
        at_ns = self._ns(occurred.at_s)
        match occurred.event:
            case LookedUp() as lookup:
                self._looked_up(cache, lookup, at_ns)
            case LoadBegun(holder, lease, keys, missing):
                span = self._start(cache, holder, "kv.load", at_ns, _chunks(len(keys), sizes.total(keys)))
                if missing:
                    span.set_status(Status(StatusCode.ERROR, f"{missing} chunks are not held"))
                    span.end(at_ns)
                else:
                    self._track(self._transfers, (cache, lease), span, at_ns)
            case LoadEnded(lease=lease, how=how):
                self._end(self._transfers, (cache, lease), at_ns, _LOAD_ERRORS[how])
            case LeaseExpired(holder, lease, _, kind):
                if kind == "promise":
                    self._end(self._requests, (cache, holder), at_ns, "its holder did not renew it in time")
                else:
                    self._end(self._transfers, (cache, lease), at_ns, "the lease expired")
            case StoreBegun(holder, lease, chain, reserved, refused):
                attributes = _chunks(len(reserved), sizes.total(reserved))
                attributes |= {"kv.chunks.asked": len(chain), "kv.chunks.refused": len(refused)}
                span = self._start(cache, holder, "kv.store", at_ns, attributes)
                self._track(self._transfers, (cache, lease), span, at_ns)
            case Committed(lease=lease):
                self._end(self._transfers, (cache, lease), at_ns)
            case Aborted(lease=lease):
                self._end(self._transfers, (cache, lease), at_ns, "it was abandoned")
            case Promoted(holder, tier, keys, missing, moved_bytes, seconds):
                attributes = _chunks(len(keys), moved_bytes) | {"kv.tier": tier, "kv.chunks.missing": missing}
                self._start(cache, holder, "kv.promote", self._ns(occurred.at_s - seconds), attributes).end(at_ns)
            case Spilled(tier, keys, refused, _, moved_bytes, seconds):
                attributes = _chunks(len(keys), moved_bytes) | {"kv.tier": tier, "kv.chunks.refused": refused}
                self._start(cache, "", "kv.spill", self._ns(occurred.at_s - seconds), attributes).end(at_ns)
            case Evicted(tier, keys, cause, holder):
                attributes = {"kv.tier": tier, "kv.chunks": len(keys), "kv.cause": cause}
                if cause == "promotion":  # room for a promotion is made before its lookup is answered
                    self._request(cache, holder, at_ns).add_event("kv.evicted", attributes, at_ns)
                elif (request_span := self._requests.get((cache, holder))) is not None:
                    request_span.add_event("kv.evicted", attributes, at_ns)
            case BlocksAllocated(holder, blocks):
                if (request_span := self._requests.get((cache, holder))) is not None:
                    request_span.add_event("kv.blocks_allocated", {"kv.blocks": blocks}, at_ns)
            case HolderEnded(holder):
                self._end(self._requests, (cache, holder), at_ns)

    def close(self) -> None:
        now_ns = self._ns(self._bus.now_s())
        for span in (*self._transfers.values(), *self._requests.values()):
            span.end(now_ns)
        self._provider.shutdown()

    def _looked_up(self, cache: str, lookup: LookedUp, at_ns: int) -> None:
        span = self._request(cache, lookup.holder, at_ns)
        span.set_attribute("kv.chunks.asked", lookup.chunks_asked)
        tiers = Counter(lookup.tiers_hit)
        attributes: dict[str, _Value] = {
            "kv.chunks.asked": lookup.chunks_asked,
            "kv.chunks.hit": tiers.total(),
            "kv.ended": lookup.ended.lower(),
            "kv.tiers": list(tiers),
            "kv.tiers.chunks": list(tiers.values()),
        }
        if (choice := lookup.choice) is not None:
            attributes["kv.choice.chunks"] = choice.chunks
            if choice.load_s is not None and choice.compute_s is not None:
                attributes |= {"kv.choice.load_s": choice.load_s, "kv.choice.compute_s": choice.compute_s}
            if (skipped := choice.skipped) is not None:
                attributes |= {f"kv.skipped.{name}": value for name, value in asdict(skipped).items()}
        span.add_event("kv.lookup", attributes, at_ns)
        span.set_attribute("kv.chunks.hit", tiers.total())

    def _request(self, cache: str, holder: Holder, at_ns: int) -> Span:
        """The holder's span, started now if there is none."""
        span = self._requests.get((cache, holder))
        if span is None:
            attributes = {"kv.cache": cache, "kv.holder": holder}
            span = self._tracer.start_span("kv.request", attributes=attributes, start_time=at_ns)
            self._track(self._requests, (cache, holder), span, at_ns)
        return span

    def _start(self, cache: str, holder: Holder, name: str, at_ns: int, attributes: Mapping[str, _Value]) -> Span:
        request = self._requests.get((cache, holder))
        context = None if request is None else set_span_in_context(request)
        common = {"kv.cache": cache, "kv.holder": holder} if holder else {"kv.cache": cache}
        return self._tracer.start_span(name, context, attributes={**common, **attributes}, start_time=at_ns)

    def _end(self, spans: OrderedDict[_Key, Span], key: _Key, at_ns: int, error: str = "") -> None:
        if (span := spans.pop(key, None)) is not None:
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(at_ns)

    def _track(self, spans: OrderedDict[_Key, Span], key: _Key, span: Span, at_ns: int) -> None:
        spans[key] = span
        if len(spans) > MAX_OPEN:
            _, oldest = spans.popitem(last=False)
            oldest.end(at_ns)

    def _ns(self, at_s: float) -> int:
        return int(self._bus.wall_s(at_s) * 1e9)


def resource() -> Resource:
    """The OpenTelemetry resource. The service's name is ours only if the environment gives none."""
    has_name = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if has_name else {SERVICE_NAME: "kv-tiers"})


def make_spans(bus: EventBus) -> Spans:
    """Make spans with the exporters that OTEL_TRACES_EXPORTER names: otlp (the default, over HTTP), console, none, or
    another package's. Raises `ConfigError`: there is no such exporter."""
    provider = TracerProvider(resource=resource())
    for exporter in span_exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(bus, provider)


def span_exporters() -> list[SpanExporter]:
    """The exporters that OTEL_TRACES_EXPORTER names. Raises `ConfigError`: there is no such exporter."""
    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    exporters = [exporter_of("traces", name.strip(), OTLPSpanExporter, ConsoleSpanExporter) for name in names]
    return [exporter for exporter in exporters if exporter is not None]


def exporter_of(
    signal: str, name: str, otlp: Callable[[], Exporter], console: Callable[[], Exporter]
) -> Exporter | None:
    """The exporter of this name for traces or metrics. signal: which of the two. Raises `ConfigError`: there is no such
    exporter."""
    if name in ("otlp", ""):
        return otlp()
    if name == "console":
        return console()
    if name == "none":
        return None
    for entry in entry_points(group=f"opentelemetry_{signal}_exporter", name=name):
        exporter: Exporter = entry.load()()
        return exporter
    raise ConfigError(f"OTEL_{signal.upper()}_EXPORTER is {name!r}; write otlp, console or none")


def _chunks(chunks: int, nbytes: int) -> dict[str, _Value]:
    return {"kv.chunks": chunks, "kv.bytes": nbytes}


class PushedMetrics(Metrics):
    """Pushes metrics by OTLP, for deployments with a collector instead of scraping. Owns the exporter and a thread that
    sends periodically; neither the bus nor a cache waits for either.

    Names are as in a scrape except for the `_total` of counters and the `_info` of facts, which OTLP lacks; a
    Prometheus that receives them adds `_total` back.
    """

    def __init__(
        self,
        bus: EventBus,
        caches: Callable[[], Iterable[LocalCache]],
        exporter: MetricExporter,
        interval_s: float,
        others: Callable[[], Iterable["Family"]] = tuple,
    ) -> None:
        """bus, caches, others: as for `Metrics`."""
        super().__init__(bus, caches, others)
        self._exporter = exporter
        self._interval_s = interval_s
        self._began_ns = time.time_ns()
        self._resource = resource()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-metrics", daemon=True)
        must_start(self._thread)

    def close(self) -> None:
        """Send once more. What caches count themselves is missing if they are closed already."""
        self._stopped.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._send()
        self._send()
        self._exporter.shutdown()

    def _send(self) -> None:
        try:
            self._exporter.export(self._data())
        except Exception as error:  # noqa: BLE001  # whatever an exporter raises, it is called again the next time
            _log.warning("metrics could not be sent: %s", error)

    def _data(self) -> MetricsData:
        now_ns = time.time_ns()
        self._began_ns = min(self._began_ns, now_ns)  # the clock may have been set back
        metrics = [metric for family in self.collect() if (metric := self._as_otlp(family, now_ns))]
        scope = ScopeMetrics(InstrumentationScope("kv_tiers", version("kv-tiers")), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _as_otlp(self, family: "Family", now_ns: int) -> Metric | None:
        if not family.samples:
            return None
        about = {"description": family.documentation, "unit": ""}
        cumulative = AggregationTemporality.CUMULATIVE
        if family.type == "histogram":
            points = list(_histograms(family, self._began_ns, now_ns))
            return Metric(family.name, data=Histogram(points, cumulative), **about)
        start_ns = self._began_ns if family.type == "counter" else now_ns
        numbers = [NumberDataPoint(sample.labels, start_ns, now_ns, float(sample.value)) for sample in family.samples]
        if family.type == "counter":
            return Metric(family.name, data=Sum(numbers, cumulative, is_monotonic=True), **about)
        return Metric(family.samples[0].name, data=Gauge(numbers), **about)


def _histograms(family: "Family", began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """One per set of labels. A scrape's buckets are cumulative; OTLP's are not."""
    buckets: dict[_Labels, list[tuple[float, int]]] = defaultdict(list)
    sums: dict[_Labels, float] = {}
    for sample in family.samples:
        labels = tuple((name, value) for name, value in sorted(sample.labels.items()) if name != "le")
        if sample.name.endswith("_bucket"):
            buckets[labels].append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    for labels, cumulative in buckets.items():
        cumulative.sort()
        totals = [0, *(count for _, count in cumulative)]
        counts = [after - before for before, after in itertools.pairwise(totals)]
        bounds = [bound for bound, _ in cumulative if not math.isinf(bound)]
        yield HistogramDataPoint(
            dict(labels), began_ns, now_ns, totals[-1], sums[labels], counts, bounds, math.nan, math.nan
        )


def make_pushed_metrics(
    bus: EventBus, caches: Callable[[], Iterable[LocalCache]], others: Callable[[], Iterable["Family"]] = tuple
) -> PushedMetrics | None:
    """Uses the exporter that OTEL_METRICS_EXPORTER names: otlp (the default, over HTTP), console, or another package's.
    Returns None if it names none. Raises `ConfigError`: there is no such exporter, or the interval is invalid."""
    interval_s, exporter = export_interval_s(), metric_exporter()
    return None if exporter is None else PushedMetrics(bus, caches, exporter, interval_s, others)


def export_interval_s() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL. Raises `ConfigError`: it is invalid."""
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    try:
        interval_s = float(text) / 1e3 if text else INTERVAL_S
    except ValueError:
        interval_s = 0.0
    if not 0 < interval_s <= threading.TIMEOUT_MAX:  # longer than that no thread can wait
        raise ConfigError(f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; write milliseconds, such as 60000")
    return interval_s


def metric_exporter() -> MetricExporter | None:
    """The exporter that OTEL_METRICS_EXPORTER names; None: it names none. Raises `ConfigError`: there is no such
    exporter."""
    name = os.environ.get("OTEL_METRICS_EXPORTER", "otlp").strip()
    return exporter_of("metrics", name, OTLPMetricExporter, ConsoleMetricExporter)
