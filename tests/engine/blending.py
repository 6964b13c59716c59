"""An engine that is asked to blend documents."""

import random
from collections.abc import Sequence
from typing import Any

from engines import NEW_TOKENS, Answer, Engine, started
from kv_blend import request_fields
from kv_blend.plan import KEY
from kv_testing.documents import FIRST, SECOND, Prompt
from kv_testing.wait import until

CACHE = {"host": {"capacity_bytes": "64MiB"}}


class Blending(Engine):
    """reports: what the last answers say of their blending."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.reports: list[Any] = []
        until(self._knows_its_weights, 30)

    def _knows_its_weights(self) -> bool:
        """Whether a plan is not refused because it is not known yet which weights the engine has."""
        self.blend([Prompt((2,))], tenant="before the test")
        return "weights" not in self.reports[0].get("refused", "")

    def blend(
        self,
        prompts: Sequence[Prompt],
        *,
        fields: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        **plan: Any,
    ) -> list[Answer]:
        """Ask for all of these at once. fields: the request's own, instead of those that the plan makes. sampling:
        parameters besides."""
        from vllm import SamplingParams, TokensPrompt

        given = [fields or request_fields(each.segments, tokens=len(each.tokens), **plan) for each in prompts]
        outputs = self.llm.generate(
            [
                TokensPrompt(prompt_token_ids=each.tokens, cache_salt=its["cache_salt"])
                if its["cache_salt"]
                else TokensPrompt(prompt_token_ids=each.tokens)
                for each, its in zip(prompts, given, strict=True)
            ],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=NEW_TOKENS,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": its["kv_transfer_params"]},
                    **(sampling or {}),
                )
                for its in given
            ],
            use_tqdm=False,
        )
        self.hits = [output.num_cached_tokens or 0 for output in outputs]
        self.reports = [(output.kv_transfer_params or {}).get(KEY) for output in outputs]
        return [tuple(output.outputs[0].token_ids) for output in outputs]


def exact_answers(model: str) -> dict[Prompt, Answer]:
    """What an engine without us answers."""
    prompts = [FIRST, SECOND, *(Prompt((at,)) for at in range(4)), Prompt((1, 0)), Prompt((3, 2, 1))]
    with started(model, cache=None) as plain:
        return dict(zip(prompts, plain.ask([prompt.tokens for prompt in prompts]), strict=True))


def forget_own_blocks(engine: Engine) -> None:
    """vLLM's own prefix cache is empty, and what we have stays."""
    engine.llm.reset_prefix_cache()
    assert engine.inside("kv_know_weights")  # a reset may mean new ones


def interleave(engine: Blending, exact: dict[Prompt, Answer], rounds: int, seed: int) -> tuple[int, int]:
    """Random exact and blended requests together. Returns how many exact ones were wrong, and of how many."""
    draw, prompts = random.Random(seed), list(exact)
    wrong = asked = 0
    for _ in range(rounds):
        blended = draw.choices(prompts, k=draw.randint(1, 3))
        select = draw.choice(["first", "deviation"])
        engine.blend(blended, share=draw.choice([0.0, 0.15]), behind=draw.choice(["prefix", "alone"]), select=select)
        plain = draw.choices(prompts, k=draw.randint(1, 3))
        answers = engine.ask([prompt.tokens for prompt in plain])
        wrong += sum(exact[prompt] != answer for prompt, answer in zip(plain, answers, strict=True))
        asked += len(plain)
        if draw.random() < 0.3:
            forget_own_blocks(engine)
    return wrong, asked
