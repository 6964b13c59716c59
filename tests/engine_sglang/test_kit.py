"""SGLang's own fixtures from its wheel: its real tree, controller, threads and host pools over our backend.

No model is needed, so other kinds of caches than the real engine's tests start can be shown here: sliding windows
beside full attention, whose pages lie in a pool of their own that is asked for by the end of a prefix.
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kv_connect.identity import ServedModel, Weights, key_space
from kv_core.cost import Costs
from kv_core.errors import ConfigError
from kv_core.service import Ended, LookupPlan
from kv_server.process import ServerProcess, launch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

FULL = CacheConfig(page_size=16, components=(ComponentType.FULL,))
WINDOW = CacheConfig(
    page_size=4, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=8, kv_size=512
)
STATES = CacheConfig(
    page_size=4,
    components=(ComponentType.FULL, ComponentType.MAMBA),
    enable_mamba_extra_buffer=True,
    mamba_cache_size=60,
)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A scheduler's process is told which replica it serves; the fixtures make their trees in this one."""
    with get_parallel().override(dp_rank=None, num_dp_ranks=1, nnodes=1):
        yield


class Fixtures(UnifiedRadixCacheStorageFixtures, CustomTestCase):  # type: ignore[misc]
    """SGLang's fixtures, with our backend where they ask for that of files. Several trees share one server."""

    __test__ = False
    cfg: CacheConfig
    socket: Path
    zero_copy: bool
    settings: dict[str, Any]

    def runTest(self) -> None:  # unittest's name
        """There is none of its own: pytest calls the fixtures."""

    def _init_hicache(self, cache: Any, **named: Any) -> None:
        from kv_sglang import storage

        model = ServedModel("sglang", "dummy", None, "float32", dummy_seed=0)
        ours = {"server": {"socket": str(self.socket)}, "cold": {"wait_s": 5.0}, **self.settings}
        made = classmethod(lambda cls, name, config, pool, **_: storage.KVStorage(config, {}))
        with (
            mock.patch.object(StorageBackendFactory, "_do_create_backend", made),
            mock.patch.object(storage, "served_model", return_value=model),
        ):
            super()._init_hicache(cache, **named, storage_extra=ours)
        controller = cache.cache_controller
        if self.zero_copy:
            controller.page_get_func = controller._page_get_zero_copy
            controller.page_set_func = controller._page_set_zero_copy
        self.addCleanup(controller.storage_backend.close)

    def _fill_full_kv(self, allocator: Any, indices: Any, marker: float) -> None:
        super()._fill_full_kv(allocator, indices, marker)
        if self.cfg.has_swa:
            window = allocator.get_kvcache().swa_kv_pool
            for layer in range(window.layer_num):
                window.k_buffer[layer].fill_(marker + 2 + layer)
                window.v_buffer[layer].fill_(marker + 3 + layer)
        if self.cfg.has_mamba:
            for number, part in enumerate(state_parts(allocator)):
                part.fill_(marker + 2 + number)


def state_parts(allocator: Any) -> list[torch.Tensor]:
    """What a state of Mamba is made of, of every layer: [layers, states, …] each."""
    kept = allocator.get_kvcache().mamba_pool.mamba_cache
    return [kept.temporal, *kept.conv]


def key_space_of(model: ServedModel) -> bytes:
    space = key_space(model, Weights("m", "r"), kv_dtype="uint8", format_fingerprint="f", world=1, chain="sha256")
    return space.key(bytes(32))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    load_plugins()
    config = {"host": {"capacity_bytes": 8 << 20}, "server": {"max_formats": 8}}
    made = launch(config, socket=tmp_path_factory.mktemp("server") / "private" / "s")
    yield made
    made.stop()


@pytest.fixture
def fixtures(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Fixtures]:
    made = Fixtures()
    (made.cfg, made.zero_copy), made.socket = request.param, server.socket
    made.settings = {}
    made.setUp()
    yield made
    made.tearDown()
    made.doCleanups()


every_cache = pytest.mark.parametrize(
    "fixtures",
    [
        pytest.param((FULL, True), id="full"),
        pytest.param((FULL, False), id="full, a flat page at a time"),
        pytest.param((WINDOW, True), id="sliding window"),
        pytest.param((STATES, True), id="states"),
    ],
    indirect=True,
)


