"""The tiers below the host tier as one unit: their lanes in order, promotion and spilling."""

import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kv_core.clock import Clock
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_core.errors import ConfigError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger

from kv_tiers import chunk_header
from kv_tiers.cache.host import HostTier
from kv_tiers.cache.promote import Promotions
from kv_tiers.cache.spill import Spills, WriteMode
from kv_tiers.cache.upgrade import Upgrades
from kv_tiers.cache.worth import Part, Worth, worth_waiting
from kv_tiers.config import ColdConfig
from kv_tiers.index.residency import Residency
from kv_tiers.lanes.lane import Lane
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.core_dumps import chunk_memory
from kv_tiers.tier import NamesChunks, Read, ReadOnly
from kv_tiers.tier_state import SERVING, TierState

_log = limited_logger(__name__)

# The boot measurement: how quickly a tier delivers its chunks, before any request waits for them.
#
# Without it, a tier that others have filled is assumed to be quick until a few requests have waited for it
# (`kv_tiers.cache.worth`). A thread reads a few chunks of each tier that can name some, through the tier's lane, into
# memory of its own, and discards them: the lane learns from these loads as from all others. Nothing is written. The
# start does not wait for it. After a second no further load is started, so a slow tier is read from once, which is
# enough to know that it is slow; and none is started once requests use the lane.


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


Capability = TypeVar("Capability")
_REMOVALS_S: Final = 2.0
"""How long a tier that is up may take to remove, before it is closed, what was cleared or forgotten."""
_FULL_FROM: Final = 0.75
"""How much of a tier's capacity is used when it evicts at the latest: it keeps room for what comes next, and records of
chunks that are smaller than a slot."""


