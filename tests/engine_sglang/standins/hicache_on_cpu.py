"""HiCache where there is no CUDA: host pools in plain memory, and its copies between device and host by torch.

A plug-in of SGLang's own kind, which SGLang runs in each of its processes. It replaces what a CPU lacks (pinned memory,
copy kernels), has the attention in plain torch do what SGLang's others do, and nothing else: tree, controller, threads
and host layouts are SGLang's.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import short_convolutions
import torch

SLEEPS_WHEN_IDLE = "KV_TESTS_SLEEP_WHEN_IDLE"
"""The environment variable that asks for it."""
ATTENDS_ONLY_TO_QUERIES = "KV_BENCHMARKS_ATTEND_ONLY_TO_QUERIES"
"""Likewise."""
_QUERIES = 256
"""That are attended to at once, then."""


def register() -> None:
    from sglang.srt.mem_cache.pool_host import base, mamba, mha, mla

    if os.environ.get(SLEEPS_WHEN_IDLE):
        _sleep_when_idle()
    _make_unpinned()
    for pool in (base.HostKVCache, mamba.MambaPoolHost):
        pool.__init__ = _without_pinning(pool.__init__)
    _attend_to_latents()
    if os.environ.get(ATTENDS_ONLY_TO_QUERIES):
        _attend_only_to_queries()
    _attend_to_windows()
    _attend_without_denormals()
    short_convolutions.register()
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_mha
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _backup_mha
    mla.MLATokenToKVPoolHost.load_to_device_per_layer = _load_mla
    mla.MLATokenToKVPoolHost.backup_from_device_all_layer = _backup_mla
    mamba.MambaPoolHost._copy_tensor_pf_lf = _load_states
    mamba.MambaPoolHost._copy_tensor_all_layers_lf_pf = _backup_states


def _sleep_when_idle() -> None:
    """Have a scheduler with nothing to do leave its processor to those that work: it would ask for requests without a
    pause, and tests start several engines on two cores. SGLang's own `sleep_on_idle` sleeps for a second also where a
    request waits for its pages.
    """
    from sglang.srt.managers.scheduler import Scheduler

    on_idle = Scheduler.on_idle

    def idle(self: Any) -> None:
        on_idle(self)
        time.sleep(0.002)

    Scheduler.on_idle = idle


def _without_pinning(make_pool: Callable[..., None]) -> Callable[..., None]:
    def make_unpinned(self: Any, *arguments: Any, **settings: Any) -> None:
        make_pool(self, *arguments, **settings | {"pin_memory": False})

    return make_unpinned


def _make_unpinned() -> None:
    """LoRA makes pinned tensors by these."""
    for name in ("tensor", "zeros"):
        setattr(torch, name, _leaving_out_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_device: self  # type: ignore[method-assign,assignment]


def _leaving_out_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make_plain(*arguments: Any, **named: Any) -> torch.Tensor:
        named.pop("pin_memory", None)
        return make(*arguments, **named)

    return make_plain


def _attend_to_latents() -> None:
    """Let the torch-native attention take SGLang's own absorbed path for MLA, as the expanded one needs a kernel."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)


