"""What both halves of a connector must agree on: how chunks are named, and what each group of layers stores of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kv_core.coverage import ALL, ChunkShape, Coverage
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Layers whose bytes are one payload of every chunk.

    block_tokens: the engine's block in tokens; for states, the distance between their entries in the block table.
    coverage: which chunks of a prefix these layers need.
    table: the engine's block table that they use. Our groups may be parts of one of the engine's.
    """

    block_tokens: int
    coverage: Coverage = ALL
    table: int = 0

    def stored_tokens(self, chunk_tokens: int) -> int:
        """How many of a chunk's last tokens its payload holds, in whole blocks: of a window that is shorter than a
        chunk no hit needs more."""
        if self.coverage.kind != "window":
            return chunk_tokens
        return min(chunk_tokens, max(1, -(-(self.coverage.tokens - 1) // self.block_tokens)) * self.block_tokens)


@dataclass(frozen=True)
class ConnectShape:
    """The shape that both halves of one engine's connector use.

    scheme: how digests are made.
    space: the key space that the scheduler begins with; None while the engine's weights are not known. The workers
        take it from each plan.
    groups: the groups of layers, in the order of the keys.
    shards: the number of different shards of every chunk. Several ranks may have the same shard.
    loads, stores: whether this engine loads chunks and whether it stores them, according to its role.
    cuts_chunks: whether a chunk may be stored with only its first tokens. Not where the engine's blocks are stored
        verbatim.
    shifted: whether a layer's KV at each position also depends on the next token, as in a draft head that reads the
        model's hidden states (EAGLE, MTP). Its KV at a chunk's last position depends on a token that is not in the key.
    """

    scheme: ChainScheme
    space: KeySpace | None
    groups: tuple[GroupShape, ...]
    shards: int = 1
    loads: bool = True
    stores: bool = True
    cuts_chunks: bool = True
    shifted: bool = False

    def __post_init__(self) -> None:
        for group in self.groups:
            check_blocks(self.chunk_tokens, group.block_tokens)

    @property
    def chunk_tokens(self) -> int:
        return self.scheme.chunk_tokens

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The block size in tokens of each of the engine's block tables; 0 for one that no group uses."""
        block_tokens = {group.table: group.block_tokens for group in self.groups}
        return tuple(block_tokens.get(table, 0) for table in range(max(block_tokens) + 1))

    @cached_property
    def chunk(self) -> ChunkShape:
        """The keys of a chunk, in the form that a lookup takes."""
        return ChunkShape(self.chunk_tokens, tuple(group.coverage for group in self.groups), self.shards)

    def loadable(self, chunks: int, usable_tokens: int) -> int:
        """How many leading tokens of a prompt the engine need not compute if this many leading chunks are held.

        usable_tokens: the upper limit. With a shifted layer the last token of the last chunk is recomputed, and with it
        that layer's KV; but not with windows and states, which serve only a chunk's end.
        """
        return min(chunks * self.chunk_tokens - (self.shifted and self.chunk.is_plain), usable_tokens)


def check_blocks(chunk_tokens: int, block_tokens: int) -> None:
    """
    Raises:
        ConfigError: a chunk is not a whole number of the engine's blocks.
    """
    if chunk_tokens % block_tokens:
        nearest = max(1, round(chunk_tokens / block_tokens)) * block_tokens
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is not a multiple of the engine's block of {block_tokens} tokens; "
            f"write chunk_tokens: {nearest}"
        )


NO_BLOCK = 0
"""The block table entry for a missing block (vLLM's null block), in groups that do not need the whole prefix."""


def load_from(group: GroupShape, first_token: int, last_token: int) -> int:
    """The first token that a load of `first_token … last_token` moves into this group's blocks: the next token
    needs them from there on, and the engine has those before `first_token`. `last_token` itself if it moves none."""
    needed = group.coverage.first_token(last_token)
    if needed >= last_token:
        return last_token
    return max(first_token, needed - needed % group.block_tokens)


def stored_from(group: GroupShape, table: Sequence[int], chunks: int, chunk_tokens: int) -> int:
    """The first of the trailing chunks of which the engine still has all bytes that a hit can need.

    table: the block table of a request whose first `chunks` chunks are computed. The engine has freed the blocks before
        its window.
    """
    first = chunks
    for chunk in reversed(range(chunks)):
        end = (chunk + 1) * chunk_tokens
        # At least the chunk's last block, even where no hit needs the chunk, or there would be nothing to store.
        needed = min(max(chunk * chunk_tokens, group.coverage.first_token(end)), end - 1)
        if NO_BLOCK in table[needed // group.block_tokens : end // group.block_tokens]:
            break
        first = chunk
    return first


def without_holes(table: Sequence[int]) -> list[int]:
    """The table with each missing block replaced by the block that follows it: the parts of a chunk that no hit
    needs are filled with other tokens of the same request, never of another.
    """
    filled = list(table)
    for index in reversed(range(len(filled) - 1)):
        if filled[index] == NO_BLOCK:
            filled[index] = filled[index + 1]
    return filled
