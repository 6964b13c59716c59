"""What becomes of those who read, pin, hold or were promised a chunk of which better bytes arrive."""

import pytest
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_testing.approximations import CHUNK_BYTES, KEYS, Small, approximate, exact
from kv_tiers.cache import upgrade


def test_who_reads_keeps_what_it_reads_and_who_asks_next_gets_the_exact_bytes(small: Small) -> None:
    small.fetch(KEYS[:1], "first")
    small.cache.end("first")
    held: list[ReadLease] = []
    small.tier.before_rest = lambda: held.append(small.open(KEYS[:1]))
    small.upgrade()
    assert small.upgraded == 1
    assert small.cache.counts().slots_used == 2
    assert small.bytes_of(held[0]) == [approximate(KEYS[0])]
    second = small.open(KEYS[:1], "second")
    assert small.bytes_of(second) == [exact(KEYS[0])]
    assert small.cache.release(second)
    assert small.bytes_of(held[0]) == [approximate(KEYS[0])]
    assert small.cache.release(held[0])
    assert small.cache.counts().slots_used == 1


def test_a_chunk_that_is_never_without_a_reader_becomes_exact(small: Small) -> None:
    """Each reader begins before the one before has ended."""
    small.read(KEYS[:1])
    last = small.open(KEYS[:1], "reader 0")
    for number in range(1, 4):
        small.lane.step()
        following = small.open(KEYS[:1], f"reader {number}")
        assert small.cache.release(last)
        last = following
    assert small.bytes_of(last) == [exact(KEYS[0])]
    assert small.cache.release(last)


@pytest.mark.parametrize("how", ["pinned", "held", "promised"])
def test_what_is_kept_but_not_read_becomes_exact_and_stays_kept(how: str) -> None:
    small = Small(slots=8)
    small.fetch(KEYS)
    match how:
        case "pinned":
            assert small.cache.admin.pin(KEYS, "pin") == 3
            small.cache.end("r")
        case "held":
            small.cache.commit(small.cache.begin_store(KEYS, "w", hold_s=1000.0))
            small.cache.end("r")
    small.upgrade()
    assert small.upgraded == 3
    small.cache.commit(small.cache.begin_store(key_chain(8, branch="crowd"), "w"))
    lease = small.open(KEYS)
    assert small.bytes_of(lease) == [exact(key) for key in KEYS]
    assert small.cache.release(lease)
    small.cache.admin.unpin("pin")
    small.cache.end("r")
    small.clock.advance(1001.0)
    assert not any(small.cache._index._leases) or small.cache.counts().read_leases == 0
    small.cache.commit(small.cache.begin_store(key_chain(8, branch="more"), "w"))
    assert not isinstance(small.cache.load(KEYS, "late"), ReadLease)  # nothing keeps them any more
    small.at_rest()
    small.close()


def test_few_second_slots_have_old_bytes_at_a_time(small: Small) -> None:
    """A reader may take long, so what others read waits until there are fewer of them."""
    small.fetch(KEYS)
    held = [small.open([key], f"reader {at}") for at, key in enumerate(KEYS)]
    small.cache.end("r")
    small.upgrade()
    assert small.upgraded == upgrade._STILL_READ == 2
    assert small.cache.counts().slots_used == 3 + 2
    assert [small.bytes_of(lease) for lease in held] == [[approximate(key)] for key in KEYS]
    assert small.cache.release(held[0])
    small.upgrade()
    assert small.upgraded == 3
    for lease in held[1:]:
        assert small.cache.release(lease)
    assert small.read(KEYS) == [exact(key) for key in KEYS]


