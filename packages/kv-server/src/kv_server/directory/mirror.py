"""What the other hosts hold, in memory: updated by their entries, compared with each entry's root, repaired after a
loss.

A host's entries have consecutive numbers. A missing number, or a root that differs from ours, makes the host
*doubtful*: its names stay in use, it is queried for the sums of its shards, and only shards whose sums differ are
fetched from it. Meanwhile its entries wait. They are then applied to what was fetched, which may be newer: the last
change of a name decides whether it is held, so applying a change again does no harm.

A host that has written nothing for `lease_s` is dropped with all its names; so is one whose address now belongs to
another. This file does no I/O and has no clock.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from threading import Lock
from typing import Final

import numpy as np
from kv_remote.host_port import HostPort

from kv_server.directory.entries import Entry, Names, no_sums, root_of, shards_of, toggle
from kv_server.directory.holders import MAX_HOSTS, HolderTable
from kv_server.report import MirrorCounts

MAX_WAITING: Final = 256
"""Entries of one host that wait for its repair. If there are more it is repaired again."""
MAX_OF_HOST: Final = 16
"""Addresses of one host. Its certificate signs for any port, and so for as many as would keep the others out."""
MIN_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 60.0


class Trust(Enum):
    """How well a host's names are known."""

    DOUBTFUL = auto()
    REPAIRING = auto()
    EXACT = auto()


class Sign(Enum):
    """The events that change a host's `Trust`."""

    DIFFERS = auto()
    REPAIR = auto()
    REPAIRED = auto()
    FAILED = auto()


_NEXT: Final = {
    (Trust.EXACT, Sign.DIFFERS): Trust.DOUBTFUL,
    (Trust.DOUBTFUL, Sign.DIFFERS): Trust.DOUBTFUL,
    (Trust.DOUBTFUL, Sign.REPAIR): Trust.REPAIRING,
    (Trust.REPAIRING, Sign.REPAIRED): Trust.EXACT,
    (Trust.REPAIRING, Sign.FAILED): Trust.DOUBTFUL,
}


@dataclass(slots=True, eq=False)
class Host:
    """One host's part.

    number: in the table.
    sequence: of the last entry that was applied.
    covered: a repair has brought everything up to this number.
    exact_from: from this number on our root must equal the host's. Before, some shards may be newer than others.
    cleared_s: when it was cleared, by our clock, as far as is known.
    is_believed: it has answered, and was not last cleared before we were (`Mirror.cleared`). Others are not used.
    """

    id: bytes
    address: HostPort
    number: int
    last_seen_s: float
    trust: Trust = Trust.DOUBTFUL
    sequence: int = 0
    covered: int = 0
    exact_from: int = 0
    count: int = 0
    sums: Names = field(default_factory=no_sums)
    waiting: list[Entry] = field(default_factory=list)
    cleared_s: float | None = None
    is_believed: bool = False
    is_left_out: bool = False


@dataclass(slots=True)
class _Backoff:
    seconds: float = 0.0
    until_s: float = 0.0


