"""What users see: two trained models answer questions about this repository's documents.

Cold, found, from disk and after a restart the tokens are the same. `make test-trained` makes the models first; without
them these tests are skipped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import Answer, Engine, empty_the_pool, started
from kv_connect.engine import engines

ROOT = Path(__file__).parents[2]
MADE = ROOT / ".venvs" / "trained" / "models"
DOCUMENTS = ("docs/observability.md", "docs/contracts/vllm.md", "docs/settings.md")
QUESTIONS = ("What is a chunk?", "How many tokens has a chunk by default?", "What happens after a failure?")
TOKENS = 2100
NEW_TOKENS = 16

pytestmark = pytest.mark.trained


def prompts(engine: Engine) -> list[list[int]]:
    """Each document, cut to so many tokens, with each question behind it."""
    tokenizer = engine.llm.get_tokenizer()
    made = []
    for name in DOCUMENTS:
        document = tokenizer.encode((ROOT / name).read_text(encoding="utf-8"))[:TOKENS]
        assert len(document) == TOKENS
        made += [[*document, *tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:")] for question in QUESTIONS]
    return made


def ask(engine: Engine, asked: Sequence[Sequence[int]]) -> list[Answer]:
    return engine.ask_in_turn(asked, NEW_TOKENS)


@pytest.mark.parametrize(
    ("name", "coverages"),
    [("SmolLM2 135M", ["all"]), ("Gemma 3 270M", ["all", *["window:512"] * 5])],
)
def test_the_same_answers_cold_found_from_disk_and_after_a_restart(
    name: str, coverages: list[str], tmp_path: Path
) -> None:
    if not (MADE / name / ".written").exists():
        pytest.skip("the trained models are not here; make test-trained makes them")
    model, arguments = str(MADE / name), {"skip_tokenizer_init": False, "max_num_batched_tokens": 4096}
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "2GiB"}
    cache: dict[str, Any] = {"host": {"capacity_bytes": "1GiB"}, "tiers": [tier], "cold": {"wait_s": 20.0}}
    with started(model, cache=None, **arguments) as plain:
        asked = prompts(plain)
        expected = ask(plain, asked)
    behind_documents = [0, 2048, 2048] * len(DOCUMENTS)
    with started(model, cache=cache, **arguments) as engine:
        (inner,) = engines().values()
        assert inner.facts is not None
        assert sorted(str(group.coverage) for group in inner.facts.groups) == coverages
        assert ask(engine, asked) == expected
        assert engine.hits == behind_documents
        assert ask(engine, asked) == expected
        assert engine.hits == [2048] * len(asked)
        engine.inside("kv_settle")
        empty_the_pool()
        assert ask(engine, asked) == expected
        assert engine.hits == [2048] * len(asked)
        engine.inside("kv_corrupt")
        assert ask(engine, asked) != expected
    with started(model, cache=cache, **arguments) as restarted:
        assert ask(restarted, asked) == expected
        assert restarted.hits == [2048] * len(asked)
        restarted.assert_at_rest()
