"""What the scheduler half knows of one request, from the engine's first question to its end."""

from dataclasses import dataclass, field

from kv_core.connect.request import Phase
from kv_core.keys import ChunkKey
from kv_core.sequence import KeySequence
from kv_core.service import ReadLease


@dataclass(slots=True)
class Tracked:
    """One request we have heard of.

    keys: its chain.
    tenant: the tag in its keys.
    phase: where it stands.
    chunk_keys: of its chunks, chunk-major.
    promised_chunks: how many are leased for it.
    pays: loading them is worth its while.
    tiers: of each of those, where it came from.
    junction: the boundary, in tokens, where other prompts part from it while a window or a state is missing there.
    offered_from: how many tokens the engine had itself when it was offered more.
    offered_tokens: how many more.
    layerwise: the chunks that it is offered, where they are to be loaded in the step itself.
    has_loaded: a load was begun, so its blocks may hold what was loaded.
    stored_chunks: how many of its leading chunks need no more thought.
    may_wait: until slower tiers have had their chance.
    is_counted: its lookup is in the counts.
    mixed: its blocks may hold KV of other weights than the key space's: never stored.
    """

    keys: KeySequence
    tenant: bytes
    phase: Phase = Phase.WAITING
    chunk_keys: list[ChunkKey] = field(default_factory=list)
    promised_chunks: int = 0
    pays: bool = True
    tiers: tuple[str, ...] = ()
    junction: int = 0
    offered_from: int = 0
    offered_tokens: int = 0
    layerwise: ReadLease | None = None
    has_loaded: bool = False
    stored_chunks: int = 0
    may_wait: bool = True
    is_counted: bool = False
    mixed: bool = False
