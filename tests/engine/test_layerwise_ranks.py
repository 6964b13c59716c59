"""Layerwise loads of two ranks in processes of their own, under vLLM's real schedulers: what is promised is there for
each of them, whatever becomes of the server, of a connection, of a copy and of either half."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_connect.halves.worker import WorkerHalf
from kv_connect.pools import RankPools
from kv_core.errors import ConfigError, CopyFailed, InputError
from kv_core.service import Ended
from kv_core.testing import key_chain
from kv_cuda import CpuCopier
from kv_server.process import ServerProcess, launch
from kv_server.remote_cache import RemoteCache
from kv_testing.cache_servers import lose
from kv_testing.connect import QueuedCopier, QueuedCopy
from kv_testing.wait import until
from oracle_of_ranks import OracleOfRanks
from slow_device import SlowDevice, slow_device
from test_layerwise import SCHEDULERS, SHARED, between_promise_and_copy

POOL: dict[str, Any] = {"host": {"capacity_bytes": 4 << 20}}
PROMPT = [*SHARED[:330], 9]


class Ranks:
    """Two ranks and their scheduler on a slow device, at a server that can be killed."""

    def __init__(self, model: str, home: Path, device: SlowDevice, **options: Any) -> None:
        self.device = device
        self.server = launch(POOL, socket=home / "private" / "s")
        server = {"socket": str(self.server.socket), "answer_s": 20}
        self.oracle = OracleOfRanks(model, **{"load": "layerwise", "host": {}, "server": server} | options)

    def rest(self, happens: Callable[[], object] = lambda: None) -> None:
        """Go on until everything has ended, as the device makes its copies. happens: in the next step, after the
        scheduler has promised and before the ranks begin."""
        between_promise_and_copy(self.oracle, happens)
        for _ in range(2000):
            if not self.oracle.scheduler.has_requests() and not self.oracle._pending:
                break
            self.oracle.step()
            self.device.queue.run(len(self.device.queue.pending))
        self.oracle.drain()

    def fill(self) -> None:
        """The cache holds the first 384 tokens of SHARED, and the ranks have it ready."""
        name = f"first {len(self.oracle.generated)}"
        self.oracle.submit(name, SHARED, 2)
        self.rest()
        self.oracle.make_ready()
        self.rest()
        self.oracle.assert_at_rest()

    def is_right(self, name: str, tokens: int = 3) -> bool:
        return self.oracle.generated[name] == self.oracle.expected_tokens(name, len(PROMPT), tokens)

    def kill_server(self) -> ServerProcess:
        """And start another at the same place."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        self.server = launch(POOL, socket=self.server.socket)
        return self.server

    def close(self) -> None:
        self.oracle.close(drain=False)
        self.server.stop()


@contextmanager
def started(model: str, home: Path, **options: Any) -> Iterator[Ranks]:
    with slow_device(layerwise=True) as device:
        ranks = Ranks(model, home, device, **options)
        try:
            ranks.fill()
            yield ranks
        finally:
            ranks.close()


def meets(cache: RemoteCache) -> None:
    """It notices that its server is another, and comes to that."""
    until(lambda: cache.lookup([], "notices").ended is Ended.ALL_HELD)


@SCHEDULERS
def test_each_rank_fills_its_blocks_in_the_step(tiny_llama: str, tmp_path: Path, asynchronous: bool) -> None:
    with started(tiny_llama, tmp_path, asynchronous=asynchronous, batch_tokens=200) as ranks:
        oracle = ranks.oracle
        for name in "abc":
            oracle.submit(name, PROMPT, 3)
        oracle.step()
        oracle.drain()
        assert [len(oracle.generated[name]) for name in "abc"] == [1, 1, 1]
        assert oracle.layerwise == 3 and oracle.loaded == 3 * 320
        ranks.rest()
        assert all(map(ranks.is_right, "abc"))
        oracle.assert_at_rest()


