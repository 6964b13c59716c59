"""vLLM's memory and configuration, as `kv_tiers.attach.engine` takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kv_cuda.bind import bind_groups, table_tokens_of
from kv_cuda.canary import Refusal
from kv_cuda.judge.verdict import demand
from kv_tiers.attach.chunk_size import fitted
from kv_tiers.attach.connect import Format
from kv_tiers.attach.engine import Engine, EngineFacts
from kv_tiers.attach.neighbours import KeptFormat
from kv_tiers.settings import Setting, Settings

from kv_vllm.layouts import read_groups
from kv_vllm.parallel import rank_share, replica_of
from kv_vllm.translate import served_model


def bind_worker(
    engine: Engine,
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    in_force: Sequence[Setting] = (),
) -> None:
    """Prove the layout of vLLM's cache and open ours. `off` says why not, if it cannot be proved.

    in_force: as `load` returns it beside the settings. It says whether the length of a chunk was chosen.

    Raises:
        ConfigError: the settings do not fit this engine or this machine.
    """
    groups = read_groups(vllm_config, kv_cache_config, kv_caches)
    if isinstance(groups, Refusal):
        return engine.refuse(groups.reason)
    has_states = any(group.coverage.kind == "state" for group in groups)
    settings = fitted(settings, in_force, [table_tokens_of(group) for group in groups], has_states=has_states)
    bound = bind_groups(groups, settings.format, settings.chunk_tokens)
    if isinstance(bound, Refusal):
        return engine.refuse(bound.reason)
    if settings.judge.max_kl:
        demand(settings.judge.verdict, settings.judge.max_kl, bound.formats)
    share, transfer = rank_share(vllm_config), vllm_config.kv_transfer_config
    facts = EngineFacts(
        chunk_tokens=settings.chunk_tokens,
        groups=bound.shapes,
        shards=share.shards,
        kv_dtype=bound.kv_dtype,
        kv_scales=bound.kv_scales,
        formats=tuple(chunk_format.kind for chunk_format in bound.formats),
        layouts=tuple(layout.name for layout in bound.layouts),
        is_queued=any(copier.is_queued for copier in bound.copiers),
    )
    model = served_model(vllm_config, kv_scales=facts.kv_scales)
    return engine.bind_worker(
        settings,
        facts,
        Format(bound.group_bytes, bound.fingerprint),
        KeptFormat.of(model, bound.kind, bound.fingerprint),
        bound.copiers,
        share=share,
        in_process=in_one_process(vllm_config),
        replica=replica_of(vllm_config),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )


def in_one_process(vllm_config: Any) -> bool:
    """Whether vLLM's worker and scheduler share a process: its `uni` executor, by whatever name."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        return issubclass(backend, UniProcExecutor) and parallel.world_size == 1
    return parallel.world_size == 1 and (backend in (None, "uni") or str(backend).endswith(".UniProcExecutor"))
