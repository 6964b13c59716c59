"""A request, as the scheduler half sees it: what the engine says of it, what it may do, and its life cycle as a table.

An engine reports little: it asks for a match, allocates blocks, reports that a load ended, finishes the request. It
does not report preemptions; a request that is looked up again after it ran must have been preempted. A promise (the
lease of a lookup) lasts exactly while the request is `PENDING`, `PROMISED`, `LOADING`, `FILLING` or `DRAINING`, so
leaving these phases is the one place where it is released.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kv_core.errors import MisuseError
from kv_core.hashing import Digest, Item
from kv_core.keys import ChunkKey
from kv_core.sequence import KeySequence
from kv_core.service import ReadLease
from kv_core.transfer import FileExtent

from kv_connect.request_options import NO_CONTROLS, Controls


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


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """What the engine knows of a request when it asks for a match.

    tokens: all its tokens, including generated ones: after a preemption they are a prompt like any other.
    keep_tokens: how many of them may be stored (the prompt's; all of them if decoded tokens are stored too).
    salt: separates its chunks from other tenants'.
    items: inputs of the model besides tokens.
    """

    request_id: str
    tokens: Sequence[int]
    keep_tokens: int
    salt: str | None = None
    lora: str | None = None
    items: tuple[Item, ...] = ()
    controls: Controls = NO_CONTROLS

    @property
    def kept_tokens(self) -> int:
        """How many of its tokens may be stored. Tokens beyond the known ones are guesses (speculation, or a step
        scheduled ahead) and are not stored."""
        return self.controls.storable(min(self.keep_tokens, len(self.tokens)))


@dataclass(frozen=True, slots=True)
class EngineState:
    """A state of linear layers that the engine hands over.

    block: the block where the state is after this step's forward pass.
    boundary: the number of the request's tokens after which the state was taken.
    """

    table: int
    block: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in this step.

    computed_tokens: how many of its first tokens are computed after the forward pass.
    """

    request: RequestTokens
    computed_tokens: int
    blocks: tuple[Sequence[int], ...]
    states: tuple[EngineState, ...] = ()


@dataclass(slots=True)
class Awaited:
    """The wait for chunks that another engine has yet to store (`kv_connect.halves.scheduler`).

    retry_at_s: when its lookup is repeated.
    retry_s: the interval after that lookup.
    """

    until_s: float
    retry_at_s: float
    retry_s: float


@dataclass(slots=True)
class Tracked:
    """One request.

    tenant: the tag in its keys.
    chunk_keys: the keys of its chunks, chunk-major.
    promised_chunks: the number of leading chunks leased for it.
    own_chunks: how many of these are not, because the engine had them itself when they were looked up.
    files: where the last of these are in a tier's files, if they are read there.
    tiers: for each promised chunk, the tier that it came from.
    junction: the boundary, in tokens, where other prompts diverge from it while a window or a state is missing there.
    offered_from: the number of tokens that the engine had itself when it was offered more.
    offered_tokens: the number of tokens that it was offered beyond these.
    layerwise: the lease of the chunks offered to it, if they are to be loaded in the step itself.
    has_loaded: whether a load was begun, so that its blocks may hold loaded tokens.
    stored_chunks: number of leading chunks that are stored or need not be.
    tail: the digest of the last, partial chunk that another engine hands over; empty if there is none.
    first_trial: the number of the first trial that what is stored of it awaits (`StepPlan.trial`); 0: something awaits
        none.
    stored_tail_tokens: tokens of the last, partial chunk that was stored for another engine.
    has_taken: whether it has ended the holds on the chunks handed over to it.
    follows: the request for whose load of the same chunks it waits, or has waited; empty: none.
    mixed: whether its blocks may hold other KV than its keys name, such as that of earlier weights, which is never
        stored.
    """

    keys: KeySequence
    tenant: bytes
    phase: Phase = Phase.WAITING
    chunk_keys: list[ChunkKey] = field(default_factory=list)
    promised_chunks: int = 0
    own_chunks: int = 0
    files: tuple[FileExtent, ...] = ()
    pays: bool = True
    tiers: tuple[str, ...] = ()
    junction: int = 0
    offered_from: int = 0
    offered_tokens: int = 0
    layerwise: ReadLease | None = None
    has_loaded: bool = False
    stored_chunks: int = 0
    first_trial: int = sys.maxsize
    tail: Digest = b""
    stored_tail_tokens: int = 0
    awaited: Awaited | None = None
    has_awaited: bool = False
    has_taken: bool = False
    may_wait: bool = True
    follows: str = ""
    is_counted: bool = False
    mixed: bool = False

    def digests(self, first_chunk: int, last_chunk: int) -> tuple[Digest, ...]:
        """The digests of these chunks, excluding the last one; the partial chunk follows all whole ones."""
        whole = self.keys.digests
        tail = (self.tail,) if self.tail and last_chunk > len(whole) else ()
        return (*whole[first_chunk:last_chunk], *tail)

    def offered_by_tier(self, chunk_tokens: int) -> dict[str, int]:
        """How many of the last offered tokens come from each tier."""
        first, last = self.offered_from, self.offered_from + self.offered_tokens
        tokens: Counter[str] = Counter()
        for chunk in range(first // chunk_tokens, min(-(-last // chunk_tokens), len(self.tiers))):
            start = chunk * chunk_tokens
            tokens[self.tiers[chunk]] += min(last, start + chunk_tokens) - max(first, start)
        return dict(tokens)

    def files_of(self, first_chunk: int, last_chunk: int) -> tuple[FileExtent, ...]:
        """Where those of these chunks are that are read in files, excluding the last one."""
        first_in_files = self.promised_chunks - len(self.files)
        return self.files[max(0, first_chunk - first_in_files) : max(0, last_chunk - first_in_files)]

    @property
    def is_filling(self) -> bool:
        """Whether the engine may be computing with blocks that are being loaded layer by layer."""
        return self.layerwise is not None and self.phase in (Phase.FILLING, Phase.DRAINING)

    def store_again(self) -> None:
        """No longer count any of it as stored."""
        self.stored_chunks = self.stored_tail_tokens = 0