def test_readers_that_come_during_upgrades_keep_few_second_slots_too(small: Small) -> None:
    """Nobody reads a chunk when its upgrade begins, and somebody does when it ends, each time."""
    small.read(KEYS)
    more = key_chain(2, branch="more")
    small.fill(more)
    small.read(more)
    held: list[ReadLease] = []

    def come() -> None:
        if len(held) == small.upgraded:
            held.append(small.open([[*KEYS, *more][len(held)]], f"reader {len(held)}"))

    small.tier.before_rest = come
    small.upgrade()
    assert small.upgraded == len(held) == small.cache._index.replaced == upgrade._STILL_READ + 1
    small.tier.before_rest = lambda: None
    for lease in held:
        assert small.cache.release(lease)
    small.upgrade()
    assert small.upgraded == 5


@pytest.mark.parametrize("how", ["forget", "clear", "clear the tenant"])
def test_forgetting_makes_a_read_void_whose_chunk_has_left(small: Small, how: str) -> None:
    """Not held any more, but some still read what it had before it was exact."""
    small.read(KEYS[:1])
    lease = small.open(KEYS[:1])
    small.upgrade()
    small.cache.commit(small.cache.begin_store(key_chain(7, branch="others"), "w"))
    assert KEYS[0] not in small.cache._index.held() and small.cache._index.replaced == 1
    match how:
        case "forget":
            small.cache.forget(KEYS[:1])
        case "clear":
            small.cache.clear()
        case _:
            small.cache.admin.clear_tenant(KEYS[0].tenant)
    assert small.bytes_of(lease) == [approximate(KEYS[0])]
    assert not small.cache.release(lease)


def test_a_chunk_that_comes_and_goes_while_its_old_bytes_are_read_is_what_it_was_last(small: Small) -> None:
    """Upgraded, computed by an engine instead, and brought as an approximation again: each reader keeps its own."""
    small.read(KEYS[:1])
    leases = [small.open(KEYS[:1], "of the approximation")]
    small.upgrade()
    leases.append(small.open(KEYS[:1], "of the exact"))
    assert small.cache.release(leases.pop())
    small.cache.commit(small.cache.begin_store(key_chain(7, branch="others"), "w"))
    assert KEYS[0] not in small.cache._index.held()
    computed = small.cache.begin_store(KEYS[:1], "w")
    (extent,) = computed.extents
    small.cache.pool.view[extent.offset : extent.offset + CHUNK_BYTES] = b"c" * CHUNK_BYTES
    small.cache.commit(computed)
    leases.append(small.open(KEYS[:1], "of the computed"))
    assert [small.bytes_of(lease) for lease in leases] == [[approximate(KEYS[0])], [b"c" * CHUNK_BYTES]]
    assert small.cache.release(leases.pop())
    small.cache.commit(small.cache.begin_store(key_chain(7, branch="still others"), "w"))
    assert KEYS[0] not in small.cache._index.held()
    assert small.read(KEYS[:1]) == [approximate(KEYS[0])]
    leases.append(small.open(KEYS[:1], "of what was brought again"))
    small.upgrade()
    assert small.cache._index.replaced == 2
    assert [small.bytes_of(lease) for lease in leases] == [[approximate(KEYS[0])]] * 2
    assert small.read(KEYS[:1]) == [exact(KEYS[0])]
    for lease in leases:
        assert small.cache.release(lease)


def test_an_exact_chunk_may_leave_while_its_old_bytes_are_read(small: Small) -> None:
    """And what comes into its slot then is not touched by the end of that."""
    small.read(KEYS[:1])
    lease = small.open(KEYS[:1])
    small.upgrade()
    assert small.upgraded == 1
    slot = small.cache._index.find(KEYS[0])
    others = key_chain(7, branch="others")
    written = small.cache.begin_store(others, "w", hold_s=100.0)
    assert len(written.keys) == 7
    small.cache.commit(written)
    assert slot is not None and small.cache._index.key_at(slot) in others
    held = small.cache.holds.chunks
    assert held == 4  # half of the pool
    assert small.bytes_of(lease) == [approximate(KEYS[0])]
    assert small.cache.release(lease)
    assert small.cache.holds.chunks == held
    small.clock.advance(101.0)
