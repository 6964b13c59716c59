"""Phases of a blended request, behind SGLang's one entrance for requests, `TokenizerManager.generate_request`.

So a client sends one ordinary request with a plan, to `sglang.Engine` or over HTTP, streaming or not. Segments that are
not known to be held are computed behind their context first; then come the phases, one after the other; the last is the
request itself. Whatever fails on the way costs only the reuse.
"""

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec
from kv_connect.request_options import KEY as OPTIONS
from kv_core.errors import InputError
from kv_core.log import limited_logger
from kv_sglang.metrics import NO_FIGURES, Figures, registered

from kv_blend.figures import BLEND_FIGURES
from kv_blend.plan import FIELDS, KEY, BlendPlan, GivenRun, alone, given_pages, phase_ends, read_plan, segment_salt
from kv_blend.sglang.plugin import blends

_log = limited_logger(__name__)

_FIELD: Final = FIELDS["sglang"]
_MAX_KNOWN: Final = 1 << 16
"""Segments that are remembered as computed."""
_MAX_IN_VAIN: Final = 3
"""After so many requests in a row of which no segment was reused that was computed for it, the engine is not asked,"""
_TRY_EVERY: Final = 16
"""but for one request in so many."""

Generate = Callable[..., AsyncIterator[Any]]


@dataclass(frozen=True, slots=True)
class _BlendedPrompt:
    """One prompt with a plan.

    salt: its request's. options: what its request may load and store, for every phase.
    """

    plan: BlendPlan
    tokens: Sequence[int]
    tenant: str
    salt: str
    extra_key: str | None
    options: Mapping[str, Any]

    @property
    def may_load(self) -> bool:
        return self.options.get("load", True) is not False and self.options.get("use") != "never"


@dataclass(slots=True)
class _Reuse:
    """What became of one prompt's segments.

    given: what could be reused of them. were_held: those that needed not be computed first. were_computed: those that
        were.
    placed: by segment, how many tokens SGLang got.
    """

    plan: BlendPlan
    given: Sequence[GivenRun]
    reached: int = 0
    were_held: set[int] = field(default_factory=set)
    were_computed: set[int] = field(default_factory=set)
    placed: dict[int, int] = field(default_factory=dict)

    def computed(self, end: int, cached: int) -> set[int]:
        """A phase up to this token had so many from caches. Returns the segments of which pages were missing."""
        found = [each for each in self.given if self.reached <= each.first and each.end <= end]
        self.placed |= {each.number: max(0, min(cached, each.end) - each.first) for each in found}
        self.reached = end
        return {each.number for each in found if cached < each.end}

    @property
    def report(self) -> dict[str, int]:
        tokens = sum(each.end - each.first for each in self.plan.moved)
        held = sum(placed for segment, placed in self.placed.items() if segment in self.were_held)
        return {
            "segment_tokens": tokens,
            "held_tokens": held,
            "recomputed_tokens": tokens - sum(self.placed.values()),
        }


