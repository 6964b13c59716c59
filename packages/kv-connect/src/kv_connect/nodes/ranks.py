"""Ranks: which shard of every chunk each of an engine's ranks stores, and on which node it is."""

from dataclasses import dataclass
from typing import Final

from kv_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RankShare:
    """The shard of every chunk that one rank has.

    rank: its number among all ranks that have shards.
    ranks: their number.
    shards: number of different shards.
    shard: the one that this rank has.
    stores: whether this rank is the one that stores it, among those of its node with the same shard.
    nodes: the number of hosts, each with equally many ranks: the first has the first ranks.
    stages: the number of pipeline stages.
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
