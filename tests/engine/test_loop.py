"""A loop that is larger than the pool keeps what fits, instead of losing each prompt just before it returns."""

import random

import pytest
from engines import started

pytestmark = pytest.mark.slow
TOKENS_A_CHUNK = 32
CHUNKS_A_PROMPT = 8
PASSES = 9


@pytest.mark.parametrize("policy", ["prefix", pytest.param("lru", marks=pytest.mark.long)])
def test_a_loop_of_nearly_twice_the_pool_hits_from_the_fourth_pass(tiny_llama: str, policy: str) -> None:
    chance = random.Random(policy)
    host = {"capacity_bytes": "12MiB", "policy": policy}
    with started(tiny_llama, cache={"chunk_tokens": TOKENS_A_CHUNK, "host": host}, block_size=TOKENS_A_CHUNK) as engine:
        capacity = engine.inside("kv_snapshot")["cache"]["slots_total"]
        prompts = [
            [chance.randrange(3, 2000) for _ in range(TOKENS_A_CHUNK * CHUNKS_A_PROMPT + 1)]
            for _ in range(round(1.8 * capacity / CHUNKS_A_PROMPT))
        ]
        hits = []
        answers = [engine.ask_in_turn(prompts)]
        for _ in range(PASSES - 1):
            answers.append(engine.ask_in_turn(prompts))
            hits.append(sum(engine.hits) / TOKENS_A_CHUNK)
        engine.assert_at_rest()
    # Of a loop, whatever is kept of it is hit in each pass, and nothing else can be: no policy hits more than the pool.
    shares = [found / capacity for found in hits[2:]]
    print(policy, capacity, len(prompts), [round(share, 2) for share in shares])
    assert answers == answers[:1] * PASSES
    if policy == "lru":
        assert max(shares) < 0.05
    else:
        assert sum(shares) >= 0.8 * len(shares)  # as in the simulation, which also learns during the fourth pass
