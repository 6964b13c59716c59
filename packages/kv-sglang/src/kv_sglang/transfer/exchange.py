"""Moves a prompt's pages between SGLang's blocks on the device and the cache, for a hand-over.

Unlike a hit, a hand-over has no other way out: SGLang aborts a request whose pages do not arrive. So a page is stored
whatever the request says of storing, is held for the engine that decodes, and is waited for within the bounds of
`handover`. Every call comes from a thread that may wait.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kv_core.keys import ChunkKey
from kv_core.lookup import Ended
from kv_core.service import ReadLease, WriteLease
from kv_core.transfer import Copy, TransferPlan
from kv_cuda import Copier
from kv_tiers.messages import MAX_KEYS

from kv_sglang.names import Names
from kv_sglang.pages import PageStore, PoolBinding

_FIRST_WAIT_S: Final = 0.001
_LONGEST_WAIT_S: Final = 0.05
_NUMBERS: Final = itertools.count()

Wanted = Callable[[], bool]
"""Whether SGLang still has the pages for this request. Once false, they may be another's."""


class Exchange:
    """One thread's. copier: between chunks and the device."""

    def __init__(
        self, store: PageStore, copier: Copier, in_doubt: Callable[[], bool], *, wait_s: float, hold_s: float
    ) -> None:
        """in_doubt: whether what the engine has may be of other weights than the key space's.
        wait_s: how long another's store, room, or a page that is not there, is waited for.
        hold_s: how long what is stored is held, and how long a page that is on its way is waited for.
        """
        self._store = store
        self._binding = PoolBinding(copier)
        self._in_doubt = in_doubt
        self._wait_s = wait_s
        self._hold_s = hold_s
        self._name = f"{store.name}-hand-over-{next(_NUMBERS)}"

    def put(self, names: Names, first: int, slots: Sequence[int], is_wanted: Wanted) -> str:
        """Store pages `first …` of the prompt from `slots`, the first slot of each. Empty, or why they are not there.

        Nothing is stored of what was read after the pages were not wanted any more.
        """
        # In this order: the pages are of the weights that the keys name, if they were so before the keys were made.
        in_doubt = self._in_doubt()
        last = first + len(slots)
        before = self._store.keys(names.hashes[max(0, last - MAX_KEYS) : first])
        keys = self._store.keys(names.hashes[first:last])
        if in_doubt or not keys or self._in_doubt():
            return "the weights have changed, and the engine's caches were not emptied since"
        tail = keys[-1] if names.tail_tokens and last == len(names.hashes) else None
        wait = _Waiting(self._wait_s)
        while is_wanted():
            refused = self._put(before, dict(zip(keys, slots, strict=True)), tail, names.tail_tokens, is_wanted)
            # What another thread is storing is found once that has committed it.
            found = self._store.cache.lookup(keys, self._name).chunks
            self._store.cache.end(self._name)
            if found == len(keys):
                return ""
            if is_wanted() and not wait.again():
                return refused or "another one has not finished storing them"
        return "the request has ended"

    def get(self, names: Names, first: int, slots: Sequence[int], is_wanted: Wanted, lock: threading.Lock) -> str:
        """Load pages `first …` of the prompt to `slots`. Empty, or why they are not there.

        lock: held while the device is written to, so who holds it knows that nothing is written.
        """
        keys = self._store.keys(names.hashes[first : first + len(slots)])
        if not keys:
            return "which weights the engine has is not known"
        cache, missing, coming = self._store.cache, _Waiting(self._wait_s), _Waiting(self._hold_s)
        try:
            while is_wanted():
                plan = cache.lookup(keys, self._name, wait_for_promotion=True)
                if plan.chunks == len(keys) and (lease := self._store.lease(keys, self._name)) is not None:
                    return self._get(lease, slots, is_wanted, lock, dict(zip(keys, plan.tiers, strict=True)))
                if not (coming if plan.ended is Ended.PENDING else missing).again():
                    return f"page {first + plan.chunks} of the prompt is not in the cache"
            return "the request has ended"
        finally:
            cache.end(self._name)

    def need_not(self, hashes: Sequence[str]) -> None:
        """The engine has these pages: they need not be held for it."""
        if keys := self._store.keys(hashes):
            self._store.cache.taken(keys)

    def close(self) -> None:
        """Let the pool's memory go. Nothing may be under way."""
        self._binding.unbind()

    def _put(
        self,
        before: Sequence[ChunkKey],
        place: dict[ChunkKey, int],
        tail: ChunkKey | None,
        tail_tokens: int,
        is_wanted: Wanted,
    ) -> str:
        """Store what is not held; why not all of it."""
        cache = self._store.cache
        keys = list(place)
        try:
            lease = cache.begin_store([*before, *keys], self._name, hold_s=self._hold_s)
            if not place.keys() >= set(lease.keys):
                # An earlier page has left the pool, and its bytes are not here to be written again.
                cache.release(lease)
                lease = cache.begin_store(keys, self._name, hold_s=self._hold_s)
            if lease.keys:
                self._binding.on(cache.pool).store(self._plan(lease, place, tail, tail_tokens)).wait()
                if is_wanted():
                    cache.commit(lease)
            return lease.refused
        finally:
            cache.end(self._name)

    def _plan(
        self, lease: WriteLease, place: dict[ChunkKey, int], tail: ChunkKey | None, tail_tokens: int
    ) -> TransferPlan:
        """A partial page's chunk is filled with its own tokens, so that nothing of another request is in it."""
        pairs = list(zip(lease.keys, lease.extents, strict=True))
        plan = self._store.plan((extent, place[key]) for key, extent in pairs if key != tail)
        if not lease.keys or lease.keys[-1] != tail:
            return plan
        partial = TransferPlan((Copy(pairs[-1][1], 0, place[tail], tail_tokens),), plan.chunk_tokens)
        return TransferPlan(plan.copies + partial.repeated().copies, plan.chunk_tokens)

    def _get(
        self,
        lease: ReadLease,
        slots: Sequence[int],
        is_wanted: Wanted,
        lock: threading.Lock,
        tiers: dict[ChunkKey, str],
    ) -> str:
        cache = self._store.cache
        try:
            with lock:
                if not is_wanted():
                    return "the request has ended"
                plan = self._store.plan(zip(lease.extents, slots, strict=True))
                self._binding.on(cache.pool).load(plan).wait()
        finally:
            # Bytes that did not stay put while they were read may be another page's.
            is_good = cache.release(lease)
        self._store.count_loaded(lease, tiers, is_good=is_good)
        return "" if is_good else "pages left the cache while they were read"


class _Waiting:
    """Pauses that grow, until the time is over."""

    def __init__(self, most_s: float) -> None:
        self._until = time.monotonic() + most_s
        self._next_s = _FIRST_WAIT_S

    def again(self) -> bool:
        """False at once if the time is over."""
        left = self._until - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 2, _LONGEST_WAIT_S)
        return True
