"""Pages of a hand-over in and out of a real cache: all of them, or the reason why not, and never another request's."""

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_core.clock import HandClock
from kv_core.transfer import TransferPlan
from kv_eviction import LruPolicy
from kv_sglang.exchange import Exchange, IncomingRoom, Lanes, OutgoingRoom
from kv_sglang.names import Names
from kv_sglang.pages import PageStore
from kv_sglang.pools import describe
from kv_testing.faults import FaultyTier
from kv_testing.wait import joined, until
from kv_tiers import HostConfig, HostPool, LocalCache, build_local_cache, chunk_header
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.tiers.dram import DramTier

WEIGHTS = LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0))
PAGE = 4
TAIL = 3
Rows = Callable[[Any, Sequence[int]], torch.Tensor]
MakePool = Callable[..., Any]


def names(pages: int, seed: str = "", tail_tokens: int = 0) -> Names:
    return Names(tuple(hashlib.sha256(f"{seed}{each}".encode()).hexdigest() for each in range(pages)), tail_tokens)


def slots(*pages: int) -> list[int]:
    return [page * PAGE for page in pages]


def always() -> bool:
    return True


def filled(make_pool: MakePool, seed: int) -> Any:
    pool = make_pool("mha", "page_first")
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


class Now:
    """Nothing that was enqueued before is still to be done."""

    def synchronize(self) -> None:
        return None


class Side:
    """One engine's pool and its exchange. before_copy: is called before each copy."""

    def __init__(
        self,
        cache: LocalCache,
        pool: Any,
        *,
        wait_s: float = 0.0,
        hold_s: float = 30.0,
        in_doubt: bool = False,
        weights: LiveWeights = WEIGHTS,
    ) -> None:
        self.pool = pool
        pages = describe(pool, "kv", "auto")
        fingerprint = pages.format.fingerprint
        space = LiveKeySpace(
            weights, kv_dtype=pages.dtype, format_fingerprint=fingerprint, world=1, chain=f"sha256:{PAGE}"
        )
        self.store = PageStore(cache, space, pages, shard=0, wait_s=0.0)
        self.before_copy: Callable[[], object] = lambda: None
        copier = pages.copier()
        for name in ("store", "load"):
            setattr(copier, name, self._first(getattr(copier, name)))
        self.exchange = Exchange(self.store, copier, lambda: in_doubt, wait_s=wait_s, hold_s=hold_s)

    def _first(self, copy: Callable[[TransferPlan], Any]) -> Callable[[TransferPlan], Any]:
        def copied(plan: TransferPlan) -> Any:
            self.before_copy()
            return copy(plan)

        return copied


@pytest.fixture
def make_side(make_pool: MakePool) -> Iterator[Callable[..., Side]]:
    """Sides at one cache of eight chunks, with which nothing is left over in the end."""
    made: list[Side] = []
    nbytes = describe(make_pool("mha", "page_first"), "kv", "auto").format
    cache = build_local_cache(
        HostConfig(capacity_bytes=8 * slot_bytes_for(nbytes.nbytes)),
        group_bytes=(nbytes.nbytes,),
        fingerprint=nbytes.fingerprint,
    )

    def make(seed: int = 1, **settings: Any) -> Side:
        made.append(Side(cache, filled(make_pool, seed), **settings))
        return made[-1]

    yield make
    for side in made:
        side.exchange.close()
    counts = cache.counts()
    assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
    cache.close()


class Tiered:
    """Two sides at a cache of eight chunks over a tier with injected faults. clock: by which the cache waits."""

    def __init__(self, make_pool: MakePool, **settings: float) -> None:
        pages = describe(make_pool("mha", "page_first"), "kv", "auto").format
        self.clock = HandClock()
        self.tier = FaultyTier(DramTier(HostPool.anonymous("below", pages.nbytes, 64), LruPolicy()))
        self._lane = Lane(self.tier, chunk_header.format_id(pages.fingerprint))
        self.cache = LocalCache(
            HostPool.anonymous("pool", pages.nbytes, 8),
            policy=LruPolicy(),
            clock=self.clock,
            lanes=[(self._lane, "through")],
        )
        self.prefill, self.decode = (Side(self.cache, filled(make_pool, seed), **settings) for seed in (1, 2))

    def store_below(self, named: Names) -> None:
        """Store these pages until only the tier has them."""
        for each in (named, names(4, "crowd"), names(4, "more of it")):
            hashes = each.hashes
            assert self.prefill.store.write(hashes, slots(*range(len(hashes)))) == [True] * len(hashes)
            assert self._lane.drain(10)
            until(lambda: not any(state.spill.under_way for state in self.cache.lower.states()))
        assert self.cache.lookup(self.prefill.store.keys(named.hashes), "asker").chunks == 0

    def close(self) -> None:
        self.tier.let_go()
        for side in (self.prefill, self.decode):
            side.exchange.close()
            side.store.close()
        until(lambda: not self.cache.counts().chunks_reserved)
        counts = self.cache.counts()
        assert counts.read_leases == counts.write_leases == 0
        self.cache.close()


