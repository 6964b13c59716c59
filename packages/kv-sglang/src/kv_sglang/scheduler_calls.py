"""What SGLang's scheduler knows and does not tell its storage or linker, taken from calls that it makes.

These are the options of requests (docs/requests.md), which of them ended their user's turn, how fast the engine
computes, and what of a prompt it has itself.
"""

import functools
import inspect
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from kv_connect.halves.engine_costs import MIN_PREFILL_TOKENS, EngineCosts
from kv_connect.interface import observe
from kv_connect.request_options import NO_CONTROLS, Controls, chosen
from kv_connect.turns import Turns
from kv_core.clock import Clock
from kv_core.cost import Costs, Measured, Use
from kv_core.keys import NO_TENANT, tenant_tag
from kv_core.log import limited_logger
from kv_server.hints import HintOutcomes
from kv_tiers.clock import MonotonicClock
from kv_tiers.settings import Settings
from msgspec.structs import replace

from kv_sglang.metrics import NO_FIGURES, Figures
from kv_sglang.names import hashes_of, page_hashes, tail_of

_log = limited_logger(__name__)

_MAX_MEASURED: Final = 256
_MAX_LOOKUPS: Final = 4096
_UNKNOWN: Final = (
    "how fast it computes is not known; set cost.prefill_tokens_per_second, or chunks in slow tiers are waited for "
    "even where computing is faster"
)
_FROM_THE_START: Final = (
    "computing what is looked up is estimated as if nothing came before it, and lower tiers are waited for too rarely"
)
_SPEEDS: "WeakSet[PrefillSpeed]" = WeakSet()
_FIELD: Final = "custom_params"
_HANDED_OVER: Final = "do_remote_prefill"
_UNSUPPORTED: Final = ("min_load_tokens",)
"""SGLang has its own threshold for loads, `prefetch_threshold`."""
_NO_OPTIONS: Final = replace(NO_CONTROLS, save_decode=True)
MAX_PAGES: Final = 1 << 16
"""Number of latest pages whose options are remembered. A prompt's pages are written soon after it is computed."""
_REQUESTS: "WeakSet[RequestPages]" = WeakSet()
_UNKNOWN_MATCH: Final = (
    "computing what is looked up is estimated as if nothing came before it, and a store may evict the beginning of its "
    "own prompt"
)
_TURNS: "WeakSet[TurnEnds]" = WeakSet()
_UNKNOWN_TURNS: Final = "the policy does not learn which answers call no tool"
_MATCHED: "WeakKeyDictionary[Any, Matched]" = WeakKeyDictionary()


def _follow(owner: type, method: str, around: Callable[[Any], Any], *, otherwise: str) -> None:
    """otherwise: what is missing where SGLang has no such method, for the log."""
    if hasattr(owner, method):
        observe(owner, method, around)
    else:
        _log.warning("this SGLang has no %s.%s: %s", owner.__name__, method, otherwise)