class Phases:
    """Of one tokenizer manager; used on its event loop."""

    def __init__(self, manager: Any) -> None:
        self._args = manager.server_args
        self._model = manager.model_config
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._in_vain = 0
        self._figures = NO_FIGURES
        if manager.enable_metrics:
            if not _MADE:
                _MADE.append(Figures(registered(BLEND_FIGURES, manager.metrics_collector.labels)))
            (self._figures,) = _MADE

    async def serve(self, generate: Generate, manager: Any, obj: Any, request: Any) -> AsyncIterator[Any]:
        """The answers to a request of which at least one prompt has a plan.

        Raises:
            ValueError: a plan is invalid, or has not its salt. SGLang answers with status 400.
        """

        async def ask(prompt: Sequence[int], salt: str, of: _BlendedPrompt, params: Mapping[str, Any]) -> int:
            """Compute a prompt. Returns how many of its tokens SGLang had."""
            phase = type(obj)(
                input_ids=list(prompt),
                sampling_params={"max_new_tokens": 0, "temperature": 0.0, _FIELD: {OPTIONS: of.options, **params}},
                cache_salt=salt,
                extra_key=of.extra_key,
                priority=_of(obj.priority, 0),
            )
            cached = 0
            async for answer in generate(manager, phase, request):
                cached = int(answer["meta_info"].get("cached_tokens") or 0)
            return cached

        blended = await _read(manager, obj)
        why_not = self._why_not(obj, blended) or self._why_not_now()
        if why_not:
            _log.warning("a request with a plan is computed whole: %s", why_not)
            _compute_whole(obj, blended)
        names = [{} if each is None or why_not else self._names(each) for each in blended]
        reuse = [None if each is None else _Reuse(each.plan, self._given(each)) for each in blended]
        if not why_not:
            await asyncio.gather(
                *(
                    self._phases(ask, each, its_names, its_reuse)
                    for each, its_names, its_reuse in zip(blended, names, reuse, strict=True)
                    if each is not None and its_reuse is not None
                )
            )
        reported: dict[int, dict[str, Any]] = {}
        counted: set[int] = set()
        async for answer in generate(manager, obj, request):
            for number, one in enumerate(answer if isinstance(answer, list) else [answer]):
                index = one.get("index", number)
                prompt = index // (obj.parallel_sample_num or 1)
                its, each = reuse[prompt], blended[prompt]
                if its is None or each is None:
                    continue
                if index not in reported:
                    if not why_not:
                        cached = int(one["meta_info"].get("cached_tokens") or 0)
                        self._forget(names[prompt], its.computed(len(each.tokens), cached))
                        if its.were_computed and not each.options:
                            is_reused = any(its.placed.get(number) for number in its.were_computed)
                            self._in_vain = 0 if is_reused else self._in_vain + 1
                    reported[index] = {"refused": why_not} if why_not else its.report
                    if prompt not in counted:
                        counted.add(prompt)
                        self._count(reported[index])
                one["meta_info"][KEY] = reported[index]
            yield answer

    async def _phases(
        self, ask: Callable[..., Any], blended: _BlendedPrompt, names: Mapping[int, bytes], reuse: _Reuse
    ) -> None:
        """Compute what is missing of its segments, and all phases but the last."""
        plan, tokens = blended.plan, blended.tokens
        if plan.edits:  # their pages are exact requests'
            reuse.were_held |= {each.number for each in reuse.given}
        reuse.were_held |= {number for number, name in names.items() if name in self._known}
        may_store = blended.options.get("store", True) is not False
        missing = {names[number]: number for number in names.keys() - reuse.were_held if may_store}
        salt = segment_salt(blended.tenant)
        try:
            await asyncio.gather(
                *(ask(alone(plan, tokens, number, self._page), salt, blended, {}) for number in missing.values())
            )
            reuse.were_computed |= set(missing.values())
            self._known.update(dict.fromkeys(missing))
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            for end in phase_ends(reuse.given):
                cached = await ask(tokens[:end], blended.salt, blended, {KEY: msgspec.to_builtins(plan)})
                self._forget(names, reuse.computed(end, cached))
        except Exception:  # noqa: BLE001  # the request itself says what is wrong with it, or is computed whole
            _log.exception("a phase of a request failed; what it would have left is computed with the request")

    def _why_not_now(self) -> str:
        """Why no request is blended for the time being. Whether keys can be moved is known in another process, and
        segments would be computed for nothing."""
        if self._in_vain < _MAX_IN_VAIN:
            return ""
        self._in_vain += 1
        is_tried = self._in_vain % _TRY_EVERY == 0
        return "" if is_tried else "no segment of the last requests could be reused; the engine's log says why"

    def _count(self, report: Mapping[str, Any]) -> None:
        if "refused" in report:
            self._figures.add("blend_refused", 1)
            return
        self._figures.add("blend_requests", 1)
        for name, tokens in report.items():
            self._figures.add(f"blend_{name}", tokens)

    def _forget(self, names: Mapping[int, bytes], segments: set[int]) -> None:
        """The store did not have these: they are computed again for the next request."""
        for number in segments & names.keys():
            self._known.pop(names[number], None)

    @property
    def _page(self) -> int:
        return int(self._args.page_size)

    def _given(self, blended: _BlendedPrompt) -> list[GivenRun]:
        return given_pages(blended.plan, self._page)

    def _names(self, blended: _BlendedPrompt) -> dict[int, bytes]:
        """What each segment that can be reused is remembered by, if it is computed when it is not held."""
        found = {}
        for each in () if blended.plan.edits else self._given(blended):
            prompt = alone(blended.plan, blended.tokens, each.number, self._page)
            identity = repr((blended.tenant, blended.extra_key, blended.options.get("tags"), prompt))
            found[each.number] = hashlib.sha256(identity.encode()).digest()
        return found

    def _why_not(self, obj: Any, blended: Sequence[_BlendedPrompt | None]) -> str:
        """Why this request cannot be blended; empty if it can."""
        args, model = self._args, self._model
        engine = {
            "it was not started with the arguments of `python -m kv_blend.sglang flags`": not blends(args),
            "it has replicas": args.dp_size > 1,
            "it guesses tokens (speculative decoding)": bool(args.speculative_algorithm),
            "it serves LoRA adapters": bool(args.enable_lora),
            "it prefills for another engine, or decodes": args.disaggregation_mode != "null",
            "its model has latent attention (MLA), or none": model.attention_arch.name != "MHA",
            "its model has sliding windows": bool(model.is_hybrid_swa),
            "its KV cache has not the model's dtype (--kv-cache-dtype)": args.kv_cache_dtype
            not in ("auto", "bf16", "bfloat16"),
            "it stores pages only when it drops them (--hicache-write-policy write_back)": args.hicache_write_policy
            == "write_back",
        }
        longest = max((len(each.tokens) for each in blended if each is not None), default=0)
        starts = obj.logprob_start_len if isinstance(obj.logprob_start_len, list) else [obj.logprob_start_len]
        has_logprobs = any(obj.return_logprob) if isinstance(obj.return_logprob, list) else bool(obj.return_logprob)
        of_request = {
            "an adapter": bool(obj.lora_path),
            "media": obj.contains_mm_input(),
            "a session": bool(obj.session_params),
            "log-probabilities of its prompt": has_logprobs
            and any(start is not None and 0 <= start < longest - 1 for start in starts),
            "options by which it may load nothing": any(each is not None and not each.may_load for each in blended),
            "a selection by its question": any(each is not None and each.plan.select != "first" for each in blended),
        }
        return "; ".join(
            itertools.chain(
                (f"this engine does not blend: {reason}" for reason, holds in engine.items() if holds),
                (f"a request with {reason} cannot be blended" for reason, holds in of_request.items() if holds),
            )
        )


