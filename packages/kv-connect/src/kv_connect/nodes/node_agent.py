"""Answers the scheduler's questions for a node that it is not on: the node's first rank queries the node's server, once
per step, after the forward pass.

A node whose cache is off or whose server cannot be reached holds nothing, and answers so at once.
"""

from collections.abc import Callable, Iterable
from math import inf

from kv_core.coverage import ChunkShape
from kv_core.service import CacheService, Ended, Holder, LookupPlan
from kv_core.shape import ConnectShape
from kv_server.wire import Clear, End, Renew

from kv_connect.nodes.node_messages import Answer, FromNode, Lost, PromptTaken, Question, ToNode
from kv_connect.nodes.ranks import RankShare

Served = tuple[CacheService, ConnectShape]


class NodeAgent:
    """For the first rank of a node. Not thread-safe: it belongs to the worker's thread."""

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
                cache.taken(prompt.keys(len(shape.groups), self._shards))
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
