"""An engine that is asked to blend documents."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engines import NEW_TOKENS, Answer, Engine, started
from kv_blend import request_fields
from kv_blend.plan import KEY
from kv_testing import interleavings
from kv_testing.documents import Prompt
from kv_testing.interleavings import EXACT, Seen
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
        given = [fields or request_fields(each.segments, tokens=len(each.tokens), **plan) for each in prompts]
        return self.ask_each(prompts, given, **sampling or {})[0]

    def ask_each(
        self, prompts: Sequence[Prompt], fields: Sequence[Mapping[str, Any]], **sampling: Any
    ) -> tuple[list[Answer], list[Any]]:
        """Ask for all of these at once, each with fields of its own or none. Returns the answers and `reports`."""
        from vllm import SamplingParams, TokensPrompt

        outputs = self.llm.generate(
            [
                TokensPrompt(prompt_token_ids=each.tokens, cache_salt=its["cache_salt"])
                if its.get("cache_salt")
                else TokensPrompt(prompt_token_ids=each.tokens)
                for each, its in zip(prompts, fields, strict=True)
            ],
            [
                SamplingParams(
                    temperature=0,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": its["kv_transfer_params"]} if its else None,
                    **{"max_tokens": NEW_TOKENS, **sampling},
                )
                for its in fields
            ],
            use_tqdm=False,
        )
        self.hits = [output.num_cached_tokens or 0 for output in outputs]
        self.reports = [(output.kv_transfer_params or {}).get(KEY) for output in outputs]
        return [tuple(output.outputs[0].token_ids) for output in outputs], self.reports


def exact_answers(model: str, **arguments: Any) -> dict[Prompt, Answer]:
    """What an engine without us answers."""
    with started(model, cache=None, **arguments) as plain:
        return dict(zip(EXACT, plain.ask([prompt.tokens for prompt in EXACT]), strict=True))


def forget_own_blocks(engine: Engine) -> None:
    """vLLM's own prefix cache is empty, and what we have stays."""
    engine.llm.reset_prefix_cache()
    assert engine.inside("kv_know_weights")  # a reset may mean new ones


def interleave(
    engine: Blending,
    exact: dict[Prompt, Answer],
    rounds: int,
    *,
    seed: int = 1,
    disturb: Callable[[bool], None] | None = None,
    **forged: Any,
) -> Seen:
    return interleavings.interleave(
        engine.ask_each,
        exact,
        rounds,
        engine="vllm",
        forget=lambda: forget_own_blocks(engine),
        seed=seed,
        disturb=disturb,
        forged=forged,
    )
