"""`RemoteCache`: the `CacheService` of a cache in another process.

It fails only into a miss. While the server is away (dead, hung, restarting), lookups find nothing, stores get no room
and operations in progress have failed; nothing raises and nothing waits. A call that is not answered in time closes the
connection. Later calls try to reconnect, at once at first and then ever less often, and never wait longer than
connecting to a local socket takes. So does a thread (`Reconnector`), which notices that the server has ended though the
engine makes no call.

A reconnect finds one of two things. The same server still has this client's lasting leases (those to write, and
lasting ones to read), because it cannot know whether a copy is in progress: these continue, and all other leases are
void. A new server has a new pool: leases of the old pool are void before the first new one is granted, and the old
mapping stays until its last user is done, so that a copy in progress does no harm. A new server is accepted only when
no lasting read is open, since such a copy cannot be withdrawn, and only by a call of the engine's: the thread registers
with it and leaves the exchange of the pools to the next call, which need not wait for anything then. Keys that were
forgotten meanwhile are sent to the server before the first lookup.
"""

import hashlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar, Unpack

from kv_core.clock import Clock
from kv_core.cost import Measured
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.errors import MisuseError, TierDown
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import (
    CacheCounts,
    Ended,
    Holder,
    LeaseId,
    LoadFailed,
    LookupOptions,
    LookupPlan,
    ReadLease,
    StoreOptions,
    WriteLease,
    check_options,
)
from kv_core.transfer import HostExtent
from kv_remote.messages import MAX_NAME
from kv_tiers.clock import MonotonicClock
from kv_tiers.events.changes import Change, Changes
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.core_dumps import keep_out
from kv_tiers.pool.populated import Places, PopulatedPages, distance, slot_bytes_for
from kv_tiers.threads import start_thread

from kv_server import wire
from kv_server.connection import Link, Opening, Reconnector

_log = limited_logger(__name__)
A = TypeVar("A", bound=wire.Answer)

_BLOCK_BYTES = 512
"""Of `st_blocks`, on every file system."""


