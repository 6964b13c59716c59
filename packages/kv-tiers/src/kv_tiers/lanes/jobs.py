"""The jobs of a lane: their order, and which chunks are hidden meanwhile. Bookkeeping only.

Loads and presence checks go before discards, and discards before stores, because an engine waits for the first, and a
chunk that was reported gone must not be found. Discarded or cleared chunks are hidden from the moment of the call until
the tier has removed them, and a store of one that is in progress ends as if it had never begun. Nothing is ever removed
from a tier that others fill (`OnlyHidden`): discarded or cleared chunks are hidden for good. If a tier refuses
removals, they are retried periodically, and the chunks stay hidden until then.

Nothing here locks, waits, reads a clock or calls a tier: the lane (`kv_tiers.lanes.lane`) does, and holds its one lock
around every call.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.outcome import LoadOutcome, StoreOutcome

from kv_tiers.tier import Read

_log = limited_logger(__name__)

MAX_DISCARDS: Final = 100_000
"""If more keys than this wait to be discarded by a tier that does not answer, it is cleared instead once it answers."""

MAX_HIDDEN: Final = 1 << 20
"""The most keys and tenants that are remembered as hidden (`OnlyHidden`); they take 70 MiB."""

REMOVE_AGAIN_S: Final = 60.0
"""After how long removals that a tier refused are retried: permission may have been granted meanwhile."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A chunk to store: `pages` are leased until the job is done, its bytes the first `nbytes`."""

    key: ChunkKey
    parent: ChunkKey | None
    pages: memoryview
    nbytes: int


@dataclass(frozen=True, slots=True)
class FirstBytes:
    """First bytes of a payload, verified, with its header."""

    header: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """The outcome of loading one chunk.

    checksum: the checksum of its bytes if it was loaded (for `Read.as_stored`, of the payload).
    parts: the number of first parts from which alone it was decoded; 0: it was decoded from all of them.
    first_bytes: these parts as they were read, if `LoadChunks.keeps`.
    """

    key: ChunkKey
    outcome: LoadOutcome
    checksum: bytes = b""
    parts: int = 0
    first_bytes: FirstBytes | None = None


@dataclass(slots=True)
class LoadChunks:
    """Load chunks.

    divisor: read one of this many equal parts of each chunk's size, if chunks have parts; 1: all of it.
    keeps: whether to return `Arrival.first_bytes`.
    """

    reads: list[Read]
    done: Callable[[list[Arrival]], None]
    divisor: int = 1
    keeps: bool = False


@dataclass(slots=True)
class LoadRemainder:
    """Load the whole of one payload, in steps, while the lane has nothing else to do.

    done: receives the outcome. None: other work comes first; pass the remainder to the lane again later to continue.
    bytes_read: how many of the payload's first bytes are in the pages of `read`, with its header.
    first_bytes: bytes that were read earlier and are still to be copied into these pages.
    in_one: whether to read the payload again from its beginning in one call, because the result of steps was wrong.
    """

    read: Read
    done: Callable[[Arrival | None], None]
    bytes_read: int = 0
    first_bytes: FirstBytes | None = None
    in_one: bool = False


@dataclass(slots=True)
class Ask:
    """Which keys the tier holds."""

    keys: list[ChunkKey]
    done: Callable[[list[bool]], None]


@dataclass(slots=True)
class Store:
    """Store chunks. dropped: the keys of its chunks that were discarded after it was submitted."""

    chunks: list[Outgoing]
    done: Callable[[list[StoreOutcome]], None]
    dropped: set[ChunkKey] = field(default_factory=set)


@dataclass(slots=True)
class Discard:
    keys: list[ChunkKey]


@dataclass(slots=True)
class ClearTier:
    pass


@dataclass(slots=True)
class ClearTenant:
    tenant: bytes


class Probe:
    """Check whether a tier that failed is back."""


Submitted = LoadChunks | Ask | Store
Removal = Discard | ClearTier | ClearTenant
Job = Submitted | Removal | LoadRemainder


class OnlyHidden:
    """The chunks that are no longer read from a tier that others fill and that we do not change, until this process
    ends.

    Which chunks a tier had when it was cleared is not known, so after a clear nothing is read from it. More than
    `MAX_HIDDEN` keys and tenants count as a clear, too.
    """

    def __init__(self, tier: str) -> None:
        """tier: its name, for the log."""
        self.all = False
        self._tier = tier
        self._keys: set[int] = set()  # hashes, which are small; of two that are equal one is a miss
        self._tenants: set[bytes] = set()

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        self._keys.update(map(hash, keys))
        self._limit()

    def clear_tenant(self, tenant: bytes) -> None:
        self._tenants.add(tenant)
        self._limit()

    def clear(self) -> None:
        self.all = True
        self._keys.clear()
        self._tenants.clear()

    def has(self, key: ChunkKey) -> bool:
        return self.all or hash(key) in self._keys or key.tenant in self._tenants

    def _limit(self) -> None:
        if len(self._keys) + len(self._tenants) > MAX_HIDDEN:
            if not self.all:
                _log.warning(
                    "tier %s is written by others (write: never), so what is discarded here stays there and is only "
                    "hidden, which more than %d chunks and tenants are now: this process no longer reads the tier, but "
                    "a new one will, and all of it: discard chunks where they are written",
                    self._tier,
                    MAX_HIDDEN,
                )
            self.clear()


