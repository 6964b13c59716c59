"""The contract of `Tier`, as a test class. Inherit it, define `make`, and run pytest.

Plain assertions on purpose: they are read by authors of new tiers.
"""

import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress

import pytest
from kv_core.errors import TierDown
from kv_core.keys import NO_TENANT, ChunkKey, tenant_tag
from kv_core.outcome import Absent, Damaged, Loaded, LoadOutcome, ReadFailed, Refused, Stored, Unstorable
from kv_core.testing import key_chain

from kv_tiers import chunk_header, tier
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.side_by_side import side_by_side
from kv_tiers.tier import ClearsTenants, NamesChunks, RanksChunks, Read, ReadsPrefixes, Tier, TierContext, Write

CHUNK_BYTES = 10_000
"""Not a multiple of the page size, on purpose."""

FINGERPRINT = "contract"


class ReadOnlyTierContract:
    """The contract of a tier that others fill (`ReadOnly`).

    Define `make`: an empty tier whose medium has room for at least `chunks` chunks of `context`; and `put`.
    """

    def make(self, context: TierContext, chunks: int) -> Tier:
        raise NotImplementedError

    def put(self, keys: Sequence[ChunkKey]) -> None:
        """Make the chunks of one prompt available in the tier, each with the bytes that `content` makes for its key."""
        raise NotImplementedError

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

    def write(
        self, key: ChunkKey, parent: ChunkKey | None = None, salt: bytes = b"", *, stored_bytes: int | None = None
    ) -> Write:
        """A chunk whose bytes are made from its key (and from `salt`, for different ones under the same key).

        stored_bytes: size of its payload, as if a codec had made it; None: unencoded.
        """
        nbytes = self.context.chunk_bytes
        pages = aligned_pages(self.context.slot_bytes)
        format_id = chunk_header.format_id(self.context.fingerprint)
        if stored_bytes is None:
            pages[:nbytes] = content(ChunkKey(salt + key), nbytes)
            header = chunk_header.pack_header(key, parent, pages[:nbytes], format_id)
            return Write(key, parent, header, pages, nbytes)
        pages[:stored_bytes] = content(ChunkKey(salt + key), stored_bytes)
        checksum, pieces = chunk_header.checksums_of(pages[:stored_bytes], nbytes)
        fields = chunk_header.Header(key, parent, nbytes, stored_bytes, format_id, "contract", checksum, None, pieces)
        return Write(key, parent, chunk_header.make_header(fields), pages, stored_bytes)

    def writes(self, keys: Sequence[ChunkKey]) -> list[Write]:
        return [self.write(key, parent) for parent, key in zip([None, *keys], keys, strict=False)]

    def load(self, keys: Sequence[ChunkKey]) -> list[LoadOutcome]:
        """Load, and check that what is reported as loaded is what was stored, according to its header."""
        reads = [self.read(key) for key in keys]
        outcomes = self.tier.load(reads)
        assert len(outcomes) == len(reads)
        for read, outcome in zip(reads, outcomes, strict=True):
            if isinstance(outcome, Loaded):
                assert isinstance(self.verify(read, outcome), chunk_header.Header)
        return outcomes

    def read(self, key: ChunkKey, wanted_bytes: int | None = None, from_bytes: int = 0) -> Read:
        pages = aligned_pages(self.context.slot_bytes)
        pages[:] = b"\xa5" * len(pages)
        wanted_bytes = self.context.chunk_bytes if wanted_bytes is None else wanted_bytes
        return Read(key, bytearray(chunk_header.HEADER_BYTES), pages, wanted_bytes, from_bytes=from_bytes)

    def verify(self, read: Read, loaded: Loaded) -> "chunk_header.Header | Damaged":
        format_id = chunk_header.format_id(self.context.fingerprint)
        payload, decoded_bytes = read.pages[: loaded.nbytes], self.context.chunk_bytes
        return chunk_header.verify(read.header, payload, key=read.key, format_id=format_id, decoded_bytes=decoded_bytes)

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
        self.put(keys)
        assert self.tier.holds(keys) == [True] * 5
        assert self.load(keys) == [Loaded(self.context.chunk_bytes)] * 5
        assert self.load(keys[::-1]) == [Loaded(self.context.chunk_bytes)] * 5

    def test_nothing_asked_is_nothing_answered(self) -> None:
        assert self.tier.holds([]) == []
        assert self.tier.load([]) == []
        assert self.tier.store([]) == []
        self.tier.discard([])

    def test_one_batch_mixes_what_is_there_and_what_is_not(self) -> None:
        stored, absent = key_chain(3), key_chain(3, branch="other")
        self.put(stored)
        mixed = [stored[0], absent[0], stored[1], absent[1], stored[2]]
        assert self.tier.holds(mixed) == [True, False, True, False, True]
        assert self.loaded(mixed) == [True, False, True, False, True]

    def test_every_share_of_a_chunk_is_its_own(self) -> None:
        keys = key_chain(2, shards=2)
        self.put(keys[::2])
        assert self.tier.holds(keys) == [True, False, True, False]
        self.put(keys)
        assert self.loaded(keys) == [True] * 4

    def test_more_is_asked_than_one_round_trip_should_carry(self) -> None:
        keys = key_chain(8)
        self.put(keys)
        requested = [key for number in range(150) for key in (*keys, *key_chain(1, branch=f"absent {number}"))]
        assert self.tier.holds(requested) == [key in keys for key in requested]

    def test_a_larger_chunk_of_whole_pages(self) -> None:
        self.use(TierContext(3 << 20, 3 << 20, FINGERPRINT), 4)
        keys = key_chain(3)
        self.put(keys)
        assert self.loaded(keys) == [True] * 3

    def test_what_was_discarded_is_gone(self) -> None:
        keys = key_chain(4)
        self.put(keys)
        self.tier.discard([keys[1], keys[3], *key_chain(1, branch="never")])
        assert self.tier.holds(keys) == [True, False, True, False]
        assert self.loaded(keys) == [True, False, True, False]

    def test_what_was_cleared_is_gone(self) -> None:
        keys = key_chain(4)
        self.put(keys)
        self.tier.clear()
        assert self.tier.holds(keys) == [False] * 4
        assert self.load(keys) == [Absent()] * 4
        assert self.tier.usage().chunks in (0, None)

    def test_closing_twice_is_closing(self) -> None:
        self.tier.close()
        self.tier.close()


