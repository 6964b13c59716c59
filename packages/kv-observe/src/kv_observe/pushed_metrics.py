"""Pushes the metrics of `kv_observe.metrics` by OTLP, for deployments with a collector instead of scraping.

The standard OTEL_… environment variables configure the destination, the interval (OTEL_METRIC_EXPORT_INTERVAL, in
milliseconds) and whether anything is sent (OTEL_METRICS_EXPORTER). Names are as in a scrape except for the `_total` of
counters and the `_info` of facts, which OTLP lacks; a Prometheus that receives them adds `_total` back.
"""

import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus
from kv_tiers.threads import must_start
from prometheus_client.metrics_core import Metric as Family

from kv_observe.metrics import Metrics
from kv_observe.spans import exporter_of, resource

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
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
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError:
    raise ConfigError("metrics by OTLP need the OpenTelemetry SDK: pip install 'kv-observe[otel]'") from None

_log = limited_logger(__name__)

INTERVAL_S: Final = 60.0
_LAST_S: Final = 5.0
"""How long `close` waits for the last metrics to be sent."""

_Labels = tuple[tuple[str, str], ...]


class PushedMetrics(Metrics):
    """Owns the exporter and a thread that sends periodically; neither the bus nor a cache waits for either."""

    def __init__(
        self,
        bus: EventBus,
        caches: Callable[[], Iterable[LocalCache]],
        exporter: MetricExporter,
        interval_s: float,
        others: Callable[[], Iterable[Family]] = tuple,
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

    def _as_otlp(self, family: Family, now_ns: int) -> Metric | None:
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


def _histograms(family: Family, began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
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
    bus: EventBus, caches: Callable[[], Iterable[LocalCache]], others: Callable[[], Iterable[Family]] = tuple
) -> PushedMetrics | None:
    """Uses the exporter that OTEL_METRICS_EXPORTER names: otlp (the default, over HTTP), console, or another package's.
    Returns None if it names none.

    Raises:
        ConfigError: there is no such exporter, or the interval is invalid.
    """
    interval_s, exporter = export_interval_s(), metric_exporter()
    return None if exporter is None else PushedMetrics(bus, caches, exporter, interval_s, others)


def export_interval_s() -> float:
    """OTEL_METRIC_EXPORT_INTERVAL.

    Raises:
        ConfigError: it is invalid.
    """
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    try:
        interval_s = float(text) / 1e3 if text else INTERVAL_S
    except ValueError:
        interval_s = 0.0
    if not 0 < interval_s <= threading.TIMEOUT_MAX:  # longer than that no thread can wait
        raise ConfigError(f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; write milliseconds, such as 60000")
    return interval_s


def metric_exporter() -> MetricExporter | None:
    """The exporter that OTEL_METRICS_EXPORTER names; None: it names none.

    Raises:
        ConfigError: there is no such exporter.
    """
    name = os.environ.get("OTEL_METRICS_EXPORTER", "otlp").strip()
    return exporter_of("metrics", name, OTLPMetricExporter, ConsoleMetricExporter)
