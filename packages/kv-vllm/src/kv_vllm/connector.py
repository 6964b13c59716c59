"""The class that vLLM calls. Each method translates its arguments and makes one call; the logic is in
`kv_connect.halves`.

Loads are asynchronous in vLLM's sense (the second element of `get_num_new_matched_tokens` is True), except for those
that cannot fail where the settings enable layerwise loads (`kv_vllm.layerwise`). Stores begin in `wait_for_save`, or,
where the settings enable that, layer by layer before it. On a device with streams they continue after the step, and
their blocks are held in vLLM's block pool meanwhile (`kv_vllm.connector`); elsewhere they complete in `wait_for_save`.

No exception leaves a hook, except for the one that `kv_vllm.layerwise` explains: a bug of ours turns the cache off with
a traceback in the log, and the engine continues.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

import msgspec
import torch
from kv_connect.adapters import Unsure
from kv_connect.engine import engine_of, release
from kv_connect.guard import always, guarded
from kv_connect.halves.lazy_stores import LazyStores
from kv_connect.halves.request import RequestTokens
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StepPlan
from kv_connect.halves.stores import HeldBlocks
from kv_connect.halves.worker import WorkerHalf
from kv_connect.nodes import FromNode, ToNodes
from kv_connect.turns import Turns
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.settings import load
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kv_vllm.bind import bind_scheduler, bind_worker, check_lazy, in_one_process, warn_of_failure_policy
from kv_vllm.handover import answer_to_proxy, is_one_of_several, with_protocol
from kv_vllm.interface import check_interface
from kv_vllm.kv_events import ChunkEvents, hash_tokens_of
from kv_vllm.layerwise import LayerHooks, LayerwisePromised, LayerwiseRank, LayerwiseStep, RankAnswer
from kv_vllm.parallel import NodeMail, check_parallelism, draft_model
from kv_vllm.plugin import join_vllm_log
from kv_vllm.served import served_model, tags_of_groups
from kv_vllm.stats import OF_WORKER, OFF, CounterDeltas, HitSources, PromMetrics, SchedulerFigures, Stats
from kv_vllm.translate import Sessions, StepReader, has_ended_turn, request_reader, turns_of
from kv_vllm.trials import NO_TRIAL, TrialMessage, Trials
from kv_vllm.weights import VllmWeights, before_loading, note_resets

_log = limited_logger(__name__)

_NO_PLAN = StepPlan()
_IDLE_STEP_S = 0.0005
_SUMMARY_EVERY_S = 60.0
_MAX_FAILURES = 32
"""Failing loads cost more than none, and a worker in another process whose cache is off cannot report it otherwise."""
_MAX_UNPROCESSED = 1024
"""Reports that are kept while something raises each time that they are handled."""


class PoolBlocks:
    """A `kv_connect.halves.stores.EngineBlocks` of vLLM's `BlockPool`.

    To vLLM a held block looks like one that another request shares. So it is not reused, whatever becomes of the
    request that filled it, and it stays in vLLM's own prefix cache.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def is_ours_alone(self, block: int) -> bool:
        return bool(self._pool.blocks[block].ref_cnt == 1)

    def hash_of(self, block: int) -> Hashable | None:
        """vLLM's hash of what this block holds, once the steps scheduled so far are computed."""
        block_hash: Hashable | None = self._pool.blocks[block].block_hash
        return block_hash

    def before_reuse(self, call: Callable[[Iterable[int]], None]) -> None:
        """Have blocks reported that vLLM is about to give to a request, while it still has their hashes."""
        give = self._pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            free = self._pool.free_block_queue.iter_blocks_after(None)
            call(block.block_id for block in islice(free, num_blocks))
            return give(num_blocks)

        self._pool.get_new_blocks = get_new_blocks


@dataclass(eq=False)
class KVTiersMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """A step plan for the workers, as plain data if they are in other processes; None if it contains nothing but its
    number.

    waiting: requests that wait until their load is reported. Sent next to the plan, so that a worker that cannot read
        the plan can answer them too.
    number: the plan's `StepPlan.number`, which such a worker acknowledges too.
    layerwise: the step's layerwise loads, as such a worker needs them, and, for every worker, the scheduler's pool.
    to_nodes: in an engine over several nodes, the scheduler's message to the other nodes.
    trials: which stores may be committed, where other connectors fill blocks too.
    """

    plan: Any
    waiting: tuple[str, ...]
    number: int
    layerwise: LayerwiseStep
    to_nodes: ToNodes | None
    trials: TrialMessage = NO_TRIAL


