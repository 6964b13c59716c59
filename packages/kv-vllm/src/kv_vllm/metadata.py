"""The messages between the connector's two halves, which vLLM carries: a plan for each step, and completions."""

from dataclasses import dataclass, field
from typing import Any

from kv_connect.nodes.node_messages import FromNode, ToNodes
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kv_vllm.layerwise import LayerwiseStep, RankAnswer
from kv_vllm.trials import NO_TRIAL, TrialMessage


@dataclass(eq=False)
class KVTiersMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """A step plan for the workers, as plain data if they are in other processes; None if it contains nothing but its
    number.

    waiting: requests that wait until their load is reported. Sent next to the plan, so that a worker that cannot read
        the plan can answer them too.
    number: the plan's `StepPlan.number`, which such a worker acknowledges too.
    layerwise: the step's layerwise loads, as such a worker needs them, and, for every worker, the scheduler's pool.
    to_nodes: in an engine over several nodes, the scheduler's message to the other nodes.
    trials: which stores may be committed, where other connectors fill blocks too.
    """

    plan: Any
    waiting: tuple[str, ...]
    number: int
    layerwise: LayerwiseStep
    to_nodes: ToNodes | None
    trials: TrialMessage = NO_TRIAL


@dataclass(eq=False)
class Acknowledged(KVConnectorWorkerMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """The workers' completions.

    through: by rank, the number of the latest plan that was read, together with all before it.
    layerwise: by rank, its report on layerwise loads.
    from_nodes: in an engine over several nodes, the other nodes' answers.
    trial: the number of the step that this is the output of, if it is on trial.
    """

    through: dict[int, int]
    layerwise: dict[int, RankAnswer] = field(default_factory=dict)
    from_nodes: tuple[FromNode, ...] = ()
    trial: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Acknowledged":
        layerwise = self.layerwise | other.layerwise
        from_nodes, trial = self.from_nodes + other.from_nodes, max(self.trial, other.trial)
        return Acknowledged(self.through | other.through, layerwise, from_nodes, trial)
