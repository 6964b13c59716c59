"""The lease table: promises, reads and writes by number, holder and deadline.

Bookkeeping only: no lock, no clock and no pool. The caller holds a lock around every call, passes the time, counts the
leases on the slots themselves, and frees the slots of leases that end.

All promises and reads last equally long from when they were granted or renewed, so they expire in that order, and
checking for expired ones is free while there are none. Writes do not expire, nor do lasting reads.
"""

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from kv_core.keys import ChunkKey
from kv_core.service import Holder
from kv_eviction.shares import Shares

from kv_tiers.cache.host import HostTier
from kv_tiers.index.residency import Residency


@dataclass(slots=True)
class ReadEntry:
    """A promise or a read lease.

    number: unique among all leases, read or write.
    holder: the request or worker that has it.
    slots: the slots that may be read, each leased once for it.
    kind: a promise is replaced by the holder's next one; loads are independent of it.
    began_s: when it began.
    deadline_s: when it expires; infinite for a lasting one.
    nbytes: of the chunks of a load.
    since: of a load, as returned by `Residency.lease_bytes`.
    """

    number: int
    holder: Holder
    slots: list[int]
    kind: Literal["promise", "load"]
    began_s: float
    deadline_s: float
    nbytes: int = 0
    since: int = 0


@dataclass(slots=True)
class WriteEntry:
    """Slots in which chunks are being written.

    number: unique among all leases, read or write.
    holder: the request or worker that has it.
    keys: the chunks.
    slots: where each of them goes.
    chain: all keys of the prompt up to these chunks, of every group that is written.
    began_s: when it began.
    held_s: for how long the chunks are held for another engine, and retained (`kv_tiers.cache.leases`).
    lower: the numbers of the lower tiers that they may go to; None: all.
    is_demoted: the chunks of the chain are the first to be evicted.
    """

    number: int
    holder: Holder
    keys: list[ChunkKey]
    slots: list[int]
    chain: list[ChunkKey]
    began_s: float
    held_s: tuple[float, float] = (0.0, 0.0)
    lower: frozenset[int] | None = None
    is_demoted: bool = False


@dataclass(slots=True)
class _Owned:
    """What the holders of one owner have open: numbers by holder, how many these are, and their keys in all."""

    numbers: dict[Holder, set[int]] = field(default_factory=dict)
    leases: int = 0
    keys: int = 0


def owner_of(holder: Holder) -> str:
    """What the holder's name has before a slash: a server's holders belong to its sessions."""
    return holder.partition("/")[0]


def _keys_of(lease: ReadEntry | WriteEntry) -> int:
    return len(lease.chain) if isinstance(lease, WriteEntry) else len(lease.slots)


