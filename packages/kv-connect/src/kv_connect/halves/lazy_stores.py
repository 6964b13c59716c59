"""Stores deferred until the engine reuses a chunk's blocks (`store: lazy`).

What an engine has computed stays in its blocks until it needs them, and it finds it there itself. So a chunk is copied
in the step that overwrites one of its blocks, before that step's forward pass: the last moment at which all of its
bytes are there, and the first at which it is known that they will be missed. Until then it is remembered by its blocks,
together with the engine's own hash of the content of each. A chunk of which a block has another hash by then, or none,
is not stored.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from kv_core.hashing import Digest
from kv_core.transfer import packed

from kv_connect.halves.step import StoreStep

BlockHash: TypeAlias = Callable[[int], Hashable | None]
"""The engine's hash of what this block holds or, once the steps that are scheduled are computed, will hold. None: the
engine would not find it."""


@dataclass(frozen=True, slots=True)
class _DeferredChunk:
    """A chunk in the engine's blocks.

    parent: the digest of the chunk before it; empty: it is the first.
    hashes: of the blocks' contents.
    template: how to store it, without chunks.
    """

    digest: Digest
    parent: Digest
    blocks: tuple[int, ...]
    hashes: tuple[Hashable, ...]
    template: StoreStep


class LazyStores:
    """The deferred chunks of one engine. Not thread-safe: used on the scheduler's thread.

    A block holds the end of at most one chunk, so there are no more chunks than blocks. Prompts that differ within a
    chunk share the blocks before, so a block may belong to several.
    """

    def __init__(self, block_hash: BlockHash, *, chunk_blocks: int) -> None:
        self._block_hash = block_hash
        self._chunk_blocks = chunk_blocks
        self._deferred: dict[int, dict[int, _DeferredChunk]] = {}  # by each of its blocks, and its last
        self._overwritten: list[_DeferredChunk] = []  # in this step
        self._overwritten_before: frozenset[Digest] = frozenset()  # in the step before

    def defer(self, store: StoreStep, first_chunk: int) -> bool:
        """Remember the chunks of this store from `first_chunk` on, instead of storing them. False: they are to be
        stored now, as the engine would not find them itself."""
        (table,), size = store.blocks, self._chunk_blocks
        template = replace(store, digests=(), blocks=())
        parent = store.digests[first_chunk - 1] if first_chunk else b""
        for number, digest in enumerate(store.digests[first_chunk:], first_chunk):
            blocks = tuple(table[number * size : (number + 1) * size])
            hashes = tuple(map(self._block_hash, blocks))
            if None in hashes:
                return False
            self._forget_ending_at(blocks[-1])
            chunk = _DeferredChunk(digest, parent, blocks, hashes, template)
            for block in blocks:
                self._deferred.setdefault(block, {})[blocks[-1]] = chunk
            parent = digest
        return True

    def before_reuse(self, blocks: Iterable[int]) -> None:
        """The engine is about to give these blocks to other requests, and still has its hashes of what they hold."""
        for block in blocks:
            for chunk in tuple(self._deferred.get(block, {}).values()):
                self._forget_ending_at(chunk.blocks[-1])
                if chunk.hashes == tuple(map(self._block_hash, chunk.blocks)):
                    self._overwritten.append(chunk)

    def take(self) -> tuple[StoreStep, ...]:
        """The stores of the chunks that were overwritten since the last call: one for each run of neighbours."""
        runs: list[list[_DeferredChunk]] = []
        for chunk in self._overwritten:  # an engine reuses the end of a prompt first
            if runs and runs[-1][-1].parent == chunk.digest and runs[-1][-1].template == chunk.template:
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        self._overwritten_before = frozenset(chunk.digest for chunk in self._overwritten)
        self._overwritten = []
        return tuple(_store_of(run[::-1]) for run in runs)

    def is_on_its_way(self, digest: Digest) -> bool:
        """Whether this chunk is in the engine's blocks no more, and in the pool in a step or two."""
        return digest in self._overwritten_before or any(chunk.digest == digest for chunk in self._overwritten)

    def forget(self) -> None:
        """What the engine's blocks hold is no longer what the keys name, or the engine has forgotten it."""
        self._deferred.clear()
        self._overwritten, self._overwritten_before = [], frozenset()

    def _forget_ending_at(self, last_block: int) -> None:
        chunk = self._deferred.get(last_block, {}).get(last_block)
        for block in chunk.blocks if chunk is not None else ():
            chunks = self._deferred[block]
            del chunks[last_block]
            if not chunks:
                del self._deferred[block]


def _store_of(run: list[_DeferredChunk]) -> StoreStep:
    table = packed([block for chunk in run for block in chunk.blocks])
    return replace(run[0].template, digests=tuple(chunk.digest for chunk in run), blocks=(table,))
