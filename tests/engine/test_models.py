"""The table of models, docs/models.md: of each kind that vLLM serves, what the real engine shows.

Each row is one model with random weights that matter. The judge is the engine without us: its full prefill, or, where a
hit and a full prefill differ by themselves, its own prefix-cache hit of the same length and with the same steps.
`KV_WRITE_MODELS=1` writes the page's rows; without it each row must be as the page says.
"""

import operator
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_v4_on_cpu  # noqa: F401  # a stand-in, which its import puts in place
import numpy as np
import pytest
import torch
from engines import CHUNK_TOKENS, Answer, Engine, empty_the_pool, started
from kv_connect.engine import Engine as Attached
from kv_connect.engine import engines
from kv_core.service import ReadLease
from models import BY_NAME, MODELS, TinyModel
from models_page import PAGE, Row, read_rows, write_row

IN_CI = ("Llama", "Gemma 3", "DeepSeek-V2", "DeepSeek-V4", "Qwen3-Next", "Mamba2", "Llama 4")
"""One of each kind. The others are like one of them, or cannot run here, and are among the long tests."""
TOKENS = [3 + (7919 * i) % 1900 for i in range(2900)]
NEW_TOKENS = 6


@dataclass(frozen=True)
class Prompts:
    """Of a prompt of so many tokens every boundary that a hit may have, and for each two prompts.

    just_behind: one token more than the boundary, so that a state is taken there and is what the next token depends on.
    parting: the prompt up to the boundary, then other tokens to the same length.
    """

    chunk_tokens: int
    tokens: int

    @property
    def whole(self) -> list[int]:
        return TOKENS[: self.tokens]

    @property
    def boundaries(self) -> list[int]:
        return list(range(self.chunk_tokens, len(self.whole), self.chunk_tokens))

    @property
    def just_behind(self) -> list[list[int]]:
        return [self.whole[: boundary + 1] for boundary in self.boundaries]

    @property
    def parting(self) -> list[list[int]]:
        return [
            self.whole[:boundary] + [5 + (31 * i + boundary) % 1900 for i in range(len(self.whole) - boundary)]
            for boundary in self.boundaries
        ]

    @property
    def all(self) -> list[list[int]]:
        return self.just_behind + self.parting

    @property
    def cold_hits(self) -> list[int]:
        """Each of the first finds what those before it left, and each of the others its boundary."""
        return [0, *self.boundaries[:-1], *self.boundaries]

    def are_warm(self, hits: Sequence[int]) -> bool:
        """Whether these are hits where all was stored: those that part are longer now, for they were stored too."""
        first, parting = hits[: len(self.boundaries)], hits[len(self.boundaries) :]
        return first == self.boundaries and all(map(operator.ge, parting, self.boundaries))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model's directory, written when it is first asked for."""
    directories: dict[str, str] = {}

    def directory(model: TinyModel) -> str:
        if model.name not in directories:
            directories[model.name] = str(model.write(tmp_path_factory.mktemp("model")))
        return directories[model.name]

    return directory


@contextmanager
def engine(model: str, row: TinyModel, cache: dict[str, Any] | None, **arguments: Any) -> Iterator[Engine]:
    chunk_tokens = None if row.has_states else CHUNK_TOKENS
    with started(model, cache=cache, chunk_tokens=chunk_tokens, **{**row.arguments, **arguments}) as running:
        yield running


@dataclass(frozen=True)
class Asked:
    """Prompts asked one after the other, a list entry each.

    steps: how many tokens each forward pass computed, of which a model's rounding may hang.
    """

    answers: list[Answer]
    hits: list[int]
    steps: list[list[int]]


def ask(running: Engine, prompts: Sequence[Sequence[int]], own_cache: bool = False) -> Asked:
    """Ask each without what vLLM itself remembers of those before it, unless its `own_cache` is what is asked for."""
    asked = Asked([], [], [])
    scheduler = running.llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def noted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        if output.total_num_scheduled_tokens:
            asked.steps[-1].append(output.total_num_scheduled_tokens)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", noted)
        for prompt in prompts:
            if not own_cache:
                running.llm.reset_prefix_cache()
            asked.steps.append([])
            asked.answers.extend(running.ask([prompt], NEW_TOKENS))
            asked.hits.extend(running.hits)
    return asked


