"""Which pages of an engine are in doubt after each step of a change of its weights, by a stand-in of its classes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kv_connect.identity import LiveWeights, ServedModel
from kv_sglang import weights
from kv_sglang.weights import WeightsWatch, _watched


class Runner:
    """What SGLang counts of a model's forward passes."""

    forward_pass_id = 7


class Updater:
    """SGLang's `WeightUpdater`, of one model runner."""

    def __init__(self, runner: Runner) -> None:
        self.get_model_runner = lambda: runner

    def begin(self) -> None: ...
    def update(self) -> None: ...
    def end(self) -> None: ...


class Memory:
    """Its `SchedulerWeightUpdaterManager`."""

    def __init__(self, runner: Runner) -> None:
        self.tp_worker = SimpleNamespace(model_runner=runner)

    def release(self) -> None: ...
    def resume(self) -> None: ...


class Pool:
    def clear(self) -> None: ...


class Engine:
    def __init__(self) -> None:
        self.runner, self.draft, self.pool = Runner(), Runner(), Pool()
        self.updaters = [Updater(self.runner), Updater(self.draft)]
        self.memory = Memory(self.runner)
        self.watch = WeightsWatch(LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0)))
        self.watch.watch_for_clear(self.pool)

    def step(self, name: str, *, flush: bool = False) -> bool:
        """Of the model and of its draft. Returns whether pages are in doubt after it."""
        for updater in self.updaters:
            _watched(getattr(Updater, name), name)(updater)
        if flush:
            self.pool.clear()
        return self.watch.holds_old_pages()

    def of_memory(self, name: str, *, flush: bool = False) -> bool:
        def call(_memory: Any) -> None:
            if flush:
                self.pool.clear()

        _watched(call, name)(self.memory)
        return self.watch.holds_old_pages()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(weights, "_SEEN", weights._Seen())
    made = Engine()
    yield made
    made.watch.close()


def test_the_end_of_an_update_that_emptied_the_caches_leaves_no_page_in_doubt(engine: Engine) -> None:
    """Else a trainer that updates before every rollout would have nothing stored."""
    for _ in range(2):
        assert engine.step("begin")
        assert not engine.step("update", flush=True)
        assert not engine.step("end")
        engine.runner.forward_pass_id += 3


def test_memory_that_is_taken_back_has_no_pages(engine: Engine) -> None:
    assert not engine.of_memory("release", flush=True)
    assert not engine.of_memory("resume")
    assert not engine.of_memory("resume")  # for the weights, and for the caches


def test_memory_is_released_once_nothing_accesses_it(engine: Engine) -> None:
    """Copies that have begun are waited for, and none begins any more, as the pages are in doubt by then."""
    settled: list[bool] = []
    engine.watch.settle = lambda: settled.append(engine.watch.holds_old_pages())
    _watched(lambda _memory: settled.append(False), "release_memory_occupation")(engine.memory)
    assert settled == [True, False]
    engine.of_memory("resume_memory_occupation")
    assert len(settled) == 2


def test_what_was_computed_in_between_is_in_doubt(engine: Engine) -> None:
    assert not engine.step("update", flush=True)
    engine.runner.forward_pass_id += 1
    assert engine.step("end")


def test_what_another_engine_computed_is_in_doubt(engine: Engine) -> None:
    """It arrives without a forward pass of this engine."""
    assert not engine.step("update", flush=True)
    engine.watch.filled()
    assert engine.step("end")


def test_caches_that_were_not_emptied_are_in_doubt_to_the_end(engine: Engine) -> None:
    assert engine.step("begin") and engine.step("update") and engine.step("end")
    engine.pool.clear()
    assert not engine.watch.holds_old_pages()


def test_an_engine_that_does_not_count_its_passes_is_always_in_doubt(engine: Engine) -> None:
    engine.updaters = [Updater(SimpleNamespace())]  # type: ignore[arg-type]
    assert not engine.step("update", flush=True)
    assert engine.step("end")
