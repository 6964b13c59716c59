"""The number of tokens in a chunk, once the engine's block size is known."""

from collections.abc import Sequence
from math import lcm
from typing import Final

import msgspec
from kv_core.log import limited_logger
from kv_core.shape import check_blocks
from kv_tiers.settings import Setting, Settings

_log = limited_logger(__name__)


_LONG_BLOCK_TOKENS: Final = 64


def fitted(
    settings: Settings, in_force: Sequence[Setting], block_tokens: Sequence[int], *, has_states: bool = False
) -> Settings:
    """The settings with a `chunk_tokens` that is a whole number of the engine's blocks.

    If it is not set, it becomes one block where blocks are long, so that we find everything that the engine's own
    prefix cache would: vLLM's blocks have 128 tokens on a CPU, where computing 128 more takes longest, 64 with some
    kernels for latents, and, in models with states, as many as match the size of a state, for example 528. Otherwise it
    is the smallest whole number of blocks that is no less than the default.

    An engine keeps a prompt's last state at the end of a block. In a chunk of several blocks, most of these would not
    be at the end of a chunk and would be useless, so for such models short blocks make a chunk of 64 tokens.

    in_force: as `load` returns it with the settings.
    block_tokens: of each block table of the engine.
    has_states: whether a group of layers keeps states.

    Raises:
        ConfigError: it is set and is not a whole number of blocks; the text suggests one that is.
    """
    common_tokens = lcm(*block_tokens)
    if any(setting.path == "chunk_tokens" and setting.origin != "default" for setting in in_force):
        check_blocks(settings.chunk_tokens, common_tokens)
        return settings
    has_long_blocks = common_tokens >= _LONG_BLOCK_TOKENS
    min_tokens = _LONG_BLOCK_TOKENS if has_states or has_long_blocks else settings.chunk_tokens
    chunk_tokens = -(-min_tokens // common_tokens) * common_tokens
    if chunk_tokens == settings.chunk_tokens:
        return settings
    _log.info(
        "chunk_tokens is %d instead of %d, to fit the engine's blocks of %d tokens",
        chunk_tokens,
        settings.chunk_tokens,
        common_tokens,
    )
    return msgspec.structs.replace(settings, chunk_tokens=chunk_tokens)