class Jobs:
    """The jobs of one lane."""

    def __init__(
        self, *, max_load_chunks: int, max_store_chunks: int, max_stores: int, only_hides: str | None = None
    ) -> None:
        """max_stores: how many stores may be in progress at a time.
        only_hides: the name of a tier from which nothing is removed.
        """
        self._hidden = None if only_hides is None else OnlyHidden(only_hides)
        self._max_load_chunks, self._max_store_chunks = max_load_chunks, max_store_chunks
        self._max_stores = max_stores
        self.remainder: LoadRemainder | None = None
        """The remainder that is being read, which no request is waiting for."""
        self._loads: deque[LoadChunks | Ask] = deque()
        self._stores: deque[Store] = deque()
        self._load_chunks = self._store_chunks = 0  # of jobs that wait or are in progress
        self._storing: dict[int, Store] = {}
        self._discards: dict[ChunkKey, None] = {}
        self._discarding: set[ChunkKey] = set()
        self._clear_next = self._clearing = False
        self._tenants_to_clear: dict[bytes, None] = {}
        self._clearing_tenants: set[bytes] = set()
        self._removals_from_s = 0.0  # when removals that were refused are retried

    @property
    def queued(self) -> int:
        """Chunks to be loaded or stored, and queries."""
        return self._load_chunks + self._store_chunks

    @property
    def room_for_stores(self) -> int:
        return max(0, self._max_store_chunks - self._store_chunks)

    @property
    def is_clearing(self) -> bool:
        """Whether everything is being cleared: nothing may be found, and nothing submitted."""
        return self._clearing or self._clear_next

    def has_submitted(self) -> bool:
        """Whether submitted jobs are waiting."""
        return bool(self._loads or self._stores)

    def has_any(self, now_s: float) -> bool:
        """Whether jobs are waiting, other than refused removals that are not due yet."""
        return self.has_submitted() or (self._has_removals() and now_s >= self._removals_from_s)

    def submit(self, job: Submitted) -> bool:
        """False: there is no room, or its chunks are being cleared."""
        if self.is_clearing or self._is_of_cleared(job):
            return False
        match job:
            case Store():
                if len(job.chunks) > self._max_store_chunks - self._store_chunks:
                    return False
                self._store_chunks += len(job.chunks)
                self._stores.append(job)
            case _:
                if self._load_chunks + _load_chunks(job) > self._max_load_chunks:
                    return False
                self._load_chunks += _load_chunks(job)
                self._loads.append(job)
        return True

    def take_submitted(self) -> list[Submitted]:
        """Withdraw and return the submitted jobs that have not begun."""
        waiting: list[Submitted] = [*self._loads, *self._stores]
        self._load_chunks -= sum(map(_load_chunks, self._loads))
        self._store_chunks -= sum(len(job.chunks) for job in self._stores)
        self._loads.clear()
        self._stores.clear()
        return waiting

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        if self._hidden is not None:
            self._hidden.discard(keys)
            return
        discarded = dict.fromkeys(keys)
        self._discards.update(discarded)
        for job in (*self._stores, *self._storing.values()):
            # Only keys of this job: a store that hangs would otherwise collect every key that is discarded meanwhile.
            job.dropped.update(chunk.key for chunk in job.chunks if chunk.key in discarded)
        if len(self._discards) > MAX_DISCARDS:
            self.clear()

    def clear(self) -> None:
        if self._hidden is not None:
            self._hidden.clear()
            return
        self._clear_next = True
        self._discards.clear()
        self._tenants_to_clear.clear()
        for job in (*self._stores, *self._storing.values()):
            job.dropped.update(chunk.key for chunk in job.chunks)

    def clear_tenant(self, tenant: bytes) -> None:
        if self._hidden is not None:
            self._hidden.clear_tenant(tenant)
            return
        self._tenants_to_clear[tenant] = None
        for job in (*self._stores, *self._storing.values()):
            job.dropped.update(chunk.key for chunk in job.chunks if chunk.key.tenant == tenant)

    def is_hidden(self, key: ChunkKey) -> bool:
        """Whether the chunk must not be found."""
        if self._hidden is not None:
            return self._hidden.has(key)
        return key in self._discards or key in self._discarding or self._is_being_cleared(key)

    def next(self, now_s: float) -> Job | None:
        """The job that may begin now, or None. A removal stays queued until it has begun (`begin`)."""
        if self._loads:
            return self._loads.popleft()
        return (self._next_removal() if now_s >= self._removals_from_s else None) or self._next_store()

    def removals_due_in_s(self, now_s: float) -> float | None:
        """Seconds until refused removals are retried; None if there are none."""
        return self._removals_from_s - now_s if self._has_removals() and self._removals_from_s > now_s else None

    def unremoved(self) -> str:
        """What is hidden because the tier still has to remove it, in words; empty: nothing."""
        if self.is_clearing:
            return "all of its chunks"
        tenants = self._tenants_to_clear.keys() | self._clearing_tenants
        keys = self._discards.keys() | self._discarding
        descriptions = [f"the chunks of tenant {tag.hex()}" for tag in sorted(tenants)]
        return ", ".join([*descriptions, f"{len(keys)} discarded chunks"] if keys else descriptions)

    def log_unremoved(self, tier: str) -> None:
        """Log what the tier of this name has not removed, because nothing hides it after this process."""
        if unremoved := self.unremoved():
            _log.warning(
                "tier %s is closed before it has removed %s, for which it was down, too slow or not permitted to; the "
                "next process that opens it finds what is left there: clear it again then",
                tier,
                unremoved,
            )

    def removals(self) -> tuple[bool, list[bytes], list[ChunkKey]]:
        """What is still to be removed: everything, the chunks of these tenants, and these."""
        tenants = self._tenants_to_clear.keys() | self._clearing_tenants
        return self.is_clearing, list(tenants), list(self._discards.keys() | self._discarding)

    def _has_removals(self) -> bool:
        return bool(self._discards or self._clear_next or self._tenants_to_clear)

    def _next_removal(self) -> Removal | None:
        if self._clear_next and not self._storing and not self._clearing:
            return ClearTier()
        if self._tenants_to_clear and not self.is_clearing:
            storing = {chunk.key.tenant for job in self._storing.values() for chunk in job.chunks}
            for tenant in self._tenants_to_clear:
                if tenant not in storing and tenant not in self._clearing_tenants:
                    return ClearTenant(tenant)
        if self._discards:
            busy = {chunk.key for job in self._storing.values() for chunk in job.chunks}
            keys = [key for key in self._discards if key not in busy]
            if keys:
                return Discard(keys)
        return None

    def _next_store(self) -> Store | None:
        """The store that may begin. Chunks of stores that wait while the tier is being cleared are cleared with it;
        these stores begin only to be answered: a tier may refuse to be cleared for good, and the chunks' slots in the
        pool are in use until then."""
        if self._stores and len(self._storing) < self._max_stores:
            first = self._stores[0]
            if not any(chunk.key in self._discarding for chunk in first.chunks):
                return self._stores.popleft()
        return None

    def begin(self, job: Job) -> None:
        match job:
            case Store():
                self._storing[id(job)] = job
            case ClearTier():
                self._clearing, self._clear_next = True, False
            case Discard():
                for key in job.keys:
                    del self._discards[key]
                self._discarding.update(job.keys)
            case ClearTenant():
                del self._tenants_to_clear[job.tenant]
                self._clearing_tenants.add(job.tenant)
            case LoadRemainder():
                self.remainder = job

    def end(self, job: Job) -> None:
        match job:
            case Store():
                del self._storing[id(job)]
                self._store_chunks -= len(job.chunks)
            case ClearTier():
                self._clearing = False
            case Discard():
                self._discarding.difference_update(job.keys)
            case ClearTenant():
                self._clearing_tenants.remove(job.tenant)
            case LoadRemainder():
                self.remainder = None
            case _:
                self._load_chunks -= _load_chunks(job)

    def refused_removal(self, job: Removal, now_s: float) -> str:
        """The tier refused this removal: it is retried after `REMOVE_AGAIN_S`, together with all removals requested
        until then. Returns what stays hidden, in words."""
        self._removals_from_s = now_s + REMOVE_AGAIN_S
        self.requeue(job)
        return self.unremoved()

    def requeue(self, job: Job) -> None:
        """The tier was down: removals are sent to it again when it is back."""
        match job:
            case ClearTier():
                self._clear_next = True
            case Discard():
                self._discards.update(dict.fromkeys(job.keys))
            case ClearTenant():
                self._tenants_to_clear[job.tenant] = None

    def _is_being_cleared(self, key: ChunkKey) -> bool:
        return key.tenant in self._tenants_to_clear or key.tenant in self._clearing_tenants

    def _is_of_cleared(self, job: Submitted) -> bool:
        """Whether the job concerns chunks of a tenant whose clearing has not ended."""
        if not self._tenants_to_clear and not self._clearing_tenants:
            return False
        if isinstance(job, Ask):
            return any(map(self._is_being_cleared, job.keys))
        return any(
            self._is_being_cleared(item.key) for item in (job.reads if isinstance(job, LoadChunks) else job.chunks)
        )


def _load_chunks(job: LoadChunks | Ask) -> int:
    return len(job.reads) if isinstance(job, LoadChunks) else 1