class PrefillSpeed:
    """One engine's. The scheduler's thread reports steps; any thread may ask.

    How fast it computes is measured where its scheduler processes the results of a step
    (`Scheduler.process_batch_result`). A lookup begins after the pages that SGLang has itself, to which all computed
    tokens attend. How many these are is seen where its tree sends a lookup to its threads
    (`UnifiedRadixCache.prefetch_from_storage`), or looks up at once for an engine that decodes
    (`query_storage_hit_length`).
    """

    def __init__(self, *, tokens_per_second: float = 0.0, clock: Clock | None = None) -> None:
        """tokens_per_second: the speed if it is known in advance; 0: it is measured.
        clock: the one that SGLang dates its steps by, `time.monotonic`.
        """
        self._clock = clock or MonotonicClock()
        self._costs = EngineCosts(self._clock, prefill_tokens_per_second=tokens_per_second)
        self._ended_s = 0.0
        self._measured: deque[Measured] = deque(maxlen=_MAX_MEASURED)
        self._known: Costs | None = None  # replaced as a whole, for the other threads
        self._before_tokens: OrderedDict[str, int] = OrderedDict()  # by the first page that is looked up
        self._publish()

    def costs(self, first_page: str = "") -> Costs | None:
        """For a lookup of the pages from this one on. None: the speed is not known yet."""
        if (known := self._known) is None:
            return None
        before_tokens = self._before_tokens.get(first_page, 0)
        return Costs(compute=known.compute, before_tokens=before_tokens, measured_tokens=known.measured_tokens)

    def will_look_up(self, first_page: str, before_tokens: int) -> None:
        """The scheduler has sent a lookup of the pages from this one on, after so many tokens that SGLang has.

        A page's hash contains all tokens before it, so they are as many whenever it is looked up again.
        """
        self._before_tokens[first_page] = before_tokens
        self._before_tokens.move_to_end(first_page)
        if len(self._before_tokens) > _MAX_LOOKUPS:
            self._before_tokens.popitem(last=False)

    def take_measured(self) -> list[Measured]:
        """Estimates that were compared with measurements since the last call."""
        taken = []
        with suppress(IndexError):  # another thread may take them too
            while True:
                taken.append(self._measured.popleft())
        return taken

    def step_ended(self, batch: Any, step_tokens: int = 0) -> None:
        """The scheduler has processed the results of this `ScheduleBatch`, or of its copy. step_tokens: as for
        `EngineCosts`.

        Steps end in their order, and the device runs them one after the other. Those that load pages from SGLang's
        host memory count too: what a hit saves is what a step takes less with it, and often only such steps are short,
        so that without them a step's fixed part would be taken for computing.
        """
        before_s, self._ended_s = self._ended_s, self._clock.now_s()
        mode = batch.forward_mode
        if not mode.is_extend_without_speculative() or mode.is_split_prefill():
            return
        if max(batch.extend_lens, default=0) < MIN_PREFILL_TOKENS:
            return
        pairs = sum(new * (before + new / 2) for before, new in zip(batch.prefix_lens, batch.extend_lens, strict=True))
        self._costs.step_tokens = step_tokens
        self._costs.prefill_took(sum(batch.extend_lens), pairs, self._ended_s - max(batch.launch_ts, before_s))
        self._publish()

    def _publish(self) -> None:
        costs = self._costs.of(0)
        self._known = None if costs.compute is None else costs
        self._measured.extend(self._costs.take_measured())


