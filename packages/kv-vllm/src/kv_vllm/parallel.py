"""How vLLM's parallelism determines which bytes of a chunk each rank has.

Tensor parallelism divides the heads of every layer into shards, one per rank, and a chunk has as many. With fewer heads
than ranks (or one latent for all of them, in MLA), several ranks have the same shard: one of them stores it and all
load it. Each pipeline stage has its own layers, and so its own shards. Expert parallelism divides nothing that is
cached. Parallelism over tokens is refused here, by name.
"""

import gc
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kv_connect.engine import Engine, PartOf
from kv_connect.guard import always, guarded
from kv_connect.nodes import FromNode, NodeAgent, RankShare, ToNodes, share_of
from kv_connect.open_cache import Replica
from kv_core.errors import ConfigError
from kv_cuda.canary import Refusal
from kv_tiers.settings import Settings
from torch import nn

from kv_vllm.layouts import needed_layers

_DRAFTS_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
_REPLICA = re.compile(r"_dp(\d+)$")
"""The suffix that vLLM appends to the engine id of each data-parallel replica, even where its configuration describes
it as the only one."""


def shards_of_ranks(ranks: int, kv_cache_config: Any, layers: Mapping[str, Any]) -> int:
    """The number of different shards of this process's layers that `ranks` tensor-parallel ranks have.

    vLLM divides a layer's KV heads between its ranks. With fewer heads than ranks, neighbouring ranks have the same
    head. Its configuration reports one number of heads for the whole model, which need not be that of each layer, so it
    decides nothing here. Where a rank has one head of a layer, only the projection that computes this layer's keys and
    values tells how many ranks have the same one. Where it cannot be found, each rank counts as having its own: that is
    right for every model, and costs room.

    layers: vLLM's layers by name (`static_forward_context`).
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec

    needed = needed_layers(kv_cache_config, layers)
    if ranks == 1 or isinstance(needed, Refusal):
        return ranks
    with_one_head: list[Any] = []
    for group in needed:
        if isinstance(group.spec, MLAAttentionSpec | SlidingWindowMLASpec):
            continue  # all ranks have the same latent
        if not isinstance(group.spec, AttentionSpec) or group.spec.num_kv_heads != 1:
            return ranks  # several heads: no two ranks have the same; states are divided more finely than heads
        with_one_head += (layers.get(name) for name in group.names)
    shards = 1
    for total in _total_heads(with_one_head):
        if not total or (ranks % total and total < ranks):
            return ranks
        shards = math.lcm(shards, min(total, ranks))
    return shards


def _total_heads(layers: Collection[Any]) -> list[int]:
    """The number of KV heads that each of these attention layers has on all ranks together; 0: unknown.

    An attention layer does not know its projection: both are parts of one module, which is found among this process's
    objects because a connector has no access to the model.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    if not layers:
        return []
    totals: dict[int, set[int]] = {id(layer): set() for layer in layers}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # not `isinstance`, for which some objects run code
            continue
        parts = list(module.__dict__.get("_modules", {}).values())
        for own in totals.keys() & map(id, parts):
            projections = [getattr(part, "base_layer", part) for part in parts]  # under a LoRA's
            totals[own].update(
                each.total_num_kv_heads if each.num_kv_heads == 1 else 0
                for each in projections
                if isinstance(each, QKVParallelLinear)
            )
    return [next(iter(found)) if len(found) == 1 else 0 for found in totals.values()]


def rank_share(vllm_config: Any, kv_cache_config: Any) -> RankShare:
    """The shard of this process's rank, from its layers. In a scheduler's process without them it is rank 0's, and only
    the workers know how many shards there are.

    Raises:
        ConfigError: the ranks cannot be spread over the nodes.
    """
    ranks, stages = (
        int(getattr(vllm_config.parallel_config, f"{kind}_parallel_size")) for kind in ("tensor", "pipeline")
    )
    shards = shards_of_ranks(ranks, kv_cache_config, vllm_config.compilation_config.static_forward_context)
    rank, stage = _rank_and_stage(ranks, stages)
    nodes = int(vllm_config.parallel_config.nnodes_within_dp)
    return share_of(rank, ranks, shards, stage=stage, stages=stages, nodes=nodes)


def draft_model(vllm_config: Any) -> Any | None:
    """vLLM's configuration of the model whose layers guess tokens; None if no model with layers does."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTS_WITHOUT_LAYERS:
        return None
    return speculative.draft_model_config


def guesses_from_hidden_states(vllm_config: Any) -> bool:
    """Whether tokens are guessed by a head that gets, at each position, the model's hidden state and the next token:
    EAGLE, MTP and the like. A draft model has its own KV of the same tokens at the same positions."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle())


def _rank_and_stage(ranks: int, stages: int) -> tuple[int, int]:
    """This process's tensor-parallel rank and its pipeline stage."""
    if ranks == stages == 1:
        return 0, 0
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        model_parallel_is_initialized,
    )

    if not model_parallel_is_initialized():
        return 0, 0
    return int(get_tensor_model_parallel_rank()), int(get_pp_group().rank_in_group)


def replica_of(vllm_config: Any) -> Replica | None:
    """Which of several data-parallel replicas this is; None if there is only one.

    Replicas of a host share one private server, which the first of them starts.
    """
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    match = _REPLICA.search(engine_id)
    if match is None:
        return None
    local_rank = vllm_config.parallel_config.data_parallel_rank_local
    leads = int(match[1]) == 0 if local_rank is None else local_rank == 0
    return Replica(engine_id[: match.start()], leads)


def check_parallelism(vllm_config: Any, settings: Settings) -> None:
    """Refuse parallelism that this release cannot serve.

    Raises:
        ConfigError: ranks would have other layers or other tokens than we assume, or schedulers of their own.
    """
    parallel = vllm_config.parallel_config
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(
                f"{flag} is {size}: the tokens of a block are spread over {size} ranks, and this release of kv-vllm "
                f"supports only blocks of consecutive tokens; start with {flag} 1 or without --kv-transfer-config"
            )
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.distributed_executor_backend == "external_launcher" and ranks > 1:
        raise ConfigError(
            f"--distributed-executor-backend is external_launcher: each of the {ranks} ranks has a scheduler of its "
            "own, and all must decide alike, although loads and stores end at different times; start with mp or ray, "
            "or without --kv-transfer-config"
        )
    is_replica = parallel.data_parallel_size > 1 or replica_of(vllm_config) is not None
    if parallel.nnodes_within_dp > 1 and is_replica and not settings.server.socket:
        raise ConfigError(
            f"the ranks of each data-parallel replica are on {parallel.nnodes_within_dp} machines: start kv-server on "
            "every machine and give its server.socket to the engine"
        )


class NodeMail(PartOf):
    """The messages of one connector, in either role.

    On one node there are none.
    """

    def __init__(self, engine: Engine, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(engine)
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