class LowerTiers:
    """Owns the lanes and closes them. Methods take the host's lock themselves unless stated otherwise."""

    def __init__(
        self,
        host: HostTier,
        index: Residency,
        lanes: Sequence[tuple[Lane, WriteMode]],
        config: ColdConfig,
        *,
        keep_s: float,
        clock: Clock,
    ) -> None:
        """lanes: hottest first, each with its write mode.
        keep_s: as for `Promotions`.
        """
        self._host = host
        self.lanes = [lane for lane, _ in lanes]
        self._modes = [mode for _, mode in lanes]
        self._wait_s = config.wait_s
        self._clock = clock
        self._boot: BootMeasurement | None = None
        self.on_forgotten: Callable[[Callable[[ChunkKey], bool]], object] = lambda is_gone: None
        """Called with what is being forgotten, under the host's lock or not."""
        slots, slot_bytes = host.pool.slots, host.pool.slot_bytes
        batch_chunks = max(1, config.batch_bytes // slot_bytes)
        self.spills = Spills(host, index, lanes, part=config.spill_share, batch_chunks=batch_chunks)
        self.upgrades = Upgrades(host, index, self.lanes, clock=clock)
        self.promotions = Promotions(
            host,
            index,
            self.lanes,
            self.spills,
            self.upgrades,
            wait_s=config.wait_s,
            keep_s=keep_s,
            max_slots=max(1, int(slots * config.prefetch_share)),
            batch_bytes=config.batch_bytes,
            clock=clock,
        )

    def numbers(self, names: Sequence[str] | None) -> frozenset[int] | None:
        """The numbers of the tiers with these names; None: no names, so all tiers. Takes no lock."""
        return None if names is None else frozenset(n for n, lane in enumerate(self.lanes) if lane.name in names)

    def measure(self) -> None:
        """Begin the boot measurement, which ends before the lanes do if not earlier."""
        pool = self._host.pool
        try:
            self._boot = BootMeasurement(self.lanes, pool.sizes, pool.slot_bytes, self._clock)
        except RuntimeError as error:  # the system has no more threads for us
            _log.info("the tiers are not measured: %s", error)

    def any_of(self, numbers: frozenset[int] | None) -> bool:
        """Whether there is any tier among those with these numbers (None: among all)."""
        return bool(self.lanes if numbers is None else numbers)

    def discard(self, keys: Sequence[ChunkKey], *, only_here: bool = False) -> None:
        """Remove these keys from all lower tiers. only_here: but not from those that other hosts share."""
        self.on_forgotten(set(keys).__contains__)
        for lane in self.local_lanes() if only_here else self.lanes:
            lane.discard(keys)

    def clear(self) -> None:
        self.on_forgotten(lambda key: True)
        for lane in self.lanes:
            lane.clear()

    def clear_tenant(self, tenant: bytes) -> None:
        self.on_forgotten(lambda key: key.tenant == tenant)
        for lane in self.lanes:
            lane.clear_tenant(tenant)

    def locate(self, keys: Sequence[ChunkKey], places: Sequence[str] = (), *, only_here: bool = False) -> list[str]:
        """For each key its place: the given one, or if that is empty the hottest tier that answers from memory that it
        is there; empty: none. Takes no lock.

        places: empty: none is known. only_here: of the tiers on this host.
        """
        found = list(places) or [""] * len(keys)
        for lane in self.local_lanes() if only_here else [lane for lane in self.lanes if lane.holds_is_local]:
            missing = [position for position, place in enumerate(found) if not place]
            for position, is_held in zip(missing, lane.holds([keys[number] for number in missing]), strict=True):
                found[position] = lane.name if is_held else ""
        return found

    def local_lanes(self) -> list[Lane]:
        """The lanes of tiers that answer from memory of what is on this host, hottest first."""
        return [lane for lane in self.lanes if lane.holds_is_local and not isinstance(lane.tier, ReadOnly)]

    def free_chunks(self, *, above: int) -> int:
        """How many more chunks fit into the tiers on this host above this one, where they get each chunk as it enters
        the pool, until they begin to be full. Takes no lock."""
        free, local = 0, self.local_lanes()
        for lane, mode in zip(self.lanes[:above], self._modes, strict=False):
            if mode == "through" and lane in local and lane.health()[0] in SERVING:
                usage = lane.usage()
                free_bytes = int(_FULL_FROM * (usage.capacity_bytes or 0)) - (usage.used_bytes or 0)
                free += max(0, 0 if usage.full else free_bytes) // self._host.pool.slot_bytes
        return free

    def remote_tiers_skipped(self) -> list[str]:
        """The tiers that `locate` skips."""
        return [lane.name for lane in self.lanes if not lane.holds_is_local]

    def worth(self, parts: Sequence[tuple[str, int, int, int]], shape: ChunkShape, have: int, costs: Costs) -> Worth:
        """What a lookup that finds `have` chunks in the pool and these parts in lower tiers would wait for now.

        parts: for each, the tier's name, the first chunk, the one after the last, and the number of bytes.
        """
        number_of = {lane.name: number for number, lane in enumerate(self.lanes)}
        known = [Part(number_of[name], first, end, nbytes) for name, first, end, nbytes in parts if name in number_of]
        best = max((part.end for part in known), default=have)
        wait_s = self._wait_s
        return worth_waiting(self.lanes, known, {}, shape=shape, have=have, best=best, costs=costs, max_wait_s=wait_s)

    def tiers_that(self, kind: type[Capability]) -> list[tuple[int, Capability]]:
        """The tiers with this optional capability, and their numbers. Calls to them bypass their lanes, so make them on
        a thread that may block. Takes no lock."""
        return [(number, lane.tier) for number, lane in enumerate(self.lanes) if isinstance(lane.tier, kind)]

    def states(self) -> list[TierState]:
        with self._host.lock:
            spills, upgraded = self.spills.counts(), list(self.upgrades.counts)
        states = []
        for lane, spill, upgrades in zip(self.lanes, spills, upgraded, strict=True):
            health, why = lane.health()
            states.append(
                TierState(lane.name, health, why, lane.usage(), lane.counts(), spill, lane.load_cost(), upgrades)
            )
        return states

    def drain(self, timeout_s: float) -> None:
        """Spill everything that is pending, as far as time allows."""
        self.spills.drain(timeout_s)

    def pause(self, timeout_s: float) -> bool:
        """Close the tiers until `reopen`: nothing is found there, and what is to be stored or removed there waits.

        timeout_s: of calls that are in progress, for each tier. False: one has not returned; it may be called again.
        """
        if self._boot is not None:
            self._boot.stop()
            self._boot.join()
        with self._host.lock:
            self.upgrades.stop()
        closed = [lane.close(timeout_s) for lane in self.lanes]  # all of them, as in `close`
        return all(closed)

    def reopen(self) -> None:
        for lane in self.lanes:
            try:
                lane.reopen()
            except ConfigError as error:
                _log.warning("tier %s stays closed: %s", lane.name, error)
        with self._host.lock:
            self.upgrades.resume()

    def close(self, timeout_s: float) -> bool:
        """Drain, then close. False: a tier still uses memory of the pool in a call that does not return."""
        if self._boot is not None:
            self._boot.stop()
        with self._host.lock:
            self.upgrades.stop()
        self.drain(timeout_s)
        with self._host.lock:
            unspilled = self.spills.stop()
        if unspilled:
            text = (
                "closing: %d chunks were not stored in the lower tiers after %.1f s; a longer cold.drain_s stores "
                "more of them"
            )
            _log.warning(text, unspilled, timeout_s)
        if self._boot is not None:
            self._boot.join()  # it calls tiers, and none is called while it is closed
        for lane in self.lanes:
            lane.remove_all(_REMOVALS_S)
        closed = [lane.close(timeout_s) for lane in self.lanes]  # all of them, even after one that does not close
        return all(closed)
