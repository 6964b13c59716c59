"""A cache and an engine's blocks as dicts, for testing the halves without either.

`DictService` is correct and fails on request; `DictCopier` moves one value per token. Both are small enough to be
verified by reading. `CopyQueue` turns any copier into that of a device whose copies complete asynchronously, behind the
engine's steps.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Unpack

from kv_core.cost import Costs, Measured, choose
from kv_core.coverage import ALL, PLAIN, ChunkShape, longest_hit
from kv_core.device import LayerwiseCopier
from kv_core.errors import CopyFailed, MisuseError
from kv_core.keys import ChunkKey
from kv_core.service import (
    CacheCounts,
    Ended,
    Holder,
    LeaseId,
    LoadFailed,
    LookupPlan,
    ReadLease,
    StoreOptions,
    WriteLease,
)
from kv_core.transfer import HostExtent, TransferPlan

POOL = "dict"


@dataclass(slots=True)
class DictService:
    """A `CacheService` in which chunk i lies at offset i of an endless pool, so nothing is ever evicted.

    fail_loads: how many of the next loads find their last chunk gone.
    expire_leases: how many of the next releases of read leases say that the lease had expired.
    refuse_stores: how many of the next stores get no room.
    pending: how many of the next lookups that miss and may wait say that more is on its way.
    held: chunk → its offset in the pool.
    promised: holder → how many chunks.
    open_leases: those that are neither committed nor released.
    ended: the holders that ended, in order.
    allocations: what `allocated` was called with, in order.
    samples: what `measured` was, one after another.
    hold_s, retain_s: what `begin_store` was called with, in order.
    tiers_read, tiers_written: the tiers that `lookup` and `begin_store` were called with, in order.
    tiers: their names.
    received_keys: what `received` was called with, in order. ended_keys: the same of `turn_ended`.
    lease_s: its leases do not expire, whatever this says.
    """

    fail_loads: int = 0
    expire_leases: int = 0
    refuse_stores: int = 0
    pending: int = 0
    lease_s: float = 300.0
    held: dict[ChunkKey, int] = field(default_factory=dict)
    promised: dict[Holder, int] = field(default_factory=dict)
    open_leases: dict[LeaseId, ReadLease | WriteLease] = field(default_factory=dict)
    ended: list[Holder] = field(default_factory=list)
    allocations: list[dict[Holder, int]] = field(default_factory=list)
    samples: list[Measured] = field(default_factory=list)
    hold_s: list[float] = field(default_factory=list)
    retain_s: list[float] = field(default_factory=list)
    tiers_read: list[Sequence[str] | None] = field(default_factory=list)
    tiers_written: list[Sequence[str] | None] = field(default_factory=list)
    tiers: tuple[str, ...] = (POOL,)
    received_keys: list[list[ChunkKey]] = field(default_factory=list)
    ended_keys: list[list[ChunkKey]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        wait_for_promotion: bool = False,
        costs: Costs | None = None,
        tiers: Sequence[str] | None = None,
        reads_files: bool = False,
    ) -> LookupPlan:
        self.tiers_read.append(tiers)
        held = [key in self.held for key in keys]
        chunks, requested = longest_hit(held, shape), len(keys) // shape.keys_per_chunk
        whole = replace(shape, groups=tuple(group for group in shape.groups if group.kind == "all") or (ALL,))
        of_whole = [group.kind == "all" for group in shape.groups for _ in range(shape.shards)] * requested
        prefix = longest_hit(list(compress(held, of_whole)), whole) if any(of_whole) else chunks
        self.promised.pop(holder, None)
        if chunks:
            self.promised[holder] = chunks
        ended = Ended.ALL_HELD if chunks == requested else Ended.INCOMPLETE if prefix > chunks else Ended.ABSENT
        if wait_for_promotion and self.pending and ended is not Ended.ALL_HELD:
            self.pending -= 1
            ended = Ended.PENDING
        choice = None if costs is None else choose(costs, shape.chunk_tokens, chunks)
        return LookupPlan(holder, chunks, ended, ("dict",) * chunks, prefix, choice=choice)

    def renew(self, holder: Holder) -> bool:
        return holder in self.promised

    def load(self, keys: Sequence[ChunkKey], holder: Holder, *, lasting: bool = False) -> ReadLease | LoadFailed:
        missing = tuple(key for key in keys if key not in self.held)
        if self.fail_loads:
            self.fail_loads -= 1
            missing = tuple(keys[-1:])
        if missing:
            return LoadFailed(missing, "the chunks have gone")
        extents = tuple(HostExtent(POOL, self.held[key], 1) for key in keys)
        lease = ReadLease(LeaseId(next(self._numbers)), tuple(keys), extents)
        self.open_leases[lease.id] = lease
        return lease

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder, **options: Unpack[StoreOptions]) -> WriteLease:
        self.hold_s.append(options.get("hold_s", 0.0))
        self.retain_s.append(options.get("retain_s", 0.0))
        self.tiers_written.append(options.get("tiers"))
        writing = {key for lease in self.open_leases.values() if isinstance(lease, WriteLease) for key in lease.keys}
        missing = tuple(key for key in keys if key not in self.held and key not in writing)
        refused = ""
        if missing and self.refuse_stores:
            self.refuse_stores -= 1
            missing, refused = (), "no room"
        extents = tuple(HostExtent(POOL, next(self._numbers), 1) for _ in missing)
        lease = WriteLease(LeaseId(next(self._numbers)), missing, extents, refused)
        self.open_leases[lease.id] = lease
        return lease

    def commit(self, lease: WriteLease) -> None:
        if self.open_leases.pop(lease.id, None) is None:
            raise MisuseError("committed a lease that is not open")
        self.held.update((key, extent.offset) for key, extent in zip(lease.keys, lease.extents, strict=True))

    def release(self, lease: ReadLease | WriteLease) -> bool:
        if self.open_leases.pop(lease.id, None) is None:
            return False
        if isinstance(lease, ReadLease) and self.expire_leases:
            self.expire_leases -= 1
            return False
        if isinstance(lease, ReadLease):  # False: forgotten since, even if they are held again
            return all(
                self.held.get(key) == extent.offset for key, extent in zip(lease.keys, lease.extents, strict=True)
            )
        return True

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        self.allocations.append(dict(blocks))

    def measured(self, samples: Sequence[Measured]) -> None:
        self.samples += samples

    def received(self, keys: Sequence[ChunkKey]) -> None:
        self.received_keys.append(list(keys))

    def retainable(self, keys: Sequence[ChunkKey]) -> int:
        return len(keys)

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        self.ended_keys.append(list(keys))

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def end(self, holder: Holder) -> None:
        self.promised.pop(holder, None)
        self.ended.append(holder)

    def clear(self) -> None:
        self.held.clear()

    def counts(self) -> CacheCounts:
        raise MisuseError("a dict keeps no counts; look at its fields")


class Done:
    """A copy that has arrived."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def hold_engine(self) -> None:
        return None


