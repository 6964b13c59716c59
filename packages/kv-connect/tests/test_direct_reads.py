"""Hits that an engine reads in a tier's files itself: leased while they are read, and never used once forgotten."""

import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_connect.engine import Engine, EngineFacts
from kv_connect.halves.direct_reads import DirectReads
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StepPlan
from kv_connect.halves.worker import WorkerHalf
from kv_connect.neighbours import StoredFormat
from kv_connect.nodes import ALONE
from kv_connect.open_cache import Format
from kv_core.cost import Costs
from kv_core.coverage import Coverage
from kv_core.device import LayerwiseCopier
from kv_core.errors import ConfigError
from kv_core.hashing import ChainScheme, checksum_of
from kv_core.keys import ChunkKey, KeySpace
from kv_core.outcome import Damaged, Loaded, LoadOutcome, ReadFailed
from kv_core.service import Ended, LookupPlan
from kv_core.shape import ConnectShape, GroupShape
from kv_core.testing import key_chain
from kv_core.transfer import FileExtent
from kv_testing.wait import until
from kv_tiers import HostConfig, LocalCache, build_local_cache
from kv_tiers.lanes.jobs import Arrival
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.settings import load
from kv_tiers.testing.tier_contract import content
from kv_tiers.tier import TierContext
from kv_tiers.tiers.disk import bytes_for

CHUNK, BLOCK = 4, 2
NBYTES = 5000
CONTEXT = TierContext(NBYTES, slot_bytes_for(NBYTES), "f")
KEYS = key_chain(4)
SPACE = KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}")
SHAPE = ConnectShape(ChainScheme(chunk_tokens=CHUNK), SPACE, (GroupShape(BLOCK),))


@dataclass
class Read:
    """One that ends when the test says so."""

    outcomes: Sequence[LoadOutcome] = ()
    seconds: float = 0.1
    ended: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        assert self.ended.wait(10)

    hold_engine = wait


