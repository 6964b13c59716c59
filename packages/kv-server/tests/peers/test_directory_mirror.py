"""The mirror of what others hold is exact again after any loss: against plain sets."""

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain
from kv_remote.host_port import HostPort
from kv_server.directory.contents import Contents, KeySource
from kv_server.directory.entries import MAX_CHANGES, SHARDS, VERSION, Entry, decode, encode, names_of, pack, unpack
from kv_server.directory.mirror import MAX_BACKOFF_S, MAX_OF_HOST, MAX_WAITING, Host, Mirror, Trust
from kv_testing.wait import joined
from kv_tiers.index.journal import Journal

KEYS = key_chain(48)
LEASE_S = 10.0
HOSTS = 3


class HostModel:
    """A server: a plain set, and what is made of it. `restart` it, and it holds nothing and has another name."""

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.1:{9000 + number}"
        self.is_cut_off = False
        self.cleared_s: float | None = None
        self.restart()

    def restart(self) -> None:
        self.held: set[ChunkKey] = set()
        self.journal = Journal()
        source = KeySource(self.journal, lambda: sorted(self.held))
        # It never looks at all keys again: what the journal misses stays wrong.
        self.contents = Contents(
            lambda keys: [key in self.held for key in keys], [source], scan_s=1e9, now_s=lambda: 0.0
        )

    def change(self, added: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        self.held |= set(added)
        self.held -= set(removed)
        self.journal.note([*added, *removed])

    def write(self) -> Entry:
        return decode(encode(self.contents.update(self.address)))


def repair(mirror: Mirror, host: Host, model: HostModel, now_s: float, most: int = 1 << 17) -> bool:
    """As a directory does it. False: the host is another one now."""
    if model.contents.id != host.id:
        mirror.drop(host)
        return False
    sequence, sums = model.contents.sums()
    left = mirror.differing(host, sequence, unpack(sums))
    while left:
        sequence, shards, names = model.contents.names_in(left, most)
        mirror.replace(host, sequence, left[:shards], names)
        left = left[shards:]
    mirror.end_repair(host, now_s, cleared_s=model.cleared_s, nbytes=0)
    return True


def new_mirror(**options: int) -> Mirror:
    return Mirror(**{"lease_s": LEASE_S, "max_names": 10**6, "max_hosts": 100, **options})  # type: ignore[arg-type]


class Directories(RuleBasedStateMachine):
    """Hosts change, write, restart and are cut off; their entries come late, twice, in any order, or never."""

    max_names = 10**6

    @initialize()
    def begin(self) -> None:
        self.hosts = [HostModel(number) for number in range(HOSTS)]
        self.mirror = new_mirror(max_names=self.max_names)
        self.on_the_way: list[Entry] = []
        self.repairing: list[tuple[Host, HostModel]] = []
        self.now_s = 0.0

    @rule(
        number=st.integers(0, HOSTS - 1), added=st.sets(st.sampled_from(KEYS)), removed=st.sets(st.sampled_from(KEYS))
    )
    def change(self, number: int, added: set[ChunkKey], removed: set[ChunkKey]) -> None:
        self.hosts[number].change(sorted(added), sorted(removed))

    @rule(number=st.integers(0, HOSTS - 1))
    def write(self, number: int) -> None:
        entry = self.hosts[number].write()
        if not self.hosts[number].is_cut_off:
            self.on_the_way.append(entry)

    @rule(number=st.integers(0, HOSTS - 1))
    def restart(self, number: int) -> None:
        self.hosts[number].restart()

    @rule(number=st.integers(0, HOSTS - 1), is_cut_off=st.booleans())
    def cut_off(self, number: int, is_cut_off: bool) -> None:
        self.hosts[number].is_cut_off = is_cut_off

    @rule(at=st.integers(0, 100), again=st.booleans())
    def arrive(self, at: int, again: bool) -> None:
        if self.on_the_way:
            at %= len(self.on_the_way)
            self.mirror.take(self.on_the_way[at], self.now_s)
            if not again:
                del self.on_the_way[at]

    @rule(at=st.integers(0, 100))
    def lose(self, at: int) -> None:
        if self.on_the_way:
            del self.on_the_way[at % len(self.on_the_way)]

    @rule(seconds=st.floats(0, LEASE_S))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.mirror.expire(self.now_s)

    @rule()
    def begin_repairs(self) -> None:
        for host in self.mirror.begin_repairs(2, self.now_s):
            self.repairing.append((host, self.model_of(host)))

    @rule(most=st.integers(1, 20))
    def end_repairs(self, most: int) -> None:
        for host, model in self.repairing:
            if model.is_cut_off:
                self.mirror.fail_repair(host, self.now_s)
            else:
                repair(self.mirror, host, model, self.now_s, most)
        self.repairing.clear()

    @invariant()
    def what_is_exact_is_what_it_was_at_that_number(self) -> None:
        """Of a host at rest whose every entry has come, nothing is wrong."""
        for model in self.hosts if hasattr(self, "hosts") else ():
            host = self.mirror._by_address.get(HostPort("127.0.0.1", int(model.address[-4:])))
            if host is None or host.id != model.contents.id or host.trust is not Trust.EXACT:
                continue
            sequence, sums = model.contents.sums()
            if host.sequence == sequence:
                assert np.array_equal(host.sums, unpack(sums))

    def teardown(self) -> None:
        """All is mended: after two entries of each and a repair the mirror is what they hold."""
        if not hasattr(self, "hosts"):
            return
        self.end_repairs(20)
        for entry in self.on_the_way:
            self.mirror.take(entry, self.now_s)
        for _ in range(2):
            self.now_s += MAX_BACKOFF_S
            self.mirror.resumed(self.now_s)
            for model in self.hosts:
                self.mirror.take(model.write(), self.now_s)
            for host in self.mirror.begin_repairs(HOSTS, self.now_s):
                repair(self.mirror, host, self.model_of(host), self.now_s)
        for model in self.hosts:
            assert set(map(int, self.mirror.names_of(model.contents.id))) == set(map(int, names_of(list(model.held))))
        holders = self.mirror.holders(names_of(KEYS), HOSTS)
        for key, hosts in zip(KEYS, holders, strict=True):
            assert {str(host.address) for host in hosts} == {one.address for one in self.hosts if key in one.held}
        assert self.mirror.counts().exact == HOSTS

    def model_of(self, host: Host) -> HostModel:
        return next(model for model in self.hosts if model.address == str(host.address))


TestDirectories = Directories.TestCase
TestDirectories.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class DirectoriesWithoutRoom(Directories):
    """The same, where there is no room for the names of all hosts."""

    max_names = 12

    @invariant()
    def of_a_host_that_is_left_out_nothing_is_kept(self) -> None:
        if not hasattr(self, "hosts"):
            return
        assert self.mirror.counts().names <= self.max_names
        for address in self.mirror.addresses():
            host = self.mirror._by_address.get(address)
            if host is not None and host.is_left_out:
                assert not len(self.mirror.names_of(host.id)) and not host.count and not host.sums.any()

    def teardown(self) -> None:
        """Nothing is asserted: who is left out depends on who was first."""


TestDirectoriesWithoutRoom = DirectoriesWithoutRoom.TestCase
TestDirectoriesWithoutRoom.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def known(mirror: Mirror, model: HostModel, now_s: float = 0.0) -> Host:
    """The host, after its entry and a repair."""
    mirror.take(model.write(), now_s)
    (host,) = mirror.begin_repairs(1, now_s)
    assert repair(mirror, host, model, now_s)
    return host


def test_a_repair_fetches_only_shards_that_differ() -> None:
    model, mirror = HostModel(0), new_mirror()
    model.change(key_chain(3000), ())
    host = known(mirror, model)
    model.change(key_chain(3, branch="other"), ())
    model.write()  # and nobody reads it
    mirror.take(model.write(), 0.0)
    assert host.trust is Trust.DOUBTFUL and mirror.counts().gaps == 1
    (host,) = mirror.begin_repairs(1, MAX_BACKOFF_S)
    sequence, sums = model.contents.sums()
    shards = mirror.differing(host, sequence, unpack(sums))
    assert 1 <= len(shards) <= 3


def test_an_entry_that_comes_again_or_late_changes_nothing() -> None:
    model, mirror = HostModel(0), new_mirror()
    host = known(mirror, model)
    entries = []
    for added, removed in ((KEYS[:4], ()), ((), KEYS[:2]), (KEYS[:1], ())):
        model.change(added, removed)
        entries.append(model.write())
        mirror.take(entries[-1], 0.0)
    for entry in reversed(entries):
        mirror.take(entry, 0.0)
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of([KEYS[0], *KEYS[2:4]])))
    assert host.trust is Trust.EXACT and mirror.counts().gaps == 0


