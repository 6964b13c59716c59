"""Transfer plans: which tokens are copied between chunks in host memory and slots of the engine's paged cache.

A slot is here one token's place in the engine's cache (elsewhere a chunk's in the pool): slot = block × block_tokens +
offset in the block (the slot mapping of Kwon et al., SOSP 2023). A plan is expressed in tokens, never in bytes, so it
is the same for every layout and chunk format; `kv_cuda` turns it into addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.errors import InputError, MisuseError
from kv_core.extent import HostExtent


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens `first_token … first_token + tokens` of the chunk at `extent` ↔ as many slots, from `first_slot` on."""

    extent: HostExtent
    first_token: int
    first_slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Copies for one group of layers, coalesced: no two neighbours could be one."""

    copies: tuple[Copy, ...]
    chunk_tokens: int

    @property
    def tokens(self) -> int:
        return sum(copy.tokens for copy in self.copies)

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
        copies = list(self.copies)
        step = filled = self.tokens
        while filled < self.chunk_tokens:
            for copy in self.copies:
                first = filled + copy.first_token
                if (tokens := min(copy.tokens, self.chunk_tokens - first)) > 0:
                    copies.append(Copy(copy.extent, first, copy.first_slot, tokens))
            filled += step
        return TransferPlan(tuple(copies), self.chunk_tokens)


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
    copies: list[Copy] = []
    token = first_token
    while token < last_token:
        chunk = token // chunk_tokens
        index = chunk - extents_from_chunk
        if not 0 <= index < len(extents):
            raise InputError(f"token {token} lies in chunk {chunk}, for which no extent was given")
        chunk_end = min((chunk + 1) * chunk_tokens, last_token)
        # Only ints in this loop: an object per block would cost more than all the rest.
        run_start, run_slot, next_slot = token, -1, -1
        while token < chunk_end:
            block, in_block = divmod(token, block_tokens)
            if block_ids[block] < 0:
                raise InputError(f"entry {block} of the block table is block {block_ids[block]}")
            slot = block_ids[block] * block_tokens + in_block
            if slot != next_slot:
                if token > run_start:
                    copies.append(Copy(extents[index], run_start % chunk_tokens, run_slot, token - run_start))
                run_start, run_slot = token, slot
            run = min(block_tokens - in_block, chunk_end - token)
            token += run
            next_slot = slot + run
        copies.append(Copy(extents[index], run_start % chunk_tokens, run_slot, token - run_start))
    plan = TransferPlan(tuple(copies), chunk_tokens)
    if plan.tokens != last_token - first_token:
        raise MisuseError(f"the plan covers {plan.tokens} tokens of {last_token - first_token}")
    return plan