@pytest.fixture
def make_tiered(make_pool: MakePool) -> Iterator[Callable[..., Tiered]]:
    made: list[Tiered] = []

    def make(**settings: Any) -> Tiered:
        made.append(Tiered(make_pool, **settings))
        return made[-1]

    yield make
    for tiered in made:
        tiered.close()


def of(*pages: int) -> list[int]:
    return [slot for page in pages for slot in range(page * PAGE, (page + 1) * PAGE)]


def test_pages_arrive_with_the_partial_one(make_side: Callable[..., Side], rows_of: Rows) -> None:
    prefill, decode = make_side(1), make_side(2)
    named = names(3, tail_tokens=TAIL)
    assert prefill.exchange.put(named, 0, slots(5, 1), always) == ""
    assert prefill.exchange.put(named, 2, slots(3), always) == ""
    assert decode.exchange.get(named, 0, slots(0, 2, 4), always, threading.Lock()) == ""
    assert torch.equal(rows_of(decode.pool, of(0, 2)), rows_of(prefill.pool, of(5, 1)))
    assert torch.equal(rows_of(decode.pool, of(4)[:TAIL]), rows_of(prefill.pool, of(3)[:TAIL]))
    # What the partial page leaves of its chunk is its own, as the rest of the block may be another request's.
    assert torch.equal(rows_of(decode.pool, of(4)[TAIL:]), rows_of(prefill.pool, of(3)[: PAGE - TAIL]))


def test_what_the_decode_engine_has_is_not_sent(make_side: Callable[..., Side], rows_of: Rows) -> None:
    prefill, decode = make_side(1), make_side(2)
    named = names(3)
    assert prefill.exchange.put(named, 2, slots(3), always) == ""
    assert decode.exchange.get(named, 2, slots(1), always, threading.Lock()) == ""
    assert torch.equal(rows_of(decode.pool, of(1)), rows_of(prefill.pool, of(3)))


def test_pages_that_the_decode_engine_has_are_held_with_the_others_until_it_does_not_need_them(
    make_side: Callable[..., Side],
) -> None:
    """Whoever computed them before, and if it was long ago."""
    prefill, decode = make_side(1), make_side(2)
    named, cache = names(3), prefill.store.cache
    assert isinstance(cache, LocalCache)
    assert prefill.store.write(named.hashes[:2], slots(5, 1)) == [True, True]
    assert prefill.exchange.put(named, 2, slots(3), always) == ""
    assert decode.exchange.get(named, 2, slots(1), always, threading.Lock()) == ""
    assert cache.holds.chunks == 2
    decode.exchange.release_pages(named, 2)
    assert cache.holds.chunks == 0


def test_nothing_is_kept_that_was_read_after_the_request_ended(make_side: Callable[..., Side]) -> None:
    """SGLang frees a request's blocks at once, and by the end of the copy another request may have written there."""
    side = make_side()
    outgoing = OutgoingRoom(7, names(2))
    side.before_copy = outgoing.close
    assert side.exchange.put(outgoing.names, 0, slots(0, 1), lambda: outgoing.is_open) == "the request has ended"
    assert side.store.cache.counts().chunks_resident == 0


def test_nothing_is_written_once_a_request_is_closed(make_side: Callable[..., Side], rows_of: Rows) -> None:
    prefill, decode = make_side(1), make_side(2)
    assert prefill.exchange.put(names(2), 0, slots(0, 1), always) == ""
    before = rows_of(decode.pool, of(0, 1)).clone()
    incoming = IncomingRoom(names(2), 0, slots(0, 1), aux_index=0, loaded=0, ready=Now(), attempt=b"attempt1")
    incoming.close()
    said = decode.exchange.get(incoming.names, 0, incoming.slots, lambda: incoming.is_open, incoming.lock)
    assert said == "the request has ended"
    assert torch.equal(rows_of(decode.pool, of(0, 1)), before)