def test_entries_before_a_repair_come_too_late_to_undo_it() -> None:
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS[:4], ())
    late = model.write()
    model.change((), KEYS[:2])
    host = known(mirror, model)
    mirror.take(late, 0.0)
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(KEYS[2:4])))
    assert host.trust is Trust.EXACT


def test_what_was_fetched_later_than_the_sums_is_no_reason_to_doubt() -> None:
    """Between the sums and the names there were two changes, whose entries come afterwards."""
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS[:10], ())
    mirror.take(model.write(), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    sequence, sums = model.contents.sums()
    left = [*mirror.differing(host, sequence, unpack(sums))] or list(range(SHARDS))
    entries = []
    for added, removed in ((KEYS[10:20], ()), ((), KEYS[:5])):
        model.change(added, removed)
        entries.append(model.write())
    sequence, _, names = model.contents.names_in(left, 1000)
    mirror.replace(host, sequence, left, names)
    mirror.end_repair(host, 0.0, cleared_s=None, nbytes=0)
    for entry in entries:
        mirror.take(entry, 0.0)
        assert host.trust is Trust.EXACT
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(KEYS[5:20])))


def test_an_entry_that_is_missing_is_noticed_by_the_next() -> None:
    """By its number, even where nothing else differs."""
    model, mirror = HostModel(0), new_mirror()
    host = known(mirror, model)
    model.change(KEYS[:1], ())
    model.write()
    model.change(KEYS[1:2], KEYS[:1])
    mirror.take(model.write(), 0.0)
    assert mirror.counts().gaps == 1 and host.trust is Trust.DOUBTFUL


