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
    """A chunk's blocks. held: number of our chunks with these blocks. announced: whether routers know them."""

    stored: BlockStored
    held: int = 0
    announced: bool = False


class BlockTree:
    """The blocks of the chunks in the pool, by their parents. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[Name, _Node] = {}
        self._children: dict[Name, set[Name]] = {}  # by their parent, which may be missing
        self._changes: list[BlockStored | BlockRemoved] = []

    def take(self) -> list[BlockStored | BlockRemoved]:
        """Changes that have not been announced yet."""
        changes, self._changes = self._changes, []
        return changes

    def hold(self, stored: BlockStored) -> None:
        """A chunk with these blocks is in the pool. Chunks with different tags may have the same blocks in vLLM."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(stored)
            self._children.setdefault(parent, set()).add(name)
        node.held += 1
        if not node.announced and (stored.parent_block_hash is None or self._is_announced(parent)):
            self._announce(name)

    def release(self, stored: BlockStored) -> None:
        """One of the chunks with these blocks has left the pool."""
        name, parent = _name(stored), _parent(stored)
        node = self._nodes[name]
        node.held -= 1
        if node.held:
            return
        if node.announced:
            self._retract(name)
        del self._nodes[name]
        self._children[parent].remove(name)
        if not self._children[parent]:
            del self._children[parent]

    def _is_announced(self, name: Name) -> bool:
        return name in self._nodes and self._nodes[name].announced

    def _announce(self, root: Name) -> None:
        """Announce these blocks and those that were waiting for them, parents first."""
        waiting = [root]
        while waiting:
            name = waiting.pop()
            node = self._nodes[name]
            node.announced = True
            self._changes.append(node.stored)
            waiting += self._children.get(name, ())

    def _retract(self, root: Name) -> None:
        """Retract these blocks and their announced descendants, children first."""
        subtree = [root]
        for name in subtree:
            node = self._nodes[name]
            node.announced = False
            subtree += self._children.get(name, ())
        for name in reversed(subtree):
            stored = self._nodes[name].stored
            self._changes.append(BlockRemoved(stored.block_hashes, stored.medium, group_idx=stored.group_idx))


def _name(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.block_hashes[-1]


def _parent(stored: BlockStored) -> Name:
    return stored.group_idx or 0, stored.parent_block_hash
