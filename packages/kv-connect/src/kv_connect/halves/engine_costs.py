"""Learns how long the engine's own work takes: its prefill steps, and its loads from the pool.

The caller reports when something begins and ends; the clock is injected. Nothing here waits.

Steps end in the order in which they were scheduled. A step is timed from when it was scheduled or from the end of the
previous step, whichever is later: an engine with asynchronous scheduling has several steps in flight, which its device
runs one after the other. Only steps that compute prompts count, and only if nothing was loaded in them.
"""

from collections import deque
from dataclasses import dataclass

from kv_core.clock import Clock
from kv_core.cost import REACH, Costs, Measured, MeasuredWhat, Use
from kv_core.estimate import Estimator

MIN_PREFILL_TOKENS = 16
"""A step in which no request computes this many tokens is not a sample of prefill speed."""
_MAX_UNDER_WAY = 64
_RETRY_S = 10.0
_RETRY_SOON_S = 0.5
_MAX_RETRY_S = 600.0
_MAX_MEASURED = 256
_SURPRISE = 0.67
"""A load that takes less than this fraction of its estimate brings the next test forward."""
_FEW_SHORT_STEPS, _MANY_SHORT_STEPS = 16, 1024
"""After so many shorter steps the longest one is forgotten, so that computing a long prompt is tested again, less and
less often."""


@dataclass(slots=True)
class _Step:
    """began_s: when it was scheduled. tokens, pairs: what it computes; 0 tokens: the step is not a sample."""

    began_s: float
    tokens: float = 0.0
    pairs: float = 0.0


