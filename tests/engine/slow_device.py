"""A device with a queue of copies, for real engines on a CPU, and what watches that nothing is read too late.

Copies are made when the test says so, or by a thread after a while, and not in the step that asked for them. Each
reads what is in vLLM's blocks then; so a block that was given away meanwhile is seen, and so is a commit of chunks
whose bytes are still to come.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_core.format import ChunkFormat
from kv_core.transfer import HostExtent, TransferPlan
from kv_cuda import CpuCopier, PagedLayout, bind, make_copier
from kv_testing.connect import CopyQueue, QueuedCopier, QueuedCopy


class LockedQueue(CopyQueue):
    """One whose copies several threads may make, or its own thread does (`go_on`), each in so much time.

    faults: what that thread has found wrong.
    """

    def __init__(self, **watch: Any) -> None:
        super().__init__(**watch)
        self.faults: list[str] = []
        self._changed = threading.Condition()
        self._goes_on = False
        self.copy_s = 0.0

    def run(self, copies: int = 1, *, failure: str = "") -> None:
        with self._changed:
            super().run(copies, failure=failure)
            self._changed.notify_all()

    def catch_up(self, copy: QueuedCopy) -> None:
        with self._changed:
            if self._goes_on:
                self._changed.wait_for(lambda: copy.has_ended)
        super().catch_up(copy)

    def go_on(self) -> None:
        """Make copies from now on, one after the other, each in `copy_s` for a layer, or for all where they are
        one copy."""
        self._goes_on = True
        threading.Thread(target=self._make, daemon=True).start()

    def stop(self) -> None:
        with self._changed:
            self._goes_on = False
            self._changed.notify_all()

    def note(self) -> None:
        """A copy was submitted."""
        with self._changed:
            self._changed.notify_all()

    def _make(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.pending or not self._goes_on)
            if not self._goes_on:
                return
            time.sleep(self.copy_s * self.pending[0].layers)
            try:
                self.run()
            except AssertionError as error:
                self.faults.append(str(error))


class SlowDevice:
    """The queue of every group's copies.

    stores: that have been made. late: blocks that nobody but us owned any more when they were read. A failed store may
    read a block that was given away: only a commit of what was read then is a fault.
    """

    def __init__(self, *, layerwise: bool = False) -> None:
        """layerwise: loads and stores of layers are copies of their own."""
        self._layerwise = layerwise
        self.queue = LockedQueue(submitted=self._submitted, before=self._before, after=self._after)
        self.stores = self.late = 0
        self._pool: Any = None
        self._holds = True
        self._given: dict[int, int] = {}  # how often vLLM has given each block to a request
        self._sizes: dict[int, int] = {}
        self._wanted: dict[QueuedCopy, list[tuple[int, int]]] = {}
        self._missing: dict[HostExtent, set[int]] = {}  # layers
        self._too_late: dict[HostExtent, str] = {}  # slots whose bytes may be another request's, and why

    def make_copier(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, **_options: Any
    ) -> QueuedCopier:
        """Stands in for the real one, around it; its own queue is what stores go on in."""
        copier = make_copier(layout, tensors, chunk_format)
        layers = _by_layer(layout, tensors, chunk_format) if self._layerwise else ()
        self._sizes |= {id(each): layout.block_tokens for each in (copier, *layers)}
        return QueuedCopier(copier, self.queue, layers)

    def watch(self, pool: Any, cache: Any, *, holds: bool = True) -> None:
        """vLLM's block pool, and our cache. holds: blocks that are read must have an owner."""
        self._pool, self._holds = pool, holds
        give, reserve, commit = pool.get_new_blocks, cache.begin_store, cache.commit

        def get_new_blocks(count: int) -> Any:
            blocks = give(count)
            for block in blocks:
                self._given[block.block_id] = self._given.get(block.block_id, 0) + 1
            return blocks

        def reserved(*asked: Any, **options: Any) -> Any:
            lease = reserve(*asked, **options)
            for extent in lease.extents:
                self._missing.pop(extent, None)
                self._too_late.pop(extent, None)
            return lease

        def committed(lease: Any) -> None:
            arrived = all(self._missing.get(extent) == set() for extent in lease.extents)
            assert arrived, "committed before its bytes are there"
            self.faults.extend(self._too_late[extent] for extent in lease.extents if extent in self._too_late)
            commit(lease)

        pool.get_new_blocks, cache.begin_store, cache.commit = get_new_blocks, reserved, committed

    @property
    def faults(self) -> list[str]:
        return self.queue.faults

    def go_on(self, copy_s: float) -> None:
        """Make copies from now on, each after so long. What it finds wrong is in `faults`."""
        self.queue.copy_s = copy_s
        self.queue.go_on()

    def stop(self) -> None:
        self.queue.stop()

    def _submitted(self, copy: QueuedCopy) -> None:
        if copy.is_store:
            for extent in {part.extent for part in copy.plan.copies}:
                self._missing.setdefault(extent, set(_layers_of(copy))).update(_copied_by(copy))
            size = self._sizes[id(copy.move.__self__)]  # type: ignore[attr-defined]
            slots = [
                slot for part in copy.plan.copies for slot in range(part.first_slot, part.first_slot + part.tokens)
            ]
            blocks = {slot // size for slot in slots}
            self._wanted[copy] = [(block, self._given.get(block, 0)) for block in blocks]
        self.queue.note()

    def _before(self, copy: QueuedCopy) -> None:
        if not copy.is_store:
            return
        self.stores += 1
        for block, given in self._wanted.pop(copy, ()) if self._pool is not None else ():
            owners = self._pool.blocks[block].ref_cnt
            if (self._holds and not owners) or self._given.get(
                block, 0
            ) != given:  # right only in a store that has failed
                why = f"block {block} is read after it was given away"
                self._too_late |= dict.fromkeys((part.extent for part in copy.plan.copies), why)
            self.late += owners == 1

    def _after(self, copy: QueuedCopy) -> None:
        if copy.is_store:
            for part in copy.plan.copies:  # not missing: `_submitted` was made to fail, and no commit may follow
                self._missing.get(part.extent, set()).difference_update(_copied_by(copy))


def _layers_of(copy: QueuedCopy) -> range:
    copier = copy.move.__self__  # type: ignore[attr-defined]
    return range(copier.layers if isinstance(copier, _OneLayer) else copier._format.layers)


def _copied_by(copy: QueuedCopy) -> Sequence[int]:
    copier = copy.move.__self__  # type: ignore[attr-defined]
    return (copier.layer,) if isinstance(copier, _OneLayer) else _layers_of(copy)


class _OneLayer:
    """Copies one layer of chunks, and leaves the others alone, whatever the layout."""

    def __init__(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, layer: int
    ) -> None:
        nowhere = torch.empty_strided(tensors[0].shape, tensors[0].stride(), dtype=tensors[0].dtype)
        only = [tensor if at == layer else nowhere for at, tensor in enumerate(tensors)]
        self._copier = CpuCopier(layout, only, chunk_format)
        self._format = chunk_format
        self._pools: dict[str, memoryview] = {}
        self.layer, self.layers = layer, chunk_format.layers

    def attach(self, pool: str, view: memoryview) -> None:
        self._pools[pool] = view
        self._copier.attach(pool, view)

    def detach(self, pool: str) -> None:
        self._pools.pop(pool, None)
        self._copier.detach(pool)

    def load(self, plan: TransferPlan) -> Any:
        return self._copier.load(plan)

    def store(self, plan: TransferPlan) -> Any:
        """By way of a copy of the whole chunk, of which only this layer's bytes go on to the pool."""
        for extent, copies in plan.by_chunk().items():
            whole = bytearray(extent.nbytes)
            self._copier.attach("whole", memoryview(whole))
            there = HostExtent("whole", 0, extent.nbytes)
            moved = tuple(replace(copy, extent=there) for copy in copies)
            done = self._copier.store(TransferPlan(moved, plan.chunk_tokens))
            for part in range(len(self._format.parts)):
                first = self._format.layer_offset(part, self.layer)
                end, at = first + self._format.layer_bytes, extent.offset
                self._pools[extent.pool][at + first : at + end] = whole[first:end]
        return done


def _by_layer(layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat) -> list[_OneLayer]:
    return [_OneLayer(layout, tensors, chunk_format, layer) for layer in range(len(tensors))]


@contextmanager
def slow_device(*, layerwise: bool = False) -> Iterator[SlowDevice]:
    """Engines that start meanwhile have one."""
    with pytest.MonkeyPatch.context() as patch:
        device = SlowDevice(layerwise=layerwise)
        patch.setattr(bind, "make_copier", device.make_copier)
        yield device
        device.stop()
