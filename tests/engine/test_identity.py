"""Which weights computed a chunk is part of its name: on disk, and updated in a running engine.

A cache that outlives the engine is the hard case, so the tests here have a named pool or a disk: what one engine left
under a wrong name, the next would find.
"""

import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import PROMPTS, Answer, Engine, started
from kv_tiers import HostPool
from kv_vllm import connector
from kv_vllm.weights import declared_calls, sum_of_weights
from models import BY_NAME
from oracle import Oracle
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

NAME = "kv-test-identity"
NAMED: dict[str, Any] = {"host": {"capacity_bytes": "64MiB", "name": NAME}}
ASKED = PROMPTS[:3]
COLD, WARM = [0, 512, 512], [512, 512, 1023]
LAYER = 2


class OneName:
    kv_leaves_weights_alone = "look"


class Numbers:
    kv_leaves_weights_alone = (1, 2)


@pytest.mark.parametrize(
    "extension", ["test_identity.OneName", "test_identity.Numbers", "test_identity.Missing", "no.such"]
)
def test_a_declaration_that_cannot_be_read_declares_nothing(extension: str, caplog: pytest.LogCaptureFixture) -> None:
    assert declared_calls(extension) == frozenset()
    assert extension in caplog.text


class Executor(UniProcExecutor):
    """vLLM's, with a worker that answers everything."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self.driver_worker = SimpleNamespace(
            reload_weights=lambda: True,
            supports_draft_weight_updates=lambda: True,
            release_late_interaction_query_cache=lambda keys: True,
        )


def test_what_vllm_does_by_itself_is_no_change_of_the_weights(tiny_llama: str) -> None:
    """It asks the first when an engine with `--weight-transfer-config` has started, and does the second after each
    request that compares documents with a query."""
    oracle = Oracle(tiny_llama)
    weights, executor = oracle.engine.weights, Executor(oracle.vllm_config)
    assert weights is not None
    assert executor.supports_draft_weight_updates()
    executor.collective_rpc("release_late_interaction_query_cache", args=(["a query"],))
    assert weights.identity.changes == 0
    executor.collective_rpc("reload_weights")
    assert weights.identity.changes == 1
    oracle.close()


def test_an_engine_without_us_in_the_same_process_is_none_of_our_business(
    tiny_llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its executor is of the class whose calls are observed."""
    oracle, other = Oracle(tiny_llama), Oracle(tiny_llama, connector=False)
    weights = oracle.engine.weights
    assert weights is not None
    Executor(other.vllm_config).collective_rpc("reload_weights")
    assert weights.identity.changes == 0
    assert "was not understood" not in caplog.text
    oracle.close()


@pytest.fixture(scope="module")
def model(tiny_llama: str) -> Path:
    return Path(tiny_llama)


@pytest.fixture(scope="module")
def of_model(reference: list[Answer]) -> list[Answer]:
    return reference[:3]


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same but for one layer's norm, negated: another model, whose KV is other KV from that layer on."""
    directory = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    weights[f"model.layers.{LAYER}.input_layernorm.weight"] *= -1.0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def of_tuned(tuned: Path, of_model: list[Answer]) -> list[Answer]:
    with started(str(tuned), cache=None) as engine:
        answered = engine.ask_in_turn(ASKED)
    assert all(one != other for one, other in zip(answered, of_model, strict=True))
    return answered


@pytest.fixture(scope="module", autouse=True)
def _no_pool_stays() -> Iterator[None]:
    yield
    HostPool.unlink(NAME)


def tune(loaded: Any) -> None:
    """What tells `tuned` from `model`, done to a loaded model; and undone by doing it again."""
    loaded.model.layers[LAYER].input_layernorm.weight.data.neg_()


def warm(engine: Engine, expected: list[Answer]) -> None:
    """Ask until all has been stored, and see that it is found."""
    assert engine.ask_in_turn(ASKED) == expected
    assert engine.ask_in_turn(ASKED) == expected
    assert engine.hits == WARM


