"""What is computed of a blended prompt."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_blend.plan import BlendPlan, Edit, Moved
from kv_blend.selection import Selection, attention_of
from msgspec import structs

PLAN = BlendPlan(tokens=30, segments=((3, 13), (15, 19)), share=0.2, behind="alone")
ALL = 1000


def test_the_share_is_of_each_segment_and_rounded_up() -> None:
    selection = Selection(PLAN, tuple(PLAN.moved))
    assert selection.first() == [3, 4, 15]


def test_what_stands_where_it_was_computed_is_not_computed_again() -> None:
    plan = structs.replace(PLAN, behind="prefix")
    assert Selection(plan, tuple(plan.moved)).first() == [15]
    assert Selection(plan, tuple(plan.moved)).attended(torch.arange(19.0)) == [18]
    edited = structs.replace(PLAN, behind="prefix", edits=(Edit(2, 3, (7,)),))  # by another token, so nothing moved
    assert [(each.distance, edited.recomputed(each)) for each in edited.moved] == [(0, 0), (0, 2), (0, 1)]


def test_what_is_attended_to_is_selected_of_all_segments_together() -> None:
    selection = Selection(PLAN, tuple(PLAN.moved))
    attention = torch.full((19,), -1.0)
    attention[3:13], attention[15:19] = 0.0, torch.tensor([0.4, 0.1, 0.3, 0.2])
    assert selection.attended(attention) == [15, 17, 18]
    attention[5] = 0.5
    assert selection.attended(attention) == [5, 15, 17]
    attention[4:] = -1.0
    assert selection.attended(attention) == [3]


def test_heads_that_share_keys_attend_each_for_itself() -> None:
    torch.manual_seed(1)
    queries, keys = torch.randn(3, 4, 8), torch.randn(5, 2, 8)
    expected = torch.zeros(5)
    for token in range(3):
        for head in range(4):
            expected += (0.5 * keys[:, head // 2] @ queries[token, head]).softmax(0)
    torch.testing.assert_close(attention_of(queries.flatten(1), keys, 0.5), expected)


def test_what_stands_at_the_start_in_both_texts_is_not_computed_again() -> None:
    selection = Selection(PLAN, (Moved(0, 13, 0), Moved(15, 19, 40)))
    assert selection.first() == [15]
    assert list(selection.batches([18], ALL, ALL)) == [[(13, 15), (18, 19)]]


def test_what_lies_between_and_what_is_selected_is_computed() -> None:
    selection = Selection(PLAN, tuple(PLAN.moved))
    assert list(selection.batches([3, 4, 15], ALL, ALL)) == [[(0, 5), (13, 16)]]
    assert list(Selection(PLAN, tuple(PLAN.moved), 2).batches([], ALL, ALL)) == [[(2, 3), (13, 15)]]
    assert list(Selection(PLAN, tuple(PLAN.moved[1:]), 13).batches([], ALL, ALL)) == [[(13, 15)]]
    assert list(Selection(PLAN, ()).batches([], ALL, ALL)) == [[(0, 19)]]
    assert list(Selection(PLAN, (Moved(0, 19, 3),)).batches([], ALL, ALL)) == []


@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=60),
    most_tokens=st.integers(1, 20),
    most_runs=st.integers(1, 4),
)
def test_batches_hold_every_token_once_in_order(flags: list[bool], most_tokens: int, most_runs: int) -> None:
    selected = [token for token, flag in enumerate(flags) if flag]
    plan = BlendPlan(tokens=len(flags) + 1, segments=((0, len(flags)),))
    batches = list(Selection(plan, tuple(plan.moved)).batches(selected, most_tokens, most_runs))
    assert [token for batch in batches for first, end in batch for token in range(first, end)] == selected
    for batch in batches:
        assert len(batch) <= most_runs
        assert 0 < sum(end - first for first, end in batch) <= most_tokens
