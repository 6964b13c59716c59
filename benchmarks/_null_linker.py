"""A linker for SGLang that stores nothing and finds nothing: what having any linker costs SGLang."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker


class _NoLoads:
    """No forward pass waits for a layer."""

    def set_consumer(self, index: int) -> None:
        pass

    def wait_until(self, layer: int) -> None:
        pass


class NullLinker(UnifiedCacheLinker):  # type: ignore[misc]  # the engine's classes are untyped here
    def __init__(self, _server_args: Any, _params: Any, *, forward_stream: Any = None, **_added: Any) -> None:
        self.forward_stream = forward_stream
        self.layer_done_counter = _NoLoads()
        self.pools = {PoolName.KV: None}
        self._answers: deque[bool] = deque()

    def lookup(self, *_request: Any, **_added: Any) -> list[int]:
        return []

    def load(self, *_request: Any, **_added: Any) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def offload(self, transfers: Sequence[PoolTransfer], *_added: Any, **_named: Any) -> bool:
        self._answers.append(True)
        return True

    def num_completed_offloads(self) -> int:
        return len(self._answers)

    def pop_completed_offload(self) -> bool:
        return self._answers.popleft()

    def reset(self) -> None:
        self._answers.clear()

    def close(self) -> None:
        pass