@every_cache
def test_what_one_tree_stored_another_loads_byte_for_byte(fixtures: Fixtures) -> None:
    sequence = fixtures._make_seq(1, 6)
    expected = fixtures._l3_produce(fixtures._make_storage_dir(), sequence, marker=7.5)
    cache, allocator, requests = fixtures._l3_consumer(fixtures._make_storage_dir())
    fixtures._consume_prefetch(cache, sequence, CacheRequestHandle("again", 0))
    match = match_prefix(cache, sequence)
    assert match.host_hit_length == len(sequence)
    request = fixtures._make_req(requests) if fixtures.cfg.has_mamba else None
    fixtures._load_back_node(cache, match.last_host_node, request)
    leaf = match_prefix(cache, sequence).last_device_node
    found = fixtures._snapshot_full_kv(allocator, cache.path_device_indices(leaf))
    assert all(torch.equal(ours, theirs) and bool(ours.any()) for ours, theirs in zip(found, expected, strict=True))
    if fixtures.cfg.has_swa:
        rows = node_device_value(cache, leaf, ComponentType.SWA)
        window = allocator.get_kvcache().swa_kv_pool
        for layer in range(window.layer_num):
            assert bool((window.k_buffer[layer][rows] == 9.5 + layer).all())
            assert bool((window.v_buffer[layer][rows] == 10.5 + layer).all())
    if fixtures.cfg.has_mamba:
        at = node_device_value(cache, leaf, ComponentType.MAMBA)
        for number, part in enumerate(state_parts(allocator)):
            assert bool((part[:, at] == 9.5 + number).all())


@every_cache
def test_a_longer_prompt_finds_the_prefix_and_a_different_one_nothing(fixtures: Fixtures) -> None:
    sequence = fixtures._make_seq(5000, 4)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    longer = sequence + fixtures._make_seq(9000, 3)
    fixtures._consume_prefetch(cache, longer, CacheRequestHandle("longer", 0))
    assert match_prefix(cache, longer).host_hit_length == len(sequence)
    other = fixtures._make_seq(7000, 4)
    fixtures._consume_prefetch(cache, other, CacheRequestHandle("other", 0))
    assert match_prefix(cache, other).host_hit_length == 0


@pytest.mark.parametrize("fixtures", [pytest.param((STATES, True), id="states")], indirect=True)
def test_pages_without_the_state_at_their_end_are_no_hit(fixtures: Fixtures) -> None:
    """Nor is a part of them: a state is kept where a prompt ended, and there is none in between."""
    sequence = fixtures._make_seq(15000, 6)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    stores = cache.cache_controller.storage_backend._attached.stores
    shorter = sequence[: -fixtures.cfg.page_size]
    fixtures._consume_prefetch(cache, shorter, CacheRequestHandle("shorter", 0))
    assert match_prefix(cache, shorter).host_hit_length == 0
    assert stores["kv"].cache is not stores["mamba"].cache
    stores["mamba"].cache.clear()
    fixtures._consume_prefetch(cache, sequence, CacheRequestHandle("without", 0))
    assert match_prefix(cache, sequence).host_hit_length == 0
    assert cache.cache_controller.storage_backend.off == ""


@pytest.mark.parametrize("fixtures", [pytest.param((STATES, True), id="states")], indirect=True)
def test_states_of_another_dtype_are_other_states_although_they_are_as_large(fixtures: Fixtures) -> None:
    sequence = fixtures._make_seq(17000, 6)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    for dtype, hits in (("float16", 0), ("bfloat16", len(sequence))):
        with envs.SGLANG_MAMBA_CONV_DTYPE.override(dtype):
            cache, allocator, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
        assert str(state_parts(allocator)[1].dtype) == f"torch.{dtype}"
        fixtures._consume_prefetch(cache, sequence, CacheRequestHandle(dtype, 0))
        assert match_prefix(cache, sequence).host_hit_length == hits


def test_keys_and_values_of_different_sizes_are_refused_at_start_with_sglangs_reason() -> None:
    from kv_sglang.pools import describe
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost

    pool = AsymmetricMHATokenToKVPoolHost.__new__(AsymmetricMHATokenToKVPoolHost)
    with pytest.raises(ConfigError, match=r"kv \(AsymmetricMHATokenToKVPoolHost\) cannot .* head_dim != v_head_dim"):
        describe(pool, "kv")


@pytest.fixture
def served_as(tiny_llama: str) -> Callable[..., ServedModel]:
    """What we take a model to be that SGLang serves with these arguments."""

    def read(**arguments: Any) -> ServedModel:
        from kv_sglang.attach import Rank
        from kv_sglang.served import served_model

        set_global_server_args_for_scheduler(ServerArgs(model_path=tiny_llama, device="cpu", **arguments))
        return served_model(Rank(0, 1, False, 0, 1, 0, 1, 1))

    return read


