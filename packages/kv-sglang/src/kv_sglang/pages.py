"""Moves the pages of one host pool in and out of one cache, by their hashes. SGLang's threads call this directly.

The answer to a lookup is a promise: pages found are leased until they are read, or until enough newer lookups. A read
of promised pages leases them in one call without another lookup. Lookup, read and store come from three threads of
SGLang, which does not mention a lookup again once it is answered. A promise ends with the read of its last page; those
that are never read end one by one as newer lookups arrive, and all at once when a store finds no room. A read whose
promise has ended, or that never had one, looks up first.
"""

import itertools
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec
from kv_connect.halves.copies import await_copies
from kv_connect.identity import LiveKeySpace
from kv_connect.request_options import NO_CONTROLS, Controls
from kv_core.cost import Use
from kv_core.coverage import ChunkShape
from kv_core.errors import CopyFailed, InputError
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import Ended, LookupPlan, ReadLease, StoreOptions, WriteLease
from kv_core.transfer import Copy, HostExtent, TransferPlan, plan_transfer
from kv_cuda import Copier
from kv_remote.messages import MAX_KEYS
from kv_server.remote_cache import MappedPool, RemoteCache
from kv_tiers import HostPool, LocalCache
from kv_tiers.cache.host import TIER

from kv_sglang.metrics import NO_FIGURES, Figures, OncePerRequest
from kv_sglang.names import named_pages
from kv_sglang.pools import PoolPages
from kv_sglang.scheduler_calls import PrefillSpeed, RequestPages

_log = limited_logger(__name__)

_ASK_AGAIN_S: Final = 0.0005
_PROMISES: Final = 16
"""Number of lookups whose promises are retained. SGLang looks up requests one by one, and reads them soon after."""
_SEARCH_S: Final = 0.05
"""What a search for shorter prefixes may take, beyond the wait for lower tiers: each page costs a lookup, which at a
server is a round trip."""
_NUMBERS: Final = itertools.count()

_C = TypeVar("_C", bound=Copier)


class PoolBinding(Generic[_C]):
    """One thread's copier, with the current memory of a host pool, which a restarted server may have replaced."""

    def __init__(self, copier: _C) -> None:
        self._copier = copier
        self._pool = ""

    def on(self, pool: HostPool | MappedPool) -> _C:
        if pool.name != self._pool:
            self.unbind()
            self._copier.attach(pool.name, pool.view)
            self._pool = pool.name
        return self._copier

    def unbind(self) -> None:
        """Release the pool, so that it can be closed. No copy may be in flight."""
        if self._pool:
            self._copier.detach(self._pool)
            self._pool = ""


def lies_in(lease: ReadLease | WriteLease, pool: HostPool | MappedPool) -> bool:
    """Whether the leased chunks are in this pool. A server that was started again has another one, and has ended the
    lease."""
    return all(extent.pool == pool.name for extent in lease.extents[:1])


@dataclass(frozen=True, slots=True)
class _Promise:
    """The pages that one lookup found.

    pages: leased to its holder, and the slowest tier that each comes from; none if everything is still being promoted.
    last: the page whose read ends the promise.
    """

    pages: Mapping[ChunkKey, str]
    last: ChunkKey | None


def _store_options(controls: Controls) -> StoreOptions:
    retain_s = controls.retain_ms / 1000
    return {"tiers": controls.tiers, "retain_s": retain_s, "leaves_first": controls.is_demoted}


