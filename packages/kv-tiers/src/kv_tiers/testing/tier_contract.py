"""The promises of `Tier`, as a test class. Inherit it, say how to make yours, and run pytest.

Plain assertions on purpose: what is tested here is read by whoever writes the next tier.
"""

import mmap
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

from kv_core.errors import TierDown
from kv_core.keys import NO_TENANT, ChunkKey, tenant_tag
from kv_core.outcome import Absent, Loaded, LoadOutcome, ReadFailed, Refused, Stored
from kv_core.testing import key_chain

from kv_tiers import chunk_header
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.contract import content
from kv_tiers.tier import ClearsTenants, Read, Tier, TierContext, Write

CHUNK_BYTES = 10_000
"""No multiple of a page, on purpose."""

FINGERPRINT = "contract"


class TierContract:
    """Define `make`: an empty tier with room for `chunks` chunks of `context` at least."""

    def make(self, context: TierContext, chunks: int) -> Tier:
        raise NotImplementedError

    def unreadable_medium(self) -> AbstractContextManager[object] | None:
        """While it is entered the medium of `self.tier` fails every read. None: there is nothing that could."""
        return None

    def wait_until_tried_again(self) -> None:
        """Until the tier reads what it could not read before, where it remembers that: by its clock."""

    def setup_method(self) -> None:
        self.context = TierContext(CHUNK_BYTES, slot_bytes_for(CHUNK_BYTES), FINGERPRINT)
        self.tier = self.make(self.context, 16)

    def teardown_method(self) -> None:
        self.tier.close()

    def use(self, context: TierContext, chunks: int) -> Tier:
        self.tier.close()
        self.context = context
        self.tier = self.make(context, chunks)
        return self.tier

    def write(self, key: ChunkKey, parent: ChunkKey | None = None, salt: bytes = b"") -> Write:
        """A chunk that is known by its key (and `salt`, for another under the same key)."""
        nbytes = self.context.chunk_bytes
        pages = aligned_pages(self.context.slot_bytes)
        pages[:nbytes] = content(ChunkKey(salt + key), nbytes)
        header = chunk_header.pack_header(key, parent, pages[:nbytes], chunk_header.format_id(self.context.fingerprint))
        return Write(key, parent, header, pages, nbytes)

    def writes(self, keys: Sequence[ChunkKey]) -> list[Write]:
        return [self.write(key, parent) for parent, key in zip([None, *keys], keys, strict=False)]

    def store(self, keys: Sequence[ChunkKey]) -> None:
        assert self.tier.store(self.writes(keys)) == [Stored()] * len(keys)

    def load(self, keys: Sequence[ChunkKey]) -> list[LoadOutcome]:
        """Load and check: what is called loaded is what was stored, and its header says so."""
        reads = []
        for key in keys:
            pages = aligned_pages(self.context.slot_bytes)
            pages[:] = b"\xa5" * len(pages)
            reads.append(Read(key, bytearray(chunk_header.HEADER_BYTES), pages, self.context.chunk_bytes))
        outcomes = self.tier.load(reads)
        assert len(outcomes) == len(reads)
        for read, outcome in zip(reads, outcomes, strict=True):
            if isinstance(outcome, Loaded):
                assert outcome.nbytes == self.context.chunk_bytes
                form = chunk_header.format_id(self.context.fingerprint)
                assert chunk_header.check(read.header, read.room, key=read.key, format_id=form) is None
        return outcomes

    def loaded(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [isinstance(outcome, Loaded) for outcome in self.load(keys)]

    def test_an_empty_tier_has_nothing(self) -> None:
        keys = key_chain(3)
        assert self.tier.holds(keys) == [False] * 3
        assert self.load(keys) == [Absent()] * 3
        self.tier.discard(keys)
        self.tier.clear()
        self.tier.probe()

    def test_what_was_stored_is_held_and_comes_back_whole(self) -> None:
        keys = key_chain(5)
        self.store(keys)
        assert self.tier.holds(keys) == [True] * 5
        assert self.load(keys) == [Loaded(self.context.chunk_bytes)] * 5
        assert self.load(keys[::-1]) == [Loaded(self.context.chunk_bytes)] * 5

    def test_nothing_asked_is_nothing_answered(self) -> None:
        assert self.tier.holds([]) == []
        assert self.tier.load([]) == []
        assert self.tier.store([]) == []
        self.tier.discard([])

    def test_one_batch_mixes_what_is_there_and_what_is_not(self) -> None:
        here, other = key_chain(3), key_chain(3, branch="other")
        self.store(here)
        mixed = [here[0], other[0], here[1], other[1], here[2]]
        assert self.tier.holds(mixed) == [True, False, True, False, True]
        assert self.loaded(mixed) == [True, False, True, False, True]

    def test_storing_again_is_stored_and_still_one_chunk(self) -> None:
        keys = key_chain(2)
        self.store(keys)
        assert self.tier.store([self.write(keys[0], salt=b"again"), self.write(keys[1], keys[0])]) == [Stored()] * 2
        assert self.loaded(keys[1:]) == [True]
        assert self.tier.usage().chunks in (2, None)

    def test_the_lent_memory_is_not_kept(self) -> None:
        keys = key_chain(2)
        writes = self.writes(keys)
        self.tier.store(writes)
        for write in writes:
            write.pages[:] = bytes(len(write.pages))
        assert self.loaded(keys) == [True, True]

    def test_what_was_discarded_is_gone(self) -> None:
        keys = key_chain(4)
        self.store(keys)
        self.tier.discard([keys[1], keys[3], *key_chain(1, branch="never")])
        assert self.tier.holds(keys) == [True, False, True, False]
        assert self.loaded(keys) == [True, False, True, False]
        self.store(keys)
        assert self.loaded(keys) == [True] * 4

    def test_cleared_is_empty_and_of_use(self) -> None:
        keys = key_chain(4)
        self.store(keys)
        self.tier.clear()
        assert self.tier.holds(keys) == [False] * 4
        assert self.load(keys) == [Absent()] * 4
        assert self.tier.usage().chunks in (0, None)
        self.store(keys)
        assert self.loaded(keys) == [True] * 4

    def test_a_tenant_is_cleared_and_nobody_else(self) -> None:
        if not isinstance(self.tier, ClearsTenants):
            return  # its lane clears it whole
        salts = (None, "", "one", "two")
        chains = {salt: key_chain(3, salt=salt) for salt in salts}
        # Another model's: a tenant has chunks in every key space.
        elsewhere = {
            salt: [ChunkKey(key[:1] + bytes(range(16)) + key[17:]) for key in chains[salt][:1]] for salt in salts
        }
        for salt in salts:
            self.store(chains[salt])
            self.store(elsewhere[salt])
        self.tier.clear_tenant(tenant_tag("one"))
        self.tier.clear_tenant(tenant_tag("never seen"))
        for salt in salts:
            assert self.tier.holds(chains[salt]) == [salt != "one"] * 3
            assert self.loaded(chains[salt] + elsewhere[salt]) == [salt != "one"] * 4
        assert self.tier.usage().chunks in (12, None)
        self.store(chains["one"])
        self.tier.clear_tenant(NO_TENANT)
        assert self.loaded(chains["one"]) == [True] * 3
        assert self.tier.holds(chains[None] + elsewhere[None]) == [False] * 4

    def test_every_share_of_a_chunk_is_its_own(self) -> None:
        keys = key_chain(2, shards=2)
        self.store(keys[::2])
        assert self.tier.holds(keys) == [True, False, True, False]
        self.store(keys)
        assert self.loaded(keys) == [True] * 4

    def test_more_is_asked_than_one_round_trip_should_carry(self) -> None:
        keys = key_chain(8)
        self.store(keys)
        asked = [key for number in range(150) for key in (*keys, *key_chain(1, branch=f"absent {number}"))]
        assert self.tier.holds(asked) == [key in keys for key in asked]

    def test_a_larger_chunk_of_whole_pages(self) -> None:
        self.use(TierContext(3 << 20, 3 << 20, FINGERPRINT), 4)
        keys = key_chain(3)
        self.store(keys)
        assert self.loaded(keys) == [True] * 3

    def test_usage_counts(self) -> None:
        before = self.tier.usage()
        self.store(key_chain(3))
        after = self.tier.usage()
        if before.chunks is not None and after.chunks is not None:
            assert (before.chunks, after.chunks) == (0, 3)
        if after.used_bytes is not None:
            assert after.used_bytes >= 3 * self.context.chunk_bytes

    def test_a_medium_that_cannot_be_read_damages_nothing(self) -> None:
        keys = key_chain(4)
        self.store(keys)
        broken = self.unreadable_medium()
        if broken is None:
            return
        with broken:
            try:
                outcomes = self.load(keys)
            except TierDown:
                outcomes = []
            assert all(isinstance(outcome, ReadFailed | Absent) for outcome in outcomes)
            with suppress(TierDown):
                self.tier.probe()
        assert self.tier.usage().chunks in (4, None)
        self.wait_until_tried_again()
        self.tier.probe()
        assert self.loaded(keys) == [True] * 4

    def test_threads_meet_without_harm(self) -> None:
        failures: list[BaseException] = []
        loaded: list[int] = []

        def work(number: int) -> None:
            try:
                for turn in range(12):
                    keys = key_chain(3, branch=str((number + turn) % 5))
                    self.tier.store(self.writes(keys))
                    self.tier.holds(keys)
                    loaded.append(sum(self.loaded(keys)))
                    if turn % 5 == 0:
                        self.tier.discard(keys[1:])
            except BaseException as error:  # noqa: BLE001  # carried to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sum(loaded) > 40

    def test_closing_twice_is_closing(self) -> None:
        self.tier.close()
        self.tier.close()


class BoundedTierContract(TierContract):
    """For a tier that has a capacity of its own and evicts: `make` gives room for exactly `chunks`."""

    def test_a_full_tier_makes_room_and_keeps_heads_longer_than_tails(self) -> None:
        old, new = key_chain(16), key_chain(10, branch="new")
        for at in range(0, 16, 4):  # as a lane would, a few at a time
            parent = old[at - 1] if at else None
            writes = [self.write(old[at], parent), *self.writes(old[at : at + 4])[1:]]
            assert self.tier.store(writes) == [Stored()] * 4
        self.store(new)
        held = self.tier.holds(old)
        assert self.tier.holds(new) == [True] * 10
        assert self.loaded(new) == [True] * 10
        assert held == sorted(held, reverse=True)  # what is left of the old prompt is a prefix of it
        assert sum(held) <= 6
        assert self.loaded(old) == held
        assert (self.tier.usage().chunks or 0) <= 16

    def test_a_prompt_larger_than_the_tier_keeps_its_head(self) -> None:
        keys = key_chain(24)
        outcomes = self.tier.store(self.writes(keys))
        stored = [isinstance(outcome, Stored) for outcome in outcomes]
        assert stored == [True] * 16 + [False] * 8
        assert all(isinstance(outcome, Stored | Refused) for outcome in outcomes)
        assert self.tier.holds(keys) == stored

    def test_the_capacity_is_told(self) -> None:
        capacity = self.tier.usage().capacity_bytes
        assert capacity is not None
        assert capacity >= 16 * self.context.chunk_bytes


class PersistentTierContract(TierContract):
    """For a tier that outlives its process."""

    def reopen(self, context: TierContext, chunks: int) -> Tier:
        """The same tier again after it was closed, as a new process would find it."""
        raise NotImplementedError

    def test_what_was_acknowledged_is_there_after_a_restart(self) -> None:
        keys = key_chain(6)
        self.store(keys)
        self.tier.discard(keys[4:])
        self.tier.close()
        self.tier = self.reopen(self.context, 16)
        assert self.tier.holds(keys) == [True] * 4 + [False] * 2
        assert self.loaded(keys) == [True] * 4 + [False] * 2

    def test_another_format_at_the_same_place_finds_nothing(self) -> None:
        keys = key_chain(3)
        self.store(keys)
        self.tier.close()
        mine = self.context
        self.context = TierContext(mine.chunk_bytes, mine.slot_bytes, "another")
        self.tier = self.reopen(self.context, 16)
        assert self.tier.holds(keys) == [False] * 3
        self.store(keys)
        assert self.loaded(keys) == [True] * 3
        self.tier.close()
        self.context = mine
        self.tier = self.reopen(mine, 16)
        assert self.loaded(keys) == [True] * 3


def aligned_pages(nbytes: int) -> memoryview:
    """Pages as a lane lends them: at a page's boundary, writable."""
    return memoryview(mmap.mmap(-1, nbytes))
