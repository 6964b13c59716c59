"""Per-request options (docs/requests.md), which SGLang does not pass on to its storage.

A request has its options in SGLang's `custom_params`, but SGLang reads and writes pages of its storage on threads that
do not know the request. So the options are read where the scheduler first looks up the prompt
(`Scheduler._prefetch_kvcache`), before any of its pages is read or written, and are stored by the hashes of these
pages. A page is the same for all requests that have it in their prompt: the latest of them decides. Pages after the
prompt are generated, and have the options of the page before them.

A proxy that has had a prompt computed by another engine sets `do_remote_prefill` there, as in vLLM's
`kv_transfer_params`. The cache holds these pages until this engine has read them. Pages that it will not read, because
it has them or computes them after all, are released by `Taken`.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakSet

from kv_connect.halves.controls import NO_CONTROLS, Controls
from kv_connect.request_options import chosen
from kv_core.cost import Use
from kv_core.log import limited_logger
from kv_tiers.settings import Settings

from kv_sglang.names import hashes_of, tail_of
from kv_sglang.scheduler_calls import observe

_log = limited_logger(__name__)

_FIELD: Final = "custom_params"
_HANDED_OVER: Final = "do_remote_prefill"
_UNSUPPORTED: Final = ("tags", "min_load_tokens")
"""SGLang names its pages itself: its `extra_key` and `cache_salt` separate requests. It also has its own threshold for
loads, `prefetch_threshold`."""
MAX_PAGES: Final = 1 << 16
"""Number of latest pages whose options are remembered. A prompt's pages are written soon after it is computed."""
_FOLLOWED: "WeakSet[RequestPages]" = WeakSet()


@dataclass(frozen=True, slots=True)
class _Page:
    """controls: of this page. after: of pages after it that are not in a prompt."""

    controls: Controls
    after: Controls


Taken = Callable[[Sequence[str]], object]
"""Called with the hashes of pages that another engine handed over and that need not be held any more."""

Arrived = Callable[[Any, Any], object]
"""Called on the scheduler's thread with the scheduler and a request whose options have been noted, before any of its
pages is looked up."""


class RequestPages:
    """The options of the pages of one engine's prompts. Thread-safe."""

    def __init__(self, use: Use, page_tokens: int, tiers: Callable[[], Sequence[str]]) -> None:
        """use: the setting. tiers: the names of the cache's tiers."""
        self._defaults = Settings(use=use, save_decode=True)  # SGLang stores everything in its tree
        self._page_tokens = page_tokens
        self._tiers = tiers
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._awaited: OrderedDict[str, None] = OrderedDict()
        self.listeners: list[Taken] = []
        self.arrivals: list[Arrived] = []

    def note(
        self,
        request_id: str,
        params: object,
        tokens: int,
        hashes: Callable[[], Sequence[str]],
        tail: Callable[[str], str] | None = None,
    ) -> None:
        """A request has arrived.

        params: its `custom_params`. tokens: of its prompt. hashes: computes those of the prompt's pages.
        tail: computes the hash of the tokens after the last page, given the last page's, or "" if there is none.
        """
        own = chosen(self._defaults, params, request_id, tiers=self._tiers(), where=_FIELD, unsupported=_UNSUPPORTED)
        controls = own.controls
        has_options = controls != NO_CONTROLS or not own.save_decode
        if isinstance(params, Mapping) and params.get(_HANDED_OVER) is True:
            awaited = hashes()
            with self._lock:
                self._awaited.update(dict.fromkeys(awaited))
                while len(self._awaited) > MAX_PAGES:
                    self._awaited.popitem(last=False)
            if tail is not None and tokens % self._page_tokens:  # SGLang computes it in any case
                self._say([tail(awaited[-1] if awaited else "")])
        if not has_options and not self._pages:
            return
        storable = controls.storable(tokens)
        keeps_generated = storable == tokens and controls.max_store_tokens is None and own.save_decode
        after = replace(controls, stores=controls.stores and keeps_generated)
        named = hashes()
        with self._lock:
            for number, page in enumerate(named, 1):
                if has_options:
                    stores = controls.stores and number * self._page_tokens <= storable
                    self._pages[page] = _Page(replace(controls, stores=stores), after)
                    self._pages.move_to_end(page)
                elif (before := self._pages.get(page)) is not None:
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

    @property
    def awaits_any(self) -> bool:
        return bool(self._awaited)

    def taken(self, pages: Sequence[str]) -> None:
        """The engine has these pages: end the holds of those that were handed over to it."""
        if not self._awaited:
            return
        with self._lock:
            done = [page for page in dict.fromkeys(pages) if page in self._awaited]
            for page in done:
                del self._awaited[page]
        if done:
            self._say(done)

    def _say(self, pages: Sequence[str]) -> None:
        for listener in self.listeners:
            listener(pages)

    def _trim(self) -> None:
        while len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)


def follow_requests(pages: RequestPages) -> None:
    """Note every request of this process in `pages`, as long as that lives; raises whatever importing SGLang raises."""
    _FOLLOWED.add(pages)
    observe("_prefetch_kvcache", _around, otherwise=f"the options of requests in {_FIELD} are ignored")


def _around(call: Any) -> Any:
    def called(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        for pages in list(_FOLLOWED):
            try:
                params = req.sampling_params.custom_params
                hashes = functools.partial(hashes_of, req, self.tree_cache)
                tail = functools.partial(tail_of, req, self.tree_cache.page_size)
                pages.note(str(req.rid), params, len(req.origin_input_ids), hashes, tail)
                for arrived in pages.arrivals:
                    arrived(self, req)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _log.exception("the options of request %s in %s could not be read and are ignored", req.rid, _FIELD)
        answer = call(self, req, *args, **kwargs)
        for pages in list(_FOLLOWED):
            try:
                if pages.awaits_any:  # SGLang does not query its storage for pages that it has
                    own = hashes_of(req, self.tree_cache)
                    matched = int(req.prefix_len) + int(req.host_hit_length)
                    pages.taken(own[: matched // self.tree_cache.page_size])
            except Exception:  # noqa: BLE001  # they stay held until their time is over
                _log.exception("pages that request %s already has stay protected for it", req.rid)
        return answer

    return called
