"""Per-request controls: our part of vLLM's `kv_transfer_params` (docs/requests.md).

A request's values override the settings. What is not understood is ignored with a line in the log and never fails a
request. The exception are invalid tags: without them the request would share chunks that it was meant not to share, so
it is served without the cache.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from kv_core.connect.controls import Controls
from kv_core.errors import InputError
from kv_core.hashing import ChainScheme
from kv_core.log import limited_logger
from kv_tiers.options import nearest
from kv_tiers.settings import Settings

_log = limited_logger(__name__)

KEY: Final = "kv_tiers"
"""The key of our options, which keeps them apart from other connectors'."""

Tokens = Annotated[int, msgspec.Meta(ge=0)]
TagName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
TagValue = Annotated[str, msgspec.Meta(max_length=1024)]
_ROOTS: Final = ChainScheme()


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a request may say. None: as the settings have it."""

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


def chosen(settings: Settings, params: object, request_id: str) -> Chosen:
    """The settings with the request's own words over them. What is wrong with these is one line in the log.

    params: the request's `kv_transfer_params`, ours among others'; None where it has none.
    """
    options, wrong = _read(params) if params is not None else (_DEFAULTS, [])
    if wrong:
        _log.warning("request %s: kv_transfer_params: %s", request_id, "; ".join(wrong))
    limit = settings.max_store_tokens if options.max_store_tokens is None else options.max_store_tokens
    controls = Controls(
        loads=options.load and (options.use or settings.use) != "never",
        promotes=options.promote,
        stores=options.store,
        min_load_tokens=settings.min_load_tokens if options.min_load_tokens is None else options.min_load_tokens,
        min_store_tokens=settings.min_store_tokens if options.min_store_tokens is None else options.min_store_tokens,
        max_store_tokens=limit or None,
        tags=options.tags,
        use=options.use,
    )
    return Chosen(controls, settings.save_decode if options.save_decode is None else options.save_decode)


_DEFAULTS: Final = RequestOptions()


def _read(params: object) -> tuple[RequestOptions, list[str]]:
    """The options that are valid, and an error text for each that is not."""
    if not isinstance(params, Mapping):
        return _DEFAULTS, [f"{_shown(params)} is left out; write {{{KEY!r}: {{…}}}}"]
    if KEY not in params:
        near = difflib.get_close_matches(KEY, [name for name in params if isinstance(name, str)], n=1, cutoff=0.8)
        return _DEFAULTS, [f"{near[0]!r} is left out; did you mean {KEY!r}?"] if near else []
    given = params[KEY]
    if not isinstance(given, Mapping):
        return _DEFAULTS, [f"{KEY} is {_shown(given)} and left out; write {{{KEY!r}: {{'store': False}}}}, say"]
    values: dict[str, Any] = {}
    wrong = []
    for name, value in given.items():
        if name not in _FIELDS:
            wrong.append(f"{KEY} has no {_shown(name)}, which is left out; {nearest(str(name), _FIELDS)}")
            continue
        try:
            values[name] = msgspec.convert(value, _FIELDS[name])
            if name == "tags":
                _ROOTS.root(tags=values[name])  # only to refuse text that is no Unicode
        except (msgspec.ValidationError, InputError) as error:
            values.pop(name, None)
            served = "nothing of this request is loaded or stored" if name == "tags" else "it is left out"
            wrong.append(f"{name} is {_shown(value)}, {str(error).lower()}; {served}")
    if "tags" in given and "tags" not in values:
        values.update(load=False, store=False)
    return RequestOptions(**values), wrong


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
