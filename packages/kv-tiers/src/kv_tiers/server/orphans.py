"""What clients were writing when their connections closed, kept until nobody can be writing there any more.

A process that is gone cannot write, so a killed client's slots are free as soon as the kernel says that it is: its
pidfd becomes readable once its memory and its devices are let go of. A connection that closed under a living process
proves nothing, as its owner may be in the middle of a copy. Those slots wait until it comes back and says what it still
has, or ends. Where the kernel has no pidfd for it, they wait for as long as a lease lives.
"""

import os
import select
import selectors
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kv_core.clock import Clock
from kv_core.service import LeaseId, WriteLease

from kv_tiers.local import LocalCache
from kv_tiers.server.session import OpenWrite

_LOOK_S: Final = 1.0
"""How often the clock is looked at for those without a pidfd."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """One session's write leases. pid: 0 if the kernel tells us nothing of it, and they end at `deadline_s`."""

    cache: LocalCache
    writes: dict[int, OpenWrite]
    pid: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Process:
    """One that lives, however many of its sessions have ended: each open descriptor is one less for a client."""

    pidfd: int
    tokens: set[bytes]


class Orphans:
    """By the tokens of their sessions. Used by the server's thread only; its selector calls what is registered.

    Each has slots of a pool, so there are never more of them than slots.
    """

    def __init__(self, selector: selectors.BaseSelector, clock: Clock, keep_s: float) -> None:
        """keep_s: how long those are kept of whose process the kernel tells us nothing."""
        self._selector = selector
        self._clock = clock
        self._keep_s = keep_s
        self._orphans: dict[bytes, Orphan] = {}
        self._processes: dict[int, _Process] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, token: bytes, cache: LocalCache, writes: dict[int, OpenWrite], pid: int, pidfd: int) -> None:
        """A session has ended. Takes its process's pidfd over."""
        writing = {} if is_gone(pidfd) else {lease: write for lease, write in writes.items() if write.slots}
        give_up(cache, {lease: write for lease, write in writes.items() if lease not in writing})
        if not writing:
            close_pidfd(pidfd)
            return
        is_watched = pidfd >= 0
        self._orphans[token] = Orphan(cache, writing, pid if is_watched else 0, self._clock.now_s() + self._keep_s)
        if is_watched:
            self._watch(pid, pidfd).tokens.add(token)

    def take(self, token: bytes) -> Orphan | None:
        """Its owner is back. What it does not want any more is for the caller to give up."""
        orphan = self._orphans.pop(token, None)
        process = None if orphan is None else self._processes.get(orphan.pid)
        if orphan is not None and process is not None:
            process.tokens.discard(token)
            if not process.tokens:
                del self._processes[orphan.pid]
                self._selector.unregister(process.pidfd)
                os.close(process.pidfd)
        return orphan

    def holds(self, cache: LocalCache, lease: int) -> bool:
        return any(orphan.cache is cache and lease in orphan.writes for orphan in self._orphans.values())

    def patience_s(self) -> float | None:
        """How soon `expire` should be called. None: the selector will tell."""
        return _LOOK_S if any(not orphan.pid for orphan in self._orphans.values()) else None

    def expire(self) -> None:
        """End those of which the kernel tells us nothing, when their time is over."""
        now_s = self._clock.now_s()
        for token in [key for key, orphan in self._orphans.items() if not orphan.pid and orphan.deadline_s <= now_s]:
            self._end(token)

    def close(self) -> None:
        for token in list(self._orphans):
            self.take(token)

    def _watch(self, pid: int, pidfd: int) -> _Process:
        known = self._processes.get(pid)
        if known is not None and is_gone(known.pidfd):  # its number is another process's now
            self._end_process(pid)
            known = None
        if known is not None:
            os.close(pidfd)
            return known
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._end_process(pid))
        process = self._processes[pid] = _Process(pidfd, set())
        return process

    def _end_process(self, pid: int) -> None:
        process = self._processes.get(pid)
        if process is not None and is_gone(process.pidfd):
            for token in list(process.tokens):
                self._end(token)

    def _end(self, token: bytes) -> None:
        orphan = self.take(token)
        if orphan is not None:
            give_up(orphan.cache, orphan.writes)


def give_up(cache: LocalCache, writes: Mapping[int, OpenWrite]) -> None:
    """Abort what is reserved under these leases: nobody writes there."""
    for lease in writes:
        cache.release(WriteLease(LeaseId(lease), (), (), ""))


def open_pidfd(pid: int) -> int:
    """-1 where there is none to be had: an old kernel, or a process of another container, whose number is 0 here."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def close_pidfd(pidfd: int) -> None:
    if pidfd >= 0:
        os.close(pidfd)


def is_gone(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
