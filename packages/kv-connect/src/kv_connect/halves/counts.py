"""Counters of both halves, for metrics and tests. They only grow, except those of consecutive failures."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounts:
    """Counts since the half was created.

    lookups: requests looked up; once per request, and again after a preemption, however often the engine asked.
    tokens_asked, tokens_hit: tokens that these lookups asked for, and tokens that they found, beyond those that the
        engine had in its own blocks.
    tokens_declined: tokens found that were recomputed, because that was estimated to be faster.
    loads: loads for which blocks were allocated.
    loads_layerwise: loads among these that run within the step itself.
    tokens_to_load: tokens of these loads, counted once per load, however often the engine asked.
    tokens_by_tier: the same tokens, by the slowest tier that they came from.
    tokens_loaded: tokens of loads that the workers completed.
    loads_shared: requests that waited for another request to load the same chunks, instead of loading them too.
    loads_failed: loads that the workers could not complete.
    loads_failed_in_a_row: how many times in a row loads ended and all of them had failed; loads that end together count
        once.
    loads_refused: loads with an inconsistent allocation.
    handovers_given: requests whose prompt was stored for another engine.
    handovers_taken: requests that expected chunks stored by another engine.
    handovers_late: requests among these that waited for chunks in vain and computed them.
    states_refused: states that the engine offered and that were not worth storing.
    """

    lookups: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    tokens_declined: int = 0
    loads: int = 0
    loads_layerwise: int = 0
    tokens_to_load: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    tokens_loaded: int = 0
    loads_shared: int = 0
    loads_failed: int = 0
    loads_failed_in_a_row: int = 0
    loads_refused: int = 0
    handovers_given: int = 0
    handovers_taken: int = 0
    handovers_late: int = 0
    states_refused: int = 0


@dataclass(slots=True)
class WorkerCounts:
    """Counts since the half was created.

    loads_finished, loads_failed: requests whose loads ended well, and badly.
    tokens_loaded: tokens of loads that did not fail.
    bytes_loaded: bytes of the whole chunks that these loads read in the pool.
    bytes_loaded_from_files: bytes of those that they read in a tier's files.
    chunks_stored: chunks committed.
    bytes_stored: bytes of these chunks.
    tokens_stored: their tokens, counted in one group's chunks of shard 0: a group that needs the whole prefix, if any.
    stores_failed: leases that were aborted.
    chunks_dropped: chunks not stored because too much was in flight already.
    layers_stored_early: layers of stores, gathered while later layers were still to be computed.
    """

    loads_finished: int = 0
    loads_failed: int = 0
    tokens_loaded: int = 0
    bytes_loaded: int = 0
    bytes_loaded_from_files: int = 0
    chunks_stored: int = 0
    bytes_stored: int = 0
    tokens_stored: int = 0
    stores_failed: int = 0
    chunks_dropped: int = 0
    layers_stored_early: int = 0
