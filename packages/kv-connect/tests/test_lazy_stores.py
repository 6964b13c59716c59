"""Chunks that an engine keeps in its blocks until it gives them away."""

from collections.abc import Hashable

import pytest
from kv_connect.halves.lazy_stores import LazyStores
from kv_connect.halves.step import StoreStep
from kv_core.transfer import packed

TENANT = b"tenant-"


class Kept:
    """A `LazyStores` of an engine with two blocks to a chunk, and what its blocks hold."""

    def __init__(self) -> None:
        self.names: dict[int, Hashable] = {}
        self.lazy = LazyStores(self.names.get, chunk_blocks=2)

    def put_off(self, digests: str, blocks: list[int], first_chunk: int = 0) -> bool:
        self.names |= {block: (digests[at // 2], at % 2) for at, block in enumerate(blocks)}
        named = tuple(digest.encode() for digest in digests)
        return self.lazy.put_off(StoreStep("a", named, TENANT, (packed(blocks),)), first_chunk)

    def give(self, *blocks: int) -> list[tuple[bytes, list[int]]]:
        """What is stored when these are given away."""
        self.lazy.given_away(blocks)
        return [(b"".join(store.digests), list(store.blocks[0])) for store in self.lazy.take()]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_chunk_leaves_whole_with_the_first_of_its_blocks_and_once(kept: Kept) -> None:
    assert kept.put_off("AB", [1, 2, 3, 4])
    assert kept.give(4) == [(b"B", [3, 4])]
    assert kept.give(3) == []
    assert kept.give(1, 2) == [(b"A", [1, 2])]


def test_neighbours_that_leave_in_one_step_are_one_store(kept: Kept) -> None:
    assert kept.put_off("ABC", [1, 2, 3, 4, 5, 6]) and kept.put_off("X", [7, 8])
    assert kept.give(6, 5, 4, 3, 8) == [(b"BC", [3, 4, 5, 6]), (b"X", [7, 8])]


@pytest.mark.parametrize("name", [None, "another's"])
@pytest.mark.parametrize("block", [1, 2])
def test_a_chunk_is_not_stored_once_a_block_holds_something_else(kept: Kept, block: int, name: Hashable) -> None:
    assert kept.put_off("AB", [1, 2, 3, 4])
    kept.names[block] = name
    assert kept.give(4, 3, 2, 1) == [(b"B", [3, 4])]


def test_a_block_that_holds_the_beginning_of_two_chunks_keeps_both(kept: Kept) -> None:
    assert kept.put_off("A", [1, 2])
    kept.names[3] = ("B", 1)
    assert kept.lazy.put_off(StoreStep("b", (b"B",), TENANT, (packed([1, 3]),)), 0)
    assert kept.give(1) == [(b"A", [1, 2]), (b"B", [1, 3])]


def test_what_the_engine_would_not_find_is_stored_now(kept: Kept) -> None:
    assert not kept.lazy.put_off(StoreStep("a", (b"A",), TENANT, (packed([1, 2]),)), 0)
    assert kept.give(1, 2) == []


def test_no_more_is_remembered_than_the_blocks_hold(kept: Kept) -> None:
    for turn in range(100):
        assert kept.put_off(f"{turn % 10}", [1 + turn % 2, 3])
    assert len(kept.give(1, 2, 3)) == 1
    assert kept.lazy._kept == {}


def test_chunks_that_are_leaving_are_known_until_the_step_after(kept: Kept) -> None:
    assert kept.put_off("A", [1, 2]) and not kept.lazy.is_leaving(b"A")
    kept.lazy.given_away([2])
    assert kept.lazy.is_leaving(b"A")
    kept.lazy.take()
    assert kept.lazy.is_leaving(b"A")
    kept.lazy.take()
    assert not kept.lazy.is_leaving(b"A")


def test_a_reset_forgets_what_leaves_too(kept: Kept) -> None:
    assert kept.put_off("AB", [1, 2, 3, 4])
    kept.lazy.given_away([4])
    kept.lazy.forget()
    assert kept.give(1) == [] and not kept.lazy.is_leaving(b"B")
