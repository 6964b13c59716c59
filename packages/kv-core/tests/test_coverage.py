"""What a hit needs of each group, against brute force over tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import InputError
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage, longest_hit

relaxed = settings(deadline=None, max_examples=200)
coverages = st.one_of(
    st.just(ALL),
    st.just(STATE),
    st.builds(Coverage, st.sampled_from(["window", "local"]), st.integers(1, 20)),
)
shapes = st.builds(
    ChunkShape, st.integers(1, 6), st.lists(coverages, min_size=1, max_size=3).map(tuple), st.integers(1, 2)
)


def attended(coverage: Coverage, token: int) -> set[int]:
    """The tokens before `token` that its attention reads, from the definition of each kind."""
    match coverage.kind:
        case "all":
            return set(range(token))
        case "window":
            return {other for other in range(token) if token - other < coverage.tokens}
        case "local":
            return {other for other in range(token) if other // coverage.tokens == token // coverage.tokens}
        case "state":
            return {token - 1} if token else set()


@given(coverages, st.integers(0, 60))
@relaxed
def test_what_is_needed_is_what_the_next_token_attends_to(coverage: Coverage, boundary: int) -> None:
    assert set(range(coverage.first_token(boundary), boundary)) == attended(coverage, boundary)


@given(coverages, st.integers(0, 40), st.integers(0, 10))
@relaxed
def test_what_later_tokens_attend_to_was_needed_at_the_boundary_already(
    coverage: Coverage, boundary: int, later: int
) -> None:
    """Else a load that brings what the boundary needs would leave the tokens after it without."""
    if coverage.kind != "state":
        before = {token for token in attended(coverage, boundary + later) if token < boundary}
        assert before <= attended(coverage, boundary)


@given(shapes, st.integers(0, 8))
@relaxed
def test_the_needed_places_are_those_of_the_needed_chunks(shape: ChunkShape, chunks: int) -> None:
    wanted = {
        (chunk, group, shard)
        for group, coverage in enumerate(shape.groups)
        for token in attended(coverage, chunks * shape.chunk_tokens)
        for chunk in [token // shape.chunk_tokens]
        for shard in range(shape.shards)
    }
    places = shape.needed_places(chunks)
    per_group, per_chunk = shape.shards, shape.keys_per_chunk
    assert len(places) == len(set(places))
    assert {(at // per_chunk, at % per_chunk // per_group, at % per_group) for at in places} == wanted
    assert [len(needed) * shape.shards for needed in shape.needed(chunks)] == [
        sum(1 for _, group, _ in wanted if group == number) for number in range(len(shape.groups))
    ]


def test_a_hit_ends_where_every_group_has_what_it_needs() -> None:
    """Two chunks of four tokens; a full group, a window of four and a state."""
    shape = ChunkShape(4, (ALL, Coverage("window", 4), STATE))
    assert longest_hit([True] * 9, shape) == 3
    assert longest_hit([True, True, True, True, False, False, True, True, True], shape) == 3
    assert longest_hit([True, True, True, True, True, True, True, True, False], shape) == 2
    assert longest_hit([True, False, True, True, True, False, True, False, True], shape) == 0
    assert longest_hit([False, True, True, True, True, True, True, True, True], shape) == 0


@given(coverages)
def test_a_coverage_is_spelled_in_one_way(coverage: Coverage) -> None:
    assert Coverage.parse(str(coverage)) == coverage


@pytest.mark.parametrize(
    "text", ["", "ALL", "window", "window:0", "window:-1", "all:3", "state:1", "local:", "window:1 "]
)
def test_what_is_no_coverage_is_refused_with_the_four_that_are(text: str) -> None:
    with pytest.raises(InputError, match="all, state, window:TOKENS or local:TOKENS"):
        Coverage.parse(text)


@pytest.mark.parametrize("made", [{"kind": "window"}, {"kind": "all", "tokens": 4}, {"kind": "local", "tokens": -1}])
def test_a_coverage_that_cannot_be_is_refused(made: dict[str, object]) -> None:
    with pytest.raises(InputError, match="no coverage"):
        Coverage(**made)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "made", [{"chunk_tokens": 0}, {"chunk_tokens": 1, "shards": 0}, {"chunk_tokens": 1, "groups": ()}]
)
def test_a_chunk_without_keys_is_refused(made: dict[str, object]) -> None:
    with pytest.raises(InputError, match="each must be at least 1"):
        ChunkShape(**made)  # type: ignore[arg-type]
