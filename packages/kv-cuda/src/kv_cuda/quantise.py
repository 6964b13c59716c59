"""Quantised chunks: bus, pool and lower tiers carry half the bytes of bfloat16, a quarter of float32.

`QuantisingCopier` wraps the copier of the exact, canonical bytes. For a store, that copier gathers a chunk into staging
memory on the tensors' own device, torch computes codes and scales there, and only these cross to the host; a load is
the reverse. So the computation runs where the numbers are, with any layout and copier. Two staging buffers per
direction let one chunk be transferred while another is computed; they are allocated on first use and retained. Ordering
is by streams: nothing waits for the device, and on a CPU everything is complete on return.

A chunk that cannot be represented is not stored: one with an infinity, a NaN or a number beyond the range of scales
fails its store. The host learns this from the store's event, which it must query before it commits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch
from kv_core.device import CopyEvent, DeviceCopier, LayerwiseCopier
from kv_core.errors import CopyFailed, InputError
from kv_core.format import SCALE_BYTES, ChunkFormat, is_quantised_kind
from kv_core.transfer import Copy, HostExtent, TransferPlan

from kv_cuda.copy.memory import AttachesPools, buffers_for_copies, host_buffer
from kv_cuda.copy.plan import validate_and_split
from kv_cuda.copy.streams import DoneEvent, make_queue
from kv_cuda.kernels import CopyKernels, installed_kernels
from kv_cuda.layout import PagedLayout


class CompiledCodes:
    """`int8` from bfloat16 in C, on a CPU, with the same bytes as the torch operations of `Codes`. For one thread at a
    time: it has one scratch buffer."""

    def __init__(self, exact: ChunkFormat, quantised: ChunkFormat, kernels: CopyKernels) -> None:
        self._kernels = kernels
        planes = len(exact.parts) * exact.layers
        sizes = (planes, exact.chunk_tokens, exact.heads, exact.head_dim, quantised.exact_tokens)
        self._shape = np.array([*sizes, 0, exact.chunk_tokens], np.int64)
        self._scratch = np.empty(6 * exact.heads * exact.head_dim, np.uint8)

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor) -> float:
        """Fill the chunk; returns its largest magnitude. If that is too large, the chunk is worthless."""
        peak = self._kernels.call("quantise", self._shape, exact.numpy(), quantised.numpy(), self._scratch)
        return float(np.array(peak << 16, np.uint32).view(np.float32))

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers, the last one excluded."""
        self._shape[5:] = first_token, last_token
        self._kernels.call("dequantise", self._shape, quantised.numpy(), exact.numpy(), self._scratch)


_LARGEST_CODE: Final = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE: Final = 2.0**-60
"""Rows with a smaller scale, after division by their channels', are restored as zeros. So even with a channel's least
exponent no product is a subnormal float32, which devices may or may not flush to zero."""
LARGEST_SCALE: Final = 2.0**118
"""Chunks with a number beyond the largest code times this are refused, so that no product is ever infinite."""
_EXPONENTS: Final = (-40, 120)
"""The range of a channel's exponent."""
_PIECE_NUMBERS: Final = {"cpu": 1 << 18, "cuda": 1 << 22}


