"""Blend plans: which parts of a prompt are segments whose KV is reused wherever they stand, and how much of it is
computed again.

A plan travels in two fields of a request: the plan itself in vLLM's `kv_transfer_params` or SGLang's `custom_params`,
and a digest of it in the request's `cache_salt`. The salt keeps everything that is computed with reused segments apart
from exact requests in the engine's own prefix cache, so a plan without its salt is refused.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from kv_core.errors import InputError

KEY: Final = "kv_blend"
"""The plan's key in `FIELDS`."""
Engine = Literal["vllm", "sglang"]
FIELDS: Final[Mapping[Engine, str]] = {"vllm": "kv_transfer_params", "sglang": "custom_params"}
"""The field of a request in which each engine takes a plan."""
DEFAULT_SHARE: Final = 0.15
_MARK: Final = ":kv-blend:"
_MAX_SALT: Final = 128
"""Characters. vLLM's server takes no longer `cache_salt`, and none with one of @, / and \\."""
_VERSION: Final = 1
_MAX_SEGMENTS: Final = 256
"""Each is a lookup on the engine's scheduler thread."""

Position = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class BlendPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the caller asks for.

    tokens: how many the prompt has. A plan made for another prompt is refused.
    segments: token ranges of the prompt, [first, end), in ascending order and without overlaps. Everything between them
        and behind them is computed for this request.
    share: how much of each segment is computed again in its new context; 0: nothing, 1: everything.
    select: which tokens those are: the segment's `first` ones (EPIC, arXiv 2410.15332), or those whose keys in an early
        layer deviate most from the reused ones (CacheBlend, arXiv 2405.16444).
    behind: what a segment's reused KV was computed behind: nothing (`alone`), or the tokens before the first segment
        (`prefix`), such as a system prompt.
    """

    tokens: Position
    segments: tuple[tuple[Position, Position], ...]
    share: Share = DEFAULT_SHARE
    select: Literal["first", "deviation"] = "first"
    behind: Literal["alone", "prefix"] = "prefix"

    def check(self) -> None:
        """
        Raises:
            InputError: the segments are not ascending ranges of such a prompt.
        """
        if not 0 < len(self.segments) <= _MAX_SEGMENTS:
            raise InputError(f"{KEY} has {len(self.segments)} segments; it needs 1 to {_MAX_SEGMENTS}")
        previous_end = 0
        for number, (first, end) in enumerate(self.segments):
            if first >= end:
                raise InputError(f"{KEY}: segment {number} is [{first}, {end}), which has no tokens")
            if first < previous_end:
                raise InputError(
                    f"{KEY}: segment {number} begins at token {first}, before segment {number - 1} ends at "
                    f"{previous_end}: give them in the prompt's order, without overlaps"
                )
            previous_end = end
        if previous_end >= self.tokens:
            raise InputError(
                f"{KEY}: the last segment ends at token {previous_end} of {self.tokens}; at least one token, such as "
                "the question, must follow it"
            )

    @property
    def end(self) -> int:
        """Where the last segment ends."""
        return self.segments[-1][1]

    @property
    def context_tokens(self) -> int:
        """How many tokens at the prompt's start every segment's KV was computed behind."""
        return self.segments[0][0] if self.behind == "prefix" else 0

    def recomputed(self, tokens: int) -> int:
        """How many tokens of a segment of this length are computed again."""
        return math.ceil(self.share * tokens)


def read_plan(params: object, salt: str | None, tokens: int | None) -> tuple[BlendPlan, str] | None:
    """The plan in a request's field for it, and its tenant's salt. None: the request has no plan.

    tokens: how many its prompt has; None if that may be a part of the plan's.

    Raises:
        InputError: the plan is invalid, or the request's salt is not the plan's.
    """
    if not isinstance(params, Mapping) or KEY not in params:
        return None
    try:
        plan = msgspec.convert(params[KEY], BlendPlan)
    except msgspec.ValidationError as error:
        raise InputError(f"{KEY}: {error}") from None
    if tokens is not None and plan.tokens != tokens:
        raise InputError(f"{KEY}: the plan is for a prompt of {plan.tokens} tokens, and this one has {tokens}")
    plan.check()
    tenant, mark, digest = (salt or "").rpartition(_MARK)
    if not mark or digest != _digest(plan):
        raise InputError(
            f"{KEY}: the request's cache_salt is not this plan's, so its KV could be found by exact requests: take "
            "both from kv_blend.request_fields"
        )
    return plan, tenant


def request_fields(
    segments: Sequence[tuple[int, int]], *, tokens: int, tenant: str = "", engine: Engine = "vllm", **options: Any
) -> dict[str, Any]:
    """The fields that a request needs besides its prompt: `cache_salt`, and the engine's field for a plan.

    segments, options: as in `BlendPlan`. tokens: length of the prompt. tenant: the salt that an exact request of this
    tenant has; segments are shared within it only. engine: that the request is for.

    Raises:
        InputError: the plan is invalid, or the tenant's salt too long.
    """
    try:
        plan = msgspec.convert({"tokens": tokens, "segments": segments, **options}, BlendPlan)
    except msgspec.ValidationError as error:
        raise InputError(f"{KEY}: {error}") from None
    plan.check()
    salt = f"{tenant}{_MARK}{_digest(plan)}"
    if len(salt) > _MAX_SALT:
        raise InputError(
            f"{KEY}: the tenant's salt has {len(tenant)} characters, and the plan's leaves room for "
            f"{_MAX_SALT - len(salt) + len(tenant)} of the {_MAX_SALT} that an engine takes"
        )
    return {
        "cache_salt": salt,
        FIELDS[engine]: {KEY: msgspec.to_builtins(plan)},
    }


def segment_salt(tenant: str) -> str:
    """The salt with which the keys of a tenant's segments begin. No exact request has it, unless it asks for it; and
    then it finds what it would compute, because a segment is stored as it is behind its context."""
    return f"{tenant}{_MARK}segments"


def _digest(plan: BlendPlan) -> str:
    """Of all that decides the KV of the plan's prompt, so that a longer prompt with the same segments finds it."""
    decides = (_VERSION, plan.segments, plan.share, plan.select, plan.behind)
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()[:32]


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
    """Up to which token each phase but the last one computes the prompt.

    SGLang takes from storage only whole pages, and only those that follow what it has. So a prompt is computed in
    phases: each is a request for the prompt up to the next page that is given, and finds in SGLang's own cache what the
    phases before it have left. The last phase is the request itself.
    """
    before = [0, *(each.end for each in given)]
    return [each.first for each, reached in zip(given, before, strict=False) if each.first > reached]


def alone(plan: BlendPlan, tokens: Sequence[int], segment: int, page_tokens: int) -> list[int]:
    """The prompt whose pages have a segment's KV: its context, the segment, and something after it that fills the last
    page."""
    first, end = plan.segments[segment]
    prompt = [*tokens[: plan.context_tokens], *tokens[first:end]]
    return prompt + [prompt[-1]] * (-len(prompt) % page_tokens)
