"""Tiers of type `gds`: hits that the worker reads in the tier's files itself, so that they never pass through the pool.

The scheduler half's lookup finds them: whatever follows a hit in the pool is leased here in the tier's files, on a
thread, because leasing reads the medium. Until that has been done the answer is "ask again", as for a promotion. The
lease lasts as long as the holder's promise, so until the worker has reported that the read has ended. The worker half
reads (`kv_core.device.FileReader`), and uses nothing that was forgotten meanwhile or whose checksum is wrong.

A hit in the files is promoted through the pool instead if it ends before the prompt does and other tiers may hold more
of it, and after failed reads: the lane and the tier then avoid what cannot be read, as after any load.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
from kv_core.coverage import ChunkShape
from kv_core.device import FileRead, FileReader
from kv_core.errors import ConfigError
from kv_core.format import is_quantised_kind
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import Damaged, Loaded, ReadFailed
from kv_core.service import Holder
from kv_core.shape import GroupShape
from kv_core.transfer import FileExtent
from kv_tiers.build import refuse_gds
from kv_tiers.cache.extension import CacheParts
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.settings import Settings
from kv_tiers.tier import FileLease, SupportsFileExtents

_log = limited_logger(__name__)

_MOST_KEYS: Final = 1 << 16
"""How many of the chunks that were read in files are remembered."""
_LEASE_S: Final = 1.0
"""How long a lookup waits for a lease: a medium that takes longer hangs."""


@dataclass(slots=True)
class _Leased:
    """Chunks in files, for one holder.

    keys: the chunks after the hit in the pool. first: the number of the first one.
    extents: where they are, as far as all are in files; None: not known yet.
    is_void: some of them have been forgotten since.
    lease: the tier's. failed: those of its chunks that could not be read.
    """

    keys: list[ChunkKey]
    first: int
    began_s: float
    extents: tuple[FileExtent, ...] | None = None
    is_void: bool = False
    lease: FileLease | None = None
    failed: list[ChunkKey] = field(default_factory=list)


class DirectReads:
    """The tier of type `gds` of a cache in this process, as `kv_tiers.cache.extension.FindsInFiles`. Thread-safe."""

    def __init__(self, tier: str, reader: FileReader) -> None:
        """tier: its name. reader: for the engine's one group of layers; closed with the cache."""
        self.tier = tier
        self.reader = reader
        self._lock = threading.Lock()
        self._leased: dict[Holder, _Leased] = {}
        # The last chunks that were read. What is computed because reading does not pay belongs in the pool.
        self._was_read: dict[ChunkKey, None] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-extents")

    def attach(self, parts: CacheParts) -> None:
        self._parts = parts
        numbers = [number for number, _ in parts.lower.tiers_that(object)]
        self._number = next(number for number in numbers if parts.lower.lanes[number].name == self.tier)
        self._others = frozenset(numbers) - {self._number}
        self._lane = parts.lower.lanes[self._number]

    def held(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        return None

    def received(self, keys: Sequence[ChunkKey]) -> None:
        return None

    def detach(self) -> None:
        self.reader.close()
        for holder in list(self._leased):
            self.end(holder)
        self._thread.shutdown()

    # For lookups.

    def find(
        self,
        keys: Sequence[ChunkKey],
        shape: ChunkShape,
        holder: Holder,
        *,
        hit: int,
        lower: frozenset[int] | None,
        pays: Callable[[tuple[str, int, int, int]], bool],
    ) -> Sequence[FileExtent] | None:
        with self._lock:
            leased = self._leased.get(holder)
            if (
                leased is not None
                and leased.first == hit
                and not leased.is_void
                and leased.keys == keys[hit:][: len(leased.keys)]
            ):
                if leased.extents is None and self._parts.clock.now_s() - leased.began_s > _LEASE_S:
                    leased.extents = ()
                return leased.extents
        self.end(holder)
        if not shape.is_plain or (lower is not None and self._number not in lower):
            return ()
        held = self._lane.holds(keys[hit:])
        end = hit + (held.index(False) if False in held else len(held))
        others = self._others if lower is None else self._others & lower
        if end == hit or (end < len(keys) and others):
            return ()
        if not pays((self.tier, hit, end, self._parts.host.pool.sizes.total(keys[hit:end]))):
            with self._lock:
                for key in keys[hit:end]:
                    self._was_read.pop(key, None)
            return ()
        leased = _Leased(list(keys[hit:end]), hit, self._parts.clock.now_s())
        with self._lock:
            self._leased[holder] = leased
        try:
            self._thread.submit(self._lease, leased)
        except RuntimeError:  # the system has no more threads for us
            leased.extents = ()
        return leased.extents

    def holding(self, keys: Sequence[ChunkKey], lower: frozenset[int] | None) -> set[ChunkKey]:
        if lower is not None and self._number not in lower:
            return set()
        with self._lock:
            read = [key for key in keys if key in self._was_read]
        return {key for key, is_held in zip(read, self._lane.holds(read), strict=True) if is_held} if read else set()

    def renew(self, holder: Holder) -> bool | None:
        with self._lock:
            leased = self._leased.get(holder)
            return not leased.is_void if leased is not None and leased.extents else None

    def end(self, holder: Holder) -> None:
        with self._lock:
            leased = self._leased.pop(holder, None)
        if leased is not None:
            with suppress(RuntimeError):  # without threads there is no lease either
                self._thread.submit(self._end, leased)

    def forget(self, is_gone: Callable[[ChunkKey], bool]) -> None:
        with self._lock:
            for leased in self._leased.values():
                leased.is_void = leased.is_void or any(map(is_gone, leased.keys))

    # For the worker half.

    def has_read(self, holder: Holder, keys: Sequence[ChunkKey], read: FileRead) -> tuple[str, list[ChunkKey]]:
        """These chunks have been read for the holder. Returns why they must not be used, if so, and which of them are
        wrong where they are: forget these."""
        arrivals = [Arrival(key, outcome) for key, outcome in zip(keys, read.outcomes, strict=True)]
        damaged = [arrival.key for arrival in arrivals if isinstance(arrival.outcome, Damaged)]
        loaded = [arrival.key for arrival in arrivals if isinstance(arrival.outcome, Loaded)]
        reasons = [outcome.reason for outcome in read.outcomes if isinstance(outcome, Damaged | ReadFailed)]
        why = reasons[0] if reasons else ""
        with self._lock:
            leased = self._leased.get(holder)
            if leased is None or leased.is_void:
                why = why or "the chunks were forgotten while they were being read"
            else:
                leased.failed += [arrival.key for arrival in arrivals if isinstance(arrival.outcome, ReadFailed)]
                self._was_read |= dict.fromkeys(loaded)
                while len(self._was_read) > _MOST_KEYS:
                    del self._was_read[next(iter(self._was_read))]
        self._lane.was_read(arrivals, self._parts.host.pool.sizes.total(loaded), read.seconds)
        return why, damaged

    @property
    def _files(self) -> SupportsFileExtents:
        assert isinstance(self._lane.tier, SupportsFileExtents)
        return self._lane.tier

    # On the thread.

    def _lease(self, leased: _Leased) -> None:
        try:
            leased.lease = self._files.lease_extents(leased.keys)
        except Exception as error:  # noqa: BLE001  # whatever it is: a lookup waits for the answer
            _log.warning("tier %s: no file can be leased, so chunks are promoted: %s", self.tier, error)
        extents: list[FileExtent] = []
        # What was forgotten before this lease was known to `forget` is hidden by the lane by now.
        held = self._lane.holds(leased.keys)
        for extent, is_held in zip(() if leased.lease is None else leased.lease.extents, held, strict=False):
            if extent is None or not is_held:
                break
            extents.append(extent)
        with self._lock:
            if leased.extents is None:
                leased.extents = tuple(extents)

    def _end(self, leased: _Leased) -> None:
        if leased.lease is not None:
            self._files.end_lease(leased.lease, leased.failed)


def direct_tier(
    settings: Settings, groups: Sequence[GroupShape], formats: Sequence[str], *, alone: bool
) -> tuple[Settings, str]:
    """The settings for an engine with these groups of layers, and the name of its tier of type `gds`; "" for none.

    alone: its only worker and its scheduler are in one process, and so is the cache. Otherwise the tier becomes one of
        type `disk`.

    Raises:
        ConfigError: the engine cannot read what is stored there by itself, or would read in several tiers.
    """
    tiers = [(number, tier) for number, tier in enumerate(settings.tiers) if tier.get("type") == "gds"]
    if not tiers:
        return settings, ""
    (number, tier), *more = tiers
    name = str(tier.get("name") or "gds")
    if more:
        raise ConfigError(f"tiers[{more[0][0]}]: only one tier is of type gds; give that one several directories")
    if tier.get("codec") or tier.get("approximate"):
        raise ConfigError(
            f"tiers[{number}]: a tier of type gds has neither codec nor approximate, because what is read in files is "
            "not decoded: leave them out, or write type: disk"
        )
    if any(map(is_quantised_kind, formats)):
        refuse_gds(settings.tiers, f"is for exact chunks, not for format {formats[0]}")
    if len(groups) > 1 or groups[0].coverage.kind != "all":
        refuse_gds(settings.tiers, "is for models whose layers are one group that needs the whole prefix")
    if alone:
        return settings, name
    _log.warning(
        "tier %s is used as type: disk, so chunks pass through the pool: the engine has several processes, and "
        "the lease of a file does not cross the socket between them",
        name,
    )
    disks = [{**tier, "type": "disk", "name": name} if tier.get("type") == "gds" else tier for tier in settings.tiers]
    return msgspec.structs.replace(settings, tiers=disks), ""