def test_a_request_is_closed_only_when_nothing_is_being_written(make_side: Callable[..., Side]) -> None:
    """So SGLang can give the blocks to another request as soon as this one is closed."""
    prefill, decode = make_side(1), make_side(2)
    assert prefill.exchange.put(names(1), 0, slots(0), always) == ""
    incoming = IncomingRoom(names(1), 0, slots(0), aux_index=0, loaded=0, ready=Now(), attempt=b"attempt1")
    copying, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        copying.set()
        assert go_on.wait(30)

    decode.before_copy = hold
    arguments = (incoming.names, 0, incoming.slots, lambda: incoming.is_open, incoming.lock)
    load = threading.Thread(target=decode.exchange.get, args=arguments)
    load.start()
    assert copying.wait(30)
    close = threading.Thread(target=incoming.close)
    close.start()
    assert incoming.lock.locked() and incoming.is_open
    go_on.set()
    load.join(30)
    close.join(30)
    assert not incoming.is_open


def test_a_request_is_closed_while_a_new_pool_s_memory_is_made_ready(make_side: Callable[..., Side]) -> None:
    """SGLang's scheduler closes it, and after a restart of the server this may take seconds on a GPU."""
    prefill, decode = make_side(1), make_side(2)
    assert prefill.exchange.put(names(1), 0, slots(0), always) == ""
    incoming = IncomingRoom(names(1), 0, slots(0), aux_index=0, loaded=0, ready=Now(), attempt=b"attempt1")
    attaching, go_on = threading.Event(), threading.Event()
    copier = decode.exchange._binding._copier
    attach = copier.attach

    def attach_slowly(pool: str, view: memoryview) -> None:
        attaching.set()
        assert go_on.wait(30)
        attach(pool, view)

    copier.attach = attach_slowly  # type: ignore[method-assign]
    said: list[str] = []

    def load() -> None:
        said.append(decode.exchange.get(incoming.names, 0, incoming.slots, lambda: incoming.is_open, incoming.lock))

    loading = threading.Thread(target=load)
    loading.start()
    assert attaching.wait(30)
    closing = threading.Thread(target=incoming.close, daemon=True)
    closing.start()
    try:
        joined(closing, within_s=10)
    finally:
        go_on.set()
        joined(loading)
    assert said == ["the request has ended"]


def test_a_page_that_is_not_there_is_named(make_side: Callable[..., Side]) -> None:
    prefill, decode = make_side(1), make_side(2)
    named = names(3)
    assert prefill.exchange.put(named, 0, slots(0, 1), always) == ""
    said = decode.exchange.get(named, 0, slots(0, 1, 2), always, threading.Lock())
    assert said == "page 2 of the prompt is not in the cache"


def test_a_page_that_a_slower_tier_has_only_now_is_loaded(make_tiered: Callable[..., Tiered], rows_of: Rows) -> None:
    """Another host's server may list pages a moment after its engine has said that they are there."""
    tiered = make_tiered(wait_s=10.0)
    named, asks = names(2), itertools.count()

    def is_wanted() -> bool:
        if next(asks) == 1:  # they were looked up once, in vain
            tiered.store_below(named)
        return True

    assert tiered.decode.exchange.get(named, 0, slots(0, 1), is_wanted, threading.Lock()) == ""
    assert torch.equal(rows_of(tiered.decode.pool, of(0, 1)), rows_of(tiered.prefill.pool, of(0, 1)))


def test_a_page_of_a_slower_tier_is_waited_for_also_where_nothing_is_held(make_tiered: Callable[..., Tiered]) -> None:
    tiered = make_tiered(wait_s=10.0, hold_s=0.0)
    tiered.store_below(named := names(2))
    assert tiered.decode.exchange.get(named, 0, slots(0, 1), always, threading.Lock()) == ""


def test_a_page_on_its_way_is_waited_for_longer_than_the_cache_waits(make_tiered: Callable[..., Tiered]) -> None:
    tiered = make_tiered(wait_s=0.5)
    named, asks = names(2), itertools.count()
    tiered.store_below(named)
    tiered.tier.fault = "hang"
    began_s = time.monotonic()

    def is_wanted() -> bool:
        match next(asks):
            case 1:  # they are being loaded
                until(lambda: time.monotonic() > began_s + 0.5)
                tiered.clock.advance(2.0)  # for as long as a lookup waits, and longer
            case 4:
                tiered.tier.let_go()
        return True

    assert tiered.decode.exchange.get(named, 0, slots(0, 1), is_wanted, threading.Lock()) == ""


