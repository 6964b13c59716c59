"""What one client holds, so that all of it can be released when the client goes, however it goes.

The cache's lease table has the leases of all sessions. A holder's name there begins with its session's, so no client
can touch another's. When the connection closes, promises and read leases end at once; a client that is still reading
learns from `release` that its bytes may have moved. Chunks being written are different, and so are those whose reader
cannot discard what it has read. A client that lost its connection may be in the middle of a copy, so these leases last
until it reports otherwise or no process maps the pool for it: see `Orphans`.

Everything is bounded. Beyond the bound, lookups are refused, stores get no room and loads fail, which costs a miss.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from kv_core.clock import Clock
from kv_core.errors import InputError, MisuseError
from kv_core.log import limited_logger
from kv_core.service import Ended, Holder, LeaseId, LoadFailed, ReadLease, WriteLease
from kv_core.transfer import HostExtent
from kv_remote.messages import MAX_NAME, by_length
from kv_tiers.cache.leases import ReadEntry, WriteEntry, owner_of
from kv_tiers.cache.local import LocalCache

from kv_server import wire
from kv_server.connection import close_descriptor, is_gone
from kv_server.engine_loads import OnLookup

_log = limited_logger(__name__)

MAX_KEYS_HELD: Final = 1 << 22
"""Keys in all of a session's promises, loads, read leases and stores together: about 400 MB of the server's memory."""
MAX_LASTING: Final = 1 << 13
MAX_TIMED: Final = 1 << 16
MAX_TIERS: Final = 64
"""Names of tiers that a request is restricted to."""
MAX_HOLD_S: Final = 3600
_MAX_SECONDS: Final = 1e9
_UNWATCHED: Final = (
    "the kernel of the server can report neither when this client's process ends nor when it lets go of the pool, so "
    "room that is reserved for a copy could never be given to another; mount /proc in the server's container, or let "
    "both share a PID namespace"
)


class Session:
    """The session of one registered client. Used by the server's thread only."""

    def __init__(
        self, name: str, cache: LocalCache, *, is_watched: bool, on_lookup: OnLookup, ends_holds: bool
    ) -> None:
        """name: what the names of its holders begin with in the cache. It stays the client's when it comes back.
        is_watched: it will be known when no process can be copying for this client any more.
        on_lookup: called after each lookup.
        ends_holds: whether a chunk that it has read need not be held any more."""
        self.name, self.lasting_owner = name, lasting_owner(name)
        self.cache = cache
        self._leases = cache.parts.leases
        self._is_watched = is_watched
        self._on_lookup = on_lookup
        self._ends_holds = ends_holds

    def lasting(self) -> list[int]:
        """The numbers of its lasting leases."""
        with self.cache.parts.host.lock:
            return [lease.number for lease in self._leases.of(self.lasting_owner)]

    def answer(self, verb: wire.Verb) -> wire.Answer | None:
        """None: this verb has no answer.

        Raises:
            InputError: the keys, or what the engine measured, are invalid.
            MisuseError: the call breaks the service's contract.
        """
        match verb:
            case wire.Lookup():
                return self._lookup(verb)
            case wire.Renew(holder):
                return wire.Truth(self.cache.renew(self._timed(holder)))
            case wire.Load():
                return self._load(verb)
            case wire.BeginStore():
                return self._begin_store(verb)
            case wire.Commit(number):
                if self._own(number) is None:  # the number may be the next one that the cache gives to another
                    raise MisuseError(f"write lease {number} is not open")
                self.cache.commit(WriteLease(LeaseId(number), (), (), ""))
            case wire.Release(number):
                lease = self._own(number)
                return wire.Truth(lease is not None and release(self.cache, lease, ends_holds=self._ends_holds))
            case wire.Forget(keys):
                self.cache.forget(keys.unpack())
            case wire.End(holder):
                self.cache.end(self._timed(holder))
                self.cache.end(f"{self.lasting_owner}/{holder}")
            case wire.Allocated(blocks):
                self.cache.allocated({self._timed(holder): count for holder, count in blocks.items()})
                return None
            case wire.MeasuredSamples(samples):
                _check_seconds([seconds for one in samples for seconds in (one.estimated_s, one.took_s)])
                self.cache.measured(samples)
                return None
            case wire.Received(keys):
                self.cache.received(keys.unpack())
                return None
            case wire.TurnEnded(keys):
                self.cache.turn_ended(keys.unpack())
                return None
            case wire.Retainable(keys):
                return wire.Fitting(self.cache.retainable(keys.unpack()))
            case wire.Counts():
                return wire.Counted(self.cache.counts())
            case wire.ChangesSince(upto):
                return self._changes_since(upto)
        return wire.Done()

    def clear(self) -> wire.Done:
        """On any thread."""
        self.cache.clear()
        return wire.Done()

    def _changes_since(self, upto: int) -> wire.Changed:
        since = self.cache.changes_since(upto)
        changes = [
            wire.KeyChange(change.entered, wire.pack_keys(alike))
            for change in since.changes
            for alike in (by_length(change.keys) or [[]])
        ]
        return wire.Changed(since.upto, since.is_whole, changes)

    def _lookup(self, verb: wire.Lookup) -> wire.Planned:
        keys, shape, costs = verb.keys.unpack(), verb.shape(), verb.options.get("costs")
        if costs is not None:
            _check_seconds((*(costs.compute or ()), *(costs.load or ())))
        _check_tiers(verb.options.get("tiers"))
        if not self._has_room(len(keys)):
            self.cache.lookup([], self._timed(verb.holder))  # ends its promise
            return wire.Planned(0, Ended.REFUSED.name, (), 0, -1, None)
        plan = self.cache.lookup(keys, self._timed(verb.holder), shape=shape, **verb.options)
        self._on_lookup(keys, shape, costs, plan)
        return wire.Planned(plan.chunks, plan.ended.name, plan.tiers, plan.prefix_chunks, plan.lacking, plan.choice)

    def _load(self, verb: wire.Load) -> wire.ReadLeased:
        keys = verb.keys.unpack()
        if not self._has_room(len(keys), lasting=verb.lasting):
            return wire.ReadLeased(0, [], wire.Keys(), "this session holds as much as a session may")
        if verb.lasting and not self._is_watched:
            return wire.ReadLeased(0, [], wire.Keys(), _UNWATCHED)
        holder = f"{self.lasting_owner}/{verb.holder}" if verb.lasting else self._timed(verb.holder)
        answer = self.cache.load(keys, holder, lasting=verb.lasting)
        if isinstance(answer, LoadFailed):
            return wire.ReadLeased(0, [], wire.pack_keys(answer.missing), answer.reason)
        return wire.ReadLeased(answer.id, self._slots(answer.extents), wire.Keys(), "")

    def _begin_store(self, verb: wire.BeginStore) -> wire.WriteLeased:
        keys = verb.keys.unpack()
        _check_tiers(verb.options.get("tiers"))
        held_s = (verb.options.get("hold_s", 0.0), verb.options.get("retain_s", 0.0))
        if not all(0.0 <= seconds <= MAX_HOLD_S for seconds in held_s):
            raise InputError(f"chunks are held from 0 to {MAX_HOLD_S} seconds")
        if not self._has_room(len(keys), lasting=True):
            return wire.WriteLeased(0, [], [], "this session holds as much as a session may")
        if not self._is_watched:
            return wire.WriteLeased(0, [], [], _UNWATCHED)
        lease = self.cache.begin_store(keys, f"{self.lasting_owner}/{verb.holder}", **verb.options)
        places: list[int] = []
        for key in lease.keys:  # in the order of the call
            places.append(keys.index(key, places[-1] if places else 0))
        return wire.WriteLeased(lease.id, places, self._slots(lease.extents), lease.refused)

    def _slots(self, extents: Sequence[HostExtent]) -> list[int]:
        return [extent.offset // self.cache.pool.slot_bytes for extent in extents]

    def _timed(self, holder: Holder) -> Holder:
        """The holder of what ends with the connection."""
        return f"{self.name}/{holder}"

    def _own(self, number: int) -> ReadEntry | WriteEntry | None:
        """None: it is not open (any more). Raises `MisuseError`: it is another session's."""
        lease = self._leases.find(number)
        if lease is not None and owner_of(lease.holder) not in (self.name, self.lasting_owner):
            raise MisuseError(f"lease {number} belongs to another session")
        return lease

    def _has_room(self, keys: int, *, lasting: bool = False) -> bool:
        for may_expire in (True, False):
            timed, timed_keys = self._leases.count(self.name)
            lasts, lasting_keys = self._leases.count(self.lasting_owner)
            has_number = lasts < MAX_LASTING if lasting else timed < MAX_TIMED
            if has_number and timed_keys + lasting_keys + keys <= MAX_KEYS_HELD:
                return True
            if may_expire:
                self.cache.counts()  # ends what has expired
        return False


def lasting_owner(session: str) -> str:
    """The owner of the leases of a session that do not end with its connection."""
    return f"{session}l"


def release(cache: LocalCache, lease: ReadEntry | WriteEntry, *, ends_holds: bool = True) -> bool:
    """Nothing is being copied there any more."""
    lease_id = LeaseId(lease.number)
    if isinstance(lease, WriteEntry):
        return cache.release(WriteLease(lease_id, (), (), ""))
    return cache.release(ReadLease(lease_id, (), ()), ends_holds=ends_holds or lease.deadline_s == math.inf)


def _check_seconds(measured: Sequence[float]) -> None:
    """Raises `InputError`: one of these is no duration. With NaN, for one, nothing can be compared any more, neither in
    this session's lookups nor in what others learn about its engine."""
    if not all(0.0 <= seconds <= _MAX_SECONDS for seconds in measured):
        raise InputError(f"costs and measurements are from 0 to {_MAX_SECONDS:g} seconds")


def _check_tiers(names: Sequence[str] | None) -> None:
    """Raises `InputError`: so many tiers, or such long names, do not exist."""
    if names is not None and (len(names) > MAX_TIERS or max(map(len, names), default=0) > MAX_NAME):
        raise InputError(f"a request names at most {MAX_TIERS} tiers, of {MAX_NAME} characters")


SETTLE_S: Final = 10.0
"""From when no process maps the pool, if the client has not ended or its end is not known: time for its devices to be
reset."""
_FIRST_LOOK_S: Final = 0.02
_MAX_LOOK_S: Final = 1.0


class OrphanImage(msgspec.Struct):
    """What one session was copying: the leases of its `lasting_owner`.

    format: of their cache. session: its name.
    pid: of the process; 0 if it is not visible here. has_pidfd: there is a pidfd of it, which is passed on with this.
    lost_s: since when it is one.
    unmapped_s: since when no process has the pool open or mapped for it; None: some process may.
    """

    token: bytes
    format: wire.Format
    session: str
    pid: int
    has_pidfd: bool
    lost_s: float
    unmapped_s: float | None = None


@dataclass(slots=True)
class Orphan:
    """One of this process, whose cache has these leases.

    pidfd: or -1.
    look_s: when to look next, by the monotonic clock. wait_s: from then to the time after.
    is_named: it is in the log.
    """

    image: OrphanImage
    cache: LocalCache
    pidfd: int
    look_s: float = 0.0
    wait_s: float = _FIRST_LOOK_S
    is_named: bool = False


class Orphans:
    """Lasting leases of clients whose connection closed, retained until no process can still be copying. For the
    server's thread.

    (A slot that is `ORPHANED`, in `kv_tiers.index.life`, is something else.) A connection that closes proves nothing,
    because the process may be in the middle of a copy, be stopped there for an hour, and go on. Its slots wait until
    the client reconnects and lists the leases that it still has (our client does so automatically), or until the kernel
    says that no process has the pool open or mapped for this client any more (`HostPool.is_lent`). That covers
    processes of other PID namespaces and forked children. No timeout releases anything by itself.

    A process that ends gives up its memory before its devices, which may still be writing. So its slots also wait for
    its end, which its pidfd shows. If the process lives on without the pool, or has no pidfd, the slots wait for
    `SETTLE_S` more. The log names a client that keeps its slots for long. Each has slots of a pool, so there are never
    more of them than slots.
    """

    def __init__(self, clock: Clock, name_after_s: float) -> None:
        """name_after_s: how long one is retained before the log says so."""
        self._clock = clock
        self._name_after_s = name_after_s
        self._orphans: dict[str, Orphan] = {}  # by the names of their sessions

    def __len__(self) -> int:
        return len(self._orphans)

    def add(self, orphan: Orphan) -> None:
        """A session has ended. Takes over its process's pidfd."""
        if not _slots(orphan):
            give_up(orphan)
            close_descriptor(orphan.pidfd)
            return
        pid, pidfd = orphan.image.pid, orphan.pidfd
        for known in self._orphans.values():  # of a process that comes and goes one descriptor is enough
            if pid and known.image.pid == pid and known.pidfd != pidfd >= 0 and not is_gone(known.pidfd):
                os.close(pidfd)
                orphan.pidfd = known.pidfd
                break
        self.restore(orphan)
        self._look(orphan)

    def all(self) -> list[Orphan]:
        return list(self._orphans.values())

    def restore(self, orphan: Orphan) -> None:
        """One of another process. Takes over the pidfd."""
        self._orphans[orphan.image.session] = orphan

    def take(self, token: bytes) -> list[Orphan]:
        """Remove the orphans of an owner that is back: several where it has registered another format meanwhile. The
        caller gives up the leases that the owner no longer wants."""
        taken = [orphan for orphan in self.all() if orphan.image.token == token]
        for orphan in taken:
            self._remove(orphan)
        return taken

    def are_of(self, cache: LocalCache) -> bool:
        """Whether any orphan was copying there."""
        return any(orphan.cache is cache for orphan in self._orphans.values())

    def patience_s(self) -> float | None:
        """How soon `expire` should be called. None: there are no orphans."""
        soonest = min((orphan.look_s for orphan in self._orphans.values()), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def expire(self) -> None:
        """End those for whom no process can be copying any more."""
        at_s = time.monotonic()
        for orphan in self.all():
            if orphan.look_s <= at_s:
                self._look(orphan)

    def close(self) -> None:
        for orphan in self.all():
            self._remove(orphan)

    def _remove(self, orphan: Orphan) -> None:
        del self._orphans[orphan.image.session]
        if all(other.pidfd != orphan.pidfd for other in self._orphans.values()):
            close_descriptor(orphan.pidfd)

    def _look(self, orphan: Orphan) -> None:
        image, now_s = orphan.image, self._clock.now_s()
        has_ended = is_gone(orphan.pidfd)
        is_mapped = orphan.cache.pool.is_lent(image.token)
        if is_mapped is not False:
            image.unmapped_s = None
        elif image.unmapped_s is None:
            image.unmapped_s = now_s
        has_settled = image.unmapped_s is not None and now_s - image.unmapped_s >= SETTLE_S
        if not is_mapped and (has_ended or has_settled):
            self._remove(orphan)
            give_up(orphan)
            return
        orphan.look_s = time.monotonic() + orphan.wait_s
        orphan.wait_s = min(2 * orphan.wait_s, _MAX_LOOK_S)
        if not orphan.is_named and now_s - image.lost_s > self._name_after_s:
            orphan.is_named = True
            who = f"process {image.pid}" if image.pid else "a process of another PID namespace"
            _log.warning(
                "%s lost its connection %.0f s ago while it was copying %d chunks, and has not reconnected: their room "
                "(with that of others like it %d of the %d slots of pool %s) stays reserved until it does, or until it "
                "and the children that it has forked have ended, because they may still be copying",
                who,
                now_s - image.lost_s,
                _slots(orphan),
                sum(_slots(other) for other in self._orphans.values() if other.cache is orphan.cache),
                orphan.cache.pool.slots,
                orphan.cache.pool.name,
            )


def give_up(orphan: Orphan) -> None:
    """Nothing is being copied there any more."""
    orphan.cache.end_all(lasting_owner(orphan.image.session))


def _slots(orphan: Orphan) -> int:
    with orphan.cache.parts.host.lock:
        return sum(len(lease.slots) for lease in orphan.cache.parts.leases.of(lasting_owner(orphan.image.session)))