class Reader:
    """Reads into `blocks`, by the number of the chunk's first block."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.blocks: dict[int, bytes] = {}
        self.asked: list[tuple[int, int]] = []
        self.fails = False
        self.waits = False
        self._begun: list[Any] = []

    def read(
        self,
        files: Sequence[FileExtent],
        block_ids: Sequence[int],
        *,
        block_tokens: int,
        first_token: int,
        last_token: int,
    ) -> Read:
        read = Read()
        self.reads.append(read)
        self.asked.append((first_token, last_token))

        def run() -> None:
            outcomes: list[LoadOutcome] = []
            for chunk, file in enumerate(files, first_token // CHUNK):
                data = bytes_at(file)
                if self.fails:
                    outcomes.append(ReadFailed("the device is broken"))
                elif checksum_of(memoryview(data)) != file.checksum:
                    outcomes.append(Damaged("its bytes are wrong"))
                else:
                    self.blocks[block_ids[chunk * CHUNK // block_tokens]] = data
                    outcomes.append(Loaded(len(data)))
            read.outcomes = outcomes
            read.ended.set()

        self._begun.append(run)
        if not self.waits:
            self.complete()
        return read

    def complete(self) -> None:
        begun, self._begun = self._begun, []
        for run in begun:
            run()

    def close(self) -> None:
        self.complete()


def bytes_at(extent: FileExtent) -> bytes:
    with Path(extent.path).open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)


class Box:
    """A cache over a tier of type `gds` of six chunks."""

    def __init__(self, root: Path, *more: dict[str, Any]) -> None:
        self.reader = Reader()
        self.direct = DirectReads("gds", self.reader)
        tier = {"type": "gds", "directory": str(root / "kv"), "capacity_bytes": bytes_for(CONTEXT, 6), "wait_s": 0}
        self.cache: LocalCache = build_local_cache(
            HostConfig(capacity_bytes=8 * CONTEXT.slot_bytes),
            group_bytes=(NBYTES,),
            fingerprint="f",
            tiers=[tier, *more],
            extensions=[self.direct],
        )
        self.files: Any = self.direct._files

    def store(self, keys: Sequence[ChunkKey]) -> None:
        """One by one, as each needs a slot of the pool."""
        for end in range(1, len(keys) + 1):
            lease = self.cache.begin_store(keys[:end], "writer")
            for key, extent in zip(lease.keys, lease.extents, strict=True):
                self.cache.pool.view[extent.offset : extent.offset + NBYTES] = content(key, NBYTES)
            self.cache.commit(lease)
            self.cache.lower.drain(10)

    def empty_the_pool(self) -> None:
        host, index = self.cache._host, self.cache._index
        with host.lock:
            for slot in range(host.pool.slots):
                if index.key_at(slot) is not None and not index.is_leased(slot):
                    host.evict(slot)
                    host.free([slot])

    def look_up(self, keys: Sequence[ChunkKey], holder: str = "h", **options: Any) -> LookupPlan:
        asks = {"wait_for_promotion": True, "reads_files": True, **options}
        while (plan := self.cache.lookup(keys, holder, **asks)).ended is Ended.PENDING:
            pass
        return plan

    def at_rest(self) -> None:
        until(lambda: not self.files._leases and not self.files._index._reading)
        assert self.direct._leased == {}
        counts = self.cache.counts()
        assert counts.read_leases == counts.write_leases == 0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.at_rest()
    made.cache.close()


def in_files(plan: LookupPlan) -> list[bytes]:
    return [bytes_at(extent) for extent in plan.files]


def test_what_follows_the_hit_in_the_pool_is_leased_in_the_files(box: Box) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    plan = box.look_up(KEYS)
    assert (plan.chunks, plan.tiers, plan.ended) == (4, ("gds",) * 4, Ended.ALL_HELD)
    assert in_files(plan) == [content(key, NBYTES) for key in KEYS]
    assert [extent.checksum for extent in plan.files] == [checksum_of(memoryview(data)) for data in in_files(plan)]
    counts = box.cache.counts()
    assert (counts.chunks_resident, counts.chunks_hit) == (0, 4)
    assert box.cache.renew("h")
    box.cache.end("h")
    assert not box.cache.renew("h")


def test_a_hit_may_begin_in_the_pool(box: Box) -> None:
    box.store(KEYS[:2])
    box.empty_the_pool()
    lease = box.cache.begin_store(KEYS[:1], "w", hold_s=60)  # what another engine waits for goes to the pool even so
    assert lease.keys == (KEYS[0],)
    box.cache.commit(lease)
    plan = box.look_up([*KEYS[:2], *key_chain(1, branch="new")])
    assert (plan.chunks, plan.tiers, len(plan.files), plan.ended) == (2, ("host", "gds"), 1, Ended.ABSENT)
    box.cache.end("h")


def test_what_was_read_in_the_files_takes_no_slot_again(box: Box) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    lease = box.cache.begin_store(KEYS, "w")
    assert lease.keys == tuple(KEYS), "as long as nobody reads it there, which may not pay"
    box.cache.release(lease)
    plan = box.look_up(KEYS)
    read = box.reader.read(plan.files, [0] * 8, block_tokens=BLOCK, first_token=0, last_token=16)
    assert box.direct.has_read("h", KEYS, read) == ("", [])
    box.cache.end("h")
    lease = box.cache.begin_store([*KEYS, *key_chain(1, branch="new")], "w")
    assert lease.keys == tuple(key_chain(1, branch="new"))
    box.cache.release(lease)
    lease = box.cache.begin_store(KEYS, "w", tiers=())
    assert lease.keys, "a request that may not read the tier finds only what is in the pool"
    box.cache.release(lease)


def test_nothing_is_evicted_or_overwritten_while_it_is_leased(box: Box) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    plan = box.look_up(KEYS)
    for branch in ("a", "b", "c"):
        box.store(key_chain(4, branch=branch))
        assert in_files(plan) == [content(key, NBYTES) for key in KEYS]
    box.cache.end("h")
    until(lambda: not box.files._leases)
    box.store(key_chain(4, branch="d"))
    box.store(key_chain(4, branch="e"))
    assert not all(box.files.holds(KEYS))


@pytest.mark.parametrize("how", ["forget", "clear", "clear_tenant"])
def test_what_is_forgotten_keeps_its_bytes_and_is_void(box: Box, how: str) -> None:
    """Even if the same key is stored again meanwhile: what is there now was not what was leased."""
    box.store(KEYS)
    box.empty_the_pool()
    plan = box.look_up(KEYS)
    if how == "forget":
        box.cache.forget(KEYS[2:3])
    elif how == "clear":
        box.cache.clear()
    else:
        box.cache.admin.clear_tenant(KEYS[0].tenant)
    box.cache.lower.drain(10)
    box.store(KEYS)
    assert in_files(plan) == [content(key, NBYTES) for key in KEYS]
    assert not box.cache.renew("h")
    assert box.look_up(KEYS).chunks == 4
    assert box.cache.renew("h")
    box.cache.end("h")


def test_what_is_forgotten_just_before_it_is_leased_is_not_found(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier has it until its lane comes to discard it."""
    box.store(KEYS)
    box.empty_the_pool()
    lane, holds, discard = box.direct._lane, box.direct._lane.holds, box.files.discard
    may_discard = threading.Event()
    monkeypatch.setattr(box.files, "discard", lambda keys: may_discard.wait(60) and discard(keys))

    def then_forget(keys: Sequence[ChunkKey]) -> list[bool]:
        held = holds(keys)
        monkeypatch.setattr(lane, "holds", holds)
        box.cache.forget(KEYS[1:2])
        return held

    monkeypatch.setattr(lane, "holds", then_forget)
    plan = box.look_up(KEYS)
    may_discard.set()
    assert KEYS[1] not in KEYS[: plan.chunks]
    box.cache.end("h")


