"""The cache of an engine over several nodes, as its scheduler sees it: a hit is what every node's server holds.

Each node's workers use their own node's server, which has the shards of those ranks. A lookup queries the scheduler's
own server first. The other nodes are then asked about the chunks that it finds: the engine carries the question with
the next step, and each node leases what it has (`node_agent`). Until all have answered, the plan is `PENDING`. If this
node has nothing of a prompt, it is a miss without any question.

With windows and states, the longest hit of one node need not be a hit of another. Nodes that found more than the least
are asked again about the least, until all agree; every such round ends at fewer chunks.

Which shard of every chunk a rank has, on one node too, is its `RankShare`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Unpack

from kv_core.clock import Clock
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey, keys_in
from kv_core.log import limited_logger
from kv_core.service import CacheService, Ended, Holder, LookupOptions, LookupPlan
from kv_core.shape import ConnectShape
from kv_server.wire import Clear, End, Renew
from kv_tiers.cache.hits import interleaved

_log = limited_logger(__name__)

PATIENCE_S: Final = 30.0
"""A node that has not answered for this long is not waited for until it answers again. Nodes answer in every step, so
only a fault in the engine or in the node's agent can cause this."""
RENEW_S: Final = 20.0
"""How often promises at other nodes are renewed, but at least three times in a lease."""


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
    options: of `CacheService.lookup`.
    """

    number: int
    nodes: tuple[int, ...]
    holder: Holder
    prompt: PromptKeys
    options: LookupOptions


@dataclass(frozen=True, slots=True)
class PromptTaken:
    """See `CacheService.received`."""

    prompt: PromptKeys


@dataclass(frozen=True, slots=True)
class PromptEnded:
    """See `CacheService.turn_ended`."""

    prompt: PromptKeys


ToNode = Question | Renew | End | PromptTaken | PromptEnded | Clear


@dataclass(frozen=True, slots=True)
class ToNodes:
    """The scheduler's messages in one step.

    terms: `Engine.terms` of its node. The accompanying plan is for workers with the same terms.
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


