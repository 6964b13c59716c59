"""The caches of one server: one for each format of chunks, opened when a client first registers that format.

Opening takes as long as the lower tiers take, so it runs on a separate thread while other clients are served.

A server outlives many engines. When it has reached its limit of formats and another one is registered, the cache that
has been without a client for longest is closed, unless that is less than a lease's time, because its engine may be
restarting. If other hosts read from this server no cache is closed, because they read whether there is a client here or
not.
"""

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_core.clock import Clock
from kv_core.errors import ConfigError, InputError
from kv_core.log import limited_logger
from kv_core.service import CacheCounts
from kv_remote.host_port import HostPort
from kv_tiers import chunk_header
from kv_tiers.build import build_local_cache
from kv_tiers.cache.admin import quota_slots
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import EventBus
from kv_tiers.payload_sizes import PayloadSizes
from kv_tiers.pool.host_pool import InheritedPool, slot_bytes_for
from kv_tiers.threads import OutOfThreadsError, join_all, must_start
from kv_tiers.tier import TierContext

from kv_server import wire
from kv_server.config import ServerConfig
from kv_server.peers.side import PeerReads, PeerSide, peer_side
from kv_server.session import OrphanImage
from kv_server.succession.channel import QuotasSet
from kv_server.succession.saved_pool import (
    SavedIndex,
    image_to_save,
    open_saved,
    restore_saved,
    saved_path,
    write_index,
)
from kv_server.wire import Format

_log = limited_logger(__name__)

_OPENING_S: Final = 5.0
"""How long `close` waits for caches that are being opened. A large disk takes minutes, and no chunk is in its pool."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The outcome of opening a new format's cache: the cache, or why there is none.

    orphans: what clients of an earlier server may still be copying there.
    """

    format: Format
    cache: LocalCache | wire.Failed
    orphans: Sequence[OrphanImage] = ()


def cache_name(wanted: Format) -> str:
    """A short name for a format's cache in metrics, logs and traces: the same wherever this format is served."""
    group_bytes, fingerprint = wanted
    return chunk_header.format_id(f"{PayloadSizes(group_bytes).spelled()} {fingerprint}").hex()[:12]


