"""A plan carries each asked token once, from where it is to where it belongs, in as few copies as there can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import HostExtent, InputError, TransferPlan, plan_transfer
from kv_testing.strategies import extents

relaxed = settings(deadline=None, max_examples=200)


@st.composite
def asks(draw: st.DrawFn) -> tuple[list[HostExtent], list[int], int, int, int, int, int]:
    """Extents, block table, chunk_tokens, block_tokens, first and last token, first chunk: all within reach."""
    block_tokens = draw(st.sampled_from([1, 2, 4, 16]))
    chunk_tokens = block_tokens * draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 5))
    from_chunk = draw(st.integers(0, chunks - 1))
    places = extents(chunks)[from_chunk:]
    blocks = chunks * chunk_tokens // block_tokens
    # Mostly runs of neighbours, as an engine hands them out, and sometimes any order at all.
    table = draw(
        st.one_of(st.permutations(range(blocks)), st.integers(0, 9).map(lambda at: list(range(at, at + blocks))))
    )
    first = draw(st.integers(from_chunk * chunk_tokens, chunks * chunk_tokens))
    last = draw(st.integers(first, chunks * chunk_tokens))
    return places, list(table), chunk_tokens, block_tokens, first, last, from_chunk


def carried(plan: TransferPlan) -> list[tuple[HostExtent, int, int]]:
    return [
        (copy.extent, copy.first_token + step, copy.first_slot + step)
        for copy in plan.copies
        for step in range(copy.tokens)
    ]


@given(ask=asks())
@relaxed
def test_each_asked_token_is_carried_once_to_its_own_slot(
    ask: tuple[list[HostExtent], list[int], int, int, int, int, int],
) -> None:
    places, table, chunk_tokens, block_tokens, first, last, from_chunk = ask
    plan = plan_transfer(
        places, table, chunk_tokens=chunk_tokens, block_tokens=block_tokens, first_token=first, last_token=last,
        extents_from_chunk=from_chunk,
    )  # fmt: skip
    assert carried(plan) == [
        (
            places[token // chunk_tokens - from_chunk],
            token % chunk_tokens,
            table[token // block_tokens] * block_tokens + token % block_tokens,
        )
        for token in range(first, last)
    ]
    assert plan.tokens == last - first
    assert plan.chunk_tokens == chunk_tokens
    assert all(copy.tokens > 0 and copy.first_token + copy.tokens <= chunk_tokens for copy in plan.copies)
    for one, other in zip(plan.copies, plan.copies[1:], strict=False):
        joined = one.first_token + one.tokens, one.first_slot + one.tokens
        assert one.extent != other.extent or joined != (other.first_token, other.first_slot)


def test_neighbouring_blocks_are_one_copy_a_chunk() -> None:
    plan = plan_transfer(extents(2), range(5, 13), chunk_tokens=64, block_tokens=16, first_token=0, last_token=128)
    assert [(copy.first_token, copy.first_slot, copy.tokens) for copy in plan.copies] == [(0, 80, 64), (0, 144, 64)]


def test_one_extent_named_for_two_chunks_is_not_joined_over_its_end() -> None:
    """Nobody should, and the bytes after the extent would be another chunk's."""
    place = extents(1) * 2
    plan = plan_transfer(place, [0, 1], chunk_tokens=4, block_tokens=4, first_token=0, last_token=8)
    assert [copy.tokens for copy in plan.copies] == [4, 4]


REFUSED = [
    ({"first_token": 5, "last_token": 4}, "tokens 5 to 4 are not a range"),
    ({"first_token": -1}, "tokens -1 to 8 are not a range"),
    ({"last_token": 17}, "4 blocks of 4 tokens do not reach token 17"),
    ({"chunk_tokens": 6}, "not a multiple of the engine's block of 4"),
    ({"chunk_tokens": 0}, "not a multiple"),
    ({"chunk_tokens": -8}, "not a multiple"),
    ({"block_tokens": 0}, "not a multiple"),
    ({"extents_from_chunk": 1}, "token 0 lies in chunk 0, for which no extent"),
    ({"extents_from_chunk": -1, "last_token": 16}, "token 8 lies in chunk 1, for which no extent"),
    ({"block_ids": [0, -1, 2, 3]}, "block -1"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_planned_is_refused(changed: dict[str, object], text: str) -> None:
    asked = {
        "chunk_tokens": 8,
        "block_tokens": 4,
        "first_token": 0,
        "last_token": 8,
        "block_ids": [0, 1, 2, 3],
    } | changed
    with pytest.raises(InputError, match=text):
        _ = plan_transfer(extents(2), asked.pop("block_ids"), **asked).copies  # type: ignore[arg-type]
