"""Our figures in SGLang's own `/metrics`, by the names that all engines have (`kv_connect.figures`).

With `--enable-metrics` SGLang's processes write their metrics to files (prometheus-client's multiprocess mode) that its
HTTP server reads, so a metric made in a scheduler's process is served. Each rank counts the bytes that it copies, and
the first one the tokens. Figures not counted here have no equivalent in SGLang's calls.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from kv_connect.figures import ABOUT_TIER_TOKENS, FIGURES, PREFIX, TIER_TOKENS, Figure
from kv_server.remote_cache import RemoteCache
from kv_tiers import LocalCache

COUNTED: Final = (
    "lookups",
    "asked_tokens",
    "found_tokens",
    "loaded_tokens",
    "stored_tokens",
    "loaded_bytes",
    "stored_bytes",
    "loads",
    "loads_failed",
    "stores_failed",
    "hints",
    "hints_rejected",
    "turns_ended",
    "pool_used_bytes",
    "pool_bytes",
    "on",
)
_BYTES: Final = frozenset({"loaded_bytes", "stored_bytes"})
_POOL_EVERY_S: Final = 1.0
_MAX_ASKERS: Final = 4096


class Figures:
    """The counters of a store, metrics of prometheus-client in this process. Thread-safe, because these are."""

    def __init__(self, metrics: Mapping[str, Any], tokens_of: Callable[[str], Any] | None = None) -> None:
        """metrics: by name; what is counted under another is not wanted. tokens_of: the counter of a tier's tokens."""
        self._metrics = metrics
        self._tokens_of = tokens_of
        self._look_at_s = 0.0

    def add(self, name: str, amount: int) -> None:
        """name: of a counter."""
        if amount and name in self._metrics:
            self._metrics[name].inc(amount)

    def given(self, tokens_by_tier: Mapping[str, int]) -> None:
        """Requests got this many tokens, by tier."""
        if self._tokens_of is not None:
            for tier, tokens in tokens_by_tier.items():
                self._tokens_of(tier).inc(tokens)

    def look_at(self, cache: LocalCache | RemoteCache) -> None:
        """Something was copied: update the pool's use. A server is queried at most once a second."""
        if "pool_bytes" not in self._metrics:
            return
        pool = cache.pool
        if isinstance(cache, LocalCache):
            slots, used = cache.pool.slots, cache.pool.slots_used
        elif time.monotonic() < self._look_at_s:
            return
        else:
            self._look_at_s = time.monotonic() + _POOL_EVERY_S
            counts = cache.counts()
            slots, used = counts.slots_total, counts.slots_used
        self._metrics["pool_used_bytes"].set(used * pool.slot_bytes)
        self._metrics["pool_bytes"].set(slots * pool.slot_bytes)

    def off(self) -> None:
        """The cache is no longer in use."""
        if "on" in self._metrics:
            self._metrics["on"].set(0)

    @property
    def of_bytes(self) -> "Figures":
        """For pools other than the KV's, and for all ranks but the first: tokens are counted once."""
        return Figures({name: metric for name, metric in self._metrics.items() if name in _BYTES})


NO_FIGURES: Final = Figures({})
"""For engines without metrics."""


def registered(figures: Mapping[str, Figure], labels: Mapping[str, str]) -> dict[str, Any]:
    """A metric for each of these figures, by name, with these labels. Once in a process."""
    # SGLang has set the directory of the multiprocess mode by now: the import depends on it.
    from prometheus_client import Counter, Gauge

    metrics: dict[str, Any] = {}
    for name, figure in figures.items():
        made: Any = (
            Counter(f"sglang:{PREFIX}{name}", figure.about, list(labels))
            if figure.kind == "counter"
            else Gauge(f"sglang:{PREFIX}{name}", figure.about, list(labels), multiprocess_mode="mostrecent")
        )
        metrics[name] = made.labels(**labels)
    return metrics


def _figures(labels: Mapping[str, str]) -> Figures:
    metrics = registered({name: FIGURES[name] for name in COUNTED}, labels)
    from prometheus_client import Counter

    metrics["on"].set(1)
    by_tier = Counter(f"sglang:{PREFIX}{TIER_TOKENS}", ABOUT_TIER_TOKENS, [*labels, "tier"])
    return Figures(metrics, lambda tier: by_tier.labels(**labels, tier=tier))


class OncePerRequest:
    """Whether a request is looked up for the first time. Requests looked up long ago are forgotten. For one thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()

    def is_new(self, request: str) -> bool:
        if request in self._known:
            return False
        self._known[request] = None
        if len(self._known) > _MAX_ASKERS:
            self._known.popitem(last=False)
        return True


_MADE: Final[list[Figures]] = []


def engine_figures(*, number: int, stage: int, replica: int) -> Figures:
    """The figures of a rank's process, which creates its metrics once, with the labels of a scheduler's in SGLang."""
    from sglang.srt.runtime_context import get_observability, get_serving

    observed = get_observability()
    if not observed.enable_metrics:
        return NO_FIGURES
    ranks = {"tp_rank": number, "pp_rank": stage, "dp_rank": replica}
    labels = {"model_name": get_serving().served_model_name, **ranks, **(observed.extra_metric_labels or {})}
    named = {str(name): str(value) for name, value in labels.items()}
    if not _MADE:
        _MADE.append(_figures(named))
    return _MADE[0]
