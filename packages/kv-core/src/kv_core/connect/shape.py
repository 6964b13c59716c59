"""What both halves of a connector must agree on: how chunks are named, and what each group of layers keeps of them."""

from dataclasses import dataclass
from functools import cached_property

from kv_core.coverage import ALL, ChunkShape, Coverage
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers whose bytes are one payload of every chunk.

    block_tokens: the engine's block in tokens; of states, how far apart their places in the block table are.
    coverage: which chunks of a prefix these layers need.
    table: which of the engine's block tables they use. Groups of ours may be parts of one of the engine's.
    """

    block_tokens: int
    coverage: Coverage = ALL
    table: int = 0


@dataclass(frozen=True)
class ConnectShape:
    """
    scheme: how digests are made.
    space: the key space that the scheduler begins with; None while which weights the engine serves is not known. The
        workers take it from each plan.
    groups: of layers, in the order of the keys.
    shards: how many different shares of every chunk there are. Ranks may have the same one.
    loads, stores: whether this engine takes chunks and whether it leaves any, as its role says.
    """

    scheme: ChainScheme
    space: KeySpace | None
    groups: tuple[GroupShape, ...]
    shards: int = 1
    loads: bool = True
    stores: bool = True

    def __post_init__(self) -> None:
        for group in self.groups:
            check_blocks(self.chunk_tokens, group.block_tokens)

    @property
    def chunk_tokens(self) -> int:
        return self.scheme.chunk_tokens

    @cached_property
    def chunk(self) -> ChunkShape:
        """The keys of a chunk, as a lookup wants them."""
        return ChunkShape(self.chunk_tokens, tuple(group.coverage for group in self.groups), self.shards)


def check_blocks(chunk_tokens: int, block_tokens: int) -> None:
    """
    Raises:
        ConfigError: a chunk is no whole number of the engine's blocks.
    """
    if chunk_tokens % block_tokens:
        nearest = max(1, round(chunk_tokens / block_tokens)) * block_tokens
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not a multiple of the engine's block of {block_tokens} tokens; "
            f"write chunk_tokens: {nearest}"
        )