class EngineCosts:
    """The costs of one engine. Used only on the scheduler's thread."""

    def __init__(
        self, clock: Clock, *, use: Use = "auto", prefill_tokens_per_second: float = 0.0, step_tokens: int = 0
    ) -> None:
        """prefill_tokens_per_second: the engine's speed if it is known in advance; 0: it is learnt.
        step_tokens: the most that it computes in a step; 0: not known, or any number.
        """
        self.use = use
        self.step_tokens = step_tokens
        self._clock = clock
        self._configured_compute = (1.0 / prefill_tokens_per_second, 0.0) if prefill_tokens_per_second > 0 else None
        self._compute = Estimator(3)
        self._longest_tokens = self._shorter_steps = 0
        self._forget_after_steps = _FEW_SHORT_STEPS
        self._load = Estimator(2)
        self._steps: deque[_Step] = deque()
        self._ended_s = 0.0
        self._loads: dict[str, tuple[float, int]] = {}
        self._retry_at_s = 0.0
        self._retry_after_s = _RETRY_S
        self._measured: list[Measured] = []

    def of(
        self, computed_tokens: int, use: Use | None = None, *, stores: bool = True, layerwise_tokens: int = 0
    ) -> Costs:
        """The costs for a lookup of a request that has already computed this many tokens. Unless `use` is `auto` they
        state nothing else, so that whatever is held is used.

        use: the request's own choice.
        layerwise_tokens: as for `Costs`.
        """
        if (use or self.use) != "auto":
            return Costs(computed_tokens)
        holds_for_any = self._configured_compute is not None or 0 < self.step_tokens <= REACH * self._longest_tokens
        measured_tokens = 0 if holds_for_any else self._longest_tokens
        compute, load = self._compute_cost(), self._load_cost()
        return Costs(computed_tokens, compute, load, stores, layerwise_tokens, measured_tokens=measured_tokens)

    def prolonged_s(self, first_token: int, last_token: int, prompt_tokens: int) -> float | None:
        """By how much a layerwise load of `first_token … last_token` prolongs its step beyond the time that computing
        the rest of the prompt takes; None: not known."""
        costs = Costs(first_token, self._compute_cost(), self._load_cost(), layerwise_tokens=prompt_tokens)
        return None if costs.compute is None else costs.load_s(first_token, last_token)

    def chose(self, *, to_load: bool) -> None:
        """Chunks in the pool are loaded, or they are not because computing is estimated to be faster. That estimate is
        tested periodically, less and less often while it is confirmed.
        """
        if to_load and not self._retry_at_s:
            self._retry_after_s = _RETRY_S
        elif not self._retry_at_s:
            self._retry_at_s = self._clock.now_s() + self._retry_after_s

    def load_began(self, request_id: str, tokens: int) -> None:
        """The load was planned."""
        if len(self._loads) < _MAX_UNDER_WAY:
            self._loads[request_id] = self._clock.now_s(), tokens

    def load_ended(self, request_id: str, *, failed: bool) -> None:
        """The end of the load was reported."""
        began = self._loads.pop(request_id, None)
        if began is None or failed:
            return
        began_s, tokens = began
        took_s = self._clock.now_s() - began_s
        estimated_s = self._load.seconds((1.0, tokens))
        self._note("load", estimated_s, took_s)
        self._load.add((1.0, tokens), took_s)
        if self._retry_at_s:
            self._retry_at_s = 0.0
            is_confirmed = estimated_s is None or took_s > _SURPRISE * estimated_s
            self._retry_after_s = min(2 * self._retry_after_s, _MAX_RETRY_S) if is_confirmed else _RETRY_SOON_S

    def step_scheduled(self, tokens: int, pairs: float, *, counts: bool) -> None:
        """A step was handed to the device.

        tokens: the number of tokens that it computes, over all requests.
        pairs: the number of pairs of a token and one that it attends to: for each request, its new tokens times their
            mean position.
        counts: whether the step is a sample: it computes a prompt and loads nothing.
        """
        if len(self._steps) == _MAX_UNDER_WAY:  # their ends are not reported
            self._steps.clear()
        began_s = self._clock.now_s()
        self._steps.append(_Step(began_s, tokens, pairs) if counts else _Step(began_s))

    def step_ended(self) -> None:
        """The oldest step in flight has ended."""
        if not self._steps:
            return
        step = self._steps.popleft()
        previous_end_s, self._ended_s = self._ended_s, self._clock.now_s()
        if step.tokens:
            self.prefill_took(step.tokens, step.pairs, self._ended_s - max(step.began_s, previous_end_s))

    def prefill_took(self, tokens: float, pairs: float, seconds: float) -> None:
        """A step that is a sample took so long. For engines that report steps only when they have ended.

        tokens, pairs: as for `step_scheduled`.
        """
        features = (1.0, tokens, pairs)
        self._note("compute", self._compute.seconds(features), seconds)
        self._compute.add(features, seconds, is_beyond=tokens > REACH * self._longest_tokens)
        self._shorter_steps += 1
        is_forgotten = self._shorter_steps > self._forget_after_steps
        if tokens >= self._longest_tokens or is_forgotten:
            self._longest_tokens, self._shorter_steps = int(tokens), 0
        if is_forgotten:
            self._forget_after_steps = min(2 * self._forget_after_steps, _MANY_SHORT_STEPS)

    def take_measured(self) -> list[Measured]:
        """Estimates that were compared with measurements since the last call."""
        measured, self._measured = self._measured, []
        return measured

    def _note(self, what: MeasuredWhat, estimated_s: float | None, took_s: float) -> None:
        if estimated_s and len(self._measured) < _MAX_MEASURED:
            self._measured.append(Measured(what, estimated_s, took_s))

    def _compute_cost(self) -> tuple[float, float] | None:
        # The fixed part of a step is paid for the rest of the prompt anyway, however much is loaded.
        if self._configured_compute is not None:
            return self._configured_compute
        learnt = self._compute.coefficients
        return None if learnt is None else (learnt[1], learnt[2])

    def _load_cost(self) -> tuple[float, float] | None:
        if self._retry_at_s and self._clock.now_s() >= self._retry_at_s:
            return None  # an unknown cost makes the next lookup load, which is then measured again
        learnt = self._load.coefficients
        return None if learnt is None else (learnt[0], learnt[1])
