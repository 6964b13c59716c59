"""The lease table: promises, reads and writes by number, holder and deadline.

Bookkeeping only: no lock, no clock and no pool. The caller holds a lock around every call, passes the time, counts the
leases on the slots themselves, and frees the slots of leases that end.

All promises and reads last equally long from when they were granted or renewed, so they expire in that order, and
checking for expired ones is free while there are none. Writes do not expire, nor do lasting reads.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kv_core.keys import ChunkKey
from kv_core.service import Holder


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
    held_s: for how long the chunks are held for another engine, and retained (`kv_tiers.cache.holds`).
    lower: the numbers of the lower tiers that they may go to; None: all.
    """

    number: int
    holder: Holder
    keys: list[ChunkKey]
    slots: list[int]
    chain: list[ChunkKey]
    began_s: float
    held_s: tuple[float, float] = (0.0, 0.0)
    lower: frozenset[int] | None = None


@dataclass(slots=True)
class _Holding:
    """The numbers of all leases of one holder."""

    promise: int | None = None
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)


class Leases:
    """The lease table of one cache. Leases that a method ends are removed and returned; the caller frees the slots."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._reads: OrderedDict[int, ReadEntry] = OrderedDict()  # by deadline
        self._lasting: dict[int, ReadEntry] = {}  # and those without one
        self._writes: dict[int, WriteEntry] = {}
        self._holdings: dict[Holder, _Holding] = {}
        self._last_number = 0

    @property
    def reads_open(self) -> int:
        """Promises and loads."""
        return len(self._reads) + len(self._lasting)

    @property
    def writes_open(self) -> int:
        return len(self._writes)

    def holders(self) -> set[Holder]:
        """Holders that have any lease."""
        return set(self._holdings)

    def promise(self, holder: Holder, slots: list[int], now_s: float) -> ReadEntry | None:
        """Replace the holder's promise with these slots; returns the previous promise. No slots: no promise."""
        holding = self._holdings.get(holder)
        previous = None if holding is None or holding.promise is None else self._reads.pop(holding.promise)
        if slots:
            self._holding(holder).promise = self._open(holder, slots, "promise", now_s).number
        elif holding is not None and previous is not None:
            holding.promise = None
            self._drop_if_empty(holder, holding)
        return previous

    def promise_of(self, holder: Holder) -> ReadEntry | None:
        holding = self._holdings.get(holder)
        return None if holding is None or holding.promise is None else self._reads[holding.promise]

    def renew(self, promise: ReadEntry, now_s: float) -> None:
        """Restart its time."""
        promise.deadline_s = now_s + self.lease_s
        self._reads.move_to_end(promise.number)

    def open_read(self, holder: Holder, slots: list[int], now_s: float, *, lasting: bool = False) -> ReadEntry:
        read = self._open(holder, slots, "load", now_s, lasting=lasting)
        self._holding(holder).reads.add(read.number)
        return read

    def open_write(
        self, holder: Holder, keys: list[ChunkKey], slots: list[int], chain: list[ChunkKey], now_s: float
    ) -> WriteEntry:
        write = WriteEntry(self._next_number(), holder, keys, slots, chain, now_s)
        self._writes[write.number] = write
        self._holding(holder).writes.add(write.number)
        return write

    def is_writing(self, write: WriteEntry) -> bool:
        """It is still open."""
        return write.number in self._writes

    def close_read(self, number: int) -> ReadEntry | None:
        """None: it is not open (any more)."""
        read = self._reads.pop(number, None) or self._lasting.pop(number, None)
        if read is not None:
            holding = self._holdings[read.holder]
            if holding.promise == number:
                holding.promise = None
            holding.reads.discard(number)
            self._drop_if_empty(read.holder, holding)
        return read

    def close_write(self, number: int) -> WriteEntry | None:
        """None: it is not open (any more)."""
        write = self._writes.pop(number, None)
        if write is not None:
            holding = self._holdings[write.holder]
            holding.writes.discard(number)
            self._drop_if_empty(write.holder, holding)
        return write

    def end(self, holder: Holder) -> tuple[list[ReadEntry], list[WriteEntry]]:
        """End and return all leases of the holder."""
        holding = self._holdings.pop(holder, None)
        if holding is None:
            return [], []
        promised = () if holding.promise is None else (holding.promise,)
        numbers = (*promised, *sorted(holding.reads))
        reads = [(self._lasting if number in self._lasting else self._reads).pop(number) for number in numbers]
        return reads, [self._writes.pop(number) for number in sorted(holding.writes)]

    def expire(self, now_s: float) -> Sequence[ReadEntry]:
        """Remove and return the leases that have expired, the oldest first."""
        expired: list[ReadEntry] = []
        while self._reads:
            oldest = next(iter(self._reads.values()))
            if oldest.deadline_s > now_s:
                break
            self.close_read(oldest.number)
            expired.append(oldest)
        return expired

    def entries(self) -> tuple[list[ReadEntry], list[WriteEntry], int]:
        """All that are open, reads in the order of their ends, and the last number."""
        return [*self._reads.values(), *self._lasting.values()], list(self._writes.values()), self._last_number

    def restore(self, reads: Sequence[ReadEntry], writes: Sequence[WriteEntry], last_number: int) -> None:
        """In a new table: the `entries` of another one."""
        self._last_number = last_number
        for read in reads:
            (self._lasting if read.deadline_s == math.inf else self._reads)[read.number] = read
            holding = self._holding(read.holder)
            if read.kind == "promise":
                holding.promise = read.number
            else:
                holding.reads.add(read.number)
        for write in writes:
            self._writes[write.number] = write
            self._holding(write.holder).writes.add(write.number)

    def clear(self) -> list[WriteEntry]:
        """End everything; returns the writes."""
        writes = list(self._writes.values())
        self._reads.clear()
        self._lasting.clear()
        self._writes.clear()
        self._holdings.clear()
        return writes

    def _open(
        self, holder: Holder, slots: list[int], kind: Literal["promise", "load"], now_s: float, *, lasting: bool = False
    ) -> ReadEntry:
        read = ReadEntry(self._next_number(), holder, slots, kind, now_s, math.inf if lasting else now_s + self.lease_s)
        (self._lasting if lasting else self._reads)[read.number] = read
        return read

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _holding(self, holder: Holder) -> _Holding:
        holding = self._holdings.get(holder)
        if holding is None:
            holding = self._holdings[holder] = _Holding()
        return holding

    def _drop_if_empty(self, holder: Holder, holding: _Holding) -> None:
        if holding.promise is None and not holding.reads and not holding.writes:
            del self._holdings[holder]