class Caches:
    """Owns the caches and closes them. Used on the server's thread only, unless stated otherwise."""

    def __init__(
        self,
        config: ServerConfig,
        clock: Clock,
        bus: EventBus,
        wake: Callable[[], None],
        on_idle_closed: Callable[[str], None],
    ) -> None:
        """bus: where the caches publish events. wake: called on another thread when `opened` has something new.

        on_idle_closed: called on another thread with the name of a cache that was closed to make room.
        """
        self.config = config
        """Of caches that are opened from now on."""
        self._bus = bus
        self._clock = clock
        self._wake = wake
        self._on_idle_closed = on_idle_closed
        self._caches: dict[Format, LocalCache] = {}
        self.opening: dict[Format, threading.Thread] = {}
        """Those that are being opened."""
        self._opened: deque[Opened] = deque()
        self._left_s: dict[Format, float] = {}
        self.closing: list[threading.Thread] = []
        """Those that are being closed to make room; they may have ended."""
        self._end = threading.Lock()
        self._is_closed = False  # from then on nobody takes what is `opened`; under that lock
        self.peers_address: HostPort | None = None
        """Where other hosts' servers read from this one; None: nowhere."""
        self.held_for = ""
        """Why no cache is to be opened now; empty: one may be. The caller of `open` sees to it."""
        self.drained: tuple[float, int | None] | None = None
        """What `drain` was given last; None: nothing is being drained."""
        self.is_frozen = False
        """Caches store nothing new and evict nothing, and none is closed to make room for another."""
        self.since_s: dict[str, float] = {}
        """When it was `frozen`, and since when it is `leaving` (a drain), while that lasts."""
        self.quotas_set: QuotasSet = {}
        """Those that differ from the settings."""
        self._for_peers: dict[str, tuple[LocalCache, PeerReads]] = {}

    def by_format(self) -> dict[Format, LocalCache]:
        return dict(self._caches)

    def for_peers(self, namespace: str) -> tuple[LocalCache, PeerReads] | None:
        """The cache whose tiers have this namespace, and what peers may read of it. On any thread."""
        return self._for_peers.get(namespace)

    def left(self, cache: LocalCache) -> None:
        """A client of this cache has gone."""
        for name, one in self._caches.items():
            if one is cache:
                self._left_s[name] = self._clock.now_s()

    def open(self, wanted: Format, in_use: Container[LocalCache]) -> bool:
        """Begin to open a cache, unless that has begun already. False: the limit of formats is reached. Raises
        `OutOfThreadsError`: the system has no more threads for us.

        in_use: the caches that a client uses, or may come back to.
        """
        if wanted in self.opening:
            return True
        is_full = len(self._caches) + len(self.opening) >= self.config.max_formats
        if is_full and not self._close_idle(in_use):
            return False
        thread = threading.Thread(target=self._open, args=(wanted,), daemon=True)
        must_start(thread)  # first, because the system may have no more threads for us: then nothing is being opened
        self.opening[wanted] = thread
        return True

    def opened(self) -> list[Opened]:
        """The caches that were opened, or failed to open, since the last call."""
        news = []
        while self._opened:
            opened = self._opened.popleft()
            self.opening.pop(opened.format).join()
            if isinstance(cache := opened.cache, LocalCache):
                self._adopt(opened.format, cache)
                if self.is_frozen:
                    cache.admin.freeze(True)
                if self.drained is not None:
                    peer_side(cache).drain.begin(*self.drained)
                self.publish(opened.format, cache)
            news.append(opened)
        return news

    def publish(self, wanted: Format, cache: LocalCache) -> None:
        """Let other hosts find this cache, from now on or with tiers that were opened again."""
        context = TierContext(cache.pool.chunk_bytes, cache.pool.slot_bytes, wanted[1])
        side = peer_side(cache)
        reads = side.reads(wanted[1])
        if self._for_peers.setdefault(context.namespace, (cache, reads))[0] is not cache:
            return  # of formats that differ in the sizes of smaller groups only, the first one has the namespace
        self._for_peers[context.namespace] = cache, reads
        if self.peers_address is not None:
            side.publish(reads, self.peers_address)

    def take_over(self, wanted: Format, given: InheritedPool, quotas: QuotasSet) -> LocalCache:
        """A cache on another process's pool, to be filled by the caller, who then has it `publish`ed. Its capacity is
        that of the settings, if there is so much room in the pool. Raises `ConfigError`: the settings cannot be
        honoured.

        given: that pool. quotas: `quotas_set` there.
        """
        self.quotas_set = dict(quotas)
        slots = self.config.host.capacity_bytes // slot_bytes_for(max(wanted[0]))
        if slots > given.mapped_slots:
            text = "the pool of cache %s keeps its %d slots; the %d of capacity_bytes count after a restart"
            _log.warning(text, cache_name(wanted), given.slots, slots)
            slots = given.slots
        cache = self._build(wanted, given._replace(slots=slots))
        self._adopt(wanted, cache)
        return cache

    def drain(self, timeout_s: float, max_bytes: int | None) -> None:
        """Drain every cache, including those that are opened from now on. Raises `InputError`: there is no host to
        offer chunks to."""
        types = {tier.get("type") for tier in self.config.tiers}
        if not (any(peer_side(cache).drain.can_begin for cache in self._caches.values()) or "peers" in types):
            raise InputError("no tier of type peers is configured, so there is no host to offer chunks to")
        self.drained = timeout_s, max_bytes
        self.since_s.setdefault("leaving", self._clock.now_s())
        for cache in self._caches.values():
            peer_side(cache).drain.begin(timeout_s, max_bytes)

    def end_drain(self) -> None:
        self.drained = None
        self.since_s.pop("leaving", None)
        for cache in self._caches.values():
            peer_side(cache).drain.end()

    def freeze(self, is_frozen: bool) -> None:
        """As `Administration.freeze`, for every cache, including those that are opened from now on."""
        self.is_frozen = is_frozen
        since_s = self.since_s.pop("frozen", self._clock.now_s())
        self.since_s |= {"frozen": since_s} if is_frozen else {}
        for cache in self._caches.values():
            cache.admin.freeze(is_frozen)

    def keep_quota(self, tenant: bytes, quota_bytes: int | None, formats: Iterable[Format] | None) -> None:
        """Set this quota (None: the common share) in caches that are opened from now on. formats: only caches of these
        formats; None: all."""
        if formats is None:  # a quota for all formats replaces those for single ones
            self.quotas_set = {key: quota for key, quota in self.quotas_set.items() if key[1] != tenant}
        affected: list[Format | None] = [None] if formats is None else list(formats)
        for chunk_format in affected:
            self.quotas_set[chunk_format, tenant] = quota_bytes

    def close(self, orphans: Sequence[OrphanImage] = ()) -> None:
        """Complete pending spills, then close. Takes at most some seconds per cache. One that is still being opened
        closes itself later. orphans: what clients may still be copying."""
        join_all(self.opening.values(), _OPENING_S)
        for thread in self.closing:
            thread.join()
        with self._end:
            self._is_closed = True
        self.opened()
        for wanted, cache in self._caches.items():
            self._close_cache(wanted, cache, [orphan for orphan in orphans if orphan.format == wanted])

    def _adopt(self, wanted: Format, cache: LocalCache) -> None:
        """Have a new cache, with its quotas. It is used even if its pool cannot provide them."""
        self._caches[wanted] = cache
        self._left_s[wanted] = self._clock.now_s()
        quotas = {tenant: quota for (one, tenant), quota in self.quotas_set.items() if one is None}
        quotas |= {tenant: quota for (one, tenant), quota in self.quotas_set.items() if one == wanted}
        before = {use.tenant: use.quota_bytes or 0 for use in cache.admin.tenants()}
        # First those that leave more to the others.
        for tenant, quota in sorted(quotas.items(), key=lambda of: (of[1] or 0) - before.get(of[0], 0)):
            try:
                cache.admin.set_quota(tenant, quota)
            except ConfigError as error:
                text = "tenant %s has no such quota in the pool of cache %s as was set: %s"
                _log.warning(text, tenant.hex(), cache_name(wanted), error)

    def _close_idle(self, in_use: Container[LocalCache]) -> bool:
        """Close a cache to make room for another; False: there is none to close."""
        if self.peers_address is not None or self.is_frozen:
            return False
        idle = [name for name, cache in self._caches.items() if cache not in in_use]
        longest = min(idle, key=self._left_s.__getitem__, default=None)
        if longest is None or self._clock.now_s() - self._left_s[longest] < self.config.host.lease_s:
            return False
        cache = self._caches[longest]
        # Not on this thread: closing first completes pending spills.
        thread = threading.Thread(target=self._close_one, args=(longest, cache), daemon=True)
        must_start(thread)  # first, as in `open`: else the cache would be nobody's, and never be closed
        self.closing = [*(other for other in self.closing if other.is_alive()), thread]
        del self._caches[longest], self._left_s[longest]
        self._for_peers = {name: one for name, one in self._for_peers.items() if one[0] is not cache}
        return True

    def _close_one(self, name: Format, cache: LocalCache) -> None:
        self._close_cache(name, cache)
        self._on_idle_closed(cache_name(name))

    def _saved_path(self, wanted: Format) -> Path | None:
        """Of the file of this cache's pool; None: it has none."""
        name = self.config.host.name
        return saved_path(name, cache_name(wanted)) if name else None

    def _open_saved(self, wanted: Format) -> tuple[InheritedPool, SavedIndex | None] | None:
        """The pool of this name, as for `build_local_cache`, and what is in it. None: it has no name. Raises
        `ConfigError`: it cannot be used."""
        path, host = self._saved_path(wanted), self.config.host
        slot_bytes = slot_bytes_for(max(wanted[0]))
        slots, mapped_slots = host.capacity_bytes // slot_bytes, host.max_capacity_bytes // slot_bytes
        return None if path is None or slots < 1 else open_saved(path, wanted, slots, max(slots, mapped_slots))

    def _close_cache(self, wanted: Format, cache: LocalCache, orphans: Sequence[OrphanImage] = ()) -> None:
        """Complete pending spills, and leave a pool with a name to the next server."""
        path, counts = self._saved_path(wanted), cache.counts()
        saved = None if path is None else image_to_save(path, wanted, cache, orphans)
        if _close(cache, counts) and path is not None and saved is not None:
            write_index(path, saved)

    def _build(self, wanted: Format, handed_over: InheritedPool | None = None) -> LocalCache:
        """Raises `ConfigError`: the settings cannot be honoured."""
        return build_local_cache(
            self.config.host,
            group_bytes=wanted[0],
            fingerprint=wanted[1],
            tiers=self.config.tiers,
            cold=self.config.cold,
            clock=self._clock,
            shared=True,
            tenants=self.config.tenants,
            events=self._bus.source(cache_name(wanted), wanted[0]),
            extensions=[PeerSide()],
            handed_over=handed_over,
        )

    def _open(self, wanted: Format) -> None:
        for thread in tuple(self.closing):
            thread.join()  # to free its memory, and its files if it has the same format
        orphans: list[OrphanImage] = []
        try:
            saved = self._open_saved(wanted)
            opened: LocalCache | wire.Failed = self._build(wanted, saved and saved[0])
            if saved is not None and saved[1] is not None and isinstance(opened, LocalCache):
                restore_saved(opened, saved[1])
                orphans = saved[1].orphans
        except OutOfThreadsError as error:
            opened = wire.Failed("refused", f"in this server {error}")
        except ConfigError as error:
            opened = wire.Failed("refused", str(error))
        except Exception as error:  # noqa: BLE001  # whatever it is, a client waits for an answer
            _log.exception("no cache of chunks of %s bytes could be made", wanted[0])
            opened = wire.Failed("fault", f"no cache could be made: {error}")
        with self._end:
            is_late = self._is_closed
            if not is_late:
                self._opened.append(Opened(wanted, opened, orphans))
        if not is_late:
            self._wake()
        elif isinstance(opened, LocalCache):
            self._close_cache(wanted, opened, orphans)