class MappedPool:
    """The server's host pool, mapped from the descriptor that it sent: the part of `HostPool` that copiers need. Only
    the server allocates slots."""

    def __init__(
        self, name: str, group_bytes: Sequence[int], slots: int, descriptor: int, *, core_dump: bool = False
    ) -> None:
        """group_bytes: as for `PayloadSizes`.
        descriptor: closed here in any case.
        core_dump: a core dump of this process has the pool in it.
        Raises `TierDown`: it cannot be mapped, or is shorter than it should be."""
        self.name = name
        self.sizes = PayloadSizes(group_bytes)
        self.chunk_bytes = self.sizes.largest
        self.slot_bytes = slot_bytes_for(self.chunk_bytes)
        self.slots = slots
        self._places = Places(name, self.sizes, self.slot_bytes, slots)
        try:
            nbytes = slots * self.slot_bytes
            status = os.fstat(descriptor)
            if status.st_size != nbytes:  # accessing a page beyond the file's end kills a process
                raise TierDown(f"the server's pool {name} does not have the {nbytes} bytes that it should")
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise TierDown(f"the server's pool {name} cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        if not core_dump:
            keep_out(mapping)
        self.view = memoryview(mapping)
        """The slots' bytes, writable. The mapping lives as long as this pool or anything derived from the view."""
        # The server's pages are ready, but this process has its own page table.
        self._pages = PopulatedPages(mapping, 0, nbytes)
        self._pages.reached(0)
        self._pages.written(status.st_blocks * _BLOCK_BYTES)  # servers hand out unused slots in ascending order

    def extents(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> tuple[HostExtent, ...]:
        """The extents of these chunks in these slots, each of its own size."""
        return self._places.extents(keys, slots)

    def will_write(self, slots: Sequence[int]) -> None:
        """These slots are about to be written, and the unused ones after them next."""
        if slots:
            self._pages.reached((max(slots) + 1) * self.slot_bytes)

    def will_read(self, slots: Sequence[int]) -> None:
        """These slots are about to be read. Others have written them, and the server has populated some after them."""
        if slots:
            used = (max(slots) + 1) * self.slot_bytes
            self._pages.written(used + distance(used))

    def close(self) -> None:
        """Stop touching pages. The mapping remains, as described at `view`."""
        self._pages.stop()


MAX_REPLAY: Final = 1024
"""If more keys than this are forgotten while the server is away, the whole cache is cleared when it is back. The
messages of a reconnect must fit into a socket's buffer before its reader takes them."""
_FORGOTTEN_AT_ONCE: Final = 2048
"""Keys in one request: some 50 ms, in which no other client is answered."""
_GENERATION: Final = 1 << 40
_LOOK_S: Final = 0.005
_END_S: Final = 1.0
_NOTHING: Final = CacheCounts(*(0,) * len(CacheCounts.__dataclass_fields__))


class RemoteCache:
    """A `CacheService` at a server's socket. Safe to call from any thread, and not across a fork.

    pool: where the chunks are now. generation: how many other pools there were before it.
    """

    def __init__(
        self,
        socket: Path,
        *,
        group_bytes: Sequence[int],
        fingerprint: str,
        engine: str = "",
        shards: int = 1,
        facts: Mapping[str, str] | None = None,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 30.0,
        on_new_pool: Callable[[MappedPool], None] | None = None,
        clock: Clock | None = None,
        core_dump: bool = False,
    ) -> None:
        """Connect and register; this waits for the server, up to `connect_timeout_s`, and much longer for one that has
        greeted us and is opening its tiers. Raises `ConfigError`: no server answers there, or it refuses this client;
        the text says why.

        group_bytes, fingerprint: the chunks' format: the size of each group's, and what the bytes mean. Sessions with
            the same format share chunks.
        engine, shards, facts: what the engine's other processes may query (`kv_server.wire.Registered`).
        timeout_s: how long any later call may take.
        on_new_pool: called with each pool but the first before anything in it is leased to this client. It is called by
            whichever call connected to the restarted server and must not call the cache.
        core_dump: a core dump of this process has the pool in it.
        """
        self.socket = socket
        """Where its server listens."""
        self._group_bytes = tuple(group_bytes)
        self._fingerprint = fingerprint
        self._about = (engine, shards, dict(facts or {}))
        self._on_new_pool = on_new_pool
        self._timeout_s = timeout_s
        self._core_dump = core_dump
        self._lock = threading.Lock()
        self._token = b""
        self._lasting: dict[LeaseId, Holder] = {}
        self._reading: set[LeaseId] = set()  # those of them that are reads
        self._void: set[LeaseId] = set()  # those of them that the server does not know (any more)
        self._surplus: set[int] = set()  # resumed by the server, but given up here meanwhile
        self._registered: wire.Register | None = None  # to the server that was connected to last
        self._forgotten: dict[ChunkKey, None] = {}
        self._is_cleared = False
        self._own_numbers = 0
        self._counts = _NOTHING
        self._is_watched = False
        self.tiers: tuple[str, ...] = ()
        """Those of the server that was connected to last."""
        self.lease_s = 0.0
        """The same server's, whatever the engine's own settings say."""
        self._closed = False
        self._has_lasting_leases = False  # what was leased on this connection, or before it, may outlive it
        self.generation = -1
        self._polled = -1  # the generation whose changes were asked for
        self.pool: MappedPool
        self._link = Link(
            socket,
            timeout_s,
            MonotonicClock() if clock is None else clock,
            on_connect=self._register,
            on_connected=self._connected,
            on_reconnected=self._catch_up,
            on_disconnected=self._disconnected,
        )
        self._link.open(connect_timeout_s)
        self._start_reconnector()

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        **options: Unpack[LookupOptions],
    ) -> LookupPlan:
        check_options(options, LookupOptions)
        keys_per_chunk = shape.keys_per_chunk
        if len(keys) % keys_per_chunk:
            raise MisuseError(
                f"a lookup of {len(keys)} keys, {keys_per_chunk} a chunk: give all the keys of every chunk"
            )
        most = wire.MAX_KEYS // keys_per_chunk * keys_per_chunk
        if len(keys) > most:
            _log.warning(
                "a prompt of %d chunks has %d keys; a cache server is asked about its first %d chunks only",
                len(keys) // keys_per_chunk,
                len(keys),
                most // keys_per_chunk,
            )
        request = wire.Lookup(
            wire.pack_keys(keys[:most]),
            _name_of(holder),
            shape.chunk_tokens,
            tuple(map(str, shape.groups)),
            shape.shards,
            options,
        )
        with self._lock:
            plan = self._ask(request, wire.Planned)
        if plan is None:
            return LookupPlan(holder, 0, Ended.REFUSED, ())
        ended = Ended[plan.ended]
        if ended is Ended.ALL_HELD and len(keys) > most:
            ended = Ended.REFUSED
        return LookupPlan(holder, plan.chunks, ended, plan.tiers, plan.prefix_chunks, plan.lacking, plan.choice)

    def renew(self, holder: Holder) -> bool:
        with self._lock:
            renewed = self._ask(wire.Renew(_name_of(holder)), wire.Truth)
            return renewed is not None and renewed.value

    def load(self, keys: Sequence[ChunkKey], holder: Holder, *, lasting: bool = False) -> ReadLease | LoadFailed:
        wanted = tuple(keys)
        if len(wanted) > wire.MAX_KEYS:
            return LoadFailed(wanted, f"one load has at most {wire.MAX_KEYS} chunks")
        request = wire.Load(wire.pack_keys(wanted), _name_of(holder), lasting)
        with self._lock:
            leased = self._ask(request, wire.ReadLeased, lasts=lasting)
            if leased is None:
                return LoadFailed(wanted, "the cache server is away")
            if not leased.lease:
                return LoadFailed(tuple(leased.missing.unpack()) or wanted, leased.reason)
            lease = LeaseId(self._numbered(leased.lease))
            if lasting:
                self._lasting[lease] = holder
                self._reading.add(lease)
            self.pool.will_read(leased.slots)
            return ReadLease(lease, wanted, self.pool.extents(wanted, leased.slots))

    def begin_store(self, keys: Sequence[ChunkKey], holder: Holder, **options: Unpack[StoreOptions]) -> WriteLease:
        check_options(options, StoreOptions)
        request = wire.BeginStore(wire.pack_keys(keys[: wire.MAX_KEYS]), _name_of(holder), options)
        with self._lock:
            leased = self._ask(request, wire.WriteLeased, lasts=True)
            if leased is None or not leased.lease:
                self._own_numbers += 1
                lease = LeaseId(-self._own_numbers)  # which the server does not know: never one of its own
                self._lasting[lease] = holder
                self._void.add(lease)
                return WriteLease(lease, (), (), "the cache server is away" if leased is None else leased.refused)
            lease = LeaseId(self._numbered(leased.lease))
            self._lasting[lease] = holder
            refused = leased.refused
            if not refused and len(keys) > wire.MAX_KEYS:
                refused = f"one store has at most {wire.MAX_KEYS} chunks"
            reserved = tuple([keys[place] for place in leased.places])
            self.pool.will_write(leased.slots)
            return WriteLease(lease, reserved, self.pool.extents(reserved, leased.slots), refused)

    def commit(self, lease: WriteLease) -> None:
        with self._lock:
            self._check_open()
            if lease.id not in self._lasting:
                raise MisuseError(
                    f"write lease {lease.id} is not open: committed or released before, or its holder ended"
                )
            # Connect first, if the server is back: this lease must be reported to it as one that we still have.
            is_up = self._link.is_up()
            if self._close_lease(lease.id) and is_up:
                self._ask(wire.Commit(lease.id % _GENERATION), wire.Done)

    def release(self, lease: ReadLease | WriteLease) -> bool:
        with self._lock:
            if self._closed:
                return False
            is_up = self._link.is_up()  # before the lease is closed, as in `commit`
            if isinstance(lease, WriteLease) or lease.id in self._lasting:
                is_known = lease.id in self._lasting and self._close_lease(lease.id)
            else:
                is_known = lease.id // _GENERATION == self.generation
            if not is_known or not is_up:
                return False
            released = self._ask(wire.Release(lease.id % _GENERATION), wire.Truth)
            return released is not None and released.value

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        gone = list(keys)
        with self._lock:
            for at in range(0, len(gone), _FORGOTTEN_AT_ONCE):
                part = gone[at : at + _FORGOTTEN_AT_ONCE]
                if self._ask(wire.Forget(wire.pack_keys(part)), wire.Done) is None:
                    self._remember(part)

    def end(self, holder: Holder) -> None:
        with self._lock:
            if self._closed:
                return
            for lease in [lease for lease, its_holder in self._lasting.items() if its_holder == holder]:
                self._close_lease(lease)
            self._ask(wire.End(_name_of(holder)), wire.Done)

    def allocated(self, blocks: Mapping[Holder, int]) -> None:
        """No round trip: sent only if the server has a subscriber, and not answered."""
        with self._lock:
            if self._is_watched and not self._closed:
                some = islice(blocks.items(), wire.MAX_ALLOCATED)
                self._link.tell(wire.Allocated({_name_of(holder): count for holder, count in some}))

    def measured(self, samples: Sequence[Measured]) -> None:
        """Like `allocated`."""
        with self._lock:
            if self._is_watched and not self._closed:
                self._link.tell(wire.MeasuredSamples(list(samples[: wire.MAX_ALLOCATED])))

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """No round trip: it is not answered."""
        with self._lock:
            for at in range(0, 0 if self._closed else len(keys), wire.MAX_KEYS):
                self._link.tell(wire.Received(wire.pack_keys(keys[at : at + wire.MAX_KEYS])))

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            if keys and not self._closed:
                self._link.tell(wire.TurnEnded(wire.pack_keys(keys[: wire.MAX_KEYS])))

    def retainable(self, keys: Sequence[ChunkKey]) -> int | None:
        with self._lock:
            if len(keys) > wire.MAX_KEYS:
                return None
            answer = self._ask(wire.Retainable(wire.pack_keys(keys)), wire.Fitting)
            return None if answer is None else answer.keys

    def clear(self) -> None:
        with self._lock:
            if self._ask(wire.Clear(), wire.Done) is None:
                self._forgotten.clear()
                self._is_cleared = True

    def changes_since(self, upto: int) -> Changes:
        """As for `LocalCache`. After a restart of the server, and while it is away, everything known before is void."""
        with self._lock:
            self._polled = self.generation
            generation, known = divmod(upto, _GENERATION)
            answer = self._ask(wire.ChangesSince(known if generation == self.generation else 0), wire.Changed)
            if answer is None:
                return Changes(0, False, ())
            is_whole = answer.is_whole and (generation == self.generation or not upto)
            changes = tuple(Change(change.entered, change.keys.unpack()) for change in answer.changes)
            return Changes(self.generation * _GENERATION + answer.upto, is_whole, changes)

    def counts(self) -> CacheCounts:
        """While the server is away: its last answer, or all zeros."""
        with self._lock:
            counted = self._ask(wire.Counts(), wire.Counted)
            if counted is not None:
                self._counts = counted.counts
            return self._counts

    def close(self) -> None:
        """Release everything. The pool is unmapped when its memory is no longer in use."""
        with self._lock:
            if self._closed:
                return
            if self._has_lasting_leases:
                self._reconnect_to_leases(time.monotonic() + self._timeout_s)
            if self._link.connection is not None:
                self._ask(wire.Unregister(), wire.Done)
            self._closed = True
            self._reconnector.stop()
            self._link.close()
            self.pool.close()
        if self._reconnector.is_alive():
            self._reconnector.join(_END_S)

    # What follows is called under the lock.

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError("the cache is closed")

    def _ask(self, request: wire.Request, answer: type[A], *, lasts: bool = False) -> A | None:
        """None: the server is away. lasts: what is leased outlives the connection."""
        self._check_open()
        if lasts:
            if not self._link.is_up():
                return None
            self._has_lasting_leases = True  # only now: a new connection has nothing that lasts
        return self._link.ask(request, answer)

    def _disconnected(self) -> None:
        """The connection is lost."""
        if not self._reconnector.is_alive():  # it could not be started before
            self._start_reconnector()

    def _start_reconnector(self) -> None:
        self._reconnector = Reconnector(self._look)
        if why := start_thread(self._reconnector):
            _log.warning("only the engine's calls will reconnect to a cache server that was away: %s", why)

    def _look(self) -> socket.socket | None:
        """Runs on the thread of `Reconnector`."""
        with self._lock:
            if self._closed:
                return None
            self._link.notice_end()
            self._link.is_up(may_connect=self._is_the_same)
            return self._link.watch()

    def _is_the_same(self, answer: wire.Pool) -> bool:
        """Whether the server that answers is the one whose pool we have. Another one's pool would replace it while the
        engine copies."""
        return answer.name == self.pool.name

    def _reconnect_to_leases(self, until_s: float) -> None:
        """Reconnect to the server that may still have lasting leases of ours, if it is there.

        until_s: try until then, by the monotonic clock.
        """
        while not self._link.is_up(may_connect=self._is_the_same):
            is_gone = self._link.nobody_listens or self._link.is_registered  # with another one
            if is_gone or time.monotonic() >= until_s:
                return
            time.sleep(_LOOK_S)

    def _register(self) -> wire.Register:
        engine, shards, facts = self._about
        known = [lease % _GENERATION for lease in self._lasting if lease not in self._void]
        return wire.Register(
            engine=engine,
            group_bytes=self._group_bytes,
            fingerprint=self._fingerprint,
            shards=shards,
            facts=facts,
            resume=self._token,
            lasting=known,
            forgotten=wire.pack_keys(list(self._forgotten)),
            is_cleared=self._is_cleared,
        )

    def _connected(self, opening: Opening, answer: wire.Pool) -> None:
        """A server has answered: the first, the same again, or another. Raises `TierDown`: its pool cannot be used
        here."""
        resumed = set(answer.lasting)
        if self.generation < 0 or answer.name != self.pool.name:
            if self._reading:
                raise TierDown("chunks are still being copied from the pool of the previous server")
            resumed.clear()
            descriptor = opening.take_descriptor()
            pool = MappedPool(answer.name, answer.group_bytes, answer.slots, descriptor, core_dump=self._core_dump)
            if self.generation >= 0 and self._on_new_pool is not None:
                try:
                    self._on_new_pool(pool)
                except Exception as error:  # the caller's code, but no exception of ours may leave a hook of the engine
                    _log.exception("a new pool of the cache server at %s cannot be used here", self.socket)
                    raise TierDown(f"the new pool cannot be used here: {error}") from error
            if self.generation >= 0:
                self.pool.close()
            self.pool = pool
            self.generation += 1
        local_leases = {lease % _GENERATION for lease in self._lasting if lease not in self._void}
        self._void.update(lease for lease in self._lasting if lease % _GENERATION not in resumed)
        self._surplus = resumed - local_leases
        self._registered, self._token = opening.register, answer.token
        self._is_watched = answer.is_watched
        self.tiers, self.lease_s = answer.tiers, answer.lease_s
        self._has_lasting_leases = bool(local_leases)

    def _catch_up(self) -> None:
        """Tell the server which leases were given up and which keys forgotten after it became unreachable."""
        assert self._registered is not None
        if 0 <= self._polled < self.generation:
            # A server records changes from the first poll on, and a new one has had none: before anything is stored.
            self._polled = self.generation
            self._ask(wire.ChangesSince(0), wire.Changed)
        for number in self._surplus:
            self._ask(wire.Release(number), wire.Truth)
        known = set(self._registered.forgotten.unpack())
        left = [key for key in self._forgotten if key not in known]
        must_clear = self._is_cleared and not self._registered.is_cleared
        self._forgotten.clear()
        self._is_cleared = must_clear and self._ask(wire.Clear(), wire.Done) is None
        if left and self._ask(wire.Forget(wire.pack_keys(left)), wire.Done) is None:
            self._remember(left)

    def _remember(self, keys: Sequence[ChunkKey]) -> None:
        if not self._is_cleared:
            self._forgotten.update(dict.fromkeys(keys))
            if len(self._forgotten) > MAX_REPLAY:
                self._forgotten.clear()
                self._is_cleared = True

    def _numbered(self, number: int) -> int:
        """The server's number, made distinct from the same number of an earlier server."""
        return self.generation * _GENERATION + number

    def _close_lease(self, lease: LeaseId) -> bool:
        """Forget an open lasting lease. True: the server knows it."""
        del self._lasting[lease]
        self._reading.discard(lease)
        if lease in self._void:
            self._void.remove(lease)
            return False
        return True


def _name_of(holder: Holder) -> str:
    """The holder's name in messages, where names are short. An engine's holders have the ids of its requests, which its
    clients may choose: the server would end the session for one that is too long."""
    return holder if len(holder) <= MAX_NAME else hashlib.sha256(holder.encode()).hexdigest()
