"""A growing request hashes its new tokens only, and ends where it would have, had it come whole."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, InputError, Item, KeySequence, digests_of
from kv_testing.strategies import items, prompts, schemes

relaxed = settings(deadline=None, max_examples=120)
SCHEME = ChainScheme(chunk_tokens=4)


@given(scheme=schemes(), tokens=prompts(), item=items(), cuts=st.lists(st.integers(0, 24), max_size=6))
@relaxed
def test_any_split_gives_what_the_whole_gives(
    scheme: ChainScheme, tokens: list[int], item: list[Item], cuts: list[int]
) -> None:
    whole = KeySequence(scheme, items=item)
    at_once = whole.append(tokens)
    grown = KeySequence(scheme, items=item)
    made = []
    places = [0, *sorted(cuts), len(tokens)]
    for first, last in itertools.pairwise(places):
        made += grown.append(tokens[first:last])
        assert grown.tokens == len(tokens[:last])
        assert len(grown.digests) == grown.tokens // scheme.chunk_tokens
    assert made == at_once == list(grown.digests) == list(whole.digests)
    assert grown.tail_digest() == whole.tail_digest()
    assert (whole.tail_digest() is None) == (len(tokens) % scheme.chunk_tokens == 0)


@given(tokens=prompts(), items_=items())
@relaxed
def test_items_may_come_at_any_time_before_their_first_chunk_is_whole(tokens: list[int], items_: list[Item]) -> None:
    known = KeySequence(SCHEME, items=items_)
    told = KeySequence(SCHEME)
    waiting = sorted(items_, key=lambda item: item.first_token)
    for place, token in enumerate(tokens):
        # The last moment: the chunk that holds the item's first token is about to be whole.
        while waiting and waiting[0].first_token // 4 == place // 4 and place % 4 == 3:
            told.add_items([waiting.pop(0)])
        assert told.append([token]) == known.append([token])
    told.add_items(waiting)
    assert told.tail_digest() == known.tail_digest()


def test_an_item_that_comes_too_late_is_refused_and_changes_nothing() -> None:
    sequence = KeySequence(SCHEME)
    sequence.append(range(6))
    with pytest.raises(InputError, match="item at token 3 comes too late: 4 tokens are hashed already"):
        sequence.add_items([Item("dog", 4, 1), Item("cat", 3, 9)])
    plain = KeySequence(SCHEME)
    plain.append(range(6))
    assert sequence.tail_digest() == plain.tail_digest()


def test_appending_touches_the_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a decode step must not grow with the prompt, so what was hashed is never read again."""

    class Counting(list[int]):
        taken = 0

        def __getitem__(self, index: slice | int) -> list[int]:  # type: ignore[override]
            part = list(self)[index]
            assert isinstance(part, list)
            Counting.taken += len(part)
            return part

    sequence = KeySequence(SCHEME)
    sequence.append(range(4000))
    sequence.append(Counting([1] * 9))
    assert Counting.taken == 9


def test_an_empty_append_makes_nothing() -> None:
    sequence = KeySequence(SCHEME)
    assert sequence.append([]) == []
    assert (sequence.tail_digest(), sequence.tokens) == (None, 0)
    sequence.append([1])
    assert sequence.append(()) == []
    assert sequence.tokens == 1


@given(tokens=prompts(), chunks=st.integers(0, 6))
@relaxed
def test_skipping_leaves_digests_out_and_changes_none(tokens: list[int], chunks: int) -> None:
    skip = min(chunks, len(tokens) // 4) * 4
    wanted = digests_of(SCHEME, tokens)[skip // 4 :]
    assert digests_of(SCHEME, tokens, skip_tokens=skip) == wanted
    assert digests_of(SCHEME, tokens, mask=[place >= skip for place in range(len(tokens))]) == wanted


def test_a_mask_may_be_an_array() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency of kv-core")
    assert digests_of(SCHEME, range(8), mask=numpy.arange(8) >= 4) == digests_of(SCHEME, range(8))[1:]


@pytest.mark.parametrize(
    ("skip_tokens", "mask", "text"),
    [
        (3, None, "3 tokens to skip are not a whole number of chunks of 4; skip 0"),
        (7, None, "skip 4"),
        (-4, None, "skip_tokens is -4; it must be from 0 to the 10"),
        (12, None, "skip_tokens is 12"),
        (4.0, None, "skip_tokens is 4.0"),
        (True, None, "skip_tokens is True"),
        (0, [False] * 3 + [True] * 7, "3 tokens to skip are not"),
        (0, [True] * 9, "the mask has 9 entries for 10 tokens"),
        (0, [False] * 4 + [True] * 4 + [False] * 2, "skips token 8 after it kept token 4"),
        (4, [False] * 4 + [True] * 6, "not both"),
    ],
)
def test_a_skip_that_is_not_chunks_from_the_front_is_refused(
    skip_tokens: int, mask: list[bool] | None, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        digests_of(SCHEME, range(10), skip_tokens=skip_tokens, mask=mask)
