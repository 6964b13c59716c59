"""Blend plans: which parts of a prompt are segments whose KV is reused wherever they stand, and how much of it is
computed again.

A plan travels in two fields of a request: the plan itself in vLLM's `kv_transfer_params` or SGLang's `custom_params`,
and a digest of it in the request's `cache_salt`. The salt keeps everything that is computed with reused segments apart
from exact requests in the engine's own prefix cache, so a plan without its salt is refused.
"""

import difflib
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
_MAX_EDITS: Final = 256
MAX_QUESTION: Final = 256
"""Tokens. Their attention to every token of the segments is computed at once."""
_WINDOW: Final = 8
"""Tokens that are compared at once."""
_LEAST_COMMON: Final = 32
"""Tokens. Shorter runs that two conversations have in common, such as a template's, are computed with what is around
them."""

Position = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Edit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a prompt has its tokens [first, end), the conversation had the tokens `was` before. Either may be none."""

    first: Position
    end: Position
    was: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Tokens [first, end) of a prompt, whose KV was computed in another text, in which they begin at token `source`."""

    first: int
    end: int
    source: int

    @property
    def distance(self) -> int:
        """By how many positions they stand further on."""
        return self.first - self.source

    @property
    def source_end(self) -> int:
        """Where they end in that text."""
        return self.end - self.distance


class BlendPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the caller asks for.

    tokens: how many the prompt has. A plan made for another prompt is refused.
    segments: token ranges of the prompt, [first, end), in ascending order and without overlaps. Everything between them
        and behind them is computed for this request.
    share: how much of each segment is computed again in its new context; 0: nothing, 1: everything. Of one whose KV is
        exact, as the first one's is behind its prefix, nothing is.
    select: which tokens those are: the segment's `first` ones (EPIC, arXiv 2410.15332), or those of all segments to
        which the `question` attends most (after ProphetKV, arXiv 2602.02579).
    behind: what a segment's reused KV was computed behind: nothing (`alone`), or the tokens before the first segment
        (`prefix`), such as a system prompt.
    question: the tokens to select by, of the prompt, such as those that follow the last segment, or the last of them.
    edits: how this prompt came from a conversation that exact requests have had computed. Then segments are what
        follows edits, their KV is what those requests stored, and what stands before the first edit is reused exactly.
    """

    tokens: Position
    segments: tuple[tuple[Position, Position], ...]
    share: Share = DEFAULT_SHARE
    select: Literal["first", "question"] = "first"
    behind: Literal["alone", "prefix"] = "prefix"
    question: tuple[Token, ...] = ()
    edits: tuple[Edit, ...] = ()

    def check(self) -> None:
        """
        Raises:
            InputError: the segments are not ascending ranges of such a prompt, or do not follow edits of it.
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
        if (self.select == "question") != bool(self.question):
            raise InputError(f"{KEY}: select `question` needs the tokens of the `question`, and only it takes them")
        if len(self.question) > min(MAX_QUESTION, self.tokens):
            raise InputError(
                f"{KEY}: the question has {len(self.question)} tokens; it can have {min(MAX_QUESTION, self.tokens)}: "
                "give the last ones"
            )
        self._check_edits()

    def _check_edits(self) -> None:
        if not self.edits:
            return
        if self.behind != "prefix":
            raise InputError(f"{KEY}: with edits a segment's KV is that of the conversation: leave out `behind`")
        if len(self.edits) > _MAX_EDITS:
            raise InputError(f"{KEY} has {len(self.edits)} edits; there can be {_MAX_EDITS}")
        previous_end = 0
        for number, edit in enumerate(self.edits):
            if edit.first > edit.end or edit.first < previous_end:
                raise InputError(
                    f"{KEY}: edit {number} is [{edit.first}, {edit.end}), which is no range behind token "
                    f"{previous_end}: give them in the prompt's order, without overlaps"
                )
            if edit.first == edit.end and not edit.was:
                raise InputError(f"{KEY}: edit {number} at token {edit.first} neither removes nor adds a token")
            previous_end = edit.end
        for number, (first, end) in enumerate(self.segments):
            if first < self.edits[0].end:
                raise InputError(
                    f"{KEY}: segment {number} begins at token {first}, before the first edit ends at "
                    f"{self.edits[0].end}: what stands before an edit is reused without being named"
                )
            if any(first < edit.end and edit.first < end for edit in self.edits):
                raise InputError(f"{KEY}: segment {number}, [{first}, {end}), contains a part of an edit")

    @property
    def moved(self) -> list[Moved]:
        """What is reused, in order: the segments, and of an edited conversation also what precedes the first edit."""
        if not self.edits:
            return [Moved(first, end, self.context_tokens) for first, end in self.segments]
        unchanged = self.edits[0].first
        found = [Moved(0, unchanged, 0)] if unchanged else []
        edits, removed = list(self.edits), 0
        for first, end in self.segments:
            while edits and edits[0].end <= first:
                edit = edits.pop(0)
                removed += len(edit.was) - (edit.end - edit.first)
            found.append(Moved(first, end, first + removed))
        return found

    def conversation(self, tokens: Sequence[int]) -> list[int]:
        """The conversation before its edits, up to the last segment's end. tokens: the prompt's."""
        found: list[int] = []
        at = 0
        for edit in self.edits:
            found += [*tokens[at : edit.first], *edit.was]
            at = edit.end
        return [*found, *tokens[at : self.end]]

    @property
    def end(self) -> int:
        """Where the last segment ends."""
        return self.segments[-1][1]

    @property
    def context_tokens(self) -> int:
        """How many tokens at the prompt's start every segment's KV was computed behind."""
        return self.segments[0][0] if self.behind == "prefix" else 0

    def is_exact(self, moved: Moved) -> bool:
        """Whether these tokens' KV is: they stand where it was computed, behind the same text."""
        return not moved.distance and not (self.edits and moved.first)

    def recomputed(self, moved: Moved) -> int:
        """How many of these tokens are computed again."""
        return 0 if self.is_exact(moved) else math.ceil(self.share * (moved.end - moved.first))


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

    For an edited conversation: `request_fields(**edited(before, now))`.

    segments, options: as in `BlendPlan`. tokens: length of the prompt. tenant: the salt that an exact request of this
    tenant has; segments are shared within it only. engine: that the request is for.

    Raises:
        InputError: the plan is invalid, the tenant's salt no text or too long, or the engine unknown.
    """
    if engine not in FIELDS:
        raise InputError(f"{KEY}: engine is {engine!r}; it can be {' or '.join(FIELDS)}")
    if not isinstance(tenant, str):
        raise InputError(
            f"{KEY}: tenant is {tenant!r}; it is the text that an exact request has as cache_salt, or empty"
        )
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


def edited(before: Sequence[int], now: Sequence[int]) -> dict[str, Any]:
    """The `tokens`, `edits` and `segments` of a plan for a conversation of which parts were removed or replaced.

    before: as exact requests of this tenant had it, with their answers. now: the prompt, which may go on behind what
    is left of the conversation.

    Raises:
        InputError: nothing was edited, or nothing that could be reused follows an edit.
    """
    before, now = list(before), list(now)
    unchanged = next((at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), -1)
    if unchanged < 0:
        unchanged = min(len(before), len(now))
    if unchanged == len(before):
        raise InputError(
            f"{KEY}: the conversation was not edited, it went on from {len(before)} to {len(now)} tokens: an exact "
            "request finds it, so send it without a plan"
        )
    matcher = difflib.SequenceMatcher(None, _windows(before[unchanged:]), _windows(now[unchanged:]))
    edits, segments = [], []
    old = new = unchanged
    for block in matcher.get_matching_blocks():
        source, first = block.a + unchanged, block.b + unchanged
        end = min(first + block.size + _WINDOW - 1, len(now) - 1)  # a token must be left to compute
        overlap = max(0, old - source, new - first)  # with the run before
        source, first = source + overlap, first + overlap
        if end - first >= _LEAST_COMMON:
            if first > new or source > old:
                edits.append((new, first, before[old:source]))
            segments.append((first, end))
            old, new = source + end - first, end
    if not segments:
        raise InputError(
            f"{KEY}: behind the first {unchanged} tokens, which are equal, the conversation and the prompt have no "
            f"{_LEAST_COMMON} tokens in a row in common: an exact request reuses as much, so send it without a plan"
        )
    return {"tokens": len(now), "edits": edits, "segments": segments}


def _windows(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Each token with those that follow it: few of them are equal, and comparing takes time by how many are."""
    return list(zip(*(tokens[at:] for at in range(_WINDOW)), strict=False))


