"""Pooling on the real engine: embeddings and scores are the same where part of a prompt is found.

vLLM says of which poolers that holds (`is_prefix_caching_supported`); the others are in `test_refusals`.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import Engine, started
from vllm import TokensPrompt

CACHE: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "use": "always"}
POOLED: dict[str, Any] = {"runner": "pooling", "skip_tokenizer_init": False}
SHARED = [3 + (7919 * i) % 2000 for i in range(600)]
PROMPTS = [SHARED, [*SHARED[:520], *range(5, 90)], SHARED, SHARED[:300]]
FOUND = 512 + 512 + 256


def loaded(engine: Engine) -> int:
    return int(engine.assert_at_rest()["worker"]["loaded_tokens"])


@pytest.mark.slow
def test_embeddings(spelling_llama: str) -> None:
    def embed(engine: Engine) -> list[list[float]]:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        return [engine.llm.embed([prompt], use_tqdm=False)[0].outputs.embedding for prompt in prompts]

    with started(spelling_llama, cache=None, convert="embed", **POOLED) as plain:
        expected = embed(plain)
    with started(spelling_llama, cache=CACHE, convert="embed", **POOLED) as ours:
        assert embed(ours) == expected
        assert loaded(ours) == FOUND


@pytest.mark.slow
def test_scores_of_documents_for_one_query(spelling_llama: str, tmp_path: Path) -> None:
    """A cross-encoder reads the query and a document as one prompt, so that all documents share the query."""
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(spelling_llama, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(spelling_llama).save_pretrained(tmp_path)
    query = " ".join(f"w{token}" for token in SHARED[:520])
    documents = [" ".join(f"w{token + number}" for token in range(30, 90)) for number in range(3)]

    def scores(engine: Engine) -> list[float]:
        return [engine.llm.score(query, document, use_tqdm=False)[0].outputs.score for document in documents]

    with started(str(tmp_path), cache=None, **POOLED) as plain:
        expected = scores(plain)
        assert len(set(expected)) == 3
    with started(str(tmp_path), cache=CACHE, **POOLED) as ours:
        # Kernels for AVX2 add up a step with fewer tokens in another order.
        rounding = 0 if torch.cpu._is_avx512_supported() else 1e-6
        assert scores(ours) == pytest.approx(expected, rel=rounding, abs=0)
        assert loaded(ours) == 2 * 768
