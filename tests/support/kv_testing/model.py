"""A reference model of a cache, and a Hypothesis state machine that compares a real cache with it.

The model does not predict which chunk is evicted: it is told what is held afterwards, and judges whether that was
allowed. Everything else it predicts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_core.clock import HandClock
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage, longest_hit
from kv_core.keys import ChunkKey
from kv_core.service import CacheService, Ended, LoadFailed, ReadLease, WriteLease
from kv_core.testing import key_chain, keys_of

from kv_testing.service_contract import GROUP_BYTES, assert_adds_up, refuses
from kv_testing.shapes import keys_for

LEASE_S = 300.0
SLOTS = 6
HOLDERS = ("ann", "ben", "cyd")
STEM = key_chain(3)
SHAPES = (
    keys_of(1),
    keys_of(2),
    ChunkShape(4, (ALL, Coverage("window", 5))),
    ChunkShape(4, (ALL, STATE)),
    ChunkShape(4, (STATE,)),
    ChunkShape(4, (Coverage("local", 8), Coverage("window", 2))),
    ChunkShape(4, (STATE,), shards=2),
)
MIXED = keys_for(SHAPES[3], 4)
CHAINS = (
    [*STEM, *key_chain(3, branch="left")],
    [*STEM, *key_chain(4, branch="right")],
    key_chain(5, branch="other"),
    MIXED,
    MIXED[0::2],
    MIXED[1::2],
)


@dataclass(eq=False, slots=True)
class ModelChunk:
    """One commit of one key."""

    key: ChunkKey
    data: bytes


@dataclass(eq=False, slots=True)
class ModelRead:
    holder: str
    chunks: list[ModelChunk]
    deadline_s: float
    lease: ReadLease | None = None


@dataclass(eq=False, slots=True)
class ModelWrite:
    holder: str
    lease: WriteLease
    data: dict[ChunkKey, bytes]
    forgotten: set[ChunkKey] = field(default_factory=set)


@dataclass(slots=True)
class Model:
    """What the cache must hold, and which leases it has granted."""

    slots: int
    held: dict[ChunkKey, ModelChunk] = field(default_factory=dict)
    promises: dict[str, ModelRead] = field(default_factory=dict)
    reads: list[ModelRead] = field(default_factory=list)
    writes: list[ModelWrite] = field(default_factory=list)
    over: list[ReadLease | WriteLease] = field(default_factory=list)
    expired: int = 0

    def expire(self, now_s: float) -> None:
        for holder, promise in list(self.promises.items()):
            if promise.deadline_s <= now_s:
                del self.promises[holder]
                self.expired += 1
        for read in [read for read in self.reads if read.deadline_s <= now_s]:
            self.end_read(read)
            self.expired += 1

    def end_read(self, read: ModelRead) -> None:
        self.reads.remove(read)
        assert read.lease is not None
        self.over.append(read.lease)

    def end_write(self, write: ModelWrite) -> None:
        self.writes.remove(write)
        self.over.append(write.lease)

    def is_valid(self, read: ModelRead) -> bool:
        """None of its chunks was forgotten since it began, not even to be stored anew."""
        return all(self.held.get(chunk.key) is chunk for chunk in read.chunks)

    def leased(self) -> set[ModelChunk]:
        return {chunk for read in [*self.promises.values(), *self.reads] for chunk in read.chunks}

    def writing(self) -> set[ChunkKey]:
        """Keys being written that would be found if committed."""
        return {key for write in self.writes for key in write.lease.keys if key not in write.forgotten}

    def slots_used(self) -> int:
        leaving = self.leased() - set(self.held.values())
        return len(self.held) + len(leaving) + sum(len(write.lease.keys) for write in self.writes)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)
            for write in self.writes:
                if key in write.lease.keys:
                    write.forgotten.add(key)


class ServiceMachine(RuleBasedStateMachine):
    """Any order of any calls. Subclasses define `make`, of a cache whose groups have `GROUP_BYTES`, and `resident`, and
    `close` where something must be closed."""

    service: CacheService
    view: memoryview

    def make(self, slots: int, clock: HandClock) -> tuple[CacheService, memoryview]:
        raise NotImplementedError

    def resident(self) -> list[ChunkKey]:
        """The keys that can be found now."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing, unless a subclass says what."""

    @initialize()
    def start(self) -> None:
        self.clock = HandClock()
        self.service, self.view = self.make(SLOTS, self.clock)
        self.model = Model(SLOTS)
        self.writes_ever = 0

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for holder in HOLDERS:
            self.service.end(holder)
        counts = self.service.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert counts.slots_used == counts.chunks_resident
        assert_adds_up(counts)
        self.close()

    keys = st.builds(
        lambda chain, start, stop: chain[min(start, stop) : max(start, stop)],
        st.sampled_from(CHAINS),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.integers(1, 7),
    )
    holders = st.sampled_from(HOLDERS)

    @rule(keys=keys, holder=holders, shape=st.sampled_from(SHAPES))
    def lookup(self, keys: list[ChunkKey], holder: str, shape: ChunkShape) -> None:
        self.model.expire(self.clock.now_s())
        keys = keys[: len(keys) // shape.keys_per_chunk * shape.keys_per_chunk]
        plan = self.service.lookup(keys, holder, shape=shape)
        held = [key in self.model.held for key in keys]
        assert plan.chunks == longest_hit(held, shape)
        if shape.is_plain:
            next_chunk = held[plan.chunks * shape.keys_per_chunk :]
            ended = Ended.ALL_HELD if not next_chunk else Ended.INCOMPLETE if next_chunk[0] else Ended.ABSENT
            assert plan.ended is ended
        self.model.promises.pop(holder, None)
        if plan.chunks:
            chunks = [self.model.held[keys[place]] for place in shape.needed_places(plan.chunks)]
            self.model.promises[holder] = ModelRead(holder, chunks, self.clock.now_s() + LEASE_S)

    @rule(holder=holders)
    def renew(self, holder: str) -> None:
        self.model.expire(self.clock.now_s())
        promise = self.model.promises.get(holder)
        assert self.service.renew(holder) == (promise is not None and self.model.is_valid(promise))
        if promise is not None and self.model.is_valid(promise):
            self.model.promises[holder].deadline_s = self.clock.now_s() + LEASE_S

    @rule(keys=keys, holder=holders, lasting=st.booleans())
    def load(self, keys: list[ChunkKey], holder: str, lasting: bool) -> None:
        self.model.expire(self.clock.now_s())
        answer = self.service.load(keys, holder, lasting=lasting)
        missing = tuple(key for key in keys if key not in self.model.held)
        match answer:
            case LoadFailed():
                assert missing
                assert answer.missing == missing
            case ReadLease() as lease:
                assert not missing
                assert lease.keys == tuple(keys)
                chunks = [self.model.held[key] for key in keys]
                deadline_s = math.inf if lasting else self.clock.now_s() + LEASE_S
                self.model.reads.append(ModelRead(holder, chunks, deadline_s, lease))

    @rule(keys=keys, holder=holders)
    def begin_store(self, keys: list[ChunkKey], holder: str) -> None:
        self.model.expire(self.clock.now_s())
        model = self.model
        writing = model.writing()
        missing = [key for key in keys if key not in model.held and key not in writing]
        leased = model.leased()
        may_leave = {key for key, chunk in model.held.items() if chunk not in leased and key not in keys}
        room = model.slots - model.slots_used()
        lease = self.service.begin_store(keys, holder)
        assert lease.keys == tuple(missing[: room + len(may_leave)])
        assert bool(lease.refused) == (len(lease.keys) < len(missing))
        left = set(model.held) - set(self.resident())
        assert left <= may_leave
        assert len(left) == max(0, len(lease.keys) - room)
        for key in left:
            del model.held[key]
        self.writes_ever += 1
        sizes = {key: GROUP_BYTES[key.group] for key in lease.keys}
        data = {key: (b"%d/" % self.writes_ever + key)[:nbytes].ljust(nbytes) for key, nbytes in sizes.items()}
        for key, extent in zip(lease.keys, lease.extents, strict=True):
            assert extent.nbytes == sizes[key]
            self.view[extent.offset : extent.offset + extent.nbytes] = data[key]
        model.writes.append(ModelWrite(holder, lease, data))

    @precondition(lambda self: self.model.writes)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.model.writes))
        self.service.commit(write.lease)
        self.model.end_write(write)
        for key in write.lease.keys:
            if key not in write.forgotten:
                self.model.held[key] = ModelChunk(key, write.data[key])

    @precondition(lambda self: self.model.writes)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.model.writes))
        assert self.service.release(write.lease)
        self.model.end_write(write)

    @precondition(lambda self: self.model.reads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.model.reads))
        self.model.expire(self.clock.now_s())
        assert read.lease is not None
        assert self.service.release(read.lease) == (read in self.model.reads and self.model.is_valid(read))
        if read in self.model.reads:
            self.model.end_read(read)

    @precondition(lambda self: self.model.over)
    @rule(data=st.data())
    def use_what_is_over(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.over))
        self.model.expire(self.clock.now_s())
        assert not self.service.release(lease)
        if isinstance(lease, WriteLease):
            refuses(lambda: self.service.commit(lease))

    @rule(keys=keys)
    def forget(self, keys: list[ChunkKey]) -> None:
        self.service.forget(keys)
        self.model.forget(keys)

    @rule(keys=keys)
    def turn_ended(self, keys: list[ChunkKey]) -> None:
        """A hint, which changes nothing that is found."""
        self.service.turn_ended(keys)

    @rule(keys=keys)
    def retainable(self, keys: list[ChunkKey]) -> None:
        fitting = self.service.retainable(keys)
        assert fitting is not None and 0 <= fitting <= len(keys)

    @rule(holder=holders)
    def end(self, holder: str) -> None:
        self.service.end(holder)
        self.model.promises.pop(holder, None)
        for read in [read for read in self.model.reads if read.holder == holder]:
            self.model.end_read(read)
        for write in [write for write in self.model.writes if write.holder == holder]:
            self.model.end_write(write)

    @rule()
    def clear(self) -> None:
        self.service.clear()
        self.model.forget([*self.model.held, *self.model.writing()])

    @rule(seconds=st.sampled_from([1.0, 100.0, 299.0, 300.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def bytes_under_a_lease_are_those_committed(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.expire(self.clock.now_s())
        for read in self.model.reads:
            assert read.lease is not None
            for chunk, extent in zip(read.chunks, read.lease.extents, strict=True):
                assert self.bytes_at(extent.offset, extent.nbytes) == chunk.data

    @invariant()
    def counts_and_slots_add_up(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.expire(self.clock.now_s())
        counts = self.service.counts()
        assert_adds_up(counts)
        assert counts.leases_expired == self.model.expired
        assert counts.chunks_resident == len(self.model.held)
        assert counts.slots_used == self.model.slots_used()
        assert counts.read_leases == len(self.model.promises) + len(self.model.reads)
        assert counts.write_leases == len(self.model.writes)
        assert counts.chunks_reserved == sum(len(write.lease.keys) for write in self.model.writes)
        assert set(self.resident()) == set(self.model.held)

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self.view[offset : offset + nbytes])
