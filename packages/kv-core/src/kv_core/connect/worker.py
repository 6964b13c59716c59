"""The worker half: executes step plans between the cache's extents and the engine's blocks.

It runs on the engine's worker thread, starts no thread of its own and is polled once per step. A load that cannot be
completed ends the same way whatever the reason: its keys are forgotten first, so that the engine's next lookup is a
miss and not the same failure again, and then the request is reported.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kv_core.connect.device import CopyEvent, LayerwiseCopier
from kv_core.connect.layerwise import LayerLoads, LayerwiseReport
from kv_core.connect.shape import NO_BLOCK, ConnectShape, load_from, stored_from, without_holes
from kv_core.connect.step import NO_REPORT, LoadStep, StepPlan, StepReport, StoreStep
from kv_core.errors import InputError, KVError
from kv_core.extent import HostExtent
from kv_core.keys import ChunkKey, keys_in
from kv_core.log import limited_logger
from kv_core.service import CacheService, LoadFailed, ReadLease, WriteLease
from kv_core.transfer import Copy, TransferPlan, plan_transfer

_log = limited_logger(__name__)


@dataclass(slots=True)
class WorkerCounts:
    """Counts since the half was created.

    loads_finished, loads_failed: requests.
    tokens_loaded: of those that did not fail.
    bytes_loaded: the same, as whole payloads.
    chunks_stored: chunks committed.
    bytes_stored: their payloads.
    tokens_stored: of those, by one group's chunks of shard 0: a group that needs the whole prefix, if there is one.
    stores_failed: leases that were aborted.
    chunks_dropped: chunks not stored because too much was in flight already.
    """

    loads_finished: int = 0
    loads_failed: int = 0
    tokens_loaded: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    bytes_stored: int = 0
    tokens_stored: int = 0
    stores_failed: int = 0
    chunks_dropped: int = 0


@dataclass(slots=True)
class _Load:
    """One request's load, over all groups.

    step: what is to be loaded, and where.
    lease: on everything that it takes; None if it could not be had.
    copying: when the copy into each group's blocks has arrived.
    failure: the first reason to give it up, or "".
    suspect: what to forget then, so that it does not fail again.
    """

    step: LoadStep
    lease: ReadLease | None = None
    copying: list[CopyEvent] = field(default_factory=list)
    failure: str = ""
    suspect: set[ChunkKey] = field(default_factory=set)

    def fail(self, reason: str, keys: Sequence[ChunkKey]) -> None:
        self.failure = self.failure or reason
        self.suspect.update(keys)


@dataclass(slots=True)
class _Store:
    """A request's chunks on their way to the pool, over all groups.

    number: of the plan that they were stored by.
    lease: on their room.
    nbytes: of their payloads.
    tokens: of one group's, as `WorkerCounts.tokens_stored` counts them.
    copying: when each group's have arrived.
    failure: why they are given up, once nothing is copied any more.
    """

    number: int
    lease: WriteLease
    nbytes: int
    tokens: int
    copying: list[CopyEvent] = field(default_factory=list)
    failure: KVError | None = None


@dataclass(frozen=True, slots=True)
class _Gather:
    """What one group stores of a request.

    group: its number.
    chunks: numbers of the chunks, ascending.
    plan: for one of these chunks, where its bytes come from.
    """

    group: int
    chunks: Sequence[int]
    plan: Callable[[int, HostExtent], TransferPlan]


@dataclass(frozen=True, slots=True)
class _Part:
    """One group's part of a load.

    group: its number.
    first_token: where filling its blocks begins.
    first_chunk: the chunk of this token.
    keys: of its chunks from there on.
    """

    group: int
    first_token: int
    first_chunk: int
    keys: list[ChunkKey]


class WorkerHalf:
    """One rank's. Not thread-safe: it belongs to the worker's thread."""

    def __init__(
        self,
        service: CacheService,
        shape: ConnectShape,
        copiers: Sequence[LayerwiseCopier],
        *,
        shard: int,
        name: str,
        rank: int | None = None,
        stores: bool = True,
        max_in_flight_bytes: int = sys.maxsize,
    ) -> None:
        """copiers: one for each group, in the order of `shape.groups`. shard: which share of a chunk it has.
        rank: tells it from others with the same share; the shard's number if not said. stores: of these one does.
        max_in_flight_bytes: what may be on its way to the pool while the engine goes on. More is not stored."""
        self._service = service
        self._shape = shape
        self._copiers = tuple(copiers)
        self._shard = shard
        self._stores = stores
        self._holder = f"{name}/worker{shard if rank is None else rank}"
        self._loading: dict[str, _Load] = {}
        self._storing: list[_Store] = []
        self._max_in_flight_bytes = max_in_flight_bytes
        self._in_flight_bytes = 0
        self._number = 0
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self.layers = LayerLoads(self._copiers[0])
        whole = (number for number, group in enumerate(shape.groups) if group.coverage.kind == "all")
        self._counted_group = next(whole, 0)
        self.counts = WorkerCounts()

    def start_loads(self, plan: StepPlan) -> None:
        """Start every copy, the layerwise ones first; lease the chunks of the others."""
        if not (plan.loads or plan.refused or self._loading):
            return  # most steps
        self._start_layers([step for step in plan.loads if step.extents], plan.space_id)
        for request_id in plan.refused:
            self._end(request_id, "the allocation did not match what was offered")
        for step in plan.loads:
            if step.extents:
                continue
            load = self._loading[step.request_id] = _Load(step)
            parts = [part for group in range(len(self._copiers)) if (part := self._part(plan.space_id, step, group))]
            match self._service.load([key for part in parts for key in part.keys], self._holder):
                case ReadLease() as lease:
                    load.lease = lease
                    self._start_copies(load, lease, parts)
                case LoadFailed(missing, reason):
                    load.fail(reason, missing)
        self._finish_loads()

    def take_layerwise(self, *, wait: bool = False) -> LayerwiseReport:
        """Layerwise loads that have ended since this was asked last. wait: for all whose forward pass is over."""
        report = self.layers.take_ended(wait=wait)
        if report.ended:
            self.counts.loads_finished += len(report.ended - report.failed)
            self.counts.loads_failed += len(report.failed)
        return report

    def start_stores(self, plan: StepPlan) -> None:
        """Reserve room for the chunks this step completed and start gathering them, behind the forward pass."""
        self._number = plan.number
        for step in plan.stores if self._stores else ():
            self._start_store(plan.space_id, step)

    def finish_stores(self, *, wait: bool = True) -> None:
        """Publish what has been gathered.

        wait: for all of it; after this the engine may give the blocks to anyone. False: the engine keeps the blocks
            until it reads in `stored_through` that they are not needed any more.
        """
        if not self._storing:
            return
        storing, self._storing = self._storing, []
        for store in storing:
            if wait:
                self._await(store)
            elif not self._is_copied(store):
                self._storing.append(store)
                continue
            if store.failure is None:
                self._service.commit(store.lease)
                self._count_stored(store)
            else:
                self._service.release(store.lease)
                self._not_stored(store.failure)
            self._in_flight_bytes -= store.nbytes

    @property
    def stored_through(self) -> int:
        """The number of the last plan up to which nothing is read any more."""
        return min((store.number - 1 for store in self._storing), default=self._number)

    def poll(self) -> StepReport:
        """Loads that ended since the last poll."""
        if self._loading:
            self._finish_loads()
        if not self._ended:
            return NO_REPORT
        report = StepReport(frozenset(self._ended), frozenset(self._failed))
        self._ended.clear()
        self._failed.clear()
        return report

    def close(self) -> None:
        """Release everything. Loads in progress are not reported: nobody is left to receive it."""
        for load in self._loading.values():
            for event in load.copying:
                self._settle(event)
        for store in self._storing:
            for event in store.copying:
                self._settle(event)
        self.layers.close()
        self._loading.clear()
        self._storing.clear()
        self._in_flight_bytes = 0
        self._service.end(self._holder)

    def _start_layers(self, steps: Sequence[LoadStep], space_id: bytes) -> None:
        if not steps:
            return
        requests = [step.request_id for step in steps]
        copies: list[Copy] = []
        try:
            for step in steps:
                part = self._part(space_id, step, 0)
                assert part is not None
                copies += self._plan_load(step, part, self._own(step.extents)).copies
        except KVError as error:
            self.layers.refuse(requests, str(error))
            return
        self.layers.start(requests, TransferPlan(tuple(copies), self._shape.chunk_tokens))
        self.counts.tokens_loaded += sum(step.last_token - step.first_token for step in steps)
        self.counts.bytes_loaded += sum(extent.nbytes for step in steps for extent in self._own(step.extents))

    def _own(self, extents: Sequence[HostExtent]) -> Sequence[HostExtent]:
        """This shard's, of those of all."""
        return extents[self._shard :: self._shape.shards]

    def _keys(self, space_id: bytes, digests: Sequence[bytes], tenant: bytes, group: int) -> list[ChunkKey]:
        return keys_in(space_id, digests, groups=(group,), shards=(self._shard,), tenant=tenant)

    def _part(self, space_id: bytes, step: LoadStep, group: int) -> _Part | None:
        """None: this group needs nothing of what is loaded."""
        first_token = load_from(self._shape.groups[group], step.first_token, step.last_token)
        if first_token >= step.last_token:
            return None
        chunk = first_token // self._shape.chunk_tokens
        digests = step.digests[chunk - step.first_chunk :]
        return _Part(group, first_token, chunk, self._keys(space_id, digests, step.tenant, group))

    def _plan_load(self, step: LoadStep, part: _Part, extents: Sequence[HostExtent]) -> TransferPlan:
        group = self._shape.groups[part.group]
        table = step.blocks[group.table]
        if group.coverage.kind == "all":
            into: Sequence[int] = table
        else:
            first_block = part.first_token // group.block_tokens
            into = table[: -(-step.last_token // group.block_tokens)]
            if NO_BLOCK in into[first_block:]:
                raise InputError(f"group {part.group} has no block for a token that is needed: {into[first_block:]}")
        if group.coverage.kind == "state":
            return TransferPlan((Copy(extents[-1], 0, into[-1], 1),), 1)
        return plan_transfer(
            extents,
            into,
            chunk_tokens=self._shape.chunk_tokens,
            block_tokens=group.block_tokens,
            first_token=part.first_token,
            last_token=step.last_token,
            extents_from_chunk=part.first_chunk,
        )

    def _finish_loads(self) -> None:
        """Finish the loads whose copies are complete."""
        for load in list(self._loading.values()):
            if all(self._arrived(load, event) for event in load.copying):
                self._finish(load)

    def _start_copies(self, load: _Load, lease: ReadLease, parts: Sequence[_Part]) -> None:
        at = 0
        for part in parts:
            extents = lease.extents[at : at + len(part.keys)]
            at += len(part.keys)
            try:
                load.copying.append(self._copiers[part.group].load(self._plan_load(load.step, part, extents)))
            except KVError as error:
                load.fail(str(error), part.keys)
                return

    def _arrived(self, load: _Load, event: CopyEvent) -> bool:
        try:
            return event.done()
        except KVError as error:
            load.fail(str(error), () if load.lease is None else load.lease.keys)
            return True

    def _finish(self, load: _Load) -> None:
        if load.lease is not None and not self._service.release(load.lease):
            load.fail(
                "the lease expired, or its chunks were forgotten, while the bytes were being copied", load.lease.keys
            )
        step = load.step
        del self._loading[step.request_id]
        if load.failure:
            self._service.forget(list(load.suspect))
        else:
            self.counts.tokens_loaded += step.last_token - step.first_token
            if load.lease is not None:
                self.counts.bytes_loaded += sum(extent.nbytes for extent in load.lease.extents)
        self._end(step.request_id, load.failure)

    def _end(self, request_id: str, failure: str) -> None:
        self._ended.add(request_id)
        if failure:
            _log.warning("the load of request %s failed and will be computed instead: %s", request_id, failure)
            self._failed.add(request_id)
            self.counts.loads_failed += 1
        else:
            self.counts.loads_finished += 1

    def _start_store(self, space_id: bytes, step: StoreStep) -> None:
        """Reserve room for what the groups keep of this step, all at once, and start gathering it."""
        gathers = [gather for group in range(len(self._copiers)) if (gather := self._gather(step, group)).chunks]
        whole: list[tuple[int, int, ChunkKey]] = []
        others: list[tuple[int, int, ChunkKey]] = []
        for gather in gathers:
            digests = [step.digests[chunk] for chunk in gather.chunks]
            keys = self._keys(space_id, digests, step.tenant, gather.group)
            needs_all = self._shape.groups[gather.group].coverage.kind == "all"
            named = whole if needs_all else others
            named += zip(gather.chunks, itertools.repeat(gather.group), keys)
        named = sorted(whole) + others  # as a lookup has them: by chunks, and then the others
        lease = self._reserve([key for _, _, key in named], step)
        if lease is None:
            return
        extent_of = dict(zip(lease.keys, lease.extents, strict=True))
        got = {(chunk, group): extent_of[key] for chunk, group, key in named if key in extent_of}
        store = _Store(self._number, lease, _nbytes(lease), self._tokens_counted(step, got))
        self._storing.append(store)
        self._in_flight_bytes += store.nbytes
        for gather in gathers:
            extents = [(chunk, got[chunk, gather.group]) for chunk in gather.chunks if (chunk, gather.group) in got]
            if not extents:
                continue
            try:
                plans = [gather.plan(chunk, extent) for chunk, extent in extents]
                copies = tuple(copy for of_chunk in plans for copy in of_chunk.copies)
                store.copying.append(self._copiers[gather.group].store(TransferPlan(copies, plans[0].chunk_tokens)))
            except KVError as error:  # other groups' may be under way: their room is given back when they have ended
                store.failure = error
                return

    def _gather(self, step: StoreStep, number: int) -> _Gather:
        group, chunk_tokens = self._shape.groups[number], self._shape.chunk_tokens
        if group.coverage.kind == "state":
            blocks = {state.chunk: state.block for state in step.states if state.table == group.table}
            return _Gather(
                number,
                sorted(blocks),
                lambda chunk, extent: TransferPlan((Copy(extent, 0, blocks[chunk], 1),), 1),
            )
        table: Sequence[int] = step.blocks[group.table]
        first_chunk, chunks = 0, len(step.digests)
        if group.coverage.kind != "all":
            first_chunk = stored_from(group, table, chunks, chunk_tokens)
            table = without_holes(table)

        def plan(chunk: int, extent: HostExtent) -> TransferPlan:
            tail_tokens = step.tail_tokens if chunk == chunks - 1 else 0
            made = plan_transfer(
                [extent],
                table,
                chunk_tokens=chunk_tokens,
                block_tokens=group.block_tokens,
                first_token=chunk * chunk_tokens,
                last_token=chunk * chunk_tokens + (tail_tokens or chunk_tokens),
                extents_from_chunk=chunk,
            )
            return made.repeated() if tail_tokens else made

        return _Gather(number, range(first_chunk, chunks), plan)

    def _tokens_counted(self, step: StoreStep, places: Iterable[tuple[int, int]]) -> int:
        if self._shard:
            return 0
        chunks = [chunk for chunk, group in places if group == self._counted_group]
        tokens = len(chunks) * self._shape.chunk_tokens
        if step.tail_tokens and chunks and chunks[-1] == len(step.digests) - 1:
            tokens -= self._shape.chunk_tokens - step.tail_tokens
        return tokens

    def _reserve(self, keys: Sequence[ChunkKey], step: StoreStep) -> WriteLease | None:
        """Room for the leading ones of these that are not held and may be on their way as well; None: for none."""
        begin = partial(self._service.begin_store, holder=self._holder, hold_s=step.hold_ms / 1000, tiers=step.tiers)
        lease = begin(keys) if keys else None
        if lease is not None and self._number and lease.keys:
            room = self._max_in_flight_bytes - self._in_flight_bytes
            sums = itertools.accumulate(extent.nbytes for extent in lease.extents)
            fit = sum(1 for nbytes in sums if nbytes <= room)
            if not self._storing:
                fit = max(fit, 1)  # or nothing of chunks that are larger than all that may be on its way
            if fit < len(lease.keys):
                self._service.release(lease)
                self.counts.chunks_dropped += len(lease.keys) - fit
                leading = keys[: keys.index(lease.keys[fit])]
                lease = begin(leading) if fit else None
        if lease is not None and not lease.keys:
            self._service.release(lease)
            return None
        return lease

    def _count_stored(self, store: _Store) -> None:
        counts = self.counts
        counts.chunks_stored += len(store.lease.keys)
        counts.bytes_stored += store.nbytes
        counts.tokens_stored += store.tokens

    def _await(self, store: _Store) -> None:
        for event in store.copying:
            try:
                event.wait()
            except KVError as error:
                store.failure = store.failure or error

    def _is_copied(self, store: _Store) -> bool:
        """Whether no copy of it is under way any more."""
        for event in store.copying:
            try:
                if not event.done():
                    return False
            except KVError as error:
                store.failure = store.failure or error
        return True

    def _not_stored(self, error: KVError) -> None:
        self.counts.stores_failed += 1
        _log.warning("chunks could not be stored; nothing of them remains: %s", error)

    def _settle(self, event: CopyEvent) -> None:
        try:
            event.wait()
        except KVError as error:
            _log.warning("a copy under way at shutdown failed: %s", error)


def _nbytes(lease: WriteLease) -> int:
    return sum(extent.nbytes for extent in lease.extents)
