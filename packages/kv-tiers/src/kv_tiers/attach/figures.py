"""An engine's own metrics of the cache: one set of names for all engines.

An engine's package makes a metric of each name that it can count, `ENGINE:kv_tiers_NAME`, with the engine's labels.
They cover that engine alone, wherever its cache is; `kv_tiers.watch.metrics` covers a cache, whichever engines use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "kv_tiers_"
TIER_TOKENS: Final = "hit_tokens"
"""By the label `tier`, the tokens that requests got from it."""
ABOUT_TIER_TOKENS: Final = "Tokens that requests were given, by the slowest tier that they came from."


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the names. kind: whether it only grows, or is a current value."""

    kind: Literal["counter", "gauge"]
    about: str


FIGURES: Final[Mapping[str, Figure]] = {
    "lookups": Figure("counter", "Requests that were looked up in the cache, and again after a preemption."),
    "asked_tokens": Figure("counter", "Tokens that these could have been given."),
    "found_tokens": Figure("counter", "Tokens of them that were held; some the engine may have had itself."),
    "declined_tokens": Figure("counter", "Tokens of them that were computed, as that was estimated to be quicker."),
    "loaded_tokens": Figure("counter", "Tokens that were loaded instead of being computed."),
    "stored_tokens": Figure("counter", "Tokens whose chunks entered the pool."),
    "loaded_bytes": Figure("counter", "Bytes copied from the pool to the engine, by all its ranks."),
    "stored_bytes": Figure("counter", "Bytes copied from the engine to the pool, by all its ranks."),
    "loads": Figure("counter", "Loads that were begun."),
    "loads_failed": Figure("counter", "Loads that came up short, whose tokens were computed instead."),
    "loads_refused": Figure("counter", "Loads whose allocation did not add up."),
    "states_refused": Figure("counter", "States of linear layers that were not worth their room."),
    "stores_failed": Figure("counter", "Stores that were given up."),
    "dropped_chunks": Figure("counter", "Chunks that were not stored as too many bytes were on their way already."),
    "handovers_given": Figure("counter", "Requests whose prompt was stored for another engine to go on with."),
    "handovers_taken": Figure("counter", "Requests whose prompt another engine had computed, as their proxy said."),
    "handovers_late": Figure("counter", "Requests of these that lacked some of it in the end, and computed it."),
    "pool_used_bytes": Figure("gauge", "What of the pool holds chunks or is promised to them."),
    "pool_bytes": Figure("gauge", "How large the pool is."),
    "on": Figure("gauge", "1 while the cache is in use, 0 after a fault has turned it off."),
}
