"""Learns how long a tier takes to deliver chunks, from the submission to the arrival.

A load has two phases. Reading ends when the tier's call returns; its time depends on the bytes of the load and on those
that were submitted before and have not been read yet. So queueing, threads that share a medium, and media that serve
many requests at once are all included in the measurement. Decoding depends on the chunks' own bytes and on how much of
each is read. Meanwhile other loads are read, so of many loads only the last one's decoding adds to the wait.

The phases are measured separately because they scale differently: a quarter of a chunk crosses the link in a quarter of
the time, but decodes in half. So the time for reading more or less of each chunk is known before it has been tried.

An overdue load counts before it has ended: later loads are estimated to be slower by the same factor.

Nothing here locks or reads a clock: the lane does, and holds its one lock around every call.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Final

from kv_core.estimate import Estimator

_SOON_S: Final = 0.05
"""From this age on, a load that has not arrived gives an estimate for a tier that has not been measured."""
_EVERY: Final = 4
"""Loads that are submitted together are late together. So once the tier has been measured, only every fourth of these
and the last are samples: one busy moment must not look like a change."""
_FADES: Final = 0.1
"""The weight of one load in the estimated sizes of payloads."""


@dataclass(slots=True)
class _UnderWay:
    """One load in progress.

    began_s: when it was submitted.
    chunk_bytes: size of its chunks in the pool.
    divisor: as for `LoadSpeed.seconds`.
    link_bytes: bytes expected to be read; once read, the actual number.
    upto_bytes: `link_bytes` plus the bytes that had been submitted before and were not read yet.
    expected_s: the estimate for this load.
    read_s: when it had been read; None: not yet, or not reported.
    """

    began_s: float
    chunk_bytes: int
    divisor: int
    link_bytes: int
    upto_bytes: int
    expected_s: float | None
    read_s: float | None = None


class LoadSpeed:
    """The loads of one lane."""

    def __init__(self) -> None:
        self._reading = Estimator(2, memory=32, min_samples=3)
        self._decoding: dict[int, Estimator] = {}  # by divisor
        self._of_chunk: dict[int, float] = {}  # by divisor: bytes read per byte of the chunks
        self._under_way: dict[int, _UnderWay] = {}  # by number, oldest first
        self._bytes = 0  # bytes of these loads that are still to be read
        self._not_counted = 0  # loads since the last sample

    def seconds(self, nbytes: int, now_s: float, divisor: int = 1, last_bytes: int | None = None) -> float | None:
        """Seconds until chunks of these sizes, submitted now, would have arrived; None while unknown.

        divisor: read one of this many equal parts of each chunk; 1: all of it.
        last_bytes: size of the chunks in the last of their loads; None: they are one load.
        """
        link_bytes = self._bytes + self._link_bytes(nbytes, divisor)
        estimate = self._reading.seconds((1.0, link_bytes))
        if estimate is not None:
            estimate += self._decoding_s(nbytes if last_bytes is None else min(nbytes, last_bytes), divisor)
        if self._under_way:
            oldest = next(iter(self._under_way.values()))
            age_s = now_s - oldest.began_s
            if estimate is None:
                # A load of which no bytes came is about to end, and says nothing about the time per byte.
                return age_s * link_bytes / oldest.upto_bytes if age_s > _SOON_S and oldest.upto_bytes else None
            if oldest.expected_s is not None and age_s > oldest.expected_s > 0.0:
                estimate *= age_s / oldest.expected_s
        return estimate

    def began(self, number: int, nbytes: int, now_s: float, divisor: int = 1) -> None:
        """A load was submitted. number: distinguishes it from other loads in flight. nbytes: size of its chunks."""
        link_bytes = max(1, self._link_bytes(nbytes, divisor))
        expected_s = self._reading.seconds((1.0, self._bytes + link_bytes))
        if expected_s is not None:
            expected_s += self._decoding_s(nbytes, divisor)
        self._bytes += link_bytes
        self._under_way[number] = _UnderWay(now_s, nbytes, divisor, link_bytes, self._bytes, expected_s)

    def was_read(self, number: int, nbytes: int, now_s: float) -> None:
        """The tier has delivered this many more bytes of the load; they remain to be decoded."""
        if (load := self._under_way.get(number)) is None:
            return
        if load.read_s is None:
            self._bytes -= load.link_bytes
            load.upto_bytes -= load.link_bytes
            load.link_bytes = 0
        load.link_bytes += nbytes
        load.upto_bytes += nbytes
        load.read_s = now_s

    def ended(self, number: int, now_s: float, *, loaded: bool, stored_bytes: int = 0) -> None:
        """The load has ended.

        loaded: whether all its chunks were loaded. Loads that failed or were refused are ignored.
        stored_bytes: size of the chunks' whole payloads; 0: not known.
        """
        if (load := self._under_way.pop(number, None)) is None:
            return
        if load.read_s is None:
            self._bytes -= load.link_bytes
        if not loaded:
            return
        read_s = now_s if load.read_s is None else load.read_s
        self._not_counted += 1
        if not self._bytes or self._not_counted >= _EVERY or self._reading.coefficients is None:
            self._not_counted = 0
            self._reading.add((1.0, max(1, load.upto_bytes)), read_s - load.began_s)
        if load.chunk_bytes:
            self._learn_size(1, stored_bytes / load.chunk_bytes)
            if load.divisor > 1:
                self._learn_size(load.divisor, load.link_bytes / load.chunk_bytes)
        if load.read_s is not None:
            estimator = self._decoding.setdefault(load.divisor, Estimator(2, memory=32, min_samples=1))
            estimator.add((1.0, load.chunk_bytes), now_s - read_s)

    def coefficients(self, divisor: int = 1, *, trust: bool = False) -> tuple[float, float] | None:
        """Seconds per load, and per byte of chunks, with nothing queued before; None: not known. Decoding while other
        loads are read is not included. trust: from now on accept the result, however few loads it is based on."""
        if trust:
            self._reading.trust()
        learnt = self._reading.coefficients
        return None if learnt is None else (learnt[0], learnt[1] * self._link_bytes(1 << 30, divisor) / (1 << 30))

    def _link_bytes(self, nbytes: int, divisor: int) -> int:
        """Bytes that cross the link for chunks of this size."""
        ratio = self._of_chunk.get(divisor)
        if ratio is None:
            ratio = min(1.0 / divisor, self._of_chunk.get(1, 1.0))
        return int(nbytes * ratio)

    def _learn_size(self, divisor: int, ratio: float) -> None:
        if ratio > 0.0:
            previous = self._of_chunk.setdefault(divisor, ratio)
            self._of_chunk[divisor] = previous + _FADES * (ratio - previous)

    def _decoding_s(self, nbytes: int, divisor: int) -> float:
        """Decoding time of one load. For a divisor not decoded yet it is assumed to follow the square root
        of the part read, which is about right for the codec `progressive`.
        """
        if divisor in self._decoding:
            return self._decoding[divisor].seconds((1.0, nbytes)) or 0.0
        nearest = min(self._decoding, key=lambda measured: abs(measured - divisor), default=None)
        if nearest is None:
            return 0.0
        return sqrt(nearest / divisor) * (self._decoding[nearest].seconds((1.0, nbytes)) or 0.0)
