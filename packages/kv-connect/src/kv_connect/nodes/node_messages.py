"""The messages between the scheduler of an engine over several nodes and its other nodes.

The engine carries them: to all workers with a step's plan, and back with the step's output. So they need no address and
no credentials, arrive in order, and come from this engine's processes only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.keys import ChunkKey, keys_in
from kv_core.service import Holder, LookupOptions, LookupPlan
from kv_server.wire import Clear, End, Renew


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The leading chunks of a prompt, without their groups and shards.

    space_id, tenant: as in their keys.
    digest_bytes, digests: one digest for each chunk, joined.
    """

    space_id: bytes
    tenant: bytes
    digest_bytes: int
    digests: bytes

    @classmethod
    def of(cls, keys: Sequence[ChunkKey], keys_per_chunk: int) -> "PromptKeys":
        """keys: of at least one chunk, chunk-major."""
        first = keys[0]
        digests = [key.digest for key in keys[::keys_per_chunk]]
        return cls(first.space_id, first.tenant, len(digests[0]), b"".join(digests))

    def keys(self, groups: int, shards: Sequence[int]) -> list[ChunkKey]:
        """The keys of these shards, chunk-major."""
        size = self.digest_bytes
        digests = [self.digests[start : start + size] for start in range(0, len(self.digests), size)]
        return keys_in(self.space_id, digests, groups=groups, shards=shards, tenant=self.tenant)


@dataclass(frozen=True, slots=True)
class Question:
    """Asks how much of a prompt a node's server holds. The chunks that it finds are leased to the holder there.

    number: the answer has the same.
    nodes: those that must answer.
    options: of `CacheService.lookup`.
    """

    number: int
    nodes: tuple[int, ...]
    holder: Holder
    prompt: PromptKeys
    options: LookupOptions


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """See `CacheService.taken`."""

    prompt: PromptKeys


ToNode = Question | Renew | End | PromptTaken | Clear


@dataclass(frozen=True, slots=True)
class ToNodes:
    """The scheduler's messages in one step.

    terms: `Engine.terms` of its node. The accompanying plan is for workers with the same terms.
    messages: in order.
    """

    terms: str
    messages: tuple[ToNode, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """To the question of this number. The plan is final. lease_s: how long its promise lasts at this node's server."""

    node: int
    number: int
    holder: Holder
    plan: LookupPlan
    lease_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The holder's promise could not be renewed at this node: look up again."""

    node: int
    holder: Holder


FromNode = Answer | Lost
