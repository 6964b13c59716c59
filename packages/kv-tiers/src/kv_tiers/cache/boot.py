"""The boot measurement: how quickly a tier delivers its chunks, before any request waits for them.

Without it, a tier that others have filled is assumed to be quick until a few requests have waited for it
(`kv_tiers.cache.worth`). A thread reads a few chunks of each tier that can name some, through the tier's lane, into
memory of its own, and discards them: the lane learns from these loads as from all others. Nothing is written. The
start does not wait for it. After a second no further load is started, so a slow tier is read from once, which is enough
to know that it is slow; and none is started once requests use the lane.
"""

import threading
from collections.abc import Sequence
from typing import Final

from kv_core.clock import Clock
from kv_core.errors import TierDown
from kv_core.log import limited_logger

from kv_tiers import chunk_header
from kv_tiers.lanes.lane import Lane
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import NamesChunks, Read

_log = limited_logger(__name__)

LIMIT_S: Final = 1.0
"""For one tier: no load is started after this time."""
_POLL_S: Final = 0.05
_JOIN_S: Final = 1.0
_MAX_BYTES: Final = 16 << 20
_LOADS: Final = (1, 2, 1, 4)
"""Chunks of each load. The sizes differ, because the difference reveals a load's fixed cost. A single chunk may be
larger than `_MAX_BYTES`."""


class BootMeasurement:
    """The measurement of one cache's tiers. Creating it starts it."""

    def __init__(self, lanes: Sequence[Lane], sizes: PayloadSizes, slot_bytes: int, clock: Clock) -> None:
        self._lanes = [lane for lane in lanes if isinstance(lane.tier, NamesChunks) and lane.load_cost() is None]
        self._sizes, self._slot_bytes, self._clock = sizes, slot_bytes, clock
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-boot-measurement", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call no tier and start no load from now on. A load in flight belongs to its lane, and ends with it."""
        self._is_over.set()

    def join(self) -> None:
        """After `stop`: wait until the thread has ended, but not long if a tier is slow to name its chunks."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        for lane in self._lanes:
            if self._is_over.is_set():
                return
            try:
                self._measure(lane)
            except TierDown as error:
                _log.info("tier %s is not measured: %s", lane.name, error)
            except Exception:  # noqa: BLE001  # a tier may be third-party code, and nothing depends on this
                _log.exception("tier %s could not be measured", lane.name)

    def _measure(self, lane: Lane) -> None:
        assert isinstance(lane.tier, NamesChunks)
        until_s = self._clock.now_s() + LIMIT_S
        keys = lane.tier.some_keys(sum(_LOADS))
        max_chunks = max(1, _MAX_BYTES // self._slot_bytes)
        arrived = threading.Event()
        for number, wanted in enumerate(_LOADS):
            chunks, keys = keys[: min(wanted, max_chunks)], keys[wanted:]
            is_late = number > 0 and self._clock.now_s() >= until_s
            if not chunks or is_late or self._is_over.is_set() or not lane.is_idle():
                break
            memory = chunk_memory(len(chunks) * self._slot_bytes)  # in whole pages, for direct reads
            reads = [
                Read(
                    key,
                    bytearray(chunk_header.HEADER_BYTES),
                    memory[position * self._slot_bytes : (position + 1) * self._slot_bytes],
                    self._sizes.largest,
                    self._sizes.of(key),
                )
                for position, key in enumerate(chunks)
            ]
            arrived.clear()
            if not lane.load(reads, lambda _arrivals: arrived.set()):
                break
            while not arrived.wait(_POLL_S):
                if self._is_over.is_set():
                    return
        if (cost := lane.load_cost(trust=True)) is not None:
            speed = f"{1 / cost[1] / 1e9:.2f} GB/s" if cost[1] > 0 else "no time per byte"
            _log.info("tier %s: %.1f ms per load and %s, measured at start", lane.name, cost[0] * 1e3, speed)
