"""The whole hierarchy against a dict that is always right, with faults in every tier, by Hypothesis.

The dict knows, of every key, which bytes were committed under it last. A load may find nothing; what it finds must be
those bytes. While nothing was broken and nothing was lost on the way down, everything committed must be found.
"""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.clock import HandClock
from kv_core.cost import Costs
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Ended, ReadLease, WriteLease
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_testing.faults import FAULTS, Fault, FaultyTier
from kv_testing.model import SHAPES
from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up
from kv_testing.shapes import keys_for
from kv_tiers import chunk_header
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.spill import WriteMode
from kv_tiers.config import ColdConfig
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import content
from kv_tiers.tiers.dram import DramTier

STEM = key_chain(3)
SHAPES = (PLAIN, PLAIN, *SHAPES)
MIXED = keys_for(SHAPES[-2], 3)
CHAINS = (
    [*STEM, *key_chain(3, branch="left")],
    [*STEM, *key_chain(4, branch="right")],
    key_chain(5, branch="other"),
    MIXED,
)
COSTS = (
    None,
    Costs(),
    Costs(0, (1e-9, 0.0), (1.0, 0.0)),
    Costs(0, (0.02, 0.0), (0.0, 1e-3)),
    Costs(0, (10.0, 1.0), (0.0, 0.0)),
    Costs(0, (1e-9, 0.0), stores=False),
)
"""Computing is of unknown price, next to nothing, about as dear as a tier that delays, and dear."""
HOLDERS = ("ann", "ben", "cyd")
SEQUENTIAL_FAULTS = [fault for fault in FAULTS if fault != "hang"]  # one thread does everything here

chains = st.sampled_from(range(len(CHAINS)))
lengths = st.integers(1, 7)
holders = st.sampled_from(HOLDERS)
tiers = st.integers(0, 1)