class Mirror:
    """Safe to call from any thread. `holders`, `counts` and `nbytes` take no lock: a lookup or a report must not wait
    until a table of millions has been rebuilt."""

    def __init__(self, *, lease_s: float, max_names: int, max_hosts: int) -> None:
        """lease_s: how long a host is known after its last entry.
        max_names: (name, host) pairs. A host for whose names there is no room is left out.
        max_hosts: further ones are ignored, and more than `MAX_OF_HOST` of one host.
        """
        self._lease_s = lease_s
        self._max_names = max_names
        self._max_hosts = min(max_hosts, MAX_HOSTS)
        self._lock = Lock()
        self._table = HolderTable()
        self._hosts: dict[bytes, Host] = {}
        self._by_address: dict[HostPort, Host] = {}
        self._of_host: Counter[bytes] = Counter()
        self._by_number: list[Host | None] = [None] * (MAX_HOSTS + 1)
        self._numbers = 0
        self._free_numbers: list[int] = []
        # By address, so that a host is not queried more often because it changes its id with each entry.
        self._backoff: dict[HostPort, _Backoff] = {}
        self.own_id: bytes | None = None
        """Of the host whose entries are ours, and ignored."""
        self._cleared_s: float | None = None
        self._counts = MirrorCounts()

    @property
    def nbytes(self) -> int:
        """Memory for the names and the sums."""
        return self._table.nbytes + sum(host.sums.nbytes for host in list(self._hosts.values()))

    def counts(self) -> MirrorCounts:
        """The present counts, which may change meanwhile."""
        hosts = list(self._hosts.values())
        return replace(
            self._counts,
            hosts=len(hosts),
            exact=sum(host.trust is Trust.EXACT for host in hosts),
            left_out=sum(host.is_left_out for host in hosts),
            names=self._table.entries,
        )

    def addresses(self) -> list[HostPort]:
        with self._lock:
            return list(self._by_address)

    def holders(self, names: Names, most: int) -> list[list[Host]]:
        """Hosts that hold each name and are believed, of the first `most` that are known."""
        numbers = self._table.holders(names, most)
        answers: list[list[Host]] = [[] for _ in range(len(names))]
        for row, column in zip(*np.nonzero(numbers), strict=True):
            host = self._by_number[numbers[row, column]]
            if host is not None and host.is_believed:
                answers[row].append(host)
        return answers

    def names_of(self, host: bytes) -> Names:
        """What this host holds, as far as is known."""
        with self._lock:
            known = self._hosts.get(host)
            return np.zeros(0, np.uint64) if known is None else self._table.names_of(known.number)

    def take(self, entry: Entry, now_s: float) -> None:
        """Apply an entry that was read. Entries may come in any order, and repeatedly."""
        if entry.host == self.own_id:
            return
        with self._lock:
            host = self._hosts.get(entry.host)
            if host is not None and host.address != entry.host_port():
                return  # a host that is signed for another address cannot speak for this one
            if entry.leaves:
                if host is not None:
                    self._drop(host)
                return
            if host is None and (host := self._new(entry, now_s)) is None:
                return
            host.last_seen_s = now_s
            if host.trust is not Trust.REPAIRING:
                self._apply(host, entry)
            elif len(host.waiting) < MAX_WAITING:
                host.waiting.append(entry)

    def expire(self, now_s: float) -> None:
        """Drop hosts whose lease has expired."""
        with self._lock:
            for host in [host for host in self._hosts.values() if now_s - host.last_seen_s > self._lease_s]:
                self._drop(host)

    def resumed(self, now_s: float) -> None:
        """Restart all leases: nothing could be read for a while, so a host's silence means nothing."""
        with self._lock:
            for host in self._hosts.values():
                host.last_seen_s = now_s

    def cleared(self, cleared_s: float | None) -> None:
        """Our cache was cleared: only hosts that were cleared later are believed. All are queried for the time of their
        last clear. None: all hosts have been cleared, so all are believed again."""
        with self._lock:
            self._cleared_s = cleared_s
            self._backoff.clear()
            for host in self._hosts.values():
                self._believe(host)

    # Repairs. Between `begin_repairs` and its end the host's entries wait.

    def begin_repairs(
        self, most: int, now_s: float, can_query: Callable[[HostPort], bool] = lambda _: True
    ) -> list[Host]:
        """Hosts to query now. can_query: whether the host at this address can be."""
        with self._lock:
            begun: list[Host] = []
            for host in self._hosts.values():
                if len(begun) == most:
                    break
                if host.trust is not Trust.DOUBTFUL or host.is_left_out:
                    continue
                backoff = self._backoff.get(host.address)
                if (backoff is None or now_s >= backoff.until_s) and can_query(host.address):
                    _advance(host, Sign.REPAIR)
                    begun.append(host)
            return begun

    def differing(self, host: Host, sequence: int, sums: Names) -> list[int]:
        """The shards that must be fetched from this host: those whose sums differ, as of its change of this number."""
        with self._lock:
            host.covered = sequence
            # A higher number was not the host's own, and would make its next entries look like repetitions.
            host.sequence = min(host.sequence, sequence)
            host.exact_from = max(host.exact_from, sequence)
            return [int(shard) for shard in np.flatnonzero(host.sums != sums)]

    def replace(self, host: Host, sequence: int, shards: Sequence[int], names: Names) -> None:
        """Take what the host holds in these shards, as of this number."""
        with self._lock:
            if self._hosts.get(host.id) is not host or host.is_left_out:
                return
            names = np.unique(names[np.isin(shards_of(names), shards)])
            known = names[:0]
            if host.count:  # else there is no need to scan the whole table
                known = self._table.names_of(host.number)
                known = known[np.isin(shards_of(known), shards)]
            added = np.setdiff1d(names, known, assume_unique=True)
            self._change(host, added, np.setdiff1d(known, names, assume_unique=True))
            host.exact_from = max(host.exact_from, sequence)
            self._counts.shards_fetched += len(shards)

    def end_repair(self, host: Host, now_s: float, *, cleared_s: float | None, nbytes: int) -> None:
        """Everything has been fetched. cleared_s: when the host was cleared, by our clock; None: never."""
        with self._lock:
            if self._hosts.get(host.id) is not host:
                return
            _advance(host, Sign.REPAIRED)
            self._counts.repairs += 1
            self._counts.repair_bytes += nbytes
            # Only the next entry whose root equals ours confirms success, so until then another repair has to wait.
            self._back_off(host, now_s)
            host.cleared_s = cleared_s
            self._believe(host)
            waiting, host.waiting = host.waiting, []
            if len(waiting) == MAX_WAITING and host.trust is Trust.EXACT:
                _advance(host, Sign.DIFFERS)
            for entry in waiting:
                self._apply(host, entry)

    def fail_repair(self, host: Host, now_s: float) -> None:
        """The host did not answer, or its answer made no sense."""
        with self._lock:
            if self._hosts.get(host.id) is not host:
                return
            _advance(host, Sign.FAILED)
            self._counts.failed_repairs += 1
            self._back_off(host, now_s)
            waiting, host.waiting = host.waiting, []
            for entry in waiting:
                self._apply(host, entry)

    def drop(self, host: Host) -> None:
        with self._lock:
            if self._hosts.get(host.id) is host:
                self._drop(host)

    # Under the lock.

    def _new(self, entry: Entry, now_s: float) -> Host | None:
        address = entry.host_port()
        if (previous := self._by_address.get(address)) is not None:
            self._drop(previous)  # it was restarted
        if len(self._hosts) >= self._max_hosts or self._of_host[address.identity] >= MAX_OF_HOST:
            return None
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            self._numbers += 1
            number = self._numbers
        host = Host(entry.host, address, number, now_s)
        self._hosts[entry.host] = self._by_address[address] = self._by_number[number] = host
        self._of_host[address.identity] += 1
        return host

    def _drop(self, host: Host) -> None:
        self._by_number[host.number] = None
        del self._hosts[host.id], self._by_address[host.address]
        self._of_host -= Counter([host.address.identity])
        self._table.drop(host.number)
        self._free_numbers.append(host.number)

    def _apply(self, host: Host, entry: Entry) -> None:
        if host.is_left_out:
            self._readmit(host, entry)
            return
        known = max(host.sequence, host.covered)
        if entry.added or entry.removed:
            if entry.sequence <= known:
                return  # a repetition, too late, or fetched already
            is_gap = entry.sequence > known + 1
            added, removed = entry.names()
            self._change(host, np.unique(added), np.unique(removed))
            host.sequence = entry.sequence
        else:
            if entry.sequence < known:
                return
            is_gap = entry.sequence > known
        self._counts.entries += 1
        if is_gap:
            self._counts.gaps += 1
        elif entry.sequence < host.exact_from:
            return  # what was fetched is newer
        if is_gap or host.count != entry.count or root_of(host.sums) != entry.root:
            if host.trust is Trust.EXACT:
                _advance(host, Sign.DIFFERS)
        elif host.trust is Trust.EXACT and host.is_believed:
            self._backoff.pop(host.address, None)

    def _change(self, host: Host, added: Names, removed: Names) -> None:
        if self._table.entries + len(added) > self._max_names:
            host.is_left_out = True
            self._table.drop(host.number)
            host.sums, host.count = no_sums(), 0
            return
        added = added[self._table.add(added, host.number)]
        removed = removed[self._table.remove(removed, host.number)]
        toggle(host.sums, added)
        toggle(host.sums, removed)
        host.count += len(added) - len(removed)

    def _readmit(self, host: Host, entry: Entry) -> None:
        """Readmit the host if there is room again, and some to spare, so that its next entry does not exclude it."""
        if self._table.entries + entry.count <= 0.9 * self._max_names:
            host.is_left_out = False
            if host.trust is Trust.EXACT:
                _advance(host, Sign.DIFFERS)

    def _believe(self, host: Host) -> None:
        """Determine whether the host is believed; if not, have it queried again."""
        own_cleared_s, host_cleared_s = self._cleared_s, host.cleared_s
        host.is_believed = own_cleared_s is None or (host_cleared_s is not None and host_cleared_s > own_cleared_s)
        if not host.is_believed and host.trust is Trust.EXACT:
            _advance(host, Sign.DIFFERS)

    def _back_off(self, host: Host, now_s: float) -> None:
        if len(self._backoff) > 2 * self._max_hosts:
            self._backoff.clear()
        backoff = self._backoff.setdefault(host.address, _Backoff())
        backoff.seconds = min(MAX_BACKOFF_S, 2 * backoff.seconds or MIN_BACKOFF_S)
        backoff.until_s = now_s + backoff.seconds


def _advance(host: Host, sign: Sign) -> None:
    host.trust = _NEXT[host.trust, sign]