def test_a_root_that_is_not_ours_is_noticed() -> None:
    model, mirror = HostModel(0), new_mirror()
    host = known(mirror, model)
    mirror.take(model.write(), 0.0)
    assert host.trust is Trust.EXACT
    entry = model.write()
    mirror.take(Entry(VERSION, entry.host, entry.address, entry.sequence, entry.count, b"\1" * 8), 0.0)
    assert host.trust is Trust.DOUBTFUL and mirror.counts().gaps == 0


def test_a_number_that_is_not_the_hosts_own_hides_nothing_for_longer_than_a_repair() -> None:
    """Whoever may write into the directory may write an entry in another's name."""
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS[:4], ())
    host = known(mirror, model)
    forged = {"sequence": (1 << 62) - 1, "added": pack(names_of(KEYS[9:10]))}
    mirror.take(msgspec.structs.replace(model.write(), **forged), 0.0)
    (host,) = mirror.begin_repairs(1, MAX_BACKOFF_S)
    assert repair(mirror, host, model, MAX_BACKOFF_S)
    model.change(KEYS[4:6], KEYS[:1])
    mirror.take(model.write(), MAX_BACKOFF_S)
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(KEYS[1:6])))
    assert host.trust is Trust.EXACT


def test_more_changes_than_fit_an_entry_are_a_gap() -> None:
    model, mirror = HostModel(0), new_mirror()
    known(mirror, model)
    keys = key_chain(MAX_CHANGES + 1)
    model.change(keys, ())
    entry = model.write()
    assert not (entry.added or entry.removed) and entry.count == len(keys)
    mirror.take(entry, MAX_BACKOFF_S)
    assert mirror.counts().gaps == 1
    (host,) = mirror.begin_repairs(1, 2 * MAX_BACKOFF_S)
    repair(mirror, host, model, 2 * MAX_BACKOFF_S)
    assert mirror.counts().names == len(keys)


