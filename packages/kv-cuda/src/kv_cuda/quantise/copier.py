"""The copier for quantised chunks: bus, pool and lower tiers carry half the bytes of bfloat16, a quarter of float32.

It wraps the copier of the exact, canonical bytes. For a store, that copier gathers a chunk into staging memory on the
tensors' own device, torch computes codes and scales there, and only these cross to the host; a load is the reverse. So
the computation runs where the numbers are, with any layout and copier. Two staging buffers per direction let one
chunk be transferred while another is computed; they are allocated on first use and retained. Ordering is by streams:
nothing waits for the device, and on a CPU everything is complete on return.

A chunk that cannot be represented is not stored: one with an infinity, a NaN or a number beyond the range of scales
fails its store. The host learns this from the store's event, which it must query before it commits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from kv_core.device import CopyEvent, DeviceCopier
from kv_core.errors import CopyFailed, InputError
from kv_core.extent import HostExtent
from kv_core.format import ChunkFormat, is_quantised_kind
from kv_core.transfer import Copy, TransferPlan

from kv_cuda.copy.memory import AttachesPools, buffers_for_copies, host_buffer
from kv_cuda.copy.plan import validate_and_split
from kv_cuda.copy.streams import DoneEvent, make_queue
from kv_cuda.layout import PagedLayout
from kv_cuda.quantise.codes import LARGEST_SCALE, Codes

_STAGED_CHUNKS = 2
_ALIGNED = 256


class StagingCopier(DeviceCopier, Protocol):
    """A copier whose pool may be memory of the device itself."""

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 in one axis."""


