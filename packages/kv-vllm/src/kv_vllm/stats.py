"""Our figures in vLLM's own `/metrics` and log, by a fixed set of names.

Each half reports the changes since vLLM's last call, one per step: the scheduler half the tokens requested and found,
the workers' halves the bytes copied. vLLM adds up its workers and the scheduler and sends the sums to the process that
serves `/metrics`, where `PromMetrics` has a metric for each name. So the figures are the same wherever the halves and
the cache are.

A step in which nothing was counted costs the comparison of a few numbers. The pool's use is queried only if something
else has changed; from a server at most once a second, and when the last request has ended. Without vLLM's statistics
log (`disable_log_stats`) the figures are discarded, although vLLM still collects them.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Final

from kv_connect.figures import ABOUT_TIER_TOKENS, FIGURES, PREFIX, TIER_TOKENS, Figure
from kv_connect.halves.scheduler import SchedulerHalf
from kv_server.remote_cache import RemoteCache
from kv_tiers.cache.local import LocalCache
from kv_tiers.settings import Settings
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

_POOL_EVERY_S: Final = 1.0

_OF_SCHEDULER: Final = (
    "lookups",
    "asked_tokens",
    "found_tokens",
    "declined_tokens",
    "loaded_tokens",
    "loads",
    "loads_failed",
    "loads_shared",
    "loads_refused",
    "states_refused",
    "handovers_given",
    "handovers_received",
    "handovers_late",
    "hints",
    "hints_rejected",
    "turns_ended",
)
OF_WORKER: Final = (
    "stored_tokens",
    "loaded_bytes",
    "loaded_file_bytes",
    "stored_bytes",
    "stores_failed",
    "dropped_chunks",
)
"""The figures that each half counts."""
_GAUGES: Final = {name for name, figure in FIGURES.items() if figure.kind == "gauge"}
OFF: Final[Mapping[str, int]] = {"on": 0}
"""Reported once by the scheduler half when the cache has been turned off."""
_SOURCES: Final[Mapping[str, CacheHitSource]] = {
    "host": CacheHitSource.HOST,
    "dram": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "gds": CacheHitSource.DISK,
}
"""By a tier's type. Other tiers use vLLM's fallback, which also means "a remote store"."""


class Stats(KVConnectorStats):  # type: ignore[misc]  # the engine's classes are untyped here
    """The changes since the last step, as plain data: figures by name, and `TIER_TOKENS` by tier."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            if name == TIER_TOKENS:
                sums = self.data.setdefault(name, {})
                for tier, tokens in value.items():
                    sums[tier] = sums.get(tier, 0) + tokens
            elif name in _GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of one interval, for vLLM's log."""
        by_tier = {f"{TIER_TOKENS}[{tier}]": tokens for tier, tokens in self.data.get(TIER_TOKENS, {}).items()}
        return {name: value for name, value in self.data.items() if name != TIER_TOKENS} | by_tier


class CounterDeltas:
    """Figures that one half counts, as changes since the last call."""

    def __init__(self, counts: object, names: Iterable[str]) -> None:
        """names: of figures, at least two, which are attributes of `counts`."""
        self._counts = counts
        self._names = tuple(names)
        self._read = attrgetter(*self._names)
        self._before: tuple[int, ...] = (0,) * len(self._names)

    def take(self) -> dict[str, Any]:
        """The figures that have grown; empty if none has, as after most steps."""
        current = self._read(self._counts)
        if current == self._before:
            return {}
        previous, self._before = self._before, current
        figures = zip(self._names, current, previous, strict=True)
        return {name: value - old for name, value, old in figures if value != old}


class SchedulerFigures:
    """The figures that the scheduler half reports once per step."""

    def __init__(self, half: SchedulerHalf, cache: LocalCache | RemoteCache) -> None:
        self._half, self._cache = half, cache
        self._changes = CounterDeltas(half.counts, _OF_SCHEDULER)
        self._tokens_by_tier: dict[str, int] = {}
        self._pool_at_s = 0.0
        self._pool_is_old = False
        self._has_reported_on = False

    def take(self) -> dict[str, Any]:
        """The figures that have changed."""
        data = self._changes.take()
        if not self._has_reported_on:
            self._has_reported_on = True
            data["on"] = 1
        if (tokens_by_tier := self._half.counts.tokens_by_tier) != self._tokens_by_tier:
            data[TIER_TOKENS] = dict(Counter(tokens_by_tier) - Counter(self._tokens_by_tier))
            self._tokens_by_tier = dict(tokens_by_tier)
        self._pool_is_old = self._pool_is_old or bool(data)
        if self._pool_is_old:
            data |= self._pool()
        return data

    def _pool(self) -> dict[str, int]:
        if isinstance(self._cache, LocalCache):
            used_slots = self._cache.pool.slots_used
        elif time.monotonic() < self._pool_at_s and self._half.tracked_phases():
            return {}
        else:
            self._pool_at_s = time.monotonic() + _POOL_EVERY_S
            used_slots = self._cache.counts().slots_used
        self._pool_is_old = False
        pool = self._cache.pool
        return {"pool_used_bytes": used_slots * pool.slot_bytes, "pool_bytes": pool.slots * pool.slot_bytes}


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The figures as metrics: `vllm:kv_tiers_` and the name, with vLLM's labels. By the `vllm` in their names, vLLM
    finds the metrics to unregister when an engine has ended, and `LLM.get_metrics` the metrics to return."""

    figures: ClassVar[Mapping[str, Figure]] = FIGURES

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {name: self._make_metric(name, figure, labelnames) for name, figure in self.figures.items()}
        self._by_tier = self._counter_cls(
            name=f"vllm:{PREFIX}{TIER_TOKENS}",
            documentation=ABOUT_TIER_TOKENS,
            labelnames=[*labelnames, "tier"],
        )
        self._of_engine = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        metrics = self._of_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == TIER_TOKENS:
                for tier, tokens in value.items():
                    self._by_tier.labels(*self.per_engine_labelvalues[engine_idx], tier).inc(tokens)
            elif name in _GAUGES:
                metrics[name].set(value)
            else:
                metrics[name].inc(value)

    def _make_metric(self, name: str, figure: Figure, labelnames: list[str]) -> Any:
        gauge = partial(self._gauge_cls, multiprocess_mode="mostrecent")
        make = self._counter_cls if figure.kind == "counter" else gauge
        return make(name=f"vllm:{PREFIX}{name}", documentation=figure.about, labelnames=labelnames)


class HitSources:
    """The source in vLLM's terms for each tier of these settings."""

    def __init__(self, settings: Settings) -> None:
        """A joined server has its own tiers: those that are named after their type are known here too."""
        types = {str(tier.get("name") or tier["type"]): str(tier["type"]) for tier in settings.tiers}
        unspecified = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._sources = {**_SOURCES, **{name: _SOURCES.get(kind, unspecified) for name, kind in types.items()}}

    def of(self, tokens_by_tier: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
        """The tokens of a hit by source. If their number is not the one offered, the source is unknown."""
        if tokens != sum(tokens_by_tier.values()):
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {}
        tokens_by_source: dict[CacheHitSource, int] = {}
        for tier, count in tokens_by_tier.items():
            source = self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens_by_source[source] = tokens_by_source.get(source, 0) + count
        return tokens_by_source
