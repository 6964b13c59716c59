"""One engine's cache in one process, with the scheduler half and worker half, for engines whose connectors resemble
vLLM's.

The workers come first: only they see the engine's memory, and the keys depend on the layout that they prove. Then comes
the scheduler. If both are in one process they share one `LocalCache`, found by the engine's id; otherwise each worker
registers at its node's server, and the scheduler gets what it needs from its own node's server.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import lcm
from typing import Final

import msgspec
from kv_core.coverage import Coverage
from kv_core.device import FileReader
from kv_core.errors import ConfigError
from kv_core.format import is_quantised_kind
from kv_core.log import limited_logger
from kv_core.shape import ConnectShape, GroupShape, check_blocks
from kv_core.transfer import HostExtent
from kv_server.process import SupervisedServer
from kv_server.remote_cache import MappedPool, RemoteCache
from kv_server.wire import UNPINNED
from kv_tiers.approximate import exact_fingerprint
from kv_tiers.cache.local import LocalCache
from kv_tiers.clock import MonotonicClock
from kv_tiers.events.bus import EventBus
from kv_tiers.pool.machine import spelled
from kv_tiers.settings import Setting, Settings

from kv_connect.adapters import Adapters
from kv_connect.guard import OffSwitch
from kv_connect.halves.direct_reads import DirectReads, direct_tier
from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.layerwise import LayerwiseRule
from kv_connect.halves.scheduler import HandOvers, SchedulerHalf
from kv_connect.halves.worker import WorkerHalf
from kv_connect.identity import LiveKeySpace, LiveWeights, Origins, ServedModel
from kv_connect.neighbours import StoredFormat, warn_of_other_formats
from kv_connect.nodes import ALONE, NodesCache, RankShare, Served
from kv_connect.open_cache import Format, Replica, open_in_process, open_remote, workers_of
from kv_connect.pools import EngineCopier, RankPools, RanksReady

_log = limited_logger(__name__)

_IN_FLIGHT_BYTES = 2 << 30
"""What earlier steps may still be storing when a step stores all that it computes."""
_LONG_BLOCK_TOKENS: Final = 64


class EngineWeights:
    """The weights of an engine, and of its adapters, in the process of its scheduler half.

    Code that notices an update of the engine's weights in place calls `identity.changed`.
    """

    def __init__(self, space: LiveKeySpace) -> None:
        self.space = space
        self.identity = space.weights
        self.adapters = Adapters()
        self._changes = 0

    def follow(self, scheduler: SchedulerHalf) -> bool:
        """Inform the scheduler half of weights that have become known or changed. Called before every use of it; costs
        two comparisons.

        Returns whether any did.
        """
        changes, now = self.identity.changes, self.space.now
        if changes != self._changes:
            self._changes = changes
            scheduler.weights_changed(now)
            return True
        if now is not scheduler.space and now is not None:
            scheduler.name_weights(now)
            return True
        return False

    def close(self) -> None:
        """Stop reading files."""
        self.identity.close()
        self.adapters.close()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts about an engine's chunks that all its processes need; workers register them at the engine's server.

    groups: groups of layers, in the order of the keys.
    kv_scales: a digest of the scales of a quantised cache, "" for none.
    formats: the kind of format of each group.
    layouts: the name of the proven layout of each group.
    stores_behind: whether stores continue after the calls that start them, so that their blocks have to be held.
    shifted: as in `ConnectShape`.
    has_drafts: layers of a draft model are in the chunks, too.
    """

    chunk_tokens: int
    groups: tuple[GroupShape, ...]
    shards: int
    kv_dtype: str
    kv_scales: str
    formats: tuple[str, ...]
    layouts: tuple[str, ...]
    stores_behind: bool = False
    shifted: bool = False
    has_drafts: bool = False

    def to_text(self) -> dict[str, str]:
        return {name: msgspec.json.encode(value).decode() for name, value in msgspec.to_builtins(self).items()}

    @classmethod
    def from_text(cls, text: Mapping[str, str]) -> "EngineFacts":
        """
        Raises:
            KeyError, msgspec.MsgspecError: these are not facts as `to_text` writes them.
        """
        return msgspec.convert({field.name: msgspec.json.decode(text[field.name]) for field in fields(cls)}, cls)

    @property
    def described(self) -> str:
        """For a log line."""
        groups = [
            _described(group.coverage, layout, kind)
            for group, layout, kind in zip(self.groups, self.layouts, self.formats, strict=True)
        ]
        return "; ".join(text if count == 1 else f"{count} groups of {text}" for text, count in Counter(groups).items())