class Failed:
    """A copy that never will."""

    def done(self) -> bool:
        raise CopyFailed("the bus is on fire")

    def wait(self) -> None:
        raise CopyFailed("the bus is on fire")

    def hold_engine(self) -> None:
        self.wait()


@dataclass(slots=True)
class DictCopier(LayerwiseCopier):
    """A `DeviceCopier` between `slots` (slot → value) and `pool` (chunk offset, token in chunk → value)."""

    slots: dict[int, object] = field(default_factory=dict)
    pool: dict[tuple[int, int], object] = field(default_factory=dict)
    fail_copies: int = 0
    loaded_tokens: int = 0

    @property
    def is_queued(self) -> bool:
        return False

    @property
    def stores_behind(self) -> bool:
        return self.is_queued

    def attach(self, pool: str, view: memoryview) -> None:
        raise MisuseError(f"a dict has no memory to attach pool {pool} to ({len(view)} bytes)")

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        return None

    def load_layers(self, plan: TransferPlan) -> list[Done | Failed]:
        return [self.load(plan)]

    def load(self, plan: TransferPlan) -> Done | Failed:
        if self._fails():
            return Failed()
        for copy in plan.copies:
            for token in range(copy.tokens):
                self.slots[copy.first_slot + token] = self.pool[copy.extent.offset, copy.first_token + token]
        self.loaded_tokens += plan.tokens
        return Done()

    def store(self, plan: TransferPlan) -> Done | Failed:
        if self._fails():
            return Failed()
        for copy in plan.copies:
            for token in range(copy.tokens):
                self.pool[copy.extent.offset, copy.first_token + token] = self.slots[copy.first_slot + token]
        return Done()

    def store_layers(self, plan: TransferPlan) -> Any:
        return None

    def _fails(self) -> bool:
        if self.fail_copies:
            self.fail_copies -= 1
            return True
        return False