def likelihoods(running: Engine, prompts: Prompts) -> list[float]:
    """Logarithms of what the last chunk, and 300 tokens behind it that are not stored, make likely next. They show what
    an index may lack, which chooses some hundreds of a prompt's parts and so has little to say about a token."""
    from vllm import SamplingParams, TokensPrompt

    running.llm.reset_prefix_cache()
    prompt = prompts.whole[: prompts.boundaries[-1]] + [7 + (43 * i) % 1900 for i in range(300)]
    sampled = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"kv_tiers": {"store": False}}},
    )
    (output,) = running.llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampled, use_tqdm=False)
    assert output.num_cached_tokens == prompts.boundaries[-1]
    return [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]


def alone(model: str, row: TinyModel, prompts: Prompts) -> list[Asked]:
    """What the engine answers without us: computed whole, or from its own prefix cache, cold and then warm, where only
    that compares."""
    if row.own_hits:
        with engine(model, row, None, enable_prefix_caching=True) as own:
            asked = [ask(own, prompts.all, own_cache=True) for _ in range(2)]
            assert asked[0].hits == prompts.cold_hits, "the yardstick's hits are others than ours"
            return asked
    with engine(model, row, None) as plain:
        computed = ask(plain, prompts.all)
        assert not any(computed.hits)
        return [computed]


def own_answers(asked: Asked, alone: Sequence[Asked], chain: int) -> list[Answer | None]:
    """For each prompt what the engine alone answered where it computed it in the same last steps. None: it never did,
    or something that was loaded for this one was computed in other steps.

    chain: how many prompts at the front extend one another; of their chunks those behind them are loaded.
    """
    answers: list[Answer | None] = []
    chain_is_alike = True
    for number, steps in enumerate(asked.steps):
        same = [own.answers[number] for own in alone if own.steps[number][-len(steps) :] == steps]
        answers.append(same[0] if same and chain_is_alike else None)
        chain_is_alike = chain_is_alike and (bool(same) or number >= chain)
    return answers


