"""Our figures in vLLM's own `/metrics` and log, by a fixed set of names.

Each half reports what has changed since it was last asked, which vLLM does once a step: the scheduler half what was
requested and found, the workers' halves what was copied. vLLM adds up its workers and the scheduler and carries the
sums to the process that serves `/metrics`, where `PromMetrics` has a metric for each name. So the figures are the same
wherever the halves and the cache are.

A step in which nothing was counted costs the comparison of a few numbers. The pool's use is queried only if something
else has changed; of a server at most once a second, and when the last request has ended. Without vLLM's statistics log
(`disable_log_stats`) nobody carries the figures anywhere, but vLLM asks for them all the same.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kv_core.connect.scheduler import SchedulerHalf
from kv_core.connect.worker import WorkerHalf
from kv_tiers.attach.figures import ABOUT_TIER_TOKENS, FIGURES, PREFIX, TIER_TOKENS, Figure
from kv_tiers.cache.local import LocalCache
from kv_tiers.server.remote_cache import RemoteCache
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_POOL_EVERY_S: Final = 1.0


class Stats(KVConnectorStats):  # type: ignore[misc]  # the engine's classes are untyped here
    """What has changed since the last step, as plain data: figures by name, and `TIER_TOKENS` by tier."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            if name == TIER_TOKENS:
                mine = self.data.setdefault(name, {})
                for tier, tokens in value.items():
                    mine[tier] = mine.get(tier, 0) + tokens
            elif FIGURES[name].kind == "gauge":
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: of one interval."""
        by_tier = {f"{TIER_TOKENS}[{tier}]": tokens for tier, tokens in self.data.get(TIER_TOKENS, {}).items()}
        return {name: value for name, value in self.data.items() if name != TIER_TOKENS} | by_tier


class Changes:
    """One half's figures, as changes since it was last asked."""

    def __init__(self, now: Callable[[], Mapping[str, int]]) -> None:
        """now: the counters as they stand."""
        self._now = now
        self._before: dict[str, int] = {}

    def take(self) -> dict[str, Any]:
        """The figures that have grown; empty if none has."""
        now = self._now()
        if now == self._before:
            return {}
        grown = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = dict(now)
        return {name: value for name, value in grown.items() if value}


class SchedulerFigures:
    """What the scheduler half reports once a step."""

    def __init__(self, half: SchedulerHalf, cache: LocalCache | RemoteCache) -> None:
        self._half, self._cache = half, cache
        self._changes = Changes(self._now)
        self._tiers = Changes(lambda: half.counts.tokens_by_tier)
        self._pool_at_s = 0.0
        self._pool_is_old = False
        self._has_said_on = False

    def take(self) -> Stats | None:
        """None: there is nothing to say."""
        data = self._changes.take()
        if not self._has_said_on:
            self._has_said_on = True
            data["on"] = 1
        if tiers := self._tiers.take():
            data[TIER_TOKENS] = tiers
        self._pool_is_old = self._pool_is_old or bool(data)
        if self._pool_is_old:
            data |= self._pool()
        return Stats(data) if data else None

    def _now(self) -> Mapping[str, int]:
        counts = self._half.counts
        return {
            "lookups": counts.lookups,
            "asked_tokens": counts.tokens_asked,
            "found_tokens": counts.tokens_hit,
            "declined_tokens": counts.tokens_declined,
            "loaded_tokens": counts.tokens_loaded,
            "loads": counts.loads,
            "loads_failed": counts.loads_failed,
            "loads_refused": counts.loads_refused,
            "states_refused": counts.states_refused,
            "handovers_given": counts.handovers_given,
            "handovers_taken": counts.handovers_taken,
            "handovers_late": counts.handovers_late,
        }

    def _pool(self) -> dict[str, int]:
        if isinstance(self._cache, LocalCache):
            used = self._cache.pool.slots_used
        elif time.monotonic() < self._pool_at_s and self._half.tracked_phases():
            return {}
        else:
            self._pool_at_s = time.monotonic() + _POOL_EVERY_S
            used = self._cache.counts().slots_used
        self._pool_is_old = False
        pool = self._cache.pool
        return {"pool_used_bytes": used * pool.slot_bytes, "pool_bytes": pool.slots * pool.slot_bytes}


OFF: Final[Mapping[str, int]] = {"on": 0}
"""Reported once by the scheduler half when the cache has been turned off."""


class WorkerFigures:
    """What a worker half reports once a step."""

    def __init__(self, half: WorkerHalf) -> None:
        self._counts = half.counts
        self._changes = Changes(self._now)

    def take(self) -> Stats | None:
        """None: there is nothing to say."""
        data = self._changes.take()
        return Stats(data) if data else None

    def _now(self) -> Mapping[str, int]:
        counts = self._counts
        return {
            "stored_tokens": counts.tokens_stored,
            "loaded_bytes": counts.bytes_loaded,
            "stored_bytes": counts.bytes_stored,
            "stores_failed": counts.stores_failed,
            "dropped_chunks": counts.chunks_dropped,
        }


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The figures as metrics: `vllm:kv_tiers_` and the name, with vLLM's labels. By the `vllm` in their names vLLM
    finds those to take out of the registry when an engine has ended, and `LLM.get_metrics` those to give."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._figures = {name: self._made(name, figure, labelnames) for name, figure in FIGURES.items()}
        self._by_tier = self._counter_cls(
            name=f"vllm:{PREFIX}{TIER_TOKENS}",
            documentation=ABOUT_TIER_TOKENS,
            labelnames=[*labelnames, "tier"],
        )
        self._of_engine = {
            engine: {name: metric.labels(*values) for name, metric in self._figures.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        known = self._of_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == TIER_TOKENS:
                for tier, tokens in value.items():
                    self._by_tier.labels(*self.per_engine_labelvalues[engine_idx], tier).inc(tokens)
            elif FIGURES[name].kind == "gauge":
                known[name].set(value)
            else:
                known[name].inc(value)

    def _made(self, name: str, figure: Figure, labelnames: list[str]) -> Any:
        if figure.kind == "counter":
            return self._counter_cls(name=f"vllm:{PREFIX}{name}", documentation=figure.about, labelnames=labelnames)
        return self._gauge_cls(
            name=f"vllm:{PREFIX}{name}",
            documentation=figure.about,
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
