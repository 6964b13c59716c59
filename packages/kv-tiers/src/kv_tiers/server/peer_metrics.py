"""Metrics of what a server has served to other hosts' servers. They are the server's, and not one of its caches'."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kv_tiers.server.report import PeersServed


def peer_families(served: PeersServed) -> Iterator[Metric]:
    """Metrics of what a server with `peers.listen` has served to other hosts' servers."""
    yield GaugeMetricFamily("kv_peer_connections", "Connections of other hosts' servers.", value=served.connections)
    counters = {
        "turned_away": ("Connections that were refused.", served.turned_away),
        "chunks_asked": ("Chunks that peers asked about.", served.asked),
        "chunks_held": ("Those of these chunks that were held here.", served.held),
        "chunks_sent": ("Chunks that were sent to peers.", served.sent),
        "sent_bytes": ("Bytes of the payloads of these chunks.", served.sent_bytes),
    }
    for name, (about, value) in counters.items():
        yield CounterMetricFamily(f"kv_peer_{name}", about, value=value)
