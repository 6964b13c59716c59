"""The messages between the connector's two halves, which vLLM carries: a plan for each step, and completions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kv_tiers.attach.node_messages import FromNode, ToNodes
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kv_vllm.layerwise import NO_LAYERWISE, LayerwiseStep, RankAnswer


class KVTiersMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """A step plan for the workers, as plain data if they are in other processes; None if it contains nothing but its
    number.

    waiting: requests that wait until their load is reported. Sent next to the plan, so that a worker that cannot read
        the plan can answer them too.
    number: the plan's, `StepPlan.number`, which such a worker acknowledges too.
    layerwise: the step's layerwise loads, as such a worker needs them, and, for every worker, the scheduler's pool.
    to_nodes: in an engine over several nodes, the scheduler's message to the others.
    """

    def __init__(
        self,
        plan: Any,
        waiting: tuple[str, ...] = (),
        number: int = 0,
        layerwise: LayerwiseStep = NO_LAYERWISE,
        to_nodes: ToNodes | None = None,
    ) -> None:
        self.plan = plan
        self.waiting = waiting
        self.number = number
        self.layerwise = layerwise
        self.to_nodes = to_nodes


class Acknowledged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """The workers' completions.

    through: by rank, the number of the latest plan that was read, together with all before it.
    layerwise: by rank, its report on layerwise loads.
    from_nodes: in an engine over several nodes, the others' answers.
    """

    def __init__(
        self,
        through: Mapping[int, int],
        layerwise: Mapping[int, RankAnswer] = MappingProxyType({}),
        from_nodes: tuple[FromNode, ...] = (),
    ) -> None:
        self.through = dict(through)
        self.layerwise = dict(layerwise)
        self.from_nodes = from_nodes

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Acknowledged":
        layerwise = self.layerwise | other.layerwise
        return Acknowledged(self.through | other.through, layerwise, self.from_nodes + other.from_nodes)