@dataclass(slots=True)
class LayeredCopier(DictCopier):
    """One whose layers a forward pass computes one after another. A chunk is right if all of them agree.

    layers: how many there are.
    computed: how many of them the forward pass has behind it.
    before: slot → what the layers have there that are still to be computed.
    """

    layers: int = 3
    computed: int = 3
    before: dict[int, object] = field(default_factory=dict)

    def begin(self, slots: Mapping[int, object]) -> None:
        """A forward pass begins. slots: what was there before it."""
        self.before = {slot: slots.get(slot) for slot, new in self.slots.items() if slots.get(slot) != new}
        self.computed = 0

    def load(self, plan: TransferPlan) -> Done | Failed:
        if self._fails():
            return Failed()
        for copy in plan.copies:
            for token in range(copy.tokens):
                values: Any = self.pool[copy.extent.offset, copy.first_token + token]
                alike = len(values) == self.layers and len(set(values.values())) == 1
                self.slots[copy.first_slot + token] = values[0] if alike else f"layers that differ: {values}"
        self.loaded_tokens += plan.tokens
        return Done()

    def store(self, plan: TransferPlan) -> Done | Failed:
        return self.gather(plan, range(self.layers))

    def store_layers(self, plan: TransferPlan) -> "Layers":
        return Layers(self.layers, lambda layers: self.gather(plan, layers))

    def gather(self, plan: TransferPlan, layers: Sequence[int]) -> Done | Failed:
        if self._fails():
            return Failed()
        for copy in plan.copies:
            for token in range(copy.tokens):
                slot = copy.first_slot + token
                values: Any = self.pool.setdefault((copy.extent.offset, copy.first_token + token), {})
                for layer in layers:
                    known = layer < self.computed or slot not in self.before
                    values[layer] = self.slots[slot] if known else self.before[slot]
        return Done()

    def by_layer(self) -> "list[LayerOf]":
        return [LayerOf(self, layer) for layer in range(self.layers)]


@dataclass(frozen=True, slots=True)
class LayerOf:
    """One layer of such a copier."""

    copier: LayeredCopier
    layer: int

    def store(self, plan: TransferPlan) -> Done | Failed:
        return self.copier.gather(plan, (self.layer,))


