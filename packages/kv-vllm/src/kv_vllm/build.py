"""Objects out of settings: one engine's cache, its key space, and both halves around it.

Scheduler and worker share one process here (tensor and pipeline parallel size 1), so they share one `LocalCache`, found
by vLLM's engine id. The worker comes first: only it sees the engine's cache, and only after the canary is it known how
a chunk's bytes lie and hence what the keys are. vLLM makes the scheduler's connector after that.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_core.connect.scheduler import ConnectShape, SchedulerHalf
from kv_core.connect.worker import WorkerHalf
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_cuda import CpuCopier
from kv_tiers import HostConfig, LocalCache, build_local_cache

from kv_vllm.canary import LayerGroup, Refusal, prove
from kv_vllm.config import Settings
from kv_vllm.identity import key_space
from kv_vllm.layouts import read_groups

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """One vLLM engine's cache and the halves on it.

    off: why nothing is loaded or stored; empty while it works. Both halves look at it before they do anything.
    faults: every reason for which it was ever turned off.
    """

    id: str
    off: str = ""
    cache: LocalCache | None = None
    shape: ConnectShape | None = None
    formats: tuple[ChunkFormat, ...] = ()
    copiers: tuple[CpuCopier, ...] = ()
    scheduler: SchedulerHalf | None = None
    worker: WorkerHalf | None = None
    faults: list[str] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        """Load and store nothing from now on. For faults of ours; an engine that was never served has `off` alone."""
        self.off = why
        self.faults.append(why)
        _log.error("the KV cache is off, the engine goes on without it: %s", why, exc_info=error)
        if self.scheduler is not None:
            self.scheduler.close()
        if self.worker is not None:
            self.worker.close()

    def refuse(self, why: str) -> None:
        """Never begin: this engine's cache cannot be proved, or its model cannot be cached."""
        self.off = why
        _log.error("the KV cache is off, nothing is loaded or stored: %s", why)

    def start_worker(self) -> WorkerHalf:
        assert self.cache is not None and self.shape is not None
        self.worker = WorkerHalf(self.cache, self.shape, self.copiers, shard=0, name=self.id)
        self.roles.add("WORKER")
        return self.worker

    def start_scheduler(self) -> SchedulerHalf:
        assert self.cache is not None and self.shape is not None
        self.scheduler = SchedulerHalf(self.cache, self.shape, name=self.id)
        self.roles.add("SCHEDULER")
        return self.scheduler


_ENGINES: dict[str, Engine] = {}
"""The engines of this process by vLLM's id. A process has one, or a few in tests."""


def engines() -> Mapping[str, Engine]:
    return _ENGINES


def engine(engine_id: str) -> Engine:
    """The engine's entry, made when it is first asked for."""
    return _ENGINES.setdefault(engine_id, Engine(engine_id))


def check_parallelism(vllm_config: Any) -> None:
    """Refuse what this release cannot share between processes.

    Raises:
        ConfigError: the engine has more than one rank.
    """
    ranks = vllm_config.parallel_config.world_size
    if ranks > 1:
        raise ConfigError(
            f"the engine has {ranks} ranks (tensor × pipeline parallel), and this release of kv-vllm keeps its cache "
            "inside one process; start with --tensor-parallel-size 1 --pipeline-parallel-size 1, or without it"
        )


def bind_worker(
    bound: Engine, vllm_config: Any, kv_cache_config: Any, settings: Settings, kv_caches: Mapping[str, torch.Tensor]
) -> None:
    """Prove the layout of the engine's cache and make ours. `off` says why not, if it cannot be proved.

    Raises:
        ConfigError: the settings do not fit this engine or this machine.
    """
    scheme = settings.scheme()
    groups = read_groups(vllm_config, kv_cache_config, kv_caches)
    if isinstance(groups, Refusal):
        return bound.refuse(groups.reason)
    formats: list[ChunkFormat] = []
    copiers: list[CpuCopier] = []
    for group in groups:
        _check_blocks(settings.chunk_tokens, group)
        proved = prove(group, settings.format, settings.chunk_tokens)
        if isinstance(proved, Refusal):
            return bound.refuse(proved.reason)
        formats.append(proved.format)
        copiers.append(CpuCopier(proved.layout, group.tensors, proved.format))
        _log.info("the canary proved %s of %d layers", proved.description, len(group.tensors))
    if len({chunk_format.nbytes for chunk_format in formats}) != 1:
        return bound.refuse("the groups' chunks differ in size, which one pool of equal slots cannot hold")
    bound.cache = build_local_cache(
        HostConfig(
            capacity_bytes=settings.host.capacity_bytes,
            name=settings.host.name,
            lease_s=settings.host.lease_s,
            policy=settings.host.policy,
        ),
        chunk_nbytes=formats[0].nbytes,
        fingerprint="-".join(chunk_format.fingerprint for chunk_format in formats),
        tiers=settings.tiers,
        cold=settings.cold,
    )
    bound.shape = ConnectShape(
        scheme=scheme,
        space=key_space(
            vllm_config,
            kv_dtype=formats[0].dtype if formats[0].kind == "canonical" else str(groups[0].tensors[0].dtype),
            format_fingerprint="-".join(chunk_format.fingerprint for chunk_format in formats),
            world=1,
            chain=scheme.name,
        ),
        block_tokens=tuple(group.block_tokens for group in groups),
    )
    bound.formats, bound.copiers = tuple(formats), tuple(copiers)
    for copier in copiers:
        copier.attach(bound.cache.pool.name, bound.cache.pool.view)
    return None


def release(engine_id: str, role: str) -> None:
    """One half of the engine has shut down; with the last one the pool goes too."""
    bound = _ENGINES.get(engine_id)
    if bound is None:
        return
    bound.roles.discard(role)
    if role == "WORKER" and bound.worker is not None:
        bound.worker.close()
    if not bound.roles:
        del _ENGINES[engine_id]
        if bound.cache is not None:
            for copier in bound.copiers:
                copier.detach(bound.cache.pool.name)
            try:
                bound.cache.close()
            except BufferError as error:  # whoever still looks at the pool keeps it mapped; the engine is going anyway
                _log.warning("the host pool stays mapped: %s", error)


def _check_blocks(chunk_tokens: int, group: LayerGroup) -> None:
    if chunk_tokens % group.block_tokens:
        nearest = max(1, round(chunk_tokens / group.block_tokens)) * group.block_tokens
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not a multiple of the engine's block of {group.block_tokens} tokens; "
            f'write "chunk_tokens":{nearest} in kv_connector_extra_config'
        )
