"""The worker half: executes step plans between the cache's extents and the engine's blocks.

It runs on the engine's worker thread, starts no thread of its own and is polled once per step. A load that cannot be
completed ends the same way whatever the reason: its keys are forgotten first, so that the engine's next lookup is a
miss and not the same failure again, and then the request is reported.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kv_core.device import FileRead, LayerwiseCopier
from kv_core.errors import InputError, KVError
from kv_core.keys import ChunkKey, keys_in
from kv_core.log import limited_logger
from kv_core.service import CacheService, LoadFailed, ReadLease
from kv_core.shape import NO_BLOCK, ConnectShape, load_from
from kv_core.transfer import Copy, HostExtent, Move, TransferPlan, plan_transfer

from kv_connect.figures import WorkerCounts
from kv_connect.halves.copies import Copies, start_each
from kv_connect.halves.direct_reads import DirectReads
from kv_connect.halves.layerwise import LayerLoads
from kv_connect.halves.step import NO_REPORT, LoadStep, StepPlan, StepReport
from kv_connect.halves.stores import Stores

_log = limited_logger(__name__)


@dataclass(slots=True)
class _Load:
    """One request's load, over all groups.

    lease: the lease on all its chunks; None if it was refused.
    copies: those into each group's blocks.
    file_keys: the chunks that are read in files, and `read` their read.
    failure: the first reason to give the load up, or "".
    suspect: the keys to forget if it fails, so that they do not fail again.
    """

    step: LoadStep
    lease: ReadLease | None = None
    copies: Copies = field(default_factory=Copies)
    failure: str = ""
    suspect: set[ChunkKey] = field(default_factory=set)
    file_keys: Sequence[ChunkKey] = ()
    read: FileRead | None = None

    def fail(self, reason: str, keys: Sequence[ChunkKey]) -> None:
        self.failure = self.failure or reason
        self.suspect.update(keys)


@dataclass(frozen=True, slots=True)
class _LoadPart:
    """One group's part of a load.

    first_token, last_token: the tokens to fill its blocks with, the last one excluded.
    first_chunk: the number of the chunk that contains this token.
    keys: the keys of the group's chunks from that chunk on.
    """

    group: int
    first_token: int
    last_token: int
    first_chunk: int
    keys: list[ChunkKey]


class WorkerHalf:
    """The worker half of one rank. Not thread-safe: used only on the worker's thread."""

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
        stores_layers: bool = False,
        direct: DirectReads | None = None,
    ) -> None:
        """copiers: one for each group, in the order of `shape.groups`. shard: the shard of a chunk that it moves.
        rank: distinguishes it from others with the same shard; default: the shard. stores: whether it stores; of ranks
        with the same shard, one does. max_in_flight_bytes: the most in flight to the pool while the engine continues.
        Chunks beyond it are not stored. stores_layers: layers are stored as they are computed, where a copier supports
        it. direct: reads what plans name in files; None: they name none."""
        self._service = service
        self._shape = shape
        self._copiers = tuple(copiers)
        self._shard = shard
        self._name = name
        self._holder = f"{name}/worker{shard if rank is None else rank}"
        self._direct = direct
        self._loading: dict[str, _Load] = {}
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self.layers = LayerLoads(self._copiers[0])
        self.counts = WorkerCounts()
        self.stores = Stores(
            service,
            shape,
            self._copiers if stores else (),
            shard=shard,
            holder=self._holder,
            counts=self.counts,
            max_in_flight_bytes=max_in_flight_bytes,
            by_layers=stores_layers,
        )

    def start_loads(self, plan: StepPlan) -> None:
        """Start every copy, the layerwise ones first; lease the chunks of the others."""
        if not (plan.loads or plan.refused):
            return  # most steps
        if layerwise := [step for step in plan.loads if step.extents]:
            self._start_layers(layerwise, plan.space_id)
        for request_id in plan.refused:
            self._end(request_id, "the allocation did not match what was offered")
        planned: list[list[tuple[Copies, TransferPlan]]] = [[] for _ in self._copiers]
        try:
            # The shortest first, so that none waits for a longer one.
            for step in sorted(plan.loads, key=lambda each: each.last_token - each.first_token):
                if not step.extents:
                    self._plan_copies(step, plan.space_id, planned)
        finally:  # none may count as loaded that was not
            start_each([(copier.load_each, of_group) for copier, of_group in zip(self._copiers, planned, strict=True)])

    def take_layerwise(self, *, wait: bool = False) -> StepReport:
        """Layerwise loads that have ended since the last call. wait: wait for all whose forward pass is over."""
        report = self.layers.take_ended(wait=wait)
        if report.finished:
            self.counts.loads_finished += len(report.finished - report.failed)
            self.counts.loads_failed += len(report.failed)
        return report

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

    @property
    def filling(self) -> frozenset[str]:
        """After `close`: requests whose blocks copies may still write to, so that they must not be reported."""
        self._loading = {name: load for name, load in self._loading.items() if not load.copies.have_stopped()}
        return frozenset(self._loading)

    def close(self) -> bool:
        """Release everything, once its copies have stopped. Loads in progress are not reported: the engine no longer
        polls. False: copies may still be in flight, and their slots stay leased."""
        for name, load in tuple(self._loading.items()):
            if load.copies.have_stopped(wait=True):
                del self._loading[name]
                if load.lease is not None:
                    self._service.release(load.lease)
        has_stored, has_loaded = self.stores.close(), self.layers.close()
        if not (has_stored and has_loaded) or self._loading:
            return False
        self._service.end(self._holder)
        return True

    def _start_layers(self, steps: Sequence[LoadStep], space_id: bytes) -> None:
        requests = [step.request_id for step in steps]
        parts: list[Move | Copy] = []
        try:
            for step in steps:
                part = self._part(space_id, step, 0)
                assert part is not None
                parts += self._plan_load(step, part, self._shard_extents(step.extents)).parts
        except KVError as error:
            self.layers.refuse(requests, str(error))
            return
        self.layers.start(requests, TransferPlan(tuple(parts), self._shape.chunk_tokens))
        self.counts.loaded_tokens += sum(step.last_token - step.first_token for step in steps)
        self.counts.loaded_bytes += sum(extent.nbytes for step in steps for extent in self._shard_extents(step.extents))

    def _shard_extents(self, extents: Sequence[HostExtent]) -> Sequence[HostExtent]:
        """This shard's extents among those of all shards."""
        return extents[self._shard :: self._shape.shards]

    def _part(self, space_id: bytes, step: LoadStep, group: int) -> _LoadPart | None:
        """None: this group needs nothing of what is loaded."""
        first_token = load_from(self._shape.groups[group], step.first_token, step.last_token)
        if first_token >= step.last_token:
            return None
        chunk = first_token // self._shape.chunk_tokens
        digests = step.digests[chunk - step.first_chunk :]
        keys = keys_in(space_id, digests, groups=(group,), shards=(self._shard,), tenant=step.tenant)
        return _LoadPart(group, first_token, step.last_token, chunk, keys)

    def _plan_load(self, step: LoadStep, part: _LoadPart, extents: Sequence[HostExtent]) -> TransferPlan:
        group = self._shape.groups[part.group]
        table = step.blocks[group.table]
        if group.coverage.kind == "all":
            blocks: Sequence[int] = table
        else:
            first_block = part.first_token // group.block_tokens
            blocks = table[: -(-part.last_token // group.block_tokens)]
            if NO_BLOCK in blocks[first_block:]:
                raise InputError(f"group {part.group} has no block for a token that is needed: {blocks[first_block:]}")
        if group.coverage.kind == "state":
            return plan_transfer(extents[-1:], blocks[-1:], chunk_tokens=1, block_tokens=1, first_token=0, last_token=1)
        stored = group.stored_tokens(self._shape.chunk_tokens)
        if stored < self._shape.chunk_tokens:  # the end of a chunk, at which a hit ends
            first = part.last_token - stored
            return plan_transfer(
                extents[-1:],
                blocks[first // group.block_tokens :],
                chunk_tokens=stored,
                block_tokens=group.block_tokens,
                first_token=part.first_token - first,
                last_token=stored,
            )
        return plan_transfer(
            extents,
            blocks,
            chunk_tokens=self._shape.chunk_tokens,
            block_tokens=group.block_tokens,
            first_token=part.first_token,
            last_token=part.last_token,
            extents_from_chunk=part.first_chunk,
        )

    def _start_read(self, load: _Load, part: _LoadPart) -> list[_LoadPart]:
        """Begin to read the chunks that are in files; returns the part that is in the pool, if any."""
        step, group = load.step, self._shape.groups[part.group]
        in_pool = len(part.keys) - len(step.files)
        between = min(step.last_token, (part.first_chunk + in_pool) * self._shape.chunk_tokens)
        load.file_keys = part.keys[in_pool:]
        try:
            assert self._direct is not None
            load.read = self._direct.reader.read(
                step.files,
                step.blocks[group.table],
                block_tokens=group.block_tokens,
                first_token=max(part.first_token, between),
                last_token=step.last_token,
            )
            load.copies.add([load.read])
        except KVError as error:
            load.fail(str(error), ())
        return [replace(part, keys=part.keys[:in_pool], last_token=between)] if in_pool else []

    def _finish_loads(self) -> None:
        """Finish the loads whose copies are complete."""
        for load in list(self._loading.values()):
            if load.copies.have_stopped():
                self._finish(load)

    def _plan_copies(
        self, step: LoadStep, space_id: bytes, planned: Sequence[list[tuple[Copies, TransferPlan]]]
    ) -> None:
        """Lease the chunks of a load. planned: receives its copies, by group."""
        load = self._loading[step.request_id] = _Load(step)
        parts = [part for group in range(len(self._copiers)) if (part := self._part(space_id, step, group))]
        if step.files:
            parts = self._start_read(load, parts[0])
        if not parts:
            return
        lease = self._service.load([key for part in parts for key in part.keys], self._holder)
        if isinstance(lease, LoadFailed):
            load.fail(lease.reason, lease.missing)
            return
        load.lease = lease
        offset = 0
        for part in parts:
            extents = lease.extents[offset : offset + len(part.keys)]
            offset += len(part.keys)
            try:
                planned[part.group].append((load.copies, self._plan_load(step, part, extents)))
            except KVError as error:
                load.copies.fail(error)

    def _finish(self, load: _Load) -> None:
        if load.copies.failure is not None:
            load.fail(str(load.copies.failure), () if load.lease is None else load.lease.keys)
        if load.read is not None and self._direct is not None and load.copies.failure is None:
            # A chunk that could not be read is not suspect: its tier passes over it for a while.
            why, damaged = self._direct.has_read(f"{self._name}/{load.step.request_id}", load.file_keys, load.read)
            if why:
                load.fail(why, damaged)
        if load.lease is not None and not self._service.release(load.lease):
            load.fail(
                "the lease expired, or its chunks were forgotten, while the bytes were being copied", load.lease.keys
            )
        step = load.step
        del self._loading[step.request_id]
        if load.failure:
            self._service.forget(list(load.suspect))
        else:
            self.counts.loaded_tokens += step.last_token - step.first_token
            if load.lease is not None:
                self.counts.loaded_bytes += sum(extent.nbytes for extent in load.lease.extents)
            self.counts.loaded_file_bytes += sum(file.nbytes for file in step.files)
        self._end(step.request_id, load.failure)

    def _end(self, request_id: str, failure: str) -> None:
        self._ended.add(request_id)
        if failure:
            _log.warning("the load of request %s failed, so its tokens are computed: %s", request_id, failure)
            self._failed.add(request_id)
            self.counts.loads_failed += 1
        else:
            self.counts.loads_finished += 1
