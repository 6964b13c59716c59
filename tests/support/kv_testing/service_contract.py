"""The contract of `CacheService` as a test class: inherit it, define `make`, and run pytest."""

from collections.abc import Callable, Sequence

import pytest
from kv_core.clock import HandClock
from kv_core.errors import MisuseError
from kv_core.keys import ChunkKey
from kv_core.service import CacheCounts, CacheService, Ended, LoadFailed, ReadLease, WriteLease
from kv_core.testing import key_chain, keys_of
from kv_core.transfer import HostExtent
from kv_tiers.testing.side_by_side import side_by_side
from kv_tiers.testing.tier_contract import content

CHUNK_BYTES = 96
GROUP_BYTES = (CHUNK_BYTES, 40)  # of services whose groups differ in size


class ServiceContract:
    """Define `make`: a service with this many slots for chunks of `CHUNK_BYTES`, leases of 300 s by that clock, and
    the view in which extents are offsets. Override `teardown_method` to close what you made."""

    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        raise NotImplementedError

    def setup_method(self) -> None:
        self.clock = HandClock()
        self.use(8)

    def use(self, slots: int) -> None:
        self.service, self.view = self.make(slots, self.clock)

    def write(self, extent: HostExtent, key: ChunkKey) -> None:
        self.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)

    def read(self, extent: HostExtent) -> bytes:
        return bytes(self.view[extent.offset : extent.offset + extent.nbytes])

    def store(self, keys: Sequence[ChunkKey], holder: str = "writer") -> WriteLease:
        lease = self.service.begin_store(keys, holder)
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            self.write(extent, key)
        self.service.commit(lease)
        return lease

    def load(self, keys: Sequence[ChunkKey], holder: str = "reader") -> ReadLease:
        lease = self.service.load(keys, holder)
        assert isinstance(lease, ReadLease)
        assert lease.keys == tuple(keys)
        return lease

    def held(self, keys: Sequence[ChunkKey], holder: str = "asker") -> int:
        chunks = self.service.lookup(keys, holder).chunks
        self.service.end(holder)
        return chunks

    def assert_at_rest(self) -> CacheCounts:
        counts = self.service.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert counts.slots_used == counts.chunks_resident
        assert_adds_up(counts)
        return counts

    def test_what_was_committed_is_found_and_read_back(self) -> None:
        keys = key_chain(3)
        assert self.service.lookup(keys, "r").chunks == 0
        lease = self.store(keys)
        assert lease.keys == tuple(keys)
        assert lease.refused == ""
        plan = self.service.lookup(keys, "r")
        assert (plan.holder, plan.chunks, plan.ended, len(plan.tiers)) == ("r", 3, Ended.ALL_HELD, 3)
        read = self.load(keys, "r")
        assert [self.read(extent) for extent in read.extents] == [content(key, CHUNK_BYTES) for key in keys]
        assert self.service.release(read)
        self.service.end("r")
        assert self.assert_at_rest().chunks_hit == 3

    def test_an_option_that_does_not_exist_is_refused(self) -> None:
        """In whichever process the cache runs: a mistyped one would otherwise be ignored."""
        for call in (self.service.lookup, self.service.begin_store):
            with pytest.raises(TypeError, match="hold_seconds"):
                call(key_chain(1), "r", hold_seconds=1.0)  # type: ignore[call-arg]
        self.assert_at_rest()

    def test_nothing_is_found_before_its_commit(self) -> None:
        keys = key_chain(2)
        lease = self.service.begin_store(keys, "w")
        assert self.held(keys) == 0
        self.service.commit(lease)
        assert self.held(keys) == 2

    def test_a_given_up_store_leaves_nothing(self) -> None:
        keys = key_chain(2)
        lease = self.service.begin_store(keys, "w")
        assert self.service.release(lease)
        assert not self.service.release(lease)
        assert self.held(keys) == 0
        assert self.assert_at_rest().slots_used == 0

    def test_only_the_leading_run_is_promised(self) -> None:
        keys = key_chain(4)
        self.store(keys)
        self.service.forget([keys[2]])
        plan = self.service.lookup(keys, "r")
        assert (plan.chunks, plan.ended) == (2, Ended.ABSENT)
        assert self.service.lookup([], "r").chunks == 0

    def test_a_chunk_counts_when_all_its_keys_are_held(self) -> None:
        keys = key_chain(3, shards=2)
        self.store(keys[:5])
        plan = self.service.lookup(keys, "r", shape=keys_of(2))
        assert (plan.chunks, plan.ended) == (2, Ended.INCOMPLETE)
        self.store(keys)
        assert self.service.lookup(keys, "r", shape=keys_of(2)).ended is Ended.ALL_HELD

    def test_keys_that_are_no_whole_chunks_are_misuse(self) -> None:
        refuses(lambda: self.service.lookup(key_chain(3), "r", shape=keys_of(2)))

    def test_a_promise_stays_put_while_others_fill_the_pool(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.service.lookup(keys, "r")
        for branch in range(5):
            self.store(key_chain(6, branch=str(branch)))
        read = self.load(keys, "r")
        assert [self.read(extent) for extent in read.extents] == [content(key, CHUNK_BYTES) for key in keys]

    def test_asking_again_replaces_the_promise(self) -> None:
        keys, other = key_chain(3), key_chain(2, branch="other")
        self.store(keys)
        self.store(other)
        for _ in range(3):
            self.service.lookup(keys, "r")
        assert self.service.counts().read_leases == 1
        self.service.lookup(other, "r")
        assert self.service.counts().read_leases == 1
        self.store(key_chain(6, branch="more"))
        assert self.held(other) == 2
        assert self.held(keys) == 0
        self.service.lookup(keys, "r")
        assert not self.service.renew("r")
        assert self.assert_at_rest().chunks_evicted == 3

    def test_what_an_engine_says_of_its_blocks_changes_nothing(self) -> None:
        before = self.service.counts()
        self.service.allocated({"r": 7, "s": 0})
        self.service.allocated({})
        assert self.service.counts() == before

    def test_a_promise_ends_by_the_clock_unless_it_is_renewed(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        assert not self.service.renew("r")
        self.service.lookup(keys, "r")
        for _ in range(3):
            self.clock.advance(200)
            assert self.service.renew("r")
        self.clock.advance(300)
        assert not self.service.renew("r")
        counts = self.assert_at_rest()
        assert counts.leases_expired == 1
        assert counts.chunks_resident == 2

    def test_a_renewed_promise_does_not_keep_older_ones_alive(self) -> None:
        self.store(key_chain(2))
        for holder in ("first", "second", "third"):
            self.service.lookup(key_chain(2), holder)
        self.clock.advance(200)
        assert self.service.renew("first")
        self.clock.advance(150)
        assert self.service.counts().read_leases == 1
        assert not self.service.renew("second")
        assert self.service.renew("first")

    def test_a_key_named_twice_is_leased_and_given_back_twice(self) -> None:
        (key,) = key_chain(1)
        self.store([key])
        assert self.service.lookup([key, key], "twice").chunks == 2
        assert len(self.load([key, key], "twice").extents) == 2
        self.service.lookup([key], "once")
        self.service.end("twice")
        self.store(key_chain(10, branch="more"))
        assert self.held([key]) == 1
        self.service.end("once")
        self.assert_at_rest()

    def test_the_release_of_an_expired_lease_says_so(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        read = self.load(keys)
        self.clock.advance(299)
        again = self.load(keys)
        self.clock.advance(1)
        assert not self.service.release(read)
        assert self.service.release(again)
        assert not self.service.release(again)
        self.assert_at_rest()

    def test_a_write_lease_outlives_the_clock(self) -> None:
        keys = key_chain(2)
        lease = self.service.begin_store(keys, "w")
        self.clock.advance(10_000)
        self.service.commit(lease)
        assert self.held(keys) == 2

    def test_what_is_kept_for_another_engine_stays_until_it_is_read(self) -> None:
        keys = key_chain(2)
        self.service.commit(self.service.begin_store(keys, "w", hold_s=30.0))
        self.service.end("w")
        for number in range(2):
            self.store(key_chain(8, branch=f"crowd {number}"))
        assert self.service.release(self.load(keys))
        self.store(key_chain(8, branch="more"))
        assert self.service.lookup(keys, "asker").chunks == 0
        self.assert_at_rest()

    def test_what_is_retained_stays_though_it_is_read_until_the_time_is_over(self) -> None:
        keys = key_chain(2)
        self.service.commit(self.service.begin_store(keys, "w", retain_s=30.0))
        self.service.end("w")
        for number in range(2):
            assert self.service.release(self.load(keys))
            self.store(key_chain(8, branch=f"crowd {number}"))
        assert self.held(keys) == 2
        self.clock.advance(31)
        self.store(key_chain(8, branch="more"))
        assert self.service.lookup(keys, "asker").chunks == 0
        self.assert_at_rest()

    def test_a_load_of_what_is_not_held_says_what_is_missing(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.service.forget([keys[1]])
        failed = self.service.load(keys, "r")
        assert isinstance(failed, LoadFailed)
        assert failed.missing == (keys[1],)
        assert failed.reason
        self.assert_at_rest()

    def test_only_what_is_missing_is_reserved(self) -> None:
        keys = key_chain(4)
        self.store(keys[:2])
        first = self.service.begin_store(keys, "w")
        assert first.keys == tuple(keys[2:])
        second = self.service.begin_store(keys, "other")
        assert second.keys == ()
        assert second.refused == ""
        self.service.commit(first)
        self.service.release(second)
        assert self.held(keys) == 4
        assert self.store([*keys, *keys]).keys == ()

    def test_several_groups_are_stored_by_one_lease(self) -> None:
        """What needs the whole prefix chunk by chunk, then the others, as far as the engine has them."""
        keys = key_chain(3, shards=3)  # as groups, shares of every chunk
        whole, window = [key for key in keys if key.shard < 2], keys[2::3]
        assert self.store([*whole, *window[1:]]).keys == (*whole, *window[1:])
        assert (self.held(keys[0::3]), self.held(keys[1::3]), self.held(window[1:])) == (3, 3, 2)
        assert self.store([*whole, *window[2:]]).keys == ()

    def test_a_chain_is_not_evicted_for_its_own_descendants(self) -> None:
        keys = key_chain(12)
        self.store(keys[:6])
        lease = self.store(keys)
        assert lease.keys == tuple(keys[6:8])
        assert "4 of 12" in lease.refused
        assert self.held(keys) == 8
        counts = self.assert_at_rest()
        assert (counts.chunks_evicted, counts.chunks_refused) == (0, 4)

    def test_a_chain_that_was_spared_still_loses_its_tail_first(self) -> None:
        keys = key_chain(12)
        self.store(keys[:6])
        assert self.service.release(self.service.begin_store(keys, "w"))
        self.store(key_chain(3, branch="other"))
        assert self.held(keys) == 5

    def test_what_is_leased_or_being_written_is_not_evicted(self) -> None:
        keys, written = key_chain(4), key_chain(4, branch="written")
        self.store(keys)
        self.service.lookup(keys, "r")
        writing = self.service.begin_store(written, "w")
        refused = self.service.begin_store(key_chain(2, branch="more"), "v")
        assert refused.keys == ()
        assert refused.refused
        self.service.release(refused)
        self.service.commit(writing)
        self.service.end("r")
        assert len(self.store(key_chain(2, branch="more")).keys) == 2
        self.assert_at_rest()

    def test_the_least_recently_used_tail_leaves_first(self) -> None:
        first, second = key_chain(4, branch="first"), key_chain(4, branch="second")
        self.store(first)
        self.store(second)
        assert self.held(first) == 4
        self.store(key_chain(3, branch="third"))
        assert self.held(second) == 1
        assert self.held(first) == 4

    def test_a_chain_stored_piece_by_piece_still_loses_its_tail_first(self) -> None:
        keys = key_chain(8)
        for chunks in range(1, 9):
            self.store(keys[:chunks])
        self.store(key_chain(3, branch="other"))
        assert self.held(keys) == 5

    def test_forgotten_chunks_are_not_found_and_their_readers_keep_their_bytes(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        read = self.load(keys)
        self.service.forget(keys[1:])
        assert self.held(keys) == 1
        self.store(key_chain(8, branch="other"))
        assert [self.read(extent) for extent in read.extents] == [content(key, CHUNK_BYTES) for key in keys]
        again = self.store(keys[:2])
        assert set(again.extents).isdisjoint(read.extents)
        assert not self.service.release(read)  # the bytes stayed, and are to be used no more
        self.service.forget(keys)
        counts = self.assert_at_rest()
        assert counts.chunks_forgotten >= 2

    def test_what_is_forgotten_while_it_is_written_is_never_found(self) -> None:
        keys = key_chain(2)
        old = self.service.begin_store(keys, "old")
        self.service.forget(keys)
        new = self.service.begin_store(keys, "new")
        assert new.keys == tuple(keys)
        self.service.commit(old)
        assert self.held(keys) == 0
        self.service.commit(new)
        assert self.held(keys) == 2
        assert self.assert_at_rest().chunks_aborted == 2

    def test_the_end_of_a_holder_gives_everything_back(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.service.lookup(keys, "h")
        self.load(keys, "h")
        self.load(keys, "h")
        writing = self.service.begin_store(key_chain(2, branch="unfinished"), "h")
        counts = self.service.counts()
        assert (counts.read_leases, counts.write_leases, counts.chunks_reserved) == (3, 1, 2)
        self.service.end("h")
        self.service.end("h")
        self.assert_at_rest()
        refuses(lambda: self.service.commit(writing))
        assert not self.service.release(writing)

    def test_a_lease_is_committed_once(self) -> None:
        lease = self.store(key_chain(1))
        refuses(lambda: self.service.commit(lease))
        assert not self.service.release(lease)
        assert self.held(key_chain(1)) == 1

    def test_clear_forgets_everything_that_is_held(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        writing = self.service.begin_store(key_chain(4), "w")
        read = self.load(keys)
        self.service.clear()
        assert self.held(keys) == 0
        assert not self.service.release(read)
        self.service.release(writing)
        counts = self.assert_at_rest()
        assert (counts.chunks_resident, counts.chunks_forgotten) == (0, 3)

    def test_a_lease_is_void_once_any_of_its_chunks_was_forgotten_even_if_it_is_held_again(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        whole, head = self.load(keys, "whole"), self.load(keys[:2], "head")
        self.service.forget(keys[2:])
        self.store(keys)
        after = self.load(keys, "after")
        assert not self.service.release(whole)
        assert not self.service.release(whole)
        assert self.service.release(head)
        assert self.service.release(after)
        self.assert_at_rest()

    def test_a_promise_of_what_was_forgotten_is_not_renewed(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.service.lookup(keys, "r")
        self.service.lookup(keys[:1], "head")
        self.service.forget(keys[1:])
        assert not self.service.renew("r")
        assert self.service.renew("head")
        assert self.service.lookup(keys, "r").chunks == 1
        assert self.service.renew("r")
        self.service.end("r")
        self.service.end("head")
        self.assert_at_rest()

    def test_prompts_that_part_are_each_found_whole(self) -> None:
        self.use(32)
        stem = key_chain(4)
        prompts = [[*stem, *key_chain(4, branch=branch)] for branch in ("left", "right", "middle")]
        for prompt in prompts:
            self.store(prompt)
        for _ in range(3):
            for prompt in prompts:
                assert self.held(prompt) == 8
                assert self.held(prompt[:6]) == 6
        self.service.forget(prompts[0][5:6])
        assert [self.held(prompt) for prompt in prompts] == [5, 8, 8]
        self.store(prompts[0])
        assert self.held(prompts[0]) == 8

    def test_threads_meet_without_harm(self) -> None:
        self.use(24)
        loaded: list[int] = []

        def work(number: int) -> None:
            for turn in range(60):
                keys = key_chain(4, branch=str((number + turn) % 6))
                self.store(keys, f"w{number}")
                chunks = self.service.lookup(keys, f"r{number}").chunks
                lease = self.service.load(keys[:chunks], f"l{number}")
                if isinstance(lease, ReadLease):  # else another thread forgot some meanwhile
                    for key, extent in zip(lease.keys, lease.extents, strict=True):
                        assert self.read(extent) == content(key, CHUNK_BYTES)
                    if self.service.release(lease):  # else another thread forgot some while it was read
                        loaded.append(chunks)
                if turn % 9 == 0:
                    self.service.forget(keys[2:])
                self.service.end(f"r{number}")

        side_by_side(work)
        assert sum(loaded) > 240  # most turns found something
        self.assert_at_rest()


def assert_adds_up(counts: CacheCounts) -> None:
    """Invariants that hold at any time, idle or not."""
    assert counts.chunks_committed + counts.chunks_adopted == (
        counts.chunks_resident + counts.chunks_evicted + counts.chunks_forgotten + counts.chunks_damaged
    )
    assert counts.chunks_reserved_ever == counts.chunks_committed + counts.chunks_aborted + counts.chunks_reserved
    assert counts.chunks_resident + counts.chunks_reserved <= counts.slots_used <= counts.slots_total


def refuses(call: Callable[[], object]) -> None:
    """The call is a misuse, and raises `MisuseError` with a text."""
    try:
        call()
    except MisuseError as refusal:
        said = str(refusal)
    else:
        raise AssertionError("wrong use was accepted")
    assert said
