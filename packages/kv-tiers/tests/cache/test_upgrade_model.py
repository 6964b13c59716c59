"""Upgrade against a dict that is always right, in any order of calls and with faults, by Hypothesis.

The dict knows of every key which bytes a reader may get: its approximation or its exact bytes while a tier brought it,
and nothing but what was computed since an engine stored it, until it leaves the pool. What a reader has open stays as
it is until it is released, and only forgetting makes it void. Once exact, a chunk stays exact until it leaves the pool.
Whatever happens, no slot is lost.
"""

from functools import cache as remember

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.keys import ChunkKey
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_testing.approximations import CHUNK_BYTES, Small
from kv_testing.approximations import approximate as approximate_bytes
from kv_testing.approximations import exact as exact_bytes
from kv_testing.faults import FAULTS, Fault
from kv_testing.service_contract import assert_adds_up
from kv_tiers import HostPool
from kv_tiers.cache import upgrade
from kv_tiers.index.life import Life
from kv_tiers.lanes import moving

STEM = key_chain(2)
CHAINS = ([*STEM, *key_chain(2, branch="left")], [*STEM, *key_chain(3, branch="right")], key_chain(3, branch="other"))
KEYS = list(dict.fromkeys(key for chain in CHAINS for key in chain))
HOLDERS = ("ann", "ben")
READERS = ("cyd", "dan", "eve")
SEQUENTIAL_FAULTS = [fault for fault in FAULTS if fault not in ("hang", "lie")]
COMPUTED = b"computed".ljust(CHUNK_BYTES, b".")

approximate, exact = remember(approximate_bytes), remember(exact_bytes)
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 5)


@remember
def allowed(key: ChunkKey) -> tuple[bytes, bytes, bytes]:
    """What the tier may have brought: first parts, two of them, or all."""
    return approximate(key), approximate(key, 2), exact(key)


