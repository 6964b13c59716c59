"""Transfer plans: which tokens are copied between chunks in host memory and slots of the engine's paged cache.

A slot is here one token's place in the engine's cache (elsewhere a chunk's in the pool): slot = block × block_tokens +
offset in the block (the slot mapping of Kwon et al., SOSP 2023). A plan is expressed in tokens, never in bytes, so it
is the same for every layout and chunk format; `kv_cuda` turns it into addresses.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv_core.errors import InputError

# Locations of byte ranges in pools and files, without pointers, so that they mean the same in every process.


@dataclass(frozen=True, slots=True)
class HostExtent:
    """`nbytes` bytes that start `offset` bytes into the host pool called `pool`."""

    pool: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileExtent:
    """`nbytes` bytes that start `offset` bytes into the file at `path`; up to the next multiple of 4096
    the file belongs to this chunk, so that whole pages can be read.

    checksum: the checksum of the bytes (`kv_core.hashing`).
    """

    path: str
    offset: int
    nbytes: int
    checksum: bytes


BlockTable: TypeAlias = "array[int]"
"""Numbers of blocks, packed as 32-bit integers: made once for a request, and handed to C as it is."""


def packed(blocks: Sequence[int]) -> BlockTable:
    """The same numbers as a table; itself, if it is one."""
    return blocks if isinstance(blocks, array) and blocks.typecode == "i" else array("i", blocks)


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens `first_token … first_token + tokens` of the chunk at `extent` ↔ as many slots, from `first_slot` on."""

    extent: HostExtent
    first_token: int
    first_slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Move:
    """Tokens `first_token … last_token` (excluded) of a prompt: their chunks ↔ their blocks. Nothing in it is by block.

    extents: one for each chunk of the prompt, from chunk `first_chunk` on.
    table: the request's block table; entry i holds tokens i × block_tokens and on.
    """

    extents: Sequence[HostExtent]
    table: BlockTable
    block_tokens: int
    first_token: int
    last_token: int
    first_chunk: int = 0

    @property
    def tokens(self) -> int:
        return self.last_token - self.first_token

    def copies(self, chunk_tokens: int) -> Iterator[Copy]:
        """The same, run by run: as few as there can be.

        Raises:
            InputError: the table has a negative number.
        """
        token, size, table = self.first_token, self.block_tokens, self.table
        while token < self.last_token:
            extent = self.extents[token // chunk_tokens - self.first_chunk]
            chunk_end = min((token // chunk_tokens + 1) * chunk_tokens, self.last_token)
            # Only ints in this loop: an object per block would cost more than all the rest.
            run_start, run_slot, next_slot = token, -1, -1
            while token < chunk_end:
                block, in_block = divmod(token, size)
                if table[block] < 0:
                    raise InputError(f"entry {block} of the block table is block {table[block]}")
                slot = table[block] * size + in_block
                if slot != next_slot:
                    if token > run_start:
                        yield Copy(extent, run_start % chunk_tokens, run_slot, token - run_start)
                    run_start, run_slot = token, slot
                run = min(size - in_block, chunk_end - token)
                token += run
                next_slot = slot + run
            yield Copy(extent, run_start % chunk_tokens, run_slot, token - run_start)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What is copied for one group of layers, in a few parts, whatever the number of blocks."""

    parts: tuple[Move | Copy, ...]
    chunk_tokens: int

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The plan run by run, made anew each time.

        Raises:
            InputError: a block table has a negative number.
        """
        copies: list[Copy] = []
        for part in self.parts:
            copies += (part,) if isinstance(part, Copy) else part.copies(self.chunk_tokens)
        return tuple(copies)

    def by_chunk(self) -> dict[HostExtent, list[Copy]]:
        """The copies of each chunk, in their order."""
        chunks: dict[HostExtent, list[Copy]] = {}
        for copy in self.copies:
            chunks.setdefault(copy.extent, []).append(copy)
        return chunks

    def repeated(self) -> "TransferPlan":
        """For a plan that gathers the first tokens of one chunk: the same plan, with the rest of the chunk filled by
        repeating these tokens, so that the chunk contains nothing of another request.
        """
        copies = self.copies
        repeats: list[Copy] = []
        step = filled = self.tokens
        while filled < self.chunk_tokens:
            for copy in copies:
                first = filled + copy.first_token
                if (tokens := min(copy.tokens, self.chunk_tokens - first)) > 0:
                    repeats.append(Copy(copy.extent, first, copy.first_slot, tokens))
            filled += step
        return TransferPlan((*copies, *repeats), self.chunk_tokens)


def plan_transfer(
    extents: Sequence[HostExtent],
    block_ids: Sequence[int],
    *,
    chunk_tokens: int,
    block_tokens: int,
    first_token: int,
    last_token: int,
    extents_from_chunk: int = 0,
) -> TransferPlan:
    """Plan the copies that cover the prompt's tokens `first_token … last_token` (the last one excluded), each once.

    Looks at no block, so that it takes no longer for many: copiers refuse blocks that do not exist.

    extents: one for each chunk of the prompt, from chunk `extents_from_chunk` on.
    block_ids: the request's whole block table in this group; entry i holds tokens i × block_tokens and on.

    Raises:
        InputError: the table or the extents do not cover these tokens.
    """
    if not 0 <= first_token <= last_token:
        raise InputError(f"tokens {first_token} to {last_token} are not a range")
    if block_tokens <= 0 or chunk_tokens <= 0 or chunk_tokens % block_tokens:
        raise InputError(
            f"chunk_tokens={chunk_tokens} is not a multiple of the engine's block of {block_tokens} tokens"
        )
    if last_token > len(block_ids) * block_tokens:
        raise InputError(f"{len(block_ids)} blocks of {block_tokens} tokens do not reach token {last_token}")
    if first_token == last_token:
        return TransferPlan((), chunk_tokens)
    first_covered = extents_from_chunk * chunk_tokens
    covered = first_covered + len(extents) * chunk_tokens
    if first_token < first_covered or last_token > covered:
        token = first_token if first_token < first_covered else max(first_token, covered)
        raise InputError(f"token {token} lies in chunk {token // chunk_tokens}, for which no extent was given")
    move = Move(extents, packed(block_ids), block_tokens, first_token, last_token, extents_from_chunk)
    return TransferPlan((move,), chunk_tokens)