class Hierarchy(RuleBasedStateMachine):
    @initialize(
        modes=st.tuples(st.sampled_from(["through", "back"]), st.sampled_from(["through", "back", "never"])),
        slots=st.integers(4, 12),
        below=st.integers(4, 40),
        far=st.tuples(st.booleans(), st.booleans()),
        batch=st.integers(1, 4),
    )
    def start(
        self, modes: tuple[WriteMode, WriteMode], slots: int, below: int, far: tuple[bool, bool], batch: int
    ) -> None:
        self.clock = HandClock()
        self.tiers = [
            FaultyTier(
                DramTier(HostPool.anonymous("b", CHUNK_BYTES, below), LruPolicy(), name=f"tier{number}"),
                holds_is_local=not far[number],
                sleep=lambda seconds: None,
            )
            for number in range(2)
        ]
        self.lanes = [
            Lane(tier, chunk_header.format_id("m"), threads=0, backoff_s=0.0, max_backoff_s=0.0, clock=self.clock)
            for tier in self.tiers
        ]
        self.cache = LocalCache(
            HostPool.anonymous("host", CHUNK_BYTES, slots),
            policy=LruPolicy(),
            clock=self.clock,
            lanes=list(zip(self.lanes, modes, strict=True)),
            cold=ColdConfig(batch_bytes=batch * 4096, wait_s=5.0, drain_s=0.0),
        )
        self.version: dict[ChunkKey, int] = {}
        self.open: list[tuple[WriteLease, list[ChunkKey], dict[ChunkKey, int]]] = []
        self.ample = below == 40 and slots >= 7
        self.unbroken = True
        self.stored = {"through", "back"} & set(modes[:1])

    def data(self, key: ChunkKey, version: int) -> bytes:
        return content(ChunkKey(bytes([version % 256]) + key), CHUNK_BYTES)

    @rule(chain=chains, length=lengths, writes=st.booleans())
    def store(self, chain: int, length: int, writes: bool) -> None:
        keys = CHAINS[chain][:length]
        lease = self.cache.begin_store(keys, "writer")
        made = {}
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            made[key] = self.version.get(key, 0)
            with self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                chunk[:] = self.data(key, made[key])
        self.open.append((lease, keys, made))
        if writes:
            self.finish(committed=True)

    @rule(committed=st.booleans())
    def finish(self, committed: bool) -> None:
        if self.open:
            lease, _, _ = self.open.pop()
            if committed:
                self.cache.commit(lease)
            else:
                self.cache.release(lease)

    @rule(
        chain=chains,
        length=lengths,
        shape=st.sampled_from(SHAPES),
        holder=holders,
        may_wait=st.booleans(),
        reads=st.booleans(),
        costs=st.sampled_from(COSTS),
    )
    def look_up(
        self, chain: int, length: int, shape: ChunkShape, holder: str, may_wait: bool, reads: bool, costs: Costs | None
    ) -> None:
        keys = CHAINS[chain][:length]
        keys = keys[: len(keys) // shape.keys_per_chunk * shape.keys_per_chunk]
        plan = self.cache.lookup(keys, holder, shape=shape, wait_for_promotion=may_wait, costs=costs)
        assert plan.chunks <= len(keys)
        if costs is None:
            assert plan.choice is None
        else:
            assert plan.choice is not None and plan.choice.chunks in (0, plan.chunks)
            skipped = plan.choice.skipped
            assert skipped is None or (skipped.chunks > 0 and skipped.tier)
        assert len(plan.tiers) == plan.chunks
        assert may_wait or plan.ended is not Ended.PENDING
        if reads and plan.chunks:
            self.read([keys[place] for place in shape.needed_places(plan.chunks)])

    def read(self, keys: list[ChunkKey]) -> None:
        """What was promised is there and right."""
        lease = self.cache.load(keys, "reader")
        assert isinstance(lease, ReadLease)
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            with self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                assert bytes(chunk) == self.data(key, self.version.get(key, 0))
        assert self.cache.release(lease)

    @rule(holder=holders)
    def end(self, holder: str) -> None:
        self.cache.end(holder)

    @rule(chain=chains, start=st.integers(0, 6), count=st.integers(1, 3))
    def forget(self, chain: int, start: int, count: int) -> None:
        self.bump(CHAINS[chain][start : start + count], self.cache.forget)

    @rule()
    def clear(self) -> None:
        self.bump({key for keys in CHAINS for key in keys}, lambda keys: self.cache.clear())

    def bump(self, keys: Iterable[ChunkKey], call: object) -> None:
        """After this, other bytes are right under these keys."""
        keys = list(keys)
        assert callable(call)
        call(keys)
        for key in keys:
            self.version[key] = self.version.get(key, 0) + 1

    @rule(tier=tiers, fault=st.sampled_from(SEQUENTIAL_FAULTS))
    def break_a_tier(self, tier: int, fault: Fault) -> None:
        self.tiers[tier].fault = fault
        self.unbroken = self.unbroken and fault == ""

    @rule(tier=tiers)
    def mend_a_tier(self, tier: int) -> None:
        self.tiers[tier].fault = ""

    @rule(tier=tiers, steps=st.integers(1, 4))
    def work(self, tier: int, steps: int) -> None:
        for _ in range(steps):
            self.lanes[tier].step()

    @rule(seconds=st.sampled_from([0.5, 6.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "cache"):
            assert_adds_up(self.cache.counts())

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for tier in self.tiers:
            tier.fault = ""
        while self.open:
            self.finish(committed=True)
        for holder in (*HOLDERS, "reader", "writer"):
            self.cache.end(holder)
        self.settle()
        counts = self.cache.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert counts.slots_used == counts.chunks_resident
        assert not any(self.cache._index._leases)
        assert not self.cache.lower.promotions._arriving
        states = self.cache.lower.states()
        assert all(state.spill.under_way == state.lane.queued == 0 for state in states)
        for chain in CHAINS:
            self.everything_is_found(chain)
        self.cache.close()

    def settle(self) -> None:
        while any(lane.step() for lane in self.lanes):
            pass

    def everything_is_found(self, chain: list[ChunkKey]) -> None:
        for _ in range(50):
            plan = self.cache.lookup(chain, "last", wait_for_promotion=True)
            if plan.ended is not Ended.PENDING:
                break
            self.settle()
        else:
            raise AssertionError("the wait for what is below never ended")
        if plan.chunks:
            self.read(chain[: plan.chunks])
        self.cache.end("last")
        below = sum(1 for tier in self.tiers if tier.holds(chain[:1]) == [True])
        lost = sum(state.spill.lost + state.spill.refused for state in self.cache.lower.states())
        if self.unbroken and self.ample and not lost and below:
            held = [self.cache._index.find(key) is not None for key in chain]
            anywhere = [
                here or any(tier.holds([key])[0] for tier in self.tiers) for key, here in zip(chain, held, strict=True)
            ]
            assert plan.chunks >= [*anywhere, False].index(False)


TestHierarchy = Hierarchy.TestCase
TestHierarchy.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
