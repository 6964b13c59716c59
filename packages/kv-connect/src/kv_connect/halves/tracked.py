"""The scheduler half's record of one request, from the first lookup to its end."""

import sys
from collections import Counter
from dataclasses import dataclass, field

from kv_core.hashing import Digest
from kv_core.keys import ChunkKey
from kv_core.sequence import KeySequence
from kv_core.service import ReadLease
from kv_core.transfer import FileExtent

from kv_connect.halves.request import Phase


@dataclass(slots=True)
class Awaited:
    """The wait for chunks that another engine has yet to store (`kv_connect.halves.handover`).

    until_s: when the request stops waiting.
    retry_at_s: when its lookup is repeated.
    retry_s: the interval after that lookup.
    """

    until_s: float
    retry_at_s: float
    retry_s: float


@dataclass(slots=True)
class Tracked:
    """One request.

    keys: its chain of digests.
    tenant: the tag in its keys.
    phase: where it is in its life cycle.
    chunk_keys: the keys of its chunks, chunk-major.
    promised_chunks: the number of leading chunks leased for it.
    files: where the last of these are in a tier's files, if they are read there.
    pays: whether loading them is worthwhile.
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
    awaited: its wait for chunks of another engine.
    has_awaited: whether its wait for another engine is over.
    has_taken: whether it has ended the holds on the chunks handed over to it.
    may_wait: whether it may still wait for lower tiers.
    follows: the request for whose load of the same chunks it waits, or has waited; empty: none.
    is_counted: whether its lookup is in the counts.
    mixed: whether its blocks may hold other KV than its keys name, such as that of earlier weights, which is never
        stored.
    """

    keys: KeySequence
    tenant: bytes
    phase: Phase = Phase.WAITING
    chunk_keys: list[ChunkKey] = field(default_factory=list)
    promised_chunks: int = 0
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
