"""The books: each lease is given back once, by its release, its holder's end, its replacement or its deadline."""

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.testing import key_chain
from kv_tiers.cache.leases import Leases, ReadEntry, WriteEntry

LEASE_S = 10.0
HOLDERS = ("ann", "ben", "cyd")


def test_a_promise_is_replaced_and_a_load_stands_beside_it() -> None:
    leases = Leases(LEASE_S)
    assert leases.promise("r", [1, 2], 0.0) is None
    load = leases.open_read("r", [1], 0.0)
    before = leases.promise("r", [3], 1.0)
    assert before is not None and (before.slots, before.kind) == ([1, 2], "promise")
    assert leases.reads_open == 2
    before = leases.promise("r", [], 2.0)
    assert before is not None and before.slots == [3]
    assert leases.promise_of("r") is None and leases.holders() == {"r"}
    assert leases.close_read(load.number) is load
    assert leases.close_read(load.number) is None
    assert leases.holders() == set()


def test_what_is_renewed_expires_after_what_is_not() -> None:
    leases = Leases(LEASE_S)
    for number, holder in enumerate(HOLDERS):
        leases.promise(holder, [number], float(number))
    promise = leases.promise_of("ann")
    assert promise is not None
    leases.renew(promise, 5.0)
    assert [read.holder for read in leases.expire(12.0)] == ["ben", "cyd"]
    assert leases.expire(14.9) == []
    assert leases.expire(15.0) == [promise]
    assert leases.holders() == set()


def test_writes_outlive_the_clock_and_end_with_their_holder() -> None:
    leases = Leases(LEASE_S)
    write = leases.open_write("w", key_chain(1), [0], key_chain(1), 0.0)
    assert leases.expire(1e9) == [] and leases.is_writing(write)
    assert leases.end("w") == ([], [write])
    assert leases.end("w") == ([], []) and not leases.is_writing(write)
    assert leases.close_write(write.number) is None


def test_what_is_cleared_is_gone_and_its_writes_are_named() -> None:
    leases = Leases(LEASE_S)
    leases.promise("r", [0], 0.0)
    write = leases.open_write("r", key_chain(1), [1], key_chain(1), 0.0)
    assert leases.clear() == [write]
    assert (leases.reads_open, leases.writes_open, leases.holders()) == (0, 0, set())


class LeasesMachine(RuleBasedStateMachine):
    """Any order of calls against two lists of what is open, which are searched from end to end."""

    holders = st.sampled_from(HOLDERS)
    some = st.lists(st.integers(0, 7), max_size=3)

    @initialize()
    def start(self) -> None:
        self.leases = Leases(LEASE_S)
        self.now_s = 0.0
        self.reads: list[ReadEntry] = []
        self.writes: list[WriteEntry] = []
        self.given: Counter[int] = Counter()
        """By number, how often a lease was given back."""

    def gone(self, *ended: ReadEntry | WriteEntry) -> None:
        self.given.update(lease.number for lease in ended)
        self.reads = [read for read in self.reads if read not in ended]
        self.writes = [write for write in self.writes if write not in ended]

    @rule(holder=holders, slots=some)
    def promise(self, holder: str, slots: list[int]) -> None:
        expected = [read for read in self.reads if (read.holder, read.kind) == (holder, "promise")]
        before = self.leases.promise(holder, slots, self.now_s)
        assert ([] if before is None else [before]) == expected
        self.gone(*expected)
        promise = self.leases.promise_of(holder)
        assert (promise is not None) == bool(slots)
        if promise is not None:
            assert promise.slots == slots
            self.reads.append(promise)

    @rule(holder=holders)
    def renew(self, holder: str) -> None:
        if (promise := self.leases.promise_of(holder)) is not None:
            self.leases.renew(promise, self.now_s)
            assert promise.deadline_s == self.now_s + LEASE_S

    @rule(holder=holders, slots=some, lasting=st.booleans())
    def open_read(self, holder: str, slots: list[int], lasting: bool) -> None:
        read = self.leases.open_read(holder, slots, self.now_s, lasting=lasting)
        assert read.deadline_s == (math.inf if lasting else self.now_s + LEASE_S)
        self.reads.append(read)

    @rule(holder=holders)
    def open_write(self, holder: str) -> None:
        self.writes.append(self.leases.open_write(holder, key_chain(1), [0], key_chain(1), self.now_s))

    @rule(number=st.integers(1, 40))
    def close(self, number: int) -> None:
        for ended in (self.leases.close_read(number), self.leases.close_write(number)):
            if ended is not None:
                assert ended in self.reads or ended in self.writes
                self.gone(ended)

    @rule(holder=holders)
    def end(self, holder: str) -> None:
        reads, writes = self.leases.end(holder)
        assert sorted(read.number for read in reads) == [read.number for read in self.reads if read.holder == holder]
        assert writes == [write for write in self.writes if write.holder == holder]
        self.gone(*reads, *writes)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0]))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        expired = self.leases.expire(self.now_s)
        assert {read.number for read in expired} == {
            read.number for read in self.reads if read.deadline_s <= self.now_s
        }
        assert [read.deadline_s for read in expired] == sorted(read.deadline_s for read in expired)
        self.gone(*expired)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "leases"):
            return
        assert self.leases.reads_open == len(self.reads) and self.leases.writes_open == len(self.writes)
        assert self.leases.holders() == {lease.holder for lease in [*self.reads, *self.writes]}
        assert max(self.given.values(), default=0) <= 1
        assert not self.given.keys() & {lease.number for lease in [*self.reads, *self.writes]}


TestLeasesInAnyOrder = LeasesMachine.TestCase
TestLeasesInAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
