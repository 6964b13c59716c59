"""Has vLLM say given tokens, so that its probabilities along an answer that another run gave can be compared."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forced(AdapterLogitsProcessor):  # type: ignore[misc]  # the engine's classes are untyped here
    """For `LLM(logits_processors=[Forced])`. A request has its tokens in `extra_args["forced"]`. Log-probabilities are
    those from before."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def force(said: list[int], logits: torch.Tensor) -> torch.Tensor:
            wanted = forced[min(len(said), len(forced) - 1)]
            logits.fill_(float("-inf"))
            logits[wanted] = 0.0
            return logits

        return force
