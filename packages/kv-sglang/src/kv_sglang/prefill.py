"""What SGLang needs to compute the pages of a lookup, which it does not report to its storage.

How fast it computes is measured where its scheduler processes the results of a step (`Scheduler.process_batch_result`).
A lookup begins after the pages that SGLang has itself, to which all computed tokens attend. How many these are is seen
where its tree sends a lookup to its threads (`UnifiedRadixCache.prefetch_from_storage`), or looks up at once for an
engine that decodes (`query_storage_hit_length`).
"""

import inspect
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from kv_connect.halves.engine_costs import MIN_PREFILL_TOKENS, EngineCosts
from kv_core.clock import Clock
from kv_core.cost import Costs, Measured
from kv_core.log import limited_logger
from kv_tiers.clock import MonotonicClock

from kv_sglang.names import page_hashes
from kv_sglang.scheduler_calls import observe

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
_FOLLOWED: "WeakSet[PrefillSpeed]" = WeakSet()


class PrefillSpeed:
    """One engine's. The scheduler's thread reports steps; any thread may ask."""

    def __init__(self, *, tokens_per_second: float = 0.0, clock: Clock | None = None) -> None:
        """tokens_per_second: the speed if it is known in advance; 0: it is measured.
        clock: the one that SGLang dates its steps by, `time.monotonic`.
        """
        self._clock = clock or MonotonicClock()
        self._costs = EngineCosts(self._clock, prefill_tokens_per_second=tokens_per_second)
        self._ended_s = 0.0
        self._measured: deque[Measured] = deque(maxlen=_MAX_MEASURED)
        self._compute: tuple[float, float] | None = None  # replaced as a whole, for the other threads
        self._before_tokens: OrderedDict[str, int] = OrderedDict()  # by the first page that is looked up
        self._publish()

    def costs(self, first_page: str = "") -> Costs | None:
        """For a lookup of the pages from this one on. None: the speed is not known yet."""
        if self._compute is None:
            return None
        return Costs(compute=self._compute, before_tokens=self._before_tokens.get(first_page, 0))

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

    def step_ended(self, batch: Any) -> None:
        """The scheduler has processed the results of this `ScheduleBatch`, or of its copy.

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
        self._costs.prefill_took(sum(batch.extend_lens), pairs, self._ended_s - max(batch.launch_ts, before_s))
        self._publish()

    def _publish(self) -> None:
        costs = self._costs.of(0)
        self._compute = None if costs is None else costs.compute
        self._measured.extend(self._costs.take_measured())


def follow_steps(speed: PrefillSpeed) -> None:
    """Report every step and lookup of this process to `speed`, as long as that lives; raises whatever importing SGLang
    raises."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    _FOLLOWED.add(speed)
    observe("process_batch_result", _around, otherwise=_UNKNOWN)
    for method in ("prefetch_from_storage", "query_storage_hit_length"):
        observe(method, _around_lookup, otherwise=_FROM_THE_START, of=UnifiedRadixCache)


def _around(call: Any) -> Any:
    def called(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(self, batch, *args, **kwargs)
        for speed in list(_FOLLOWED):
            try:
                speed.step_ended(batch)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _FOLLOWED.discard(speed)
                _log.exception("a step of SGLang cannot be read: %s", _UNKNOWN)
        return answer

    return called


def _around_lookup(call: Any) -> Any:
    signature = inspect.signature(call)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        for speed in list(_FOLLOWED):
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
