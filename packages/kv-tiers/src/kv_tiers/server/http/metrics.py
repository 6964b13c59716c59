"""What Prometheus asks for."""

from starlette.responses import Response

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay
from kv_tiers.watch.metrics import Metrics


def operations(relay: Relay) -> list[Operation]:
    """What only events tell is counted from here on."""
    known: list[LocalCache] = []
    counted = Metrics(relay.bus, lambda: list(known))

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "Counters and gauges in Prometheus's text format"
    return [Operation("GET", "/metrics", about, metrics, Response, failures=(503,))]
