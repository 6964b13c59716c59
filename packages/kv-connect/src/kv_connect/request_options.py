"""Per-request controls: our part of vLLM's `kv_transfer_params` and SGLang's `custom_params` (docs/requests.md).

A request's values override the settings. Unknown or invalid ones are ignored with a line in the log and never fail a
request. Two options are restrictions, which a mistake must not undo: with invalid tags the request would share chunks
that it was meant not to share, so it is served without the cache; with invalid tiers its chunks might be written where
they must not be, so they stay in the pool.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from kv_core.errors import InputError
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger
from kv_tiers.options import in_words, nearest, spelled_as
from kv_tiers.settings import Settings

from kv_connect.halves.request import Controls

_log = limited_logger(__name__)

KEY: Final = "kv_tiers"
"""The key of our options, which keeps them apart from other connectors'."""
_MAX_NAMES: Final = 16
"""How many unknown names of a request are compared with ours and logged: a client may send any number, and each takes
tens of microseconds, in which the engine's scheduler waits."""

Tokens = Annotated[int, msgspec.Meta(ge=0)]
TagName = Annotated[
    str, spelled_as(r"^[A-Za-z0-9._-]{1,64}\Z", "a name of up to 64 letters, digits, dots, dashes and underscores")
]
TagValue = Annotated[str, msgspec.Meta(max_length=1024)]
_ROOTS: Final = ChainScheme()


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All per-request options. None: as in the settings."""

    load: bool = True
    """False: nothing is loaded."""
    use: Literal["auto", "always", "never"] | None = None
    """When held chunks are used: if it pays, always, or never, like `load: false`."""
    promote: bool = True
    """False: only what is in the pool is loaded, without waiting for lower tiers."""
    store: bool = True
    """False: nothing is stored."""
    save_decode: bool | None = None
    """Whether its generated tokens are stored too."""
    min_load_tokens: Tokens | None = None
    """A smaller hit is not loaded."""
    min_store_tokens: Tokens | None = None
    """If fewer tokens could be stored, none are."""
    max_store_tokens: Tokens | None = None
    """Tokens beyond this number are not stored. 0: no limit."""
    retain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    """For how long what it stores and what of it is held stays in the pool, within limits."""
    tiers: Annotated[list[str], msgspec.Meta(max_length=64)] | None = None
    """The tiers that are read and written for it, besides the pool."""
    tags: Annotated[dict[TagName, TagValue], msgspec.Meta(max_length=16)] = {}
    """Only requests with the same tags share chunks."""


_FIELDS: Final[Mapping[str, Any]] = {field.name: field.type for field in msgspec.structs.fields(RequestOptions)}


@dataclass(frozen=True, slots=True)
class Chosen:
    """The options that apply to one request.

    controls: those of the scheduler half.
    save_decode: whether generated tokens are stored too.
    """

    controls: Controls
    save_decode: bool


def chosen(
    settings: Settings,
    params: object,
    request_id: str,
    *,
    tiers: Sequence[str] = (),
    where: str = "kv_transfer_params",
    unsupported: Collection[str] = (),
) -> Chosen:
    """The settings, overridden by the request's own values. Mistakes in these are one line in the log.

    params: the request's options for connectors, ours and others; None if it has none.
    tiers: the names of the cache's tiers.
    where: the request's field, for the log.
    unsupported: options that this engine does not support.
    """
    options, errors = _read(params, tiers, unsupported) if params is not None else (_DEFAULTS, [])
    if errors:
        _log.warning("request %s: %s: %s", request_id, where, "; ".join(errors))
    limit = settings.max_store_tokens if options.max_store_tokens is None else options.max_store_tokens
    controls = Controls(
        loads=options.load and (options.use or settings.use) != "never",
        promotes=options.promote,
        stores=options.store,
        min_load_tokens=settings.min_load_tokens if options.min_load_tokens is None else options.min_load_tokens,
        min_store_tokens=settings.min_store_tokens if options.min_store_tokens is None else options.min_store_tokens,
        max_store_tokens=limit or None,
        retain_s=options.retain_s,
        tiers=None if options.tiers is None else tuple(options.tiers),
        tags=options.tags,
        use=options.use,
    )
    return Chosen(controls, settings.save_decode if options.save_decode is None else options.save_decode)


_DEFAULTS: Final = RequestOptions()
_SERVED: Final[Mapping[str, str]] = {
    "tags": "nothing of this request is loaded or stored",
    "tiers": "only the pool is read and written for this request",
}
"""The effect of an invalid value of a restriction."""


def _read(params: object, tiers: Sequence[str], unsupported: Collection[str]) -> tuple[RequestOptions, list[str]]:
    """The options that are valid, and an error text for each that is not."""
    if not isinstance(params, Mapping):
        return _DEFAULTS, [f"{_shown(params)} is ignored; write {{{KEY!r}: {{…}}}}"]
    if KEY not in params:
        names = islice((name for name in params if isinstance(name, str)), _MAX_NAMES)
        similar = difflib.get_close_matches(KEY, names, n=1, cutoff=0.8)
        return _DEFAULTS, [f"{similar[0]!r} is ignored; did you mean {KEY!r}?"] if similar else []
    options = params[KEY]
    if not isinstance(options, Mapping):
        return _DEFAULTS, [f"{KEY} is {_shown(options)} and is ignored; write {{{KEY!r}: {{'store': False}}}}, say"]
    values: dict[str, Any] = {}
    unknown = [name for name in options if name not in _FIELDS]
    errors = [
        f"{KEY} has no {_shown(name)}, which is ignored; {nearest(str(name), _FIELDS)}" for name in unknown[:_MAX_NAMES]
    ]
    if len(unknown) > _MAX_NAMES:
        errors.append(f"{len(unknown) - _MAX_NAMES} more names are ignored")
    for name, value in options.items():
        if name not in _FIELDS:
            continue
        if name in unsupported:
            errors.append(f"{name} is not supported by this engine; {_SERVED.get(name, 'it is ignored')}")
            continue
        try:
            values[name] = msgspec.convert(value, _FIELDS[name])
            if name == "tags":
                _ROOTS.root(tags=values[name])  # only to refuse text that is not Unicode
            elif name == "tiers" and values[name]:
                errors += [
                    f"there is no tier {_shown(tier)}, which is ignored; {nearest(tier, tiers)}"
                    for tier in values[name]
                    if tier not in tiers
                ]
                values[name] = [tier for tier in values[name] if tier in tiers]
        except (msgspec.ValidationError, InputError) as error:
            values.pop(name, None)
            if name == "tiers":
                values[name] = []
            why = in_words(error)
            why = why[:1].lower() + why[1:]
            errors.append(f"{name} is {_shown(value)}, {why}; {_SERVED.get(name, 'it is ignored')}")
    if "tags" in options and "tags" not in values:
        values.update(load=False, store=False)
    return RequestOptions(**values), errors


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