def _described(coverage: Coverage, layout: str, kind: str) -> str:
    if coverage.kind == "state":
        return "states"
    layout_text = "whole blocks, format blocks" if kind == "blocks" else f"layout {layout}, format {kind}"
    return layout_text if coverage.kind == "all" else f"{layout_text}, {coverage.kind} of {coverage.tokens} tokens"


class Engine(OffSwitch):
    """This process's part of one engine: its cache, and one or both halves.

    off: why nothing is loaded or stored; empty while it works. Both halves check it before they do anything.
    faults: every reason for which it was ever turned off.
    cache: None until a half has been bound.
    facts: None until a half has been bound.
    server: the private server, in the process that started it.
    share: the shard of every chunk that this process's rank has; in the scheduler's process, the first rank's.
    nodes: for an engine over several nodes, in the scheduler's process: the cache of all of them.
    pools: in a worker's process, those attached to its copiers.
    ready: in the process of a scheduler that promises layerwise loads to workers elsewhere, what they have ready.
    direct: in a process that has a tier of type `gds`, what reads it.
    terms: a digest of what the processes of an engine must agree on: the chunks' tokens, groups, shards and format.
    """

    def __init__(self, engine_id: str) -> None:
        self.id = engine_id
        self.faults: list[str] = []
        self.cache: LocalCache | RemoteCache | None = None
        self.server: SupervisedServer | None = None
        self.share = ALONE
        self.copiers: Sequence[EngineCopier] = ()
        self.pools: RankPools | None = None
        self.ready: RanksReady | None = None
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self.weights: EngineWeights | None = None
        self.direct: DirectReads | None = None
        self._bus: EventBus | None = None
        self._shape: ConnectShape | None = None
        self.facts: EngineFacts | None = None
        self.nodes: NodesCache | None = None
        self.terms = ""
        self._fingerprint, self._chunk_bytes = "", 0
        self._described = ""
        self._roles: set[str] = set()
        self._summary: tuple[int, ...] = (0, 0, 0, 0)
        self._settings = Settings()
        self._is_one_process = False

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        """Stop loading and storing because of a fault of ours. (`refuse` sets only `off`, and records no fault.)"""
        if why in self.faults:
            return  # of a hook that is called even now, and fails in every step
        super().turn_off(why, error)
        self.faults.append(why)
        try:
            # The worker first: it waits for copies of chunks that the other half has leased. If it does not know that
            # they have ended, these stay leased.
            has_stopped = self.worker is not None and self.worker.close()
            if self.scheduler is not None:
                self.scheduler.close(but_filling=not has_stopped)
        except Exception as close_error:  # noqa: BLE001  # perhaps the same fault, which must not reach the engine
            _log.exception("what the cache holds for this engine could not be given back: %s", close_error)

    def refuse(self, why: str) -> None:
        """Never begin: the layout of this engine's cache cannot be proven, or its model cannot be cached."""
        self.off = why
        _log.error("the KV cache is off, nothing is loaded or stored: %s", why)

    def bind_worker(
        self,
        settings: Settings,
        facts: EngineFacts,
        chunks: Format,
        stored: StoredFormat,
        copiers: Sequence[EngineCopier],
        *,
        share: RankShare,
        in_process: bool,
        replica: Replica | None = None,
        loads: bool = True,
        stores: bool = True,
        make_reader: Callable[[], FileReader] | None = None,
    ) -> None:
        """Open the cache of a worker, once the layout of its engine's memory is proven. If no server is found, `off`
        has the reason.

        in_process: whether everything of this engine that uses the cache is in this process.
        replica: for an engine that has several, which share a server.
        loads, stores: what the engine's role lets us do.
        make_reader: of the files of a tier of type `gds`, if there is one.

        Raises:
            ConfigError: the settings do not fit this engine or this machine.
        """
        self.share = share
        if share.is_first_here:
            warn_of_other_formats(settings, stored)
        alone = in_process and replica is None and not settings.server.socket
        gds = ""
        if not settings.server.socket:  # a server that is joined has tiers of its own
            settings, gds = direct_tier(settings, facts.groups, facts.formats, alone=alone)
        if alone:
            if gds and make_reader is not None:
                self.direct = DirectReads(gds, make_reader())
            try:
                self.cache, self._bus = open_in_process(settings, chunks, () if self.direct is None else (self.direct,))
            except BaseException:
                if self.direct is not None:
                    self.direct.reader.close()
                raise
        else:
            try:
                self.cache, self.server = open_remote(
                    settings,
                    chunks,
                    engine_id=self.id,
                    is_first=share.is_first_here,
                    facts={
                        "rank": str(share.rank),
                        **facts.to_text(),
                        **stored.facts(),
                        **({} if any(copier.is_queued for copier in copiers) else {UNPINNED: "true"}),
                    },
                    replica=replica,
                    node=share.node,
                    on_new_pool=self._exchange_pool,
                )
            except ConfigError as error:
                if share.is_first_here:
                    raise  # the user can fix it
                return self.refuse(f"rank {share.rank} finds no cache server: {error}")
        self._describe(settings, facts, chunks, loads=loads, stores=stores)
        self._is_one_process = in_process
        self.copiers = copiers
        is_promised_elsewhere = not in_process and self._settings.load != "async" and not self._why_not_layerwise()
        self.pools = RankPools(copiers, for_scheduler=is_promised_elsewhere)
        self.pools.add(self.cache.pool)
        return None

    def bind_scheduler(
        self,
        settings: Settings,
        share: RankShare,
        *,
        replica: Replica | None = None,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        """Find the workers, which are in other processes, at the server of this node. If one is missing, `off` has the
        reason. Workers of other nodes compare their own `terms` with ours before they follow a plan.

        share: the first rank's; only the workers know the number of shards.

        Raises:
            ConfigError: the server is another user's, or refuses us.
        """
        ranks = share.ranks_here
        workers = workers_of(settings, self.id, replica)
        if len(workers) < ranks:
            return self.refuse(f"{len(workers)} of {ranks} workers have a cache; the log of the others says why")
        formats = {Format(worker.group_bytes, exact_fingerprint(worker.fingerprint)) for worker in workers}
        if len(formats) > 1:
            return self.refuse(
                "the ranks' chunks are of different formats, as those of stages with unequal numbers of layers: "
                "choose a number of stages that divides the layers"
            )
        if len({worker.facts["shards"] for worker in workers}) > 1:
            return self.refuse("in some stages more ranks have heads of their own than in others: use one stage")
        (chunks,) = formats
        self.share = replace(share, shards=int(workers[0].facts["shards"]))
        own = {UNPINNED: "true"}
        self.cache, _ = open_remote(settings, chunks, engine_id=self.id, is_first=False, facts=own, replica=replica)
        self._describe(settings, EngineFacts.from_text(workers[0].facts), chunks, loads=loads, stores=stores)
        return None

    def start_worker(self, *, step_tokens: int = 0) -> WorkerHalf:
        """After `bind_worker`. step_tokens: the most that the engine computes in a step."""
        assert self.cache is not None and self._shape is not None
        share, in_flight_bytes = self.share, self._settings.stores_in_flight_bytes
        if in_flight_bytes is None:
            in_flight_bytes = _IN_FLIGHT_BYTES + -(-step_tokens // self._shape.chunk_tokens) * self._chunk_bytes
        self.worker = WorkerHalf(
            self.cache,
            self._shape,
            self.copiers,
            shard=share.shard,
            name=self.id,
            rank=share.rank,
            stores=share.stores,
            max_in_flight_bytes=in_flight_bytes,
            stores_layers=self._stores_layers(),
            direct=self.direct,
        )
        self._roles.add("WORKER")
        return self.worker

    def start_scheduler(
        self,
        served: Callable[[str], ServedModel],
        watch: Callable[[LiveKeySpace], EngineWeights] = EngineWeights,
        *,
        before: Origins | None = None,
        shares_blocks: bool = False,
        step_tokens: int = 0,
        tags: tuple[tuple[str, str], ...] = (),
    ) -> SchedulerHalf:
        """After `bind_worker` or, where the workers are elsewhere, `bind_scheduler`.

        served: returns the model that the engine serves, given `EngineFacts.kv_scales`. watch: creates the observer of
            its weights. before: the origins of its weights before they were loaded; None: not known. shares_blocks: as
            `SchedulerHalf` has it. step_tokens: as `EngineCosts` has it. tags: further ones of the key space.
        """
        assert self.cache is not None and self._shape is not None and self.facts is not None
        space = LiveKeySpace(
            LiveWeights(served(self.facts.kv_scales), before=before),
            kv_dtype=self.facts.kv_dtype,
            format_fingerprint=self._fingerprint,
            world=self.facts.shards,
            chain=self._shape.scheme.name,
            tags=tags,
        )
        self.weights = watch(space)
        settings, handover = self._settings, self._settings.handover
        if self.share.nodes > 1:
            groups = len(self._shape.groups)
            self.nodes = NodesCache(self.cache, self.share, groups=groups, clock=MonotonicClock())
        self.scheduler = SchedulerHalf(
            self.nodes or self.cache,
            self._shape,
            name=self.id,
            costs=EngineCosts(
                MonotonicClock(),
                use=settings.use,
                prefill_tokens_per_second=settings.cost.prefill_tokens_per_second,
                step_tokens=step_tokens,
            ),
            layerwise=self._layerwise_rule(),
            handovers=HandOvers(self._shape, MonotonicClock(), wait_s=handover.wait_s, hold_s=handover.hold_s),
            shares_blocks=shares_blocks,
        )
        self._roles.add("SCHEDULER")
        _log.info("the KV cache is on: %s", self._described)
        return self.scheduler

    def served(self) -> Served | None:
        """For the agent of this node: its cache and its chunks, while this process's worker half works."""
        if self.off or self.worker is None or self.cache is None or self._shape is None:
            return None
        return self.cache, self._shape

    def agree(self, terms: str) -> None:
        """Compare the terms of a plan with this worker's. If they differ, it would mistake other bytes for the plan's,
        so the cache is turned off."""
        if terms != self.terms and not self.off:
            self.turn_off(
                f"the chunks here are not those of the scheduler's node: {self._described}; "
                "give all nodes the same settings, model and kind of machine"
            )

    def _stores_layers(self) -> bool:
        """Whether layers are stored as they are computed. For groups that cannot be, such as states, whole chunks are
        gathered after the step."""
        assert self.facts is not None
        if self._settings.store != "layerwise":
            return False
        groups = zip(self.facts.groups, self.facts.formats, strict=True)
        if all(group.coverage.kind == "state" or is_quantised_kind(kind) for group, kind in groups):
            _log.warning(
                "store: %s is not used, chunks are stored after the step: all layers are encoded, or states",
                self._settings.store,
            )
            return False
        return True

    def _layerwise_rule(self) -> LayerwiseRule | None:
        """Which loads run inside steps; None: none."""
        if self._settings.load == "async":
            return None
        if why := self._why_not_layerwise():
            _log.warning("load: %s is not used, chunks are loaded between steps: %s", self._settings.load, why)
            return None
        if self._is_one_process:
            return LayerwiseRule(self._settings.load == "layerwise", self._prepare)
        self.ready = RanksReady(self.share.ranks)
        return LayerwiseRule(self._settings.load == "layerwise", self.ready.have)

    def _why_not_layerwise(self) -> str:
        """Why no load of this engine may run inside a step, where it could fail; empty: loads may."""
        assert self.facts is not None
        groups, (kind, *_) = self.facts.groups, self.facts.formats
        if len(groups) > 1 or groups[0].coverage.kind != "all":
            return "the model has several kinds of layers, or layers that do not need the whole prefix"
        if self.facts.has_drafts:
            return "there is a draft model, whose layers are computed separately from the model's"
        if self.share.nodes > 1:
            return "the ranks are on several nodes, and each node's server leases its own chunks only"
        if self.share.stages > 1:
            return (
                "there are pipeline stages, and the engine schedules further steps before it learns that one has failed"
            )
        if is_quantised_kind(kind):
            return f"chunks are stored in format {kind}"
        return ""

    def _prepare(self, extents: Sequence[HostExtent]) -> bool:
        try:
            self.copiers[0].prepare(extents)
        except ConfigError as error:
            _log.warning("chunks are loaded between steps: %s", error)
            return False
        return True

    def log_summary(self) -> None:
        """Log a one-line summary of the cache in this process. A private server logs its own at its end."""
        if not isinstance(self.cache, LocalCache):
            return
        counts = self.cache.counts()
        counters = (counts.lookups, counts.chunks_hit, counts.chunks_asked, counts.chunks_committed)
        if counters != self._summary:
            self._summary = counters
            _log.info("the KV cache: %d lookups found %d of %d chunks, and %d chunks entered the pool", *counters)

    def release(self, role: str) -> bool:
        """One half, WORKER or SCHEDULER, has shut down. The last one closes the cache; returns whether this was it."""
        self._roles.discard(role)
        if role == "WORKER" and self.worker is not None:
            self.worker.close()
        if role == "SCHEDULER":
            self.log_summary()
            if self.weights is not None:
                self.weights.close()
        if self._roles:
            return False
        if self.pools is not None:
            self.pools.close()
        if self.cache is not None:
            try:
                self.cache.close()
            except BufferError as error:  # a view still in use keeps the pool mapped; the engine is ending anyway
                _log.warning("the host pool stays mapped: %s", error)
        if self._bus is not None:
            self._bus.close()
        if self.server is not None:
            self.server.stop()
        return True

    def _describe(self, settings: Settings, facts: EngineFacts, chunks: Format, *, loads: bool, stores: bool) -> None:
        assert self.cache is not None
        self.facts, self._fingerprint, self._chunk_bytes = facts, chunks.fingerprint, sum(chunks.group_bytes)
        spelled_out = repr((sorted(facts.to_text().items()), chunks.group_bytes, chunks.fingerprint))
        self.terms = hashlib.sha256(spelled_out.encode()).hexdigest()[:32]
        self._shape = ConnectShape(
            # The workers may have resolved a length that is not in the settings (`chunk_size.fitted`).
            scheme=msgspec.structs.replace(settings, chunk_tokens=facts.chunk_tokens).scheme(),
            space=None,
            groups=facts.groups,
            shards=facts.shards,
            loads=loads,
            stores=stores,
            cuts_chunks="blocks" not in facts.formats,
            shifted=facts.shifted,
        )
        self._settings = settings
        if settings.server.socket:
            place = f"the server at {settings.server.socket}"
        else:
            tiers = ", ".join(str(tier.get("type")) for tier in settings.tiers)
            capacity = f"{spelled(settings.host.capacity_bytes)} ({self.cache.pool.slots} chunks)"
            place = f"a pool of {capacity}" + (f" above {tiers}" if tiers else "")
            if isinstance(self.cache, RemoteCache):
                place += f" of a private server (kv top --socket {self.cache.socket})"
        limits = [] if loads else ["nothing is loaded, because of the engine's role"]
        limits += [] if stores else ["nothing is stored, because of the engine's role"]
        self._described = "; ".join(
            [f"chunks of {facts.chunk_tokens} tokens in {place}", facts.described, *limits],
        )

    def _exchange_pool(self, pool: MappedPool) -> None:
        """The server was restarted."""
        assert self.pools is not None
        self.pools.add(pool)


class PartOf:
    """A part of an engine with hooks of its own (`guarded`): off when that is."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def off(self) -> str:
        return self._engine.off

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        self._engine.turn_off(why, error)


_ENGINES: dict[str, Engine] = {}
"""The engines of this process by id. A process has one, or a few in tests."""


def engines() -> Mapping[str, Engine]:
    return _ENGINES


def engine_of(engine_id: str) -> Engine:
    """The engine's entry, created on first use."""
    return _ENGINES.setdefault(engine_id, Engine(engine_id))


def release(engine_id: str, role: str) -> None:
    """One half of the engine has shut down, `Engine.release`."""
    engine = _ENGINES.get(engine_id)
    if engine is not None and engine.release(role):
        del _ENGINES[engine_id]


def fitted(
    settings: Settings, in_force: Sequence[Setting], block_tokens: Sequence[int], *, has_states: bool = False
) -> Settings:
    """The settings with a `chunk_tokens` that is a whole number of the engine's blocks.

    If it is not set, it becomes one block where blocks are long, so that we find everything that the engine's own
    prefix cache would: vLLM's blocks have 128 tokens on a CPU, where computing 128 more takes longest, 64 with some
    kernels for latents, and, in models with states, as many as match the size of a state, for example 528. Otherwise it
    is the smallest whole number of blocks that is no less than the default.

    An engine keeps a prompt's last state at the end of a block. In a chunk of several blocks, most of these would not
    be at the end of a chunk and would be useless, so for such models short blocks make a chunk of 64 tokens.

    in_force: as `load` returns it with the settings.
    block_tokens: of each block table of the engine.

    Raises:
        ConfigError: it is set and is not a whole number of blocks; the text suggests one that is.
    """
    common_tokens = lcm(*block_tokens)
    if any(setting.path == "chunk_tokens" and setting.origin != "default" for setting in in_force):
        check_blocks(settings.chunk_tokens, common_tokens)
        return settings
    has_long_blocks = common_tokens >= _LONG_BLOCK_TOKENS
    min_tokens = _LONG_BLOCK_TOKENS if has_states or has_long_blocks else settings.chunk_tokens
    chunk_tokens = -(-min_tokens // common_tokens) * common_tokens
    if chunk_tokens == settings.chunk_tokens:
        return settings
    _log.info(
        "chunk_tokens is %d instead of %d, to fit the engine's blocks of %d tokens",
        chunk_tokens,
        settings.chunk_tokens,
        common_tokens,
    )
    return msgspec.structs.replace(settings, chunk_tokens=chunk_tokens)