def test_no_room_is_said(make_side: Callable[..., Side]) -> None:
    side = make_side()
    reading = side.store
    assert side.exchange.put(names(4, "a"), 0, slots(0, 1, 2, 3), always) == ""
    assert side.exchange.put(names(4, "b"), 0, slots(0, 1, 2, 3), always) == ""
    assert reading.held(names(4, "a").hashes) == reading.held(names(4, "b").hashes) == 4
    said = side.exchange.put(names(1, "c"), 0, slots(0), always)
    assert said.startswith("no room for 1 of 1 chunks")
    reading.close()


def store_until(side: Side) -> tuple[threading.Thread, threading.Event]:
    """A thread that has reserved a page, and copies it once the event is set."""
    copying, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        copying.set()
        assert go_on.wait(30)

    side.before_copy = hold
    thread = threading.Thread(target=side.exchange.put, args=(names(1), 0, slots(0), always))
    thread.start()
    assert copying.wait(30)
    return thread, go_on


def test_what_another_thread_is_storing_is_waited_for(make_side: Callable[..., Side]) -> None:
    one, other = make_side(1), make_side(1, wait_s=30.0)
    first, go_on = store_until(one)
    said: list[str] = []
    asks = iter([True, True])

    def is_wanted() -> bool:
        if next(asks, None) is None:
            go_on.set()
        return True

    said.append(other.exchange.put(names(1), 0, slots(0), is_wanted))
    first.join(30)
    assert said == [""] and other.store.cache.counts().chunks_resident == 1


def test_another_s_store_is_waited_for_once_our_own_is_done(make_side: Callable[..., Side]) -> None:
    """However long our own copies take."""
    one, other = make_side(1), make_side(1, wait_s=0.5)
    first, go_on = store_until(one)
    asks, began_s = itertools.count(), time.monotonic()
    other.before_copy = lambda: until(lambda: time.monotonic() > began_s + 0.5)

    def is_wanted() -> bool:
        if next(asks) == 2:  # our own pages are stored, and the other's are not there yet
            go_on.set()
            joined(first)
        return True

    assert other.exchange.put(names(2), 0, slots(0, 1), is_wanted) == ""


def test_pages_of_other_weights_are_not_handed_over(make_side: Callable[..., Side]) -> None:
    side = make_side(in_doubt=True)
    assert side.exchange.put(names(1), 0, slots(0), always).startswith("the weights have changed")
    assert side.store.cache.counts().chunks_resident == 0


def test_engines_whose_weights_were_updated_go_on_handing_over(make_side: Callable[..., Side], rows_of: Rows) -> None:
    """Each engine has a name of its own for weights that nothing identifies, and tells the other."""
    model = ServedModel("sglang", "m", None, "float32", dummy_seed=0)
    one, other = LiveWeights(model), LiveWeights(model)
    prefill, decode = make_side(1, weights=one), make_side(2, weights=other)

    def hand_over(seed: str) -> str:
        named = names(2, seed)
        assert prefill.exchange.put(named, 0, slots(0, 1), always) == ""
        given_by = prefill.store.revision
        return decode.exchange.get(named, 0, slots(3, 4), always, threading.Lock(), given_by=given_by)

    assert hand_over("before") == ""
    one.changed("an update")
    assert hand_over("in between") == "page 0 of the prompt is not in the cache"
    other.changed("an update")
    decode.pool.kv_buffer.zero_()
    assert hand_over("after") == ""
    assert torch.equal(rows_of(decode.pool, of(3, 4)), rows_of(prefill.pool, of(0, 1)))
    assert decode.store.held(names(2, "after").hashes) == 0  # what it computes itself is not taken for the other's
    one.changed("an update")
    assert hand_over("again") == ""
    assert decode.exchange.get(names(2, "before"), 0, slots(3, 4), always, threading.Lock()) != ""


def test_a_bug_in_one_hand_over_does_not_end_the_others(
    make_side: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    side = make_side()
    done: list[Exchange] = []
    lanes = Lanes(lambda: side.exchange)
    room = 7

    def fail(_exchange: Exchange) -> None:
        raise RuntimeError("a bug of ours")

    lanes.add(room, fail)
    lanes.add(room, done.append)
    until(lambda: done == [side.exchange])
    assert "a bug of ours" in caplog.text
