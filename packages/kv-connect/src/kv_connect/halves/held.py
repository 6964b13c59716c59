"""Blocks of the engine that a store is still reading: held until every worker has read them.

A copy off a device continues while the engine runs. Meanwhile the request may end, be preempted, or move its window
past the block, and the engine would give the block to another request, whose forward pass overwrites it. Blocks are
therefore held from the moment at which a step's stores are planned, while the request still owns them, and released
when all workers have acknowledged that plan and those before it, whatever has become of the request.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kv_core.shape import NO_BLOCK, ConnectShape

from kv_connect.halves.step import StepPlan, StoreStep


class EngineBlocks(Protocol):
    """The engine's blocks by number, which owners other than requests can share."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Become a further owner of these blocks: they are not reused until they are released."""

    def give_back(self, blocks: Sequence[int]) -> None:
        """Stop owning these blocks, listed in the order in which they should be reused."""

    def is_ours_alone(self, block: int) -> bool:
        """Whether this block has no other owner."""


class HeldBlocks:
    """The held blocks of one engine. Not thread-safe: used on the scheduler's thread."""

    def __init__(self, engine: EngineBlocks, shape: ConnectShape, *, ranks: int) -> None:
        """ranks: how many workers there are."""
        self._engine = engine
        kinds = {group.table: group.coverage.kind for group in shape.groups}
        # A state is stored from the block that the engine names; the engine may move the rest of its table.
        self._whole_tables = [table for table, kind in kinds.items() if kind != "state"]
        self._acknowledged = dict.fromkeys(range(ranks), 0)
        self._plans: deque[tuple[int, list[int]]] = deque()
        self._holds: dict[int, int] = {}  # for each block, the number of the last plan that reads it
        self.number = 0

    def hold(self, plan: StepPlan) -> StepPlan:
        """The plan with its number; the blocks that its stores read are held from now on."""
        if plan.stores:
            blocks = list(dict.fromkeys(block for store in plan.stores for block in self._blocks(store)))
            self._engine.hold([block for block in blocks if block not in self._holds])
            self.number += 1
            self._holds.update(dict.fromkeys(blocks, self.number))
            self._plans.append((self.number, blocks))
        return replace(plan, number=self.number)

    def acknowledge(self, through: Mapping[int, int]) -> None:
        """Workers have reported, by rank, that they have finished this plan and all before it. Repeats are harmless."""
        for rank, number in through.items():
            self._acknowledged[rank] = max(number, self._acknowledged[rank])
        acknowledged = min(self._acknowledged.values())
        while self._plans and self._plans[0][0] <= acknowledged:
            number, blocks = self._plans[0]
            free = [block for block in blocks if self._holds[block] == number]
            # The engine should reuse the end of a prefix first: it is worth least. If this raises, the next call tries
            # again.
            self._engine.give_back(free[::-1])
            self._plans.popleft()
            for block in free:
                del self._holds[block]

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are held, so that the engine has to go on stepping to get them back."""
        return bool(self._plans)

    @property
    def blocks(self) -> set[int]:
        """The blocks that are held."""
        return set(self._holds)

    def will_free(self) -> bool:
        """Whether the engine gets free blocks if it waits until the held ones are released."""
        return any(map(self._engine.is_ours_alone, self._holds))

    def _blocks(self, store: StoreStep) -> list[int]:
        blocks = [block for table in self._whole_tables for block in store.blocks[table] if block != NO_BLOCK]
        return blocks + [state.block for state in store.states]
