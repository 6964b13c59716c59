"""`KVBlendConnector`: what `KVTiersConnector` does for exact requests, and blending for those that ask for it.

An exact request passes through unchanged. One with a plan, or with a plan's salt, is invisible to the exact half, so
that nothing of it is stored or looked up under an exact key.
"""

from collections.abc import Iterable
from typing import Any

import torch
from kv_connect.adapters import Unsure
from kv_connect.guard import always, guarded
from kv_connect.halves.request import RequestTokens
from kv_cuda.canary import LayerGroup
from kv_vllm.connector import KVTiersConnector
from kv_vllm.layouts import read_groups
from kv_vllm.stats import CounterDeltas, Stats
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from kv_blend.figures import BLEND_FIGURES
from kv_blend.vllm.filling import Filler
from kv_blend.vllm.forward import watch_runner
from kv_blend.vllm.scheduler import BlendMetadata, BlendMetrics, BlendScheduler, Limits
from kv_blend.vllm.worker import BlendWorker, ranks_here, refuse


def _refuse_request(self: "KVBlendConnector", request: Any, *_arguments: Any) -> None:
    """It waits for a load: the exact half's next step refuses it."""
    self._unplanned.add(request.request_id)


def _without_steps(self: "KVBlendConnector", exact: KVConnectorMetadata) -> KVConnectorMetadata:
    if self._blend is not None:
        self._unplanned |= self._blend.give_up()
    return exact


def _lose_steps(self: "KVBlendConnector", sent: BlendMetadata) -> None:
    """Report these requests as failed in the next step."""
    self._blend_lost |= {step.request_id for step in sent.steps}


def _lose_all(self: "KVBlendConnector", *_arguments: Any) -> tuple[set[str], set[str]]:
    lost, self._blend_lost = self._blend_lost, set()
    return set(), lost if self._blend_worker is None else lost | self._blend_worker.give_up()


def why_not_blended(vllm_config: Any, engine: Any) -> str:
    """Why this engine's requests cannot be blended; empty if they can."""
    parallel, model, facts = vllm_config.parallel_config, vllm_config.model_config, engine.facts
    if facts is None:
        return engine.off or "the cache is off"
    reasons = {
        "it has several stages, replicas or shares of a context": parallel.world_size > parallel.tensor_parallel_size
        or parallel.data_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "it guesses tokens (speculative decoding)": vllm_config.speculative_config is not None,
        "it serves LoRA adapters": vllm_config.lora_config is not None,
        "its model has sparse attention": hasattr(model.hf_text_config, "index_topk"),
        "its model's positions have several dimensions (M-RoPE)": model.uses_mrope,
        "not all layers of its model keep the whole prefix (for sliding windows and chunked attention start it with "
        "--disable-hybrid-kv-cache-manager)": [str(group.coverage) for group in facts.groups] != ["all"],
        f"its chunks have the format {', '.join(facts.formats)}, not canonical": set(facts.formats) != {"canonical"},
        "its KV cache has not the model's dtype (--kv-cache-dtype)": vllm_config.cache_config.cache_dtype
        not in ("auto", str(model.dtype).removeprefix("torch.")),
        "vLLM's newer model runner computes its model (start it with VLLM_USE_V2_MODEL_RUNNER=0)": bool(
            vllm_config.use_v2_model_runner
        ),
    }
    return "; ".join(f"this engine does not blend: {reason}" for reason, holds in reasons.items() if holds)


def limits_of(vllm_config: Any) -> Limits:
    scheduler = vllm_config.scheduler_config
    return Limits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, vllm_config.model_config.max_model_len)


