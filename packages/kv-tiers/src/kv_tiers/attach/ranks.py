"""Ranks: which shard of every chunk each of an engine's ranks stores."""

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
    stores: whether this rank is the one that stores it, among those with the same shard.
    """

    rank: int
    ranks: int
    shards: int
    shard: int
    stores: bool


ALONE: Final = RankShare(rank=0, ranks=1, shards=1, shard=0, stores=True)


def share_of(rank: int, ranks: int, distinct_heads: int, *, stage: int = 0, stages: int = 1) -> RankShare:
    """
    rank, ranks: among the tensor-parallel ones.
    stage, stages: of the pipeline. Each has layers of its own, so a chunk is whole when all stages have theirs.
    distinct_heads: KV heads of the whole model, 1 in MLA. Where there are fewer than ranks, neighbouring ranks have the
        same head.

    Raises:
        ConfigError: neither number divides the other.
    """
    shards = min(ranks, distinct_heads)
    if ranks % shards or distinct_heads % shards:
        raise ConfigError(f"{ranks} tensor-parallel ranks cannot have equal parts of {distinct_heads} KV heads")
    copies = ranks // shards
    return RankShare(
        rank=stage * ranks + rank,
        ranks=stages * ranks,
        shards=stages * shards,
        shard=stage * shards + rank // copies,
        stores=rank % copies == 0,
    )
