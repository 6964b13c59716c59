"""Compares what an engine gets back from its cache with what it stored, number by number, in the engine's blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from kv_core.device import CopyEvent, LayerwiseCopier
from kv_core.format import ChunkFormat
from kv_core.transfer import Copy, HostExtent, TransferPlan
from kv_cuda import Copier, CpuCopier, PagedLayout, make_copier

from kv_testing.layouts import reach


@dataclass(slots=True)
class Errors:
    """Over all numbers that came back.

    numbers: how many.
    absolute, squared: sums of the errors.
    worst: the largest error, as a part of what its bound is a part of (`kv_testing.layouts.reach`).
    given_absolute, given_squared: sums of the numbers themselves.
    """

    numbers: int = 0
    absolute: float = 0.0
    squared: float = 0.0
    worst: float = 0.0
    given_absolute: float = 0.0
    given_squared: float = 0.0

    @property
    def mean(self) -> float:
        """The mean error as a part of the mean magnitude."""
        return self.absolute / self.given_absolute

    @property
    def rms(self) -> float:
        """The root of the mean squared error as a part of that of the numbers."""
        return float((self.squared / self.given_squared) ** 0.5)

    def add(self, given: np.ndarray, back: np.ndarray, largest: np.ndarray) -> None:
        """float64. largest: what the bound of each is a part of."""
        errors, magnitudes = np.abs(back - given), np.abs(given)
        self.numbers += given.size
        self.absolute += float(errors.sum())
        self.squared += float((errors**2).sum())
        self.given_absolute += float(magnitudes.sum())
        self.given_squared += float((magnitudes**2).sum())
        self.worst = max(self.worst, float((errors / np.where(largest > 0, largest, 1)).max()))


class Witness:
    """Stands in for `make_copier` and remembers, exactly, each chunk that the copiers it makes have stored."""

    def __init__(self) -> None:
        self.errors = Errors()
        self.formats: list[ChunkFormat] = []

    def make_copier(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, **_options: Any
    ) -> "WitnessedCopier":
        self.formats.append(chunk_format)
        return WitnessedCopier(layout, tensors, chunk_format, self.errors)


class WitnessedCopier:
    """The engine's copier, with every chunk gathered exactly when it is stored, and again when it has been loaded."""

    def __init__(
        self, layout: PagedLayout, tensors: Sequence[torch.Tensor], chunk_format: ChunkFormat, errors: Errors
    ) -> None:
        self._copier: Copier = make_copier(layout, tensors, chunk_format)
        self._canonical = layout.canonical_format(chunk_format.chunk_tokens)
        self._exact = CpuCopier(layout, tensors, self._canonical)
        self._gathered = bytearray(self._canonical.nbytes)
        self._exact.attach("witness", memoryview(self._gathered))
        self._given: dict[HostExtent, np.ndarray] = {}
        self._errors = errors

    def attach(self, pool: str, view: memoryview) -> None:
        self._copier.attach(pool, view)

    def detach(self, pool: str) -> None:
        self._copier.detach(pool)

    load_each, store_each = LayerwiseCopier.load_each, LayerwiseCopier.store_each  # one after the other

    @property
    def is_queued(self) -> bool:
        return self._copier.is_queued

    @property
    def stores_behind(self) -> bool:
        return self._copier.stores_behind

    def store(self, plan: TransferPlan) -> CopyEvent:
        for extent, copies in plan.by_chunk().items():
            self._given[extent] = self._gather(copies)
        return self._copier.store(plan)

    def load(self, plan: TransferPlan) -> CopyEvent:
        event = self._copier.load(plan)
        event.wait()
        for extent, copies in plan.by_chunk().items():
            tokens = [token for copy in copies for token in range(copy.first_token, copy.first_token + copy.tokens)]
            given = self._given[extent]
            self._errors.add(given[:, tokens], self._gather(copies)[:, tokens], reach(given)[:, tokens])
        return event

    def _gather(self, copies: Sequence[Copy]) -> np.ndarray:
        """[parts × layers, tokens, heads, head_dim] float64; only the tokens of `copies` mean anything."""
        extent, described = HostExtent("witness", 0, self._canonical.nbytes), self._canonical
        self._exact.store(
            TransferPlan(tuple(replace(copy, extent=extent) for copy in copies), described.chunk_tokens)
        ).wait()
        numbers = torch.frombuffer(self._gathered, dtype=getattr(torch, described.dtype)).double().numpy()
        return numbers.reshape(-1, described.chunk_tokens, described.heads, described.head_dim)
