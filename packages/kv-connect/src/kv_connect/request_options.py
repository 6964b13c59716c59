"""Per-request controls: our part of vLLM's `kv_transfer_params` and SGLang's `custom_params` (docs/requests.md).

A request's values override the settings. Unknown or invalid ones are ignored with a line in the log and never fail a
request. Two options are restrictions, which a mistake must not undo: with invalid tags the request would share chunks
that it was meant not to share, so it is served without the cache; with invalid tiers its chunks might be written where
they must not be, so they stay in the pool.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from kv_core.cost import Use
from kv_core.errors import InputError, did_you_mean
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger
from kv_server.hints import (
    MAX_TTL_S,
    DemoteHint,
    HintOutcome,
    HintOutcomes,
    Hints,
    PinHint,
    PrefetchHint,
    RetainHint,
    UnpinHint,
    read_hints,
)
from kv_tiers.options import in_words, spelled_as
from kv_tiers.settings import Settings

_log = limited_logger(__name__)

KEY: Final = "kv_tiers"
"""The key of our options, which keeps them apart from other connectors'."""
_MAX_NAMES: Final = 16
"""How many unknown names of a request are compared with ours and logged: a client may send any number, and each takes
tens of microseconds, in which the engine's scheduler waits."""

Tokens = Annotated[int, msgspec.Meta(ge=0)]
TagName = Annotated[
    str, spelled_as(r"[A-Za-z0-9._-]{1,64}", "a name of up to 64 letters, digits, dots, dashes and underscores")
]
TagValue = Annotated[str, msgspec.Meta(max_length=1024)]
_ROOTS: Final = ChainScheme()


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may load and store. The defaults are those of a request without options."""

    load: bool = True
    """Whether held chunks may be loaded for it."""
    use: Use | None = None
    """When held chunks are used: if it pays, always, or never, like `load: false`. None: as in the settings."""
    promote: bool = True
    """Whether lower tiers are queried and waited for; else only what is in the pool now counts."""
    store: bool = True
    """Whether what it computes may be stored."""
    save_decode: bool = False
    """Whether its generated tokens are stored too."""
    min_load_tokens: Tokens = 0
    """A smaller hit is computed instead."""
    min_store_tokens: Tokens = 0
    """If fewer tokens could be stored, none are."""
    max_store_tokens: Tokens | None = None
    """Tokens beyond these are not stored; None, or 0 in a request: no limit. A hit is a prefix, so the end is the only
    part that can be left out without making what follows it useless."""
    retain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """For how long what it stores and what of it is held stays in the pool, however often it is read, within limits."""
    tiers: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] | None = None
    """The tiers that may be read and written for it, besides the pool; None: all."""
    tags: Annotated[dict[TagName, TagValue], msgspec.Meta(max_length=16)] = {}
    """Part of the root of its chain (docs/formats/keys.md), so that only requests with the same tags share chunks."""
    hands_over_tokens: int = 0
    """Not an option. Another engine continues after this many tokens of the prompt (`HandOvers`): they are stored
    including the last, partial chunk, and held in the pool until they are read. 0: none does."""
    awaits_tokens: int = 0
    """Not an option. Another engine is storing this many tokens of the prompt. 0: none is."""
    is_demoted: bool = False
    """Not an option, but a hint: its chunks are the first to be evicted."""
    is_prefetched: bool = False
    """The same: lower tiers are queried when it arrives."""
    hinted: HintOutcomes | None = None
    """The outcomes of its hints; None: it has none."""

    @property
    def retain_ms(self) -> int:
        return round(self.retain_s * 1000)

    def storable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens may be stored."""
        if not self.store or tokens < self.min_store_tokens:
            return 0
        return tokens if self.max_store_tokens is None else min(tokens, self.max_store_tokens)


NO_CONTROLS: Final = Controls()
"""The controls of a request without options."""
_OPTIONS: Final[Mapping[str, Any]] = {
    field.name: field.type
    for field in msgspec.structs.fields(Controls)
    if field.name not in ("hands_over_tokens", "awaits_tokens", "is_demoted", "is_prefetched", "hinted")
}
_HINTS: Final = "hints"
_OF_SETTINGS: Final = ("save_decode", "min_load_tokens", "min_store_tokens", "max_store_tokens")
"""The options that are settings too."""
_NULLS: Final = {*_OF_SETTINGS, "use", "tiers"}
"""The options that a request may leave as they are in the settings by `null`."""
_SERVED: Final[Mapping[str, str]] = {
    "tags": "nothing of this request is loaded or stored",
    "tiers": "only the pool is read and written for this request",
}
"""The effect of an invalid value of a restriction."""


