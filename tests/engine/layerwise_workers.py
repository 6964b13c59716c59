"""Workers in processes of their own that load layer by layer on a slow device, for tests that break things meanwhile:
vLLM imports this where `worker_extension_cls` says so."""

import os
import signal
from collections.abc import Callable
from typing import Any

from kv_connect.engine import engines
from kv_connect.halves.layerwise import LayerLoads
from kv_core.errors import CopyFailed
from kv_cuda import bind
from kv_server.remote_cache import RemoteCache
from kv_testing.connect import QueuedCopy
from kv_testing.vllm_inspect import Inspect
from kv_testing.wait import until
from slow_device import SlowDevice

COPY_S = 0.002
"""Of a layer."""
DEVICE = SlowDevice(layerwise=True)
bind.make_copier = DEVICE.make_copier
DEVICE.go_on(COPY_S)
_START = LayerLoads.start
_HOLD = QueuedCopy.hold_engine
_started: list[int] = []
_before_the_next: list[Callable[[], None]] = []


def _start(self: LayerLoads, requests: Any, plan: Any) -> None:
    _started.append(len(requests))
    while _before_the_next:
        _before_the_next.pop()()
    _START(self, requests, plan)


LayerLoads.start = _start  # type: ignore[method-assign]


class LayerwiseWorker(Inspect):
    """The module is imported by workers alone."""

    kv_leaves_weights_alone = Inspect.kv_leaves_weights_alone | {"kv_break"}

    def kv_snapshot(self) -> dict[str, Any]:
        return super().kv_snapshot() | {"loads_layerwise": sum(_started), "faults_of_device": DEVICE.faults}

    def kv_break(self, what: str, server: int = 0) -> None:
        """With the next layerwise load: `kill` the server of this process number and go on once this rank has met
        another, or `fail` the copy of a layer, both in the second rank; or copy `late` from then on in all."""
        (engine,) = engines().values()
        cache = engine.cache
        assert isinstance(cache, RemoteCache)
        if what == "late":
            QueuedCopy.hold_engine = lambda self: None  # type: ignore[method-assign]
            DEVICE.queue.copy_s = 0.5
        elif engine.share.rank == 1:
            _before_the_next.append(_fail_once if what == "fail" else lambda: _kill(cache, server))


def _fail_once() -> None:
    def hold_engine(copy: QueuedCopy) -> None:
        QueuedCopy.hold_engine = _HOLD  # type: ignore[method-assign]
        raise CopyFailed("the bus is on fire")

    QueuedCopy.hold_engine = hold_engine  # type: ignore[method-assign]


def _kill(cache: RemoteCache, server: int) -> None:
    generation = cache.generation
    os.kill(server, signal.SIGKILL)

    def is_at_another() -> bool:
        cache.lookup([], "notices")
        return cache.generation > generation

    until(is_at_another, within_s=60)