def test_entries_wait_for_a_repair_and_count_after_it() -> None:
    """What is fetched may be older than an entry that came meanwhile, which must not be undone by it."""
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS[:10], ())
    mirror.take(model.write(), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    sequence, sums = model.contents.sums()
    left = mirror.differing(host, sequence, unpack(sums))
    fetched = model.contents.names_in(list(range(SHARDS)), 1000)
    model.change(KEYS[10:20], KEYS[:5])
    mirror.take(model.write(), 0.0)
    mirror.replace(host, fetched[0], left or list(range(SHARDS)), fetched[2])
    mirror.end_repair(host, 0.0, cleared_s=None, nbytes=0)
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(KEYS[5:20])))
    assert host.trust is Trust.EXACT


def test_a_host_whose_entries_outran_its_repair_is_repaired_again() -> None:
    model, mirror = HostModel(0), new_mirror()
    mirror.take(model.write(), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    sequence, sums = model.contents.sums()
    mirror.differing(host, sequence, unpack(sums))
    for at in range(MAX_WAITING + 5):
        model.change(KEYS[at % 40 : at % 40 + 1], KEYS[(at + 3) % 40 : (at + 3) % 40 + 1])
        mirror.take(model.write(), 0.0)
    mirror.end_repair(host, 0.0, cleared_s=None, nbytes=0)
    assert host.trust is Trust.DOUBTFUL
    (host,) = mirror.begin_repairs(1, MAX_BACKOFF_S)
    repair(mirror, host, model, MAX_BACKOFF_S)
    mirror.take(model.write(), MAX_BACKOFF_S)
    assert host.trust is Trust.EXACT
    assert set(map(int, mirror.names_of(host.id))) == set(map(int, names_of(list(model.held))))


def test_a_host_that_was_never_asked_is_not_used() -> None:
    """Anybody who may write into the directory may invent one."""
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS, ())
    mirror.take(model.write(), 0.0)
    assert mirror.counts().names == len(KEYS)
    assert not any(mirror.holders(names_of(KEYS), 8))
    (host,) = mirror.begin_repairs(1, 0.0)
    mirror.fail_repair(host, 0.0)
    assert not any(mirror.holders(names_of(KEYS), 8))
    assert mirror.begin_repairs(1, 0.1) == [], "and it is left alone for a while"


def test_who_takes_another_name_at_each_entry_is_not_asked_more_often_for_it() -> None:
    mirror = new_mirror()
    asked = 0
    for step in range(1000):
        model = HostModel(0)
        mirror.take(model.write(), step / 100)
        for host in mirror.begin_repairs(1, step / 100):
            asked += 1
            mirror.fail_repair(host, step / 100)
    assert asked <= 6  # in ten seconds: at 0, 0.5, 1.5, 3.5, 7.5
    assert mirror.counts().hosts == 1


@pytest.mark.parametrize("lies", ["more hosts", "more names"])
def test_memory_is_bounded_whatever_is_written(lies: str) -> None:
    mirror = new_mirror(max_names=100, max_hosts=4)
    if lies == "more hosts":
        for number in range(10):
            mirror.take(HostModel(number).write(), 0.0)
        assert mirror.counts().hosts == 4
    else:
        model = HostModel(0)
        for number in range(10):
            model.change(key_chain(40, branch=str(number)), ())
            mirror.take(model.write(), 0.0)
        assert mirror.counts().names <= 100 and mirror.counts().left_out == 1
        model.change((), list(model.held)[10:])
        mirror.take(model.write(), 0.0)
        (host,) = mirror.begin_repairs(1, 0.0)
        repair(mirror, host, model, 0.0)
        assert mirror.counts().names == 10 and mirror.counts().left_out == 0


@pytest.mark.parametrize(("one", "other"), [("kv-a.internal", "KV-A.internal"), ("[::1]", "[0::1%a]")])
def test_one_host_takes_no_more_than_its_places_however_it_spells_its_name(one: str, other: str) -> None:
    """A certificate is for a name, with any port."""
    mirror = new_mirror(max_hosts=40)

    def taken(id_: int, address: str, *, leaves: bool = False) -> int:
        mirror.take(Entry(VERSION, id_.to_bytes(16, "little"), address, 1, 0, bytes(8), leaves=leaves), 0.0)
        return mirror.counts().hosts

    for port in range(1, 41):
        taken(port, f"{one if port % 2 else other}:{port}")
    assert mirror.counts().hosts == MAX_OF_HOST
    assert taken(100, "kv-b.internal:9500") == MAX_OF_HOST + 1
    assert taken(101, f"{one}:1") == MAX_OF_HOST + 1  # it was restarted
    assert taken(101, f"{one}:1", leaves=True) == MAX_OF_HOST
    assert taken(102, f"{other}:99") == MAX_OF_HOST + 1
    mirror.expire(LEASE_S + 1)
    assert not mirror._of_host


