"""Pages of real host-pool shapes through a real cache: what comes back is what was stored, or is said not to be."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_core.cost import Use
from kv_core.errors import ConfigError, InputError
from kv_core.format import FormatSetting
from kv_core.keys import NO_TENANT, tenant_tag
from kv_cuda.copy.cpu import CpuCopier
from kv_cuda.copy.streams import DoneEvent
from kv_server.process import launch
from kv_server.remote_cache import RemoteCache
from kv_sglang.names import marked
from kv_sglang.pages import PageStore
from kv_sglang.pools import describe
from kv_sglang.scheduler_calls import PrefillSpeed, RequestPages
from kv_testing.layouts import reach
from kv_testing.throttled import ThrottledTier, offer
from kv_testing.wait import until
from kv_tiers import ColdConfig, HostConfig, LocalCache, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for

WEIGHTS = LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0))
PAGE = 4
MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = MHA_LAYOUTS[:3]
Rows = Callable[[Any, Sequence[int]], torch.Tensor]
MakePool = Callable[..., Any]


def hashes(count: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed}{number}".encode()).hexdigest() for number in range(count)]


def slots(*pages: int) -> list[int]:
    return [page * PAGE for page in pages]


def fill(pool: Any, seed: int = 1) -> None:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))


class Cache:
    """A cache that several pools are attached to, as engines on one server are."""

    def __init__(self, pages: int = 32, tiers: Sequence[dict[str, Any]] = ()) -> None:
        self._pages, self._tiers = pages, tiers
        self.opened: dict[str, LocalCache] = {}
        self.stores: list[PageStore] = []

    def attach(
        self,
        pool: Any,
        *,
        wait_s: float = 5.0,
        wanted: FormatSetting = "auto",
        requests: RequestPages | None = None,
    ) -> PageStore:
        described = describe(pool, "kv", wanted)
        nbytes, fingerprint = described.format.nbytes, described.format.fingerprint
        if fingerprint not in self.opened:
            self.opened[fingerprint] = build_local_cache(
                HostConfig(capacity_bytes=self._pages * slot_bytes_for(nbytes)),
                group_bytes=(nbytes,),
                fingerprint=fingerprint,
                tiers=self._tiers,
                cold=ColdConfig(wait_s=wait_s),
            )
        space = LiveKeySpace(
            WEIGHTS, kv_dtype=described.dtype, format_fingerprint=fingerprint, world=1, chain=f"sha256:{PAGE}"
        )
        store = PageStore(self.opened[fingerprint], space, described, shard=0, wait_s=wait_s, requests=requests)
        self.stores.append(store)
        return store

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for cache in self.opened.values():
            counts = cache.counts()
            assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0, counts
            cache.close()


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache()
    yield made
    made.close()


@pytest.mark.parametrize("written", MHA_LAYOUTS)
@pytest.mark.parametrize("read", MHA_LAYOUTS)
def test_another_host_layout_of_the_same_model_reads_the_same_rows(
    cache: Cache, make_pool: MakePool, rows_of: Rows, written: str, read: str
) -> None:
    """SGLang's own file backend serves wrong tokens here."""
    one, other = make_pool("mha", written), make_pool("mha", read, pages=9)
    fill(one)
    names = hashes(3)
    assert cache.attach(one).write(names, slots(4, 0, 2)) == [True] * 3
    store = cache.attach(other)
    assert store.held(names) == 3
    assert store.read(names, slots(1, 8, 5)) == [True] * 3
    for source, target in ((4, 1), (0, 8), (2, 5)):
        of = lambda page: range(page * PAGE, (page + 1) * PAGE)  # noqa: E731
        assert torch.equal(rows_of(other, of(target)), rows_of(one, of(source)))
    untouched = [page for page in range(9) if page not in (1, 8, 5)]
    assert not bool(rows_of(other, [page * PAGE + token for page in untouched for token in range(PAGE)]).any())