def is_marked(salt: str | None) -> bool:
    """Whether the engine's own cache may have blended KV under this salt."""
    return _MARK in (salt or "")


def segment_salt(tenant: str) -> str:
    """The salt with which the keys of a tenant's segments begin. No exact request has it, unless it asks for it; and
    then it finds what it would compute, because a segment is stored as it is behind its context."""
    return f"{tenant}{_MARK}segments"


def _digest(plan: BlendPlan) -> str:
    """Of all that decides the KV of the plan's prompt, so that a longer prompt with the same segments finds it."""
    decides = (_VERSION, plan.segments, plan.share, plan.select, plan.question, plan.behind, plan.edits)
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class GivenRun:
    """Whole pages of what is reused.

    number: in the plan's `moved`. first, end: tokens of the prompt.
    distance: by how many positions the segment stands behind the place in which its KV was computed.
    """

    number: int
    first: int
    end: int
    distance: int


def given_pages(plan: BlendPlan, page_tokens: int) -> list[GivenRun]:
    """What is reused of each segment: all but its first tokens that are computed again, and what of its first and last
    page belongs to other text."""
    found = []
    for number, moved in enumerate(plan.moved):
        begin = -(-(moved.first + plan.recomputed(moved)) // page_tokens) * page_tokens
        stop = moved.end // page_tokens * page_tokens
        if begin < stop:
            found.append(GivenRun(number, begin, stop, moved.distance))
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
