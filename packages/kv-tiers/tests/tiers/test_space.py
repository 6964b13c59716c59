"""Room for payloads of any size: nobody shares a unit, nothing that is free is too small, and little is lost."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.wait import joined
from kv_tiers.tiers.index import ExtentIndex
from kv_tiers.tiers.space import MAX_UNITS, Geometry, Place, Space, pack, runs

PAGE = 4096


def test_what_rounding_loses_is_what_the_document_says() -> None:
    for pages in range(1, 40_000):
        geometry = Geometry.of(pages * PAGE)
        lost = geometry.slot_bytes / (pages * PAGE) - 1
        assert geometry.slot_units <= MAX_UNITS and geometry.unit_bytes % PAGE == 0
        assert lost == 0 if pages <= 24 else 0 <= lost < (0.016 if pages >= 256 else 0.042), pages
        assert geometry.unit_bytes == PAGE or geometry.unit_bytes < 0.085 * pages * PAGE, pages
    assert Geometry.of(PAGE + (4 << 20)).slot_bytes < 1.001 * (PAGE + (4 << 20))


def test_a_payload_takes_less_than_a_unit_more_than_it_has() -> None:
    geometry = Geometry.of(1 << 20)
    for nbytes in (1, PAGE, geometry.unit_bytes, geometry.unit_bytes + 1, 1 << 20):
        taken = geometry.units_for(nbytes) * geometry.unit_bytes
        assert nbytes <= taken < nbytes + geometry.unit_bytes


def test_runs_are_neighbours_in_their_order() -> None:
    assert list(runs(range(6, 12))) == [(6, 6)]
    assert list(runs((4, 5, 9, 2, 3, 1))) == [(4, 2), (9, 1), (2, 2), (1, 1)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_units_are_given_once_and_all_of_them(data: st.DataObject) -> None:
    slots, slot_units = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    space = Space(slots, slot_units)
    held: list[tuple[int, ...] | range] = []
    for _ in range(data.draw(st.integers(0, 40))):
        if held and data.draw(st.booleans()):
            space.give(held.pop(data.draw(st.integers(0, len(held) - 1))), last=data.draw(st.booleans()))
        else:
            count = data.draw(st.integers(1, slot_units))
            free = slots * slot_units - sum(map(len, held))
            taken = space.take(count)
            assert (taken is None) == (free < count)  # whatever is free is of use
            if taken is not None:
                assert isinstance(taken, range | tuple) and len(taken) == count
                held.append(taken)
        used = [unit for units in held for unit in units]
        assert len(set(used)) == len(used) and all(0 <= unit < slots * slot_units for unit in used)
        assert space.used_units == len(used)
    again = Space(slots, slot_units)
    again.adopt(map(pack, held))
    assert again.used_units == sum(map(len, held))
    rest = []
    while (taken := again.take(1)) is not None:
        rest += list(taken)
    assert sorted(rest + [unit for units in held for unit in units]) == list(range(slots * slot_units))


GEOMETRY = Geometry(100, 6)


@given(st.lists(st.tuples(st.integers(0, 39), st.integers(1, 600), st.booleans()), max_size=60), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_an_index_never_gives_what_a_chunk_has(calls: list[tuple[int, int, bool]], media: int) -> None:
    """Chunks of any sizes come and go; each one's room is its own from its place to the end."""
    keys = key_chain(40)
    index = ExtentIndex([3] * media, GEOMETRY, LruPolicy())
    kept: dict[ChunkKey, Place] = {}
    for number, size, goes in calls:
        if goes:
            index.discard([keys[number]])
            kept.pop(keys[number], None)
            continue
        places, evicted, _ = index.reserve([keys[number]], [size], None)
        kept = {key: place for key, place in kept.items() if place.entry not in evicted}
        if places[0] is None:
            assert keys[number] in kept
            continue
        assert index.commit([places[0]], [None]) == []
        kept[keys[number]] = places[0]
        assert index.holds(keys) == [key in kept for key in keys]
        units = [(place.entry % media, unit) for place in kept.values() for unit in place.units]
        assert len(set(units)) == len(units) == index.used_units
        for place in kept.values():
            assert len(place.units) == GEOMETRY.units_for(place.stored_bytes)


def test_a_whole_chunk_lies_in_one_piece_while_there_is_a_free_slot_and_in_pieces_when_there_is_not() -> None:
    index = ExtentIndex([2], GEOMETRY, LruPolicy())
    small, large = key_chain(4, branch="small"), key_chain(1, branch="large")
    places, _, _ = index.reserve(small, [300] * 4, None)
    index.commit([place for place in places if place], [None, *small[:3]])
    index.discard([small[0], small[2]])  # half of either slot is free
    (place,), evicted, _ = index.reserve(large, [600], None)
    assert evicted == []
    assert place is not None and place.stored_bytes == 600
    assert isinstance(place.units, tuple) and len(list(runs(place.units))) == 2


def test_a_prompt_that_found_no_room_for_more_still_leaves_tail_first() -> None:
    """Entries are reused in the order in which they were given up, so their numbers say nothing of the prompt's."""
    index = ExtentIndex([3], GEOMETRY, LruPolicy())
    old, new, other = (key_chain(4, branch=branch) for branch in ("old", "new", "other"))
    for keys in (old[:3], new[:3]):
        places, _, _ = index.reserve(keys, [600] * 3, None)
        index.commit([place for place in places if place], [None, *keys[:2]])
    assert [place.entry for place in places if place] == [2, 1, 0]
    assert index.reserve(new[3:], [600], new[2]).places == [None]  # a chunk never leaves for its own descendants
    assert index.reserve(other[:1], [600], None).evicted == [0]
    assert index.holds(new[:3]) == [True, True, False]


@pytest.mark.parametrize("size", [100, 600])
def test_many_small_chunks_need_entries_too(size: int) -> None:
    """As many as the records that a directory has, however small they are."""
    keys = key_chain(100)
    index = ExtentIndex([4], GEOMETRY, LruPolicy())
    for key in keys:
        (place,), _, _ = index.reserve([key], [size], None)
        assert place is not None
        index.commit([place], [None])
    assert index.chunks == (16 if size == 100 else 4)


def test_a_report_waits_for_nobody_who_takes_over_or_removes_a_million_chunks() -> None:
    """A server reports on the thread that answers engines."""
    keys = key_chain(3)
    index = ExtentIndex([4], GEOMETRY, LruPolicy())
    places, _, _ = index.reserve(keys, [100, 600, 200], None)
    index.commit([place for place in places if place], [None, *keys[:2]])
    reported: list[tuple[object, ...]] = []
    reporting = threading.Thread(
        target=lambda: reported.append((index.chunks, index.used_units, index.by_group())), daemon=True
    )
    with index._lock:
        reporting.start()
        joined(reporting, within_s=10)
    assert reported == [(3, 9, (3,))]


def test_lookups_have_their_turn_while_many_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = key_chain(5)
    index = ExtentIndex([5], GEOMETRY, LruPolicy())
    places, _, _ = index.reserve(keys, [600] * 5, None)
    index.commit([place for place in places if place], [None, *keys[:4]])
    held: list[list[bool]] = []
    monkeypatch.setattr("kv_tiers.tiers.index._DISCARDED_AT_ONCE", 2)
    monkeypatch.setattr("kv_tiers.tiers.index.time.sleep", lambda _: held.append(index.holds(keys)))
    assert sorted(index.discard(keys)) == [0, 1, 2, 3, 4]
    assert held == [[False] * 2 + [True] * 3, [False] * 4 + [True]]
    assert index.holds(keys) == [False] * 5 and index.used_units == 0