def test_pages_may_begin_at_any_slot(cache: Cache, make_pool: MakePool, rows_of: Rows) -> None:
    """SGLang has them at multiples of a page, and nothing of ours depends on it."""
    one = make_pool("mha", MHA_LAYOUTS[0])
    fill(one)
    before = rows_of(one, range(1, 1 + PAGE)).clone()
    store = cache.attach(one)
    assert store.write(hashes(2), [1, 2 * PAGE + 1]) == [True] * 2
    fill(one, seed=2)
    assert store.read(hashes(2), [3 * PAGE + 2, 5 * PAGE]) == [True] * 2
    assert torch.equal(rows_of(one, range(3 * PAGE + 2, 4 * PAGE + 2)), before)


@pytest.mark.parametrize("written", MLA_LAYOUTS)
@pytest.mark.parametrize("read", MLA_LAYOUTS)
def test_latents_too(cache: Cache, make_pool: MakePool, rows_of: Rows, written: str, read: str) -> None:
    one, other = make_pool("mla", written), make_pool("mla", read)
    fill(one)
    assert cache.attach(one).write(hashes(2), slots(3, 1)) == [True] * 2
    assert cache.attach(other).read(hashes(2), slots(0, 5)) == [True] * 2
    assert torch.equal(rows_of(other, range(4)), rows_of(one, range(12, 16)))
    assert torch.equal(rows_of(other, range(20, 24)), rows_of(one, range(4, 8)))


def test_another_dtype_never_hits(cache: Cache, make_pool: MakePool) -> None:
    """SGLang's own file backend gives NaN here."""
    one = make_pool("mha", "page_first")
    fill(one)
    cache.attach(one).write(hashes(2), slots(0, 1))
    for dtype in (torch.bfloat16, torch.float16):
        other = make_pool("mha", "page_first", dtype)
        assert cache.attach(other).held(hashes(2)) == 0
        assert cache.attach(other).read(hashes(2), slots(0, 1)) == [False, False]
        assert not bool(other.kv_buffer.any())


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_one_flat_page_is_the_page_in_the_pool(cache: Cache, make_pool: MakePool, rows_of: Rows, kind: str) -> None:
    """The calls with tensors of whole pages work on the same chunks as those without copies."""
    for layout in MLA_LAYOUTS:
        pool = make_pool(kind, layout)
        fill(pool)
        store = cache.attach(pool)
        names = hashes(1, layout)
        assert store.write(names, slots(2)) == [True]
        assert store.pages.one_page is not None
        flat, copier = store.pages.one_page()
        assert store.read(names, [0], copier) == [True]
        single = make_pool(kind, layout, pages=1)
        single.kv_buffer.view(-1).copy_(flat)
        assert torch.equal(rows_of(single, range(PAGE)), rows_of(pool, range(2 * PAGE, 3 * PAGE)))


def test_pages_that_only_sglang_can_flatten_come_back_byte_for_byte(cache: Cache, make_pool: MakePool) -> None:
    one, other = make_pool("mamba"), make_pool("mamba")
    one.state.copy_(torch.randint(0, 256, one.state.shape, dtype=torch.uint8))
    one.conv.copy_(torch.randn(one.conv.shape))
    assert cache.attach(one).write(hashes(2), [3, 5]) == [True, True]
    store = cache.attach(other)
    assert store.read(hashes(2), [0, 1]) == [True, True]
    assert torch.equal(other.state[:2], one.state[[3, 5]]) and torch.equal(other.conv[:2], one.conv[[3, 5]])
    assert not bool(other.state[2:].any())


@pytest.mark.parametrize(("wanted", "most"), [("int8", 1 / 254), ("fp8", 1 / 16)])
def test_quantised_pages_come_back_within_their_bound_into_another_layout(
    cache: Cache, make_pool: MakePool, rows_of: Rows, wanted: FormatSetting, most: float
) -> None:
    one, other = make_pool("mha", "page_head"), make_pool("mha", "layer_first")
    fill(one)
    assert cache.attach(one, wanted=wanted).write(hashes(2), slots(0, 1)) == [True, True]
    assert cache.attach(other).held(hashes(2)) == 0  # exact pages are others
    assert cache.attach(other, wanted=wanted).read(hashes(2), slots(2, 3)) == [True, True]
    exact, read = rows_of(one, range(8)), rows_of(other, range(8, 16))
    for page in (slice(0, 4), slice(4, 8)):  # [layers, parts, tokens, heads, dim]
        given, back = (rows[page].permute(1, 2, 0, 3, 4).double().numpy() for rows in (exact, read))
        assert (abs(back - given) <= reach(given) * (most * 1.01)).all()
    assert not torch.equal(read, exact)
    half = make_pool("mha", "page_head", torch.bfloat16)
    assert cache.attach(half, wanted=wanted).held(hashes(2)) == 0


