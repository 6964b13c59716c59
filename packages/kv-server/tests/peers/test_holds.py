"""Chunks that are kept for another engine: until it has read them or the time is over, and never more than may be."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_server.peers.side import HandedOver, PeerSide, peer_side
from kv_testing.service_contract import assert_adds_up
from kv_testing.tenants import ANN, cache_of, held, store
from kv_testing.tower import FINGERPRINT, Tower
from kv_testing.wait import joined
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ColdConfig
from kv_tiers.testing.tier_contract import content

KEYS = key_chain(3)


def hand_over(cache: LocalCache, keys: list[ChunkKey], hold_s: float = 30.0) -> None:
    cache.commit(cache.begin_store(keys, "w", hold_s=hold_s))


def crowd(cache: LocalCache) -> None:
    """Other prompts, as many as the pool has room for."""
    for number in range(8):
        store(cache, key_chain(1, branch=f"crowd {number}"))


def read(cache: LocalCache, keys: list[ChunkKey]) -> None:
    lease = cache.load(keys, "reader")
    assert isinstance(lease, ReadLease)
    assert cache.release(lease)


def read_as_peer(cache: LocalCache, keys: list[ChunkKey]) -> None:
    reads = peer_side(cache).reads(FINGERPRINT)
    for key in keys:
        with reads.read(key, 1.0) as stored:
            assert stored is not None
            assert cache.holds.chunks > 0


def test_what_is_handed_over_stays_though_its_writer_has_gone_and_the_pool_is_full() -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    hand_over(cache, KEYS)
    cache.end("w")
    crowd(cache)
    assert held(cache, KEYS) == 3
    assert cache.holds.chunks == 3
    assert cache.counts().read_leases == 0
    cache.close()


@pytest.mark.parametrize("reader", [read, read_as_peer])
def test_once_it_was_read_it_leaves_like_anything_else(reader: Callable[[LocalCache, list[ChunkKey]], None]) -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    hand_over(cache, KEYS)
    reader(cache, KEYS[:2])
    assert cache.holds.chunks == 1
    reader(cache, KEYS[2:])
    assert cache.holds.chunks == 0
    crowd(cache)
    assert held(cache, KEYS) == 0
    assert_adds_up(cache.counts())
    cache.close()


def read_repeatedly(cache: LocalCache, keys: list[ChunkKey]) -> None:
    read(cache, [key for key in keys for _ in range(2)])


def take_repeatedly(cache: LocalCache, keys: list[ChunkKey]) -> None:
    cache.received([*keys, *keys])


@pytest.mark.parametrize("reader", [read_repeatedly, take_repeatedly])
def test_a_chunk_named_repeatedly_is_let_go_once(reader: Callable[[LocalCache, list[ChunkKey]], None]) -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    hand_over(cache, KEYS)
    cache.lookup(KEYS, "r")
    reader(cache, KEYS)
    crowd(cache)
    assert held(cache, KEYS) == 3, "they are promised"
    cache.end("r")
    assert len(cache.begin_store(key_chain(8, branch="new"), "w").keys) == 8
    cache.close()


def test_a_peer_that_did_not_take_all_of_it_leaves_it_held() -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    hand_over(cache, KEYS)
    with pytest.raises(ConnectionError), peer_side(cache).reads(FINGERPRINT).read(KEYS[0], 1.0):
        raise ConnectionError
    assert cache.holds.chunks == 3
    cache.close()


def test_what_was_taken_is_kept_no_longer_and_not_again_by_the_next_step_of_the_same_prompt() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    hand_over(cache, KEYS[:2])
    cache.received([*KEYS, *key_chain(1, branch="nobody's")])
    assert cache.holds.chunks == 0
    hand_over(cache, KEYS)
    assert cache.holds.chunks == 1
    clock.advance(31)
    hand_over(cache, KEYS)
    assert cache.holds.chunks == 3
    cache.received(KEYS)
    crowd(cache)
    assert held(cache, KEYS) == 0
    hand_over(cache, KEYS)  # in other slots or the same, they are stored anew
    assert cache.holds.chunks == 3
    cache.close()


def test_what_was_read_is_not_held_again_however_long_the_prompt_takes() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    for chunks in (1, 2, 3):
        hand_over(cache, KEYS[:chunks])
        read(cache, KEYS[chunks - 1 : chunks])  # as it comes, each once
        assert cache.holds.chunks == 0
        clock.advance(20)
    clock.advance(11)  # no step has named them for longer than they are held
    hand_over(cache, KEYS)
    assert cache.holds.chunks == 3
    cache.close()


def test_each_chunk_is_announced_once_when_it_can_be_read_and_while_it_is_kept() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    store(cache, KEYS[:1])
    hand_over(cache, KEYS[:2])
    hand_over(cache, KEYS)
    feed = peer_side(cache).handed_over
    upto, announced = feed.after(0, 0.0, 100)
    assert [(list(one.chain), one.first) for one in announced] == [(KEYS[:1], 0), (KEYS[:2], 1), (KEYS, 2)]
    assert feed.after(upto, 0.0, 100) == (upto, [])
    assert [one.first for one in feed.after(0, 0.0, 4)[1]] == [0, 1]
    assert feed.after(0, 0.0, 4)[0] == announced[1].number
    assert feed.after(0, 0.0, 2)[1] == [announced[0]]
    clock.advance(31)
    assert feed.after(0, 0.0, 100) == (upto, [])
    cache.close()


def test_an_announcement_wakes_who_waits_for_it() -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    found: list[HandedOver] = []
    thread = threading.Thread(target=lambda: found.extend(peer_side(cache).handed_over.after(0, 60.0, 100)[1]))
    thread.start()
    hand_over(cache, KEYS)
    joined(thread)
    assert [list(one.chain) for one in found] == [KEYS]
    cache.close()


def test_when_the_time_is_over_it_leaves_like_anything_else_and_a_renewal_starts_it_anew() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    hand_over(cache, KEYS, 30.0)
    clock.advance(20)
    hand_over(cache, KEYS, 30.0)  # the same prompt for another request: all of it is held
    clock.advance(20)
    crowd(cache)
    assert held(cache, KEYS) == 3
    clock.advance(10.1)
    crowd(cache)
    assert cache.holds.chunks == 0
    assert held(cache, KEYS) == 0
    assert_adds_up(cache.counts())
    cache.close()


def test_a_prompt_stored_in_many_steps_takes_no_more_memory_than_its_chunks() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    for _ in range(50):
        hand_over(cache, KEYS, 30.0)
        clock.advance(1)
    assert len(cache.holds._due) == 3
    assert cache.holds.chunks == 3
    clock.advance(29)
    cache.counts()
    assert cache.holds.chunks == 0
    assert_adds_up(cache.counts())
    cache.close()


def test_when_the_time_is_over_the_tail_leaves_first_whatever_slots_it_is_in() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    store(cache, key_chain(8, branch="before"))
    hand_over(cache, KEYS, 30.0)  # in the slots of the others' tail, the last of them first
    crowd(cache)
    assert held(cache, KEYS) == 3
    cache.end("w")
    for number in range(8):  # each is offered and passed over
        store(cache, key_chain(1, branch=f"more {number}"))
    clock.advance(31)
    store(cache, key_chain(6, branch="after"))
    assert [cache._index.find(key) is not None for key in KEYS] == [True, True, False]
    cache.close()


def test_a_shorter_time_ends_before_a_longer_one_that_was_said_earlier() -> None:
    clock = HandClock()
    cache = cache_of(8, clock=clock, extensions=[PeerSide()])
    hand_over(cache, KEYS, 3600.0)
    other = key_chain(1, branch="other")
    hand_over(cache, other, 1.0)
    clock.advance(2)
    cache.counts()
    assert cache.holds.chunks == 3
    cache.close()


@pytest.mark.parametrize("how", ["forget", "clear", "clear the tenant"])
def test_what_is_forgotten_is_kept_for_nobody(how: str) -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    hand_over(cache, KEYS)
    if how == "forget":
        cache.forget(KEYS)
    elif how == "clear":
        cache.clear()
    else:
        cache.admin.clear_tenant(KEYS[0].tenant)
    assert cache.holds.chunks == 0
    assert cache.counts().slots_used == 0
    cache.close()


def test_a_slot_that_two_chunks_were_held_in_until_the_same_time_is_let_go_once() -> None:
    """The first was forgotten, and the second came into its slot at the same moment."""
    clock, other = HandClock(), key_chain(1, branch="other")
    cache = cache_of(4, clock=clock, extensions=[PeerSide()])
    hand_over(cache, KEYS[:2])
    slot = cache._index.find(KEYS[1])
    cache.forget(KEYS[1:2])
    hand_over(cache, other)
    assert slot is not None and cache._index.find(other[0]) == slot
    clock.advance(31)
    assert_adds_up(cache.counts())
    assert cache.holds.chunks == 0 and not any(cache._index._leases)
    cache.close()


def test_half_of_the_pool_stays_for_others() -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    keys = key_chain(8)
    hand_over(cache, keys)
    assert cache.holds.chunks == 4
    crowd(cache)
    assert held(cache, keys) == 4
    cache.close()


def test_half_of_a_tenants_quota_and_no_more_is_kept() -> None:
    cache = cache_of(8, {ANN: 4}, extensions=[PeerSide()])
    keys = key_chain(4, salt="ann")
    hand_over(cache, keys)
    assert cache.holds.chunks == 2
    hand_over(cache, KEYS[:2])
    assert cache.holds.chunks == 4
    cache.close()


def test_a_store_that_is_given_up_keeps_nothing() -> None:
    cache = cache_of(8, extensions=[PeerSide()])
    cache.release(cache.begin_store(KEYS, "w", hold_s=30.0))
    assert cache.holds.chunks == 0
    assert cache.counts().slots_used == 0
    cache.close()


def test_what_a_slow_tier_is_bringing_is_stored_by_the_engine_that_hands_it_over() -> None:
    """It has computed these chunks, and the engine that they are for waits."""
    tower = Tower(slots=16, extensions=[PeerSide()])
    tower.store_below(KEYS)
    assert tower.ask(KEYS).ended is Ended.PENDING
    lease = tower.cache.begin_store(KEYS, "w", hold_s=30.0)
    assert list(lease.keys) == KEYS
    for key, extent in zip(lease.keys, lease.extents, strict=True):
        tower.cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
    tower.cache.commit(lease)
    assert tower.cache.holds.chunks == 3
    assert tower.ask(KEYS).chunks == 3
    tower.run()  # what it has asked the tier for comes now
    tower.read(KEYS)
    tower.close()


def test_loads_that_hand_overs_have_overtaken_are_among_those_that_may_be_under_way() -> None:
    """Or those of a slow tier fill the pool, and there is no room for what engines hand over."""
    tower = Tower(
        slots=16, cold=ColdConfig(batch_bytes=2 * 4096, prefetch_share=0.5, drain_s=0.2), extensions=[PeerSide()]
    )
    one, other = (key_chain(8, branch=name) for name in ("one", "other"))
    for keys in (one, other):
        tower.store_below(keys)
    assert tower.ask(one).ended is Ended.PENDING
    hand_over(tower.cache, one)
    read(tower.cache, one)
    tower.ask(other, "s")
    assert tower.cache.counts().chunks_reserved == 8
    lease = tower.cache.begin_store(KEYS, "w", hold_s=30.0)
    assert lease.refused == ""
    tower.cache.release(lease)
    tower.run()  # what has been asked for comes now, and is nobody's any more
    assert tower.ask(other, "s").ended is Ended.PENDING
    assert tower.cache.counts().chunks_reserved == 8
    tower.close()


# Retained.


def retain(cache: LocalCache, keys: list[ChunkKey], retain_s: float = 30.0, hold_s: float = 0.0) -> None:
    cache.commit(cache.begin_store(keys, "w", retain_s=retain_s, hold_s=hold_s))


@pytest.mark.parametrize("reader", [read, read_as_peer, lambda cache, keys: cache.received(keys)])
def test_what_is_retained_stays_however_often_it_is_read(reader: Callable[[LocalCache, list[ChunkKey]], None]) -> None:
    clock = HandClock()
    cache = cache_of(16, clock=clock, extensions=[PeerSide()])
    retain(cache, KEYS)
    for _ in range(3):
        reader(cache, KEYS)
        for number in range(16):
            store(cache, key_chain(1, branch=f"crowd {number}"))
    assert held(cache, KEYS) == cache.holds.chunks == 3 and len(cache.holds._due) == 3
    clock.advance(31)
    store(cache, key_chain(16, branch="after"))
    assert held(cache, KEYS) == cache.holds.chunks == 0
    assert_adds_up(cache.counts())
    cache.close()


def test_a_hand_over_may_end_before_or_after_what_it_retains() -> None:
    for retain_s, hold_s, left in ((10.0, 30.0, 0), (30.0, 10.0, 3)):
        clock = HandClock()
        cache = cache_of(16, clock=clock, extensions=[PeerSide()])
        retain(cache, KEYS, retain_s, hold_s)
        read(cache, KEYS)
        clock.advance(11)
        cache.counts()
        assert cache.holds.chunks == left
        cache.close()


def test_nobody_waits_for_what_is_retained() -> None:
    cache = cache_of(16, extensions=[PeerSide()])
    retain(cache, KEYS)
    assert peer_side(cache).handed_over.after(0, 0.0, 100)[1] == []
    cache.close()


def test_what_is_held_already_is_retained_by_the_next_request_for_it() -> None:
    cache = cache_of(16, extensions=[PeerSide()])
    store(cache, KEYS)
    retain(cache, KEYS)
    assert cache.holds.chunks == 3
    cache.close()


def test_a_quarter_of_the_pool_or_of_a_quota_and_no_more_is_retained() -> None:
    """So whoever has everything retained leaves the others three quarters, and hand-overs a quarter."""
    cache = cache_of(16, {ANN: 8}, extensions=[PeerSide()])
    retain(cache, key_chain(8, salt="ann"))
    assert cache.holds.chunks == 2
    retain(cache, key_chain(8))
    retain(cache, key_chain(8, branch="other"))
    assert cache.holds.chunks == 2 + 2  # of the eight slots that no quota has
    hand_over(cache, key_chain(8, branch="another"))
    assert cache.holds.chunks == 2 + 4
    cache.close()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "retain", "read", "pass"]), st.integers(0, 3), st.sampled_from([1.0, 10.0, 30.0])
        ),
        max_size=30,
    )
)
def test_holds_against_a_model(deeds: list[tuple[str, int, float]]) -> None:
    """Each of four chunks: until when it is retained, and until when it is held for another engine."""
    clock = HandClock()
    cache = cache_of(16, clock=clock)
    chains = [key_chain(1, branch=str(number)) for number in range(4)]
    retained, handed, was_read = [0.0] * 4, [0.0] * 4, [0.0] * 4
    for deed, number, seconds in deeds:
        now_s = clock.now_s()
        match deed:
            case "hold":
                hand_over(cache, chains[number], seconds)
                until_s = now_s + seconds
                is_held = max(retained[number], handed[number]) > now_s
                if not is_held and now_s < was_read[number]:
                    was_read[number] = max(was_read[number], until_s)
                else:
                    handed[number] = max(handed[number], until_s)
            case "retain":
                retain(cache, chains[number], seconds)
                retained[number] = max(retained[number], now_s + seconds)
            case "read":
                store(cache, chains[number])
                until_s = max(retained[number], handed[number])
                read(cache, chains[number])
                if until_s > now_s:
                    was_read[number] = until_s
                handed[number] = 0.0
            case _:
                clock.advance(seconds)
        cache.counts()
        now_s = clock.now_s()
        assert cache.holds.chunks == sum(max(pair) > now_s for pair in zip(retained, handed, strict=True))
    assert_adds_up(cache.counts())
    cache.close()
