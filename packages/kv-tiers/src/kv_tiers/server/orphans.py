"""Lasting leases of clients whose connection closed, retained until no process can be copying there any more.

They are write leases, and read leases whose reader cannot discard what it has read. A process that has ended copies
nothing, so a killed client's slots are free as soon as its pidfd becomes readable, after its memory and devices have
been released. A connection that closes while the process lives proves nothing, because the process may be in the middle
of a copy. Its slots wait until the client reconnects and lists the leases that it still has (our client does so
automatically), until it no longer maps the pool, or until it ends. Without a pidfd they wait for the lifetime of a
lease. A client that does none of this is named in the log.
"""

import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kv_core.clock import Clock
from kv_core.log import limited_logger

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.session import LastingLease, release
from kv_tiers.threads import start_thread

_log = limited_logger(__name__)

_LOOK_S: Final = 1.0
"""How often the deadlines of those without a pidfd are checked, and the time until the first check of the others'
mappings."""
_MAX_LOOK_S: Final = 60.0
"""The time between checks of mappings doubles up to this, because a large process has thousands of them."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """What one session was copying.

    cache: the cache of the leases.
    leases: by their numbers.
    pid: of the process; 0 if the kernel gives no descriptor by which its end is known.
    deadline_s: when they end in that case.
    """

    cache: LocalCache
    leases: dict[int, LastingLease]
    pid: int
    deadline_s: float


@dataclass(slots=True)
class _Process:
    """A live process, one for all of its ended sessions, because each open descriptor is one less for clients.

    pidfd: readable when it has ended.
    tokens: of its sessions that ended.
    lost_s: since when it has any, by the monotonic clock.
    look_s: when to check its mappings next.
    wait_s: from that check to the one after.
    is_looked_at: its mappings are being checked.
    is_named: it is in the log.
    """

    pidfd: int
    tokens: set[bytes]
    lost_s: float = field(default_factory=time.monotonic)
    look_s: float = field(default_factory=lambda: time.monotonic() + _LOOK_S)
    wait_s: float = _LOOK_S
    is_looked_at: bool = False
    is_named: bool = False


class Orphans:
    """All orphans, by the tokens of their sessions. Used only by the server's thread, whose selector calls what is
    registered.

    Each has slots of a pool, so there are never more of them than slots.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        clock: Clock,
        keep_s: float,
        *,
        on_server: Callable[[Callable[[], None]], object],
    ) -> None:
        """keep_s: how long those are retained whose process the kernel reports nothing about.

        on_server: called on another thread, to run something on the server's.
        """
        self._on_server = on_server
        self._selector = selector
        self._clock = clock
        self._keep_s = keep_s
        self._orphans: dict[bytes, Orphan] = {}
        self._processes: dict[int, _Process] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, token: bytes, cache: LocalCache, leases: dict[int, LastingLease], pid: int, pidfd: int) -> None:
        """A session has ended. Takes over its process's pidfd."""
        copying = {} if is_gone(pidfd) else {number: lease for number, lease in leases.items() if lease.slots}
        give_up(cache, {number: lease for number, lease in leases.items() if number not in copying})
        if not copying:
            close_pidfd(pidfd)
            return
        is_watched = pidfd >= 0
        self._orphans[token] = Orphan(cache, copying, pid if is_watched else 0, self._clock.now_s() + self._keep_s)
        if is_watched:
            self._watch(pid, pidfd).tokens.add(token)

    def take(self, token: bytes) -> Orphan | None:
        """Remove an orphan because its owner is back. The caller gives up the leases that the owner no longer wants."""
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
        return any(orphan.cache is cache and lease in orphan.leases for orphan in self._orphans.values())

    def are_of(self, cache: LocalCache) -> bool:
        """Whether any orphan was copying there."""
        return any(orphan.cache is cache for orphan in self._orphans.values())

    def patience_s(self) -> float | None:
        """How soon `expire` should be called. None: the selector will report it."""
        soonest = [
            process.look_s - time.monotonic() for process in self._processes.values() if not process.is_looked_at
        ]
        if any(not orphan.pid for orphan in self._orphans.values()):
            soonest.append(_LOOK_S)
        return max(0.0, min(soonest)) if soonest else None

    def expire(self) -> None:
        """End those without a pidfd whose deadline has passed, and have the mappings of the others checked."""
        if not self._orphans:
            return
        at_s = time.monotonic()
        for pid, process in self._processes.items():
            if not process.is_looked_at and process.look_s <= at_s:
                process.is_looked_at = True
                pools = {token: self._orphans[token].cache.pool.descriptor for token in process.tokens}
                # Not on this thread: the kernel may block us while a process is changing its mappings.
                looking = threading.Thread(
                    target=self._look, args=(pid, process.pidfd, pools), name="kv-mappings", daemon=True
                )
                if why := start_thread(looking):
                    _log.warning("the mappings of process %d are not checked for now: %s", pid, why)
                    self._looked(pid, process.pidfd, ())
        now_s = self._clock.now_s()
        for token in [key for key, orphan in self._orphans.items() if not orphan.pid and orphan.deadline_s <= now_s]:
            self._end(token)

    def close(self) -> None:
        for token in list(self._orphans):
            self.take(token)

    def _watch(self, pid: int, pidfd: int) -> _Process:
        known = self._processes.get(pid)
        if known is not None and is_gone(known.pidfd):  # its pid is another process's now
            self._end_process(pid)
            known = None
        if known is not None:
            os.close(pidfd)
            return known
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._end_process(pid))
        process = self._processes[pid] = _Process(pidfd, set())
        return process

    def _look(self, pid: int, pidfd: int, pools: Mapping[bytes, int]) -> None:
        """Runs on its own thread. A descriptor that was closed meanwhile yields nothing, or concerns another file."""
        unmapped = [token for token, descriptor in pools.items() if _is_unmapped(pid, descriptor)]
        self._on_server(lambda: self._looked(pid, pidfd, unmapped))

    def _looked(self, pid: int, pidfd: int, unmapped: Sequence[bytes]) -> None:
        process = self._processes.get(pid)
        if process is None or process.pidfd != pidfd:
            return
        if not is_gone(pidfd):  # else the pid may have been another's; its end is handled elsewhere
            for token in unmapped:
                self._end(token)
        process.is_looked_at = False
        process.wait_s = min(2 * process.wait_s, _MAX_LOOK_S)
        process.look_s = time.monotonic() + process.wait_s
        if process.tokens and not process.is_named and time.monotonic() - process.lost_s > self._keep_s:
            process.is_named = True
            slots = sum(lease.slots for token in process.tokens for lease in self._orphans[token].leases.values())
            _log.warning(
                "process %d lost its connection %.0f s ago while it was copying %d chunks, and has not reconnected: "
                "their room stays reserved until it does or exits, because it may still be copying",
                pid, time.monotonic() - process.lost_s, slots,
            )  # fmt: skip

    def _end_process(self, pid: int) -> None:
        process = self._processes.get(pid)
        if process is not None and is_gone(process.pidfd):
            for token in list(process.tokens):
                self._end(token)

    def _end(self, token: bytes) -> None:
        orphan = self.take(token)
        if orphan is not None:
            give_up(orphan.cache, orphan.leases)


def give_up(cache: LocalCache, leases: Mapping[int, LastingLease]) -> None:
    """Release all of these, because nothing is being copied there any more."""
    for number, lease in leases.items():
        release(cache, number, lease)


def open_pidfd(pid: int) -> int:
    """-1 if none is available: an old kernel, or a process of another container, whose pid is 0 here."""
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


def _is_unmapped(pid: int, descriptor: int) -> bool:
    """Whether process `pid`, according to the kernel, does not map the file behind our `descriptor`, so that it cannot
    write there. False, too, if the kernel does not say."""
    try:
        found = os.fstat(descriptor)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
        with Path(f"/proc/{pid}/maps").open("rb") as maps:
            for line in maps:  # range, permissions, offset, device, inode, path
                fields = line.split(None, 5)
                if int(fields[4]) == found.st_ino and fields[3].decode() == device:
                    return False
            return maps.tell() > 0  # the list is empty for another user's process, and for one that is ending
    except (OSError, ValueError, IndexError):
        return False