def test_pages_that_the_format_cannot_represent_are_not_stored_and_others_are(
    cache: Cache, make_pool: MakePool
) -> None:
    """One request's NaN costs the pages of its write, not the cache."""
    pool = make_pool("mha", "page_first")
    fill(pool)
    pool.kv_buffer[0, slots(1)[0]] = float("nan")
    store = cache.attach(pool, wanted="int8")
    assert store.write(hashes(1), slots(0)) == [True]
    assert store.write(hashes(3), slots(0, 1, 2)) == [True, False, False]
    assert store.held(hashes(3)) == 1
    assert store.write(hashes(2, "another"), slots(2, 3)) == [True, True]
    assert store.read(hashes(2, "another"), slots(4, 5)) == [True, True]
    assert store.read(hashes(1), slots(3)) == [True]


def test_a_format_that_the_models_pages_cannot_have_is_refused(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match=r"format is int8, and this model's pages .* leave format out"):
        describe(make_pool("mamba"), "kv", "int8")
    with pytest.raises(ConfigError, match="keeps uint8, and format int8 is made from"):
        describe(make_pool("mha", "page_first", torch.uint8), "kv", "int8")


def test_what_cannot_be_described_is_refused_by_name() -> None:
    class StrangePoolHost:
        kv_buffer = None

    with pytest.raises(ConfigError, match=r"host pool indexer \(StrangePoolHost\) cannot be described"):
        describe(StrangePoolHost(), "indexer")


def test_a_pool_that_keeps_its_pages_elsewhere_is_refused(make_pool: MakePool) -> None:
    pool = make_pool("mha", "page_first")
    pool.get_page_buffer_meta = lambda indices: ([0, 0], [])
    with pytest.raises(ConfigError, match=r"does not store its pages where .* tested with SGLang 0\.5\.23"):
        describe(pool, "kv")


def test_only_the_leading_run_is_found_and_the_rest_reads_false(cache: Cache, make_pool: MakePool) -> None:
    pool = make_pool("mha", "page_first")
    store = cache.attach(pool)
    names = hashes(4)
    store.write([names[0], names[1], names[3]], slots(0, 1, 3))
    assert store.held(names) == 2
    assert store.read(names, slots(0, 1, 2, 3)) == [True, True, False, False]
    assert store.held(names[2:]) == 0
    assert store.held([]) == 0 and store.read([], []) == [] and store.write([], []) == []


def test_a_page_that_is_held_is_not_written_again(cache: Cache, make_pool: MakePool, rows_of: Rows) -> None:
    pool = make_pool("mha", "page_first")
    fill(pool, 1)
    before = rows_of(pool, range(PAGE)).clone()
    store = cache.attach(pool)
    store.write(hashes(1), slots(0))
    fill(pool, 2)
    assert store.write(hashes(2), slots(0, 1)) == [True, True]
    (local,) = cache.opened.values()
    assert local.counts().chunks_committed == 2
    assert store.read(hashes(1), slots(5)) == [True]
    assert torch.equal(rows_of(pool, range(5 * PAGE, 6 * PAGE)), before)


def test_what_was_promised_stays_until_it_is_read(make_pool: MakePool) -> None:
    """Between SGLang's question and its read other requests store."""
    cache = Cache(pages=4)
    pool = make_pool("mha", "page_first")
    fill(pool)
    store = cache.attach(pool)
    wanted = hashes(2, "wanted")
    assert store.write(wanted, slots(0, 1)) == [True, True]
    assert store.held(wanted) == 2
    for number in range(5):
        assert store.write(hashes(2, f"other{number}"), slots(2, 3)) == [True, True]
    assert store.read(wanted, slots(4, 5)) == [True, True]
    for number in range(5):
        store.write(hashes(4, f"more{number}"), slots(0, 1, 2, 3))
    assert store.held(wanted) == 0  # once read, it may go
    cache.close()