_MADE: Final[list[Figures]] = []
_PHASES: WeakKeyDictionary[Any, Phases] = WeakKeyDictionary()


def generate_request(generate: Generate, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """In the place of SGLang's method of this name."""
    params = [_params(sampling) for sampling in _all_of(getattr(obj, "sampling_params", None))]
    if not any(KEY in each for each in params) or not hasattr(obj, "cache_salt"):
        return generate(manager, obj, request)
    if manager not in _PHASES:
        _PHASES[manager] = Phases(manager)
    return _PHASES[manager].serve(generate, manager, obj, request)


async def _read(manager: Any, obj: Any) -> list[_BlendedPrompt | None]:
    """The plan of each of a request's prompts.

    Raises:
        ValueError: one is invalid.
    """
    prompts = obj.input_ids if obj.input_ids is not None else obj.text
    has_many = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    found: list[_BlendedPrompt | None] = []
    many = prompts if has_many else [prompts]
    for name in ("sampling_params", "cache_salt", "extra_key"):
        given = getattr(obj, name)
        if isinstance(given, list) and len(given) != len(many):
            raise ValueError(f"{KEY}: the request has {len(many)} prompts, and {len(given)} of {name}")
    for number, prompt in enumerate(many):
        params = _params(_of(obj.sampling_params, number))
        if KEY not in params:
            found.append(None)
            continue
        tokens = list((await manager._tokenize_texts(prompt))[0]) if isinstance(prompt, str) else prompt
        if not tokens:
            raise ValueError(f"{KEY}: a request with a plan needs a prompt of text or tokens")
        salt = _of(obj.cache_salt, number) or ""
        try:
            read = read_plan(params, salt, len(tokens))
        except InputError as error:
            raise ValueError(str(error)) from None
        assert read is not None
        plan, tenant = read
        before, most = len(plan.conversation(tokens)), manager.model_config.context_len
        if before > most:
            raise ValueError(
                f"{KEY}: before its edits the conversation had {before} tokens, more than the {most} of the model"
            )
        given = params.get(OPTIONS)
        options = dict(given) if isinstance(given, Mapping) else {}
        options.pop("hints", None)  # which are the request's own
        found.append(_BlendedPrompt(plan, tokens, tenant, salt, _of(obj.extra_key, number), options))
    return found


def _compute_whole(obj: Any, blended: Sequence[_BlendedPrompt | None]) -> None:
    """Make an exact request of this one."""
    sampling = [
        {**each, _FIELD: {name: value for name, value in _params(each).items() if name != KEY}}
        for each in _all_of(obj.sampling_params)
    ]
    obj.sampling_params = sampling if isinstance(obj.sampling_params, list) else sampling[0]
    salts = [
        (_of(obj.cache_salt, number) or "") if each is None else each.tenant for number, each in enumerate(blended)
    ]
    obj.cache_salt = salts if len(salts) > 1 or isinstance(obj.cache_salt, list) else salts[0]


def _of(given: Any, number: int) -> Any:
    """What a field says for one prompt."""
    return given[number] if isinstance(given, list) else given


def _all_of(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _params(sampling: Any) -> Mapping[str, Any]:
    found = sampling.get(_FIELD) if isinstance(sampling, Mapping) else None
    return found if isinstance(found, Mapping) else {}
