"""Spans as OpenTelemetry's own SDK and protocol see them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_observe import otel
from kv_observe.build import build_bus
from kv_observe.otel import Spans
from kv_testing.otlp import otlp_collector
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower
from kv_tiers import HostPool, LocalCache
from kv_tiers.config import ObserveConfig
from kv_tiers.events import events
from kv_tiers.events.bus import EventBus
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


class Traced:
    """A cache whose spans are kept in memory."""

    def __init__(self) -> None:
        self.bus = EventBus(interval_s=0.001)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.bus.subscribe(Spans(self.bus, provider))
        self.source = self.bus.source("c", (CHUNK_BYTES,))
        pool = HostPool.anonymous("test", CHUNK_BYTES, 4)
        self.clock = HandClock()
        self.cache = LocalCache(pool, policy=LruPolicy(), clock=self.clock, events=self.source)

    def spans(self) -> list[ReadableSpan]:
        """Those that have ended."""
        assert self.bus.flush()
        return list(self.exporter.get_finished_spans())

    def close(self) -> None:
        self.cache.close()
        self.bus.close()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.close()


def test_a_request_is_a_span_with_its_loads_and_stores_inside(traced: Traced) -> None:
    cache, keys = traced.cache, key_chain(2)
    cache.commit(cache.begin_store(keys, "other"))
    cache.lookup([*keys, *key_chain(1, branch="x")], "r")
    lease = cache.load(keys, "r")
    assert isinstance(lease, ReadLease)
    cache.release(lease)
    cache.commit(cache.begin_store(key_chain(4), "r"))
    traced.source.publish(events.BlocksAllocated("r", 7))
    cache.end("r")
    alone, load, store, request = traced.spans()
    assert [span.name for span in (alone, load, store, request)] == ["kv.store", "kv.load", "kv.store", "kv.request"]
    assert alone.parent is None
    for child in (load, store):
        assert child.parent is not None and child.parent.span_id == request.context.span_id
        assert request.start_time <= child.start_time <= child.end_time <= request.end_time
    assert load.attributes == {"kv.cache": "c", "kv.holder": "r", "kv.chunks": 2, "kv.bytes": 2 * CHUNK_BYTES}
    assert [event.name for event in request.events] == ["kv.lookup", "kv.blocks_allocated"]
    told = dict(request.events[0].attributes or {})
    assert (told["kv.chunks.asked"], told["kv.chunks.hit"], told["kv.ended"]) == (3, 2, "absent")
    assert (told["kv.tiers"], told["kv.tiers.chunks"]) == (("host",), (2,))
    assert all(span.status.status_code is StatusCode.UNSET for span in (alone, load, store, request))


def test_what_went_wrong_is_a_status(traced: Traced) -> None:
    cache, keys = traced.cache, key_chain(2)
    cache.load(keys, "r")
    writing = cache.begin_store(keys, "r")
    cache.release(writing)
    cache.commit(cache.begin_store(keys, "r"))
    cache.lookup(keys, "r")
    traced.clock.advance(301)
    cache.counts()
    missed, aborted, _, expired = traced.spans()
    assert (missed.name, missed.status.description) == ("kv.load", "2 chunks are not held")
    assert (aborted.name, aborted.status.description) == ("kv.store", "it was abandoned")
    assert (expired.name, expired.status.description) == ("kv.request", "its holder did not renew it in time")


def test_what_comes_up_is_inside_its_request_and_takes_the_time_that_it_took() -> None:
    traced = Traced()
    tower = Tower("through", events=traced.source)
    keys = key_chain(4)
    tower.store_below(keys)
    assert tower.ask(keys).ended is Ended.PENDING
    tower.clock.advance(0.25)
    tower.fetch(keys)
    tower.cache.end("r")
    found = traced.spans()
    (request,) = [span for span in found if span.name == "kv.request"]
    up = [span for span in found if span.name == "kv.promote"]
    assert sum((span.attributes or {})["kv.chunks"] for span in up) == 4  # type: ignore[misc]
    for span in up:
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert (span.attributes or {})["kv.tier"] == "tier0"
        assert span.start_time is not None and span.end_time is not None
        assert span.end_time - span.start_time == pytest.approx(0.25e9, rel=0.01)
    assert "kv.evicted" in {event.name for event in request.events}
    assert {span.name for span in found if span.parent is None} == {"kv.request", "kv.store", "kv.spill"}
    tower.close()
    traced.close()


def test_holders_that_never_end_are_bounded(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MAX_OPEN", 10)
    for number in range(25):
        traced.cache.lookup(key_chain(1), f"r{number}")
    assert len(traced.spans()) == 15
    traced.cache.close()
    traced.bus.close()
    assert len(traced.exporter.get_finished_spans()) == 25


def test_spans_reach_a_collector_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector("/v1/traces", ExportTraceServiceRequest.FromString) as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        bus, _ = build_bus(ObserveConfig(otel=True, history_keys=0))
        cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 4), events=bus.source("c", (CHUNK_BYTES,)))
        cache.commit(cache.begin_store(key_chain(2), "w"))
        cache.lookup(key_chain(2), "r")
        cache.end("r")
        cache.close()
        bus.close()
    resources = [spans for request in received for spans in request.resource_spans]
    names = {span.name for one in resources for scope in one.scope_spans for span in scope.spans}
    assert names == {"kv.store", "kv.request"}
    services = {a.value.string_value for one in resources for a in one.resource.attributes if a.key == "service.name"}
    assert services == {"kv-tiers"}


def test_the_environment_names_service_and_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    made = otel.make_spans(EventBus())
    assert made._provider.resource.attributes["service.name"] == "ours"
    made.close()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere")
    with pytest.raises(ConfigError, match="write otlp, console or none"):
        otel.make_spans(EventBus())


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from kv_core.errors import ConfigError\n"
        "from kv_observe.build import build_bus\n"
        "from kv_tiers.config import ObserveConfig\n"
        "build_bus(ObserveConfig())[0].close()\n"
        "try:\n    build_bus(ObserveConfig(otel=True))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONDEVMODE": "0"}
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    assert "pip install 'kv-observe[otel]'" in said.stdout