class Calls:
    """A cache that notes the verbs it hears."""

    def __init__(self, cache: LocalCache) -> None:
        self._cache = cache
        self.verbs: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            self.verbs.append(name)
            return value(*arguments, **options)

        return call


def test_a_read_uses_the_promise_that_the_question_took(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a server each verb is a round trip: in pieces or at once, what was promised is not looked up again."""
    cache = Cache(pages=8)
    store = cache.attach(make_pool("mha", "page_first"))
    names = hashes(4)
    store.write(names, slots(0, 1, 2, 3))
    calls = Calls(store.cache)  # type: ignore[arg-type]
    monkeypatch.setattr(store, "cache", calls)
    assert store.held(names) == 4
    assert calls.verbs == ["lookup"]
    assert store.read(names[:2], slots(4, 5)) == store.read(names[2:], slots(4, 5)) == [True, True]
    assert calls.verbs == ["lookup", "load", "release", "load", "release", "end"]
    assert cache.opened.popitem()[1].counts().read_leases == 0


def test_a_read_whose_promise_has_ended_looks_up_again(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never asked for, newer questions ended it, its time was over, or its pages were forgotten."""
    cache = Cache(pages=8)
    store = cache.attach(make_pool("mha", "page_first"))
    (local,) = cache.opened.values()
    names = hashes(2)
    store.write(names, slots(0, 1))
    calls = Calls(local)
    monkeypatch.setattr(store, "cache", calls)
    assert store.read(names, slots(4, 5)) == [True, True]
    assert calls.verbs == ["lookup", "load", "release", "end"]
    assert store.held(names) == 2
    for _ in range(20):
        assert store.held(names[:1]) == 1
    calls.verbs.clear()
    assert store.read(names, slots(4, 5)) == [True, True]
    assert calls.verbs[:4] == ["lookup", "load", "release", "end"]
    assert store.held(names) == 2
    local.forget(store.keys(names[1:]))
    calls.verbs.clear()
    assert store.read(names, slots(4, 5)) == [True, False]
    assert calls.verbs[:2] == ["load", "lookup"]
    store.close()
    assert local.counts().read_leases == 0
    cache.close()


def test_promises_that_are_never_read_make_way(make_pool: MakePool) -> None:
    """SGLang asks and does not read where too little is found. A full pool of promises must not refuse every store."""
    cache = Cache(pages=4)
    pool = make_pool("mha", "page_first")
    store = cache.attach(pool)
    assert store.write(hashes(4, "a"), slots(0, 1, 2, 3)) == [True] * 4
    assert store.held(hashes(4, "a")) == 4
    assert store.write(hashes(3, "b"), slots(0, 1, 2)) == [True] * 3
    assert store.held(hashes(3, "b")) == 3
    cache.close()


def test_more_pages_than_the_pool_has_are_refused_from_where_it_is_full(make_pool: MakePool) -> None:
    cache = Cache(pages=3)
    store = cache.attach(make_pool("mha", "page_first"))
    assert store.write(hashes(5), slots(0, 1, 2, 3, 4)) == [True, True, True, False, False]
    assert store.held(hashes(5)) == 3
    cache.close()


def test_an_earlier_page_that_has_left_is_not_written_from_other_bytes(cache: Cache, make_pool: MakePool) -> None:
    store = cache.attach(make_pool("mha", "page_first"))
    names = hashes(4)
    assert store.write(names[2:], slots(2, 3), before=names[:2]) == [True, True]
    assert store.held(names) == 0
    assert store.held(names[2:]) == 2


def test_trailing_windows_are_the_longest_prefixes_whose_last_pages_are_held(cache: Cache, make_pool: MakePool) -> None:
    store = cache.attach(make_pool("mha", "page_first"))
    names = hashes(10)
    for held in (0, 3, 4, 5, 8):
        store.write([names[held]], slots(held % 6))
    assert store.trailing(names, 1, 16) == [1, 4, 5, 6, 9]
    assert store.trailing(names, 2, 16) == [1, 5, 6]
    assert store.trailing(names, 3, 16) == [1, 6]
    assert store.trailing(names, 3, 1) == [6]
    assert store.trailing(names, 4, 16) == [1]
    assert store.trailing(names[1:3], 1, 16) == []


def test_pages_come_back_from_disk_after_a_restart(make_pool: MakePool, rows_of: Rows, tmp_path: Path) -> None:
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 64 << 20}
    pool = make_pool("mha", "page_head")
    fill(pool)
    first = Cache(tiers=[tier])
    assert first.attach(pool).write(hashes(4), slots(0, 1, 2, 3)) == [True] * 4
    first.close()
    second = Cache(tiers=[tier])
    other = make_pool("mha", "layer_first")
    store = second.attach(other)
    assert store.held(hashes(5)) == 4
    assert store.read(hashes(5), slots(0, 1, 2, 3, 4)) == [True] * 4 + [False]
    assert torch.equal(rows_of(other, range(4 * PAGE)), rows_of(pool, range(4 * PAGE)))
    second.close()


