"""Stores put off until the engine gives a chunk's blocks to others (`store: lazy`).

What an engine has computed stays in its blocks until it needs them, and it finds it there itself. So a chunk is copied
in the step that will overwrite one of its blocks, before that step's forward pass: the last moment at which all of its
bytes are there, and the first at which it is known that they will be missed. Until then it is remembered by its blocks,
together with the engine's own name for the content of each. A chunk of which a block has got another name, or none, is
not stored.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from kv_core.hashing import Digest
from kv_core.transfer import packed

from kv_connect.halves.step import StoreStep

Contents: TypeAlias = Callable[[int], Hashable | None]
"""The engine's name for what this block holds or, once the steps that are scheduled are computed, will hold. None: the
engine would not find it."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A chunk in the engine's blocks.

    parent: the digest of the chunk before it; empty: it is the first.
    names: of the blocks' contents.
    template: how to store it, without chunks.
    """

    digest: Digest
    parent: Digest
    blocks: tuple[int, ...]
    names: tuple[Hashable, ...]
    template: StoreStep


class LazyStores:
    """The chunks that one engine keeps in its blocks. Not thread-safe: used on the scheduler's thread.

    A block holds the end of at most one chunk, so there are no more chunks than blocks. Prompts that differ within a
    chunk share the blocks before, so a block may belong to several.
    """

    def __init__(self, contents: Contents, *, chunk_blocks: int) -> None:
        self._contents = contents
        self._chunk_blocks = chunk_blocks
        self._kept: dict[int, dict[int, _Kept]] = {}  # by each of its blocks, and its last
        self._leaving: list[_Kept] = []  # which the engine gives away in this step
        self._left: frozenset[Digest] = frozenset()  # in the one before

    def put_off(self, store: StoreStep, first_chunk: int) -> bool:
        """Remember the chunks of this store from `first_chunk` on, instead of storing them. False: they are to be
        stored now, as the engine would not find them itself."""
        (table,), size = store.blocks, self._chunk_blocks
        template = replace(store, digests=(), blocks=())
        parent = store.digests[first_chunk - 1] if first_chunk else b""
        for chunk, digest in enumerate(store.digests[first_chunk:], first_chunk):
            blocks = tuple(table[chunk * size : (chunk + 1) * size])
            names = tuple(map(self._contents, blocks))
            if None in names:
                return False
            self._forget_ending_at(blocks[-1])
            kept = _Kept(digest, parent, blocks, names, template)
            for block in blocks:
                self._kept.setdefault(block, {})[blocks[-1]] = kept
            parent = digest
        return True

    def given_away(self, blocks: Iterable[int]) -> None:
        """The engine is about to give these blocks to others, and still says what they hold."""
        for block in blocks:
            for kept in tuple(self._kept.get(block, {}).values()):
                self._forget_ending_at(kept.blocks[-1])
                if kept.names == tuple(map(self._contents, kept.blocks)):
                    self._leaving.append(kept)

    def take(self) -> tuple[StoreStep, ...]:
        """The stores of the chunks that were given away since the last call: one for each run of neighbours."""
        runs: list[list[_Kept]] = []
        for kept in self._leaving:  # an engine gives away the end of a prompt first
            if runs and runs[-1][-1].parent == kept.digest and runs[-1][-1].template == kept.template:
                runs[-1].append(kept)
            else:
                runs.append([kept])
        self._left, self._leaving = frozenset(kept.digest for kept in self._leaving), []
        return tuple(_store_of(run[::-1]) for run in runs)

    def is_leaving(self, digest: Digest) -> bool:
        """Whether this chunk is in the engine's blocks no more, and in the pool in a step or two."""
        return digest in self._left or any(kept.digest == digest for kept in self._leaving)

    def forget(self) -> None:
        """What the engine's blocks hold is no longer what the keys name, or the engine has forgotten it."""
        self._kept.clear()
        self._leaving, self._left = [], frozenset()

    def _forget_ending_at(self, last_block: int) -> None:
        kept = self._kept.get(last_block, {}).get(last_block)
        for block in kept.blocks if kept is not None else ():
            chunks = self._kept[block]
            del chunks[last_block]
            if not chunks:
                del self._kept[block]


def _store_of(run: list[_Kept]) -> StoreStep:
    table = packed([block for kept in run for block in kept.blocks])
    return replace(run[0].template, digests=tuple(kept.digest for kept in run), blocks=(table,))
