"""`GET /metrics`, for Prometheus."""

from prometheus_client.metrics_core import Metric
from starlette.responses import Response

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.peer_metrics import peer_families
from kv_tiers.watch.metrics import Metrics


def operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    others: list[Metric] = []
    counted = Metrics(relay.bus, lambda: list(known), lambda: others)

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        report = await relay.report()
        others[:] = [] if report.peers is None else list(peer_families(report.peers))
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "Counters and gauges in Prometheus's text format"
    return [Operation("GET", "/metrics", about, metrics, Response, failures=(503,))]
