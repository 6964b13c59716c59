"""What of a prompt is given in whole pages, and the phases in which SGLang computes it."""

import itertools
import random
from typing import Any

import pytest
from kv_blend import BlendPlan
from kv_blend.plan import alone, given_pages, phase_ends

PAGE = 16


def plan(*segments: tuple[int, int], **options: Any) -> BlendPlan:
    return BlendPlan(tokens=segments[-1][1] + 1, segments=segments, **options)


def test_only_whole_pages_behind_what_is_computed_again_are_given() -> None:
    """Of the first segment, which is exact, nothing is."""
    given = given_pages(plan((40, 100), (101, 201), share=0.2), PAGE)
    assert [(each.first, each.end, each.distance) for each in given] == [(48, 96, 0), (128, 192, 61)]
    assert phase_ends(given) == [48, 128]


def test_a_segment_without_a_whole_page_is_computed_with_what_is_around_it() -> None:
    given = given_pages(plan((0, 20), (30, 40), (48, 96), share=0.0), PAGE)
    assert [(each.number, each.first, each.end) for each in given] == [(0, 0, 16), (2, 48, 96)]
    assert phase_ends(given) == [48]
    assert given_pages(plan((1, 65), share=1.0, behind="alone"), PAGE) == []


def test_pages_that_follow_each_other_need_no_phase_between_them() -> None:
    given = given_pages(plan((16, 48), (48, 80), share=0.0), PAGE)
    assert len(given) == 2
    assert phase_ends(given) == [16]


@pytest.mark.parametrize("seed", range(20))
def test_phases_end_where_pages_begin_and_rows_are_in_the_segments_own_pages(seed: int) -> None:
    draw = random.Random(seed)
    edges = sorted(draw.sample(range(2000), 12))
    drawn = plan(*itertools.pairwise(edges), share=draw.choice([0.0, 0.15]), behind=draw.choice(["prefix", "alone"]))
    tokens = [draw.randrange(1000) for _ in range(drawn.tokens)]
    given = given_pages(drawn, PAGE)
    assert all(end % PAGE == 0 for end in phase_ends(given))
    for each in given:
        first, end = drawn.segments[each.number]
        assert first <= each.first < each.end <= end
        prompt = alone(drawn, tokens, each.number, PAGE)
        assert len(prompt) % PAGE == 0
        assert tokens[each.first : each.end] == prompt[each.first - each.distance : each.end - each.distance]
