"""The worker half: carries out step plans between the cache's extents and the engine's blocks.

It lives on the engine's worker thread, starts no thread of its own and is polled once a step. A load that cannot be
completed for any reason ends the same way: the keys are forgotten first, so that the engine's next question is a miss
and not the same failure again, and then the request is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_core.connect.device import CopyEvent, DeviceCopier
from kv_core.connect.shape import ConnectShape
from kv_core.connect.step import LoadStep, StepPlan, StepReport, StoreStep
from kv_core.errors import KVError
from kv_core.keys import ChunkKey, keys_in
from kv_core.log import limited_logger
from kv_core.service import CacheService, LoadFailed, ReadLease, WriteLease
from kv_core.transfer import Copy, TransferPlan, plan_transfer

_log = limited_logger(__name__)


@dataclass(slots=True)
class WorkerCounts:
    """What the half did since it was made.

    loads_finished, loads_failed: requests.
    tokens_loaded: of those that did not fail.
    chunks_stored: that were committed.
    stores_failed: leases that were given up.
    """

    loads_finished: int = 0
    loads_failed: int = 0
    tokens_loaded: int = 0
    chunks_stored: int = 0
    stores_failed: int = 0


@dataclass(slots=True)
class _Load:
    """One request's load, over all groups.

    step: what is to be loaded, and where.
    copying: leases, and when the copy out of each has arrived.
    failure: the first reason to give it up, or "".
    suspect: what to forget then, so that it does not fail again.
    """

    step: LoadStep
    copying: list[tuple[ReadLease, CopyEvent]] = field(default_factory=list)
    failure: str = ""
    suspect: set[ChunkKey] = field(default_factory=set)

    def fail(self, reason: str, keys: Sequence[ChunkKey]) -> None:
        self.failure = self.failure or reason
        self.suspect.update(keys)


class WorkerHalf:
    """One rank's. Not thread-safe: it belongs to the worker's thread."""

    def __init__(
        self,
        service: CacheService,
        shape: ConnectShape,
        copiers: Sequence[DeviceCopier],
        *,
        shard: int,
        name: str,
        rank: int | None = None,
        stores: bool = True,
    ) -> None:
        """copiers: one for each group, in the order of `shape.groups`. shard: which share of a chunk it has.
        rank: tells it from others with the same share; the shard's number if not said. stores: of these one does."""
        self._service = service
        self._shape = shape
        self._copiers = tuple(copiers)
        self._shard = shard
        self._stores = stores
        self._holder = f"{name}/worker{shard if rank is None else rank}"
        self._loading: dict[str, _Load] = {}
        self._storing: list[tuple[WriteLease, CopyEvent]] = []
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self.counts = WorkerCounts()

    def start_loads(self, plan: StepPlan) -> None:
        """Lease every chunk to be loaded, and start the copies."""
        for request_id in plan.refused:
            self._end(request_id, "the allocation did not match what was offered")
        for step in plan.loads:
            load = self._loading[step.request_id] = _Load(step)
            for group in range(len(self._copiers)):
                match self._service.load(self._keys(plan.space_id, step, group), self._holder):
                    case ReadLease() as lease:
                        self._start_copy(load, lease, group)
                    case LoadFailed(missing, reason):
                        load.fail(reason, missing)
        self._finish_loads()

    def start_stores(self, plan: StepPlan) -> None:
        """Reserve room for the chunks this step completed and start gathering them. The forward pass is over."""
        for step in plan.stores if self._stores else ():
            for group in range(len(self._copiers)):
                self._start_store(plan.space_id, step, group)

    def finish_stores(self) -> None:
        """Wait for the gathers and publish them. After this the engine may give the blocks to anyone."""
        for lease, event in self._storing:
            try:
                event.wait()
                self._service.commit(lease)
                self.counts.chunks_stored += len(lease.keys)
            except KVError as error:
                self._service.release(lease)
                self._not_stored(error)
        self._storing.clear()

    def poll(self) -> StepReport:
        """Loads that ended since the last poll."""
        self._finish_loads()
        report = StepReport(frozenset(self._ended), frozenset(self._failed))
        self._ended.clear()
        self._failed.clear()
        return report

    def close(self) -> None:
        """Give back whatever is held. Loads under way are not reported: there is nobody left to hear it."""
        for load in self._loading.values():
            for _, event in load.copying:
                self._settle(event)
        for _, event in self._storing:
            self._settle(event)
        self._loading.clear()
        self._storing.clear()
        self._service.end(self._holder)

    def _keys(self, space_id: bytes, step: LoadStep | StoreStep, group: int) -> list[ChunkKey]:
        return keys_in(space_id, step.digests, groups=(group,), shards=(self._shard,), tenant=step.tenant)

    def _plan(self, step: LoadStep, lease: ReadLease, group: int) -> TransferPlan:
        return plan_transfer(
            lease.extents,
            step.blocks[group],
            chunk_tokens=self._shape.chunk_tokens,
            block_tokens=self._shape.groups[group].block_tokens,
            first_token=step.first_token,
            last_token=step.last_token,
            extents_from_chunk=step.first_chunk,
        )

    def _finish_loads(self) -> None:
        """Those whose copies have arrived."""
        for load in list(self._loading.values()):
            if all(self._arrived(load, lease, event) for lease, event in load.copying):
                self._finish(load)

    def _start_copy(self, load: _Load, lease: ReadLease, group: int) -> None:
        try:
            event = self._copiers[group].load(self._plan(load.step, lease, group))
        except KVError as error:
            load.fail(str(error), lease.keys)
            self._service.release(lease)
        else:
            load.copying.append((lease, event))

    def _arrived(self, load: _Load, lease: ReadLease, event: CopyEvent) -> bool:
        try:
            return event.done()
        except KVError as error:
            load.fail(str(error), lease.keys)
            return True

    def _finish(self, load: _Load) -> None:
        for lease, _ in load.copying:
            if not self._service.release(lease):
                load.fail(
                    "the lease expired, or its chunks were forgotten, while the bytes were being copied", lease.keys
                )
        step = load.step
        del self._loading[step.request_id]
        if load.failure:
            self._service.forget(list(load.suspect))
        else:
            self.counts.tokens_loaded += step.last_token - step.first_token
        self._end(step.request_id, load.failure)

    def _end(self, request_id: str, failure: str) -> None:
        self._ended.add(request_id)
        if failure:
            _log.warning("the load of request %s failed and will be computed instead: %s", request_id, failure)
            self._failed.add(request_id)
            self.counts.loads_failed += 1
        else:
            self.counts.loads_finished += 1

    def _start_store(self, space_id: bytes, step: StoreStep, group: int) -> None:
        keys = self._keys(space_id, step, group)
        lease = self._service.begin_store(keys, self._holder)
        if not lease.keys:
            self._service.release(lease)
            return
        chunk_tokens, block_tokens = self._shape.chunk_tokens, self._shape.groups[group].block_tokens
        number_of = {key: number for number, key in enumerate(keys)}
        copies: list[Copy] = []
        try:
            for key, extent in zip(lease.keys, lease.extents, strict=True):
                chunk = number_of[key]
                copies += plan_transfer(
                    [extent],
                    step.blocks[group],
                    chunk_tokens=chunk_tokens,
                    block_tokens=block_tokens,
                    first_token=chunk * chunk_tokens,
                    last_token=(chunk + 1) * chunk_tokens,
                    extents_from_chunk=chunk,
                ).copies
            event = self._copiers[group].store(TransferPlan(tuple(copies), chunk_tokens))
        except KVError as error:
            self._service.release(lease)
            self._not_stored(error)
        else:
            self._storing.append((lease, event))

    def _not_stored(self, error: KVError) -> None:
        self.counts.stores_failed += 1
        _log.warning("chunks could not be stored; nothing of them remains: %s", error)

    def _settle(self, event: CopyEvent) -> None:
        try:
            event.wait()
        except KVError as error:
            _log.warning("a copy under way at shutdown failed: %s", error)
