"""Approximations in the pool become exact while their tier is idle, and nobody waits for it or sees half of it."""

import threading

import pytest
from kv_codecs.progressive import HEAD, HEAD_BYTES
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_testing.approximations import CHUNK_BYTES, FORM, KEYS, Small, approximate, exact, payload
from kv_testing.wait import until
from kv_tiers import HostPool, chunk_header
from kv_tiers.cache import upgrade
from kv_tiers.events import events
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.index.life import Life
from kv_tiers.lanes import moving
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read
from kv_tiers.tier_state import Health


def test_what_was_approximate_is_exact_once_the_tier_has_been_idle(small: Small) -> None:
    assert small.read(KEYS) == [approximate(key) for key in KEYS] != [exact(key) for key in KEYS]
    assert small.tier.brought_bytes == 3 * CHUNK_BYTES // 4
    assert small.cache.lower.upgrades.approximations == 3
    small.upgrade()
    assert small.read(KEYS) == [exact(key) for key in KEYS]
    assert (small.upgraded, small.lane.counts().approximate, small.lane.counts().loaded) == (3, 3, 3)
    assert small.cache.lower.upgrades.approximations == 0


def test_only_what_is_missing_is_read(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of it where first parts were not kept; or once, in one call, if a tier cannot read on."""
    whole = [len(payload(key)) for key in KEYS]
    small.read(KEYS[:1])
    small.upgrade()
    assert small.tier.brought_bytes == whole[0]
    monkeypatch.setattr(upgrade, "KEPT_BYTES", 0)
    small.read(KEYS[:2])
    small.upgrade()
    assert small.tier.brought_bytes == whole[0] + CHUNK_BYTES // 4 + whole[1]
    monkeypatch.setattr(moving, "ReadsRemainders", int)
    small.tier.calls.clear()
    small.read(KEYS)
    small.upgrade()
    assert small.tier.calls == ["holds", "load_prefixes", "load"]
    assert small.read(KEYS) == [exact(key) for key in KEYS]


def test_no_upgrade_begins_before_what_a_request_waits_for(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has begun is left between two steps, and goes on later from where it was."""
    monkeypatch.setattr(moving, "STEP_BYTES", 4096)
    small.read(KEYS[:1])
    small.tier.calls.clear()
    asked = False

    def ask() -> None:
        nonlocal asked
        if not asked and small.tier.calls.count("load_remainders") == 2:
            asked = True
            assert small.cache.lookup(KEYS, "other", wait_for_promotion=True).ended is Ended.PENDING

    small.tier.before_rest = ask
    assert small.lane.step()
    assert small.tier.calls == ["load_remainders"] * 2 + ["holds"] * asked + ["load_remainders"] * asked
    assert small.lane.step()
    assert small.tier.calls[-1] == "load_prefixes"
    small.upgrade()
    small.cache.end("other")
    assert small.tier.brought_bytes == sum(len(payload(key)) for key in KEYS)
    assert small.read(KEYS) == [exact(key) for key in KEYS]


def test_lanes_that_are_never_idle_upgrade_a_tenth_of_the_time(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something always waits, for which no step may be late by more than one; and steps take their time."""
    monkeypatch.setattr(moving, "STEP_BYTES", 4096)
    small.read(KEYS[:1])
    small.tier.calls.clear()
    took_s = 0.05
    small.tier.before_rest = lambda: small.clock.advance(took_s)
    answered: list[float] = []
    while small.upgraded == 0 and len(answered) < 2000:
        for _ in range(2):
            assert small.lane.ask(KEYS, lambda _: answered.append(small.clock.now_s()))
        small.clock.advance(0.01)
        asked = small.clock.now_s()
        while len(answered) % 2 == 0 or answered[-1] < asked:
            small.lane.step()
        small.lane.step()
        assert small.clock.now_s() - asked <= took_s + 1e-9
    steps = small.tier.calls.count("load_remainders")
    assert small.upgraded == 1 and steps > 2
    assert steps * took_s <= 0.11 * small.clock.now_s()
    small.upgrade()


def test_what_waits_is_not_left_because_it_was_a_rests_turn_and_there_is_none(small: Small) -> None:
    """A turn that finds nothing to upgrade is no step: the load behind it is done."""
    small.read(KEYS[:1])
    small.clock.advance(1.0)
    small.cache.forget(KEYS[:1])  # so the lane was told of a remainder and there is none
    assert small.cache.lookup(KEYS[1:], "r", wait_for_promotion=True).ended is Ended.PENDING
    assert small.lane.step()
    assert small.cache.counts().chunks_reserved == 0
    assert small.read(KEYS[1:]) == [approximate(key) for key in KEYS[1:]]


@pytest.mark.parametrize("fault", ["down", "bug", "panic", "unreadable", "refuse"])
def test_a_tier_that_fails_costs_one_attempt_and_no_slot(small: Small, fault: str) -> None:
    small.read(KEYS)
    small.tier.before_rest = lambda: setattr(small.tier, "fault", fault)
    assert small.lane.step()
    small.tier.before_rest = lambda: None
    if fault == "unreadable":  # only whole loads have it
        small.tier.fault = ""
    if fault in ("down", "bug", "panic"):
        assert small.lane.health()[0] is Health.DOWN
        small.at_rest()
        assert not small.lane.step()
    small.tier.fault = ""
    small.clock.advance(1.0)
    small.upgrade()
    assert small.lane.health()[0] is Health.UP
    found = small.read(KEYS)
    assert found[1:] == [exact(key) for key in KEYS[1:]]
    assert found[0] in (approximate(KEYS[0]), exact(KEYS[0]))
    assert small.upgraded == 2 + (found[0] == exact(KEYS[0]))


def test_damage_in_the_third_part_is_found_and_the_approximation_stays(small: Small) -> None:
    small.read(KEYS)
    spoil(small, KEYS[1], part=3)
    small.upgrade()
    assert small.lane.counts().damaged == 1
    assert small.read(KEYS) == [exact(KEYS[0]), approximate(KEYS[1]), exact(KEYS[2])]
    small.upgrade()
    assert small.upgraded == 2
    small.cache.forget([KEYS[1]])
    plan = small.cache.lookup(KEYS, "r", wait_for_promotion=True)
    assert plan.chunks == 1 and plan.ended is not Ended.PENDING  # it is no longer found below


def spoil(small: Small, key: ChunkKey, part: int) -> None:
    """One bit in the middle of this part of what the tier has."""
    stored = payload(key)
    sizes = HEAD.unpack(stored[: HEAD.size])[2:5]
    at = HEAD_BYTES + sum(sizes[: part - 1]) + sizes[part - 1] // 2
    pool = small.dram._pool
    start = bytes(pool.view).index(stored[:64])
    pool.view[start + at] ^= 4


def test_what_was_stored_anew_below_is_not_taken_for_damaged(small: Small) -> None:
    """The rest of another payload, behind the first parts of the old one, is no chunk: it is read again in one call."""
    small.read(KEYS[:1])
    small.dram.discard(KEYS[:1])
    lane, outcomes = Lane(small.dram, FORM, threads=0), list[object]()
    pages = aligned_pages(slot_bytes_for(CHUNK_BYTES))
    pages[:CHUNK_BYTES] = exact(KEYS[0])
    lane.store([Outgoing(KEYS[0], None, pages, CHUNK_BYTES)], outcomes.extend)
    lane.step()
    small.upgrade()
    assert small.lane.counts().damaged == 0
    assert small.read(KEYS[:1]) == [exact(KEYS[0])]


@pytest.mark.parametrize("again", [False, True])
def test_a_chunk_that_is_forgotten_meanwhile_is_not_brought_back(small: Small, again: bool) -> None:
    """Nor is one that was stored again under its key since: what an engine computes stays as it is."""
    small.read(KEYS[:1])

    def forget() -> None:
        small.cache.forget(KEYS[:1])
        if again:
            lease = small.cache.begin_store(KEYS[:1], "w")
            (extent,) = lease.extents
            small.cache.pool.view[extent.offset : extent.offset + CHUNK_BYTES] = b"c" * CHUNK_BYTES
            small.cache.commit(lease)

    small.tier.before_rest = forget
    small.upgrade()
    assert small.upgraded == 0
    small.at_rest()
    if again:
        assert small.read(KEYS[:1]) == [b"c" * CHUNK_BYTES]
    else:
        assert small.cache.counts().chunks_resident == 0


@pytest.mark.parametrize("how", ["forget", "clear"])
@pytest.mark.parametrize("when", ["paused", "exchanged", "wanted"])
def test_what_is_forgotten_gives_everything_back(
    small: Small, monkeypatch: pytest.MonkeyPatch, when: str, how: str
) -> None:
    small.read(KEYS[:1])
    held: list[ReadLease] = []
    if when == "paused":
        monkeypatch.setattr(moving, "STEP_BYTES", 4096)
        small.tier.before_rest = lambda: small.cache.lookup(KEYS, "other", wait_for_promotion=True)
        small.lane.step()
        assert small.cache.lower.upgrades._under_way != [None]
    elif when == "exchanged":
        small.tier.before_rest = lambda: held.append(small.open(KEYS[:1]))
        small.lane.step()
        assert small.cache._index.replaced == 1
    if how == "forget":
        small.cache.forget(KEYS[:1])
    else:
        small.cache.clear()
    assert Life.SPARE not in small.cache._index._life
    for lease in held:
        assert small.bytes_of(lease) == [approximate(KEYS[0])]
        assert not small.cache.release(lease)  # its chunk was forgotten
    small.cache.end("other")
    small.upgrade()
    small.at_rest()


def test_a_chunk_that_is_evicted_meanwhile_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(slots=2)
    monkeypatch.setattr(moving, "STEP_BYTES", 4096)
    small.read(KEYS[:1])

    def crowd() -> None:
        small.tier.before_rest = lambda: None
        small.clock.advance(1.0)
        lease = small.cache.begin_store(key_chain(1, branch="other"), "w")  # the other slot is spare
        assert lease.keys
        small.cache.commit(lease)

    small.tier.before_rest = crowd
    small.upgrade()
    assert small.upgraded == 0
    assert small.cache.counts().chunks_evicted == 1
    small.at_rest()
    small.close()


def test_a_full_pool_of_few_slots_evicts_nothing_to_upgrade_and_a_larger_one_evicts_one() -> None:
    for slots, evicted in ((7, 0), (8, 1), (40, 1)):
        keys = key_chain(slots)
        small = Small(slots=slots, keys=tuple(keys))
        small.read(keys)
        small.upgrade()
        counts = small.cache.counts()
        assert counts.chunks_evicted == evicted
        assert small.upgraded == evicted * (slots - 1)
        found = small.read(keys[: slots - 1])
        assert found == [(exact if evicted else approximate)(key) for key in keys[: slots - 1]]
        small.upgrade()
        small.at_rest()
        small.close()


@pytest.mark.parametrize("how", ["committed", "given up", "read"])
def test_a_chunk_without_a_second_slot_is_tried_again_when_there_is_one(how: str) -> None:
    """All others were being written or read, and nobody reads or computes anything afterwards."""
    small = Small(slots=8)
    small.fetch(KEYS[:1])
    lease = small.cache.begin_store(key_chain(7, branch="others"), "w")
    assert len(lease.keys) == 7
    if how == "read":
        small.cache.commit(lease)
        reading = small.open(list(lease.keys))
    small.upgrade()
    assert small.upgraded == 0
    if how == "committed":
        small.cache.commit(lease)
    elif how == "read":
        assert small.cache.release(reading)
    else:
        small.cache.release(lease)
    small.upgrade()
    assert small.upgraded == 1
    small.cache.end("r")
    small.at_rest()
    small.close()


@pytest.mark.parametrize("when", ["wanted", "exchanged", "between steps"])
def test_a_cache_that_closes_meanwhile_closes(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    monkeypatch.setattr(moving, "STEP_BYTES", 4096)
    small = Small()
    small.read(KEYS)
    if when == "exchanged":
        small.open(KEYS[:1])
        small.lane.step()
        assert small.cache._index.replaced == 1
    elif when == "between steps":
        small.tier.before_rest = lambda: small.cache.lower.upgrades.stop()
        small.lane.step()
    small.close()
    assert small.tier.calls[-1] == "close"


def test_a_cache_that_closes_while_its_threads_upgrade_closes() -> None:
    small = Small(threads=2)
    began = threading.Event()
    small.tier.before_rest = began.set
    small.tier.fault = "delay"
    small.read(KEYS)
    assert began.wait(10.0)
    small.close()
    assert small.tier.calls[-1] == "close"


def test_a_named_pool_has_the_exact_bytes_for_the_next_process() -> None:
    name = "upgraded-for-the-next"
    HostPool.unlink(name)
    try:
        small = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        small.read(KEYS)
        small.upgrade()
        assert small.upgraded == 3
        small.read(KEYS)
        small.close()
        again = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        assert again.cache.counts().chunks_adopted == 3
        calls = list(again.tier.calls)
        assert again.read(KEYS) == [exact(key) for key in KEYS]
        assert again.tier.calls == calls
        assert again.cache.counts().chunks_damaged == 0
        again.close()
    finally:
        HostPool.unlink(name)


def test_the_next_process_knows_which_chunks_of_a_named_pool_are_approximate() -> None:
    """What an engine computed is not one of them."""
    name = "upgraded-by-the-next"
    HostPool.unlink(name)
    try:
        small = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        small.read(KEYS)
        small.cache.commit(small.cache.begin_store(key_chain(1, branch="computed"), "w"))
        small.close()
        again = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        assert again.cache.lower.upgrades.approximations == 3
        again.upgrade()
        assert again.upgraded == 3
        assert again.read(KEYS) == [exact(key) for key in KEYS]
        assert again.cache.counts().chunks_damaged == 0
        again.at_rest()
        again.close()
        last = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        assert last.cache.lower.upgrades.approximations == 0
        assert last.read(KEYS) == [exact(key) for key in KEYS]
        last.close()
    finally:
        HostPool.unlink(name)


def test_adopted_chunks_are_doubted_no_more_than_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose slots have changed places writes the records where the bytes are."""
    name = "upgraded-and-stored"
    HostPool.unlink(name)
    try:
        small = Small(pool=HostPool.named(name, CHUNK_BYTES, 8))
        small.read(KEYS[:1])
        small.upgrade()
        others = key_chain(4, branch="others")
        lease = small.cache.begin_store(others, "w")
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            small.cache.pool.view[extent.offset : extent.offset + CHUNK_BYTES] = exact(key)
        small.cache.commit(lease)
        small.cache.forget(others[3:])
        small.close()
        again = Small(pool=HostPool.named(name, CHUNK_BYTES, 8), keys=())
        assert again.cache.counts().chunks_adopted == 4
        assert again.read(others[:3]) == [exact(key) for key in others[:3]]
        assert again.read(KEYS[:1]) == [exact(KEYS[0])]
        again.close()
    finally:
        HostPool.unlink(name)


def test_what_a_tier_has_cut_is_as_good_as_what_it_kept() -> None:
    """A half replaces a quarter; and what was asked for as a whole is not asked for again."""
    small = Small(drops_parts=True, keys=())
    small.fill(KEYS)
    small.read(KEYS[:1])
    cut(small, KEYS[0])
    small.upgrade()
    assert small.read(KEYS[:1]) == [approximate(KEYS[0], 2)]
    assert small.upgraded == 1
    calls = len(small.tier.calls)
    small.upgrade()
    assert len(small.tier.calls) == calls
    assert small.cache.lower.upgrades.approximations == 1
    small.at_rest()
    small.close()


def cut(small: Small, key: ChunkKey) -> None:
    """Fill the tier until it has dropped the last part of this chunk."""
    read = Read(key, bytearray(chunk_header.HEADER_BYTES), aligned_pages(CHUNK_BYTES), CHUNK_BYTES)
    for number in range(200):
        (outcome,) = small.dram.load([read])
        assert isinstance(outcome, Loaded)
        if outcome.nbytes <= CHUNK_BYTES // 2:
            return
        small.fill(key_chain(1, branch=f"more {number}"))
    raise AssertionError("it was never cut")


class Kept(Subscriber):
    def __init__(self) -> None:
        self.events: list[events.Upgraded] = []

    def take(self, occurred: Occurred) -> None:
        if isinstance(occurred.event, events.Upgraded):
            self.events.append(occurred.event)


def test_an_event_tells() -> None:
    bus, kept = EventBus(interval_s=0.001), Kept()
    bus.subscribe(kept)
    small = Small(bus=bus)
    small.read(KEYS[:2])
    small.upgrade()
    assert bus.flush()
    assert [(one.tier, one.keys, one.nbytes) for one in kept.events] == [
        ("dram", [key], CHUNK_BYTES) for key in KEYS[:2]
    ]
    small.close()
    bus.close()


def test_readers_on_other_threads_never_see_a_mixture() -> None:
    """Four threads read without a pause while the lane's own exchange what they read."""
    keys = key_chain(12)
    small = Small(slots=40, threads=2, keys=tuple(keys))
    allowed = {key: (approximate(key), exact(key)) for key in keys}
    wrong: list[ChunkKey] = []
    over = threading.Event()

    def read(number: int) -> None:
        at = number
        while not over.is_set():
            at = (at * 7 + 1) % len(keys)
            lease = small.cache.load([keys[at]], f"reader {number}")
            if isinstance(lease, ReadLease):
                first, second = small.bytes_of(lease), small.bytes_of(lease)
                if first != second or first[0] not in allowed[keys[at]]:
                    wrong.append(keys[at])
                small.cache.release(lease)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    small.fetch(keys)
    small.cache.end("r")
    until(lambda: small.upgraded == len(keys) or wrong)
    over.set()
    for reader in readers:
        reader.join(30)
    assert not wrong
    assert small.read(keys) == [exact(key) for key in keys]
    small.close()
