"""What is cleared or forgotten while it is being copied to a device is not delivered: its lease fails when it ends.

A device copies while the engine goes on, so the copies here take as long as the test lets them.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.worker import WorkerHalf
from kv_core.device import LayerwiseCopier
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.service import CacheService, Ended, ReadLease
from kv_core.shape import ConnectShape, GroupShape
from kv_core.testing import key_chain
from kv_core.transfer import TransferPlan
from kv_server import RemoteCache, ServerConfig
from kv_server.server import CacheServer
from kv_testing.tower import Tower
from kv_testing.wait import joined
from kv_tiers import HostConfig, LocalCache, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import content

CHUNK = 4
BLOCK = 2
TOKEN_BYTES = 16
CHUNK_BYTES = CHUNK * TOKEN_BYTES
SHAPE = ConnectShape(
    ChainScheme(chunk_tokens=CHUNK), KeySpace("model", "r1", "float32", "f", 1, f"sha256:{CHUNK}"), (GroupShape(BLOCK),)
)
HOST = HostConfig(capacity_bytes=8 * slot_bytes_for(CHUNK_BYTES))


@dataclass
class Copy:
    """One that is under way until `complete`: only then are its bytes on the other side."""

    move: Callable[[], None]
    arrived: threading.Event = field(default_factory=threading.Event)

    def complete(self) -> None:
        self.move()
        self.arrived.set()

    def done(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> None:
        self.complete()


class SlowDevice(LayerwiseCopier):
    """A device of 64 slots of a token each, and the copies to it that are under way."""

    def __init__(self, service: CacheService, view: memoryview) -> None:
        self.service, self.view = service, view
        self.slots = bytearray(64 * TOKEN_BYTES)
        self.under_way: list[Copy] = []

    def attach(self, pool: str, view: memoryview) -> None:
        self.view = view

    def load(self, plan: TransferPlan) -> Copy:
        copy = Copy(lambda: self._move(plan, to_device=True))
        self.under_way.append(copy)
        return copy

    def store(self, plan: TransferPlan) -> Copy:
        return Copy(lambda: self._move(plan, to_device=False))

    def _move(self, plan: TransferPlan, *, to_device: bool) -> None:
        for one in plan.copies:
            host = one.extent.offset + one.first_token * TOKEN_BYTES
            nbytes, device = one.tokens * TOKEN_BYTES, one.first_slot * TOKEN_BYTES
            if to_device:
                self.slots[device : device + nbytes] = self.view[host : host + nbytes]
            else:
                self.view[host : host + nbytes] = self.slots[device : device + nbytes]


@dataclass
class Engine:
    """Both halves over one cache. behind: the cache that has the chunks, here or at the server."""

    service: CacheService
    behind: LocalCache
    device: SlowDevice
    scheduler: SchedulerHalf
    worker: WorkerHalf

    def store(self, tokens: list[int]) -> None:
        """As a request that computes these does."""
        request = RequestTokens("first", tokens, keep_tokens=len(tokens))
        blocks = (list(range(len(tokens) // BLOCK)),)
        assert self.scheduler.match(request, 0) == 0
        self.scheduler.allocated("first", 0, blocks)
        self.device.slots[:] = bytes(range(256)) * (len(self.device.slots) // 256)
        plan = self.scheduler.build_step([Scheduled(request, len(tokens), blocks)])
        self.worker.stores.start(plan)
        self.worker.stores.finish()
        self.scheduler.finished("first")

    def begin_load(self, tokens: list[int]) -> Copy:
        """A request that loads all but its last token, whose copy is under way now."""
        request = RequestTokens("second", [*tokens, 99], keep_tokens=len(tokens))
        offered = self.scheduler.match(request, 0)
        assert offered == len(tokens)
        self.scheduler.allocated("second", offered, ([20, 21, 22, 23, 24],))
        self.worker.start_loads(self.scheduler.build_step([]))
        (copy,) = self.device.under_way
        return copy


@pytest.fixture(params=["in process", "at a server"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ExitStack() as stack:
        service: LocalCache | RemoteCache
        if request.param == "in process":
            service = behind = build_local_cache(HOST, group_bytes=(CHUNK_BYTES,), fingerprint="f")
        else:
            home = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))
            server = CacheServer(ServerConfig(host=HOST, socket=str(Path(home) / "s")))
            thread = threading.Thread(target=server.serve)
            thread.start()
            stack.callback(joined, thread)
            stack.callback(server.stop)
            service = RemoteCache(Path(home) / "s", group_bytes=(CHUNK_BYTES,), fingerprint="f", timeout_s=10)
            (behind,) = server.caches.values()
        stack.callback(service.close)
        device = SlowDevice(service, service.pool.view)
        scheduler = SchedulerHalf(service, SHAPE, name="e")
        worker = WorkerHalf(service, SHAPE, [device], shard=0, name="e")
        yield Engine(service, behind, device, scheduler, worker)


TOKENS = list(range(8))


def test_a_load_that_nothing_disturbs_is_delivered(engine: Engine) -> None:
    engine.store(TOKENS)
    copy = engine.begin_load(TOKENS)
    assert engine.worker.poll().finished == frozenset()
    copy.complete()
    report = engine.worker.poll()
    assert (report.finished, report.failed) == ({"second"}, frozenset())


def test_a_reset_while_a_load_is_copying_fails_the_load(engine: Engine) -> None:
    engine.store(TOKENS)
    copy = engine.begin_load(TOKENS)
    engine.scheduler.reset()
    engine.worker.start_loads(engine.scheduler.build_step([]))  # plans arrive in order: the next one is empty
    assert engine.worker.poll().finished == frozenset()
    copy.complete()
    report = engine.worker.poll()
    assert (report.finished, report.failed) == ({"second"}, {"second"})
    assert engine.worker.counts.loaded_tokens == 0
    engine.scheduler.loads_ended(report.finished, report.failed)
    assert engine.scheduler.match(RequestTokens("second", [*TOKENS, 99], keep_tokens=8), 0) == 0  # to be computed
    engine.scheduler.finished("second")
    counts = engine.service.counts()
    assert (counts.read_leases, counts.slots_used) == (0, 0)


def test_what_others_forget_while_it_is_copied_fails_the_load(engine: Engine) -> None:
    """Another engine on the same cache, or somebody over HTTP."""
    engine.store(TOKENS)
    copy = engine.begin_load(TOKENS)
    engine.behind.forget(engine.behind.admin.resident_keys()[-1:])
    copy.complete()
    assert engine.worker.poll().failed == {"second"}


def test_chunks_stored_anew_since_do_not_make_an_old_lease_good(engine: Engine) -> None:
    engine.store(TOKENS)
    copy = engine.begin_load(TOKENS)
    engine.scheduler.reset()
    engine.store(TOKENS)
    copy.complete()
    assert engine.worker.poll().failed == {"second"}


def test_a_promise_of_cleared_chunks_is_not_renewed(engine: Engine) -> None:
    """So the engine is not offered what could only fail."""
    engine.store(TOKENS)
    asked = RequestTokens("second", [*TOKENS, 99], keep_tokens=8)
    assert engine.scheduler.match(asked, 0) == 8
    engine.behind.clear()
    assert engine.scheduler.match(asked, 0) == 0
    engine.scheduler.finished("second")


def test_a_pin_ends_for_what_is_cleared(engine: Engine) -> None:
    engine.store(TOKENS)
    keys = engine.behind.admin.resident_keys()
    assert engine.behind.admin.pin(keys, "system") == 2
    engine.behind.forget(keys[1:])
    assert engine.behind.admin.pins() == {"system": 1}
    engine.behind.clear()
    assert engine.behind.admin.pins() == {}
    assert engine.behind.counts().slots_used == 0  # nobody reads it, so its room is free


KEYS = key_chain(4)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("all_of_it", [False, True])
def test_what_was_asked_for_below_before_it_was_forgotten_does_not_come_up_after(far: bool, all_of_it: bool) -> None:
    """The tier was asked and has said that it has them; the load that follows from it must not bring them back."""
    tower = Tower("through", slots=8, remote=[far])
    tower.store_below(KEYS)
    forget = tower.cache.clear if all_of_it else (lambda: tower.cache.forget(KEYS))
    real = tower.cache.lower.promotions._start

    def start(promotion: object, runs: object) -> bool:
        forget()  # between the answer and the load
        return real(promotion, runs)  # type: ignore[arg-type]

    tower.cache.lower.promotions._start = start  # type: ignore[method-assign]
    plans = []
    for _ in range(4):
        plans.append(tower.ask(KEYS))
        tower.run()
    tower.cache.lower.promotions._start = real  # type: ignore[method-assign]
    assert plans[-1].chunks == 0 and plans[-1].ended is not Ended.PENDING
    assert not set(KEYS) & set(tower.cache.admin.resident_keys())
    tower.close()


def test_a_lease_that_was_released_as_good_before_the_reset_stays_good() -> None:
    tower = Tower("through")
    tower.store(KEYS)
    lease = tower.cache.load(KEYS, "l")
    assert isinstance(lease, ReadLease)
    for key, extent in zip(KEYS, lease.extents, strict=True):
        with tower.cache.pool.view[extent.offset : extent.offset + extent.nbytes] as chunk:
            assert bytes(chunk) == content(key, extent.nbytes)
    assert tower.cache.release(lease)
    tower.cache.clear()
    tower.close()
