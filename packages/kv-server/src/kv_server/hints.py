"""KV hints: what an orchestrator asks of a prompt's chunks, in the envelope that vLLM and SGLang carry with a request.

An envelope comes from outside. Nothing in it raises, fails a request or changes a token, and it reaches no further than
the chunks of the prompt with which it came. Every action gets an outcome. The names of actions and the forms of their
payloads are those that the engines' own proposals use, where they mean the same (docs/requests.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import msgspec
from kv_core.errors import did_you_mean
from kv_tiers.options import in_words, spelled_as
from msgspec import Meta

MAX_ACTIONS: Final = 64
MAX_TTL_S: Final = 3600.0
RETAINED: Final = "at most an hour, and a quarter of the pool or quota"
_MAX_TEXT: Final = 200
_VERSIONS: Final = ("0.1", "1.0")
"""Of the envelope, which are read alike: Dynamo and SGLang write the first, proposals for vLLM both."""
_VERSION: Final = "1.0"
"""Of every action."""

Id = Annotated[str, spelled_as(r"[ -~]{0,128}", "up to 128 printable ASCII characters")]
Seconds = Annotated[float, Meta(ge=0)]
Kind = Annotated[str, spelled_as(r"[!-~]{1,64}", "1 to 64 printable ASCII characters")]


class HintOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has become of an action.

    outcome: clipped: done in part. deferred: begun, and not done yet.
    why: it was not done, or only in part.
    granted: what was done: `ttl_seconds`, `chunks`.
    """

    action_id: str
    action_type: str
    outcome: Literal["accepted", "clipped", "deferred", "rejected"]
    why: str = ""
    granted: dict[str, float] = {}


class HintOutcomes(msgspec.Struct, frozen=True):
    """message_id: of the envelope; empty if it could not be read. outcomes: in the order of its actions."""

    message_id: str
    outcomes: tuple[HintOutcome, ...]

    def retained(self, chunks: int) -> "HintOutcomes":
        """The same where so many leading chunks of the prompt are retained, and not all."""
        return HintOutcomes(
            self.message_id,
            tuple(
                one
                if one.action_type != RetainHint.KIND or one.outcome == "rejected"
                else HintOutcome(one.action_id, one.action_type, "rejected", f"no room: {RETAINED}")
                if not chunks
                else HintOutcome(one.action_id, one.action_type, "clipped", RETAINED, {**one.granted, "chunks": chunks})
                for one in self.outcomes
            ),
        )


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: Id
    message_id: Id
    actions: Annotated[list[Any], Meta(max_length=MAX_ACTIONS)] = []


class _Action(msgspec.Struct, frozen=True):
    action_id: Id
    action_type: Kind
    action_version: Id
    payload: dict[str, Any] = {}


class _Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    priority: Annotated[int, Meta(ge=0, le=100)]
    start: Annotated[int, Meta(ge=0)] = 0
    end: Annotated[int, Meta(ge=0)] | None = None
    duration: Seconds | None = None
    covers_output: bool = False


class RetainHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the prompt in the pool, for the longest of the times given; priority 0 is none."""

    KIND: ClassVar = "kv.retain"
    ttl_seconds: Seconds | None = None
    priority: Annotated[int, Meta(ge=0, le=100)] = 100
    scope: str | None = None
    directives: Annotated[list[_Directive], Meta(max_length=128)] = []

    @property
    def seconds(self) -> float:
        """Infinite if no end is given."""
        times = [self.ttl_seconds] if self.priority and (self.ttl_seconds is not None or not self.directives) else []
        times += [one.duration for one in self.directives if one.priority]
        return max((math.inf if seconds is None else seconds for seconds in times), default=0.0)


class PrefetchHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bring the prompt from the lower tiers into the pool."""

    KIND: ClassVar = "kv.prefetch"


class DemoteHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt is the first to leave the pool."""

    KIND: ClassVar = "kv.demote"


class PinHint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    KIND: ClassVar = "kv.pin"
    name: Annotated[
        str, spelled_as(r"[A-Za-z0-9._-]{1,64}", "a name of up to 64 letters, digits, dots, dashes and underscores")
    ]


class UnpinHint(PinHint, frozen=True, forbid_unknown_fields=True):
    KIND: ClassVar = "kv.unpin"


Payload = RetainHint | PrefetchHint | DemoteHint | PinHint | UnpinHint
_PAYLOADS: Final[Mapping[str, type[Payload]]] = {kind.KIND: kind for kind in get_args(Payload)}
_ELSEWHERE: Final[Mapping[str, str]] = {
    "kv.share": "every engine whose settings name the same tiers or peers has these chunks already",
    "kv.fetch": "the settings name the peers to read from, never a request",
}


@dataclass(frozen=True, slots=True)
class Hint:
    """A valid action."""

    action_id: str
    payload: Payload

    def accepted(self, **granted: float) -> HintOutcome:
        return HintOutcome(self.action_id, self.payload.KIND, "accepted", granted=granted)

    def clipped(self, why: str, **granted: float) -> HintOutcome:
        return HintOutcome(self.action_id, self.payload.KIND, "clipped", why, granted)

    def deferred(self, why: str, **granted: float) -> HintOutcome:
        return HintOutcome(self.action_id, self.payload.KIND, "deferred", why, granted)

    def rejected(self, why: str) -> HintOutcome:
        return HintOutcome(self.action_id, self.payload.KIND, "rejected", why)


@dataclass(frozen=True, slots=True)
class Hints:
    """The actions of an envelope in its order, those that are rejected as their outcomes."""

    message_id: str = ""
    actions: list[Hint | HintOutcome] = field(default_factory=list)


def read_hints(envelope: object) -> Hints:
    """envelope: a JSON object, or either engine's `KvHintsEnvelope`."""
    try:
        read = msgspec.convert(envelope, _Envelope, from_attributes=True)
    except Exception as error:  # noqa: BLE001  # an object of a caller's own may raise anything
        return Hints("", [_rejected("", "", f"the envelope is not read: {_words(error)}")])
    if read.protocol_version not in _VERSIONS:
        why = f"protocol_version is {read.protocol_version!r}; this cache reads {' and '.join(_VERSIONS)}"
        return Hints(read.message_id, [_rejected("", "", why)])
    return Hints(read.message_id, [_read(action) for action in read.actions])


def _read(given: object) -> Hint | HintOutcome:
    action_id = kind = ""
    try:
        action = msgspec.convert(given, _Action, from_attributes=True)
        action_id, kind = action.action_id, action.action_type
        if kind in _ELSEWHERE:
            return _rejected(action_id, kind, _ELSEWHERE[kind])
        if kind not in _PAYLOADS:
            return _rejected(action_id, kind, f"there is no action {kind!r}; {did_you_mean(kind, _PAYLOADS)}")
        if action.action_version != _VERSION:
            return _rejected(action_id, kind, f"its version is {action.action_version!r}; this cache has {_VERSION}")
        hint = Hint(action_id, msgspec.convert(action.payload, _PAYLOADS[kind]))
        if isinstance(hint.payload, RetainHint) and not hint.payload.seconds:
            return hint.rejected("it retains nothing: give ttl_seconds, and a priority above 0")
        return hint
    except Exception as error:  # noqa: BLE001  # as above
        return _rejected(action_id, kind, _words(error))


def _rejected(action_id: str, kind: str, why: str) -> HintOutcome:
    return HintOutcome(action_id, kind, "rejected", why)


def _words(error: Exception) -> str:
    """Of limited length: an error may quote what was given."""
    text = in_words(error).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