def test_a_request_that_may_not_read_the_tier_does_not(box: Box) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    assert box.look_up(KEYS, tiers=()).chunks == 0
    assert box.cache.lookup(KEYS, "h").chunks == 0, "without promotion nothing below the pool is used"


def test_whoever_does_not_read_files_has_chunks_promoted(box: Box) -> None:
    """As blending and `warm` do."""
    box.store(KEYS)
    box.empty_the_pool()
    plan = box.look_up(KEYS, reads_files=False)
    assert (plan.chunks, plan.files, plan.tiers) == (4, (), ("gds",) * 4)
    box.cache.end("h")


def test_a_read_that_does_not_pay_is_not_begun(box: Box) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    lane = box.direct._lane
    for _ in range(8):
        lane.was_read([Arrival(key, Loaded(NBYTES)) for key in KEYS], 4 * NBYTES, 0.5)
    slow = box.look_up(KEYS, costs=Costs(compute=(0.001, 0.0), load=(0.0, 0.0)))
    assert (slow.chunks, slow.files) == (0, ())
    box.cache.end("h")
    quick = box.look_up(KEYS, costs=Costs(compute=(10.0, 0.0), load=(0.0, 0.0)))
    assert quick.chunks == 4 and quick.files, "unless the lookup before had some promoted to measure the tier again"
    assert quick.choice is not None and quick.choice.chunks == 4
    box.cache.end("h")


def test_other_tiers_may_have_more_so_an_early_end_is_promoted(tmp_path: Path) -> None:
    """What both hold together is found as ever; what ends with the prompt is read in the files."""
    box = Box(tmp_path, {"type": "dram", "capacity_bytes": "1MiB"})
    box.store(KEYS[:3])
    box.empty_the_pool()
    plan = box.look_up(KEYS[:3])
    assert len(plan.files) == 3
    box.cache.end("h")
    box.cache.lower.lanes[0].discard(KEYS[2:3])
    box.cache.lower.drain(10)
    plan = box.look_up(KEYS[:3])
    assert (plan.chunks, plan.files, plan.tiers) == (3, (), ("gds", "gds", "dram"))
    box.cache.end("h")
    box.at_rest()
    box.cache.close()


