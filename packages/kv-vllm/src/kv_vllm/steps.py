"""Translates the steps of vLLM's scheduler for `kv_connect.halves`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv_connect.halves.engine_costs import MIN_PREFILL_TOKENS
from kv_connect.halves.inputs import RequestTokens, Scheduled
from kv_connect.halves.quiet import QuietSteps
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.step import StepPlan

from kv_vllm.states import settled_states


@dataclass(frozen=True, slots=True)
class Step:
    """A step. scheduled: the requests that may have something to store.

    tokens: the number of tokens that the step computes, over all requests.
    most_tokens: the largest number of tokens of one request.
    pairs: the number of pairs of a token and one that it attends to, over our requests; 0 if no prompt is computed.
    """

    scheduled: list[Scheduled]
    tokens: int
    most_tokens: int
    pairs: float


class StepReader:
    """Reads the steps of one scheduler."""

    def __init__(self, vllm_config: Any, half: SchedulerHalf) -> None:
        self._vllm_config = vllm_config
        self._half = half
        self._quiet = QuietSteps(half.shape)
        self._running: set[str] = set()

    def look_again(self) -> None:
        """Examine every request in the next step, because some may have to be stored again."""
        self._quiet.end()

    def read(self, output: Any, requests: Mapping[str, tuple[Any, RequestTokens]]) -> Step:
        """
        output: vLLM's `SchedulerOutput`. requests: vLLM's and our requests, by id.
        """
        counts, block_state = output.num_scheduled_tokens, output.kv_connector_block_state
        tokens = output.total_num_scheduled_tokens
        most = 1 if tokens == len(counts) else max(counts.values(), default=0)  # each has at least one
        handed_over = {} if block_state is None else block_state.boundary_state_offloads
        has_arrivals = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        if self._quiet.passes(most) and most < MIN_PREFILL_TOKENS and not (has_arrivals or handed_over):
            return Step([], tokens, most, 0.0)
        self._quiet.begin()
        scheduled, pairs = [], 0.0
        # A state is offered once, even if its request was completed by an earlier step and is not in this one.
        for request_id, new_tokens in (dict.fromkeys(handed_over, 0) | counts).items():
            if request_id not in requests:
                continue
            request, request_tokens = requests[request_id]
            computed_tokens = request.num_computed_tokens + new_tokens
            pairs += new_tokens * (computed_tokens - new_tokens / 2)
            # vLLM copies the whole table on request, and most steps of most requests complete no chunk.
            if request_id in handed_over or self._half.completes_chunk(request_tokens, computed_tokens):
                states = settled_states(self._vllm_config, output, request)
                scheduled.append(
                    Scheduled(request_tokens, computed_tokens, block_state.get_block_ids(request_id), states)
                )
            self._quiet.looked_at(request_tokens, computed_tokens)
        self._examine_absent(counts, requests)
        return Step(scheduled, tokens, most, pairs)

    def planned(self, step: Step, plan: StepPlan) -> None:
        """The step was sent to the workers with this plan."""
        if (costs := self._half.costs) is not None:
            counts = step.most_tokens >= MIN_PREFILL_TOKENS and not plan.loads
            costs.step_scheduled(step.tokens, step.pairs, counts=counts)

    def _examine_absent(
        self, scheduled_tokens: Mapping[str, int], requests: Mapping[str, tuple[Any, RequestTokens]]
    ) -> None:
        """Examine requests that are running but not in this step: they may be in the next one."""
        self._running.update(scheduled_tokens)
        self._running &= requests.keys()
        for request_id in self._running - scheduled_tokens.keys():
            request, request_tokens = requests[request_id]
            self._quiet.looked_at(request_tokens, request.num_computed_tokens)
