"""The worker half's stores: copies chunks that a step completes from the engine's blocks to the pool.

Their slots are reserved all at once, over all groups of layers. Then they are gathered: after the forward pass, in one
piece for each group, or layer by layer while later layers are computed, where the copier can. Either way they
are committed together once every byte is there, in this step or a later one, so a chunk never lacks a layer. A step on
trial computes with blocks that another connector of the engine says it has filled: what it stores is committed only
once the scheduler has heard from every rank that they were.

A layer that the engine does not report loses only the head start: it is gathered after the forward pass. A layer that
is reported twice was computed in parts, or recomputed, so it is gathered once more after the pass.
"""

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

from kv_core.device import CopyEvent, LayerwiseCopier, LayerwiseStore
from kv_core.errors import CopyFailed, KVError
from kv_core.keys import ChunkKey, keys_in
from kv_core.log import limited_logger
from kv_core.service import CacheService, StoreOptions, WriteLease
from kv_core.shape import NO_BLOCK, ConnectShape, stored_from, without_holes
from kv_core.transfer import Copy, HostExtent, Move, TransferPlan, packed, plan_transfer

from kv_connect.figures import WorkerCounts
from kv_connect.halves.copies import Copies, start_each
from kv_connect.halves.step import StepPlan, StoreStep

_log = limited_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Gather:
    """What one group stores of a request.

    chunks: numbers of the chunks, ascending.
    plan: for some of these chunks, where the bytes of their extents come from.
    """

    group: int
    chunks: Sequence[int]
    plan: Callable[[Sequence[int], Sequence[HostExtent]], TransferPlan]


@dataclass(slots=True)
class _StorePart:
    """One group's part of a store.

    by_layers: gathers single layers; None: the copier takes all at once.
    """

    group: int
    plan: TransferPlan
    by_layers: LayerwiseStore | None
    gathered: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Store:
    """A request's chunks in flight to the pool, over all groups.

    tokens: the tokens of one group's chunks, as `WorkerCounts.stored_tokens` counts them.
    trial: the trial that it has to stand before it is committed; 0: none.
    parts: the parts still to be gathered; none once all copies have begun.
    copies: those that have begun. A failure aborts the store, once all of them have stopped.
    """

    number: int
    lease: WriteLease
    nbytes: int
    tokens: int
    trial: int
    parts: list[_StorePart] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)

    @property
    def reads_blocks(self) -> bool:
        """Whether what its blocks hold still matters: whatever a failed store reads is discarded."""
        return self.copies.failure is None and (bool(self.parts) or self.copies.are_in_flight)


