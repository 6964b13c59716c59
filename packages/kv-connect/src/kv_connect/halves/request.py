"""The life cycle of a request as a table: which events are valid in which phase, and when its promise is released.

An engine reports little: it asks for a match, allocates blocks, reports that a load ended, finishes the request. It
does not report preemptions; a request that is looked up again after it ran must have been preempted. A promise (the
lease of a lookup) lasts exactly while the request is `PENDING`, `PROMISED`, `LOADING`, `FILLING` or `DRAINING`, so
leaving these phases is the one place where it is released.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from kv_core.errors import MisuseError


class Phase(Enum):
    __hash__ = object.__hash__  # in C: Enum's own is Python code, and the table is read for every event
    WAITING = "nothing is promised"
    PENDING = "lower tiers are promoting more than could be promised; the engine asks again"
    PROMISED = "chunks are leased for it, and the engine knows how many"
    LOADING = "the engine has given blocks and waits for us to fill them"
    RUNNING = "the engine computes it"
    FILLING = "the engine computes it while its blocks are filled, layer by layer"
    DRAINING = "it ended while loading: its blocks stay until the load is reported"
    GONE = "neither the engine nor the cache tracks it any longer"


class RequestEvent(Enum):
    __hash__ = object.__hash__
    PROMISE = "a lookup found something to load"
    MISS = "a lookup found nothing to load"
    PEND = "a lookup found that more is being promoted"
    LOAD = "blocks were allocated for what was promised"
    FILL = "blocks were allocated for what was promised, to be filled in this step"
    ADMIT = "blocks were allocated with nothing to load"
    LOADED = "the load ended, well or badly"
    FINISH = "the engine is done with it, for whatever reason"


NEXT: Final[Mapping[tuple[Phase, RequestEvent], Phase]] = {
    (Phase.WAITING, RequestEvent.PROMISE): Phase.PROMISED,
    (Phase.WAITING, RequestEvent.MISS): Phase.WAITING,
    (Phase.WAITING, RequestEvent.PEND): Phase.PENDING,
    (Phase.WAITING, RequestEvent.ADMIT): Phase.RUNNING,
    (Phase.WAITING, RequestEvent.FINISH): Phase.GONE,
    (Phase.PENDING, RequestEvent.PEND): Phase.PENDING,
    (Phase.PENDING, RequestEvent.PROMISE): Phase.PROMISED,
    (Phase.PENDING, RequestEvent.MISS): Phase.WAITING,  # the promotion brought nothing
    (Phase.PENDING, RequestEvent.ADMIT): Phase.RUNNING,  # the engine did not wait for the answer
    (Phase.PENDING, RequestEvent.FINISH): Phase.GONE,
    (Phase.PROMISED, RequestEvent.PROMISE): Phase.PROMISED,  # looked up again while it waits for blocks
    (Phase.PROMISED, RequestEvent.PEND): Phase.PENDING,  # the promise has ended, and other nodes are queried again
    (Phase.PROMISED, RequestEvent.MISS): Phase.WAITING,  # the engine has as much in its own blocks by now
    (Phase.PROMISED, RequestEvent.LOAD): Phase.LOADING,
    (Phase.PROMISED, RequestEvent.FILL): Phase.FILLING,
    (Phase.PROMISED, RequestEvent.ADMIT): Phase.RUNNING,  # the engine declined what we offered
    (Phase.PROMISED, RequestEvent.FINISH): Phase.GONE,
    (Phase.LOADING, RequestEvent.LOADED): Phase.WAITING,
    (Phase.LOADING, RequestEvent.FINISH): Phase.DRAINING,
    (Phase.FILLING, RequestEvent.LOADED): Phase.RUNNING,
    (Phase.FILLING, RequestEvent.FINISH): Phase.DRAINING,
    (Phase.RUNNING, RequestEvent.ADMIT): Phase.RUNNING,
    (Phase.RUNNING, RequestEvent.PROMISE): Phase.PROMISED,  # preempted, and what it had computed is still held
    (Phase.RUNNING, RequestEvent.MISS): Phase.WAITING,  # preempted
    (Phase.RUNNING, RequestEvent.PEND): Phase.PENDING,  # preempted
    (Phase.RUNNING, RequestEvent.FINISH): Phase.GONE,
    (Phase.DRAINING, RequestEvent.LOADED): Phase.GONE,
}

HOLDING: Final = frozenset({Phase.PENDING, Phase.PROMISED, Phase.LOADING, Phase.FILLING, Phase.DRAINING})
"""The phases in which a lookup's lease is open."""
AWAITED: Final = frozenset({Phase.LOADING, Phase.FILLING, Phase.DRAINING})
"""The phases in which workers owe the report of a load."""


def advance(now: Phase, event: RequestEvent) -> Phase:
    """The phase after this event.

    Raises:
        MisuseError: the table has no such transition; the engine does not behave as its contract says.
    """
    try:
        return NEXT[now, event]
    except KeyError:
        raise MisuseError(f"a request that is {now.name} cannot {event.name}") from None