@pytest.mark.slow
def test_one_weight_changed_in_place_between_the_old_samples_is_another_model(
    model: Path, tmp_path: Path, of_model: list[Answer]
) -> None:
    """4 bytes of a middle layer, which 16 samples of 64 KiB of the file do not see."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    with started(str(directory), cache=cache) as engine:
        warm(engine, of_model)
    file = directory / "model.safetensors"
    size, sample = file.stat().st_size, 64 * 1024
    between = (size - sample) * 7 // 15 + 4 * sample
    assert (size - sample) * 7 // 15 + sample < between < (size - sample) * 8 // 15
    with file.open("r+b") as stream:
        stream.seek(between // 4 * 4)
        stream.write(torch.tensor([3.0]).numpy().tobytes())
    assert file.stat().st_size == size
    with started(str(directory), cache=cache) as engine:
        engine.ask_in_turn(ASKED[:1])
        assert engine.hits == [0]


@pytest.mark.slow
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.long), True])
def test_what_was_computed_before_an_update_in_place_is_never_found_and_the_next_engine_finds_nothing_of_after(
    model: Path, tuned: Path, of_model: list[Answer], of_tuned: list[Answer], tmp_path: Path, apart: bool
) -> None:
    """vLLM's `reload_weights`, back and forth.

    apart: the worker is in a process of its own, the scheduler in another, the cache in a third.
    """
    disk = {"type": "disk", "directory": str(tmp_path), "capacity_bytes": "256MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    with started(str(model), cache=cache, own_process=apart) as engine:
        warm(engine, of_model)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tuned)})
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == COLD
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == WARM  # in this engine, they are known
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        assert engine.ask_in_turn(ASKED[:1]) == of_model[:1]
        assert engine.hits == [0]
        assert engine.inside("kv_snapshot")["faults"] == []
    for path, expected, hits in ((tuned, of_tuned, 0), (model, of_model, WARM[0]))[apart:]:
        with started(str(path), cache=cache, own_process=apart) as engine:
            assert engine.ask_in_turn(ASKED[:1]) == expected[:1]
            assert engine.hits == [hits], path


@pytest.mark.long
def test_two_ranks_that_update_their_weights_agree_on_the_new_key_space(
    model: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank stores its shard under the name that the scheduler gives: a hit needs both."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with started(str(model), cache=None, **two) as plain:
        of_model = plain.ask_in_turn(ASKED)
        plain.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tuned)})
        of_tuned = plain.ask_in_turn(ASKED)
    assert all(one != other for one, other in zip(of_tuned, of_model, strict=True))
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "256MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}, "server": {"answer_s": 20}}
    with started(str(model), cache=cache, **two) as engine:
        warm(engine, of_model)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tuned)})
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == COLD
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == WARM


class Summed(torch.nn.Module):
    """A model with a tensor in each place where vLLM's have some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(35, dtype=torch.float32).reshape(5, 7).t(), requires_grad=False)
        self.tied = self.weight
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16), persistent=False)
        self.absorbed = torch.ones(13, dtype=torch.int8)
        self.stacked = (torch.zeros(0), torch.ones(2))
        self.by_name = {"one": torch.ones(())}
        self.kv_cache = [torch.zeros(8)]

    def tensors(self) -> list[torch.Tensor]:
        buffers = [self.get_buffer("scale"), self.absorbed]
        return [self.weight.data, *buffers, self.stacked[1], self.by_name["one"]]


def summed(model: torch.nn.Module | None, draft: torch.nn.Module | None = None) -> str:
    return sum_of_weights(
        SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model), get_draft_model=lambda: draft)
    )


class Inner(torch.nn.Parameter):
    """Such as vLLM's for weights with shared parts."""

    partitions: dict[int, torch.Tensor]


class TestSums:
    def test_any_bit_of_any_tensor_counts(self) -> None:
        model = Summed()
        sums, total = {summed(model), summed(model, model), summed(model, Summed())}, 3
        for tensor in model.tensors():
            octets = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for place in range(len(octets)):
                for bit in range(8):
                    octets[place] ^= 1 << bit
                    sums.add(summed(model))
                    total += 1
                    octets[place] ^= 1 << bit
        assert len(sums) == total
        assert summed(model) in sums

    def test_two_words_that_change_places_count(self) -> None:
        model = Summed()
        before = summed(model)
        words = model.weight.data.untyped_storage()
        flat = torch.empty(0, dtype=torch.int64).set_(words, 0, (17,))
        flat[[3, 9]] = flat[[9, 3]]
        assert summed(model) != before

    def test_the_same_bytes_read_otherwise_count(self) -> None:
        model = Summed()
        before = summed(model)
        model.weight.data = model.weight.data.view(torch.int32)
        assert summed(model) != before
        model = Summed()
        del model.tied
        model.tied = torch.nn.Parameter(model.weight.detach().clone(), requires_grad=False)
        assert summed(model) != before

    def test_the_kv_cache_does_not(self) -> None:
        model = Summed()
        before = summed(model)
        model.kv_cache[0].fill_(1.0)
        assert summed(model) == before

    def test_a_tensor_whose_bytes_are_elsewhere_has_no_sum(self) -> None:
        model = Summed()
        model.weight = Inner(torch.ones(2), requires_grad=False)
        model.weight.partitions = {0: torch.ones(2)}
        with pytest.raises(TypeError, match="weight"):
            summed(model)