def test_a_lease_that_ran_out_under_the_copy_is_a_miss(
    cache: Cache, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = cache.attach(make_pool("mha", "page_first"))
    store.write(hashes(2), slots(0, 1))
    monkeypatch.setattr(LocalCache, "release", lambda self, lease: False)
    assert store.read(hashes(2), slots(2, 3)) == [False, False]


def test_three_threads_at_once(cache: Cache, make_pool: MakePool, rows_of: Rows) -> None:
    """As SGLang's: one asks, one reads, one writes."""
    pool = make_pool("mha", "page_first_direct", pages=40)
    fill(pool)
    store = cache.attach(pool)
    wrong: list[str] = []

    def write() -> None:
        for number in range(60):
            store.write(hashes(4, f"{number % 6}"), slots(*(4 * (number % 6) + page for page in range(4))))

    def ask() -> None:
        for number in range(200):
            store.held(hashes(4, f"{number % 6}"))

    def read() -> None:
        for number in range(200):
            seed = number % 6
            answers = store.read(hashes(4, f"{seed}"), slots(30, 31, 32, 33))
            for page in range(answers.count(True)):
                got = rows_of(pool, range((30 + page) * PAGE, (31 + page) * PAGE))
                if not torch.equal(got, rows_of(pool, range((4 * seed + page) * PAGE, (4 * seed + page + 1) * PAGE))):
                    wrong.append(f"{seed} {page}")

    threads = [threading.Thread(target=each) for each in (write, ask, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_that_has_ended_keeps_no_pool(
    cache: Cache, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang starts others whenever it empties its caches."""
    store = cache.attach(make_pool("mha", "page_first"))
    attached: list[str] = []
    monkeypatch.setattr(CpuCopier, "attach", lambda _self, pool, _view: attached.append(pool))
    monkeypatch.setattr(CpuCopier, "detach", lambda _self, pool: attached.remove(pool))
    monkeypatch.setattr(CpuCopier, "store", lambda _self, _plan: DoneEvent())
    for number in range(5):
        thread = threading.Thread(target=store.write, args=(hashes(1, str(number)), slots(0)))
        thread.start()
        thread.join()
        assert len(attached) == 1
    store.close()
    assert attached == []


def test_a_hash_that_is_none_is_an_error(cache: Cache, make_pool: MakePool) -> None:
    store = cache.attach(make_pool("mha", "page_first"))
    with pytest.raises(InputError, match="hex digits"):
        store.held(["__placeholder__"])


def test_a_slow_tier_is_not_waited_for_where_computing_is_known_to_be_quicker(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made = Cache(pages=4, tiers=[{"type": "throttled", "tier": {"type": "dram", "capacity_bytes": 1 << 20}}])
    try:
        pool = make_pool("mha", "page_first")
        fill(pool)
        store = made.attach(pool)
        names = hashes(2)
        assert store.write(names, slots(0, 1)) == [True, True]
        (opened,) = made.opened.values()
        (lane,) = opened.lower.lanes

        def settle() -> None:
            assert lane.drain(5)  # a probe may be on its way
            until(lambda: not any(state.spill.under_way for state in opened.lower.states()))

        settle()
        assert isinstance(lane.tier, ThrottledTier)
        lane.tier.load_bytes_per_s = 10_000.0

        def held(compute_s: float | None, use: Use = "auto") -> tuple[int, float]:
            others = hashes(8)[2:]
            settle()
            assert store.write(others[:4], slots(2, 3, 4, 5)) == [True] * 4  # they put the first ones out
            settle()
            described = store.pages
            tokens_per_s = 0.0 if compute_s is None else store.pages.page_slots / compute_s
            speed = PrefillSpeed(tokens_per_second=tokens_per_s)
            asker = PageStore(opened, store._space, described, shard=0, wait_s=5.0, use=use, prefill=speed)
            began = time.monotonic()
            found = asker.held(names)
            took_s = time.monotonic() - began
            asker.close()
            return found, took_s

        page_s = store.pages.format.nbytes / 10_000.0
        for _ in range(3):
            assert held(None)[0] == 2  # it is not known what computing takes: it is waited for
        found, took_s = held(page_s / 100)
        assert found == 0 and took_s < page_s
        assert held(page_s * 100)[0] == 2
        assert held(None, "never")[0] == 0
    finally:
        assert lane.drain(5)
        made.close()


def test_at_a_server_and_through_its_restart(make_pool: MakePool, rows_of: Rows, tmp_path: Path) -> None:
    """A server that is gone costs misses. The next has another pool, which a thread that copied before must find."""
    config = {"host": {"capacity_bytes": 8 << 20}}
    socket = tmp_path / "private" / "s"
    server = launch(config, socket=socket)
    pool = make_pool("mha", "page_first")
    fill(pool)
    described = describe(pool, "kv")
    nbytes, fingerprint = described.format.nbytes, described.format.fingerprint
    remote = RemoteCache(socket, group_bytes=(nbytes,), fingerprint=fingerprint)
    space = LiveKeySpace(WEIGHTS, kv_dtype="float32", format_fingerprint=fingerprint, world=1, chain=f"sha256:{PAGE}")
    store = PageStore(remote, space, described, shard=0, wait_s=1.0)
    try:
        assert store.write(hashes(2), slots(0, 1)) == [True, True]
        assert store.read(hashes(2), slots(2, 3)) == [True, True]
        assert torch.equal(rows_of(pool, range(8, 16)), rows_of(pool, range(8)))
        server.stop()
        assert store.held(hashes(2)) == 0
        assert store.read(hashes(2), slots(2, 3)) == [False, False]
        assert store.write(hashes(2), slots(0, 1)) == [False, False]
        server = launch(config, socket=socket)
        while store.write(hashes(2), slots(4, 5)) != [True, True]:
            threading.Event().wait(0.05)  # the client tries again ever more seldom
        assert store.read(hashes(2), slots(2, 3)) == [True, True]
        assert torch.equal(rows_of(pool, range(8, 16)), rows_of(pool, range(16, 24)))
    finally:
        store.close()
        remote.close()
        server.stop()


def test_what_was_handed_over_is_kept_until_it_is_read_had_or_computed(make_pool: MakePool) -> None:
    """Six pages and a tail: SGLang has two, reads two, and computes and writes two."""
    cache = Cache(pages=24)
    names, tail = hashes(6), hashes(1, "tail")
    requests = RequestPages("auto", PAGE, lambda: ("host",))
    try:
        store = cache.attach(make_pool("mha", "page_first"), requests=requests)
        (inner,) = cache.opened.values()
        lease = inner.begin_store(store.keys([*names, *tail]), "prefill", hold_s=3600.0)
        inner.commit(lease)
        inner.end("prefill")
        assert inner.holds.chunks == 7

        def come(params: object) -> None:
            requests.note("r", params, 6 * PAGE + 3, lambda: names, lambda last: tail[0] if last == names[-1] else "")

        come(None)
        come({"do_remote_prefill": False})
        come("do_remote_prefill")
        requests.received(names)
        assert inner.holds.chunks == 7  # of no request that was handed over
        come({"do_remote_prefill": True, "kv_tiers": {"store": True}})
        assert inner.holds.chunks == 6
        requests.received(names[:2])  # as SGLang's tree has them
        assert inner.holds.chunks == 4
        assert store.read(names[2:4], slots(0, 1)) == [True] * 2
        assert inner.holds.chunks == 2
        assert store.write(names[4:], slots(2, 3), names[:4]) == [True] * 2
        assert inner.holds.chunks == 0
        assert not requests.awaits_any
    finally:
        cache.close()


def test_pages_are_found_and_stored_as_their_request_says(make_pool: MakePool, rows_of: Rows) -> None:
    """Of one write, pages of two requests: to the disk, to the pool alone, and nowhere."""
    tier = {"type": "dram", "name": "near", "capacity_bytes": "1MiB"}
    cache = Cache(pages=8, tiers=[tier])
    names = hashes(6)
    requests = RequestPages("auto", PAGE, lambda: ("host", "near"))

    def say(first: int, last: int, **kv_tiers: Any) -> None:
        requests.note("r", {"kv_tiers": kv_tiers}, (last - first) * PAGE, lambda: names[first:last])

    try:
        store = cache.attach(make_pool("mha", "page_first"), requests=requests)
        (inner,) = cache.opened.values()
        say(2, 4, tiers=["host"])
        say(4, 6, store=False)
        assert store.write(names, slots(*range(6))) == [True] * 4 + [False] * 2
        until(lambda: inner.lower.locate(store.keys(names)) == ["near"] * 2 + [""] * 4)
        assert store.held(names) == 4
        say(0, 6, load=False)
        assert store.held(names) == 0
        assert store.ready(names, "asker") == 0
        say(0, 6, use="never")
        assert store.held(names) == 0
        say(0, 6, tiers=[])
        assert store.write(hashes(8, "others"), slots(*range(6), 0, 1)) == [True] * 8  # they fill the pool
        assert store.held(names) == 0
        say(0, 6, tiers=["near"], promote=False)
        assert store.held(names) == 0
        say(0, 6, tiers=["near"])
        assert store.held(names) == 2
    finally:
        cache.close()


def test_pages_have_their_tenants_tag_and_its_share_of_the_pool(make_pool: MakePool) -> None:
    """Generated pages too, which no request has named. Pages of others take no room from them."""
    tag = tenant_tag("a's")
    cache = Cache(pages=12)
    requests = RequestPages("auto", PAGE, lambda: ("host",))
    names, others = hashes(5), hashes(8, "others")
    try:
        store = cache.attach(make_pool("mha", "page_first"), requests=requests)
        (inner,) = cache.opened.values()
        inner.admin.set_quota(tag, 5 * inner.pool.slot_bytes)
        requests.note("r", None, 3 * PAGE, lambda: names[:3], salt="a's")
        assert store.write(names[:3], slots(0, 1, 2)) == [True] * 3
        assert store.write(names[3:], slots(3, 4), names[:3]) == [True] * 2
        assert store.write(others, slots(*range(6), 0, 1))[:7] == [True] * 7
        requests.note("r", None, 5 * PAGE, lambda: names, salt="a's")
        assert {key.tenant for key in store.keys(names)} == {tag}
        assert store.held(names) == 5 and store.read(names, slots(*range(5))) == [True] * 5
        requests.note("r", None, 5 * PAGE, lambda: names, salt="")
        assert store.held(names) == 0
        assert {key.tenant for key in store.keys(others)} == {NO_TENANT}
    finally:
        cache.close()


def test_pages_with_media_are_never_stored_or_found(cache: Cache, make_pool: MakePool) -> None:
    """Not even those that lie there by whatever other way; the pages before them are."""
    pool = make_pool("mha", "page_first")
    store = cache.attach(pool)
    named = hashes(4)
    mixed = [*named[:2], *(marked(each) for each in named[2:])]
    assert store.write(mixed, slots(0, 1, 2, 3)) == [True, True, False, False]
    assert store.cache.counts().chunks_resident == 2
    assert store.held(mixed) == 2
    assert store.write(named, slots(0, 1, 2, 3)) == [True] * 4
    assert store.held(mixed) == store.ready(mixed, "asker") == 2
    assert store.read(mixed, slots(0, 1, 2, 3)) == [True, True, False, False]
    assert store.held(mixed[2:]) == 0 and store.read(mixed[2:], slots(2, 3)) == [False] * 2
    assert store.trailing(mixed, 1, 8) == [1, 2]
    store.received(mixed)