def follow_steps(speed: PrefillSpeed) -> None:
    """Report every step and lookup of this process to `speed`, as long as that lives; raises whatever importing SGLang
    raises."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _SPEEDS.add(speed)
    _follow(Scheduler, "process_batch_result", _around_step, otherwise=_UNKNOWN)
    for method in ("prefetch_from_storage", "query_storage_hit_length"):
        _follow(UnifiedRadixCache, method, _around_lookup, otherwise=_FROM_THE_START)


def _around_step(call: Any) -> Any:
    def called(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(self, batch, *args, **kwargs)
        for speed in list(_SPEEDS):
            try:
                speed.step_ended(batch, self.chunked_prefill_size or 0)  # None: a step computes whole prompts
            except Exception:  # noqa: BLE001  # any error would end the engine
                _SPEEDS.discard(speed)
                _log.exception("a step of SGLang cannot be read: %s", _UNKNOWN)
        return answer

    return called


def _around_lookup(call: Any) -> Any:
    signature = inspect.signature(call)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for speed in list(_SPEEDS):
            if speed.costs() is None:
                continue  # an engine that decodes looks up in its loop, and rarely knows
            try:
                given = signature.bind(self, *args, **kwargs).arguments
                if (before := _tokens_before(self, given)) and (page := _first_page(self, given)):
                    speed.will_look_up(page, before)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _log.exception("a lookup of SGLang cannot be read: %s", _FROM_THE_START)
        return call(self, *args, **kwargs)

    return called


def _tokens_before(tree: Any, given: Mapping[str, Any]) -> int:
    """How many tokens of the prompt SGLang has itself; 0: none, or it does not say."""
    if "matched_prefix_tokens" in given:
        return len(given["matched_prefix_tokens"] or ())
    if not given.get("last_hash") or given.get("prefix_keys") is None:
        return 0
    last = tree.tree_core.get_hash_values(given["last_host_node_id"])  # which are not among those of the keys before it
    return (len(given["prefix_keys"]) + len(last)) * int(tree.page_size)


def _first_page(tree: Any, given: Mapping[str, Any]) -> str:
    """The hash of the first page that is looked up; empty if there is no whole page."""
    tokens = given["new_input_tokens"][: tree.page_size + tree.tree_core.is_eagle]
    hashes = page_hashes(tokens, tree, given.get("extra_key"), given.get("cache_salt"), given.get("last_hash"))
    return hashes[0] if hashes else ""


@dataclass(frozen=True, slots=True)
class _Page:
    """controls: of this page. after: of pages after it that are not in a prompt."""

    controls: Controls
    after: Controls


Received = Callable[[Sequence[str]], object]
"""Called with the hashes of pages that another engine handed over and that need not be held any more."""

Arrived = Callable[[Any, Any], object]
"""Called on the scheduler's thread with the scheduler and a request whose options have been noted, before any of its
pages is looked up."""


class RequestPages:
    """The options of the pages of one engine's prompts. Thread-safe.

    A request has its options in SGLang's `custom_params`, but SGLang reads and writes pages of its storage on threads
    that do not know the request. So the options are read where the scheduler first looks up the prompt
    (`Scheduler._prefetch_kvcache`), before any of its pages is read or written, and are stored by the hashes of these
    pages. A page is the same for all requests that have it in their prompt: the latest of them decides. Pages after the
    prompt are generated, and have the options of the page before them.

    A salt is not part of a page's options, but in its key is the tag of its tenant, so it is read there too.

    A proxy that has had a prompt computed by another engine sets `do_remote_prefill` there, as in vLLM's
    `kv_transfer_params`. The cache holds these pages until this engine has read them. Pages that it will not read,
    because it has them or computes them after all, are released by `Received`.
    """

    def __init__(
        self, use: Use, page_tokens: int, tiers: Callable[[], Sequence[str]], figures: Figures = NO_FIGURES
    ) -> None:
        """use: the setting. tiers: the names of the cache's tiers. figures: where hints are counted."""
        self._defaults = Settings(use=use, save_decode=True)  # SGLang stores everything in its tree
        self._page_tokens = page_tokens
        self._tiers = tiers
        self._figures = figures
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._awaited: OrderedDict[str, None] = OrderedDict()
        self._tenants: OrderedDict[str, bytes] = OrderedDict()  # of pages of prompts with a salt
        self.listeners: list[Received] = []
        self.arrivals: list[Arrived] = []

    def note(
        self,
        request_id: str,
        params: object,
        tokens: int,
        hashes: Callable[[], Sequence[str]],
        tail: Callable[[str], str] | None = None,
        *,
        salt: str | None = None,
        hints: object = None,
    ) -> None:
        """A request has arrived.

        params: its `custom_params`. tokens: of its prompt. hashes: computes those of the prompt's pages.
        tail: computes the hash of the tokens after the last page, given the last page's, or "" if there is none.
        salt: its `cache_salt`. hints: its `kv_hints`.
        """
        if salt is not None:
            self.belong(hashes(), salt)
        controls = chosen(
            self._defaults, params, request_id, tiers=self._tiers(), where=_FIELD, unsupported=_UNSUPPORTED, hints=hints
        )
        if controls.tags:
            _log.warning(
                "request %s: its tags are in no page's name, so nothing of it is loaded or stored: where requests "
                "enter, SGLang has not run the plugin kv-sglang; see SGLANG_PLUGINS and --tokenizer-worker-num",
                request_id,
            )
            controls = replace(controls, load=False, store=False, tags={})
        if controls.hinted is not None:
            self._say_hinted(request_id, controls.hinted)
            # SGLang itself promotes what a request that arrives will need.
            controls = replace(controls, hinted=None, is_prefetched=False)
        has_options = controls != _NO_OPTIONS
        if isinstance(params, Mapping) and params.get(_HANDED_OVER) is True:
            awaited = hashes()
            with self._lock:
                self._awaited.update(dict.fromkeys(awaited))
                while len(self._awaited) > MAX_PAGES:
                    self._awaited.popitem(last=False)
            if tail is not None and tokens % self._page_tokens:  # SGLang computes it in any case
                rest = [tail(awaited[-1] if awaited else "")]
                if salt is not None:
                    self.belong(rest, salt)
                self._say(rest)
        if not has_options and not self._pages:
            return
        storable = controls.storable(tokens)
        keeps_generated = storable == tokens and controls.max_store_tokens is None and controls.save_decode
        after = replace(controls, store=controls.store and keeps_generated)
        named = hashes()
        with self._lock:
            for number, page in enumerate(named, 1):
                if has_options:
                    store = controls.store and number * self._page_tokens <= storable
                    self._pages[page] = _Page(replace(controls, store=store), after)
                    self._pages.move_to_end(page)
                elif (before := self._pages.get(page)) is not None:  # whose request may be generating still
                    self._pages[page] = _Page(NO_CONTROLS, before.after)
            self._trim()

    def of(self, pages: Sequence[str], before: Sequence[str] = ()) -> list[Controls]:
        """The options of each of these pages, which follow one another. before: the pages before them."""
        if not self._pages:
            return [NO_CONTROLS] * len(pages)
        found = []
        with self._lock:
            last = self._pages.get(before[-1]) if before else None
            for page in pages:
                known = self._pages.get(page)
                if known is None and last is not None:
                    known = self._pages[page] = _Page(last.after, last.after)
                last = known
                found.append(NO_CONTROLS if known is None else known.controls)
            self._trim()
        return found

    def belong(self, pages: Sequence[str], salt: str) -> None:
        """These pages are of a prompt with this salt."""
        tag = tenant_tag(salt)
        with self._lock:
            for page in pages:
                self._tenants[page] = tag
                self._tenants.move_to_end(page)
            while len(self._tenants) > MAX_PAGES:
                self._tenants.popitem(last=False)

    def tenant(self, pages: Sequence[str]) -> bytes:
        """The tag of the tenant of these pages, which are of one prompt; `NO_TENANT` where none of them is known."""
        if not self._tenants:
            return NO_TENANT
        with self._lock:
            return next((tag for page in pages if (tag := self._tenants.get(page))), NO_TENANT)

    @property
    def awaits_any(self) -> bool:
        return bool(self._awaited)

    def received(self, pages: Sequence[str]) -> None:
        """The engine has these pages: end the holds of those that were handed over to it."""
        if not self._awaited:
            return
        with self._lock:
            done = [page for page in dict.fromkeys(pages) if page in self._awaited]
            for page in done:
                del self._awaited[page]
        if done:
            self._say(done)

    def _say_hinted(self, request_id: str, hinted: HintOutcomes) -> None:
        """SGLang's answers have no place for what has become of hints."""
        rejected = [one for one in hinted.outcomes if one.outcome == "rejected"]
        self._figures.add("hints", len(hinted.outcomes))
        self._figures.add("hints_rejected", len(rejected))
        for one in rejected[:1]:
            what = f"hint {one.action_id!r} ({one.action_type or 'unknown'})"
            _log.warning("request %s: %s and %d others are rejected: %s", request_id, what, len(rejected) - 1, one.why)

    def _say(self, pages: Sequence[str]) -> None:
        for listener in self.listeners:
            listener(pages)

    def _trim(self) -> None:
        while len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)


