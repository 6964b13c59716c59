"""What the engines of a server have measured, and how much each still has to compute, for routers.

Both come from lookups. A lookup carries its engine's costs (`kv_core.cost.Costs`), and what it does not find, the
engine computes. An engine's backlog is therefore the sum of what lookups left to it, minus the time that has passed
since. That is accurate while an engine spends its time on prompts; requests that are generating are not included.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.clock import Clock
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_core.keys import NO_TENANT, ChunkKey, keys_in
from kv_core.service import Ended, LookupPlan
from kv_observe.explain import explain, weigh
from kv_observe.lookup_uses import LookupUses
from kv_tiers.cache.local import LocalCache

from kv_server.wire import Format

OnLookup = Callable[[Sequence[ChunkKey], ChunkShape, Costs | None, LookupPlan], None]
"""Given a lookup's keys, what its hit needs, the engine's costs, and the answer."""

_MAX_KEY_SPACES: Final = 256
_MAX_BACKLOG_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ServedSpace:
    """A key space that an engine has looked prompts up in.

    engine: its name, as registered.
    format: of the cache.
    space_id: the key space's fingerprint.
    shape: what a hit needs.
    costs: from the engine's last lookup; None: it uses whatever is held.
    """

    engine: str
    format: Format
    space_id: bytes
    shape: ChunkShape
    costs: Costs | None


@dataclass(frozen=True, slots=True)
class EngineEstimate:
    """What one engine would do with a prompt.

    engine: its name, as registered.
    chunk_tokens: tokens in a chunk of its, which the digests were made for.
    held_chunks: leading chunks that the server holds for it, in the pool or in a tier that answers from memory.
    loaded_chunks: how many of those the engine would load, because that is estimated to be quicker than computing.
    queue_s: time until it has computed what it looked up before.
    load_s, compute_s: time to load its hit, and to compute the rest of the prompt; None: not measured yet.
    ttft_s: their sum, the time to the first token, leaving out loads that are not measured; None: nothing is measured
        yet.
    """

    engine: str
    chunk_tokens: int
    held_chunks: int
    loaded_chunks: int
    queue_s: float
    load_s: float | None
    compute_s: float | None
    ttft_s: float | None


class EngineLoads:
    """The engines of one server. Used on its thread only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spaces: OrderedDict[tuple[str, bytes], ServedSpace] = OrderedDict()
        self._busy_until_s: dict[str, float] = {}
        self.uses = LookupUses()

    def looked_up(  # noqa: PLR0917  # all but two are as in `OnLookup`
        self,
        engine: str,
        format: Format,
        keys: Sequence[ChunkKey],
        shape: ChunkShape,
        costs: Costs | None,
        plan: LookupPlan,
    ) -> None:
        """A client of this engine has looked a prompt up. Constant time."""
        if not keys or plan.ended in (Ended.PENDING, Ended.REFUSED):
            return
        name = engine, keys[0].space_id
        self._spaces[name] = ServedSpace(engine, format, keys[0].space_id, shape, costs)
        self._spaces.move_to_end(name)
        if len(self._spaces) > _MAX_KEY_SPACES:
            (oldest, _), _ = self._spaces.popitem(last=False)
            self._busy_until_s.pop(oldest, None)
        chunks = len(keys) // shape.keys_per_chunk
        loaded = plan.chunks if plan.choice is None else plan.choice.chunks
        saved_s = None if costs is None else costs.compute_s(0, loaded * shape.chunk_tokens)
        self.uses.note(engine, keys[0], (chunks, plan.chunks), sum(format[0]) * shape.shards, saved_s or 0.0)
        if costs is None:
            return
        tokens = chunks * shape.chunk_tokens
        seconds = costs.compute_s(loaded * shape.chunk_tokens, tokens) or 0.0
        busy_s = min(self.queue_s(engine) + seconds, _MAX_BACKLOG_S)
        self._busy_until_s[engine] = self._clock.now_s() + busy_s

    def spaces(self) -> list[ServedSpace]:
        return list(self._spaces.values())

    def queue_s(self, engine: str) -> float:
        """How long until the engine has computed what it looked up."""
        now_s = self._clock.now_s()
        return max(0.0, self._busy_until_s.get(engine, now_s) - now_s)


def estimate(
    cache: LocalCache,
    served: ServedSpace,
    digests: Sequence[bytes],
    *,
    tokens: int,
    queue_s: float,
    tenant: bytes = NO_TENANT,
) -> EngineEstimate:
    """What the engine would do with a prompt. Reads the cache and changes nothing; may be called on any thread. Raises
    `InputError`: not digests, or not a tag.

    digests: of the prompt's whole chunks.
    tokens: number of tokens of the prompt.
    """
    shape = served.shape
    columns = [
        keys_in(served.space_id, digests, groups=(group,), shards=(shard,), tenant=tenant)
        for group in range(len(shape.groups))
        for shard in range(shape.shards)
    ]
    held = explain(cache, None, columns, 0.0).held
    if served.costs is None:
        return EngineEstimate(served.engine, shape.chunk_tokens, held, held, queue_s, None, None, None)
    costs = served.costs.of_prompt(tokens)
    choice = weigh(cache, columns, held, costs, shape)
    loaded_tokens = choice.chunks * shape.chunk_tokens
    load_s = choice.load_s if choice.chunks else 0.0
    compute_s = costs.compute_s(min(loaded_tokens, tokens - 1), tokens)
    # As in a lookup: a load that was never measured is assumed to be quick, or it never would be measured.
    ttft_s = None if compute_s is None else queue_s + (load_s or 0.0) + compute_s
    return EngineEstimate(served.engine, shape.chunk_tokens, held, choice.chunks, queue_s, load_s, compute_s, ttft_s)
