"""Which weights a page was computed with is part of its name, on disk too (docs/weights.md)."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from engines import COLD_HITS, PROMPTS, WARM_HITS, Answer
from kv_testing.tiny import TinyLlama
from nursery import Nursery, Ran

ASKED, COLD, WARM = PROMPTS[:3], COLD_HITS[:3], WARM_HITS[:3]
WEIGHTS = "model.safetensors"


@dataclass
class World:
    """A model's directory whose weights are overwritten while the first engine starts, and a disk of ours.

    old, new: what engines without us answer with the weights of before, and with the others.
    """

    engines: Nursery
    directory: Path
    cache: dict[str, Any]
    others: Path
    old: list[Answer]
    new: list[Answer]

    def run(self, *, cached: bool = True, **faults: list[str]) -> Ran:
        """An engine that is asked twice, and lets go of its disk once all is on it."""
        steps: list[dict[str, Any]] = [{"ask": ASKED}]
        if cached:
            steps += [{"ask": ASKED}, {"detach": None}]
        ran = self.engines.run(str(self.directory), steps, cache=self.cache if cached else None, faults=faults)
        assert not ran.failed, f"{ran.error}: {ran.log[-4000:]}"
        return ran

    def run_overwritten(self, **faults: list[str]) -> None:
        """The engine whose weights are overwritten. It computes with those of before, and finds its own pages."""
        over = {"overwrite_loaded_weights": [str(self.others / WEIGHTS), str(self.directory / WEIGHTS)]}
        first = self.run(**faults, **over)
        assert (self.directory / WEIGHTS).read_bytes() == (self.others / WEIGHTS).read_bytes()
        assert (first.answered(0), first.hits(0)) == (self.old, COLD)
        assert (first.answered(1), first.hits(1)) == (self.old, WARM)


@pytest.fixture(scope="module")
def of_others(engines: Nursery, reference: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> World:
    """With the other weights, and without a cache."""
    others = Path(TinyLlama(seed=1).write(tmp_path_factory.mktemp("others")))
    made = World(engines, others, {}, others, reference[:3], [])
    made.new = made.run(cached=False).answered(0)
    assert all(new != old for new, old in zip(made.new, made.old, strict=True))
    return made


@pytest.fixture
def world(of_others: World, tiny_llama: str, tmp_path: Path) -> World:
    shutil.copytree(tiny_llama, tmp_path / "model")
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    return replace(of_others, directory=tmp_path / "model", cache=cache)


@pytest.mark.slow
def test_weights_overwritten_after_they_were_loaded_name_nothing_for_the_next_engine(
    world: World, tiny_llama: str
) -> None:
    """Neither for one with the new weights nor, once they are back, for one with those of before."""
    world.run_overwritten()
    second = world.run()
    assert (second.answered(0), second.hits(0)) == (world.new, COLD)
    assert (second.answered(1), second.hits(1)) == (world.new, WARM)
    shutil.copyfile(Path(tiny_llama) / WEIGHTS, world.directory / WEIGHTS)
    third = world.run()
    assert (third.answered(0), third.hits(0)) == (world.old, COLD)


@pytest.mark.slow
def test_the_control_that_names_weights_by_their_files_of_now_answers_with_kv_of_others(world: World) -> None:
    """Without this the comparison above could not fail."""
    world.run_overwritten(name_weights_by_the_files_of_now=[])
    second = world.run()
    assert second.hits(0) == WARM
    assert all(answer != new for answer, new in zip(second.answered(0), world.new, strict=True))