@SCHEDULERS
def test_no_block_is_held_for_workers_elsewhere_where_an_idle_engine_is_not_stepped(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in its caller's process is stepped as long as there are requests. Nobody would hear of a copy that ends
    later, and neither `sleep` nor a reset of vLLM's cache would ever succeed."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with slow_device(layerwise=True) as device:
        ranks = Ranks(tiny_llama, tmp_path, device, asynchronous=asynchronous)
        try:
            ranks.oracle.submit("a", SHARED, 2)
            while ranks.oracle.scheduler.has_unfinished_requests():
                ranks.oracle.step()
            ranks.oracle.drain()
            assert ranks.oracle.scheduler.reset_prefix_cache()
            assert [rank.engine.worker and rank.engine.worker.counts.chunks_stored for rank in ranks.oracle.ranks] == [
                6,
                6,
            ]
        finally:
            ranks.close()


@SCHEDULERS
@pytest.mark.parametrize("wrong", ["late", "another's"])
def test_the_oracle_sees_what_a_rank_copies_late_or_from_elsewhere(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        if wrong == "late":
            monkeypatch.setattr(QueuedCopy, "hold_engine", lambda self: None)
        else:
            monkeypatch.setattr(WorkerHalf, "_shard_extents", lambda self, extents: extents[:: self._shape.shards])
        ranks.oracle.submit("a", PROMPT, 3)
        with pytest.raises(AssertionError, match="wrong K"):
            ranks.oracle.run()


@SCHEDULERS
@pytest.mark.parametrize("who", ["one", *(pytest.param(who, marks=pytest.mark.slow) for who in ("nobody", "all"))])
def test_a_server_that_dies_between_promise_and_copy_takes_no_bytes_along(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, who: str
) -> None:
    """Ranks that have met its successor still copy from the pool that was promised, and let it go afterwards."""
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        meeting = {"nobody": [], "one": oracle.ranks[1:], "all": oracle.ranks}[who]
        oracle.submit("a", PROMPT, 3)

        def killed_and_back() -> None:
            ranks.kill_server()
            for rank in meeting:
                meets(rank.cache)
            assert oracle.cache.lookup([], "notices").ended is Ended.REFUSED

        ranks.rest(killed_and_back)
        assert oracle.layerwise == 1 and oracle.loaded == 320
        assert ranks.is_right("a")
        meets(oracle.cache)

        def all_are_there() -> bool:
            ranks.fill()  # with which ranks come to the new server; a busy machine needs more than one
            return [len(rank.engine.pools.ready) for rank in oracle.ranks if rank.engine.pools] == [1, 1]

        until(all_are_there, 60.0)
        ranks.fill()
        before = oracle.layerwise
        oracle.submit("b", PROMPT, 3)
        ranks.rest()
        assert oracle.layerwise == before + 1 and ranks.is_right("b")
        oracle.assert_at_rest()


@SCHEDULERS
def test_a_rank_that_lets_the_promised_pool_go_is_noticed(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: as it would be if a rank took its own server's word for which pool is in use."""
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        add = RankPools.add

        def add_alone(self: RankPools, pool: Any) -> None:
            add(self, pool)
            self._detach_before(pool.name)

        monkeypatch.setattr(RankPools, "add", add_alone)
        oracle.submit("a", PROMPT, 3)

        def killed_and_back() -> None:
            ranks.kill_server()
            meets(oracle.ranks[1].cache)

        with pytest.raises((CopyFailed, InputError), match=r"load: async|is not attached"):
            ranks.rest(killed_and_back)
        assert oracle.generated["a"] == []


@SCHEDULERS
def test_a_rank_that_is_behind_is_not_promised_to(tiny_llama: str, tmp_path: Path, asynchronous: bool) -> None:
    """The scheduler has met a new server, and found there what another engine has stored."""
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        before = oracle.layerwise
        ranks.kill_server()
        for cache in (oracle.cache, oracle.ranks[0].cache):
            meets(cache)
        promised = oracle.engine.ready
        assert promised is not None
        (extent,) = oracle.cache.begin_store(key_chain(1), "asks").extents
        oracle.cache.end("asks")
        assert not promised.have([extent])
        oracle.submit("a", PROMPT, 3)
        ranks.rest()
        assert ranks.is_right("a") and oracle.layerwise == before
        oracle.assert_at_rest()


@SCHEDULERS
@pytest.mark.parametrize("lasts", [True, False], ids=["", "control"])
def test_a_server_that_has_lost_the_scheduler_leaves_the_bytes_where_they_are(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lease for all ranks. With one that the server takes back, wrong bytes would be attended to."""
    load = RemoteCache.load
    if not lasts:
        monkeypatch.setattr(RemoteCache, "load", lambda self, *arguments, **_: load(self, *arguments))
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        cache = oracle.cache
        other = RemoteCache(cache.socket, group_bytes=cache._group_bytes, fingerprint=cache._fingerprint)
        slots = other.counts().slots_total
        oracle.submit("a", PROMPT, 3)

        def lost_and_replaced() -> None:
            lose(cache)
            until(lambda: other.counts().read_leases == (1 if lasts else 0))
            greedy = other.begin_store(key_chain(slots), "greedy")
            for extent in greedy.extents:
                other.pool.view[extent.offset :][: extent.nbytes] = bytes(extent.nbytes)
            other.commit(greedy)

        if not lasts:
            with pytest.raises(AssertionError, match="wrong K"):
                ranks.rest(lost_and_replaced)
            other.close()
            return
        ranks.rest(lost_and_replaced)
        assert oracle.layerwise == 1 and ranks.is_right("a")
        cache._link.back_off(0)
        until(lambda: cache.lookup([], "later").ended is Ended.ALL_HELD)
        until(lambda: other.counts().read_leases == 0)
        other.close()


def has_ended(ranks: Ranks, request_id: str) -> bool:
    """Whether the load of this request, which fails, ends the engine: with an asynchronous scheduler. Otherwise it is
    computed."""
    if not ranks.oracle.asynchronous:
        ranks.rest()
        return False
    with pytest.raises(CopyFailed, match="load: async"):
        ranks.rest()
    assert ranks.oracle.generated[request_id] == []
    return True


def fail_copies_of(ranks: Ranks, number: int, monkeypatch: pytest.MonkeyPatch, *, always: bool) -> None:
    """One rank's device fails: a layer does not arrive, nor, if always, anything after it."""
    hold, load = QueuedCopy.hold_engine, QueuedCopier.load
    worker = ranks.oracle.ranks[number].worker
    has_failed: list[QueuedCopy] = []

    def hold_engine(copy: QueuedCopy) -> None:
        if ranks.oracle.worker is worker and (always or not has_failed):
            has_failed.append(copy)
            raise CopyFailed("the bus is on fire")
        hold(copy)

    def load_all(copier: QueuedCopier, plan: Any) -> Any:
        if always and ranks.oracle.worker is worker:
            raise CopyFailed("the bus is still on fire")
        return load(copier, plan)

    monkeypatch.setattr(QueuedCopy, "hold_engine", hold_engine)
    monkeypatch.setattr(QueuedCopier, "load", load_all)


def failures(ranks: Ranks) -> list[int]:
    return [rank.engine.worker.counts.loads_failed for rank in ranks.oracle.ranks if rank.engine.worker is not None]


def stored_chunks(ranks: Ranks) -> list[int]:
    return [rank.engine.worker.counts.chunks_stored for rank in ranks.oracle.ranks if rank.engine.worker is not None]


@SCHEDULERS
@pytest.mark.parametrize("number", [0, 1])
def test_one_rank_copies_again_before_a_layer_is_read(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        fail_copies_of(ranks, number, monkeypatch, always=False)
        ranks.oracle.submit("a", PROMPT, 3)
        ranks.rest()
        assert ranks.is_right("a") and failures(ranks) == [0, 0] and ranks.oracle.layerwise == 1
        ranks.oracle.assert_at_rest()


@SCHEDULERS
@pytest.mark.parametrize("number", [0, 1])
def test_one_rank_whose_device_fails_costs_the_load_or_the_engine_and_no_token(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        fail_copies_of(ranks, number, monkeypatch, always=True)
        oracle.submit("a", PROMPT, 3)
        if has_ended(ranks, "a"):
            return
        assert ranks.is_right("a") and failures(ranks) == [int(number == 0), int(number == 1)]
        oracle.assert_at_rest()
        monkeypatch.undo()
        oracle.submit("b", PROMPT, 3)
        ranks.rest()
        assert ranks.is_right("b") and oracle.layerwise == 1 and oracle.loaded == 2 * 320
        oracle.assert_at_rest()


@SCHEDULERS
@pytest.mark.parametrize("number", [0, 1])
def test_what_one_rank_has_not_filled_no_other_rank_stores_from(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have filled their blocks, and do not know. In a real model all of them compute with what it lacks."""
    longer = [*SHARED[:330], *range(3, 73)]  # a chunk more than is held, in the same step
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        stored = stored_chunks(ranks)
        fail_copies_of(ranks, number, monkeypatch, always=True)
        ranks.oracle.submit("a", longer, 3)
        if has_ended(ranks, "a"):
            assert stored_chunks(ranks) == stored
            return
        assert ranks.oracle.generated["a"] == ranks.oracle.expected_tokens("a", len(longer), 3)
        workers = [rank.engine.worker for rank in ranks.oracle.ranks]
        discarded = [worker.counts.stores_failed for worker in workers if worker is not None]
        assert discarded == [int(number == 1), int(number == 0)]
        assert stored_chunks(ranks) == [chunks + 1 for chunks in stored]  # once it was computed again
        ranks.oracle.assert_at_rest()


def test_a_rank_that_goes_off_after_the_promise_is_computed_without(tiny_llama: str, tmp_path: Path) -> None:
    """Its scheduler hears that nothing is ready there any more, and has no chunk leased for it."""
    with started(tiny_llama, tmp_path) as ranks:
        oracle = ranks.oracle
        oracle.submit("a", PROMPT, 3)
        ranks.rest(lambda: oracle.ranks[1].engine.turn_off("a fault"))
        assert ranks.is_right("a")
        oracle.submit("b", PROMPT, 3)
        ranks.rest()
        assert ranks.is_right("b") and oracle.layerwise == 1
        assert oracle.cache.counts().read_leases == 0 and not oracle.cache._lasting


@SCHEDULERS
def test_a_scheduler_that_goes_off_leaves_leased_what_ranks_are_copying(
    tiny_llama: str, tmp_path: Path, asynchronous: bool
) -> None:
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        oracle.submit("a", PROMPT, 3)
        leases: list[int] = []

        def goes_off() -> None:
            oracle.engine.turn_off("a fault")
            leases.append(oracle.cache.counts().read_leases)

        ranks.rest(goes_off)
        assert leases == [2]  # the request's promise, and the lasting one
        assert ranks.is_right("a") and oracle.loaded == 320
        assert oracle.cache.counts().read_leases == 0 and not oracle.cache._lasting


@SCHEDULERS
def test_a_load_that_was_promised_and_is_not_planned_is_noticed(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's half fails in between, and the ranks' halves, which do not, have nothing to copy."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        oracle = ranks.oracle
        assert oracle.engine.scheduler is not None
        monkeypatch.setattr(oracle.engine.scheduler, "build_step", fails)
        oracle.submit("a", PROMPT, 3)
        if has_ended(ranks, "a"):
            return
        assert ranks.is_right("a") and "a bug" in oracle.engine.off


@SCHEDULERS
def test_memory_that_one_rank_cannot_make_ready_is_loaded_between_steps(
    tiny_llama: str, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = CpuCopier.prepare
    first: list[CpuCopier] = []

    def fails_in_one(self: CpuCopier, extents: Any) -> None:
        first[:] = first or [self]
        if self is first[0]:
            raise ConfigError("no more memory may be locked")
        prepare(self, extents)

    monkeypatch.setattr(CpuCopier, "prepare", fails_in_one)
    with started(tiny_llama, tmp_path, asynchronous=asynchronous) as ranks:
        ranks.oracle.submit("a", PROMPT, 3)
        ranks.rest()
        assert ranks.is_right("a") and ranks.oracle.loaded == 320 and ranks.oracle.layerwise == 0


@SCHEDULERS
def test_one_order_in_which_everything_happens(tiny_llama: str, tmp_path: Path, asynchronous: bool) -> None:
    with started(tiny_llama, tmp_path, asynchronous=asynchronous, blocks=28, batch_tokens=200) as ranks:
        anything(ranks, random.Random(1))
        assert ranks.oracle.layerwise > 2 and ranks.oracle.cache.generation == 2


@pytest.mark.slow
def test_a_pool_is_let_go_once_nothing_is_stored_there_any_more(tiny_llama: str, tmp_path: Path) -> None:
    """An order in which a server was killed while ranks' stores were on their way to its pool."""
    options = {"asynchronous": True, "blocks": 28, "batch_tokens": 64, "stores_in_flight_bytes": 100_000}
    with started(tiny_llama, tmp_path, **options) as ranks:
        anything(ranks, random.Random(102600))


@pytest.mark.slow
@given(data=st.data())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_anything_that_can_happen_in_any_order(
    tiny_llama: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Requests come, are aborted and preempted; caches are reset, chunks forgotten, servers killed and replaced, ranks
    come to those in any order, and copies fail once."""
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    options = {
        "asynchronous": data.draw(st.booleans()),
        "blocks": data.draw(st.sampled_from([20, 28, 60])),
        "batch_tokens": data.draw(st.sampled_from([64, 200, 512])),
        "save_decode": data.draw(st.booleans()),
        "load": data.draw(st.sampled_from(["layerwise", "auto"])),
        "stores_in_flight_bytes": data.draw(st.sampled_from([100_000, "2GiB"])),
    }
    with started(tiny_llama, tmp_path_factory.mktemp("ranks"), **options) as ranks:
        anything(ranks, chance)


def anything(ranks: Ranks, chance: random.Random) -> None:
    oracle, queue = ranks.oracle, ranks.device.queue
    sizes: dict[str, tuple[int, int]] = {}
    aborted = set()
    restarts = 2
    somebody: list[Callable[[], Any]] = [
        *(lambda rank=rank: rank.cache.lookup([], "looks") for rank in oracle.ranks),
        lambda: oracle.cache.lookup([], "looks"),
    ]
    for number in range(20):
        name = f"r{number}"
        prompt = [*SHARED[: chance.randrange(1, 380)], *([chance.randrange(3, 40)] * chance.randrange(0, 60))]
        sizes[name] = (len(prompt), chance.randrange(1, 60))
        oracle.submit(name, prompt, sizes[name][1])
        for _ in range(chance.randrange(0, 12)):
            if restarts and chance.random() < 0.04:
                restarts -= 1
                between_promise_and_copy(oracle, lambda: (ranks.kill_server(), chance.choice(somebody)()))
            elif chance.random() < 0.1:
                between_promise_and_copy(oracle, chance.choice(somebody))
            else:
                oracle.step()
            if chance.random() < 0.7:
                queue.run(chance.randrange(1, 6), failure="not this time" if chance.random() < 0.1 else "")
        doomed = chance.choice(list(sizes))
        if chance.random() < 0.2 and doomed in oracle.scheduler.requests:
            oracle.abort(doomed)
            aborted.add(doomed)
        if chance.random() < 0.1:
            oracle.scheduler.reset_prefix_cache(reset_connector=chance.random() < 0.5)
        if chance.random() < 0.1:
            oracle.cache.clear()
    ranks.rest()
    with suppress(AssertionError):  # the promise may have been lost with its server, and the lookup says so
        meets(oracle.cache)
    oracle.assert_at_rest()
    for name, (prompt_tokens, new_tokens) in sizes.items():
        expected, made = oracle.expected_tokens(name, prompt_tokens, new_tokens), oracle.generated[name]
        assert made == expected or (name in aborted and made == expected[: len(made)]), name