def chosen(
    settings: Settings,
    params: object,
    request_id: str,
    *,
    tiers: Sequence[str] = (),
    where: str = "kv_transfer_params",
    unsupported: Collection[str] = (),
    hints: object = None,
) -> Controls:
    """The settings, overridden by the request's own values. Mistakes in these are one line in the log.

    params: the request's options for connectors, ours and others; None if it has none.
    where: the request's field, for the log.
    hints: the envelope of KV hints that the engine carries with the request; else `params` may have one.
    """
    options, errors = _read(params, tiers, unsupported) if params is not None else ({}, [])
    if errors:
        _log.warning("request %s: %s: %s", request_id, where, "; ".join(errors))
    options = {name: getattr(settings, name) for name in _OF_SETTINGS} | options
    options["load"] = options.get("load", True) and (options.get("use") or settings.use) != "never"
    options["max_store_tokens"] = options["max_store_tokens"] or None
    controls = Controls(**options)
    ours = params.get(KEY) if isinstance(params, Mapping) else None
    if hints is None and isinstance(ours, Mapping):
        hints = ours.get(_HINTS)
    return controls if hints is None else _follow(controls, read_hints(hints))


def root_of(tags: object) -> bytes:
    """The root of the chain of a request with these tags; empty if there are none.

    Raises:
        InputError: they are invalid.
    """
    try:
        return _ROOTS.root(tags=msgspec.convert(tags, _OPTIONS["tags"]))
    except msgspec.ValidationError as error:
        raise InputError(in_words(error)) from None


def _follow(controls: Controls, hints: Hints) -> Controls:
    """What the hints ask for as controls, with their outcomes."""
    outcomes = []
    for hint in hints.actions:
        if isinstance(hint, HintOutcome):
            outcomes.append(hint)
            continue
        match hint.payload:
            case RetainHint() | DemoteHint() if not controls.store:
                outcome = hint.rejected("this request stores nothing")
            case RetainHint(seconds=requested_s):
                retain_s = min(requested_s, MAX_TTL_S)
                controls = msgspec.structs.replace(controls, retain_s=max(retain_s, controls.retain_s))
                outcome = hint.accepted(ttl_seconds=retain_s)
                if requested_s > retain_s:
                    outcome = hint.clipped("chunks are retained for an hour at most", ttl_seconds=retain_s)
            case DemoteHint():
                controls, outcome = msgspec.structs.replace(controls, is_demoted=True), hint.accepted()
            case PrefetchHint() if not (controls.load and controls.promote):
                outcome = hint.rejected("this request loads nothing from lower tiers")
            case PrefetchHint():
                controls, outcome = msgspec.structs.replace(controls, is_prefetched=True), hint.accepted()
            case PinHint() | UnpinHint():
                outcome = hint.rejected("a pin has no end: send kv.retain, or have an operator pin it by POST /hints")
        outcomes.append(outcome)
    return msgspec.structs.replace(controls, hinted=HintOutcomes(hints.message_id, tuple(outcomes)))


def _read(params: object, tiers: Sequence[str], unsupported: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The options that are valid, and an error text for each that is not."""
    if not isinstance(params, Mapping):
        return {}, [f"{_shown(params)} is ignored; write {{{KEY!r}: {{…}}}}"]
    if KEY not in params:
        names = islice((name for name in params if isinstance(name, str)), _MAX_NAMES)
        similar = difflib.get_close_matches(KEY, names, n=1, cutoff=0.8)
        return {}, [f"{similar[0]!r} is ignored; did you mean {KEY!r}?"] if similar else []
    options = params[KEY]
    if not isinstance(options, Mapping):
        return {}, [f"{KEY} is {_shown(options)} and is ignored; write {{{KEY!r}: {{'store': False}}}}, say"]
    values: dict[str, Any] = {}
    unknown = [name for name in options if name not in _OPTIONS and name != _HINTS]
    errors = [
        f"{KEY} has no {_shown(name)}, which is ignored; {did_you_mean(str(name), _OPTIONS)}"
        for name in unknown[:_MAX_NAMES]
    ]
    if len(unknown) > _MAX_NAMES:
        errors.append(f"{len(unknown) - _MAX_NAMES} more names are ignored")
    for name, value in options.items():
        if name not in _OPTIONS or (value is None and name in _NULLS and name not in unsupported):
            continue
        if name in unsupported:
            errors.append(f"{name} is not supported by this engine; {_SERVED.get(name, 'it is ignored')}")
            continue
        try:
            values[name] = msgspec.convert(value, _OPTIONS[name])
            if name == "tags":
                _ROOTS.root(tags=values[name])  # only to refuse text that is not Unicode
            elif name == "tiers" and values[name]:
                errors += [
                    f"there is no tier {_shown(tier)}, which is ignored; {did_you_mean(tier, tiers)}"
                    for tier in values[name]
                    if tier not in tiers
                ]
                values[name] = tuple(tier for tier in values[name] if tier in tiers)
        except (msgspec.ValidationError, InputError, UnicodeEncodeError) as error:  # the last: `use`
            values.pop(name, None)
            if name == "tiers":
                values[name] = ()
            why = in_words(error)
            why = why[:1].lower() + why[1:]
            errors.append(f"{name} is {_shown(value)}, {why}; {_SERVED.get(name, 'it is ignored')}")
    if "tags" in options and "tags" not in values:
        values.update(load=False, store=False)
    return values, errors


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
