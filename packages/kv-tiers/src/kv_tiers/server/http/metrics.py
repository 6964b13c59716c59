"""`GET /metrics`, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.http.operation import Operation
from kv_tiers.server.http.relay import Relay
from kv_tiers.server.report import PeersServed
from kv_tiers.watch.metrics import Metrics


def operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    served: list[PeersServed] = []
    counted = Metrics(relay.bus, lambda: list(known), lambda: [one for peers in served for one in peer_families(peers)])

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        peers = (await relay.report()).peers
        served[:] = [] if peers is None else [peers]
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "Counters and gauges in Prometheus's text format"
    return [Operation("GET", "/metrics", about, metrics, Response, failures=(503,))]


def peer_families(served: PeersServed) -> Iterator[Metric]:
    """Metrics of what a server with `peers.listen` has served to other hosts' servers."""
    yield GaugeMetricFamily("kv_peer_connections", "Connections of other hosts' servers.", value=served.connections)
    counters = {
        "turned_away": ("Connections that were refused.", served.turned_away),
        "chunks_asked": ("Chunks that peers asked about.", served.asked),
        "chunks_held": ("Chunks of them that were here.", served.held),
        "chunks_sent": ("Chunks that were sent to peers.", served.sent),
        "sent_bytes": ("Bytes of their payloads.", served.sent_bytes),
    }
    for name, (about, value) in counters.items():
        yield CounterMetricFamily(f"kv_peer_{name}", about, value=value)
