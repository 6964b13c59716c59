"""An engine over several nodes: the messages between its scheduler and its other nodes, which the connector carries.

On one node there are none.
"""

from collections.abc import Iterable
from typing import Any

from kv_connect.engine import Engine
from kv_connect.guard import PartOf, always, guarded
from kv_connect.nodes.node_agent import NodeAgent
from kv_connect.nodes.node_messages import FromNode, ToNodes

from kv_vllm.parallel import rank_share


class NodeMail(PartOf):
    """The messages of one connector, in either role."""

    def __init__(self, engine: Engine, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(engine)
        self._engine = engine
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._agent: NodeAgent | None = None

    # In the scheduler's process.

    @property
    def has_unsent(self) -> bool:
        """Whether the next step has a message to send."""
        nodes = self._engine.nodes
        return nodes is not None and nodes.has_unsent

    @guarded(always(None), even_off=True)
    def to_send(self) -> ToNodes | None:
        """The message that goes with a step's plan."""
        nodes = self._engine.nodes
        return None if nodes is None else ToNodes(self._engine.terms, nodes.take())

    def receive_answers(self, messages: Iterable[FromNode]) -> None:
        if self._engine.nodes is not None:
            self._engine.nodes.receive(messages)

    # In the workers.

    def registered(self) -> None:
        """This worker's rank is known now. On each node except the scheduler's, the first rank answers for the node."""
        if self._config.parallel_config.nnodes_within_dp > 1:
            share = rank_share(self._config, self._kv_cache_config)
            if share.node and share.is_first_here:
                self._agent = NodeAgent(share, self._engine.served)

    def receive(self, message: ToNodes) -> None:
        """Handle the message that came with a step's plan, before the plan is executed."""
        self._engine.agree(message.terms)
        if self._agent is not None:
            self._agent.receive(message.messages)

    @guarded(lambda self: () if self._agent is None else self._agent.refuse_all())  # the cache of this node is off
    def answers(self) -> tuple[FromNode, ...]:
        """The answers that go with the step's output."""
        return () if self._agent is None else self._agent.take()
