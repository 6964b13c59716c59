"""Orphans: lasting leases of clients whose connection closed, retained until no process can still be copying.

(A slot that is `ORPHANED`, in `kv_tiers.index.life`, is something else.) They are write leases, and read leases whose
reader cannot discard what it has read. A connection that closes proves nothing, because the process may be in the
middle of a copy, be stopped there for an hour, and go on. Its slots wait until the client reconnects and lists the
leases that it still has (our client does so automatically), or until the kernel says that no process has the pool open
or mapped for this client any more (`HostPool.is_lent`). That covers processes of other PID namespaces and forked
children. No timeout releases anything by itself.

A process that ends gives up its memory before its devices, which may still be writing. So its slots also wait for its
end, which its pidfd shows. If the process lives on without the pool, or has no pidfd, the slots wait for `SETTLE_S`
more.

The log names a client that keeps its slots for long.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kv_core.clock import Clock
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache

from kv_server.pidfds import close_descriptor, is_gone
from kv_server.session import LastingLease, release

_log = limited_logger(__name__)

SETTLE_S: Final = 10.0
"""From when nobody maps the pool, if the process has not ended or its end is not known: for its devices to be reset."""
_FIRST_LOOK_S: Final = 0.02
_MAX_LOOK_S: Final = 1.0


@dataclass(slots=True)
class Orphan:
    """What one session was copying.

    cache: the cache of the leases.
    leases: by their numbers.
    pid: of the process; 0 if it is not visible here. pidfd: of the same process, or -1.
    lost_s: since when it is one.
    unmapped_s: since when no process has the pool open or mapped for it; None: some process may.
    look_s: when to look next, by the monotonic clock. wait_s: from then to the time after.
    is_named: it is in the log.
    """

    cache: LocalCache
    leases: dict[int, LastingLease]
    pid: int
    pidfd: int
    lost_s: float
    unmapped_s: float | None = None
    look_s: float = 0.0
    wait_s: float = _FIRST_LOOK_S
    is_named: bool = False


class Orphans:
    """All orphans, by the tokens of their sessions. For the server's thread.

    Each has slots of a pool, so there are never more of them than slots.
    """

    def __init__(self, clock: Clock, name_after_s: float) -> None:
        """name_after_s: how long one is retained before the log says so."""
        self._clock = clock
        self._name_after_s = name_after_s
        self._orphans: dict[bytes, Orphan] = {}

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, token: bytes, cache: LocalCache, leases: dict[int, LastingLease], pid: int, pidfd: int) -> None:
        """A session has ended. Takes over its process's pidfd."""
        copying = {number: lease for number, lease in leases.items() if lease.slots}
        give_up(cache, {number: lease for number, lease in leases.items() if number not in copying})
        if not copying:
            close_descriptor(pidfd)
            return
        for known in self._orphans.values():  # of a process that comes and goes one descriptor is enough
            if pid and known.pid == pid and known.pidfd != pidfd >= 0 and not is_gone(known.pidfd):
                os.close(pidfd)
                pidfd = known.pidfd
                break
        orphan = self._orphans[token] = Orphan(cache, copying, pid, pidfd, self._clock.now_s())
        self._look(token, orphan)

    def all(self) -> dict[bytes, Orphan]:
        return dict(self._orphans)

    def restore(self, token: bytes, orphan: Orphan) -> None:
        """One of another process. Takes over the pidfd."""
        self._orphans[token] = orphan

    def take(self, token: bytes) -> Orphan | None:
        """Remove an orphan because its owner is back. The caller gives up the leases that the owner no longer wants."""
        orphan = self._orphans.pop(token, None)
        if orphan is not None and all(other.pidfd != orphan.pidfd for other in self._orphans.values()):
            close_descriptor(orphan.pidfd)
        return orphan

    def holds(self, cache: LocalCache, lease: int) -> bool:
        return any(orphan.cache is cache and lease in orphan.leases for orphan in self._orphans.values())

    def are_of(self, cache: LocalCache) -> bool:
        """Whether any orphan was copying there."""
        return any(orphan.cache is cache for orphan in self._orphans.values())

    def patience_s(self) -> float | None:
        """How soon `expire` should be called. None: there are no orphans."""
        soonest = min((orphan.look_s for orphan in self._orphans.values()), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def expire(self) -> None:
        """End those of whom nobody can be copying any more."""
        at_s = time.monotonic()
        for token, orphan in list(self._orphans.items()):
            if orphan.look_s <= at_s:
                self._look(token, orphan)

    def close(self) -> None:
        for token in list(self._orphans):
            self.take(token)

    def _look(self, token: bytes, orphan: Orphan) -> None:
        now_s = self._clock.now_s()
        has_ended = is_gone(orphan.pidfd)
        is_mapped = orphan.cache.pool.is_lent(token)
        if is_mapped is not False:
            orphan.unmapped_s = None
        elif orphan.unmapped_s is None:
            orphan.unmapped_s = now_s
        has_settled = orphan.unmapped_s is not None and now_s - orphan.unmapped_s >= SETTLE_S
        if not is_mapped and (has_ended or has_settled):
            self.take(token)
            give_up(orphan.cache, orphan.leases)
            return
        orphan.look_s = time.monotonic() + orphan.wait_s
        orphan.wait_s = min(2 * orphan.wait_s, _MAX_LOOK_S)
        if not orphan.is_named and now_s - orphan.lost_s > self._name_after_s:
            orphan.is_named = True
            who = f"process {orphan.pid}" if orphan.pid else "a process of another PID namespace"
            _log.warning(
                "%s lost its connection %.0f s ago while it was copying %d chunks, and has not reconnected: their room "
                "(with that of others like it %d of the %d slots of pool %s) stays reserved until it does, or until it "
                "and the children that it has forked have ended, because they may still be copying",
                who,
                now_s - orphan.lost_s,
                _slots(orphan),
                sum(_slots(other) for other in self._orphans.values() if other.cache is orphan.cache),
                orphan.cache.pool.slots,
                orphan.cache.pool.name,
            )


def give_up(cache: LocalCache, leases: Mapping[int, LastingLease]) -> None:
    """Release all of these, because nothing is being copied there any more."""
    for number, lease in leases.items():
        release(cache, number, lease)


def _slots(orphan: Orphan) -> int:
    return sum(lease.slots for lease in orphan.leases.values())
