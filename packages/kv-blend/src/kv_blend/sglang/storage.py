"""`KVBlendStorage`: what `KVStorage` does for exact requests, and segments' pages for those with a plan.

An exact request passes through unchanged. Pages of a blended one are never written to the store, and read from it only
as they are made of segments' pages.
"""

from collections.abc import Sequence
from typing import Any

import torch
from kv_connect.guard import always, guarded
from kv_core.log import limited_logger
from kv_sglang.attach import KV
from kv_sglang.pools import first_slots
from kv_sglang.storage import KVStorage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kv_blend.sglang.pages import SegmentPages

_log = limited_logger(__name__)


def _none_of(_self: Any, keys: Sequence[str], *_rest: Any, **_named: Any) -> list[bool]:
    return [False] * len(keys)


class KVBlendStorage(KVStorage):
    """The backend of HiCache for an engine that blends."""

    _segments: SegmentPages | None = None

    def on_host_pools_registered(self) -> None:
        super().on_host_pools_registered()
        reasons = {
            "not all layers of its model keep the whole prefix in one pool": set(self._pages) != {KV},
            "its pages have a format other than canonical": self._pages[KV].format.kind != "canonical",
            "its model has latent attention (MLA)": self._pages[KV].format.parts != ("k", "v"),
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            _log.warning("this engine does not blend: %s", "; ".join(why))
            return
        requests = self._attached.requests
        assert requests is not None
        self._segments = SegmentPages(self._kv, requests)
        requests.arrivals.append(self._segments.arrived)

    @guarded(always(0))
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        if self._segments is not None and self._segments.knows(keys):
            return self._segments.held(keys)
        pages = super().batch_exists(keys, extra_info)
        if self._segments is not None:
            self._segments.written(keys[:pages])
        return int(pages)

    @guarded(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        if self._segments is None or not self._segments.knows(keys):
            return list(super().batch_get_v1(keys, host_indices, extra_info))
        slots = first_slots(host_indices, len(keys), self._kv.pages.page_slots)
        return [False] * len(keys) if slots is None else self._segments.read(keys, slots)

    @guarded(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        answers = list(super().batch_set_v1(keys, host_indices, extra_info))
        if self._segments is not None:
            self._segments.written(keys)
        return answers
