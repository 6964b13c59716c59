"""Faults of blending on the last of several ranks, whose worker is in another process."""

import time
from typing import Any

from kv_testing.vllm_inspect import Inspect


class OneRank(Inspect):
    """For `worker_extension_cls`. Each rank is told; the last one does it."""

    kv_leaves_weights_alone = Inspect.kv_leaves_weights_alone | {
        *("kv_loses_segments", "kv_fails", "kv_turns_off", "kv_stores_slowly"),
    }

    def kv_loses_segments(self) -> None:
        """Whatever it wants to read has left the cache."""
        from kv_blend.vllm.filling import Filler

        if self._is_last:
            Filler._lease = lambda *_arguments: None  # type: ignore[method-assign]

    def kv_fails(self) -> None:
        """Whatever it writes to the engine's blocks."""
        from kv_blend.vllm.filling import Filler

        def fails(*_arguments: Any) -> Any:
            raise RuntimeError("a bug of ours")

        if self._is_last:
            Filler._place = fails  # type: ignore[method-assign]

    def kv_stores_slowly(self) -> None:
        """The others begin later, and have nothing left to store."""
        from kv_blend.vllm.filling import Filler
        from kv_server.remote_cache import RemoteCache

        part: Any = RemoteCache if self._is_last else Filler
        name, wait_s = ("commit", 1.0) if self._is_last else ("_store", 0.5)
        call = getattr(part, name)

        def late(*given: Any) -> Any:
            time.sleep(wait_s)
            return call(*given)

        setattr(part, name, late)

    def kv_turns_off(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if self._is_last:
            get_kv_transfer_group().turn_off("a fault of this rank")

    @property
    def _is_last(self) -> bool:
        from vllm.distributed.parallel_state import get_tp_group

        return bool(get_tp_group().is_last_rank)