@dataclass(eq=False)
class Acknowledged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """The workers' completions.

    through: by rank, the number of the latest plan that was read, together with all before it.
    layerwise: by rank, its report on layerwise loads.
    from_nodes: in an engine over several nodes, the other nodes' answers.
    trial: the number of the step that this is the output of, if it is on trial.
    """

    through: dict[int, int]
    layerwise: dict[int, RankAnswer] = field(default_factory=dict)
    from_nodes: tuple[FromNode, ...] = ()
    trial: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Acknowledged":
        layerwise = self.layerwise | other.layerwise
        from_nodes, trial = self.from_nodes + other.from_nodes, max(self.trial, other.trial)
        return Acknowledged(self.through | other.through, layerwise, from_nodes, trial)


def _all_failed(self: "KVTiersConnector", *_arguments: Any) -> KVConnectorTransferResults:
    """Report a failed load to every request that waits for one, and whose blocks no copy writes to any more."""
    filling = frozenset() if self._engine.worker is None else self._engine.worker.filling
    failed, self._unanswered = self._unanswered - filling, self._unanswered & filling
    return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=set(failed))


def _refuse_unplanned(self: "KVTiersConnector", *_arguments: Any) -> KVConnectorMetadata:
    """Requests that were promised a load wait for it, so a load that is not planned is refused explicitly."""
    number = 0 if self._held is None else self._held.number
    plan = StepPlan(refused=tuple(sorted(self._unplanned)), number=number)
    message = self._message(plan, plan.to_plain(), plan.refused)
    self._unplanned.clear()
    return message


def _acknowledge_all(self: "KVTiersConnector") -> Acknowledged:
    """No copy reads any block: those in flight were waited for when the cache was turned off."""
    return Acknowledged({self._engine.share.rank: self._plan_number}, trial=self._trial)


def _last_figures(self: "KVTiersConnector") -> Stats | None:
    """The scheduler half reports once that the cache is off."""
    figures, self._figures = self._figures, None
    return Stats(dict(OFF)) if isinstance(figures, SchedulerFigures) else None


def _last_events(self: "KVTiersConnector") -> Iterable[BlockStored | BlockRemoved]:
    """Nothing is served from the pool any more."""
    events, self._events = self._events, None
    return () if events is None else events.end()


def _unknown_sources(self: "KVTiersConnector", request: Any, tokens: int) -> dict[CacheHitSource, int]:
    return self._sources.of({}, tokens)


class KVTiersConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's connector to the tiers. One object in the scheduler, one in each worker."""

    prom_metrics: ClassVar[type[PromMetrics]] = PromMetrics

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ConfigError for settings that cannot be honoured: better no engine than one with a different cache."""
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        transfer = vllm_config.kv_transfer_config
        settings, self._in_force = load(transfer.kv_connector_extra_config, os.environ)
        self._settings = with_protocol(settings)
        check_parallelism(vllm_config, self._settings)
        check_lazy(self._settings, vllm_config, kv_cache_config)
        self._engine = engine_of(str(transfer.engine_id))
        self._read = request_reader(vllm_config, kv_cache_config, self._settings, self._engine)
        if not self.off and (why := check_interface()):
            self._engine.refuse(why)
        self._scheduler: SchedulerHalf | None = None
        self._steps: StepReader | None = None
        self._worker: WorkerHalf | None = None
        self._requests: dict[str, tuple[Any, RequestTokens]] = {}
        self._sessions = Sessions()
        self._turns = Turns()
        self._kv_cache_manager: Any = None
        self._held: HeldBlocks | None = None
        self._in_process = in_one_process(vllm_config)
        self._plan_number = self._acknowledged = 0  # numbers of the last plan received, and of the last one reported
        self._sources = HitSources(self._settings)
        self._events: ChunkEvents | None = None
        self._nodes = NodeMail(self._engine, vllm_config, kv_cache_config)
        self._promised = LayerwisePromised(self._engine)
        self._trials, self._trial = Trials(is_alone=False), 0  # until the number of ranks is known
        self._layerwise = LayerwiseRank(self._engine, is_asynchronous=vllm_config.scheduler_config.async_scheduling)
        self._layers = LayerHooks(self._engine)
        self._unplanned: set[str] = set()
        # With failed blocks.
        self._unprocessed: deque[tuple[Acknowledged | None, set[int]]] = deque(maxlen=_MAX_UNPROCESSED)
        self._unanswered: set[str] = set()
        self._step = _NO_PLAN
        self._caller_error: BaseException | None = None  # which the engine's caller was handling when the step began
        self._has_drafts = draft_model(vllm_config) is not None
        self._summary_at_s = 0.0
        self._figures: SchedulerFigures | CounterDeltas | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(transfer.kv_load_failure_policy)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a miss

    @property
    def off(self) -> str:
        """Why the cache is off; empty while it is on. One answer for both halves of the engine."""
        return self._engine.off

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        self._engine.turn_off(why, error)

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step, self._caller_error = _NO_PLAN, sys.exc_info()[1]
        if isinstance(connector_metadata, KVTiersMetadata):
            # Also when the cache is off: these requests wait until they are reported.
            self._unanswered.update(connector_metadata.waiting)
            self._plan_number, self._trial = connector_metadata.number, connector_metadata.trials.trial
            self._begin_step(connector_metadata)

    @guarded(always(None))
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._layerwise.blocks:  # called by every layer in every step
            self._layers.wait_for(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._step.stores:  # likewise
            self._layers.computed(layer_name, self._step)

    @guarded(always(None))
    def wait_for_save(self) -> None:
        self._end_step()

    @guarded(_all_failed)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return _all_failed(self)
        if not (self._has_drafts and self._engine.share.is_in_last_stage):
            # While tokens are guessed, vLLM's older runner calls `wait_for_save` after this and the other reports, so
            # that a draft model can be stored too, and on pipeline stages before the last, which have none, not at all.
            self._end_step()
        report = self._worker.poll()
        self._unanswered -= report.finished
        return KVConnectorTransferResults(finished_recving=set(report.finished), failed_recving=set(report.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._layerwise.take_unfilled()

    @guarded(_acknowledge_all, even_off=True)
    def build_connector_worker_meta(self) -> Acknowledged | None:
        through, layerwise, from_nodes = self._stored_through(), self._layerwise.news(), self._nodes.answers()
        trial, self._trial = self._trial, 0
        if through == self._acknowledged and layerwise is None and not from_nodes and not trial:
            return None
        self._acknowledged, rank = through, self._engine.share.rank
        return Acknowledged({rank: through}, {} if layerwise is None else {rank: layerwise}, from_nodes, trial)

    # Either half.

    @guarded(_last_figures)
    def get_kv_connector_stats(self) -> Stats | None:
        if self._scheduler is not None and self._scheduler.costs is not None:
            self._scheduler.costs.step_ended()  # vLLM's scheduler calls this once for each step's output, in order
        figures = {} if self._figures is None else self._figures.take()
        return Stats(figures) if figures else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return cls.prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler half.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._start_events()
        self._start_holding()
        self._defer_stores()
        self._note_resets()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        settings, _ = load(extra_config, os.environ)
        return settings.load != "async" or settings.store == "layerwise"  # a full graph skips the hooks of layers

    @guarded(always(None))
    def on_new_request(self, request: Any) -> None:
        if request.kv_hints is None and request.kv_transfer_params is None:
            return
        tokens = self._tokens_of(request)
        if self._scheduler is not None and isinstance(tokens, RequestTokens) and tokens.controls.is_prefetched:
            self._follow_weights()
            self._scheduler.prefetch(tokens)

    @guarded(always((0, False)))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._follow_weights(settle=True)
        self._trials.looked_up(request.request_id, num_computed_tokens)
        tokens = self._tokens_of(request)
        if isinstance(tokens, Unsure):
            return None, False
        if self._scheduler is None or tokens is None:
            return 0, False
        matched = self._scheduler.match(tokens, num_computed_tokens)
        # vLLM ends a forward pass at this boundary, as at one that it finds among its own blocks.
        junction = self._scheduler.junction(request.request_id)
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, junction)
        is_layerwise = self._scheduler.is_layerwise(request.request_id)
        self._promised.promise(request.request_id, is_layerwise=is_layerwise)
        # None: vLLM leaves the request waiting, and asks again in the next step.
        return matched, bool(matched) and not is_layerwise

    @guarded(_unknown_sources)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        by_tier = {} if self._scheduler is None else self._scheduler.sources(request.request_id)
        return self._sources.of(by_tier, num_external_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and request.request_id in self._promised.requests:
            # Said before anything can fail: vLLM computes with these blocks in this step.
            self._promised.accepted.add(request.request_id)
            self._promised.blocks.update(blocks.get_block_ids()[0])
        elif num_external_tokens:
            self._unplanned.add(request.request_id)
        self._allocated(request, blocks, num_external_tokens)

    @guarded(_refuse_unplanned)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = self._build_step(scheduler_output)
        # Messages are taken last: were they taken before something fails here, `_refuse_unplanned` would lack them.
        if not (plan.loads or plan.stores or plan.overwritten or plan.refused or self._unplanned):  # most steps
            number = 0 if self._held is None else self._held.number
            return self._message(replace(plan, number=number), None)
        planned = {load.request_id for load in plan.loads if not load.extents}.union(plan.refused)
        if self._unplanned - planned:
            plan = replace(plan, refused=(*plan.refused, *sorted(self._unplanned - planned)))
        waiting = tuple(sorted(planned | self._unplanned))
        if self._held is not None:
            plan = self._held.hold(plan)
        sent = plan if self._in_process else plan.to_plain()
        message = self._message(plan, sent, waiting)
        self._unplanned.clear()  # last: `_refuse_unplanned` must know them if anything here fails
        return message

    def update_connector_output(self, connector_output: Any) -> None:
        message, failed_blocks = connector_output.kv_connector_worker_meta, connector_output.invalid_block_ids
        self._unprocessed.append((message if isinstance(message, Acknowledged) else None, failed_blocks or set()))
        self._handle_reports()
        self._loads_ended(connector_output.finished_recving or (), connector_output.failed_recving or ())

    @guarded(always(False), even_off=True, last_resort=False)
    def has_pending_push_work(self) -> bool:
        # Otherwise vLLM would become idle before its blocks, or our chunks, are released.
        is_waiting = self._promised.are_under_way or self._nodes.has_unsent or self._trials.are_open
        return is_waiting or (self._held is not None and self._held.is_waiting)

    @guarded(always(False), even_off=True)
    def has_pending_block_frees(self) -> bool:
        return self._held is not None and self._held.will_free()  # vLLM then waits for these blocks, and preempts none

    @guarded(_last_events)
    def take_events(self) -> Iterable[BlockStored | BlockRemoved]:
        return () if self._events is None else self._events.take()

    @guarded(always((False, None)))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    @guarded(always((False, None)))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def reset_cache(self) -> bool | None:
        self._reset()
        return True

    def shutdown(self) -> None:
        try:
            release(self._engine.id, self._role.name)
        except Exception:  # noqa: BLE001  # no error may keep the engine from ending
            _log.exception("shutting the cache down failed; the engine continues to shut down")

    # The bodies of the hooks.

    def _start_scheduler(self, failure_policy: str) -> None:
        warn_of_failure_policy(failure_policy)
        try:
            if not self.off and self._engine.cache is None:  # workers in other processes have registered theirs by now
                bind_scheduler(self._engine, self._vllm_config, self._kv_cache_config, self._settings)
            # Of several ranks each knows only its own loads, and all compute with what one has not filled.
            self._trials = Trials(is_alone=not is_one_of_several() and self._engine.share.ranks == 1)
            if not self.off:  # otherwise the reason has been logged
                self._scheduler = self._engine.start_scheduler(
                    lambda kv_scales: served_model(self._vllm_config, kv_scales=kv_scales),
                    lambda space: VllmWeights(space, self._vllm_config, self._requests),
                    before=before_loading(self._vllm_config),
                    shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
                    step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
                    tags=tags_of_groups(self._kv_cache_config),
                )
                assert self._engine.cache is not None
                self._turns = turns_of(self._vllm_config.model_config)
                self._figures = SchedulerFigures(self._scheduler, self._engine.cache)
                self._steps = StepReader(self._vllm_config, self._scheduler)
        except ConfigError:
            self.shutdown()
            raise  # the user can fix it, and should before the engine serves
        except Exception as error:  # noqa: BLE001  # an unforeseen error may cost only the cache
            self.turn_off(f"starting the scheduler's half raised {type(error).__name__}: {error}", error)

    def _register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.off:
            return
        try:
            config, groups, in_force = self._vllm_config, self._kv_cache_config, self._in_force
            self._nodes.registered()
            self._layers.bound(bind_worker(self._engine, config, groups, self._settings, kv_caches, in_force=in_force))
            if not self.off:
                self._worker = self._engine.start_worker(step_tokens=config.scheduler_config.max_num_batched_tokens)
                self._figures = CounterDeltas(self._worker.counts, OF_WORKER)
        except ConfigError:
            self.shutdown()
            raise  # as where the scheduler's half starts
        except Exception as error:  # noqa: BLE001  # an unforeseen error may cost only the cache
            self.turn_off(f"binding to the engine's cache raised {type(error).__name__}: {error}", error)

    @guarded(always(None))
    def _start_events(self) -> None:
        """Start KV events if vLLM is to publish them. Otherwise none are made, and the cache keeps no record."""
        config, cache = self._vllm_config.kv_events_config, self._engine.cache
        if config is not None and config.enable_kv_cache_events and self._scheduler is not None and cache is not None:
            hash_tokens = hash_tokens_of(self._kv_cache_manager)
            shape, shards = self._scheduler.shape, self._engine.share.shards_here
            self._events = ChunkEvents(shape, cache.changes_since, hash_tokens=hash_tokens, shards=shards)

    @guarded(always(None))
    def _start_holding(self) -> None:
        """Hold blocks if workers' stores continue after the step. Others finish in it, as all do if none may be in
        flight, or if their reports may never come: an engine in its caller's process is stepped only for requests."""
        facts, scheduler = self._engine.facts, self._scheduler
        stores_behind = facts is not None and facts.stores_behind and self._settings.stores_in_flight_bytes != 0
        if scheduler is not None and stores_behind and (self._in_process or envs.VLLM_ENABLE_V1_MULTIPROCESSING):
            blocks = PoolBlocks(self._kv_cache_manager.block_pool)
            self._held = HeldBlocks(blocks, scheduler.shape, ranks=self._engine.share.ranks)

    @guarded(always(None))
    def _defer_stores(self) -> None:
        if self._scheduler is not None and self._settings.store == "lazy":
            blocks, shape = PoolBlocks(self._kv_cache_manager.block_pool), self._scheduler.shape
            self._scheduler.lazy = LazyStores(blocks.hash_of, chunk_blocks=shape.chunk_tokens // shape.tables[0])
            blocks.before_reuse(self._before_reuse)

    @guarded(always(None))
    def _before_reuse(self, blocks: Iterable[int]) -> None:
        if self._scheduler is not None and self._scheduler.lazy is not None:
            self._scheduler.lazy.before_reuse(blocks)

    @guarded(lambda self: self._plan_number)  # off: all copies in flight were awaited, and none has begun since
    def _stored_through(self) -> int:
        return 0 if self._worker is None else self._worker.stores.through

    @guarded(always(None), even_off=True)
    def _handle_reports(self) -> None:
        """Handle workers' reports, even while the cache is off: workers in other processes may still be reading.

        If this raises, the report is handled again with the next one, because workers send each only once.
        """
        while self._unprocessed:
            message, failed_blocks = self._unprocessed[0]
            if failed_blocks:
                self._distrust(failed_blocks)
            self._trials.receive(0 if message is None else message.trial, failed_blocks)
            if message is not None:
                self._handle_acknowledged(message)
            self._unprocessed.popleft()
        worker = self._engine.worker
        is_stepped = bool(self._requests) or envs.VLLM_ENABLE_V1_MULTIPROCESSING
        if worker is not None and not is_stepped and self.has_pending_push_work():
            # An engine in its caller's process is not stepped without requests, even to get blocks back.
            for trial, passed in self._trials.take_verdicts():
                worker.stores.judge(trial, passed=passed)
            worker.stores.finish()
            rank, report = self._engine.share.rank, worker.take_layerwise(wait=True)
            self._handle_acknowledged(Acknowledged({rank: worker.stores.through}, {rank: RankAnswer(report)}))

    def _distrust(self, failed_blocks: set[int]) -> None:
        """vLLM was told that these blocks were not filled, by whichever connector."""
        half, manager = self._scheduler, self._kv_cache_manager
        if half is None or manager is None:
            return
        tables = {request_id: manager.get_block_ids(request_id)[0] for request_id in self._requests}
        self._trials.failed(failed_blocks, tables, half.shape.tables[0], half)
        if self._steps is not None:
            self._steps.look_again()

    def _handle_acknowledged(self, message: Acknowledged) -> None:
        if self._held is not None:
            self._held.acknowledge(message.through)
        self._nodes.receive_answers(message.from_nodes)
        report = self._promised.receive(message.layerwise)
        if report.finished and not self.off:
            self._loads_ended(report.finished, report.failed)
        elif report.finished and self._scheduler is not None:
            self._scheduler.loads_ended(report.finished, report.failed)  # the chunks are leased until then

    @guarded(always(None))
    def _loads_ended(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        if self._scheduler is not None:
            self._scheduler.loads_ended(finished, failed)
            if failed and self._steps is not None:
                self._steps.look_again()
            for request_id in self._requests.keys() & set(failed):
                # Compute it now: vLLM schedules it before others whose loads have ended, and a second load of it would
                # wait for the very blocks that they hold.
                request, tokens = self._requests[request_id]
                self._requests[request_id] = (
                    request,
                    replace(tokens, controls=msgspec.structs.replace(tokens.controls, load=False)),
                )
            if (in_a_row := self._scheduler.counts.loads_failed_in_a_row) >= _MAX_FAILURES:
                self.turn_off(f"all loads have failed, {in_a_row} times in a row")

    @guarded(always(None))
    def _note_resets(self) -> None:
        note_resets(self._kv_cache_manager, self._engine, self._blocks_in_copies)

    def _blocks_in_copies(self) -> set[int]:
        """Blocks that our copies read for a store, or fill for a request that has ended."""
        draining = () if self._scheduler is None else self._scheduler.draining()
        tables = [self._kv_cache_manager.get_block_ids(request_id) for request_id in draining]
        filled = {block for groups in tables for table in groups for block in table}
        return filled if self._held is None else filled | self._held.blocks

    @guarded(always(None))
    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._trials.allocated(request.request_id, blocks, self._scheduler.shape.tables[0])
            tables = blocks.get_block_ids() if num_external_tokens else ()
            self._scheduler.allocated(request.request_id, num_external_tokens, tables)

    def _tokens_of(self, request: Any) -> RequestTokens | Unsure | None:
        if self._sessions.is_another(request):
            self._drop(request.request_id)
        if request.request_id not in self._requests:
            if not isinstance(tokens := self._read(request), RequestTokens):
                return tokens
            self._requests[request.request_id] = request, tokens
        return self._requests[request.request_id][1]

    def _drop(self, request_id: str) -> None:
        """Forget everything about this request: it is no longer valid."""
        self._requests.pop(request_id, None)
        self._promised.forget(request_id)
        self._trials.forget(request_id)
        if self._scheduler is not None:
            self._scheduler.finished(request_id)

    def _message(self, plan: StepPlan, sent: Any, waiting: tuple[str, ...] = ()) -> KVTiersMetadata:
        layerwise, to_nodes, trials = self._promised.to_send(plan), self._nodes.to_send(), self._trials.to_send()
        return KVTiersMetadata(sent, waiting, plan.number, layerwise, to_nodes, trials)

    def _build_step(self, scheduler_output: Any) -> StepPlan:
        if self._scheduler is None:
            return StepPlan()
        self._follow_weights(settle=scheduler_output.total_num_scheduled_tokens > 0)
        assert self._engine.weights is not None  # as the scheduler half has one
        is_waiting = (
            self._scheduler.is_waiting() or self.has_pending_push_work() or self._engine.weights.adapters.is_busy
        )
        if is_waiting and scheduler_output.total_num_scheduled_tokens == 0:
            # The engine has nothing to compute and steps again at once. Its busy loop would keep the interpreter from
            # the very threads that it waits for.
            time.sleep(_IDLE_STEP_S)
        for request_id in self._sessions.follow(scheduler_output, self._requests):
            self._drop(request_id)
        assert self._steps is not None
        trial = self._trials.begin(has_loads=scheduler_output.has_sync_kv_loads, has_ours=bool(self._promised.accepted))
        self._trials.follow(scheduler_output, self._requests, self._scheduler.shape.tables[0], self._scheduler)
        step = self._steps.read(scheduler_output, self._requests)
        plan = self._scheduler.build_step(step.scheduled, trial=trial)
        self._steps.planned(step, plan)
        if self._events is not None:
            self._events.planned(plan, lambda request_id: self._requests.get(request_id, (None, None))[0])
        return plan

    def _end_step(self) -> None:
        """The step's forward pass is over. Does nothing when it is called again."""
        if self._worker is None or self._layerwise.are_filled is not None:
            return
        are_filled = self._layerwise.forward_ended(self._worker.layers)
        # vLLM also comes here when the forward pass has raised: then its results are not in the blocks.
        is_computed = are_filled and sys.exc_info()[1] is self._caller_error
        self._caller_error = None
        (self._worker.stores.start if is_computed else self._worker.stores.abandon)(self._step)
        if not is_computed and self._engine.scheduler is not None and self._engine.scheduler.lazy is not None:
            self._engine.scheduler.lazy.forget()
        self._worker.stores.finish(wait=not self._step.number)

    @guarded(always(None), even_off=True)
    def _begin_step(self, metadata: KVTiersMetadata) -> None:
        self._layerwise.begin(metadata.layerwise)
        if metadata.to_nodes is not None:
            self._nodes.receive(metadata.to_nodes)
        if self.off:
            return
        if self._worker is not None:
            for trial, passed in metadata.trials.verdicts:
                self._worker.stores.judge(trial, passed=passed)
        if (sent := metadata.plan) is not None:
            self._step = sent if isinstance(sent, StepPlan) else StepPlan.from_plain(sent)
        elif metadata.number:
            self._step = StepPlan(number=metadata.number)
        if self._worker is not None:
            self._worker.stores.gather_overwritten(self._step)

    def _finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self._sessions.forget(request.request_id)
        half, settings = self._scheduler, self._settings
        answer = None if half is None else answer_to_proxy(request, half.given_tokens, self._engine.id, settings)
        _, tokens = self._requests.get(request.request_id, (None, None))
        if half is not None and tokens is not None and (hinted := tokens.controls.hinted) is not None:
            outcomes = half.hinted(request.request_id, hinted)
            answer = (answer or {}) | {"kv_hints": msgspec.to_builtins(outcomes)}
        if half is not None and has_ended_turn(request, self._turns):
            half.turn_ended(request.request_id)
        self._drop(request.request_id)
        if not self._requests and time.monotonic() >= self._summary_at_s:
            # vLLM's API server kills this process without warning, so the summary is logged when it becomes idle.
            self._engine.log_summary()
            self._summary_at_s = time.monotonic() + _SUMMARY_EVERY_S
        return False, answer

    @guarded(always(None))
    def _reset(self) -> None:
        half, weights = self._scheduler, self._engine.weights
        if half is None or not isinstance(weights, VllmWeights):
            return
        if weights.are_pausing:  # or going to sleep: what is stored stays
            weights.may_have_changed("vLLM paused")
        else:
            weights.changed("vLLM's caches were reset")
        self._follow_weights()
        if not weights.are_pausing:
            half.reset()
        if self._kv_cache_manager is not None and self._kv_cache_manager.usage == 0:
            half.engine_emptied()

    def _follow_weights(self, *, settle: bool = False) -> None:
        """settle: the engine is about to compute with its weights."""
        half, weights = self._scheduler, self._engine.weights
        if settle and isinstance(weights, VllmWeights):
            weights.settle()
        if half is not None and weights is not None and weights.follow(half) and self._steps is not None:
            self._steps.look_again()
