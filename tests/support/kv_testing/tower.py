"""A small hierarchy of tiers with injected faults, whose lanes work step by step."""

from collections.abc import Mapping, Sequence

from kv_core.clock import HandClock
from kv_core.coverage import PLAIN, ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Ended, LookupPlan, ReadLease
from kv_core.testing import key_chain
from kv_eviction.coverage import BoundedGroups
from kv_eviction.simple import LruPolicy
from kv_tiers import chunk_header
from kv_tiers.cache.extension import Extension
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.spill import WriteMode
from kv_tiers.config import ColdConfig
from kv_tiers.events.bus import Source
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import HostPool
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier_state import Health
from kv_tiers.tiers.dram import DramTier

from kv_testing.faults import FaultyTier
from kv_testing.service_contract import CHUNK_BYTES, assert_adds_up
from kv_testing.wait import until

FINGERPRINT = "tower"


def leading(lane: Lane, keys: Sequence[ChunkKey]) -> int:
    """How many leading keys a load would find, in a tier that answers from memory."""
    return [*lane.holds(keys), False].index(False)


class Tower:
    """A cache of `slots` over tiers whose lanes work when they are told to (`threads=0`) or by themselves."""

    def __init__(
        self,
        *modes: WriteMode,
        slots: int = 8,
        below: int = 64,
        remote: Sequence[bool] = (),
        threads: int = 0,
        cold: ColdConfig | None = None,
        pool: HostPool | None = None,
        quotas: Mapping[bytes, int] | None = None,
        tier_quotas: Mapping[bytes, int] | None = None,
        events: Source | None = None,
        group_bytes: Sequence[int] = (),
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.clock = HandClock()
        self.tiers: list[FaultyTier] = []
        lanes: list[tuple[Lane, WriteMode]] = []
        bounded = BoundedGroups()
        for number, mode in enumerate(modes or ("through",)):
            dram = DramTier(
                HostPool.anonymous("b", CHUNK_BYTES, below),
                LruPolicy(),
                name=f"tier{number}",
                bounded=bounded,
                quotas=tier_quotas,
                share_policy=lambda slots: LruPolicy(),
            )
            far = bool(remote) and remote[number]
            tier = FaultyTier(dram, holds_is_local=not far, sleep=self.clock.advance)
            self.tiers.append(tier)
            lanes.append(
                (
                    Lane(
                        tier,
                        chunk_header.format_id(FINGERPRINT),
                        only_hides=mode == "never",
                        threads=threads,
                        backoff_s=0.01,
                        max_backoff_s=0.02,
                        stuck_s=10.0,
                        clock=self.clock,
                    ),
                    mode,
                )
            )
        self.lanes = [lane for lane, _ in lanes]
        self.cache = LocalCache(
            pool or HostPool.anonymous("host", CHUNK_BYTES, slots, group_bytes=group_bytes),
            policy=LruPolicy(),
            clock=self.clock,
            lanes=lanes,
            cold=cold or ColdConfig(batch_bytes=2 * 4096, prefetch_share=1.0, drain_s=0.2),
            events=events,
            quotas=quotas,
            share_policy=lambda chunks: LruPolicy(),
            bounded=bounded,
            extensions=extensions,
        )

    def run(self) -> None:
        """Run the lanes until they have nothing left to do."""
        while any(lane.step() for lane in self.lanes):
            pass

    def settle(self) -> None:
        """Like `run`, also for lanes that work by themselves: what they have not written yet may be evicted, and what
        they are writing cannot be."""
        self.run()
        until(lambda: not any(state.spill.under_way for state in self.cache.lower.states()))

    def store(self, keys: Sequence[ChunkKey], data: bytes = b"") -> int:
        lease = self.cache.begin_store(keys, "w")
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            with self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                chunk[:] = content(ChunkKey(data + key), extent.nbytes)
        self.cache.commit(lease)
        return len(lease.keys)

    def ask(self, keys: Sequence[ChunkKey], holder: str = "r", shape: ChunkShape = PLAIN) -> LookupPlan:
        return self.cache.lookup(keys, holder, shape=shape, wait_for_promotion=True)

    def fetch(self, keys: Sequence[ChunkKey], holder: str = "r", shape: ChunkShape = PLAIN) -> LookupPlan:
        """Ask until the answer is final."""
        plans: list[LookupPlan] = []

        def is_final() -> bool:
            plans.append(self.ask(keys, holder, shape))
            self.run()
            return plans[-1].ended is not Ended.PENDING

        until(is_final)
        return plans[-1]

    def read(self, keys: Sequence[ChunkKey], data: bytes = b"") -> None:
        """Load these, which are promised, and see that they are what was stored."""
        lease = self.cache.load(keys, "l")
        assert isinstance(lease, ReadLease)
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            with self.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
                assert bytes(chunk) == content(ChunkKey(data + key), extent.nbytes)
        assert self.cache.release(lease)

    def crowd_out(self) -> None:
        """Fill the pool with other chunks, and let them go down too."""
        self.store(key_chain(self.cache.pool.slots, branch="crowd"))
        self.run()

    def store_below(self, keys: Sequence[ChunkKey], data: bytes = b"") -> None:
        """Like `store`, until only the tiers have the chunks."""
        self.store(keys, data)
        self.settle()
        self.crowd_out()
        self.settle()

    def close(self) -> None:
        """Check that in the end no lease is left and the counts add up, whatever happened."""
        for tier in self.tiers:
            tier.let_go()
        self.clock.advance(1.0)  # those that rest are probed
        self.run()
        until(lambda: not {lane.health()[0] for lane in self.lanes} & {Health.DOWN, Health.STUCK})
        for lane in self.lanes:
            assert lane.drain(5)
        for holder in ("r", "s", "l", "w"):
            self.cache.end(holder)
        self.settle()  # what has ended in a lane is about to be settled
        until(lambda: not self.cache.counts().chunks_reserved)
        counts = self.cache.counts()
        assert_adds_up(counts)
        assert counts.read_leases == counts.write_leases == 0
        assert counts.slots_used == counts.chunks_resident
        assert not any(self.cache._index._leases)
        self.cache.close()