class TierContract(ReadOnlyTierContract):
    """Define `make`: an empty tier with room for `chunks` chunks of `context` at least."""

    def unreadable_medium(self) -> AbstractContextManager[object] | None:
        """A context in which the medium of `self.tier` fails every read. None: it has no medium that could fail."""
        return None

    def refused_chunk(self, key: ChunkKey) -> AbstractContextManager[object] | None:
        """A context in which the medium of `self.tier` takes every chunk but this one. None: it takes all alike."""
        return None

    def spoil(self, key: ChunkKey, at: int) -> None:
        """Flip a bit of byte `at` of the payload that `self.tier` stores under this key, bypassing the tier."""
        pytest.skip("this test cannot reach what its tier keeps")

    def wait_until_tried_again(self) -> None:
        """Wait, by the tier's clock, until it retries chunks that it could not read, if it skips them for a time."""

    def store(self, keys: Sequence[ChunkKey]) -> None:
        assert self.tier.store(self.writes(keys)) == [Stored()] * len(keys)

    def put(self, keys: Sequence[ChunkKey]) -> None:
        self.store(keys)

    def test_what_was_discarded_or_cleared_can_be_stored_again(self) -> None:
        keys = key_chain(4)
        self.store(keys)
        self.tier.discard(keys[1:3])
        self.store(keys)
        assert self.loaded(keys) == [True] * 4
        self.tier.clear()
        self.store(keys)
        assert self.loaded(keys) == [True] * 4

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

    def test_chunks_that_it_names_are_held(self) -> None:
        if not isinstance(self.tier, NamesChunks):
            pytest.skip("this tier does not name chunks (`NamesChunks`)")
        assert self.tier.some_keys(3) == []
        keys = key_chain(4)
        self.store(keys)
        for count in (0, 1, 3, 4, 9):
            named = self.tier.some_keys(count)
            assert len(set(named)) == min(count, 4)
            assert set(named) <= set(keys), (named, keys)
        self.tier.discard(keys[1:])
        assert list(self.tier.some_keys(2)) == keys[:1]

    def test_a_tenant_is_cleared_and_nobody_else(self) -> None:
        if not isinstance(self.tier, ClearsTenants):
            pytest.skip("this tier cannot tell tenants apart (`ClearsTenants`): its lane clears it whole")
        salts = (None, "", "one", "two")
        chains = {salt: key_chain(3, salt=salt) for salt in salts}
        # Keys of another model: a tenant has chunks in every key space.
        other_space = {
            salt: [ChunkKey(key[:1] + bytes(range(16)) + key[17:]) for key in chains[salt][:1]] for salt in salts
        }
        for salt in salts:
            self.store(chains[salt])
            self.store(other_space[salt])
        self.tier.clear_tenant(tenant_tag("one"))
        self.tier.clear_tenant(tenant_tag("never seen"))
        for salt in salts:
            assert self.tier.holds(chains[salt]) == [salt != "one"] * 3
            assert self.loaded(chains[salt] + other_space[salt]) == [salt != "one"] * 4
        assert self.tier.usage().chunks in (12, None)
        self.store(chains["one"])
        self.tier.clear_tenant(NO_TENANT)
        assert self.loaded(chains["one"]) == [True] * 3
        assert self.tier.holds(chains[None] + other_space[None]) == [False] * 4

    def test_payloads_of_any_size_come_back_with_their_size(self) -> None:
        sizes = [self.context.chunk_bytes - 1, 1, 4095, 4096, 4097, self.context.chunk_bytes]
        keys = key_chain(len(sizes))
        writes = [
            self.write(key, parent, stored_bytes=size)
            for key, parent, size in zip(keys, [None, *keys], sizes, strict=False)
        ]
        assert self.tier.store(writes) == [Stored()] * len(sizes)
        assert self.tier.holds(keys) == [True] * len(sizes)
        assert self.load(keys) == [Loaded(size) for size in sizes]
        assert self.load(keys[::-1]) == [Loaded(size) for size in sizes[::-1]]

    def test_a_chunk_that_is_stored_again_in_another_size_is_one_of_the_two(self) -> None:
        (key,) = key_chain(1)
        for stored_bytes in (5000, 300, None):
            self.tier.store([self.write(key, stored_bytes=stored_bytes)])
            (outcome,) = self.load([key])
            assert isinstance(outcome, Loaded)
        self.tier.discard([key])
        assert self.tier.store([self.write(key, stored_bytes=300)]) == [Stored()]
        assert self.load([key]) == [Loaded(300)]

    def test_the_first_bytes_come_alone_and_can_be_checked(self) -> None:
        self.use_prefixes()
        keys = key_chain(3)
        whole, short, none = keys[0], keys[1], keys[2]
        nbytes = self.context.chunk_bytes
        assert self.tier.store([self.write(whole), self.write(short, whole, stored_bytes=70_000)]) == [Stored()] * 2
        for wanted_bytes in (1, 4096, 5000, 70_000, 70_001, 200_000, nbytes):
            prefix = chunk_header.prefix_bytes(wanted_bytes, nbytes)
            assert wanted_bytes <= prefix < wanted_bytes + chunk_header.piece_bytes(nbytes)
            expected = [Loaded(prefix), Loaded(min(prefix, 70_000)), Absent()]
            assert self.prefixes([whole, short, none], prefix) == expected

    def test_the_rest_comes_behind_first_bytes_that_are_there(self) -> None:
        self.use_prefixes()
        if not isinstance(self.tier, tier.ReadsRemainders):
            pytest.skip("this tier does not read on from somewhere (`ReadsRemainders`)")
        for key, size in zip(key_chain(2), (self.context.chunk_bytes, 70_000), strict=True):
            assert self.tier.load_remainders([self.read(key, from_bytes=4096)]) == [Absent()]
            self.tier.store([self.write(key, stored_bytes=size)])
            whole = self.read(key)
            assert self.tier.load([whole]) == [Loaded(size)]
            for start, end in ((4096, 8192), (4096, 50_000), (4096, size), (45_056, 57_344), (45_056, size)):
                read = self.read(key, end, start)
                read.pages[:] = bytes(len(read.pages))
                assert self.tier.load_remainders([read]) == [Loaded(end)]
                assert read.pages[:end] == bytes(start) + whole.pages[start:end]

    def test_damage_to_the_first_bytes_is_found_and_damage_behind_them_is_not_looked_at(self) -> None:
        self.use_prefixes()
        (key,) = key_chain(1)
        piece = chunk_header.piece_bytes(self.context.chunk_bytes)
        for offset in (0, piece - 1, piece, 2 * piece, self.context.chunk_bytes - 1):
            self.tier.discard([key])
            self.store([key])
            self.spoil(key, offset)
            for pieces in (1, 2, 3):
                (outcome,) = self.prefixes([key], pieces * piece)
                assert isinstance(outcome, Damaged if offset < pieces * piece else Loaded), (offset, pieces)

    def use_prefixes(self) -> None:
        if not isinstance(self.tier, ReadsPrefixes):
            pytest.skip("this tier does not read prefixes (`ReadsPrefixes`)")
        self.use(TierContext(300_000, slot_bytes_for(300_000), FINGERPRINT), 4)

    def prefixes(self, keys: Sequence[ChunkKey], wanted_bytes: int) -> list[LoadOutcome]:
        """The tier's answers, but `Damaged` where it returned anything but the beginning of what was stored."""
        assert isinstance(self.tier, ReadsPrefixes)
        reads = [self.read(key, wanted_bytes) for key in keys]
        outcomes = self.tier.load_prefixes(reads)
        for number, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
            if isinstance(outcome, Loaded):
                result = chunk_header.verify_prefix(
                    read.header,
                    read.pages[: outcome.nbytes],
                    key=read.key,
                    format_id=chunk_header.format_id(self.context.fingerprint),
                    decoded_bytes=self.context.chunk_bytes,
                )
                assert not isinstance(result, chunk_header.WholeOnly)
                if isinstance(result, Damaged):
                    outcomes[number] = result
        return outcomes

    def test_damage_anywhere_in_a_payload_is_found(self) -> None:
        (key,) = key_chain(1)
        for offset in (0, 1, 4999, self.context.chunk_bytes // 2):
            self.tier.discard([key])
            self.tier.store([self.write(key, stored_bytes=5000 + offset % 2)])
            if offset < 5000:
                self.spoil(key, offset)
            read = self.read(key)
            (outcome,) = self.tier.load([read])
            result = self.verify(read, outcome) if isinstance(outcome, Loaded) else outcome
            assert isinstance(result, Damaged if offset < 5000 else chunk_header.Header)

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
            pytest.skip("there is no medium that could fail to be read")
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

    def test_a_chunk_that_the_medium_does_not_take_costs_only_that_chunk(self) -> None:
        keys = key_chain(3)
        refused = self.refused_chunk(keys[1])
        if refused is None:
            pytest.skip("the medium takes all chunks alike")
        with refused:
            outcomes = self.tier.store(self.writes(keys))
            assert [type(outcome) for outcome in outcomes] == [Stored, Unstorable, Stored]
            self.tier.probe()
            assert self.tier.holds(keys) == [True, False, True]
            assert self.tier.usage().full == ""
            assert self.loaded(keys) == [True, False, True]
        self.tier.discard(keys)
        self.store(keys)

    def test_threads_meet_without_harm(self) -> None:
        loaded: list[int] = []

        def work(number: int) -> None:
            for turn in range(12):
                keys = key_chain(3, branch=str((number + turn) % 5))
                self.tier.store(self.writes(keys))
                self.tier.holds(keys)
                loaded.append(sum(self.loaded(keys)))
                if turn % 5 == 0:
                    self.tier.discard(keys[1:])

        side_by_side(work)
        assert sum(loaded) > 40


class BoundedTierContract(TierContract):
    """For a tier that has its own capacity and evicts: `make` gives room for exactly `chunks`."""

    def test_a_full_tier_makes_room_and_keeps_heads_longer_than_tails(self) -> None:
        old, new = key_chain(16), key_chain(10, branch="new")
        for start in range(0, 16, 4):  # as a lane would, a few at a time
            parent = old[start - 1] if start else None
            writes = [self.write(old[start], parent), *self.writes(old[start : start + 4])[1:]]
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

    def test_smaller_payloads_leave_room_for_more(self) -> None:
        """Less than a twelfth of a chunk's room is wasted for each, plus a page for its header."""
        nbytes, stored_bytes = 1 << 20, 400_000
        self.use(TierContext(nbytes, nbytes, FINGERPRINT), 8)
        keys = key_chain(40)
        for key, parent in zip(keys, [None, *keys], strict=False):
            self.tier.store([self.write(key, parent, stored_bytes=stored_bytes)])
        chunks = sum(self.tier.holds(keys))
        usage = self.tier.usage()
        assert chunks >= 8 * nbytes // (stored_bytes + 4096 + nbytes // 12 + 4096)
        assert self.loaded(keys) == self.tier.holds(keys)
        assert usage.used_bytes is not None and usage.capacity_bytes is not None
        assert chunks * stored_bytes <= usage.used_bytes <= usage.capacity_bytes
        whole = key_chain(6, branch="whole")
        self.store(whole)
        assert self.loaded(whole) == [True] * 6

    def test_what_it_would_keep_longest_is_ranked_first(self) -> None:
        if not isinstance(self.tier, RanksChunks):
            pytest.skip("this tier does not rank chunks (`RanksChunks`): a host that leaves does not offer them")
        used, unused = key_chain(4, branch="one"), key_chain(4, branch="two")
        self.store(used)
        self.store(unused)
        assert self.loaded(used) == [True] * 4  # a use, so the other prompt is evicted before it
        ranked = self.tier.most_worth_first()
        assert ranked == list(zip([*used, *unused], [None, *used[:3], None, *unused[:3]], strict=True))
        assert self.tier.most_worth_first() == ranked  # ranking changed nothing
        self.tier.discard(unused[1:])
        assert [key for key, _ in self.tier.most_worth_first()] == [*used, unused[0]]

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
        own_context = self.context
        self.context = TierContext(own_context.chunk_bytes, own_context.slot_bytes, "another")
        self.tier = self.reopen(self.context, 16)
        assert self.tier.holds(keys) == [False] * 3
        self.store(keys)
        assert self.loaded(keys) == [True] * 3
        self.tier.close()
        self.context = own_context
        self.tier = self.reopen(own_context, 16)
        assert self.loaded(keys) == [True] * 3


def content(key: ChunkKey, nbytes: int) -> bytes:
    """Bytes that only this key's chunk has."""
    return (bytes(key) * (nbytes // len(key) + 1))[:nbytes]


def aligned_pages(nbytes: int) -> memoryview:
    """Pages like those that a lane lends: page-aligned and writable."""
    return memoryview(mmap.mmap(-1, nbytes))
