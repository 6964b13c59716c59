"""Prompts that share a prefix of any length hit on a model with linear layers, wherever their prefixes end.

A state serves hits at one boundary only. If that is a prompt's last block, it lies in what the prompt has alone as
often as not: vLLM's issue 45238 counted 52 hits of 64 requests, and none with the prefix 100 tokens shorter. What vLLM
finds by itself since then is in docs/models.md.
"""

from typing import Any

import pytest
from engines import started
from kv_connect.engine import engines
from models import BY_NAME

REQUESTS, TOKENS, SHARED_TOKENS = 16, 1100, 800


@pytest.mark.slow
@pytest.mark.parametrize("shifts", [(0, 100, 255), pytest.param((31, 128, 177), marks=pytest.mark.long)], ids=str)
def test_a_shift_of_what_is_shared_costs_no_hits(shifts: tuple[int, ...], tmp_path: Any) -> None:
    model = BY_NAME["Qwen3-Next"]
    directory = str(model.write(tmp_path))
    cache = {"host": {"capacity_bytes": "512MiB"}}
    with started(directory, cache=cache, chunk_tokens=None, **model.arguments) as engine:
        (inner,) = engines().values()
        assert inner.facts is not None
        chunk_tokens, found = inner.facts.chunk_tokens, {}
        for shift in shifts:
            shared = [3 + (7919 * i + shift) % 2000 for i in range(SHARED_TOKENS - shift)]
            hits = 0
            for number in range(REQUESTS):
                own = [3 + (104729 * i + 31 * number + shift) % 2000 for i in range(TOKENS - len(shared))]
                engine.llm.reset_prefix_cache()  # so that what is found is found with us
                engine.ask([shared + own], new_tokens=1)
                hits += engine.hits[0] >= len(shared) // chunk_tokens * chunk_tokens
            found[shift] = hits
        engine.assert_at_rest()
    assert min(found.values()) >= REQUESTS * 52 // 64, found
