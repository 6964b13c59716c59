"""A cache over a tier of which it may read approximations, whose lane works when it is told to or by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kv_codecs.progressive import ProgressiveCodec
from kv_core.clock import HandClock
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, LoadOutcome, Stored
from kv_core.service import Ended, ReadLease
from kv_core.testing import key_chain
from kv_eviction.simple import LruPolicy
from kv_tiers import HostPool, LocalCache, chunk_header
from kv_tiers.codec import Codec
from kv_tiers.config import ColdConfig
from kv_tiers.events.bus import EventBus
from kv_tiers.index.life import Life
from kv_tiers.lanes.jobs import Outgoing
from kv_tiers.lanes.lane import Lane
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import aligned_pages
from kv_tiers.tier import Read
from kv_tiers.tiers.dram import DramTier

from kv_testing.faults import FaultyTier
from kv_testing.service_contract import assert_adds_up
from kv_testing.wait import until

CHUNK_BYTES = 1 << 16
FORM = chunk_header.format_id("upgraded")
CODEC = ProgressiveCodec()
KEYS = key_chain(3)


def exact(key: ChunkKey) -> bytes:
    """A chunk of numbers such as keys and values are, another for each key."""
    numbers = np.random.default_rng(list(key)).standard_normal(CHUNK_BYTES // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


def payload(key: ChunkKey) -> bytes:
    out = memoryview(bytearray(CHUNK_BYTES))
    stored_bytes = CODEC.encode(memoryview(exact(key)), out)
    assert stored_bytes is not None
    return bytes(out[:stored_bytes])


def approximate(key: ChunkKey, parts: int = 1) -> bytes:
    out = bytearray(CHUNK_BYTES)
    assert CODEC.decode_prefix(memoryview(payload(key))[: parts * CHUNK_BYTES // 4], memoryview(out)) == parts
    return bytes(out)


class Counting(FaultyTier):
    """Knows how many bytes of payloads it has brought, and does what it is told before it reads the rest of one."""

    brought_bytes = 0
    before_rest: Callable[[], object] = staticmethod(lambda: None)

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return self._counted(reads, super().load(reads))

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return self._counted(reads, super().load_prefixes(reads))

    def load_remainders(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        self.before_rest()
        return self._counted(reads, super().load_remainders(reads))

    def _counted(self, reads: Sequence[Read], outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
        for read, one in zip(reads, outcomes, strict=True):
            self.brought_bytes += one.nbytes - read.from_bytes if isinstance(one, Loaded) else 0
        return outcomes


@dataclass
class Small:
    """A cache that reads approximations of what an exact cache has stored, step by step unless it has threads."""

    slots: int = 8
    threads: int = 0
    keys: tuple[ChunkKey, ...] = tuple(KEYS)
    pool: HostPool | None = None
    bus: EventBus | None = None
    drops_parts: bool = False

    def __post_init__(self) -> None:
        self.clock = HandClock()
        below = HostPool.anonymous("below", CHUNK_BYTES, 64)
        self.dram = DramTier(below, LruPolicy(), drops_parts=self.drops_parts)
        self.tier = Counting(self.dram)
        self.fill(list(self.keys))
        codecs: dict[str, Codec] = {CODEC.name: CODEC}
        self.lane = Lane(
            self.tier,
            FORM,
            find_codec=codecs.__getitem__,
            approximate=True,
            drops_parts=self.drops_parts,
            only_hides=True,
            threads=self.threads,
            backoff_s=0.01,
            max_backoff_s=0.01,
            clock=self.clock,
        )
        self.cache = LocalCache(
            self.pool or HostPool.anonymous("host", CHUNK_BYTES, self.slots),
            policy=LruPolicy(),
            clock=self.clock,
            lanes=[(self.lane, "never")],
            cold=ColdConfig(drain_s=5.0 if self.threads else 0.1),
            events=self.bus.source("c", (CHUNK_BYTES,)) if self.bus is not None else None,
        )

    def fill(self, keys: list[ChunkKey]) -> None:
        lane, outcomes = Lane(self.dram, FORM, codec=CODEC, threads=0), list[object]()
        for key in keys:
            pages = aligned_pages(slot_bytes_for(CHUNK_BYTES))
            pages[:CHUNK_BYTES] = exact(key)
            assert lane.store([Outgoing(key, None, pages, CHUNK_BYTES)], outcomes.extend)
            assert lane.step()
        assert outcomes == [Stored()] * len(keys)

    @property
    def upgraded(self) -> int:
        return self.cache.lower.states()[0].upgraded

    def fetch(self, keys: list[ChunkKey], holder: str = "r") -> None:
        """Promote and promise them, with as few steps of the lane as that takes."""
        for _ in range(50):
            plan = self.cache.lookup(keys, holder, wait_for_promotion=True)
            if plan.ended is not Ended.PENDING:
                assert plan.chunks == len(keys)
                return
            if not self.threads:
                self.lane.step()
            else:
                until(lambda: not self.cache.lower.promotions._arriving)
        raise AssertionError("they never came")

    def open(self, keys: list[ChunkKey], holder: str = "reader") -> ReadLease:
        lease = self.cache.load(keys, holder)
        assert isinstance(lease, ReadLease)
        return lease

    def bytes_of(self, lease: ReadLease) -> list[bytes]:
        view = self.cache.pool.view
        return [bytes(view[one.offset : one.offset + one.nbytes]) for one in lease.extents]

    def read(self, keys: list[ChunkKey]) -> list[bytes]:
        """As a request does that ends at once."""
        self.fetch(keys)
        lease = self.open(keys)
        found = self.bytes_of(lease)
        assert self.cache.release(lease)
        self.cache.end("r")
        return found

    def upgrade(self) -> None:
        while self.lane.step():
            pass

    def at_rest(self) -> None:
        """Nothing is kept that should be free."""
        upgrades = self.cache.lower.upgrades
        assert upgrades._under_way == [None] and not self.cache._index.replaced
        counts = self.cache.counts()
        assert_adds_up(counts)
        assert counts.slots_used == counts.chunks_resident
        assert Life.SPARE not in self.cache._index._life
        kept = [one.first_bytes for one in upgrades.by_slot.values() if one.first_bytes is not None]
        assert upgrades._cached_bytes == sum(len(first.payload) for first in kept)

    def close(self) -> None:
        self.cache.close()