class PageStore:
    """One pool's pages. Thread-safe; every call is bounded in time and raises only for bugs of ours.

    name: prefix of its holders' names, unique on the same cache.
    """

    def __init__(
        self,
        cache: LocalCache | RemoteCache,
        space: LiveKeySpace,
        pages: PoolPages,
        *,
        shard: int,
        wait_s: float,
        holds_old_pages: Callable[[], bool] = lambda: False,
        use: Use = "auto",
        page_tokens: int = 0,
        prefill: PrefillSpeed | None = None,
        requests: RequestPages | None = None,
        figures: Figures = NO_FIGURES,
    ) -> None:
        """space: while it is not known, nothing is found or written.
        wait_s: how long a lookup may wait for pages in lower tiers.
        holds_old_pages: whether the engine's pages may belong to other weights than the key space's: none is written.
        use: when held pages are used. auto: lower tiers are waited for where that is quicker than computing.
        page_tokens: tokens of a page of KV, which these belong to; 0: they are such pages.
        prefill: how fast the engine computes; None: never known.
        requests: the requests' options for their pages; None: none.
        """
        self._figures = figures
        self._known = OncePerRequest()
        self._use: Use = use
        self._shape = ChunkShape(page_tokens or pages.page_slots)
        self._prefill = PrefillSpeed() if prefill is None else prefill
        self._requests = RequestPages(use, pages.page_slots, lambda: cache.tiers) if requests is None else requests
        self._requests.listeners.append(self._notify_taken)
        self.cache = cache
        self.pages = pages
        self._space = space
        self._holds_old_pages = holds_old_pages
        self._shards = (shard,)
        self._wait_s = wait_s
        self.name = f"sglang-{os.getpid()}-{next(_NUMBERS)}"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._promises: OrderedDict[str, _Promise] = OrderedDict()  # by their holders, oldest first
        self._bindings: list[tuple[threading.Thread, PoolBinding[Copier]]] = []
        self._mine = threading.local()

    @property
    def revision(self) -> str:
        """Of the weights of pages that are written now; empty while they are not known."""
        space = self._space.now
        return "" if space is None else space.revision

    def keys(self, hashes: Sequence[str], given_by: str = "", *, tenant: bytes | None = None) -> list[ChunkKey]:
        """The keys of these pages of one prompt; empty while the key space is not known.

        given_by: the revision of another engine's weights, for pages that it hands over.
        tenant: the tag of its tenant; None: that of the request that they belong to.

        Raises:
            InputError: the hashes are not SGLang's page hashes.
        """
        try:
            digests = [bytes.fromhex(each) for each in hashes]
        except (TypeError, ValueError):
            raise InputError("a page's key is not the hex digits of a SHA-256") from None
        space = self._space.handed_over(given_by) if given_by else self._space.now
        if space is None:
            return []
        tag = self._requests.tenant(hashes) if tenant is None else tenant
        return space.keys(digests, shards=self._shards, tenant=tag)

    def held(self, hashes: Sequence[str], until: float | None = None) -> int:
        """How many leading pages can be read now. They stay until they are.

        until: the time, by `time.monotonic`, when the answer is due; None: the configured time from now.
        """
        hashes = named_pages(hashes)
        controls = self._controls(hashes)
        keys = self.keys(hashes) if controls.load else []
        if not keys:
            return 0
        holder = self._holder("ask")
        plan = self._lookup(keys, holder, time.monotonic() + self._wait_s if until is None else until, controls)
        self._count_lookup(len(keys), plan.chunks)
        if not plan.chunks:
            self.cache.end(holder)
            return 0
        self._promise(holder, keys, plan)
        return plan.chunks

    def ready(self, hashes: Sequence[str], asker: str) -> int:
        """How many leading pages can be read at once. They stay until `forget_asker`, or the asker's next lookup.

        Never waits: pages in lower tiers are promoted meanwhile, and found by a later lookup.
        """
        hashes = named_pages(hashes)
        controls = self._controls(hashes)
        keys = self.keys(hashes) if controls.load else []
        if not keys:
            self.forget_asker(asker)
            return 0
        plan = self._plan(keys, asker, controls, may_wait=True)
        if self._known.is_new(asker):
            self._count_lookup(len(keys), plan.chunks)
        if plan.chunks or plan.ended is Ended.PENDING:
            self._promise(asker, keys, plan)
        else:
            self.forget_asker(asker)
        return plan.chunks

    def forget_asker(self, asker: str) -> None:
        """Release the pages promised to it."""
        with self._lock:
            self._promises.pop(asker, None)
        self.cache.end(asker)

    def trailing(self, hashes: Sequence[str], window: int, most: int) -> list[int]:
        """Of the prefixes of `hashes`, the `most` longest whose last `window` pages (all, if there are fewer) are held.

        As lengths in pages, ascending. Fewer if time runs out.
        """
        until = time.monotonic() + self._wait_s
        found: list[int] = []
        length = len(hashes)
        while length > 0 and len(found) < most and time.monotonic() < until + _SEARCH_S:
            first = max(0, length - window)
            run = self.held(hashes[first:length], until)
            if run == length - first:
                found.append(length)
                length -= 1
            else:
                length = first + run  # no window may contain the missing page
        return found[::-1]

    def read(self, hashes: Sequence[str], slots: Sequence[int], copier: Copier | None = None) -> list[bool]:
        """Copy pages to `slots` (the first slot of each), as far as they are held. False: the bytes are unspecified.

        copier: between chunks and memory other than the host pool.
        """
        requested, hashes = len(hashes), named_pages(hashes)
        keys = self.keys(hashes)
        if not keys:
            return [False] * requested
        reader = f"{self.name}-read-{threading.get_ident()}"  # unique, because a thread makes one read at a time
        tiers = self._promised(keys)
        if tiers and (lease := self.lease(keys, reader)) is not None:
            good = self._copy_out(lease, slots, copier, tiers)
        else:
            try:
                plan = self._lookup(keys, reader, time.monotonic() + self._wait_s, self._controls(hashes))
                tiers = dict(zip(keys, plan.tiers, strict=False))
                lease = self.lease(keys[: plan.chunks], reader)
                good = 0 if lease is None else self._copy_out(lease, slots, copier, tiers)
            finally:
                self.cache.end(reader)
        self.end_promises(keys)
        self.received(hashes[:good])
        return [number < good for number in range(requested)]

    def end_promises(self, read: Iterable[ChunkKey]) -> None:
        """These pages were read: end the promises of which one is the last."""
        keys = set(read)
        with self._lock:
            done = [holder for holder, promise in self._promises.items() if promise.last in keys]
            for holder in done:
                del self._promises[holder]
        self._end(done)

    def write(
        self,
        hashes: Sequence[str],
        slots: Sequence[int],
        before: Sequence[str] = (),
        copier: Copier | None = None,
        *,
        behind: Sequence[str] = (),
    ) -> list[bool]:
        """Copy pages from `slots` where they are not held yet. False: there was no room, or it is not to be stored.

        before: the hashes of the prompt's pages before these, so that none of them is evicted to make room.
        behind: the same if they are in another pool.
        """
        controls = self._requests.of(hashes, before or behind)
        named = len(named_pages(hashes))
        storable = next((number for number, each in enumerate(controls[:named]) if not each.store), named)
        tenant = self._requests.tenant([*before, *behind, *hashes])  # generated pages are known by those before them
        answers: list[bool] = []
        for options, alike in itertools.groupby(controls[:storable], key=_store_options):
            first, last = len(answers), len(answers) + len(list(alike))
            # One call takes only so many keys: the head of a longer prompt may be evicted by its own tail.
            in_front = [*before, *hashes[:first]][max(0, len(before) + last - MAX_KEYS) :]
            answers += self._write(hashes[first:last], slots[first:last], in_front, copier, options, tenant=tenant)
        self.received(hashes)
        return answers + [False] * (len(hashes) - storable)

    def _write(
        self,
        hashes: Sequence[str],
        slots: Sequence[int],
        before: Sequence[str],
        copier: Copier | None,
        options: StoreOptions,
        *,
        tenant: bytes,
    ) -> list[bool]:
        # In this order: pages not in doubt before the keys were made have the weights that the keys name.
        in_doubt = self._holds_old_pages()
        keys = self.keys(hashes, tenant=tenant)
        in_front = self.keys(before, tenant=tenant)
        if in_doubt or not keys or self._holds_old_pages():
            return [False] * len(hashes)
        place = dict(zip(keys, slots, strict=True))
        holder = self._holder("write")
        try:
            lease = self.cache.begin_store([*in_front, *keys], holder, **options)
            if not place.keys() >= set(lease.keys):
                # An earlier page has left the pool, and its bytes are not available to be written again.
                self.cache.release(lease)
                lease = self.cache.begin_store(keys, holder, **options)
            if lease.refused:
                self.cache.release(lease)
                self._end_all()
                lease = self.cache.begin_store(keys, holder, **options)
            failed = bool(lease.refused)
            if lease.keys:
                try:
                    self._copy_in(lease, place, copier)
                except CopyFailed as error:  # also pages that the format cannot represent (docs/formats/quantised.md)
                    failed = True
                    self.cache.release(lease)
                    _log.warning("pages could not be stored and were discarded: %s", error)
            self._figures.add("stores_failed", int(failed))
            if not failed:
                return [True] * len(keys)
            held = self._lookup(keys, holder, 0.0, NO_CONTROLS).chunks
            return [number < held for number in range(len(keys))]
        finally:
            self.cache.end(holder)

    def _copy_in(self, lease: WriteLease, place: Mapping[ChunkKey, int], copier: Copier | None) -> None:
        """Copy the leased pages from their slots, and commit them."""
        pool = self.cache.pool
        if not lies_in(lease, pool):
            raise CopyFailed("the cache server was started again")
        with self._copier(copier, pool) as binding:
            plan = self.plan(zip(lease.extents, (place[key] for key in lease.keys), strict=True))
            await_copies([binding.store(plan)])
        self.cache.commit(lease)
        self._figures.add("stored_tokens", len(lease.keys) * self.pages.page_slots)
        self._figures.add("stored_bytes", len(lease.keys) * self.pages.format.nbytes)
        self._figures.look_at(self.cache)

    def close(self) -> None:
        """Release the pool's memory, and everything promised. No call may be in progress."""
        self._end_all()
        with self._lock:
            every, self._bindings = self._bindings, []
        for _, binding in every:
            binding.unbind()

    def received(self, hashes: Sequence[str]) -> None:
        """The engine has these pages, or a lease on them: end the holds of those that were handed over."""
        self._requests.received(hashes)

    def _notify_taken(self, hashes: Sequence[str]) -> None:
        if keys := self.keys(named_pages(hashes)):
            self.cache.received(keys)

    def turn_ended(self, hashes: Sequence[str]) -> None:
        """A request with these pages ended its user's turn."""
        if keys := self.keys(named_pages(hashes)):
            self.cache.turn_ended(keys)

    def _controls(self, hashes: Sequence[str]) -> Controls:
        """The controls of the request whose prompt ends with these pages."""
        controls = self._requests.of(hashes[-1:])[0] if hashes else NO_CONTROLS
        return controls if (controls.use or self._use) != "never" else msgspec.structs.replace(controls, load=False)

    def _plan(self, keys: Sequence[ChunkKey], holder: str, controls: Controls, *, may_wait: bool) -> LookupPlan:
        costs = self._prefill.costs(keys[0].digest.hex()) if (controls.use or self._use) == "auto" else None
        if measured := self._prefill.take_measured():
            self.cache.measured(measured)
        waits = may_wait and controls.promote
        return self.cache.lookup(
            keys, holder, shape=self._shape, wait_for_promotion=waits, costs=costs, tiers=controls.tiers
        )

    def _lookup(self, keys: Sequence[ChunkKey], holder: str, until: float, controls: Controls) -> LookupPlan:
        while True:
            may_wait = time.monotonic() < until
            plan = self._plan(keys, holder, controls, may_wait=may_wait)
            if plan.ended is not Ended.PENDING or not may_wait:
                return plan
            time.sleep(_ASK_AGAIN_S)

    def lease(self, keys: Sequence[ChunkKey], holder: str) -> ReadLease | None:
        """Lease exactly these pages, if all can be read at once. The lease ends when it is released, or with its
        holder.
        """
        if not keys:
            return None
        answer = self.cache.load(keys, holder)
        return answer if isinstance(answer, ReadLease) else None

    def tiers_of(self, asker: str) -> Mapping[ChunkKey, str]:
        """The pages promised to it, and the tiers that they come from."""
        with self._lock:
            promise = self._promises.get(asker)
            return {} if promise is None else promise.pages

    def count_loaded(self, lease: ReadLease, tiers: Mapping[ChunkKey, str], *, is_good: bool) -> None:
        """A load of these pages has ended."""
        self._figures.add("loads", 1)
        if not is_good:
            self._figures.add("loads_failed", 1)
            return
        tokens = self.pages.page_slots
        self._figures.add("loaded_tokens", len(lease.keys) * tokens)
        self._figures.add("loaded_bytes", len(lease.keys) * self.pages.format.nbytes)
        by_tier = Counter(tiers.get(key, TIER) for key in lease.keys)
        self._figures.given({tier: pages * tokens for tier, pages in by_tier.items()})
        self._figures.look_at(self.cache)

    def _count_lookup(self, asked_pages: int, found_pages: int) -> None:
        self._figures.add("lookups", 1)
        self._figures.add("asked_tokens", asked_pages * self.pages.page_slots)
        self._figures.add("found_tokens", found_pages * self.pages.page_slots)

    def _promised(self, keys: Sequence[ChunkKey]) -> Mapping[ChunkKey, str]:
        """The tiers of a promise that covers all of these pages; empty if there is none. It may have ended by the time
        that the caller leases them."""
        with self._lock:
            for promise in self._promises.values():
                if keys[0] in promise.pages and all(key in promise.pages for key in keys):
                    return promise.pages
        return {}

    def _copy_out(
        self, lease: ReadLease, slots: Sequence[int], copier: Copier | None, tiers: Mapping[ChunkKey, str]
    ) -> int:
        """Copy the leased pages to the leading slots, and release them; returns how many are good: all or none."""
        pool = self.cache.pool
        try:
            if lies_in(lease, pool):
                with self._copier(copier, pool) as binding:
                    await_copies([binding.load(self.plan(zip(lease.extents, slots, strict=False)))])
        finally:
            # Bytes that did not stay in place while they were read may belong to another page.
            is_good = self.cache.release(lease)
        self.count_loaded(lease, tiers, is_good=is_good)
        return len(lease.keys) if is_good else 0

    def plan(self, pairs: Iterable[tuple[HostExtent, int]]) -> TransferPlan:
        """A plan for pages between the host pool and the first slot of each."""
        tokens, listed = self.pages.page_slots, list(pairs)
        if any(slot % tokens for _, slot in listed):  # in no block of a page's size, as a move would have it
            return TransferPlan(tuple(Copy(extent, 0, slot, tokens) for extent, slot in listed), tokens)
        extents, pages = [extent for extent, _ in listed], [slot // tokens for _, slot in listed]
        sizes = {"chunk_tokens": tokens, "block_tokens": tokens}
        return plan_transfer(extents, pages, first_token=0, last_token=len(pages) * tokens, **sizes)

    @contextmanager
    def _copier(self, given: Copier | None, pool: HostPool | MappedPool) -> Iterator[Copier]:
        """The given copier, bound to this pool temporarily; else this thread's own."""
        if given is not None:
            binding = PoolBinding(given)
            try:
                yield binding.on(pool)
            finally:
                binding.unbind()
            return
        mine: PoolBinding[Copier] | None = getattr(self._mine, "binding", None)
        if mine is None:
            mine = self._mine.binding = PoolBinding(self.pages.copier())
            with self._lock:
                # SGLang replaces its threads whenever it empties its caches. What one of them has bound would keep the
                # pool of a server mapped that has been replaced since.
                ended = [each for each in self._bindings if not each[0].is_alive()]
                self._bindings = [each for each in self._bindings if each not in ended]
                self._bindings.append((threading.current_thread(), mine))
            for _, binding in ended:
                binding.unbind()
        yield mine.on(pool)

    def _promise(self, holder: str, keys: Sequence[ChunkKey], plan: LookupPlan) -> None:
        pages = dict(zip(keys, plan.tiers, strict=False))
        with self._lock:
            self._promises[holder] = _Promise(pages, keys[plan.chunks - 1] if pages else None)
            self._promises.move_to_end(holder)
            surplus = [self._promises.popitem(last=False)[0] for _ in range(len(self._promises) - _PROMISES)]
        self._end(surplus)

    def _holder(self, what: str) -> str:
        return f"{self.name}-{what}-{next(self._numbers)}"

    def _end(self, holders: Iterable[str]) -> None:
        for holder in holders:
            self.cache.end(holder)

    def _end_all(self) -> None:
        with self._lock:
            holders = list(self._promises)
            self._promises.clear()
        self._end(holders)
