"""Payloads are made alike by cutting groups between layers: nothing is lost, and little of the slots is wasted."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from kv_cuda.bind import MOST_GROUPS, cuts, runs

GROUPS = st.lists(st.tuples(st.integers(1, 1 << 22), st.integers(1, 40)), min_size=1, max_size=8)


def spent(slot_bytes: int, parts: list[list[int]]) -> int:
    return slot_bytes * sum(map(len, parts))


@given(GROUPS)
def test_every_layer_is_in_one_part_that_a_slot_holds(groups: list[tuple[int, int]]) -> None:
    slot_bytes, parts = cuts([each for each, _ in groups], [layers for _, layers in groups])
    for (each, layers), of_group in zip(groups, parts, strict=True):
        assert [layer for run in runs(of_group) for layer in run] == list(range(layers))
        assert all(0 < count * each <= slot_bytes for count in of_group)


@given(GROUPS)
def test_a_group_takes_fewer_than_twice_the_slots_that_its_bytes_fill_and_one_more(
    groups: list[tuple[int, int]],
) -> None:
    """The bound that the module states, unless so many parts would be too many keys."""
    slot_bytes, parts = cuts([each for each, _ in groups], [layers for _, layers in groups])
    assert sum(map(len, parts)) <= max(MOST_GROUPS, len(groups))
    for (each, layers), of_group in zip(groups, parts, strict=True):
        assert len(of_group) < 2 * each * layers / slot_bytes + 1


def test_equal_groups_and_lone_ones_stay_whole() -> None:
    assert cuts([100], [32]) == (3200, [[32]])
    assert cuts([100, 100, 100], [6, 6, 6]) == (600, [[6], [6], [6]])


def test_large_states_beside_small_ones_are_cut_and_waste_little() -> None:
    """Three layers of keys of 10 MB beside 30 states of 1 MB, as hybrids with long blocks have it."""
    slot_bytes, parts = cuts([10_000_000, 1_000_000], [3, 30])
    assert spent(slot_bytes, parts) <= 1.04 * (3 * 10_000_000 + 30 * 1_000_000)


def test_where_it_costs_little_there_are_fewer_groups() -> None:
    slot_bytes, parts = cuts([1000, 990], [40, 40])
    assert parts == [[40], [40]] and slot_bytes == 40_000


def test_windows_shorter_than_a_chunk_beside_full_attention_are_not_cut_to_pieces() -> None:
    """gpt-oss 20b with chunks of 256, 512 and 1,024 tokens: windows of 128."""
    for chunk, keys in ((2, 3), (4, 5), (8, 9)):
        slot_bytes, parts = cuts([1000 * chunk, 1000], [12, 12])
        assert sum(map(len, parts)) <= keys, (chunk, parts)
        assert spent(slot_bytes, parts) <= 1.1 * 12_000 * (chunk + 1)


def test_parts_of_a_group_are_as_equal_as_layers_allow() -> None:
    _, parts = cuts([7, 20], [11, 1])
    assert all(first - second in (0, 1) for of_group in parts for first, second in pairwise(of_group))