class QuantisingCopier(AttachesPools):
    """A `kv_core.device.DeviceCopier` for one group of layers. For one thread at a time."""

    def __init__(
        self,
        layout: PagedLayout,
        chunk_format: ChunkFormat,
        exact: StagingCopier,
        device: torch.device,
        *,
        largest_chunk_bytes: int = 0,
    ) -> None:
        """exact: the copier for the same layout and tensors and its `canonical_format`. device: the tensors' device.
        largest_chunk_bytes: as for `GpuCopier`.

        Raises:
            InputError: the format is not one of this layout's.
        """
        kind, tokens = chunk_format.kind, chunk_format.chunk_tokens
        if not is_quantised_kind(kind) or chunk_format != layout.quantised_format(kind, tokens):
            raise InputError(f"the format is not one of layout {layout.name} with one byte per element: {chunk_format}")
        super().__init__(device, max(largest_chunk_bytes, chunk_format.nbytes))
        self._layout, self._format = layout, chunk_format
        canonical = layout.canonical_format(tokens)
        self._pipelines = {
            name: _StagingPipeline(name, canonical, chunk_format, exact, device) for name in ("load", "store")
        }
        self._checks: list[_ScaleCheck] = []

    def _wait(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.end().wait()

    @buffers_for_copies()
    def load(self, plan: TransferPlan) -> CopyEvent:
        """A chunk that is loaded in part crosses the bus as a whole, but only the requested part is written."""
        by_chunk = self._checked(plan, to_engine=True)
        pipeline = self._pipelines["load"]
        pipeline.begin()
        try:
            for chunk, copies in by_chunk:
                pipeline.load(chunk, copies)
        except BaseException:
            pipeline.end().wait()
            raise
        return pipeline.end()

    def load_layers(self, plan: TransferPlan) -> list[CopyEvent]:
        """Like `load`, with an event for each layer, all the same one: a chunk is decoded as a whole."""
        return [self.load(plan)] * self._layout.layers

    def store_layers(self, plan: TransferPlan) -> None:
        """None: a chunk is encoded as a whole."""

    @buffers_for_copies()
    def store(self, plan: TransferPlan) -> CopyEvent:
        """Chunks are stored whole, else `InputError`. If the event raises `CopyFailed`, commit nothing of the plan."""
        by_chunk = self._checked(plan, to_engine=False)
        for _, copies in by_chunk:
            tokens = sum(copy.tokens for copy in copies)
            if tokens != self._format.chunk_tokens:
                raise InputError(
                    f"the plan stores {tokens} tokens of a chunk of {self._format.chunk_tokens}, "
                    f"and format {self._format.kind} is stored whole or not at all"
                )
        pipeline = self._pipelines["store"]
        check = self._checks.pop() if self._checks else _ScaleCheck(self._device)
        pipeline.begin(check)
        try:
            for chunk, copies in by_chunk:
                pipeline.store(chunk, copies, check)
        except BaseException:
            pipeline.end().wait()  # as in `GpuCopier`
            raise
        return _CheckedEvent(pipeline.end(check), check, self._checks)

    def _checked(self, plan: TransferPlan, *, to_engine: bool) -> list[tuple[torch.Tensor, list[Copy]]]:
        """Each chunk's bytes in its pool, and its copies."""
        nbytes = {name: pool.bytes.numel() for name, pool in self._pools.items()}
        validate_and_split(plan, self._layout, self._format, nbytes, to_engine=to_engine)
        return [(self._pools[extent.pool].chunk(extent), copies) for extent, copies in plan.by_chunk().items()]


class _ScaleCheck:
    """The largest scale of a store, on the device and, once it has arrived, on the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.empty((), device=device)
        self.on_host = host_buffer(dtype=torch.float32, device=device).zero_()


class _CheckedEvent:
    """A store's event. used: receives the check once it has been read, for reuse by another store."""

    def __init__(self, arrived: CopyEvent, check: _ScaleCheck, used: list[_ScaleCheck]) -> None:
        self._arrived, self._check, self._used = arrived, check, used
        self._largest: float | None = None

    def done(self) -> bool:
        if not self._arrived.done():
            return False
        self._check_scale()
        return True

    def wait(self) -> None:
        self._arrived.wait()
        self._check_scale()

    def hold_engine(self) -> None:
        self._arrived.hold_engine()

    def _check_scale(self) -> None:
        if self._largest is None:
            self._largest = float(self._check.on_host)
            self._used.append(self._check)
        if not self._largest <= LARGEST_SCALE:  # also true for NaN
            raise CopyFailed(
                "the KV to be stored has an infinity, a NaN or a number too large for one byte and a scale "
                f"(the largest scale is {self._largest:.3g}, the limit {LARGEST_SCALE:.3g})"
            )


class _StagingPipeline:
    """One direction's queues and staging."""

    def __init__(
        self, name: str, exact: ChunkFormat, quantised: ChunkFormat, copier: StagingCopier, device: torch.device
    ) -> None:
        self._name, self._exact, self._quantised, self._copier, self._device = name, exact, quantised, copier, device
        self._work, self._bus = make_queue(device), make_queue(device)
        self._free: list[CopyEvent] = [DoneEvent()] * _STAGED_CHUNKS
        self._turn = 0
        self._staging: tuple[torch.Tensor, torch.Tensor, Codes] | None = None

    def begin(self, check: _ScaleCheck | None = None) -> None:
        """Order everything requested from now on after what the engine has launched. check: a store's, to be filled."""
        self._work.follow_current()
        if check is not None:
            with self._work.running():
                check.on_device.zero_()

    def end(self, check: _ScaleCheck | None = None) -> CopyEvent:
        """The point after everything requested; the check is on the host then."""
        self._bus.follow(self._work.record())
        if check is not None:
            self._bus.copy(check.on_host, check.on_device)
        return self._bus.record()

    def store(self, chunk: torch.Tensor, copies: Sequence[Copy], check: _ScaleCheck) -> None:
        turn, exact, quantised, codes = self._next()
        self._work.follow(self._free[turn])
        with self._work.running():
            gathered = self._copier.store(self._staged(turn, copies))
        self._work.follow(gathered)
        with self._work.running():
            codes.encode(exact, quantised, check.on_device)
        self._bus.follow(self._work.record())
        self._bus.copy(chunk, quantised)
        self._free[turn] = self._bus.record()

    def load(self, chunk: torch.Tensor, copies: Sequence[Copy]) -> None:
        turn, exact, quantised, codes = self._next()
        self._bus.follow(self._free[turn])
        self._bus.copy(quantised, chunk)
        self._work.follow(self._bus.record())
        first = min(copy.first_token for copy in copies)
        last = max(copy.first_token + copy.tokens for copy in copies)
        with self._work.running():
            codes.decode(quantised, exact, first, last)
            scattered = self._copier.load(self._staged(turn, copies))
        self._work.follow(scattered)
        self._free[turn] = self._work.record()

    def _next(self) -> tuple[int, torch.Tensor, torch.Tensor, Codes]:
        """The turn, its staging for exact and for quantised bytes, and the codes that convert them."""
        if self._staging is None:
            exact, quantised = (
                torch.empty((_STAGED_CHUNKS, _round_up(chunk_format.nbytes)), dtype=torch.uint8, device=self._device)
                for chunk_format in (self._exact, self._quantised)
            )
            self._copier.attach_tensor(self._name, exact.view(-1))
            # The memory's previous user may still access it, in its own queue.
            self._free = [self._work.record()] * _STAGED_CHUNKS
            self._staging = exact, quantised, Codes(self._exact, self._quantised, self._device)
        exact, quantised, codes = self._staging
        turn = self._turn = (self._turn + 1) % _STAGED_CHUNKS
        return turn, exact[turn, : self._exact.nbytes], quantised[turn, : self._quantised.nbytes], codes

    def _staged(self, turn: int, copies: Sequence[Copy]) -> TransferPlan:
        """The same tokens and slots, with the staging buffer in place of the pool."""
        extent = HostExtent(self._name, turn * _round_up(self._exact.nbytes), self._exact.nbytes)
        return TransferPlan(tuple(replace(copy, extent=extent) for copy in copies), self._exact.chunk_tokens)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