@dataclass(frozen=True, slots=True)
class Layers:
    """A `LayerwiseStore`."""

    layers: int
    gather: Callable[[Sequence[int]], Any]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several copies as one."""

    copies: Sequence["QueuedCopy"]

    def done(self) -> bool:
        """Also a failure shows only when nothing is under way any more."""
        return all(copy.has_ended for copy in self.copies) and all(copy.done() for copy in self.copies)

    def wait(self) -> None:
        for copy in self.copies:
            with suppress(CopyFailed):
                copy.wait()
        self.done()

    def hold_engine(self) -> None:
        for copy in self.copies:
            copy.queue.catch_up(copy)
        self.done()


@dataclass(slots=True, eq=False)
class QueuedCopy:
    """A submitted copy; nothing of it has happened until its queue has come to it.

    move: makes it.
    plan: what to copy.
    is_store: off the device, rather than onto it.
    layers: how many it moves.
    """

    queue: "CopyQueue"
    move: Callable[[TransferPlan], Any]
    plan: TransferPlan
    is_store: bool
    layers: int = 1
    failure: str = ""
    has_ended: bool = False

    def done(self) -> bool:
        if self.has_ended and self.failure:
            raise CopyFailed(self.failure)
        return self.has_ended

    def wait(self) -> None:
        self.queue.waits += 1
        while not self.has_ended:
            self.queue.run()
        self.done()

    def hold_engine(self) -> None:
        """As on a device, which waits while the host goes on."""
        self.queue.catch_up(self)
        self.done()


@dataclass(slots=True)
class CopyQueue:
    """A device's queue of copies. They are made when the test says so and in their order: each reads what is there
    then, and so as late as a device might.

    pending: those that have not been made.
    waits: how often a caller has waited for one.
    submitted, before, after: called with each copy when it is submitted, before it is made, and when it has been.
    """

    pending: deque[QueuedCopy] = field(default_factory=deque)
    waits: int = 0
    submitted: Callable[[QueuedCopy], None] = lambda copy: None
    before: Callable[[QueuedCopy], None] = lambda copy: None
    after: Callable[[QueuedCopy], None] = lambda copy: None

    def run(self, copies: int = 1, *, failure: str = "") -> None:
        """Execute this many of the oldest copies, or let them fail half way."""
        for _ in range(min(copies, len(self.pending))):
            copy = self.pending[0]
            self.before(copy)
            try:
                copy.move(copy.plan).wait()
                self.after(copy)
            except CopyFailed as error:
                failure = failure or str(error)
            copy.failure = failure
            self.pending.popleft()
            copy.has_ended = True

    def catch_up(self, copy: QueuedCopy) -> None:
        """Make all up to this one."""
        while not copy.has_ended:
            self.run()


class QueuedCopier(LayerwiseCopier):
    """Another copier's copies, behind one another in a queue."""

    def __init__(self, copier: Any, queue: CopyQueue, layers: Sequence[Any] = ()) -> None:
        """copier: a `DeviceCopier` that copies at once. layers: those that copy one layer each; `copier` if it has
        only one."""
        self._copier = copier
        self._queue = queue
        self._layers = layers or (copier,)
        self._copiers = (copier, *layers)

    @property
    def is_queued(self) -> bool:
        return True

    @property
    def stores_behind(self) -> bool:
        return self.is_queued

    def attach(self, pool: str, view: memoryview) -> None:
        for copier in self._copiers:
            copier.attach(pool, view)

    def detach(self, pool: str) -> None:
        """Makes the copies first that use it, as a device's copier waits for them. One that cannot be made is for the
        test that left it."""
        with suppress(Exception):
            while any(self._uses(copy, pool) for copy in self._queue.pending):
                self._queue.run()
        for copier in self._copiers:
            copier.detach(pool)

    def _uses(self, copy: QueuedCopy, pool: str) -> bool:
        is_ours = getattr(copy.move, "__self__", None) in self._copiers
        return is_ours and any(part.extent.pool == pool for part in copy.plan.copies)

    def prepare(self, extents: Sequence[HostExtent]) -> None:
        self._copier.prepare(extents)

    def load_layers(self, plan: TransferPlan) -> list[QueuedCopy]:
        return [self._queued(layer.load, plan) for layer in self._layers]

    def load(self, plan: TransferPlan) -> QueuedCopy:
        return self._queued(self._copier.load, plan, layers=len(self._layers))

    def store(self, plan: TransferPlan) -> QueuedCopy:
        return self._queued(self._copier.store, plan, is_store=True, layers=len(self._layers))

    def store_layers(self, plan: TransferPlan) -> Layers | None:
        if len(self._layers) < 2:
            return None

        def gather(layers: Sequence[int]) -> AllOf:
            return AllOf([self._queued(self._layers[layer].store, plan, is_store=True) for layer in layers])

        return Layers(len(self._layers), gather)

    def _queued(
        self, move: Callable[[TransferPlan], Any], plan: TransferPlan, *, is_store: bool = False, layers: int = 1
    ) -> QueuedCopy:
        copy = QueuedCopy(self._queue, move, plan, is_store, layers)
        self._queue.pending.append(copy)
        self._queue.submitted(copy)
        return copy
