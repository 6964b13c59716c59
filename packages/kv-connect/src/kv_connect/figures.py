"""What an engine's halves count, and one set of names for it in all engines' own metrics.

An engine's package makes a metric of each name that it can count, `ENGINE:kv_tiers_NAME`, with the engine's labels.
They cover that engine alone, wherever its cache is; `kv_observe.metrics` covers a cache, whichever engines use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

PREFIX: Final = "kv_tiers_"
TIER_TOKENS: Final = "hit_tokens"
"""By the label `tier`, the tokens that requests got from it."""
ABOUT_TIER_TOKENS: Final = "Tokens that requests got from the cache, by the slowest tier that they came from."


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the names. kind: whether it only grows, or is a current value."""

    kind: Literal["counter", "gauge"]
    about: str


FIGURES: Final[Mapping[str, Figure]] = {
    "lookups": Figure("counter", "Requests that were looked up in the cache, counted again after a preemption."),
    "asked_tokens": Figure("counter", "Tokens of these requests that the cache could have had."),
    "found_tokens": Figure("counter", "Those of these tokens that were held; the engine may already have had some."),
    "declined_tokens": Figure(
        "counter", "Those of these tokens that were computed because that was estimated to be faster."
    ),
    "loaded_tokens": Figure("counter", "Tokens that were loaded instead of being computed."),
    "stored_tokens": Figure("counter", "Tokens whose chunks entered the pool."),
    "loaded_bytes": Figure("counter", "Bytes copied from the pool to the engine, by all its ranks."),
    "loaded_file_bytes": Figure("counter", "Bytes that the engine has read in the files of a tier of type gds."),
    "stored_bytes": Figure("counter", "Bytes copied from the engine to the pool, by all its ranks."),
    "loads": Figure("counter", "Loads that were started."),
    "loads_failed": Figure(
        "counter", "Loads that failed in part or as a whole; the missing tokens were computed instead."
    ),
    "loads_shared": Figure(
        "counter", "Requests that waited while another one loaded the same prefix into blocks that both then had."
    ),
    "loads_refused": Figure("counter", "Loads refused because the block allocation was inconsistent."),
    "states_refused": Figure("counter", "States of linear layers that were not worth storing."),
    "stores_failed": Figure("counter", "Stores that were abandoned."),
    "dropped_chunks": Figure("counter", "Chunks that were not stored because too many bytes were already in flight."),
    "handovers_given": Figure("counter", "Requests whose prompt was stored for another engine to continue from."),
    "handovers_received": Figure(
        "counter", "Requests whose prompt another engine had computed, according to their proxy."
    ),
    "handovers_late": Figure(
        "counter", "Those of these requests that in the end lacked part of the prompt and computed it."
    ),
    "hints": Figure("counter", "Actions of KV hints that came with requests."),
    "hints_rejected": Figure("counter", "Those of these actions that were rejected."),
    "turns_ended": Figure("counter", "Answers without a call of a tool, reported to the policy of the pool."),
    "pool_used_bytes": Figure("gauge", "Bytes of the pool that hold chunks or are reserved for them."),
    "pool_bytes": Figure("gauge", "Size of the pool."),
    "on": Figure("gauge", "1 while the cache is in use, 0 after a fault has turned it off."),
}


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the half was created, most of them under the names of `FIGURES`.

    A request is looked up once, and again after a preemption, however often the engine asked; a load's tokens count
    once, too.

    loads_layerwise: loads among `loads` that run within the step itself.
    tokens_by_tier: tokens of loads, by the slowest tier that they came from.
    loaded_tokens: tokens of loads that the workers completed.
    loads_failed_in_a_row: how many times in a row loads ended and all of them had failed; loads that end together count
        once.
    """

    lookups: int = 0
    asked_tokens: int = 0
    found_tokens: int = 0
    declined_tokens: int = 0
    loads: int = 0
    loads_layerwise: int = 0
    tokens_to_load: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int = 0
    loads_shared: int = 0
    loads_failed: int = 0
    loads_failed_in_a_row: int = 0
    loads_refused: int = 0
    handovers_given: int = 0
    handovers_received: int = 0
    handovers_late: int = 0
    states_refused: int = 0
    hints: int = 0
    hints_rejected: int = 0
    turns_ended: int = 0


@dataclass(slots=True)
class WorkerCounts:
    """Counts since the half was created, some of them under the names of `FIGURES`.

    loads_finished, loads_failed: requests whose loads ended well, and badly.
    stored_tokens: tokens of the chunks committed, counted in one group's chunks of shard 0: a group that needs the
        whole prefix, if any.
    layers_stored_early: layers of stores, gathered while later layers were still to be computed.
    """

    loads_finished: int = 0
    loads_failed: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    loaded_file_bytes: int = 0
    chunks_stored: int = 0
    stored_bytes: int = 0
    stored_tokens: int = 0
    stores_failed: int = 0
    dropped_chunks: int = 0
    layers_stored_early: int = 0
