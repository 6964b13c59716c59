"""The servable prefix is the leading run, and its end is explained."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import Ended, MisuseError
from kv_core.lookup import leading_run

relaxed = settings(deadline=None, max_examples=200)


@given(keys_per_chunk=st.integers(1, 4), chunks=st.integers(0, 6), data=st.data())
@relaxed
def test_the_run_is_the_longest_of_whole_chunks(keys_per_chunk: int, chunks: int, data: st.DataObject) -> None:
    total = keys_per_chunk * chunks
    held = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=total, max_size=total))
    by_chunk = [held[at : at + keys_per_chunk] for at in range(0, total, keys_per_chunk)]
    whole = next((number for number, chunk in enumerate(by_chunk) if not all(chunk)), chunks)
    count, ended = leading_run(held, keys_per_chunk)
    assert count == whole
    if whole == chunks:
        assert ended is Ended.ALL_HELD
    else:
        # "Incomplete" is what the keys read so far can know: a share before the missing one is held.
        assert ended is (Ended.INCOMPLETE if by_chunk[whole][0] else Ended.ABSENT)


def test_nothing_is_read_past_the_first_miss() -> None:
    """So that a long prompt's lookup costs its hits and not its length."""

    def answers() -> Iterator[bool]:
        yield from (True, True, False)
        raise AssertionError("read on after a miss")

    assert leading_run(answers(), 1) == (2, Ended.ABSENT)


def test_nothing_asked_is_all_held() -> None:
    assert leading_run([], 3) == (0, Ended.ALL_HELD)


@pytest.mark.parametrize("keys_per_chunk", [0, -1])
def test_a_chunk_of_no_keys_is_a_bug(keys_per_chunk: int) -> None:
    with pytest.raises(MisuseError):
        leading_run([True], keys_per_chunk)


def test_answers_that_end_amid_a_chunk_are_a_bug() -> None:
    """Else a share that was never asked for would look held."""
    with pytest.raises(MisuseError, match="2 keys per chunk"):
        leading_run([True, True, True], 2)