class KVBlendConnector(KVTiersConnector):
    """One object in the scheduler, one in the worker."""

    prom_metrics = BlendMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._blend: BlendScheduler | None = None
        self._blend_worker: BlendWorker | None = None
        self._blend_figures: CounterDeltas | None = None
        self._blend_lost: set[str] = set()  # requests that wait for a worker that cannot blend
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER:
            watch_runner()
            return
        self._why_not = why_not_blended(vllm_config, self._engine)
        half, cache, read = self._scheduler, self._engine.cache, self._read
        if half is not None and cache is not None:
            self._blend = BlendScheduler(cache, half.shape, limits_of(vllm_config), read, name=self._engine.id)
            self._blend_figures = CounterDeltas(self._blend.counts, BLEND_FIGURES)

        def read_exact(request: Any) -> RequestTokens | Unsure | None:
            return None if self._is_blended(request) else read(request)

        self._read = read_exact

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._register_blend(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(connector_metadata, BlendMetadata):
            super().bind_connector_metadata(connector_metadata)
            return
        super().bind_connector_metadata(connector_metadata.exact)
        self._begin_blend(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        exact = super().get_transfer_results(finished_req_ids)
        finished, failed = self._advance_blend(finished_req_ids)
        if not finished and not failed:
            return exact
        return KVConnectorTransferResults(
            finished_sending=exact.finished_sending,
            finished_recving=(exact.finished_recving or set()) | finished | failed,
            failed_recving=(exact.failed_recving or set()) | failed,
        )

    # Scheduler half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._is_blended(request):
            return self._match_blend(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not self._is_blended(request):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        elif num_external_tokens:
            self._allocate_blend(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._with_steps(super().build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        failed = connector_output.failed_recving or set()
        super().update_connector_output(connector_output)
        self._end_blend(connector_output.finished_recving or (), failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._with_report(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._with_report(request, super().request_finished_all_groups(request, block_ids))

    def shutdown(self) -> None:
        self._stop_blend()
        super().shutdown()

    # Either half.

    def get_kv_connector_stats(self) -> Stats | None:
        return self._with_figures(super().get_kv_connector_stats())

    # The bodies of the hooks.

    @guarded(always(None), even_off=True)
    def _register_blend(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config, ranks = self._vllm_config, ranks_here()
        self._blend_worker = BlendWorker(ranks, refuse("this rank has no cache"))
        if self.off or self._worker is None or why_not_blended(config, self._engine):
            return
        groups = read_groups(config, self._kv_cache_config, kv_caches)
        assert isinstance(groups, list)  # they were bound
        (group,) = groups
        assert isinstance(group, LayerGroup)
        # Of layers that share KV the first one computes it.
        names = {id(tensor): name for name, tensor in reversed(kv_caches.items())}
        layers = config.compilation_config.static_forward_context
        filler = Filler(
            self._engine,
            group,
            {name: layers[name] for name in (names[id(tensor)] for tensor in group.tensors)},
            limits_of(config),
            ranks,
        )
        self._blend_worker = BlendWorker(ranks, filler.fill)

    @guarded(_lose_steps, even_off=True)
    def _begin_blend(self, sent: BlendMetadata) -> None:
        if self._blend_worker is None:
            _lose_steps(self, sent)
        else:
            self._blend_worker.add(sent.steps, sent.space_id)

    @guarded(always(None), even_off=True)
    def _stop_blend(self) -> None:
        if self._blend_worker is not None:
            self._blend_worker.give_up()

    @guarded(_lose_all, even_off=True)
    def _advance_blend(self, ended: set[str]) -> tuple[set[str], set[str]]:
        if self._blend_worker is None:
            return _lose_all(self)
        finished, failed = self._blend_worker.advance(ended, off=bool(self.off))
        lost, self._blend_lost = self._blend_lost, set()
        return finished, failed | lost

    @guarded(always(False))
    def _is_blended(self, request: Any) -> bool:
        if self._blend is None or self._scheduler is None:
            return False
        if not self._blend.knows(request.request_id):
            self._follow_weights()
        return self._blend.read(request, self._scheduler.space, self._why_not)

    @guarded(always((0, False)))
    def _match_blend(self, request: Any, computed: int) -> tuple[int | None, bool]:
        assert self._blend is not None
        matched = self._blend.match(request, computed)
        return matched, bool(matched)

    @guarded(_refuse_request)
    def _allocate_blend(self, request: Any, blocks: Any, external_tokens: int) -> None:
        assert self._blend is not None
        self._blend.allocated(request.request_id, blocks.get_block_ids()[0], external_tokens)

    @guarded(_without_steps, even_off=True)
    def _with_steps(self, exact: KVConnectorMetadata) -> KVConnectorMetadata:
        if self._blend is None:
            return exact
        self._blend.make_exact()
        if not self._blend.is_loading:
            return exact
        space = None if self._scheduler is None else self._scheduler.space
        return BlendMetadata(exact, self._blend.take_steps(), b"" if space is None else space.fingerprint)

    @guarded(always(None), even_off=True)
    def _end_blend(self, finished: Iterable[str], failed: set[str]) -> None:
        if self._blend is not None:
            for request_id in finished:
                self._blend.ended(request_id, failed=request_id in failed)

    @guarded(lambda _self, exact: exact, even_off=True)
    def _with_figures(self, exact: Stats | None) -> Stats | None:
        figures = {} if self._blend_figures is None else self._blend_figures.take()
        return Stats((exact.data if exact else {}) | figures) if figures else exact

    @guarded(lambda self, _request, answer: answer, even_off=True)
    def _with_report(self, request: Any, answer: tuple[bool, Any]) -> tuple[bool, dict[str, Any] | None]:
        report = None if self._blend is None else self._blend.finished(request.request_id)
        waits, params = answer
        return (waits, (params or {}) | report) if report else answer
