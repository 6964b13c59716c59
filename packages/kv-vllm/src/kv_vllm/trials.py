"""Steps that compute with blocks that another connector, or another rank, says it has filled, and what became of them.

Under vLLM's MultiConnector, connectors beside ours load prompts too; and of several ranks that load layer by layer,
each knows only whether its own load has failed. vLLM computes at once with what they promise to load synchronously, and
learns of a failure with the step's output, from any rank, as a set of blocks; with asynchronous scheduling it has
planned further steps by then. Such steps are on trial: what they store is copied, but committed only
when the output of the step, and of all before it, has reported no failed block. One failure fails all open trials.

vLLM computes failed blocks again, but not at once, and meanwhile finds them in its own prefix cache. They are therefore
suspect until they have been computed again or got another use, and so is everything that is computed from them; none of
it is stored.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kv_connect.halves.request import RequestTokens
from kv_connect.halves.scheduler import SchedulerHalf


@dataclass(frozen=True, slots=True)
class TrialMessage:
    """The scheduler's message about trials with each plan.

    trial: the number of this step, which the workers echo with its output; 0: it is not on trial.
    verdicts: trials that have ended, and whether what they stored may be committed.
    """

    trial: int = 0
    verdicts: tuple[tuple[int, bool], ...] = ()


NO_TRIAL: Final = TrialMessage()
"""The message of nearly every step."""


class Trials:
    """In the scheduler's connector: the steps on trial, and the suspect blocks."""

    def __init__(self, *, is_alone: bool) -> None:
        """is_alone: no other connector or rank loads, so that the step of a load that fails has stored nothing."""
        self.is_alone = is_alone
        self._number = 0  # of the latest step
        self._loaded = 0  # of the latest step with synchronous loads of others
        self._received = 0  # of the latest step on trial whose output has come
        self._open: set[int] = set()
        self._trial = 0
        self._verdicts: list[tuple[int, bool]] = []
        self._suspects: set[int] = set()
        self._found: dict[str, int] = {}  # by request, the tokens that vLLM last found in its own blocks

    @property
    def are_open(self) -> bool:
        """Whether workers wait for verdicts, so that the engine has to go on stepping to carry them."""
        return bool(self._open or self._verdicts)

    def begin(self, *, has_loads: bool, has_ours: bool) -> int:
        """The trial of the next step; 0: it is not on trial. has_loads: it has synchronous loads. has_ours: of ours."""
        self._number += 1
        if has_loads and not (self.is_alone and has_ours):
            self._loaded = self._number
        self._trial = self._number if self._loaded > self._received else 0
        if self._trial:
            self._open.add(self._trial)
        return self._trial

    def to_send(self) -> TrialMessage:
        """The message that goes with the plan of the current step."""
        if not self._trial and not self._verdicts:
            return NO_TRIAL
        trial, self._trial = self._trial, 0
        return TrialMessage(trial, self.take_verdicts())

    def take_verdicts(self) -> tuple[tuple[int, bool], ...]:
        """The verdicts that no worker has yet."""
        verdicts, self._verdicts = tuple(self._verdicts), []
        return verdicts

    def receive(self, trial: int, failed_blocks: set[int]) -> None:
        """The output of a step has come. trial: its number, if it was on trial. failed_blocks: from any connector."""
        self._received = max(self._received, trial)
        ended = self._open if failed_blocks else self._open & {trial}
        self._verdicts += [(number, not failed_blocks) for number in sorted(ended)]
        self._open = self._open - ended

    def failed(self, blocks: set[int], tables: Mapping[str, list[int]], block_tokens: int, half: SchedulerHalf) -> None:
        """These blocks hold nothing that was computed or loaded. Forget what was stored from them.

        tables: the blocks of our requests.
        block_tokens: tokens of one of them.
        """
        self._suspects |= blocks
        judged = -1 if self.is_alone else min(self._open, default=sys.maxsize) - 1
        for request_id, table in tables.items():
            first = next((number for number, block in enumerate(table) if block in blocks), None)
            if first is not None:
                self._suspects.update(table[first:])
                half.not_filled(request_id, first * block_tokens, judged=judged)

    def looked_up(self, request_id: str, computed_tokens: int) -> None:
        """vLLM has this many tokens of the request in its own blocks."""
        if self._suspects:
            self._found[request_id] = computed_tokens

    def forget(self, request_id: str) -> None:
        """It is over, perhaps before it got any blocks."""
        self._found.pop(request_id, None)

    def allocated(self, request_id: str, blocks: Any, block_tokens: int) -> None:
        """vLLM has given these blocks to the request: those beyond what it found are filled before they are read."""
        if self._found and (found := self._found.pop(request_id, None)) is not None:
            self._suspects.difference_update(blocks.get_block_ids()[0][-(-found // block_tokens) :])

    def follow(
        self, output: Any, requests: Mapping[str, tuple[Any, RequestTokens]], block_tokens: int, half: SchedulerHalf
    ) -> None:
        """Before a step is planned: which suspect blocks it computes again, and which requests compute from one.

        output: vLLM's `SchedulerOutput`. requests: vLLM's and ours, by id.
        """
        for request_id, new_tokens in output.num_scheduled_tokens.items() if self._suspects else ():
            if request_id not in requests:
                continue
            (table, *_) = output.kv_connector_block_state.get_block_ids(request_id)
            computed = requests[request_id][0].num_computed_tokens
            first, end = computed // block_tokens, -(-(computed + new_tokens) // block_tokens)
            if self._suspects.isdisjoint(table[: -(-computed // block_tokens)]):
                self._suspects.difference_update(table[first:end])
            else:
                self._suspects.update(table[first:end])
                half.distrust(request_id)
