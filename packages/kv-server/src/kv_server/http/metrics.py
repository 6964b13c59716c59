"""`GET /metrics`, for Prometheus."""

from kv_observe.metrics import Metrics
from kv_tiers.cache.local import LocalCache
from starlette.responses import Response

from kv_server.http.operation import Operation
from kv_server.http.relay import Relay


def operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    counted = Metrics(relay.bus, lambda: list(known), lambda: relay.network_metrics(known))

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "Counters and gauges in Prometheus's text format"
    return [Operation("GET", "/metrics", about, metrics, Response, failures=(503,))]
