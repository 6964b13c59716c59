"""What only reads the server's state: the probes of liveness and readiness, the status report, and metrics."""

import msgspec
from kv_observe.metrics import Metrics
from kv_tiers.cache.local import LocalCache
from starlette.responses import Response

from kv_server.http.operation import Operation
from kv_server.http.problem import Problem
from kv_server.http.relay import Relay
from kv_server.report import Report


class Alive(msgspec.Struct, frozen=True):
    """The process runs."""

    alive: bool


class Ready(msgspec.Struct, frozen=True):
    """Clients are served."""

    ready: bool


def operations(relay: Relay) -> list[Operation]:
    """Metrics that come from events are counted from this call on."""
    known: list[LocalCache] = []
    counted = Metrics(relay.bus, lambda: list(known), lambda: relay.network_metrics(known))

    async def healthz() -> Alive:
        return Alive(True)

    async def readyz() -> Ready:
        if relay.is_stopping:
            raise Problem(503, "the server is stopping; ask its successor")
        report = await relay.report()
        if report.opening:
            raise Problem(503, f"{report.opening} caches are being opened; ask again soon", {"retry-after": "1"})
        return Ready(True)

    async def metrics() -> Response:
        known[:] = (await relay.caches()).values()
        text, media_type = await relay.call(counted.exposition)
        return Response(text, headers={"content-type": media_type})

    about = "The server, its sessions, and each cache's counts and tiers"
    return [
        Operation("GET", "/healthz", "Whether the process is alive", healthz, Alive),
        Operation("GET", "/readyz", "Whether clients are served; if not, why", readyz, Ready, failures=(503,)),
        Operation("GET", "/status", about, relay.report, Report, failures=(503,)),
        Operation("GET", "/metrics", "Counters and gauges for Prometheus", metrics, Response, failures=(503,)),
    ]