class Leases:
    """The lease table of one cache. Leases that a method ends are removed and returned; the caller frees the slots.

    restored_upto: leases up to this number began in another process.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.restored_upto = 0
        self._reads: dict[int, ReadEntry] = {}
        self._timed: OrderedDict[int, ReadEntry] = OrderedDict()  # those that expire, by deadline
        self._promises: dict[Holder, ReadEntry] = {}
        self._writes: dict[int, WriteEntry] = {}
        self._owned: dict[str, _Owned] = {}
        self._last_number = 0

    @property
    def reads_open(self) -> int:
        """Promises and loads."""
        return len(self._reads)

    @property
    def writes_open(self) -> int:
        return len(self._writes)

    def holders(self) -> set[Holder]:
        """Holders that have any lease."""
        return {holder for owned in self._owned.values() for holder in owned.numbers}

    def of(self, owner: str) -> list[ReadEntry | WriteEntry]:
        """All open leases of this owner's holders, in the order in which they began."""
        owned = self._owned.get(owner)
        numbers = sorted(number for of_holder in owned.numbers.values() for number in of_holder) if owned else ()
        return [lease for number in numbers if (lease := self.find(number)) is not None]

    def count(self, owner: str) -> tuple[int, int]:
        """How many these are, and their keys in all. Needs no lock, like `find`."""
        owned = self._owned.get(owner)
        return (0, 0) if owned is None else (owned.leases, owned.keys)

    def find(self, number: int) -> ReadEntry | WriteEntry | None:
        """None: it is not open (any more)."""
        return self._reads.get(number) or self._writes.get(number)

    def promise(self, holder: Holder, slots: list[int], now_s: float) -> ReadEntry | None:
        """Replace the holder's promise with these slots; returns the previous promise. No slots: no promise."""
        if (previous := self._promises.get(holder)) is not None:
            self.close_read(previous.number)
        if slots:
            self._add_read(ReadEntry(self._next_number(), holder, slots, "promise", now_s, now_s + self.lease_s))
        return previous

    def promise_of(self, holder: Holder) -> ReadEntry | None:
        return self._promises.get(holder)

    def renew(self, promise: ReadEntry, now_s: float) -> None:
        """Restart its time."""
        promise.deadline_s = now_s + self.lease_s
        self._timed.move_to_end(promise.number)

    def open_read(self, holder: Holder, slots: list[int], now_s: float, *, lasting: bool = False) -> ReadEntry:
        deadline_s = math.inf if lasting else now_s + self.lease_s
        read = ReadEntry(self._next_number(), holder, slots, "load", now_s, deadline_s)
        self._add_read(read)
        return read

    def open_write(
        self, holder: Holder, keys: list[ChunkKey], slots: list[int], chain: list[ChunkKey], now_s: float
    ) -> WriteEntry:
        write = WriteEntry(self._next_number(), holder, keys, slots, chain, now_s)
        self._add_write(write)
        return write

    def is_writing(self, write: WriteEntry) -> bool:
        """It is still open."""
        return write.number in self._writes

    def close_read(self, number: int) -> ReadEntry | None:
        """None: it is not open (any more)."""
        read = self._reads.pop(number, None)
        if read is not None:
            self._timed.pop(number, None)
            if read.kind == "promise":
                del self._promises[read.holder]
            self._forget(read)
        return read

    def close_write(self, number: int) -> WriteEntry | None:
        """None: it is not open (any more)."""
        write = self._writes.pop(number, None)
        if write is not None:
            self._forget(write)
        return write

    def end(self, holder: Holder) -> tuple[list[ReadEntry], list[WriteEntry]]:
        """End and return all leases of the holder."""
        owned = self._owned.get(owner_of(holder))
        numbers = sorted(owned.numbers.get(holder, ())) if owned else ()
        reads = [read for number in numbers if (read := self.close_read(number)) is not None]
        return reads, [write for number in numbers if (write := self.close_write(number)) is not None]

    def expire(self, now_s: float) -> Sequence[ReadEntry]:
        """Remove and return the leases that have expired, the oldest first."""
        expired: list[ReadEntry] = []
        while self._timed and (oldest := next(iter(self._timed.values()))).deadline_s <= now_s:
            self.close_read(oldest.number)
            expired.append(oldest)
        return expired

    def entries(self) -> tuple[list[ReadEntry], list[WriteEntry], int]:
        """All that are open, reads in the order of their ends, and the last number."""
        lasting = [read for number, read in self._reads.items() if number not in self._timed]
        return [*self._timed.values(), *lasting], list(self._writes.values()), self._last_number

    def restore(self, reads: Sequence[ReadEntry], writes: Sequence[WriteEntry], last_number: int) -> None:
        """In a new table: the `entries` of another one."""
        self._last_number = self.restored_upto = last_number
        for read in reads:
            self._add_read(read)
        for write in writes:
            self._add_write(write)

    def clear(self) -> list[WriteEntry]:
        """End everything; returns the writes."""
        return [write for holder in self.holders() for write in self.end(holder)[1]]

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _add_read(self, read: ReadEntry) -> None:
        self._reads[read.number] = read
        if read.deadline_s < math.inf:
            self._timed[read.number] = read
        if read.kind == "promise":
            self._promises[read.holder] = read
        self._note(read)

    def _add_write(self, write: WriteEntry) -> None:
        self._writes[write.number] = write
        self._note(write)

    def _note(self, opened: ReadEntry | WriteEntry) -> None:
        owned = self._owned.setdefault(owner_of(opened.holder), _Owned())
        owned.numbers.setdefault(opened.holder, set()).add(opened.number)
        owned.leases += 1
        owned.keys += _keys_of(opened)

    def _forget(self, closed: ReadEntry | WriteEntry) -> None:
        owned = self._owned[owner := owner_of(closed.holder)]
        numbers = owned.numbers[closed.holder]
        numbers.remove(closed.number)
        owned.leases -= 1
        owned.keys -= _keys_of(closed)
        if not numbers:
            del owned.numbers[closed.holder]
        if not owned.leases:
            del self._owned[owner]


# Holds: chunks kept in the pool for another engine until it has read them or a deadline has passed, or retained.
#
# They belong to a prompt that one engine has computed and another will decode (docs/adr/0011). The engine that stored
# them may have ended by then, so no lease of a holder keeps them in place: the cache holds them itself, for a given
# time. Holds take at most half of the pool, or half of a tenant's quota. Chunks that a request asks to retain are held
# however often they are read, in at most half of that, besides those that are handed over too.
#
# A prompt is stored in several steps, and each step names all of its chunks so far. A chunk that has been read is
# therefore not held again until no step has named it for as long as it would be held: a prompt may take longer than
# that.


@dataclass(slots=True)
class _Hold:
    """tenant: of the chunk. until_s: when the hold ends. due_s: when to check that, which may be earlier.
    retained_s: until when reading does not end it."""

    tenant: bytes
    until_s: float
    due_s: float
    retained_s: float = 0.0


