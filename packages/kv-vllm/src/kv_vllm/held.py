"""vLLM's blocks that a store is reading: held in vLLM's block pool, and released when all ranks are done.

To vLLM a held block looks like one that another request shares. So it is not reused, whatever becomes of the request
that filled it, and it stays in vLLM's own prefix cache.
"""

from collections.abc import Sequence
from typing import Any

from kv_connect.halves.held import HeldBlocks
from kv_core.shape import ConnectShape


class PoolBlocks:
    """A `kv_connect.halves.held.EngineBlocks` of vLLM's `BlockPool`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def give_back(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def is_ours_alone(self, block: int) -> bool:
        return bool(self._pool.blocks[block].ref_cnt == 1)


def held_blocks(kv_cache_manager: Any, shape: ConnectShape, *, ranks: int) -> HeldBlocks:
    return HeldBlocks(PoolBlocks(kv_cache_manager.block_pool), shape, ranks=ranks)