def test_quantised_caches_of_another_kind_or_scale_are_other_models(
    served_as: Callable[..., ServedModel], tmp_path: Path
) -> None:
    """SGLang's pools say uint8 of each."""
    scales = [tmp_path / "one", tmp_path / "other"]
    for number, file in enumerate(scales):
        file.write_text(str(number))
    one, other = ({"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": str(file)} for file in scales)
    plain = [served_as(), served_as(kv_cache_dtype="auto")]
    kinds = [served_as(kv_cache_dtype=kind) for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert plain[0] == plain[1]
    assert len({key_space_of(model) for model in [*plain, *kinds, served_as(**one), served_as(**other)]}) == 5


@pytest.mark.parametrize("fixtures", [pytest.param((FULL, True), id="full")], indirect=True)
def test_a_fault_of_ours_turns_the_cache_off_and_the_tree_goes_on(fixtures: Fixtures) -> None:
    sequence = fixtures._make_seq(11000, 4)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    backend = cache.cache_controller.storage_backend
    with mock.patch.object(type(backend._kv), "read", side_effect=ZeroDivisionError("ours")):
        fixtures._consume_prefetch(cache, sequence, CacheRequestHandle("broken", 0))
    assert match_prefix(cache, sequence).host_hit_length == 0
    assert "batch_get_v1 raised ZeroDivisionError" in backend.off
    assert backend.batch_exists([]) == 0 and backend.batch_set_v1(["00" * 32], torch.arange(16)) == [False]


@pytest.mark.parametrize("fixtures", [pytest.param((FULL, True), id="full")], indirect=True)
def test_the_scheduler_of_a_decode_engine_does_not_wait_for_slower_tiers(fixtures: Fixtures) -> None:
    """It asks in its loop (`query_storage_hit_length`), while other requests decode."""
    sequence = fixtures._make_seq(15000, 4)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    cache.prefetch_threshold = 1
    service = cache.cache_controller.storage_backend._kv.cache

    def ask() -> int:
        return int(cache.query_storage_hit_length(cache.root_node_handle(), list(sequence)))

    def promoting(keys: Any, holder: str, **named: Any) -> LookupPlan:
        promoted.append(named["wait_for_promotion"])
        return LookupPlan(holder, 0, Ended.PENDING, ())

    promoted: list[bool] = []
    with mock.patch.object(service, "lookup", promoting):
        assert ask() == ask() == 0
    assert promoted == [True, True]
    assert ask() == len(sequence)
    fixtures._consume_prefetch(cache, sequence, CacheRequestHandle("fits", 0))
    assert match_prefix(cache, sequence).host_hit_length == len(sequence)


@pytest.mark.parametrize("fixtures", [pytest.param((FULL, True), id="full")], indirect=True)
def test_computing_is_estimated_with_all_that_comes_before_what_is_looked_up(fixtures: Fixtures) -> None:
    """SGLang looks up what follows the pages that it has, and attends to those as well."""
    fixtures.settings = {"cost": {"prefill_tokens_per_second": 1e6}}
    sequence = fixtures._make_seq(21000, 6)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    head, tail = sequence[: 2 * FULL.page_size], sequence[2 * FULL.page_size :]
    fixtures._consume_prefetch(cache, head, CacheRequestHandle("head", 0))
    match = match_prefix(cache, sequence)
    assert match.host_hit_length == len(head)
    service = cache.cache_controller.storage_backend._kv.cache
    lookup = service.lookup
    stated: list[Costs] = []

    def observed(keys: Any, holder: str, **named: Any) -> LookupPlan:
        stated.append(named["costs"])
        plan: LookupPlan = lookup(keys, holder, **named)
        return plan

    request, node = CacheRequestHandle("tail", 0), match.last_host_node
    with mock.patch.object(service, "lookup", observed):
        known = cache.get_last_hash_value(node), cache.get_prefix_hash_values(node)
        assert cache.query_storage_hit_length(node, list(tail), *known) == len(tail)  # as an engine that decodes asks
        cache.prefetch_from_storage(
            request,
            node,
            array("q", tail),
            cache.get_last_hash_value(node),
            cache.get_prefix_hash_values(node),
            matched_prefix_tokens=array("q", head),
        )
        fixtures._run_prefetch_to_completion(cache, request)
    assert [costs.before_tokens for costs in stated] == [len(head)] * 2
    assert match_prefix(cache, sequence).host_hit_length == len(sequence)


@pytest.mark.parametrize("fixtures", [pytest.param((FULL, True), id="full")], indirect=True)
def test_clearing_the_storage_forgets_what_it_kept(fixtures: Fixtures) -> None:
    sequence = fixtures._make_seq(13000, 4)
    fixtures._l3_produce(fixtures._make_storage_dir(), sequence)
    cache, _, _ = fixtures._l3_consumer(fixtures._make_storage_dir())
    assert cache.cache_controller.clear_storage_backend()
    fixtures._consume_prefetch(cache, sequence, CacheRequestHandle("cleared", 0))
    assert match_prefix(cache, sequence).host_hit_length == 0


def test_an_sglang_with_another_interface_is_refused_at_start() -> None:
    from kv_sglang import storage

    def batch_get_v1(self: Any, keys: Any, where: Any) -> None:
        """Another release's."""

    with (
        mock.patch.object(storage.HiCacheStorage, "batch_get_v1", batch_get_v1),
        pytest.raises(ConfigError, match=r"batch_get_v1 takes \['keys', 'where'\].* install sglang==0\.5\.23"),
    ):
        storage.check_interface()


def test_an_sglang_that_names_pages_otherwise_is_refused_at_start() -> None:
    from kv_sglang import attach

    with (
        mock.patch("sglang.srt.mem_cache.utils.get_hash_str", return_value=["00", "11"]),
        pytest.raises(ConfigError, match="names its pages differently"),
    ):
        attach.check_hashes()