def why_not_passed_on(caches: Caches) -> str:
    """Why no other process may take them over now; empty: one may."""
    if caches.held_for:
        return f"{caches.held_for}: try again when that is done"
    if caches.opening or any(thread.is_alive() for thread in caches.closing):
        return "a cache is being opened or closed: try again when that is done"
    if caches.drained is not None:
        return "its chunks are being passed on to other hosts: end that first (kv drain --end)"
    return "it is frozen: end that first (kv freeze --end)" if caches.is_frozen else ""


def _close(cache: LocalCache, counts: CacheCounts) -> bool:
    """Complete pending spills, and log what the cache achieved. False: a tier may still use the pool."""
    _log.info(
        "the KV cache is closed: %d lookups found %d of %d chunks, and %d chunks entered the pool",
        counts.lookups, counts.chunks_hit, counts.chunks_asked, counts.chunks_committed,
    )  # fmt: skip
    try:
        cache.close()
    except BufferError as error:
        _log.warning("%s", error)  # the memory is freed when the process ends
        return False
    return True


def set_quotas(caches: Iterable[LocalCache], quotas: Mapping[bytes, int | None]) -> None:
    """Set these quotas, by tag, in all of the caches or in none. Raises `ConfigError`: one cannot grant them."""
    changes = []
    for cache in caches:
        before = {use.tenant: use.quota_bytes for use in cache.admin.tenants()}
        slots = {tag: quota_slots(quota or 0, cache.pool.slot_bytes) for tag, quota in {**before, **quotas}.items()}
        if sum(slots.values()) > cache.pool.slots:
            raise ConfigError(
                f"quotas of {sum(slots.values())} chunks, with those set over HTTP, in a pool of {cache.pool.slots} "
                "chunks: write smaller ones"
            )
        # First those that leave more to the others.
        ordered = sorted(quotas.items(), key=lambda of: (of[1] or 0) - (before.get(of[0]) or 0))
        changes += [(cache, tag, before.get(tag), quota) for tag, quota in ordered]
    done = []
    try:
        for change in changes:
            cache, tag, _, quota = change
            cache.admin.set_quota(tag, quota)
            done.append(change)
    except ConfigError:  # another quota was set meanwhile
        for cache, tag, quota, _ in reversed(done):
            cache.admin.set_quota(tag, quota)
        raise