def follow_requests(pages: RequestPages) -> None:
    """Note every request of this process in `pages`, as long as that lives; raises whatever importing SGLang raises."""
    from sglang.srt.managers.scheduler import Scheduler

    _REQUESTS.add(pages)
    missing = f"the options of requests in {_FIELD} are ignored"
    _follow(Scheduler, "_prefetch_kvcache", _around_arrival, otherwise=missing)


class TurnEnds:
    """Reports which of one engine's requests ended their user's turn, on the scheduler's thread."""

    def __init__(self, listeners: Sequence[Callable[[Sequence[str]], object]], figures: Figures) -> None:
        """listeners: called with the hashes of such a request's pages."""
        self._listeners = listeners
        self._figures = figures
        self._turns: Turns | None = None  # until a request has brought the tokenizer

    def released(self, req: Any, tree: Any) -> None:
        """SGLang releases what this request holds on the device."""
        if not req.finished():
            return
        if self._turns is None:
            self._turns = Turns.of(lambda: req.tokenizer)
        has_stopped = req.finished_reason.to_json()["type"] == "stop"
        is_json = req.sampling_params.json_schema is not None
        if self._turns.has_ended(req.output_ids, has_stopped=has_stopped, is_json=is_json):
            tokens = array("q", [*req.origin_input_ids, *req.output_ids])
            self._figures.add("turns_ended", 1)
            pages = page_hashes(tokens, tree, req.extra_key, req.cache_salt)
            for listener in self._listeners:
                listener(pages)


