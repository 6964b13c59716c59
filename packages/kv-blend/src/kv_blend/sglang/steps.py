"""What of a prompt is given in whole pages, and in which phases it is computed.

SGLang takes from storage only whole pages, and only those that follow what it has. So a prompt is computed in phases:
each is a request for the prompt up to the next page that is given, and finds in SGLang's own cache what the phases
before it have left. The last phase is the request itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_blend.plan import BlendPlan


@dataclass(frozen=True, slots=True)
class GivenRun:
    """Whole pages of one segment.

    segment: its number in the plan. first, end: tokens of the prompt.
    distance: by how many positions the segment stands behind the place in which its KV was computed.
    """

    segment: int
    first: int
    end: int
    distance: int


def given_pages(plan: BlendPlan, page_tokens: int) -> list[GivenRun]:
    """What is reused of each segment: all but its first tokens that are computed again, and what of its first and last
    page belongs to other text."""
    found = []
    for number, (first, end) in enumerate(plan.segments):
        begin = -(-(first + plan.recomputed(end - first)) // page_tokens) * page_tokens
        stop = end // page_tokens * page_tokens
        if begin < stop:
            found.append(GivenRun(number, begin, stop, first - plan.context_tokens))
    return found


def phase_ends(given: Sequence[GivenRun]) -> list[int]:
    """Up to which token each phase but the last one computes the prompt."""
    before = [0, *(each.end for each in given)]
    return [each.first for each, reached in zip(given, before, strict=False) if each.first > reached]


def alone(plan: BlendPlan, tokens: Sequence[int], segment: int, page_tokens: int) -> list[int]:
    """The prompt whose pages have a segment's KV: its context, the segment, and something after it that fills the last
    page."""
    first, end = plan.segments[segment]
    prompt = [*tokens[: plan.context_tokens], *tokens[first:end]]
    return prompt + [prompt[-1]] * (-len(prompt) % page_tokens)