def scramble(inner: Attached, group: int) -> None:
    """Move every byte of one group's chunks to another place of its chunk. Twice is as if it had not been."""
    assert inner.cache is not None
    keys = [key for key in inner.cache.admin.resident_keys() if key.group == group]  # type: ignore[union-attr]
    assert keys
    lease = inner.cache.load(keys, "control")
    assert isinstance(lease, ReadLease)
    for extent in lease.extents:
        values = np.frombuffer(inner.cache.pool.view, dtype=np.uint8)[extent.offset : extent.offset + extent.nbytes]
        values[:] = np.roll(values, extent.nbytes // 2)
    inner.cache.release(lease)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(model.name, marks=[] if model.name in IN_CI else pytest.mark.long)
        for model in MODELS
        if not model.cannot
    ],
)
def test_a_model_that_is_cached(name: str, written: Any, tmp_path: Path) -> None:
    """Cold, warm, at every boundary, half forgotten, from disk, after a restart: the tokens of the engine alone; and
    each group's bytes matter."""
    if name == "DeepSeek-V4" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's build for this processor lacks the model's kernels, which need AVX-512 with bfloat16")
    row = BY_NAME[name]
    model = written(row)
    tier = {"type": "disk", "directory": str(tmp_path / "disk"), "capacity_bytes": "256MiB"}
    cache = {"host": {"capacity_bytes": "128MiB"}, "tiers": [tier], "cold": {"wait_s": 20.0}}
    shown: dict[str, str] = {}
    with engine(model, row, cache) as first:
        (inner,) = engines().values()
        assert not inner.off and inner.facts is not None
        shown |= {"groups": _groups(inner), "chunk": str(inner.facts.chunk_tokens)}
        prompts = Prompts(inner.facts.chunk_tokens, row.prompt_tokens)
        asked = {"cold": ask(first, prompts.all)}
        assert asked["cold"].hits == prompts.cold_hits
        asked["warm"] = ask(first, prompts.all)
        assert prompts.are_warm(asked["warm"].hits), asked["warm"].hits
        warm = asked["warm"].answers[: len(prompts.boundaries)]
        likely, unlike = likelihoods(first, prompts), []
        for group in range(len(inner.facts.groups)):
            scramble(inner, group)
            if ask(first, prompts.just_behind).answers == warm and likelihoods(first, prompts) == likely:
                unlike.append(group)
            scramble(inner, group)
        assert not unlike, f"bytes of groups {unlike} changed, and nothing else did"
        assert ask(first, prompts.just_behind).answers == warm
        first.inside("kv_settle")
        empty_the_pool()
        asked["disk"] = ask(first, prompts.all)
        assert prompts.are_warm(asked["disk"].hits), asked["disk"].hits
        first.inside("kv_forget_half")
        asked["half forgotten"] = ask(first, prompts.all)
        assert not prompts.are_warm(asked["half forgotten"].hits), asked["half forgotten"].hits
        asked["again"] = ask(first, prompts.all)
        first.assert_at_rest()
    with engine(model, row, cache) as second:
        asked["restart"] = ask(second, prompts.all)
        assert sum(asked["restart"].hits) > 0
        second.assert_at_rest()
    expected = alone(model, row, prompts)
    loads_are_alike = [True] * len(prompts.all)
    for way, given in asked.items():
        its: Sequence[Answer | None] = expected[0].answers
        if row.own_hits:
            its = own_answers(given, expected, len(prompts.boundaries))
            its = [answer if alike else None for answer, alike in zip(its, loads_are_alike, strict=True)]
            # What this round computed in other steps, the rounds after it load.
            loads_are_alike = [answer is not None for answer in its]
        assert sum(answer is not None for answer in its) > len(its) // 4, way
        shown[way] = _equal(given.answers, its)
    assert shown.pop("again") == shown["warm"]
    shown["control"] = "differs for each"
    _hold(Row(name, row.dtype, shown))


@pytest.mark.long
@pytest.mark.parametrize("name", [model.name for model in MODELS if model.cannot])
def test_a_model_that_vllm_cannot_run_here(name: str, written: Any) -> None:
    """The row says so in vLLM's words. Should this fail one day, the model can have a row like the others."""
    row = BY_NAME[name]
    script = Path(__file__).with_name("one_model.py")
    ran = subprocess.run(
        [sys.executable, script, name, written(row)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode != 0 and row.cannot in ran.stdout + ran.stderr
    _hold(Row(name, row.dtype, {"cannot": row.cannot}))


def _equal(answers: Sequence[Answer], expected: Sequence[Answer | None]) -> str:
    """Where there is something to compare with."""
    same = [answer == right for answer, right in zip(answers, expected, strict=True) if right is not None]
    return "equal" if all(same) else f"{sum(same)} of {len(same)} equal"


def _groups(inner: Attached) -> str:
    assert inner.facts is not None
    coverages = [str(group.coverage) for group in inner.facts.groups]
    return ", ".join(
        coverage if (count := coverages.count(coverage)) == 1 else f"{count} × {coverage}"
        for coverage in dict.fromkeys(coverages)
    )


def _hold(row: Row) -> None:
    if os.environ.get("KV_WRITE_MODELS"):
        write_row(row)
    assert row == read_rows()[row.name]


def test_the_page_has_a_row_for_every_model_and_is_as_its_rows_are_written() -> None:
    rows = read_rows()
    assert list(rows) == [model.name for model in MODELS]
    assert {name: row.dtype for name, row in rows.items()} == {model.name: model.dtype for model in MODELS}
    assert {name: row.shown.get("cannot", "") for name, row in rows.items()} == {
        model.name: model.cannot for model in MODELS
    }
    assert "".join(rows[model.name].to_text() for model in MODELS) in PAGE.read_text(encoding="utf-8")