class Upgrading(RuleBasedStateMachine):
    @initialize(slots=st.sampled_from([3, 6, 33]), step=st.sampled_from([4096, 12_288, 1 << 20]), kept=st.booleans())
    def start(self, slots: int, step: int, kept: bool) -> None:
        self.before = moving.STEP_BYTES, upgrade.KEPT_BYTES
        moving.STEP_BYTES, upgrade.KEPT_BYTES = step, upgrade.KEPT_BYTES if kept else 0  # type: ignore[misc]
        pool = HostPool.anonymous("host", CHUNK_BYTES, slots)
        self.small = Small(pool=pool, keys=tuple(KEYS))
        self.cache, self.tier = self.small.cache, self.small.tier
        self.open: dict[str, tuple[ReadLease, list[bytes]]] = {}
        self.void: set[str] = set()  # readers of whose chunks one was forgotten
        self.computed: set[ChunkKey] = set()
        self.unbroken = True
        self.crowds = 0

    @rule(chain=chains, length=lengths, holder=st.sampled_from(HOLDERS))
    def look_up(self, chain: list[ChunkKey], length: int, holder: str) -> None:
        plan = self.cache.lookup(chain[:length], holder, wait_for_promotion=True)
        if plan.chunks:
            lease = self.small.open(chain[: plan.chunks], "at once")  # what was promised is there
            self.check(lease)
            assert self.cache.release(lease)
        self.what_left_is_no_longer_computed()  # what leaves now may be back, from the tier, before the rule ends

    @rule(chain=chains, length=lengths, holder=st.sampled_from(HOLDERS), ends=st.booleans())
    def fetch(self, chain: list[ChunkKey], length: int, holder: str, ends: bool) -> None:
        """As a request does that waits until everything is here."""
        for _ in range(3):
            self.look_up(chain, length, holder)
            self.small.lane.step()
        if ends:
            self.cache.end(holder)

    @rule(chain=chains, length=lengths, reader=st.sampled_from(READERS))
    def begin_to_read(self, chain: list[ChunkKey], length: int, reader: str) -> None:
        if reader not in self.open:
            lease = self.cache.load(chain[:length], reader)
            if isinstance(lease, ReadLease):
                self.open[reader] = lease, self.check(lease)

    @rule(reader=st.sampled_from(READERS))
    def end_reading(self, reader: str) -> None:
        if reader in self.open:
            lease, found = self.open.pop(reader)
            assert self.small.bytes_of(lease) == found
            assert self.cache.release(lease) == (reader not in self.void)
            self.void.discard(reader)

    def check(self, lease: ReadLease) -> list[bytes]:
        found = self.small.bytes_of(lease)
        for key, chunk in zip(lease.keys, found, strict=True):
            assert chunk in ((COMPUTED,) if key in self.computed else allowed(key))
        return found

    @rule(holder=st.sampled_from(HOLDERS))
    def end(self, holder: str) -> None:
        self.cache.end(holder)

    @rule(chain=chains, length=lengths, is_held=st.booleans())
    def compute(self, chain: list[ChunkKey], length: int, is_held: bool) -> None:
        """For another engine too, if it is to be held."""
        lease = self.cache.begin_store(chain[:length], "w", hold_s=100.0 if is_held else 0.0)
        for extent in lease.extents:
            self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] = COMPUTED
        self.computed.update(lease.keys)
        self.cache.commit(lease)

    @rule(chunks=st.integers(1, 4))
    def crowd(self, chunks: int) -> None:
        """Others need room."""
        self.crowds += 1
        self.cache.commit(self.cache.begin_store(key_chain(chunks, branch=f"crowd {self.crowds}"), "w"))

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key: ChunkKey) -> None:
        self.forget_all([key])

    def forget_all(self, keys: list[ChunkKey]) -> None:
        self.cache.forget(keys)
        self.void.update(reader for reader, (lease, _) in self.open.items() if not set(keys).isdisjoint(lease.keys))

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.void.update(self.open)

    @rule(key=st.sampled_from(KEYS), is_pinned=st.booleans())
    def pin(self, key: ChunkKey, is_pinned: bool) -> None:
        if is_pinned:
            self.cache.admin.pin([key], "pin")
        else:
            self.cache.admin.unpin("pin")

    @rule(fault=st.sampled_from(SEQUENTIAL_FAULTS))
    def break_the_tier(self, fault: Fault) -> None:
        self.tier.fault = fault
        self.unbroken = self.unbroken and fault in ("", "delay")

    @rule()
    def mend(self) -> None:
        self.tier.fault = ""
        self.small.clock.advance(1.0)

    @rule(
        what=st.sampled_from(["read", "look up", "compute", "crowd", "forget", "clear", "release"]),
        nth=st.integers(1, 3),
        chain=chains,
        length=lengths,
        steps=st.integers(1, 4),
    )
    def work_while(self, what: str, nth: int, chain: list[ChunkKey], length: int, steps: int) -> None:
        """Something else happens while the rest of a chunk is being read that came just now."""
        self.fetch(chain, length, HOLDERS[0], ends=True)
        left = nth

        def meanwhile() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                match what:
                    case "read":
                        self.begin_to_read(chain, length, READERS[0])
                    case "look up":
                        self.look_up(chain, length, HOLDERS[0])
                    case "compute":
                        self.compute(chain, length, is_held=False)
                    case "crowd":
                        self.crowd(length)
                    case "forget":
                        self.forget_all(chain[:length])
                    case "clear":
                        self.clear()
                    case _:
                        self.end_reading(READERS[0])
                self.what_left_is_no_longer_computed()

        self.tier.before_rest = meanwhile
        self.work(steps)
        self.tier.before_rest = lambda: None

    @rule(steps=st.integers(1, 6))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.small.lane.step()

    @rule(seconds=st.sampled_from([0.5, 301.0]))
    def wait(self, seconds: float) -> None:
        self.small.clock.advance(seconds)
        self.cache.counts()  # which ends what has expired
        if seconds > 300.0:
            self.open.clear()
            self.void.clear()

    @invariant()
    def what_left_is_no_longer_computed(self) -> None:
        if hasattr(self, "cache"):
            find = self.cache._index.find
            self.computed = {key for key in self.computed if find(key) is not None}

    @invariant()
    def nothing_is_lost_and_what_is_open_stays(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert_adds_up(self.cache.counts())
        for lease, found in self.open.values():
            assert self.small.bytes_of(lease) == found
        upgrades, index = self.cache.lower.upgrades, self.cache._index
        spare = [one.spare for one in upgrades._under_way if one is not None]
        assert sorted(spare) == [slot for slot, life in enumerate(index._life) if life is Life.SPARE]
        replaced = set(index._replaced._chunks)
        assert replaced >= {slot for slot, life in enumerate(index._life) if life is Life.REPLACED}
        assert all(index.is_read(slot) for slot in replaced)
        assert len(replaced) <= upgrade._STILL_READ + 1
        for slot, one in upgrades.by_slot.items():
            assert index.key_at(slot) == one.key
        kept = [one.first_bytes for one in upgrades.by_slot.values() if one.first_bytes is not None]
        assert upgrades._cached_bytes == sum(len(first.payload) for first in kept)

    @invariant()
    def the_pool_knows_which_chunks_are_exact(self) -> None:
        if hasattr(self, "cache"):
            upgrades, pool = self.cache.lower.upgrades, self.cache.pool
            for key in KEYS:
                slot = self.cache._index.find(key)
                if slot is not None and key not in self.computed:
                    with pool.chunk(slot, CHUNK_BYTES) as chunk:
                        assert (chunk == exact(key)) != (slot in upgrades.by_slot)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        moving.STEP_BYTES, upgrade.KEPT_BYTES = self.before  # type: ignore[misc]
        self.mend()
        for reader in READERS:
            self.end_reading(reader)
        for holder in (*HOLDERS, *READERS, "w", "at once"):
            self.cache.end(holder)
        self.cache.admin.unpin("pin")
        self.wait(101.0)  # holds are over
        self.small.upgrade()
        self.small.at_rest()
        assert not any(self.cache._index._leases)
        if self.unbroken and self.cache.pool.slots == 33:
            plan = self.cache.lookup(CHAINS[0], "last", wait_for_promotion=True)
            assert plan.ended in (Ended.ALL_HELD, Ended.PENDING, Ended.ABSENT)
            assert self.cache.lower.upgrades.approximations <= 1  # the next to leave is left as it is
        self.cache.end("last")
        self.small.upgrade()
        self.small.close()


TestUpgrading = Upgrading.TestCase
TestUpgrading.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_slot_is_given_back_although_its_load_came_when_it_was_a_rests_turn() -> None:
    """The machine found it: told to work everything off, the lane left a queued load, and so a reserved slot."""
    for what in ("read", "look up", "compute", "crowd", "forget", "release"):
        machine = Upgrading()
        machine.start(slots=3, step=4096, kept=False)
        machine.work_while(what=what, nth=1, chain=CHAINS[0], length=2, steps=1)
        machine.look_up(chain=CHAINS[2], length=1, holder=HOLDERS[0])
        machine.nothing_is_lost_and_what_is_open_stays()
        machine.teardown()


def test_a_chunk_that_left_is_not_held_because_its_old_bytes_are_read() -> None:
    """The machine found it: a chunk that was computed, left, and came back from the tier counted as computed still."""
    machine = Upgrading()
    machine.start(slots=6, step=1 << 20, kept=True)
    machine.work_while(what="read", nth=1, chain=CHAINS[1], length=3, steps=2)
    machine.crowd(chunks=3)
    machine.compute(chain=CHAINS[1], length=4, is_held=False)
    assert CHAINS[1][2] in machine.computed and machine.cache._index.replaced == 1
    machine.work_while(what="look up", nth=1, chain=CHAINS[2], length=4, steps=2)
    assert CHAINS[1][2] not in machine.cache._index.held()
    assert machine.cache._index._replaced.of(CHAINS[1][2])
    machine.fetch(chain=CHAINS[1], length=3, holder=HOLDERS[0], ends=True)
    machine.nothing_is_lost_and_what_is_open_stays()
    machine.the_pool_knows_which_chunks_are_exact()
    machine.teardown()
