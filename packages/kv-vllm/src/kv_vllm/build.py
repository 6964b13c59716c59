"""Objects out of settings: one engine's cache, its key space, and both halves around it.

The workers come first: only they see the engine's cache, and only after the canary is it known how a chunk's bytes lie
and hence what the keys are. vLLM makes the scheduler's connector after that. Where both are in one process they share
one `LocalCache`, found by vLLM's engine id; where they are apart each worker registers at the engine's server, and the
scheduler reads there what it must know.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_core.connect.scheduler import ConnectShape, SchedulerHalf
from kv_core.connect.worker import WorkerHalf
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_core.log import limited_logger
from kv_cuda import Copier, PagedLayout, make_copier
from kv_cuda.canary import LayerGroup, Proof, Refusal, prove
from kv_tiers import HostPool, LocalCache
from kv_tiers.attach.connect import Format, open_here, open_there, workers_of
from kv_tiers.attach.identity import LiveKeySpace, LiveWeights
from kv_tiers.attach.neighbours import KeptFormat, warn_of_other_formats
from kv_tiers.events.bus import EventBus
from kv_tiers.server.launch import ServerProcess
from kv_tiers.server.mapped import MappedPool
from kv_tiers.server.remote_cache import RemoteCache
from kv_tiers.settings import Settings

from kv_vllm.layouts import read_groups
from kv_vllm.parallel import ALONE, RankShare, rank_share
from kv_vllm.translate import served_model
from kv_vllm.weights import Weights

_log = limited_logger(__name__)


@dataclass(slots=True)
class Engine:
    """What this process has of one vLLM engine: its cache, and the half or halves on it.

    off: why nothing is loaded or stored; empty while it works. Both halves look at it before they do anything.
    faults: every reason for which it was ever turned off.
    bus: of a cache in this process.
    server: the private one, in the process that started it.
    name_weights: finds out which weights the engine has; for the process of the scheduler half alone.
    """

    id: str
    off: str = ""
    cache: LocalCache | RemoteCache | None = None
    bus: EventBus | None = None
    server: ServerProcess | None = None
    shape: ConnectShape | None = None
    described: str = ""
    name_weights: Callable[[], Weights] | None = None
    formats: tuple[ChunkFormat, ...] = ()
    layouts: tuple[PagedLayout, ...] = ()
    copiers: tuple[Copier, ...] = ()
    scheduler: SchedulerHalf | None = None
    worker: WorkerHalf | None = None
    share: RankShare = ALONE
    weights: Weights | None = None
    faults: list[str] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)
    _summary: tuple[int, ...] = (0, 0, 0, 0)

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
        self.worker = WorkerHalf(
            self.cache,
            self.shape,
            self.copiers,
            shard=self.share.shard,
            name=self.id,
            rank=self.share.rank,
            stores=self.share.stores,
        )
        self.roles.add("WORKER")
        return self.worker

    def start_scheduler(self) -> SchedulerHalf:
        assert self.cache is not None and self.shape is not None and self.name_weights is not None
        self.weights = self.name_weights()
        self.scheduler = SchedulerHalf(self.cache, self.shape, name=self.id)
        self.roles.add("SCHEDULER")
        _log.info("the KV cache is on: %s", self.described)
        return self.scheduler

    def log_summary(self) -> None:
        """What has come of a cache in this process so far, in one line. A private server says so itself at its end."""
        if not isinstance(self.cache, LocalCache):
            return
        counts = self.cache.counts()
        said = (counts.lookups, counts.chunks_hit, counts.chunks_asked, counts.chunks_committed)
        if said != self._summary:
            self._summary = said
            _log.info("the KV cache: %d lookups found %d of %d chunks, and %d chunks entered the pool", *said)


_ENGINES: dict[str, Engine] = {}
"""The engines of this process by vLLM's id. A process has one, or a few in tests."""


def engines() -> Mapping[str, Engine]:
    return _ENGINES


def engine(engine_id: str) -> Engine:
    """The engine's entry, made when it is first asked for."""
    return _ENGINES.setdefault(engine_id, Engine(engine_id))