class Stores:
    """The stores of one rank. Not thread-safe: used only on the worker's thread."""

    def __init__(
        self,
        service: CacheService,
        shape: ConnectShape,
        copiers: Sequence[LayerwiseCopier],
        *,
        shard: int,
        holder: str,
        counts: WorkerCounts,
        max_in_flight_bytes: int,
        by_layers: bool,
    ) -> None:
        """copiers: one for each group; none: this rank stores nothing. counts: the counters to update. by_layers:
        layers are gathered as `layer_computed` reports them."""
        self._service = service
        self._shape = shape
        self._copiers = copiers
        self._shard = shard
        self._holder = holder
        self._counts = counts
        self._max_in_flight_bytes = max_in_flight_bytes
        self._by_layers = by_layers
        self._storing: list[_Store] = []
        self._in_flight_bytes = 0
        self._plan_number = 0
        self._begun: StepPlan | None = None  # its forward pass is running
        self._computed: set[tuple[int, int]] = set()  # the groups and layers that this pass has computed
        self._counted_group = next(iter(shape.chunk.whole_groups), 0)

    def layer_computed(self, plan: StepPlan, group: int, layer: int) -> None:
        """The forward pass of this plan's step has computed this layer of this group: begin to store it, if layers are
        stored singly."""
        if not self._by_layers or not self._copiers:
            return
        if self._begun is not plan:
            self._begin(plan)
        is_again = (group, layer) in self._computed
        self._computed.add((group, layer))
        for store in self._storing:
            for part in store.parts:
                if part.group != group or part.by_layers is None:
                    continue
                if is_again:
                    part.gathered.discard(layer)
                    self._gather(store, partial(self._order_after_earlier, store))
                else:
                    part.gathered.add(layer)
                    self._gather(store, partial(self._gather_layer, part.by_layers, layer))

    def start(self, plan: StepPlan) -> None:
        """The forward pass of this plan's step is over: gather the rest of its stores."""
        if self._begun is not plan:
            self._begin(plan)
        self._begun = None
        self._gather_parts()

    def gather_overwritten(self, plan: StepPlan) -> None:
        """The forward pass of this plan's step is about to begin: gather first what it overwrites."""
        if not plan.overwritten or not self._copiers:
            return
        self._plan_number, earlier = plan.number, len(self._storing)
        for step in plan.overwritten:
            self._reserve_store(plan, step)
        self._gather_parts()
        for store in self._storing[earlier:]:
            store.copies.hold_engine()

    def _gather_parts(self) -> None:
        whole: list[list[tuple[Copies, TransferPlan]]] = [[] for _ in self._copiers]
        try:
            for store in self._storing:
                parts, store.parts = store.parts, []
                for part in parts:
                    if part.by_layers is not None and part.gathered:
                        self._gather(store, partial(self._gather_rest, part.by_layers, part.gathered))
                    else:
                        whole[part.group].append((store.copies, part.plan))
        finally:  # none may count as gathered that was not
            start_each([(copier.store_each, of_group) for copier, of_group in zip(self._copiers, whole, strict=True)])

    def abandon(self, plan: StepPlan) -> None:
        """The forward pass of this plan's step has failed: none of its chunks are stored."""
        self._give_up_begun("the forward pass has failed")
        self._plan_number, self._begun = plan.number, None

    def finish(self, *, wait: bool = True) -> None:
        """Publish what has been gathered.

        wait: wait for all copies; the engine may then reuse the blocks. False: the engine holds the blocks until
            `through` shows that they are no longer needed.
        """
        for store in tuple(self._storing):
            if store.parts or not store.copies.have_stopped(wait=wait):
                continue
            if store.copies.failure is not None:
                self._remove(store)
                self._service.release(store.lease)
                self._counts.stores_failed += 1
                _log.warning("chunks could not be stored and were discarded: %s", store.copies.failure)
            elif not store.trial:
                self._remove(store)
                self._service.commit(store.lease)
                self._counts.chunks_stored += len(store.lease.keys)
                self._counts.stored_bytes += store.nbytes
                self._counts.stored_tokens += store.tokens

    def judge(self, trial: int, *, passed: bool) -> None:
        """Commit the stores of this trial (`StepPlan.trial`) once their copies are complete, if it was passed, that is,
        if others filled the blocks that they promised to fill; else discard them. Nothing to do with `kv judge`."""
        for store in self._storing:
            if store.trial == trial:
                store.trial = 0
                if not passed:
                    store.copies.fail(CopyFailed("another connector has not filled the blocks that it promised"))
        self.finish(wait=False)

    @property
    def through(self) -> int:
        """The number of the last plan that, like all before it, no longer reads any blocks."""
        return min((store.number - 1 for store in self._storing if store.reads_blocks), default=self._plan_number)

    def close(self) -> bool:
        """Give up every store. False: copies may still be in flight, and their slots stay leased."""
        self._begun = None
        for store in self._storing:
            store.parts, store.trial = [], 0
            store.copies.fail(CopyFailed("the engine has shut down"))
        self.finish(wait=True)
        return not self._storing

    def _begin(self, plan: StepPlan) -> None:
        self._give_up_begun("the step ended before all layers were computed")
        self._plan_number, self._begun = plan.number, plan
        self._computed.clear()
        for step in plan.stores if self._copiers else ():
            self._reserve_store(plan, step)

    def _give_up_begun(self, why: str) -> None:
        for store in self._storing:
            if store.parts:
                store.parts = []
                store.copies.fail(CopyFailed(why))

    def _remove(self, store: _Store) -> None:
        """Before its lease is given back, which must happen once."""
        self._storing.remove(store)
        self._in_flight_bytes -= store.nbytes

    def _reserve_store(self, plan: StepPlan, step: StoreStep) -> None:
        """Reserve slots for everything that the groups store of this step, all at once."""
        gathers = [gather for group in range(len(self._copiers)) if (gather := self._gather_of(step, group)).chunks]
        whole_keys: list[tuple[int, int, ChunkKey]] = []
        other_keys: list[tuple[int, int, ChunkKey]] = []
        for gather in gathers:
            digests = [step.digests[chunk] for chunk in gather.chunks]
            keys = keys_in(plan.space_id, digests, groups=(gather.group,), shards=(self._shard,), tenant=step.tenant)
            needs_all = self._shape.groups[gather.group].coverage.kind == "all"
            group_keys = whole_keys if needs_all else other_keys
            group_keys += zip(gather.chunks, itertools.repeat(gather.group), keys)
        ordered = sorted(whole_keys) + other_keys  # in a lookup's order: by chunks, and then the others
        lease = self._reserve([key for _, _, key in ordered], step)
        if lease is None:
            return
        extent_of = dict(zip(lease.keys, lease.extents, strict=True))
        places: list[dict[int, HostExtent]] = [{} for _ in self._copiers]  # by group and chunk
        for chunk, group, key in ordered:
            if (extent := extent_of.get(key)) is not None:
                places[group][chunk] = extent
        nbytes = sum([extent.nbytes for extent in lease.extents])
        tokens = self._tokens_counted(step, list(places[self._counted_group]))
        store = _Store(self._plan_number, lease, nbytes, tokens, plan.trial)
        self._storing.append(store)
        self._in_flight_bytes += nbytes
        try:
            for gather in gathers:
                group = gather.group
                if places[group]:
                    transfer = gather.plan(list(places[group]), list(places[group].values()))
                    by_layers = self._copiers[group].store_layers(transfer) if self._by_layers else None
                    store.parts.append(_StorePart(group, transfer, by_layers))
        except Exception as error:
            store.copies.fail(error)
            if not isinstance(error, KVError):
                raise

    def _gather(self, store: _Store, gather: Callable[[], Iterable[CopyEvent]]) -> None:
        """Does nothing after a failure; copies in flight end before the slots are released."""
        if store.copies.failure is None:
            try:
                store.copies.add(gather())
            except Exception as error:
                store.copies.fail(error)
                if not isinstance(error, KVError):
                    raise  # a bug, which turns the cache off

    def _gather_layer(self, by_layers: LayerwiseStore, layer: int) -> list[CopyEvent]:
        self._counts.layers_stored_early += 1
        return [by_layers.gather((layer,))]

    def _gather_rest(self, by_layers: LayerwiseStore, gathered: Container[int]) -> list[CopyEvent]:
        remaining = [layer for layer in range(by_layers.layers) if layer not in gathered]
        return [by_layers.gather(remaining)] if remaining else []

    def _order_after_earlier(self, store: _Store) -> list[CopyEvent]:
        """Order a repeated gather after the one that it replaces, even where copies have no queue."""
        store.copies.hold_engine()
        return []

    def _gather_of(self, step: StoreStep, number: int) -> _Gather:
        group, chunk_tokens = self._shape.groups[number], self._shape.chunk_tokens
        if group.coverage.kind == "state":
            blocks = {state.chunk: (state.block,) for state in step.states if state.table == group.table}
            return _Gather(number, sorted(blocks), partial(_plan_blocks, blocks.__getitem__, 1, 1))
        table: Sequence[int] = step.blocks[group.table]
        first_chunk, chunks = 0, len(step.digests)
        if group.coverage.kind != "all":
            first_chunk = stored_from(group, table, chunks, chunk_tokens)
            stored, size = group.stored_tokens(chunk_tokens), group.block_tokens
            if stored < chunk_tokens:

                def last_blocks(chunk: int) -> Sequence[int]:
                    end = (chunk + 1) * chunk_tokens
                    return table[(end - stored) // size : end // size]

                return _Gather(number, range(first_chunk, chunks), partial(_plan_blocks, last_blocks, size, stored))
            table = packed(without_holes(table))
        tail = chunks - 1 if step.tail_tokens else None

        def plan(numbers: Sequence[int], extents: Sequence[HostExtent]) -> TransferPlan:
            """As few moves as there are runs of chunks."""
            breaks = [at for at in range(1, len(numbers)) if numbers[at] == tail or numbers[at] != numbers[at - 1] + 1]
            parts: list[Move | Copy] = []
            for begin, end in pairwise((0, *breaks, len(numbers))):
                first, tokens = numbers[begin], (end - begin) * chunk_tokens
                is_tail = first == tail
                transfer = plan_transfer(
                    extents[begin:end],
                    table,
                    chunk_tokens=chunk_tokens,
                    block_tokens=group.block_tokens,
                    first_token=first * chunk_tokens,
                    last_token=first * chunk_tokens + (step.tail_tokens if is_tail else tokens),
                    extents_from_chunk=first,
                )
                parts += (transfer.repeated() if is_tail else transfer).parts
            return TransferPlan(tuple(parts), chunk_tokens)

        return _Gather(number, range(first_chunk, chunks), plan)

    def _tokens_counted(self, step: StoreStep, chunks: Sequence[int]) -> int:
        """chunks: those that the counted group stores."""
        if self._shard:
            return 0
        tokens = len(chunks) * self._shape.chunk_tokens
        if step.tail_tokens and chunks and chunks[-1] == len(step.digests) - 1:
            tokens -= self._shape.chunk_tokens - step.tail_tokens
        return tokens

    def _reserve(self, keys: Sequence[ChunkKey], step: StoreStep) -> WriteLease | None:
        """Slots for the leading keys that are not held and still fit among the bytes in flight; None: for none."""
        options: StoreOptions = {
            "hold_s": step.hold_ms / 1000,
            "retain_s": step.retain_ms / 1000,
            "tiers": step.tiers,
            "leaves_first": step.is_demoted,
        }
        begin = partial(self._service.begin_store, holder=self._holder, **options)
        lease = begin(keys) if keys else None
        sizes = [extent.nbytes for extent in lease.extents] if lease is not None and self._plan_number else []
        room_bytes = self._max_in_flight_bytes - self._in_flight_bytes
        if lease is not None and sum(sizes) > room_bytes:
            fitting = sum(nbytes <= room_bytes for nbytes in itertools.accumulate(sizes))
            if not self._storing:
                fitting = max(fitting, 1)  # else chunks larger than the limit would never be stored
            if fitting < len(lease.keys):
                self._service.release(lease)
                self._counts.dropped_chunks += len(lease.keys) - fitting
                leading = keys[: keys.index(lease.keys[fitting])]
                lease = begin(leading) if fitting else None
        if lease is not None and not lease.keys:
            self._service.release(lease)
            return None
        return lease


def _plan_blocks(
    blocks_of: Callable[[int], Sequence[int]],
    block_tokens: int,
    stored_tokens: int,
    chunks: Sequence[int],
    extents: Sequence[HostExtent],
) -> TransferPlan:
    """From a few blocks of each chunk: that of its state, or its last ones.

    blocks_of: a chunk's blocks, of `stored_tokens` in all.
    """
    return plan_transfer(
        extents,
        [block for chunk in chunks for block in blocks_of(chunk)],
        chunk_tokens=stored_tokens,
        block_tokens=block_tokens,
        first_token=0,
        last_token=len(chunks) * stored_tokens,
    )


class EngineBlocks(Protocol):
    """The engine's blocks by number, which owners other than requests can share."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Become a further owner of these blocks: they are not reused until they are released."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Stop owning these blocks, listed in the order in which they should be reused."""

    def is_ours_alone(self, block: int) -> bool:
        """Whether this block has no other owner."""


class HeldBlocks:
    """The held blocks of one engine. Not thread-safe: used on the scheduler's thread.

    A copy off a device continues while the engine runs. Meanwhile the request may end, be preempted, or move its window
    past the block, and the engine would give the block to another request, whose forward pass overwrites it. Blocks are
    therefore held from the moment at which a step's stores are planned, while the request still owns them, and released
    when all workers have acknowledged that plan and those before it, whatever has become of the request.
    """

    def __init__(self, engine: EngineBlocks, shape: ConnectShape, *, ranks: int) -> None:
        """ranks: how many workers there are."""
        self._engine = engine
        kinds = {group.table: group.coverage.kind for group in shape.groups}
        # A state is stored from the block that the engine names; the engine may move the rest of its table.
        self._whole_tables = [table for table, kind in kinds.items() if kind != "state"]
        self._acknowledged = dict.fromkeys(range(ranks), 0)
        self._plans: deque[tuple[int, list[int]]] = deque()
        self._holds: dict[int, int] = {}  # for each block, the number of the last plan that reads it
        self.number = 0

    def hold(self, plan: StepPlan) -> StepPlan:
        """The plan with its number; the blocks that its stores read are held from now on."""
        if plan.stores or plan.overwritten:  # the engine goes on stepping until these are in the pool, too
            blocks = list(dict.fromkeys(block for store in plan.stores for block in self._blocks(store)))
            self._engine.hold([block for block in blocks if block not in self._holds])
            self.number += 1
            self._holds.update(dict.fromkeys(blocks, self.number))
            self._plans.append((self.number, blocks))
        return replace(plan, number=self.number)

    def acknowledge(self, through: Mapping[int, int]) -> None:
        """Workers have reported, by rank, that they have finished this plan and all before it. Repeats are harmless."""
        for rank, number in through.items():
            self._acknowledged[rank] = max(number, self._acknowledged[rank])
        acknowledged = min(self._acknowledged.values())
        while self._plans and self._plans[0][0] <= acknowledged:
            number, blocks = self._plans[0]
            free = [block for block in blocks if self._holds[block] == number]
            # The engine should reuse the end of a prefix first: it is worth least. If this raises, the next call tries
            # again.
            self._engine.give_back(free[::-1])
            self._plans.popleft()
            for block in free:
                del self._holds[block]

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are held, so that the engine has to go on stepping to get them back."""
        return bool(self._plans)

    @property
    def blocks(self) -> set[int]:
        """The blocks that are held."""
        return set(self._holds)

    def will_free(self) -> bool:
        """Whether the engine gets free blocks if it waits until the held ones are released."""
        return any(map(self._engine.is_ours_alone, self._holds))

    def _blocks(self, store: StoreStep) -> list[int]:
        blocks = [block for table in self._whole_tables for block in store.blocks[table] if block != NO_BLOCK]
        return blocks + [state.block for state in store.states]