def _attend_to_windows() -> None:
    """Let the torch-native attention read the layers with sliding windows where it has written them.

    Their pool has slots of its own. SGLang 0.5.23 translates the slots of what this attention writes and not of what
    it reads, so without this a hit in SGLang's own cache on the device changes the answer.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _reading_windows(getattr(TorchNativeAttnBackend, name)))


def _reading_windows(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attend_translated(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if self.use_sliding_window_kv_pool and named["sliding_window_size"] is not None:
            used = slots[requests, : int(lengths.max())]
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(used)
            requests = torch.arange(len(requests))
        return attend(self, query, output, keys, values, slots, requests, lengths, *rest, **named)

    return attend_translated


def _attend_only_to_queries() -> None:
    """Have the torch-native attention compute only the tokens that are new, as all of SGLang's others do: behind a
    prefix it computes the whole prompt, and throws that away. For plain models, and for benchmarks: sums come out
    otherwise in their last digits."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from torch.nn.attention.bias import causal_lower_right

    def extend(
        _self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        _prefixes: torch.Tensor,
        news: torch.Tensor,
        _encoders: torch.Tensor | None = None,
        *,
        scaling: float,
        enable_gqa: bool = False,
        **_named: Any,
    ) -> torch.Tensor:
        first = 0
        for request, length, new in zip(requests.tolist(), lengths.tolist(), news.tolist(), strict=True):
            used = slots[request, :length]
            its_keys, its_values = keys[used].transpose(0, 1)[None], values[used].transpose(0, 1)[None]
            for begin in range(0, new, _QUERIES):  # none of them computes much of what its mask leaves out
                queries = min(_QUERIES, new - begin)
                mine, seen = slice(first + begin, first + begin + queries), length - new + begin + queries
                attended = torch.nn.functional.scaled_dot_product_attention(
                    query[mine].transpose(0, 1)[None],
                    its_keys[:, :, :seen],
                    its_values[:, :, :seen],
                    attn_mask=causal_lower_right(queries, seen)._materialize(query.device),
                    scale=scaling,
                    enable_gqa=enable_gqa,
                )
                output[mine] = attended[0].transpose(0, 1)
            first += new
        return output

    TorchNativeAttnBackend._run_sdpa_forward_extend = extend


def _attend_without_denormals() -> None:
    """Have the torch-native attention take numbers near zero as zero.

    In front of a prompt's queries it computes on as many rows of memory as the cache had tokens, without having written
    any: what lies there may be denormal, and multiplying such numbers is up to seven times slower. Only rows that are
    thrown away change. The switch is a thread's own, and threads inherit it from the one that starts them.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    torch.set_flush_denormal(True)
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, _flushing_denormals(getattr(TorchNativeAttnBackend, name)))


def _flushing_denormals(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attend_flushing(*arguments: Any, **named: Any) -> Any:
        torch.set_flush_denormal(True)  # for the thread that is here; costs nothing
        return attend(*arguments, **named)

    return attend_flushing


def host_place(pool: Any, layer: int, indices: torch.Tensor) -> tuple[Any, ...]:
    """Where the rows of one layer are in one part of the pool's buffer; reading there gives [tokens, heads, dim]."""
    page, offset = indices // pool.page_size, indices % pool.page_size
    places: dict[str, tuple[Any, ...]] = {
        "layer_first": (layer, indices),
        "page_first": (indices, layer),
        "page_first_direct": (page, layer, offset),
        "page_head": (page, slice(None), offset, layer),
    }
    return places[pool.layout]


def _load_mha(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if not is_draft and not 0 <= layer_id < self.target_layer_num:
        return
    place = host_place(self, layer_id, host_indices)
    self.device_k_buffers[layer_id][device_indices] = self.k_buffer[place]
    self.device_v_buffers[layer_id][device_indices] = self.v_buffer[place]


def _backup_mha(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    for layer in range(self.layer_num):
        place = host_place(self, layer, host_indices)
        self.k_buffer[place] = self.device_k_buffers[layer][device_indices]
        self.v_buffer[place] = self.device_v_buffers[layer][device_indices]


def _load_mla(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if not is_draft and layer_id not in self._target_layer_indices:
        return
    device = self.device_kv_buffers[self._buffer_index_by_layer[layer_id]]
    device[device_indices] = self.kv_buffer[host_place(self, self._host_layer_by_controller[layer_id], host_indices)]


def _backup_mla(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    for layer_id in self._target_layer_indices:
        device = self.device_kv_buffers[self._buffer_index_by_layer[layer_id]]
        place = host_place(self, self._host_layer_by_controller[layer_id], host_indices)
        self.kv_buffer[place] = device[device_indices]


def _load_states(
    self: Any,
    *,
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    **_: Any,
) -> None:
    """One tensor of states of Mamba, one layer. src: [states, layers, 1, …]. dst: [states, …]."""
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _backup_states(
    self: Any,
    *,
    src_layers: Any,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **_: Any,
) -> None:
    for number, layer in enumerate(src_layers):
        dst[dst_indices, number, 0] = layer[src_indices]