class Holds:
    """The holds of one cache. Every method is called under the host's lock.

    Each step of a prompt names all of its chunks, so renewing a hold only sets its end, and counting those of a share
    takes no look at each.
    """

    def __init__(self, host: HostTier, index: Residency, shares: Shares) -> None:
        self._host = host
        self._index = index
        self._shares = shares
        self._held: dict[int, _Hold] = {}  # by slot, each leased once
        self._held_of: Counter[bytes] = Counter()  # by tenant
        self._due: list[tuple[float, int, int]] = []  # a heap: one of each hold, and some of holds that have ended
        self._numbers = itertools.count()  # of holds, so that those that end together end in the prompt's order
        self._read: dict[int, tuple[ChunkKey | None, float]] = {}  # by slot: the chunk that was read, and until when

    @property
    def chunks(self) -> int:
        """How many are held now."""
        return len(self._held)

    def hold(self, slots: Sequence[int], until_s: float, now_s: float, *, retain: bool = False) -> list[int]:
        """Hold the leading ones of these resident slots for which there is room, at least until then. Returns those
        that were not held before.

        retain: however often they are read.
        """
        room: dict[int, int] = {}
        new: list[int] = []
        for slot in slots:
            if (hold := self._held.get(slot)) is not None:
                hold.until_s = max(hold.until_s, until_s)
                hold.retained_s = max(hold.retained_s, until_s * retain)
                continue
            key = self._index.key_at(slot)
            assert key is not None
            read_key, read_until_s = self._read.get(slot, (None, 0.0))
            if now_s < read_until_s and read_key == key and not retain:
                self._read[slot] = key, max(read_until_s, until_s)
                continue
            share = self._shares.of(key.tenant)
            if id(share) not in room:
                room[id(share)] = self._room(key, retain)
            if room[id(share)] <= 0:
                break
            room[id(share)] -= 1
            self._index.lease([slot])
            self._held[slot] = _Hold(key.tenant, until_s, until_s, until_s * retain)
            self._held_of[key.tenant] += 1
            heappush(self._due, (until_s, next(self._numbers), slot))
            new.append(slot)
        return new

    def retainable(self, keys: Sequence[ChunkKey]) -> int:
        """How many of these leading chunks, of one tenant, may be retained: those that are held, and as there is
        room."""
        room = self._room(keys[0], retain=True) if keys else 0
        for place, key in enumerate(keys):
            if self._index.find(key) not in self._held:
                if room <= 0:
                    return place
                room -= 1
        return len(keys)

    def _room(self, key: ChunkKey, retain: bool) -> int:
        """For how many more chunks of this one's share."""
        share = self._shares.of(key.tenant)
        held = sum(count for tenant, count in self._held_of.items() if self._shares.of(tenant) is share)
        return share.slots // (4 if retain else 2) - held

    def until_s(self) -> dict[int, tuple[float, float]]:
        """By slot, until when each chunk is held, and until when it is retained."""
        return {slot: (hold.until_s, hold.retained_s) for slot, hold in self._held.items()}

    def read(self, slots: Sequence[int]) -> None:
        """End the holds of these, which have been read or are not needed."""
        if self._held:
            # Once each: a client or a peer may name a chunk repeatedly, and there is only one lease to end.
            held = [slot for slot in dict.fromkeys(slots) if slot in self._held]
            self._read.update((slot, (self._index.key_at(slot), self._held[slot].until_s)) for slot in held)
            for slot in held:
                hold = self._held[slot]
                if hold.retained_s and hold.until_s != hold.retained_s:
                    hold.until_s = hold.due_s = hold.retained_s
                    heappush(self._due, (hold.due_s, next(self._numbers), slot))
            self._end([slot for slot in held if not self._held[slot].retained_s])

    def expire(self, now_s: float) -> None:
        """End the holds whose time is up."""
        expired: dict[int, None] = {}  # once each: an earlier hold of a slot may have been due at the same time
        while self._due and self._due[0][0] <= now_s:
            due_s, number, slot = heappop(self._due)
            hold = self._held.get(slot)
            if hold is None or hold.due_s != due_s:
                continue  # the entry is of an earlier hold of this slot
            if hold.until_s > now_s:
                hold.due_s = hold.until_s
                heappush(self._due, (hold.due_s, number, slot))
            else:
                expired[slot] = None
        self._end(list(expired))

    def drop_forgotten(self) -> None:
        """End the holds of chunks that were forgotten."""
        self._end([slot for slot in self._held if self._index.was_forgotten(slot)])

    def clear(self) -> None:
        """Forget all holds: the cache is being closed, which frees their slots too."""
        self._held.clear()
        self._held_of.clear()
        self._due.clear()
        self._read.clear()

    def _end(self, slots: Sequence[int]) -> None:
        for slot in slots:
            tenant = self._held.pop(slot).tenant
            self._held_of[tenant] -= 1
            if not self._held_of[tenant]:
                del self._held_of[tenant]
        if slots:
            self._host.unlease(slots)
        if not self._held:
            self._due.clear()
