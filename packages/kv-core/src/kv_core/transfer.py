"""Which bytes go where, between chunks in host memory and slots of the engine's paged cache.

A slot is one token's place: slot = block × block_tokens + offset in the block (the slot mapping of
Kwon et al., SOSP 2023). A plan speaks of tokens and never of bytes inside them, so it is the same plan for every layout
and every chunk format; `kv_cuda` turns it into addresses.
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
        InputError: the table or the extents do not reach over the asked tokens.
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
        chunk, in_chunk = divmod(token, chunk_tokens)
        index = chunk - extents_from_chunk
        if not 0 <= index < len(extents):
            raise InputError(f"token {token} lies in chunk {chunk}, for which no extent was given")
        block, in_block = divmod(token, block_tokens)
        slot = block_ids[block] * block_tokens + in_block
        run = min(block_tokens - in_block, last_token - token)
        extent = extents[index]
        before = copies[-1] if copies else None
        if (
            before is not None
            and before.extent is extent
            and before.first_token + before.tokens == in_chunk
            and before.first_slot + before.tokens == slot
        ):
            copies[-1] = Copy(extent, before.first_token, before.first_slot, before.tokens + run)
        else:
            copies.append(Copy(extent, in_chunk, slot, run))
        token += run
    plan = TransferPlan(tuple(copies), chunk_tokens)
    if plan.tokens != last_token - first_token:
        raise MisuseError(f"the plan covers {plan.tokens} tokens of {last_token - first_token}")
    return plan
