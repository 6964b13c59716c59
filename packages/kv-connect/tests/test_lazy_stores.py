"""Chunks whose stores wait until the engine reuses their blocks."""

from collections.abc import Hashable

import pytest
from kv_connect.halves.lazy_stores import LazyStores
from kv_connect.halves.step import StoreStep
from kv_core.transfer import packed

TENANT = b"tenant-"


class BlocksOfAnEngine:
    """A `LazyStores` of an engine with two blocks to a chunk, and what its blocks hold."""

    def __init__(self) -> None:
        self.hashes: dict[int, Hashable] = {}
        self.lazy = LazyStores(self.hashes.get, chunk_blocks=2)

    def defer(self, digests: str, blocks: list[int], first_chunk: int = 0) -> bool:
        self.hashes |= {block: (digests[at // 2], at % 2) for at, block in enumerate(blocks)}
        named = tuple(digest.encode() for digest in digests)
        return self.lazy.defer(StoreStep("a", named, TENANT, (packed(blocks),)), first_chunk)

    def reuse(self, *blocks: int) -> list[tuple[bytes, list[int]]]:
        """What is stored when these are reused."""
        self.lazy.before_reuse(blocks)
        return [(b"".join(store.digests), list(store.blocks[0])) for store in self.lazy.take()]


@pytest.fixture
def engine() -> BlocksOfAnEngine:
    return BlocksOfAnEngine()


def test_a_chunk_is_stored_whole_with_the_first_of_its_blocks_and_once(engine: BlocksOfAnEngine) -> None:
    assert engine.defer("AB", [1, 2, 3, 4])
    assert engine.reuse(4) == [(b"B", [3, 4])]
    assert engine.reuse(3) == []
    assert engine.reuse(1, 2) == [(b"A", [1, 2])]


def test_neighbours_of_one_step_are_one_store(engine: BlocksOfAnEngine) -> None:
    assert engine.defer("ABC", [1, 2, 3, 4, 5, 6]) and engine.defer("X", [7, 8])
    assert engine.reuse(6, 5, 4, 3, 8) == [(b"BC", [3, 4, 5, 6]), (b"X", [7, 8])]


@pytest.mark.parametrize("another", [None, "another's"])
@pytest.mark.parametrize("block", [1, 2])
def test_a_chunk_is_not_stored_once_a_block_holds_something_else(
    engine: BlocksOfAnEngine, block: int, another: Hashable
) -> None:
    assert engine.defer("AB", [1, 2, 3, 4])
    engine.hashes[block] = another
    assert engine.reuse(4, 3, 2, 1) == [(b"B", [3, 4])]


def test_a_block_that_holds_the_beginning_of_two_chunks_keeps_both(engine: BlocksOfAnEngine) -> None:
    assert engine.defer("A", [1, 2])
    engine.hashes[3] = ("B", 1)
    assert engine.lazy.defer(StoreStep("b", (b"B",), TENANT, (packed([1, 3]),)), 0)
    assert engine.reuse(1) == [(b"A", [1, 2]), (b"B", [1, 3])]


def test_what_the_engine_would_not_find_is_stored_now(engine: BlocksOfAnEngine) -> None:
    assert not engine.lazy.defer(StoreStep("a", (b"A",), TENANT, (packed([1, 2]),)), 0)
    assert engine.reuse(1, 2) == []


def test_no_more_is_remembered_than_the_blocks_hold(engine: BlocksOfAnEngine) -> None:
    for turn in range(100):
        assert engine.defer(f"{turn % 10}", [1 + turn % 2, 3])
    assert len(engine.reuse(1, 2, 3)) == 1
    assert engine.lazy._deferred == {}


def test_chunks_that_are_overwritten_are_known_until_the_step_after(engine: BlocksOfAnEngine) -> None:
    assert engine.defer("A", [1, 2]) and not engine.lazy.is_on_its_way(b"A")
    engine.lazy.before_reuse([2])
    assert engine.lazy.is_on_its_way(b"A")
    engine.lazy.take()
    assert engine.lazy.is_on_its_way(b"A")
    engine.lazy.take()
    assert not engine.lazy.is_on_its_way(b"A")


def test_a_reset_forgets_what_is_overwritten_too(engine: BlocksOfAnEngine) -> None:
    assert engine.defer("AB", [1, 2, 3, 4])
    engine.lazy.before_reuse([4])
    engine.lazy.forget()
    assert engine.reuse(1) == [] and not engine.lazy.is_on_its_way(b"B")