@pytest.fixture
def sleep_mode(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An engine's arguments for sleep mode. vLLM refuses it on a CPU, where its workers would keep all memory. Here
    they do, and all else that vLLM does for a sleep is what it does on a GPU."""
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda self: True)
    return {"enable_sleep_mode": True}


def behind_our_back(engine: Engine, change: Any) -> None:
    """Change loaded weights as a trainer would that has the memory mapped: no call of vLLM's tells of it."""
    executor = engine.llm.llm_engine.model_executor
    type(executor).collective_rpc.__wrapped__(executor, change)


def negate_one(worker: Any) -> None:
    worker.model_runner.model.model.layers[LAYER].input_layernorm.weight.data[0].neg_()


def forget_all(worker: Any) -> None:
    """As a sleep of level 2 does."""
    for parameter in worker.model_runner.model.parameters():
        parameter.data.zero_()


def negate_one_of_the_second_rank(worker: Any) -> None:
    if worker.rank == 1:
        negate_one(worker)


def test_a_sleep_keeps_every_chunk_as_long_as_every_byte_of_the_weights_is_back(
    model: Path, of_model: list[Answer], tmp_path: Path, sleep_mode: dict[str, Any]
) -> None:
    disk = {"type": "disk", "directory": str(tmp_path), "capacity_bytes": "256MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    with started(str(model), cache=cache, **sleep_mode) as engine:
        warm(engine, of_model)
        space = engine.inside("kv_key_space")
        core = engine.llm.llm_engine.engine_core.engine_core
        core.pause_scheduler()
        core.resume_scheduler()
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == WARM
        for level in (1, 2):
            engine.llm.sleep(level=level)
            if level == 2:
                behind_our_back(engine, forget_all)
            engine.llm.wake_up(tags=["weights"])
            if level == 2:
                engine.llm.collective_rpc("reload_weights")
            engine.llm.wake_up(tags=["kv_cache"])
            assert engine.ask_in_turn(ASKED) == of_model
            assert engine.hits == WARM
            assert engine.inside("kv_key_space") == space
        engine.llm.sleep(level=1)
        behind_our_back(engine, negate_one)
        engine.llm.wake_up()
        engine.ask_in_turn(ASKED)
        assert engine.hits == COLD, "one number of one layer's norm is another"
        assert engine.inside("kv_key_space") != space
        behind_our_back(engine, negate_one)
        engine.assert_at_rest()
    with started(str(model), cache=cache) as engine:
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == WARM, "what was on disk before the sleeps is still there"


@pytest.mark.long
def test_one_of_two_ranks_that_wakes_with_other_weights_is_another_model(
    model: Path, tmp_path: Path, sleep_mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "server": {"answer_s": 20}}
    with started(str(model), cache=cache, **two, **sleep_mode) as engine:
        of_model = engine.ask_in_turn(ASKED)
        warm(engine, of_model)
        engine.llm.sleep(level=1)
        engine.llm.wake_up()
        warm(engine, of_model)
        engine.llm.sleep(level=1)
        behind_our_back(engine, negate_one_of_the_second_rank)
        engine.llm.wake_up()
        engine.ask_in_turn(ASKED)
        assert engine.hits == COLD


class TestOneEngine:
    """One engine after the other of vLLM's verbs, in this order."""

    @pytest.fixture(scope="class")
    def engine(self, model: Path, of_model: list[Answer], of_tuned: list[Answer]) -> Iterator[Engine]:
        with started(str(model), cache=NAMED) as running:
            yield running

    def test_what_only_looks_at_the_weights_costs_no_hit(self, engine: Engine, of_model: list[Answer]) -> None:
        warm(engine, of_model)
        engine.llm.collective_rpc("compute_weight_checksums")
        engine.llm.collective_rpc("kv_snapshot")
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == WARM

    def test_a_method_of_an_extension_counts_as_a_change_unless_it_is_declared(
        self, engine: Engine, of_model: list[Answer]
    ) -> None:
        warm(engine, of_model)
        engine.llm.collective_rpc("kv_undeclared")
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == COLD

    def test_a_function_that_changes_the_model_is_seen(
        self, engine: Engine, of_model: list[Answer], of_tuned: list[Answer]
    ) -> None:
        engine.llm.apply_model(tune)
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == COLD
        engine.llm.apply_model(tune)
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == COLD

    def test_sleep_and_wake_make_a_new_key_space(self, engine: Engine, of_model: list[Answer]) -> None:
        """On a CPU vLLM keeps the weights, so the names alone can show it: none of before is found."""
        warm(engine, of_model)
        before = engine.inside("kv_key_space")
        engine.llm.sleep(level=1)
        asleep = engine.inside("kv_key_space")
        engine.llm.wake_up()
        assert len({before, asleep, engine.inside("kv_key_space")}) == 3
        assert engine.ask_in_turn(ASKED[:1]) == of_model[:1]
        assert engine.hits == [0]

    def test_weights_written_behind_our_back_need_the_reset_of_connectors_and_have_it(
        self, engine: Engine, of_model: list[Answer], of_tuned: list[Answer]
    ) -> None:
        """Nothing tells a connector of it. Trainers that write so must reset the caches, ours too."""
        warm(engine, of_model)
        executor = engine.llm.llm_engine.model_executor
        tune(executor.driver_worker.worker.model_runner.model)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == COLD
        assert engine.ask_in_turn(ASKED) == of_tuned
        assert engine.hits == WARM
        engine.assert_at_rest()


def test_an_engine_that_starts_after_it_finds_nothing_of_all_that(model: Path, of_model: list[Answer]) -> None:
    """It left them in a pool that outlives it, and has the same files."""
    with started(str(model), cache=NAMED) as engine:
        assert engine.ask_in_turn(ASKED[:1]) == of_model[:1]
        assert engine.hits == [0]


@pytest.fixture
def hybrid(tmp_path: Path) -> str:
    """A model of which vLLM deals four layers with a window out to two groups."""
    config = AutoConfig.from_pretrained(BY_NAME["Gemma 3"].write(tmp_path / "of four layers"))
    config.num_hidden_layers, config.layer_types = 6, ["sliding_attention", "sliding_attention", "full_attention"] * 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def dealt_in_runs(groups: list[KVCacheGroupSpec]) -> list[KVCacheGroupSpec]:
    """As vLLM did before it dealt layers out in turn."""
    for _, same in groupby(groups, key=lambda group: repr(group.kv_cache_spec)):
        alike = list(same)
        names = iter(sorted(name for group in alike for name in group.layer_names))
        for group in alike:
            group.layer_names = [next(names) for _ in group.layer_names]
    return groups


@pytest.mark.parametrize("is_named", [True, False])
def test_layers_that_are_dealt_out_another_way_are_other_chunks(
    hybrid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """is_named: or, as the control, the key space does not say which layers a group holds."""
    if not is_named:
        monkeypatch.setattr(connector, "tags_of_groups", lambda kv_cache_config: ())
    prompt = [PROMPTS[0] * 2]
    with started(hybrid, cache=None) as engine:
        expected = engine.ask(prompt)
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    with started(hybrid, cache=cache) as engine:
        assert engine.ask(prompt) == expected
        assert engine.ask(prompt) == expected
        (found,) = engine.hits
        assert found > 0
    deal = kv_cache_utils._get_kv_cache_groups_uniform_page_size
    monkeypatch.setattr(kv_cache_utils, deal.__name__, lambda spec: dealt_in_runs(deal(spec)))
    with started(hybrid, cache=cache) as engine:
        assert (engine.ask(prompt) == expected) == is_named
        assert engine.hits == [0 if is_named else found]


@pytest.mark.slow
def test_weights_that_were_replaced_after_they_were_loaded_name_nothing(
    model: Path,
    tuned: Path,
    of_model: list[Answer],
    of_tuned: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has the old ones, and what it stores would be the new ones' KV for every engine after it. `of_tuned`
    is the control: its answers are others."""
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    shutil.copytree(tuned, tmp_path / "tuned")
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}}
    real = connector.served_model

    def replaced(*args: Any, **named: Any) -> Any:
        new = tmp_path / "tuned" / "model.safetensors"
        if new.exists():  # the scheduler's half starts, and nothing of the files has been read for us
            new.replace(directory / "model.safetensors")
        return real(*args, **named)

    monkeypatch.setattr(connector, "served_model", replaced)
    with started(str(directory), cache=cache) as engine:
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.ask_in_turn(ASKED) == of_model
        assert engine.hits == WARM, "it finds its own"
        engine.assert_at_rest()
    for expected in (COLD, WARM):
        with started(str(directory), cache=cache) as engine:
            assert engine.ask_in_turn(ASKED) == of_tuned
            assert engine.hits == expected
