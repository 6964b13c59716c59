"""Events as OpenTelemetry spans: one per holder from its first lookup to its end, with loads, stores and promotions as
children.

The SDK reads the standard OTEL_… environment variables for destination, service name and sampling. Spans are created on
the bus's thread with the times of the events, so no request waits for them.

A load or store of a holder without lookups, such as an engine's worker that acts for many requests, has a trace of its
own, and so has a spill, which has no holder.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points, version
from typing import Final, TypeVar

from kv_core.errors import ConfigError
from kv_core.service import Holder
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

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
    from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
except ImportError:
    raise ConfigError("spans need the OpenTelemetry SDK: pip install 'kv-observe[otel]'") from None

MAX_OPEN: Final = 4096
"""Limit of open spans. Beyond it the oldest is ended."""

_Value = str | int | float | Sequence[str] | Sequence[int]
_Key = TypeVar("_Key")
Exporter = TypeVar("Exporter")
_LOAD_ERRORS: Final[Mapping[LoadEnding, str]] = {
    "released": "",
    "forgotten": "its chunks were forgotten while they were read",
    "ended": "its holder ended",
}


class Spans(Subscriber):
    """Owns the provider and shuts it down."""

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
    another package's.

    Raises:
        ConfigError: there is no such exporter.
    """
    provider = TracerProvider(resource=resource())
    for exporter in span_exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(bus, provider)


def span_exporters() -> list[SpanExporter]:
    """The exporters that OTEL_TRACES_EXPORTER names.

    Raises:
        ConfigError: there is no such exporter.
    """
    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    exporters = [exporter_of("traces", name.strip(), OTLPSpanExporter, ConsoleSpanExporter) for name in names]
    return [exporter for exporter in exporters if exporter is not None]


def exporter_of(
    signal: str, name: str, otlp: Callable[[], Exporter], console: Callable[[], Exporter]
) -> Exporter | None:
    """The exporter of this name for traces or metrics. signal: which of the two.

    Raises:
        ConfigError: there is no such exporter.
    """
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
