"""The blocks announced to routers: only those whose parents have been announced.

A router builds a tree from the blocks' parents. It drops a block with an unknown parent and, with a block, all its
descendants, permanently (`dynamo._core.RadixTree` does). A pool can hold chunks whose parent it lacks: a chunk in the
middle of a prompt was damaged, or was loaded where vLLM had the beginning itself. No hit reaches such a chunk, so it is
announced only when its parent is.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

Name = tuple[int, Any]
"""One of vLLM's block tables, and its hash of a chunk's last block."""


@dataclass(slots=True)
class _Node:
    """A chunk's blocks. held: number of our chunks with these blocks. said: whether they were announced to routers."""

    stored: BlockStored
    held: int = 0
    said: bool = False


class BlockTree:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[Name, _Node] = {}
        self._below: dict[Name, set[Name]] = {}  # by the parent, which may be missing
        self._made: list[BlockStored | BlockRemoved] = []

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Changes that have not been announced yet."""
        made, self._made = self._made, []
        return made

    def hold(self, stored: BlockStored) -> None:
        """A chunk of these blocks is in the pool. Chunks with different tags may be the same blocks in vLLM."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(stored)
            self._below.setdefault(parent, set()).add(name)
        node.held += 1
        if not node.said and (stored.parent_block_hash is None or self._is_said(parent)):
            self._say(name)

    def release(self, stored: BlockStored) -> None:
        """One of the chunks of these blocks has left."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes[name]
        node.held -= 1
        if node.held:
            return
        if node.said:
            self._unsay(name)
        del self._nodes[name]
        self._below[parent].remove(name)
        if not self._below[parent]:
            del self._below[parent]

    def _is_said(self, name: Name) -> bool:
        return name in self._nodes and self._nodes[name].said

    def _say(self, top: Name) -> None:
        """Announce it and the blocks that were waiting for it, parents first."""
        waiting = [top]
        while waiting:
            name = waiting.pop()
            node = self._nodes[name]
            node.said = True
            self._made.append(node.stored)
            waiting += self._below.get(name, ())

    def _unsay(self, top: Name) -> None:
        """Retract it and its announced descendants, children first."""
        found = [top]
        for name in found:
            node = self._nodes[name]
            node.said = False
            found += self._below.get(name, ())
        for name in reversed(found):
            stored = self._nodes[name].stored
            self._made.append(BlockRemoved(stored.block_hashes, stored.medium, group_idx=stored.group_idx))


def _name(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.block_hashes[-1]


def _parent(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.parent_block_hash