def test_a_medium_that_does_not_answer_is_not_waited_for(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.store(KEYS)
    box.empty_the_pool()
    answers, lease_extents = threading.Event(), box.files.lease_extents

    def late(keys: Sequence[ChunkKey]) -> Any:
        assert answers.wait(60)
        return lease_extents(keys)

    monkeypatch.setattr(box.files, "lease_extents", late)
    assert box.cache.lookup(KEYS, "h", wait_for_promotion=True, reads_files=True).ended is Ended.PENDING
    monkeypatch.setattr("kv_connect.halves.direct_reads._LEASE_S", 0.0)
    plan = box.look_up(KEYS)
    assert plan.files == ()  # promoted, as far as the pool has room
    box.cache.end("h")
    answers.set()


def test_a_cache_that_is_closed_meanwhile_waits_for_the_read_and_ends_its_leases(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.store(KEYS)
    box.empty_the_pool()
    assert box.look_up(KEYS).files
    box.cache.close()
    assert box.files._leases == {}


# Both halves.


class Halves:
    """An engine over a box, for one request at a time."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.scheduler = SchedulerHalf(box.cache, SHAPE, name="e")
        self.worker = WorkerHalf(box.cache, SHAPE, [Copier()], shard=0, name="e", direct=box.direct)  # type: ignore[list-item]

    def keys(self, tokens: list[int]) -> list[ChunkKey]:
        scheduler = SchedulerHalf(self.box.cache, SHAPE, name="keys")
        tracked = scheduler._track(request := wanted(tokens))
        return scheduler._prompt_keys(request, tracked)

    def begin(self, tokens: list[int], computed_tokens: int = 0) -> int:
        """The tokens found, for which the load has begun."""
        request = wanted(tokens)
        while (found := self.scheduler.match(request, computed_tokens)) is None:
            pass
        blocks = tuple(range(-(-len(tokens) // BLOCK)))
        self.scheduler.allocated("r", found, (blocks,) if found else ())
        plan = self.scheduler.build_step([Scheduled(request, 0, (blocks,))])
        self.worker.start_loads(StepPlan.from_plain(plan.to_plain()))
        return found

    def end(self) -> bool:
        """Whether the load ended well."""
        report = self.worker.poll()
        assert report.finished == {"r"}
        self.scheduler.loads_ended(report.finished, report.failed)
        self.scheduler.finished("r")
        return not report.failed


class Copier(LayerwiseCopier):
    """Of what is in the pool, which is of no interest here."""

    is_queued = False
    stores_behind = False

    def load(self, plan: Any) -> Read:
        read = Read()
        read.ended.set()
        return read


def wanted(tokens: list[int]) -> RequestTokens:
    return RequestTokens("r", tokens, keep_tokens=len(tokens))


TOKENS = list(range(4 * CHUNK + 1))


@pytest.fixture
def halves(box: Box) -> Halves:
    made = Halves(box)
    box.store(made.keys(TOKENS))
    box.empty_the_pool()
    return made


def test_a_load_is_read_in_files_and_its_lease_ends(halves: Halves, box: Box) -> None:
    assert halves.begin(TOKENS) == 16
    assert box.files._leases
    assert halves.end()
    assert box.reader.blocks == {number * 2: content(key, NBYTES) for number, key in enumerate(halves.keys(TOKENS))}
    assert halves.worker.counts.loaded_file_bytes == 4 * NBYTES
    assert (halves.worker.counts.loaded_bytes, halves.worker.counts.loaded_tokens) == (0, 16)
    assert halves.scheduler.counts.tokens_by_tier == {"gds": 16}
    assert box.direct._lane.counts().loaded == 4


def test_a_load_of_pool_and_files_takes_each_part_where_it_is(halves: Halves, box: Box) -> None:
    lease = box.cache.begin_store(halves.keys(TOKENS)[:1], "w", hold_s=60)
    box.cache.commit(lease)
    assert halves.begin(TOKENS) == 16
    assert box.reader.asked == [(CHUNK, 4 * CHUNK)]
    assert halves.end()
    assert halves.worker.counts.loaded_bytes == NBYTES
    assert halves.worker.counts.loaded_file_bytes == 3 * NBYTES
    assert halves.worker.counts.loaded_tokens == 16


def test_what_the_engine_has_itself_is_not_read(halves: Halves, box: Box) -> None:
    assert halves.begin(TOKENS, computed_tokens=6) == 10
    assert box.reader.asked == [(6, 16)], "from the middle of a chunk on"
    assert halves.end()
    assert halves.worker.counts.loaded_file_bytes == 3 * NBYTES


def test_what_is_damaged_is_forgotten_and_the_request_computed(halves: Halves, box: Box) -> None:
    keys = halves.keys(TOKENS)
    (extent,) = box.look_up(keys).files[1:2]
    box.cache.end("h")
    with Path(extent.path).open("r+b") as file:
        file.seek(extent.offset + 77)
        file.write(b"!!")
    assert halves.begin(TOKENS) == 16
    assert not halves.end()
    box.cache.lower.drain(10)
    assert box.files.holds(keys) == [True, False, True, True]
    assert box.direct._lane.counts().damaged == 1
    assert halves.begin(TOKENS) == 4
    assert halves.end()


def test_what_cannot_be_read_is_kept_passed_over_and_the_tier_is_down(halves: Halves, box: Box) -> None:
    keys, lane = halves.keys(TOKENS), box.direct._lane
    box.reader.fails = True
    assert halves.begin(TOKENS) == 16
    assert not halves.end()
    until(lambda: not box.files._leases)
    assert (lane.counts().read_failed, lane.counts().downs) == (4, 1)
    assert box.files.usage().chunks == 4
    until(lambda: lane.health()[0].name == "UP")
    assert halves.begin(TOKENS) == 0, "for a while"
    halves.scheduler.finished("r")
    assert box.files.holds(keys) == [False] * 4


def test_what_is_forgotten_while_it_is_read_is_not_delivered(halves: Halves, box: Box) -> None:
    box.reader.waits = True
    assert halves.begin(TOKENS) == 16
    box.cache.forget(halves.keys(TOKENS)[3:])
    assert halves.worker.poll().finished == frozenset()
    box.reader.complete()
    assert not halves.end()


def test_files_of_a_request_that_is_aborted_stay_leased_until_they_have_been_read(halves: Halves, box: Box) -> None:
    box.reader.waits = True
    assert halves.begin(TOKENS) == 16
    halves.scheduler.finished("r")
    assert box.direct._leased and box.files._leases
    box.reader.complete()
    report = halves.worker.poll()
    halves.scheduler.loads_ended(report.finished, report.failed)
    assert halves.scheduler.tracked_phases() == {}


def test_a_read_that_raises_fails_its_load_alone(halves: Halves, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_testing.connect import Failed

    monkeypatch.setattr(box.reader, "read", lambda *_, **__: Failed())
    assert halves.begin(TOKENS) == 16
    assert not halves.end()
    assert box.files.holds(halves.keys(TOKENS)) == [True] * 4


# Which engines may.


FACTS = EngineFacts(256, (GroupShape(16),), 1, "float32", "", ("canonical",), ("paged",))


class Binding:
    is_queued = stores_behind = False

    def attach(self, *_: Any) -> None: ...

    def detach(self, *_: Any) -> None: ...


def bound(root: Path, facts: EngineFacts, *, in_process: bool = True, **options: Any) -> Engine:
    tiers = [{"type": "gds", "directory": str(root / "kv"), "capacity_bytes": "64MiB", **options}]
    settings, _ = load({"host": {"capacity_bytes": "1MiB"}, "tiers": tiers}, {})
    engine = Engine(uuid.uuid4().hex)
    chunks = Format((NBYTES,) * len(facts.groups), "f")
    copiers: Any = [Binding() for _ in facts.groups]
    engine.bind_worker(
        settings,
        facts,
        chunks,
        StoredFormat("vllm", "m", "canonical", "f"),
        copiers,
        share=ALONE,
        in_process=in_process,
        make_reader=Reader,
    )
    engine.start_worker(step_tokens=256)
    return engine


@pytest.mark.parametrize(
    ("facts", "options", "why"),
    [
        (FACTS, {"codec": "zlib"}, "neither codec nor approximate"),
        (replace(FACTS, formats=("int8",)), {}, "is for exact chunks, not for format int8; write type: disk"),
        (
            replace(FACTS, groups=FACTS.groups * 2, formats=FACTS.formats * 2),
            {},
            "one group that needs the whole prefix",
        ),
        (
            replace(FACTS, groups=(GroupShape(16, Coverage.parse("window:512")),)),
            {},
            "one group that needs the whole prefix",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path, facts: EngineFacts, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        bound(tmp_path, facts, **options)


def test_an_engine_of_one_process_reads_files(tmp_path: Path) -> None:
    engine = bound(tmp_path, FACTS)
    assert engine.direct is not None and engine.direct.tier == "gds"
    assert engine.release("WORKER")


def test_an_engine_of_several_processes_promotes_through_the_pool_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = bound(tmp_path, FACTS, in_process=False)
    assert engine.direct is None and engine.off == ""
    assert engine.cache is not None and engine.cache.tiers == ("host", "gds")
    assert "does not cross the socket" in caplog.text
    assert engine.release("WORKER")


# Any order.


CHAINS = [key_chain(4, branch=str(number)) for number in range(3)]
chains = st.sampled_from(CHAINS)
lengths = st.integers(1, 4)
holders = st.sampled_from(["a", "b"])


@dataclass
class Promised:
    plan: LookupPlan
    keys: list[ChunkKey]
    is_void: bool = False


class Leases(RuleBasedStateMachine):
    """Under any order of events the bytes of a lease stay, and none is used once its chunk was forgotten. A tier of six
    chunks, under chains of twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.box = Box(self.root)
        self.promised: dict[str, Promised] = {}
        self.store(CHAINS[0], 4, is_evicted=True)

    @rule(chain=chains, length=lengths, is_evicted=st.sampled_from([True, True, False]))
    def store(self, chain: list[ChunkKey], length: int, is_evicted: bool) -> None:
        self.box.store(chain[:length])
        if is_evicted:
            self.box.empty_the_pool()

    @rule(chain=chains, length=lengths, holder=holders, reads_files=st.sampled_from([True, True, False]))
    def look_up(self, chain: list[ChunkKey], length: int, holder: str, reads_files: bool) -> None:
        plan = self.box.look_up(chain[:length], holder, reads_files=reads_files)
        assert reads_files or not plan.files
        self.promised[holder] = Promised(plan, chain[: plan.chunks])

    @rule(chain=chains, at=st.integers(0, 3))
    def forget(self, chain: list[ChunkKey], at: int) -> None:
        self.box.cache.forget([chain[at]])
        for promised in self.promised.values():
            promised.is_void = promised.is_void or chain[at] in promised.keys

    @rule()
    def clear(self) -> None:
        self.box.cache.clear()
        for promised in self.promised.values():
            promised.is_void = True

    @rule(holder=holders)
    def end(self, holder: str) -> None:
        self.box.cache.end(holder)
        self.promised.pop(holder, None)

    @invariant()
    def bytes_stay_and_what_was_forgotten_is_void(self) -> None:
        for holder, promised in self.promised.items():
            files, in_files = promised.plan.files, promised.keys[len(promised.keys) - len(promised.plan.files) :]
            for key, extent in zip(in_files, files, strict=True):
                data = bytes_at(extent)
                assert data == content(key, NBYTES)
                assert extent.checksum == checksum_of(memoryview(data))
            assert self.box.cache.renew(holder) == (bool(promised.keys) and not promised.is_void)

    def teardown(self) -> None:
        for holder in list(self.promised):
            self.box.cache.end(holder)
        self.box.at_rest()
        self.box.cache.close()
        shutil.rmtree(self.root)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
