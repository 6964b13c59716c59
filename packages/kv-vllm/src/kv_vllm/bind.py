"""vLLM's memory and configuration, translated for `kv_connect.engine`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from kv_connect.engine import Engine, EngineFacts, fitted
from kv_connect.neighbours import StoredFormat
from kv_connect.open_cache import Format
from kv_core.device import FileReader
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_core.plugins import extra_needed
from kv_cuda.bind import BoundGroups, bind_groups, table_tokens_of
from kv_cuda.canary import Refusal
from kv_tiers.approximate import is_approximate, uses_calibration
from kv_tiers.settings import Setting, Settings
from kv_tiers.verdict import demand

from kv_vllm.handover import is_one_of_several
from kv_vllm.layerwise import LayerPlace
from kv_vllm.layouts import read_groups
from kv_vllm.parallel import draft_model, guesses_from_hidden_states, rank_share, replica_of
from kv_vllm.served import served_model

_log = limited_logger(__name__)


def check_lazy(settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse to put stores off where vLLM could lose a chunk unseen, or where others wait for it.

    Raises:
        ConfigError: what stands in the way. Called by a connector's constructor.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if settings.store != "lazy":
        return
    parallel, transfer, events = (
        getattr(vllm_config, f"{name}_config") for name in ("parallel", "kv_transfer", "kv_events")
    )
    kinds = [type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    reasons = {
        "prefix caching is off, so that vLLM keeps no blocks": not vllm_config.cache_config.enable_prefix_caching,
        "the model has several kinds of layers, or others than full attention": len(kinds) != 1
        or kinds[0] not in (FullAttentionSpec, MLAAttentionSpec)
        or kv_cache_config.needs_kv_cache_zeroing,
        "a draft model computes layers of its own": draft_model(vllm_config) is not None,
        "there are pipeline stages": parallel.pipeline_parallel_size > 1,
        "the ranks are on several nodes": parallel.nnodes_within_dp > 1,
        f"kv_role is {transfer.kv_role}, not kv_both": not (transfer.is_kv_producer and transfer.is_kv_consumer),
        "other connectors fill blocks, too (MultiConnector)": is_one_of_several(),
        "KV events would name chunks too late": events is not None and events.enable_kv_cache_events,
        f"load is {settings.load}, not async": settings.load != "async",
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise ConfigError(f"store: lazy is not possible here: {'; '.join(found)}. Set store: async")


def bind_worker(
    engine: Engine,
    vllm_config: Any,
    kv_cache_config: Any,
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    in_force: Sequence[Setting] = (),
) -> dict[str, LayerPlace]:
    """Prove the layout of vLLM's cache and open ours. If it cannot be proved, `off` gives the reason.

    Returns the place of each layer, by vLLM's names. Layers that share KV have one place, the first that computes it.

    in_force: as `load` returns it with the settings. It shows whether the chunk length was set explicitly.

    Raises:
        ConfigError: the settings do not fit this engine or this machine.
    """
    groups = read_groups(vllm_config, kv_cache_config, kv_caches)
    if isinstance(groups, Refusal):
        engine.refuse(groups.reason)
        return {}
    has_states = any(group.coverage.kind == "state" for group in groups)
    if settings.store == "layerwise" and vllm_config.parallel_config.use_ubatching:
        _log.warning(
            "store: layerwise is not used, chunks are stored after the step: each step is computed in microbatches"
        )
        settings = msgspec.structs.replace(settings, store="async")
    settings = fitted(settings, in_force, [table_tokens_of(group) for group in groups], has_states=has_states)
    bound = bind_groups(groups, settings.format, settings.chunk_tokens)
    if isinstance(bound, Refusal):
        engine.refuse(bound.reason)
        return {}
    share, transfer = rank_share(vllm_config, kv_cache_config), vllm_config.kv_transfer_config
    codec, judged_formats, fingerprint = "", bound.formats, bound.fingerprint
    if uses_calibration(settings.tiers):
        with extra_needed("codec kvtc", "kv-vllm[codecs]"):
            from kv_vllm.calibrated import bind_calibration
        codec, judged_formats, fingerprint = bind_calibration(vllm_config, settings.tiers, bound, share)
    approximate = is_approximate(settings.tiers)
    demand(settings.judge.verdict, settings.judge.max_kl, judged_formats, approximate=approximate, codec=codec)
    facts = EngineFacts(
        chunk_tokens=settings.chunk_tokens,
        groups=bound.shapes,
        shards=share.shards,
        kv_dtype=bound.kv_dtype,
        kv_scales=bound.kv_scales,
        formats=tuple(chunk_format.kind for chunk_format in bound.formats),
        layouts=tuple(layout.name for layout in bound.layouts),
        stores_behind=any(copier.stores_behind for copier in bound.copiers),
        shifted=guesses_from_hidden_states(vllm_config),
        has_drafts=draft_model(vllm_config) is not None,
    )
    model = served_model(vllm_config, kv_scales=facts.kv_scales)
    engine.bind_worker(
        settings,
        facts,
        Format(bound.group_bytes, fingerprint),
        StoredFormat.of(model, bound.kind, fingerprint),
        bound.copiers,
        share=share,
        in_process=in_one_process(vllm_config),
        replica=replica_of(vllm_config),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
        make_reader=lambda: _reader(bound, settings),
    )
    places = {
        id(tensor): LayerPlace(number, index % group.layout.layers)
        for number, group in enumerate(bound.groups)
        for index, tensor in enumerate(group.tensors)
    }
    return {name: places[id(tensor)] for name, tensor in kv_caches.items() if id(tensor) in places}


def _reader(bound: BoundGroups, settings: Settings) -> FileReader:
    from kv_cuda.files.direct import ThreadReader

    (group,) = bound.groups
    (directory,) = [tier.get("directory") for tier in settings.tiers if tier.get("type") == "gds"]
    first = directory[0] if isinstance(directory, list) and directory else directory
    return ThreadReader(group.layout, group.tensors, group.format, Path(str(first)))


def bind_scheduler(engine: Engine, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
    """Join the workers of this node, which are in other processes. If they have no cache, `off` gives the reason.

    Raises:
        ConfigError: the server belongs to another user, or refuses us.
    """
    transfer = vllm_config.kv_transfer_config
    engine.bind_scheduler(
        settings,
        rank_share(vllm_config, kv_cache_config),
        replica=replica_of(vllm_config),
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )


def warn_of_failure_policy(policy: str) -> None:
    """Warn of vLLM's default, with which a failed load is not a miss."""
    if policy != "recompute":
        _log.warning(
            "kv_load_failure_policy is %r: a request whose load fails ends in an error. "
            'Add "kv_load_failure_policy":"recompute" to --kv-transfer-config and it is computed instead.',
            policy,
        )


def in_one_process(vllm_config: Any) -> bool:
    """Whether vLLM's worker and scheduler share a process: its `uni` executor, however it is named."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        return issubclass(backend, UniProcExecutor) and parallel.world_size == 1
    return parallel.world_size == 1 and (backend in (None, "uni") or str(backend).endswith(".UniProcExecutor"))
