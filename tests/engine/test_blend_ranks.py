"""Blending on two tensor-parallel ranks: each has its share of a segment, and they compute together or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from blending import CACHE, Blending, exact_answers
from engines import Answer, started
from kv_blend import edited, request_fields
from kv_testing.documents import BEFORE, DROPPED, FIRST, SECOND, SELECTIONS, Prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exact(tiny_llama: str) -> dict[Prompt, Answer]:
    return exact_answers(tiny_llama)


@contextmanager
def two_ranks(model: str, **arguments: Any) -> Iterator[Blending]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        with started(
            model,
            cache=CACHE,
            connector="KVBlendConnector",
            own_process=True,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            enable_prefix_caching=True,
            worker_extension_cls="one_rank.OneRank",
            **arguments,
        ) as inner:
            yield Blending(inner.llm)


@pytest.mark.timeout(300)
def test_two_ranks_blend_and_go_on_whatever_one_of_them_does(tiny_llama: str, exact: dict[Prompt, Answer]) -> None:
    with two_ranks(tiny_llama) as engine:
        for selection in SELECTIONS.values():
            assert engine.blend([FIRST, SECOND], share=1.0, **selection) == [exact[FIRST], exact[SECOND]]
        assert engine.blend([Prompt((2,))], share=0.0) == [exact[Prompt((2,))]]
        engine.blend([SECOND], **SELECTIONS["question"])  # each rank has the attention of its own heads
        assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 1171, "recomputed_tokens": 157}]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.ask([BEFORE.tokens])
        everything = request_fields(**edited(BEFORE.tokens, SECOND.tokens), share=1.0)
        assert engine.blend([SECOND], fields=everything) == [exact[SECOND]]
        assert engine.reports[0]["held_tokens"] == 1536 - DROPPED

        engine.inside_all("kv_loses_segments")
        # Nobody reads what one of them has lost.
        assert engine.blend([Prompt((3, 2, 1))], share=0.0) == [exact[Prompt((3, 2, 1))]]
        assert "refused" not in engine.reports[0]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
    with two_ranks(tiny_llama) as engine:
        engine.blend([FIRST])
        engine.inside_all("kv_fails")
        assert engine.blend([SECOND, Prompt((1, 0))]) == [exact[SECOND], exact[Prompt((1, 0))]]
        assert all("computed whole" in report["refused"] for report in engine.reports)
        engine.inside_all("kv_turns_off")
        assert engine.blend([Prompt((1,)), Prompt((3, 2, 1))]) == [exact[Prompt((1,))], exact[Prompt((3, 2, 1))]]
        assert all("computed whole" in report["refused"] for report in engine.reports)
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]


@pytest.mark.long
def test_latents_that_both_ranks_have_are_reused_as_soon_as_one_has_stored_them(tiny_deepseek: str) -> None:
    reference = {"attention_config": {"backend": "CPU_MLA"}}
    exact = exact_answers(tiny_deepseek, **reference)
    with two_ranks(tiny_deepseek, **reference) as engine:
        for selection in SELECTIONS.values():
            assert engine.blend([FIRST, SECOND], share=1.0, **selection) == [exact[FIRST], exact[SECOND]]
        engine.blend([SECOND], **SELECTIONS["question"])
        assert engine.reports == [{"segment_tokens": 1171, "held_tokens": 1171, "recomputed_tokens": 157}]
        assert engine.ask([SECOND.tokens]) == [exact[SECOND]]
        engine.inside_all("kv_stores_slowly")
        computed, reused = (engine.blend([SECOND], share=0.0, tenant="new") for _ in range(2))
        assert computed == reused != [exact[SECOND]]
