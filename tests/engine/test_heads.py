"""Heads that guess from the model's hidden states, EAGLE's, EAGLE-3's and MTP's, on the real engine.

Their layer's KV is stored beside the model's. A wrong byte of it makes guesses wrong and no token, so what is compared
is how many guesses are right, to the last one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import PROMPTS, SHARED, Answer, Engine, empty_the_pool, started
from heads import write_eagle3_head, write_eagle_head, write_guessed_model, write_model_with_a_head
from kv_connect.engine import engines
from kv_core.service import ReadLease

ASKED = [SHARED[200:800], PROMPTS[0], PROMPTS[1]]
"""The last two part behind 512 tokens: one finds chunks whose last place in the head depends on the other's tokens."""
COLD, WARM = [0, 0, 511], [511, 511, 511]
OTHER_HEADS = [pytest.param(method, marks=pytest.mark.long) for method in ("eagle", "mtp")]
Told = tuple[list[Answer], list[int], int, int]
"""Answers, hits, guesses that were right, guesses."""


class Asker:
    """Asks an engine, and counts its guesses each time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before = (0, 0)

    def ask(self, prompts: Sequence[Sequence[int]] = ASKED, new_tokens: int = 60) -> Told:
        answers = self.engine.ask_in_turn(prompts, new_tokens)
        counted = {metric.name: getattr(metric, "value", 0) for metric in self.engine.llm.get_metrics()}
        now = tuple(int(counted[f"vllm:spec_decode_num_{which}_tokens"]) for which in ("accepted", "draft"))
        right, guesses = (count - before for count, before in zip(now, self._before, strict=True))
        self._before = now
        return answers, self.engine.hits, right, guesses


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guessed_model(tmp_path_factory.mktemp("guessed"))


@pytest.fixture(scope="module")
def answers(model: Path) -> list[Answer]:
    return answers_of(model)


def answers_of(model: Path) -> list[Answer]:
    """Of the model without heads and without us: to `ASKED`, then a long one, and to what follows it."""
    with started(str(model), cache=None) as plain:
        given = plain.ask_in_turn(ASKED, 60)
        (told,) = plain.ask([ASKED[0]], 200)
        return [*given, told, *plain.ask([[*ASKED[0], *told, 7]], 60)]


def disk(directory: Path) -> dict[str, Any]:
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "256MiB"}
    return {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier], "cold": {"wait_s": 20}, "save_decode": True}


def negate(*, of_the_head: bool) -> None:
    """Change the sign of one layer's numbers in every chunk. Chunks are K of all layers, then V of all, and the head's
    layer is the last."""
    (inner,) = engines().values()
    assert inner.cache is not None
    keys = list(inner.cache.admin.resident_keys())  # type: ignore[union-attr]
    lease = inner.cache.load(keys, "control")
    assert keys and isinstance(lease, ReadLease)
    for extent in lease.extents:
        chunk = np.frombuffer(inner.cache.pool.view, np.float32, extent.nbytes // 4, extent.offset)
        chunk.reshape(2, 2, -1)[:, int(of_the_head)] *= -1
    inner.cache.release(lease)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", *OTHER_HEADS])
def test_as_many_guesses_of_a_head_are_right_from_the_cache_as_without(
    method: str, model: Path, answers: list[Answer], tmp_path: Path
) -> None:
    served = model
    guessing: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        served = write_model_with_a_head(tmp_path / "own", model)
        guessing["num_speculative_tokens"] = 1
    elif method == "eagle":
        guessing["model"] = str(write_eagle_head(tmp_path / "head", model))
    else:
        served = write_guessed_model(tmp_path / "loud", loud_attention=True)
        answers = answers_of(served)
        guessing["model"] = str(write_eagle3_head(tmp_path / "head", served))
    arguments = {"speculative_config": guessing, "disable_log_stats": False}
    follow_up = [*ASKED[0], *answers[3], 7]
    with started(str(served), cache=None, **arguments) as plain:
        alone = Asker(plain)
        given, _, right, guesses = alone.ask()
        assert given == answers[:3] and right > 0.6 * guesses
        _, _, long_right, long_guesses = alone.ask([ASKED[0]], 200)
        _, _, next_right, next_guesses = alone.ask([follow_up])
    with started(str(served), cache=disk(tmp_path), **arguments) as engine:
        asker = Asker(engine)
        assert asker.ask() == (answers[:3], COLD, right, guesses)
        assert asker.ask() == (answers[:3], WARM, right, guesses)
        assert asker.ask([ASKED[0]], 200) == (answers[3:4], [511], long_right, long_guesses)
        assert asker.ask([follow_up]) == (answers[4:], [767], next_right, next_guesses), "generated tokens are kept"
        engine.assert_at_rest()
        negate(of_the_head=True)
        given, hits, fewer, _ = asker.ask()
        assert (given, hits) == (answers[:3], WARM) and fewer < 0.2 * right, "the control"
        negate(of_the_head=True)
        negate(of_the_head=False)
        assert asker.ask()[0] != answers[:3], "the control"
        negate(of_the_head=False)
        empty_the_pool()
        assert asker.ask() == (answers[:3], WARM, right, guesses), "from disk"
    with started(str(served), cache=disk(tmp_path), **arguments) as restarted:
        assert Asker(restarted).ask() == (answers[:3], WARM, right, guesses)
        restarted.assert_at_rest()


@pytest.mark.slow
def test_chunks_of_one_head_are_for_no_other_and_for_no_engine_without(
    model: Path, answers: list[Answer], tmp_path: Path
) -> None:
    heads = [write_eagle_head(tmp_path / f"head{seed}", model, seed) for seed in (1, 2)]
    guessing = [{"method": "eagle", "model": str(head), "num_speculative_tokens": 3} for head in heads]
    hits = []
    for each in (*guessing, None, guessing[0]):
        arguments = {"speculative_config": each} if each else {}
        with started(str(model), cache=disk(tmp_path), **arguments) as engine:
            assert engine.ask_in_turn(ASKED, 60) == answers[:3]
            hits.append(engine.hits)
    assert hits == [COLD, COLD, [0, 0, 512], WARM]
