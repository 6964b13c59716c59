"""What an OTLP collector is sent says the same as a scrape, with the types that OTLP has for it."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kv_core.errors import ConfigError
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_observe.build import build_bus
from kv_observe.metrics import Metrics
from kv_server.config import read_config
from kv_server.server import CacheServer
from kv_testing.otlp import otlp_collector
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import HostConfig, ObserveConfig
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


def points(request: ExportMetricsServiceRequest) -> dict[tuple[str, frozenset[tuple[str, str]]], Any]:
    """By name and labels; the counts by bucket where it is a histogram."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
    for metric in request.resource_metrics[0].scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = frozenset((one.key, one.value.string_value) for one in point.attributes)
            if kind == "histogram":
                assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
                assert sum(point.bucket_counts) == point.count
                found[metric.name, labels] = list(point.bucket_counts)
            else:
                assert kind == "gauge" or metric.sum.is_monotonic
                found[metric.name + ("_total" if kind == "sum" else ""), labels] = point.as_double
    return found


def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], Any]:
    found: dict[tuple[str, frozenset[tuple[str, str]]], Any] = {}
    for family in metrics.collect():
        cumulative: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if family.type != "histogram":
                found[sample.name, frozenset(sample.labels.items())] = sample.value
            elif "le" in sample.labels:
                labels = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
                cumulative.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        for labels, buckets in cumulative.items():
            assert buckets[-1][0] == math.inf
            counts = [value for _, value in sorted(buckets)]
            found[family.name, labels] = [int(now - was) for was, now in zip([0.0, *counts], counts, strict=False)]
    return found


def test_a_collector_is_sent_what_a_scrape_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector("/v1/metrics", ExportMetricsServiceRequest.FromString) as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        opened: list[LocalCache] = []
        bus, _ = build_bus(ObserveConfig(otel=True, history_keys=0), lambda: opened)
        scrape = Metrics(bus, lambda: opened)
        source = bus.source("c", (CHUNK_BYTES,))
        config = HostConfig(capacity_bytes=1 << 16)
        cache = build_local_cache(config, group_bytes=(CHUNK_BYTES,), fingerprint="f", events=source)
        opened.append(cache)
        for branch in range(12):
            keys = key_chain(3, branch=str(branch))
            cache.commit(cache.begin_store(keys, "w"))
            cache.end("w")
        cache.lookup(keys, "r")
        lease = cache.load(keys, "r")
        assert isinstance(lease, ReadLease) and cache.release(lease)
        cache.end("r")
        assert bus.flush()
        expected = scraped(scrape)
        assert expected["kv_chunks_committed_total", frozenset({("cache", "c")})] == 36
        assert any(name == "kv_evictions_total" for name, _ in expected)
        until(lambda: received and points(received[-1]) == expected)
        attributes = {one.key: one.value.string_value for one in received[-1].resource_metrics[0].resource.attributes}
        assert attributes["service.name"] == "mine"
        cache.close()
        before = len(received)
        bus.close()
        assert len(received) > before, "the last are sent"
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-metrics"]


def test_a_server_also_sends_what_it_serves_to_other_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with otlp_collector("/v1/metrics", ExportMetricsServiceRequest.FromString) as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        config = {
            "server": {"socket": str(tmp_path / "its" / "kv.sock")},
            "peers": {"listen": "127.0.0.1:0", "unprotected": True},
            "observe": {"otel": True},
        }
        server = CacheServer(read_config(config))
        serving = threading.Thread(target=server.serve)
        serving.start()
        try:
            until(lambda: received and ("kv_peer_connections", frozenset[tuple[str, str]]()) in points(received[-1]))
        finally:
            server.stop()
            serving.join(10)


def test_points_begin_before_they_end_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp_collector("/v1/metrics", ExportMetricsServiceRequest.FromString) as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        bus, _ = build_bus(ObserveConfig(otel=True, history_keys=0))
        now_ns = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now_ns - 3600 * 10**9)
        bus.close()
        sent = [
            point
            for metric in received[-1].resource_metrics[0].scope_metrics[0].metrics
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        ]
    assert sent and all(point.start_time_unix_nano <= point.time_unix_nano < now_ns for point in sent)


def test_a_collector_that_is_not_there_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    bus, _ = build_bus(ObserveConfig(otel=True, history_keys=0))
    cache = build_local_cache(
        HostConfig(capacity_bytes=1 << 16), group_bytes=(CHUNK_BYTES,), fingerprint="f", events=bus.source("c", (1,))
    )
    for number in range(50):
        cache.commit(cache.begin_store(key_chain(2, branch=str(number)), "w"))
        cache.end("w")
    assert bus.flush() and bus.events_dropped == 0 and bus.failures == 0
    cache.close()
    bus.close()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_METRICS_EXPORTER", "otpl", "write otlp, console or none"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon", "write milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "write milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "inf", "write milliseconds"),
    ],
)
def test_what_cannot_be_meant_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        build_bus(ObserveConfig(otel=True))
