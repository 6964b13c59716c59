"""Workers in processes of their own with a slow device each: vLLM imports this where `worker_extension_cls` says so."""

from typing import Any

from kv_cuda import bind
from kv_testing.vllm_inspect import Inspect
from slow_device import SlowDevice

COPY_S = 0.05
DEVICE = SlowDevice()
bind.make_copier = DEVICE.make_copier
DEVICE.go_on(COPY_S)


class SlowWorker(Inspect):
    """The module is imported by workers alone."""

    def kv_snapshot(self) -> dict[str, Any]:
        return super().kv_snapshot() | {"stores_behind": DEVICE.stores}
