"""Counters of the scheduler half, for metrics and tests. They only grow, except those of consecutive failures."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounts:
    """What the half did since it was made.

    requests: that were heard of.
    lookups: that were answered, counted once a request, and again after a preemption, however often the engine asked.
    tokens_asked, tokens_hit: in those.
    tokens_declined: of those hit, that were computed all the same as that was estimated to be quicker.
    loads: for which blocks were given.
    loads_layerwise: of those, that ran in the step itself.
    tokens_to_load: of those, counted once a load, however often the engine asked.
    tokens_by_tier: the same by the slowest tier that they came from.
    tokens_loaded: of loads that the workers completed.
    loads_failed: that the workers could not complete.
    loads_failed_in_a_row: the last so many ended so.
    loads_refused: whose allocation did not add up.
    stores: steps of requests that had something to store.
    handovers_given: requests whose prompt was stored for another engine.
    handovers_taken: requests that were told of what another engine stores.
    handovers_late: of those, that waited for some of it in vain, and computed it.
    states_refused: states that the engine handed over and that were not worth their room.
    """

    requests: int = 0
    lookups: int = 0
    tokens_asked: int = 0
    tokens_hit: int = 0
    tokens_declined: int = 0
    loads: int = 0
    loads_layerwise: int = 0
    tokens_to_load: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    tokens_loaded: int = 0
    loads_failed: int = 0
    loads_failed_in_a_row: int = 0
    loads_refused: int = 0
    stores: int = 0
    handovers_given: int = 0
    handovers_taken: int = 0
    handovers_late: int = 0
    states_refused: int = 0