def in_one_process(vllm_config: Any) -> bool:
    """Whether vLLM's worker and scheduler share a process: its `uni` executor, by whatever name."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    parallel = vllm_config.parallel_config
    backend = parallel.distributed_executor_backend
    if isinstance(backend, type):
        return issubclass(backend, UniProcExecutor) and parallel.world_size == 1
    return parallel.world_size == 1 and (backend in (None, "uni") or str(backend).endswith(".UniProcExecutor"))


def bind_worker(
    bound: Engine, vllm_config: Any, kv_cache_config: Any, settings: Settings, kv_caches: Mapping[str, torch.Tensor]
) -> None:
    """Prove the layout of the engine's cache and make ours. `off` says why not, if it cannot be proved.

    Raises:
        ConfigError: the settings do not fit this engine or this machine.
    """
    groups = read_groups(vllm_config, kv_cache_config, kv_caches)
    if isinstance(groups, Refusal):
        return bound.refuse(groups.reason)
    formats: list[ChunkFormat] = []
    copiers: list[Copier] = []
    proofs: list[Proof] = []
    for group in groups:
        _check_blocks(settings.chunk_tokens, group)
        proved = prove(group, settings.format, settings.chunk_tokens)
        if isinstance(proved, Refusal):
            return bound.refuse(proved.reason)
        formats.append(proved.format)
        proofs.append(proved)
        copiers.append(make_copier(proved.layout, group.tensors, proved.format))
        _log.info("the canary proved %s of %d layers", proved.description, len(group.tensors))
    if len({chunk_format.nbytes for chunk_format in formats}) != 1:
        return bound.refuse("the groups' chunks differ in size, which one pool of equal slots cannot hold")
    bound.share = rank_share(vllm_config)
    fingerprint = "-".join(chunk_format.fingerprint for chunk_format in formats)
    chunks = Format(formats[0].nbytes, fingerprint)
    known = {
        "rank": str(bound.share.rank),
        "shards": str(bound.share.shards),
        "chunk_tokens": str(settings.chunk_tokens),
        "block_tokens": " ".join(str(group.block_tokens) for group in groups),
        "kv_dtype": str(groups[0].tensors[0].dtype) if formats[0].kind == "blocks" else proofs[0].layout.dtype,
        "kv_scales": _scales_digest(groups),
        "described": "; ".join(proof.description for proof in proofs),
    }
    kept = KeptFormat.of(served_model(vllm_config, kv_scales=known["kv_scales"]), formats[0].kind, fingerprint)
    known |= kept.facts()
    if bound.share.rank == 0:
        warn_of_other_formats(settings, kept)
    if in_one_process(vllm_config) and not settings.server.socket:
        bound.cache, bound.bus = open_here(settings, chunks)
    else:
        try:
            bound.cache, bound.server = open_there(
                settings,
                chunks,
                engine_id=bound.id,
                rank=bound.share.rank,
                facts=known,
                on_new_pool=lambda pool: _exchange_pool(bound, pool),
            )
        except ConfigError as error:
            if bound.share.rank == 0:
                raise  # the user can mend it
            return bound.refuse(f"rank {bound.share.rank} finds no cache server: {error}")
    _make_shape(bound, vllm_config, settings, chunks, known)
    bound.described = _described(bound, settings, known)
    bound.formats, bound.layouts, bound.copiers = (
        tuple(formats),
        tuple(proof.layout for proof in proofs),
        tuple(copiers),
    )
    _attach(bound, bound.cache.pool)
    return None


def bind_scheduler(bound: Engine, vllm_config: Any, settings: Settings) -> None:
    """Meet the workers, which are in other processes, at the engine's server. `off` says why not, if there is nothing.

    Raises:
        ConfigError: the server is another user's, or refuses us.
    """
    ranks = rank_share(vllm_config).ranks
    workers = workers_of(settings, bound.id)
    if len(workers) < ranks:
        return bound.refuse(f"{len(workers)} of {ranks} workers have a cache; the log of the others says why")
    chunks = {Format(worker.chunk_bytes, worker.fingerprint) for worker in workers}
    if len(chunks) > 1:
        return bound.refuse("the ranks' chunks are of different formats")
    (only,) = chunks
    bound.cache, _ = open_there(settings, only, engine_id=bound.id, rank=None, facts={})
    _make_shape(bound, vllm_config, settings, only, workers[0].facts)
    bound.described = _described(bound, settings, workers[0].facts)
    return None


def release(engine_id: str, role: str) -> None:
    """One half of the engine has shut down; with the last one the pool goes too."""
    bound = _ENGINES.get(engine_id)
    if bound is None:
        return
    bound.roles.discard(role)
    if role == "WORKER" and bound.worker is not None:
        bound.worker.close()
    if role == "SCHEDULER":
        bound.log_summary()
        if bound.weights is not None:
            bound.weights.close()
    if not bound.roles:
        del _ENGINES[engine_id]
        if bound.cache is not None:
            for copier in bound.copiers:
                copier.detach(bound.cache.pool.name)
            try:
                bound.cache.close()
            except BufferError as error:  # whoever still looks at the pool keeps it mapped; the engine is going anyway
                _log.warning("the host pool stays mapped: %s", error)
        if bound.bus is not None:
            bound.bus.close()
        if bound.server is not None:
            bound.server.stop()


def _scales_digest(groups: Sequence[LayerGroup]) -> str:
    """By what the numbers of a quantised cache are to be multiplied; "" where they are what they say."""
    scales = [group.scales for group in groups]
    if all(pair == (1.0, 1.0) for of_group in scales for pair in of_group):
        return ""
    return hashlib.sha256(json.dumps(scales).encode()).hexdigest()[:32]


def _make_shape(bound: Engine, vllm_config: Any, settings: Settings, chunks: Format, known: Mapping[str, str]) -> None:
    scheme = settings.scheme()
    shards = int(known["shards"])
    transfer = vllm_config.kv_transfer_config
    bound.shape = ConnectShape(
        scheme=scheme,
        space=None,
        block_tokens=tuple(map(int, known["block_tokens"].split())),
        shards=shards,
        loads=transfer.is_kv_consumer,
        stores=transfer.is_kv_producer,
    )

    def name_weights() -> Weights:
        space = LiveKeySpace(
            LiveWeights(served_model(vllm_config, kv_scales=known["kv_scales"])),
            kv_dtype=known["kv_dtype"],
            format_fingerprint=chunks.fingerprint,
            world=shards,
            chain=scheme.name,
        )
        return Weights(space, vllm_config)

    bound.name_weights = name_weights


def _described(bound: Engine, settings: Settings, known: Mapping[str, str]) -> str:
    """In a line for the log: what is kept, where, and what vLLM lets us do with it."""
    assert bound.cache is not None and bound.shape is not None
    if settings.server.socket:
        place = f"the server at {settings.server.socket}"
    else:
        pool = bound.cache.pool
        tiers = ", ".join(str(tier.get("type")) for tier in settings.tiers)
        place = f"a pool of {settings.host.capacity_bytes} ({pool.slots} chunks)" + (f" above {tiers}" if tiers else "")
    limits = [] if bound.shape.loads else ["kv_role is kv_producer, so nothing is loaded"]
    limits += [] if bound.shape.stores else ["kv_role is kv_consumer, so nothing is stored"]
    return "; ".join([f"chunks of {settings.chunk_tokens} tokens in {place}", known["described"], *limits])


def _attach(bound: Engine, pool: HostPool | MappedPool) -> None:
    for copier in bound.copiers:
        copier.attach(pool.name, pool.view)


def _exchange_pool(bound: Engine, pool: MappedPool) -> None:
    """The server was started anew. Copies on the CPU are over before anything else is asked of it."""
    assert bound.cache is not None
    for copier in bound.copiers:
        copier.detach(bound.cache.pool.name)
    _attach(bound, pool)


def _check_blocks(chunk_tokens: int, group: LayerGroup) -> None:
    if chunk_tokens % group.block_tokens:
        nearest = max(1, round(chunk_tokens / group.block_tokens)) * group.block_tokens
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not a multiple of the engine's block of {group.block_tokens} tokens; "
            f'write "chunk_tokens":{nearest} in kv_connector_extra_config'
        )