@dataclass(frozen=True, slots=True)
class RankShare:
    """The shard of every chunk that one rank has.

    rank: its number among all ranks that have shards.
    shard: the one that this rank has.
    stores: whether this rank is the one that stores it, among those of its node with the same shard.
    nodes: the number of hosts, each with equally many ranks: the first has the first ranks.
    """

    rank: int
    ranks: int
    shards: int
    shard: int
    stores: bool
    nodes: int = 1
    stages: int = 1

    @property
    def node(self) -> int:
        return self.rank // self.ranks_here

    @property
    def ranks_here(self) -> int:
        """The number of ranks on each node."""
        return self.ranks // self.nodes

    @property
    def is_first_here(self) -> bool:
        """Whether it is the first rank of its node."""
        return self.rank % self.ranks_here == 0

    @property
    def is_in_last_stage(self) -> bool:
        return self.rank >= self.ranks - self.ranks // self.stages

    @property
    def shards_here(self) -> tuple[int, ...]:
        return self.shards_at(self.node)

    def shards_at(self, node: int) -> tuple[int, ...]:
        """The shards that the ranks of a node have, and so does its server."""
        copies = self.ranks // self.shards
        first = node * self.ranks_here
        return tuple(range(first // copies, (first + self.ranks_here - 1) // copies + 1))


ALONE: Final = RankShare(rank=0, ranks=1, shards=1, shard=0, stores=True)


def share_of(
    rank: int, ranks: int, distinct_heads: int, *, stage: int = 0, stages: int = 1, nodes: int = 1
) -> RankShare:
    """
    rank, ranks: among the tensor-parallel ones.
    stage, stages: of the pipeline. Each has layers of its own, so a chunk is whole when all stages have theirs.
    distinct_heads: KV heads of the whole model, 1 in MLA. Where there are fewer than ranks, neighbouring ranks have the
        same head.
    nodes: the hosts that the ranks of all stages are spread over.

    Raises:
        ConfigError: heads cannot be divided among ranks, or ranks among nodes.
    """
    shards = min(ranks, distinct_heads)
    if ranks % shards or distinct_heads % shards:
        raise ConfigError(f"{ranks} tensor-parallel ranks cannot have equal parts of {distinct_heads} KV heads")
    if ranks * stages % nodes:
        raise ConfigError(f"{ranks * stages} ranks cannot be spread evenly over {nodes} nodes")
    copies = ranks // shards
    number = stage * ranks + rank
    return RankShare(
        rank=number,
        ranks=stages * ranks,
        shards=stages * shards,
        shard=stage * shards + rank // copies,
        stores=rank % copies == 0 or number % (stages * ranks // nodes) == 0,
        nodes=nodes,
        stages=stages,
    )


@dataclass(frozen=True, slots=True)
class _LookupArgs:
    """The arguments of a lookup."""

    keys: Sequence[ChunkKey]
    holder: Holder
    shape: ChunkShape
    options: LookupOptions


@dataclass(slots=True)
class _Query:
    """The nodes' answers to one holder's lookup.

    lookup_id: distinguishes this lookup from one of other chunks.
    renewed_s: when the promises at other nodes began or were renewed, at the earliest.
    own_plan: what this node's server found. None: not looked up yet.
    prefix_chunks, lacking: as in the first final plan of this node's server.
    open: by node, the number of the question that it has not answered.
    found: by node, its last answer.
    is_over: it has been answered, by all nodes or without them. The next lookup begins anew.
    """

    lookup_id: tuple[int, bytes]
    sent_s: float
    renewed_s: float
    own_plan: LookupPlan | None = None
    prefix_chunks: int = 0
    lacking: int = -1
    open: dict[int, int] = field(default_factory=dict)
    found: dict[int, LookupPlan] = field(default_factory=dict)
    is_over: bool = False
    is_lost: bool = False

    @property
    def was_sent(self) -> bool:
        return bool(self.open or self.found)


class NodesCache:
    """A `CacheService`. Not thread-safe: it belongs to the scheduler's thread.

    Lookups, promises, `received`, `turn_ended` and `clear` are for all nodes; everything else is for this one, as each
    worker has its own node's cache.
    """

    def __init__(self, local: CacheService, share: RankShare, *, groups: int, clock: Clock) -> None:
        """local: this node's cache. share: of this node's first rank. groups: the number of groups of a chunk."""
        self._local = local
        # The calls of `CacheService` that are for this node alone.
        self.load, self.begin_store, self.commit = local.load, local.begin_store, local.commit
        self.release, self.forget, self.allocated = local.release, local.forget, local.allocated
        self.measured, self.counts = local.measured, local.counts
        self._other_nodes = tuple(node for node in range(share.nodes) if node != share.node)
        self._shards = len(shards := share.shards_here)
        self._keys_per_chunk = groups * share.shards
        self._columns = [group * share.shards + shard for group in range(groups) for shard in shards]
        self._clock = clock
        self._leases_s: dict[int, float] = {}  # by other node, how long its leases last, from its last answer
        self._queries: dict[Holder, _Query] = {}
        self._to_send: list[ToNode] = []
        self._number = 0
        self._silent: set[int] = set()

    # Messages that the engine carries.

    @property
    def has_unsent(self) -> bool:
        return bool(self._to_send)

    def take(self) -> tuple[ToNode, ...]:
        """The messages to all other nodes since the last call, in order."""
        messages, self._to_send = self._to_send, []
        return tuple(messages)

    def receive(self, messages: Iterable[FromNode]) -> None:
        """Receive the answers of nodes."""
        for message in messages:
            self._silent.discard(message.node)
            query = self._queries.get(message.holder)
            if query is None:
                continue
            match message:
                case Answer(node, number, _, plan, lease_s):
                    self._leases_s[node] = lease_s
                    if query.open.get(node) == number:
                        del query.open[node]
                        query.found[node] = plan
                case Lost():
                    query.is_lost = not query.open  # else it is being looked up again already

    # `CacheService`, for all nodes.

    @property
    def tiers(self) -> tuple[str, ...]:
        return self._local.tiers

    @property
    def lease_s(self) -> float:
        return min([self._local.lease_s, *self._leases_s.values()])

    def lookup(
        self,
        keys: Sequence[ChunkKey],
        holder: Holder,
        *,
        shape: ChunkShape = PLAIN,
        **options: Unpack[LookupOptions],
    ) -> LookupPlan:
        args = _LookupArgs(keys, holder, shape, options)
        chunks = len(keys) // shape.keys_per_chunk
        lookup_id = (len(keys), keys[-1] if keys else b"")  # a digest stands for all chunks before it
        query = self._queries.get(holder)
        was_sent = query is not None and query.was_sent
        if query is None or query.is_over or query.is_lost or query.lookup_id != lookup_id:
            now_s = self._clock.now_s()
            query = self._queries[holder] = _Query(lookup_id, now_s, now_s)
        own_plan = query.own_plan
        if own_plan is None or own_plan.ended is Ended.PENDING:
            own_plan = query.own_plan = self._look_up_locally(args, chunks)
            query.prefix_chunks, query.lacking = own_plan.prefix_chunks, own_plan.lacking
        is_pending = own_plan.ended is Ended.PENDING
        if not is_pending and (not own_plan.chunks or _declines(own_plan)):
            if was_sent:
                self._to_send.append(End(holder))
            if not own_plan.chunks:
                del self._queries[holder]
            else:
                query.is_over = True
            return own_plan
        if not query.was_sent:
            wanted_chunks = chunks if is_pending else own_plan.chunks
            self._ask(query, args, self._other_nodes, wanted_chunks)
        self._give_up_silent(query)
        if is_pending or query.open:
            return replace(own_plan, ended=Ended.PENDING)
        return self._agree(query, args, own_plan)

    def renew(self, holder: Holder) -> bool:
        query = self._queries.get(holder)
        if query is None or query.is_lost or not self._local.renew(holder):
            return False
        now_s = self._clock.now_s()
        renew_s = min(RENEW_S, min(self._leases_s.values(), default=RENEW_S) / 3)
        if query.was_sent and now_s - query.renewed_s >= renew_s:
            query.renewed_s = now_s
            self._to_send.append(Renew(holder))
        return True

    def end(self, holder: Holder) -> None:
        self._local.end(holder)
        query = self._queries.pop(holder, None)
        if query is not None and query.was_sent:
            self._to_send.append(End(holder))

    def received(self, keys: Sequence[ChunkKey]) -> None:
        self._local.received(self._keys_here(keys))
        if keys:
            self._to_send.append(PromptTaken(PromptKeys.of(keys, self._keys_per_chunk)))

    def turn_ended(self, keys: Sequence[ChunkKey]) -> None:
        self._local.turn_ended(self._keys_here(keys))
        if keys:
            self._to_send.append(PromptEnded(PromptKeys.of(keys, self._keys_per_chunk)))

    def retainable(self, keys: Sequence[ChunkKey]) -> int | None:
        """On this node; each has the same chunks, unless its pool is another."""
        here = self._keys_here(keys)
        fitting = self._local.retainable(here)
        return None if fitting is None else fitting * (len(keys) // max(1, len(here)))

    def clear(self) -> None:
        self._local.clear()
        self._to_send.append(Clear())

    def _keys_here(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys of this node's shards."""
        return interleaved([list(keys[column :: self._keys_per_chunk]) for column in self._columns])

    def _look_up_locally(self, args: _LookupArgs, chunks: int) -> LookupPlan:
        """Look up the first `chunks` chunks at this node's server."""
        return self._local.lookup(
            self._keys_here(args.keys[: chunks * self._keys_per_chunk]),
            args.holder,
            shape=replace(args.shape, shards=self._shards),
            **args.options,
        )

    def _ask(self, query: _Query, args: _LookupArgs, nodes: Sequence[int], chunks: int) -> None:
        """Have these nodes look up the first `chunks` chunks."""
        self._number += 1
        prompt = PromptKeys.of(args.keys[: chunks * self._keys_per_chunk], self._keys_per_chunk)
        self._to_send.append(Question(self._number, tuple(nodes), args.holder, prompt, args.options))
        query.open = dict.fromkeys(nodes, self._number)
        query.sent_s = self._clock.now_s()

    def _give_up_silent(self, query: _Query) -> None:
        """Assume that nodes that do not answer have nothing."""
        if not query.open:
            return
        if self._clock.now_s() - query.sent_s >= PATIENCE_S:
            for node in query.open.keys() - self._silent:
                self._silent.add(node)
                _log.warning(
                    "node %d has not answered for %d s: until it does, every prompt is a miss", node, PATIENCE_S
                )
        for node in query.open.keys() & self._silent:
            del query.open[node]
            query.found[node] = LookupPlan("", 0, Ended.REFUSED, ())

    def _agree(self, query: _Query, args: _LookupArgs, own_plan: LookupPlan) -> LookupPlan:
        """The plan of all nodes, once they have answered, or `PENDING` while some are asked about a shorter hit."""
        # What all have been found to hold is not waited for.
        args = replace(args, options={**args.options, "wait_for_promotion": False})
        shortest = min(query.found.values(), key=lambda plan: plan.chunks)
        if shortest.chunks < own_plan.chunks:
            ended = shortest.ended
            own_plan = query.own_plan = self._look_up_locally(args, shortest.chunks)
        else:
            ended = own_plan.ended
        chunks, prefix_chunks, lacking = own_plan.chunks, own_plan.chunks, -1
        if not args.shape.is_plain and query.prefix_chunks > chunks:
            prefix_chunks, lacking = query.prefix_chunks, query.lacking
        if not chunks:
            self.end(args.holder)
            return LookupPlan(args.holder, 0, ended, (), prefix_chunks, lacking)
        longer = [node for node, plan in query.found.items() if plan.chunks > chunks]
        if longer and not args.shape.is_plain:
            self._ask(query, args, longer, chunks)
            return replace(own_plan, ended=Ended.PENDING)
        query.is_over = True
        plans = [own_plan, *query.found.values()]
        return replace(
            own_plan,
            ended=ended,
            tiers=self._slowest(plans, chunks),
            prefix_chunks=prefix_chunks,
            lacking=lacking,
            choice=next(
                (replace(plan.choice, chunks=0) for plan in plans if plan.choice and _declines(plan)), own_plan.choice
            ),
        )

    def _slowest(self, plans: Sequence[LookupPlan], chunks: int) -> tuple[str, ...]:
        """For each chunk, the slowest of the tiers that the nodes have it in."""
        order = {tier: number for number, tier in enumerate(self.tiers)}
        columns = zip(*(plan.tiers[:chunks] for plan in plans), strict=False)
        return tuple(max(tiers, key=lambda tier: order.get(tier, len(order))) for tiers in columns)


def _declines(plan: LookupPlan) -> bool:
    """Whether loading what was found does not pay."""
    return plan.choice is not None and plan.choice.chunks < plan.chunks


Served = tuple[CacheService, ConnectShape]


class NodeAgent:
    """For the first rank of a node. Not thread-safe: it belongs to the worker's thread.

    A node whose cache is off or whose server cannot be reached holds nothing, and answers so at once.
    """

    def __init__(self, share: RankShare, served: Callable[[], Served | None]) -> None:
        """served: the cache of this node's server, and the shape of its chunks; None: nothing is served."""
        self._node = share.node
        self._shards = share.shards_here
        self._served = served
        self._received: list[ToNode] = []
        self._pending: dict[Holder, Question] = {}  # more is being promoted from lower tiers

    def receive(self, messages: Iterable[ToNode]) -> None:
        """Receive the messages of a step."""
        self._received += messages

    def take(self) -> tuple[FromNode, ...]:
        """Process the received messages, in order, and return the replies."""
        if not (self._received or self._pending):
            return ()
        served = self._served()
        if served is None:
            return self.refuse_all()
        cache, shape = served
        replies: list[FromNode] = []
        still_pending = list(self._pending.values())
        # A message is removed only once it has been processed: if one raises, it and those after it are refused.
        while self._received:
            replies += self._follow(cache, shape, self._received[0])
            del self._received[0]
        for question in still_pending:
            if self._pending.get(question.holder) is question:
                replies += self._ask(cache, shape, question)
        return tuple(replies)

    def refuse_all(self) -> tuple[FromNode, ...]:
        """Answer all open questions: nothing is held here."""
        questions = [*self._pending.values(), *(one for one in self._received if isinstance(one, Question))]
        self._pending.clear()
        self._received.clear()
        return tuple(
            Answer(self._node, question.number, question.holder, LookupPlan(question.holder, 0, Ended.REFUSED, ()), inf)
            for question in questions
            if self._node in question.nodes
        )

    def _follow(self, cache: CacheService, shape: ConnectShape, message: ToNode) -> list[FromNode]:
        match message:
            case Question(nodes=nodes):
                return self._ask(cache, shape, message) if self._node in nodes else []
            case Renew(holder):
                if holder not in self._pending and not cache.renew(holder):
                    return [Lost(self._node, holder)]
            case End(holder):
                self._pending.pop(holder, None)
                cache.end(holder)
            case PromptTaken(prompt):
                cache.received(prompt.keys(len(shape.groups), self._shards))
            case PromptEnded(prompt):
                cache.turn_ended(prompt.keys(len(shape.groups), self._shards))
            case Clear():
                cache.clear()
        return []

    def _ask(self, cache: CacheService, shape: ConnectShape, question: Question) -> list[FromNode]:
        holder = question.holder
        plan = cache.lookup(
            question.prompt.keys(len(shape.groups), self._shards),
            holder,
            shape=ChunkShape(shape.chunk_tokens, shape.chunk.groups, len(self._shards)),
            **question.options,
        )
        if plan.ended is Ended.PENDING:
            self._pending[holder] = question
            return []
        self._pending.pop(holder, None)
        return [Answer(self._node, question.number, holder, plan, cache.lease_s)]
