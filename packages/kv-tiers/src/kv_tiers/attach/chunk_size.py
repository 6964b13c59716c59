"""How long a chunk is, once the engine's blocks are known."""

from collections.abc import Sequence
from math import lcm

import msgspec
from kv_core.connect.shape import check_blocks
from kv_core.log import limited_logger

from kv_tiers.settings import Setting, Settings

_log = limited_logger(__name__)


def fitted(settings: Settings, in_force: Sequence[Setting], block_tokens: Sequence[int]) -> Settings:
    """The settings with a `chunk_tokens` that the engine's blocks fill.

    Where nobody has set it, it becomes the smallest whole number of blocks that is no less than the default: the blocks
    of models with states are as long as a state is large, 528 tokens, say.

    in_force: as `load` returns it beside the settings.
    block_tokens: of each block table of the engine's.

    Raises:
        ConfigError: it was set, and is no whole number of blocks; the text says what is.
    """
    together = lcm(*block_tokens)
    if settings.chunk_tokens % together == 0:
        return settings
    if any(each.path == "chunk_tokens" and each.origin != "default" for each in in_force):
        check_blocks(settings.chunk_tokens, together)
    chunk_tokens = -(-settings.chunk_tokens // together) * together
    _log.info(
        "chunk_tokens is %d, since the default of %d is no whole number of the engine's blocks of %d tokens",
        chunk_tokens,
        settings.chunk_tokens,
        together,
    )
    return msgspec.structs.replace(settings, chunk_tokens=chunk_tokens)
