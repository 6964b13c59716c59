"""Blending on real SGLang by phases: documents in any order, and never under an exact name.

A tiny model with random weights shows every wrong bit, so what is approximate differs. What is exact must be equal.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from engines import PAGE, Answer, Engine, corrupt, started
from kv_blend import request_fields
from kv_testing.documents import FIRST, SECOND, Prompt

EXACT = [FIRST, SECOND, *(Prompt((at,)) for at in range(4)), Prompt((1, 0)), Prompt((3, 2, 1))]


def cache(pool: str = "") -> dict[str, Any]:
    return {"host": {"capacity_bytes": "64MiB", "name": pool}}


def fields(prompts: Sequence[Prompt], **plan: Any) -> list[dict[str, Any]]:
    return [request_fields(each.segments, tokens=len(each.tokens), engine="sglang", **plan) for each in prompts]


def blend(engine: Engine, prompts: Sequence[Prompt], **plan: Any) -> tuple[list[Answer], list[Any]]:
    return engine.blend([each.tokens for each in prompts], fields(prompts, **plan))


@pytest.fixture(scope="module")
def exact(tiny_llama: str) -> dict[Prompt, Answer]:
    """What an engine without us answers."""
    with started(tiny_llama) as plain:
        return dict(zip(EXACT, plain.ask_in_turn([prompt.tokens for prompt in EXACT]), strict=True))


@pytest.fixture(scope="module")
def pool() -> str:
    return f"kv-blend-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def engine(tiny_llama: str, pool: str) -> Iterator[Engine]:
    with started(tiny_llama, cache=cache(pool), blends=True) as engine:
        yield engine


def test_documents_are_reused_in_any_order(engine: Engine, exact: dict[Prompt, Answer]) -> None:
    _, (first,) = blend(engine, [FIRST])
    assert first["segment_tokens"] == 1171
    assert first["held_tokens"] == 0
    answers, reports = blend(engine, [SECOND, Prompt((3, 2, 1))])
    print(first, reports, engine.hits, engine.log[-3000:])
    assert [each["segment_tokens"] for each in reports] == [1171, 871]