def follow_turns(turns: TurnEnds) -> None:
    """Report every release of this process to `turns` while that lives; raises whatever importing SGLang raises."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _TURNS.add(turns)
    _follow(UnifiedRadixCache, "on_release", _around_release, otherwise=_UNKNOWN_TURNS)


def _around_release(call: Any) -> Any:
    def called(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        for turns in list(_TURNS):
            try:
                turns.released(req, self)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _log.exception("the answer to request %s cannot be read: %s", req.rid, _UNKNOWN_TURNS)
        return call(self, req, *args, **kwargs)

    return called


def _around_arrival(call: Any) -> Any:
    def called(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        for pages in list(_REQUESTS):
            try:
                params = req.sampling_params.custom_params
                hashes = functools.cache(functools.partial(hashes_of, req, self.tree_cache))
                tail = functools.partial(tail_of, req, self.tree_cache.page_size)
                pages.note(
                    str(req.rid),
                    params,
                    len(req.origin_input_ids),
                    hashes,
                    tail,
                    salt=req.cache_salt,
                    hints=req.kv_hints,
                )
                for arrived in pages.arrivals:
                    arrived(self, req)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _log.exception("the options of request %s in %s could not be read and are ignored", req.rid, _FIELD)
        answer = call(self, req, *args, **kwargs)
        for pages in list(_REQUESTS):
            try:
                if pages.awaits_any:  # SGLang does not query its storage for pages that it has
                    own = hashes_of(req, self.tree_cache)
                    matched = int(req.prefix_len) + int(req.host_hit_length)
                    pages.received(own[: matched // self.tree_cache.page_size])
            except Exception:  # noqa: BLE001  # they stay held until their time is over
                _log.exception("pages that request %s already has stay protected for it", req.rid)
        return answer

    return called


@dataclass(frozen=True, slots=True)
class Matched:
    """The pages on the device.

    tokens: how many they are.
    last_page: the hash of the last of them; empty if there is none.
    """

    tokens: int = 0
    last_page: str = ""


_NOTHING: Final = Matched()


def follow_matches() -> None:
    """Note every match of this process; raises whatever importing SGLang raises."""
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

    _follow(UnifiedCacheLinkerWrapper, "match", _around_match, otherwise=_UNKNOWN_MATCH)


def matched_by(linker: Any) -> Matched:
    """What was matched before the lookup that SGLang makes of this linker now. Call this from `lookup`."""
    return _MATCHED.get(linker, _NOTHING)


def _around_match(call: Any) -> Any:
    def called(self: Any, key: Any, req: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            tokens = int(result.device_prefix_len)
            last_page = self.cache.get_last_hash_value(result.last_device_node) if tokens else ""
            _MATCHED[self.cache_linker] = Matched(tokens, last_page or "")
        except Exception:  # noqa: BLE001  # any error would end the engine
            _log.exception("what SGLang has of a prompt cannot be read: %s", _UNKNOWN_MATCH)
        return call(self, key, req, result, *args, **kwargs)

    return called