class Codes:
    """Quantisation for `int8` and `fp8`: numbers to codes of one byte with scales, and back, of one chunk format on one
    device. For one queue at a time: it has one set of scratch memory.

    A row is one head's data for one token in one layer of one part; a channel is one element of the head over the
    chunk's tokens. Each channel is divided by a power of two, so that its largest magnitude is below 1, and then each
    row by a scale, so that it uses the whole range of codes. Thus neither a channel that is far larger than its
    neighbours, as in Gemma's keys, nor a row that is far smaller than others reduces the precision of the rest. A
    chunk's first tokens are stored exactly. docs/formats/quantised.md specifies the bytes and the bounds on the error.

    It uses torch operations on whatever device the bytes are, a few planes at a time through scratch memory that is
    reused, so that on a CPU the passes stay in the processor's cache, and on a GPU nothing is allocated. On a CPU,
    `int8` from bfloat16 runs in C, many times as fast and with the same bytes, if it was compiled.
    """

    def __init__(
        self, exact: ChunkFormat, quantised: ChunkFormat, device: torch.device, *, may_compile: bool = True
    ) -> None:
        """exact: the canonical format of the same numbers. may_compile: whether it may run in C where possible."""
        self._exact, self._quantised = exact, quantised
        self._compiled: CompiledCodes | None = None
        is_in_c = may_compile and device.type == "cpu" and (exact.dtype, quantised.kind) == ("bfloat16", "int8")
        if is_in_c and (kernels := installed_kernels()) is not None:
            self._compiled = CompiledCodes(exact, quantised, kernels)
        self._planes = len(exact.parts) * exact.layers
        shape = (exact.chunk_tokens, exact.heads, exact.head_dim)
        numbers = exact.chunk_tokens * exact.heads * exact.head_dim
        self._step = max(1, min(self._planes, _PIECE_NUMBERS.get(device.type, 1 << 20) // numbers))
        self._wide = torch.empty((self._step, *shape), dtype=torch.float32, device=device)
        self._high, self._low = (torch.empty((self._step, *shape[:2]), device=device) for _ in range(2))
        self._peaks, self._scratch = (torch.empty((self._step, *shape[1:]), device=device) for _ in range(2))
        self._peak = torch.empty((), device=device)
        self._channels = shape[1:]

    def encode(self, exact: torch.Tensor, quantised: torch.Tensor, largest: torch.Tensor) -> None:
        """Fill a chunk's codes and scales from its numbers, both uint8 of their format's size.

        largest: float32 scalar, raised to the chunk's largest magnitude divided by the largest code. The chunk is
            worthless, and must not be stored, unless that is at most `LARGEST_SCALE`. An infinity or a NaN in the chunk
            becomes the result.
        """
        if self._compiled is not None:
            self._raise_to(largest, torch.tensor(self._compiled.encode(exact, quantised)))
            return
        first_tokens, largest_code = self._quantised.exact_tokens, _LARGEST_CODE[self._quantised.kind]
        numbers, (codes, scales, leading, exponents) = self._numbers(exact), self._codes(quantised)
        quantised.view(self._planes, -1)[:, -SCALE_BYTES:] = 0  # padding; exponents overwrite the rest
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            count = piece.stop - first
            wide, scale, low = self._wide[:count], self._high[:count], self._low[:count]
            wide.copy_(numbers[piece])
            if first_tokens:
                leading[piece] = numbers[piece, :first_tokens]
                self._raise_to(
                    largest, torch.amax(self._channel_peaks(wide[:, :first_tokens]), (0, 1, 2), out=self._peak)
                )
                wide[:, :first_tokens] = 0.0
            peaks = self._channel_peaks(wide[:, first_tokens:])
            self._raise_to(largest, torch.amax(peaks, (0, 1, 2), out=self._peak))
            bits = peaks.view(torch.int32)  # of non-negative numbers: exponents, then mantissas
            bits.bitwise_right_shift_(23).sub_(126).clamp_(*_EXPONENTS)
            self._equalise(bits)
            exponents[piece] = bits.flatten(1)
            wide.mul_(bits.neg_().add_(127).bitwise_left_shift_(23).view(torch.float32).unsqueeze(1))
            # Two passes over cached memory are many times faster on a CPU than torch's norm and aminmax. NaN stays NaN.
            torch.amax(wide, -1, out=scale)
            torch.amin(wide, -1, out=low)
            torch.maximum(scale, low.neg_(), out=scale).div_(largest_code)
            torch.threshold_(scale, SMALLEST_SCALE, 0.0)
            scales[piece] = scale
            factor = scale.reciprocal_().nan_to_num_(nan=0.0, posinf=0.0)
            wide.mul_(factor.unsqueeze(-1))
            codes[piece] = wide.round_() if self._quantised.kind == "int8" else wide

    def decode(self, quantised: torch.Tensor, exact: torch.Tensor, first_token: int, last_token: int) -> None:
        """Fill these tokens' numbers (the last one excluded) from codes and scales."""
        if self._compiled is not None:
            self._compiled.decode(quantised, exact, first_token, last_token)
            return
        tokens = slice(first_token, last_token)
        exact_tokens = slice(first_token, min(last_token, self._quantised.exact_tokens))
        numbers, (codes, scales, leading, exponents) = self._numbers(exact), self._codes(quantised)
        for first in range(0, self._planes, self._step):
            piece = slice(first, min(first + self._step, self._planes))
            wide = self._wide[: piece.stop - first, : last_token - first_token]
            peaks = self._peaks[: piece.stop - first]
            wide.copy_(codes[piece, tokens])
            wide.mul_(scales[piece, tokens].unsqueeze(-1))
            bits = peaks.view(torch.int32)
            bits.copy_(exponents[piece].view(bits.shape)).add_(127).bitwise_left_shift_(23)
            wide.mul_(peaks.unsqueeze(1))
            numbers[piece, tokens] = wide
            if exact_tokens.start < exact_tokens.stop:
                numbers[piece, exact_tokens] = leading[piece, exact_tokens]

    def _channel_peaks(self, wide: torch.Tensor) -> torch.Tensor:
        """[planes, heads, head_dim], the largest magnitudes over tokens; in reused scratch memory."""
        peaks, scratch = self._peaks[: len(wide)], self._scratch[: len(wide)]
        torch.amax(wide, 1, out=peaks)
        torch.amin(wide, 1, out=scratch)
        return torch.maximum(peaks, scratch.neg_(), out=peaks)

    def _equalise(self, exponents: torch.Tensor) -> None:
        """Give all channels of a head the largest exponent if their exponents differ by at most one: scales of rows
        alone suit that head better. exponents: int32 [planes, heads, head_dim]."""
        count = len(exponents)
        top, is_level = (scratch[:count, 0].view(torch.int32) for scratch in (self._high, self._low))
        torch.amax(exponents, -1, out=top)
        torch.amin(exponents, -1, out=is_level).sub_(top).add_(2).clamp_(0, 1)
        step = self._scratch[:count].view(torch.int32)
        step.copy_(top.unsqueeze(-1).expand_as(step)).sub_(exponents).mul_(is_level.unsqueeze(-1))
        exponents.add_(step)

    def _raise_to(self, largest: torch.Tensor, peak: torch.Tensor) -> None:
        torch.maximum(largest, peak.div_(_LARGEST_CODE[self._quantised.kind]), out=largest)

    def _numbers(self, exact: torch.Tensor) -> torch.Tensor:
        """[planes, tokens, heads, head_dim]"""
        exact_format = self._exact
        shape = (self._planes, exact_format.chunk_tokens, exact_format.heads, exact_format.head_dim)
        return exact.view(getattr(torch, exact_format.dtype)).view(shape)

    def _codes(self, quantised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [planes, tokens, heads, head_dim], scales [planes, tokens, heads], the first tokens unquantised
        [planes, exact tokens, heads, head_dim], and exponents [planes, heads × head_dim]."""
        chunk_format = self._quantised
        planes = quantised.view(self._planes, chunk_format.layer_bytes)
        rows = (chunk_format.chunk_tokens, chunk_format.heads)
        sizes = [
            chunk_format.codes_bytes,
            chunk_format.scales_bytes,
            chunk_format.exact_bytes,
            chunk_format.exponents_bytes,
        ]
        codes, scales, leading, exponents = torch.split(planes, sizes, 1)
        channels = chunk_format.heads * chunk_format.head_dim
        shape = (chunk_format.exact_tokens, *self._channels)
        return (
            codes.view(getattr(torch, chunk_format.dtype)).unflatten(1, (*rows, -1)),  # type: ignore[no-untyped-call]
            scales.view(torch.float32).unflatten(1, rows),  # type: ignore[no-untyped-call]
            leading.view(getattr(torch, self._exact.dtype)).unflatten(1, shape),  # type: ignore[no-untyped-call]
            exponents[:, :channels].view(torch.int8),
        )


_STAGED_CHUNKS = 2
_ALIGNED = 256


class StagingCopier(DeviceCopier, Protocol):
    """A copier whose pool may be memory of the device itself."""

    def attach_tensor(self, pool: str, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 in one axis."""


class QuantisingCopier(AttachesPools, LayerwiseCopier):
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