def test_who_is_at_another_address_cannot_speak_for_a_host_or_end_it() -> None:
    mirror, model = new_mirror(), HostModel(0)
    model.change(key_chain(4), ())
    mirror.take(model.write(), 0.0)
    known = mirror.counts()
    elsewhere = Entry(VERSION, model.contents.id, "another:1", 99, 0, bytes(8))
    for entry in (elsewhere, msgspec.structs.replace(elsewhere, leaves=True)):
        mirror.take(entry, 0.1)
        assert mirror.counts() == known
    mirror.take(msgspec.structs.replace(elsewhere, address=model.address, leaves=True), 0.2)
    assert mirror.counts().hosts == 0


def test_of_a_host_left_out_during_its_repair_nothing_more_is_taken() -> None:
    """The names that it listed afterwards stayed for ever, because no entry of a host that is left out is applied."""
    model, mirror = HostModel(0), new_mirror(max_names=100)
    model.change(key_chain(150), ())
    mirror.take(Entry(VERSION, model.contents.id, model.address, 0, 0, bytes(8)), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    model.write()
    repair(mirror, host, model, 0.0, most=30)
    assert mirror.counts().left_out == 1
    assert mirror.counts().names == 0 and not any(mirror.holders(names_of(list(model.held)), 8))


def test_names_of_shards_that_were_not_asked_for_are_ignored() -> None:
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS, ())
    host = known(mirror, model)
    mirror.take(Entry(VERSION, host.id, model.address, 99, 0, bytes(8)), MAX_BACKOFF_S)
    (host,) = mirror.begin_repairs(1, MAX_BACKOFF_S)
    everything = names_of(KEYS)
    shard = int(everything[0] >> np.uint64(52))
    mirror.replace(host, 99, [shard], np.arange(1 << 20, dtype=np.uint64))
    kept = set(map(int, mirror.names_of(host.id)))
    assert kept >= {int(name) for name in everything if int(name) >> 52 != shard}
    assert all(name >> 52 == shard for name in kept - set(map(int, everything)))


def test_after_a_clear_only_hosts_that_were_cleared_later_are_believed() -> None:
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS, ())
    known(mirror, model)
    assert all(mirror.holders(names_of(KEYS), 8))
    mirror.cleared(50.0)
    assert not any(mirror.holders(names_of(KEYS), 8))
    (host,) = mirror.begin_repairs(1, 50.0)
    repair(mirror, host, model, 50.0)
    assert not any(mirror.holders(names_of(KEYS), 8)) and host.trust is Trust.DOUBTFUL
    model.cleared_s = 51.0
    (host,) = mirror.begin_repairs(1, 60.0)
    repair(mirror, host, model, 60.0)
    assert all(mirror.holders(names_of(KEYS), 8))


def test_a_report_waits_for_nobody_who_changes_the_table() -> None:
    """Rebuilding one of ten million names takes a second, and a server reports on the thread that answers engines."""
    model, mirror = HostModel(0), new_mirror()
    model.change(KEYS[:5], [])
    mirror.take(model.write(), 0.0)
    (host,) = mirror.begin_repairs(1, 0.0)
    assert repair(mirror, host, model, 0.0)
    reported: list[tuple[int, ...]] = []

    def report() -> None:
        counts = mirror.counts()
        reported.append((counts.hosts, counts.exact, counts.names, mirror.nbytes - host.sums.nbytes))

    reporting = threading.Thread(target=report, daemon=True)
    with mirror._lock:
        reporting.start()
        joined(reporting, within_s=10)
    assert reported == [(1, 1, 5, mirror._table.nbytes)]
