"""One request's share of a step, as vLLM's runner sees it: by its own block tables, and corrected where the step was
scheduled ahead.

An asynchronous scheduler schedules a step before the sampler has answered the one before. It assumes that all guesses
under way are right, and writes placeholders for the next ones. The runner knows better when the step's turn comes: it
takes back what was rejected (`update_num_computed_tokens_for_batch_change`) and fills in the drafter's guesses
(`_prepare_input_ids`); both functions are vLLM's, of v1/worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(slots=True)
class Work:
    """One request's share of a step. guesses: its last tokens, as far as they are guessed."""

    request_id: str
    start: int
    end: int
    tables: list[list[int]]
    samples: bool
    guesses: list[int]

    @property
    def settled(self) -> int:
        """The request's tokens up to the first guess."""
        return self.end - len(self.guesses)


class BlockTables:
    """One engine's, as its runner has them: of a running request they are only ever appended to, also where the
    scheduler has moved or given away blocks since."""

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def follow(self, output: Any) -> None:
        """output: vLLM's `SchedulerOutput` of the next step."""
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(table) for table in new.block_ids]
        for request_id, appended in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = [list(table) for table in appended]
            elif appended is not None:
                for table, blocks in zip(self._tables[request_id], appended, strict=True):
                    table += blocks

    def of(self, request_id: str) -> list[list[int]]:
        """Copies, one for each group."""
        return [list(table) for table in self._tables[request_id]]


class StepsAhead:
    """What one engine's runner remembers of the step that it executed last."""

    def __init__(self) -> None:
        self._rejected: dict[str, int] = {}
        self._drafts: Mapping[str, list[int]] = {}

    def corrected(self, work: Work, output: Any, *, ahead: bool) -> Work:
        """The share as it is executed. output: vLLM's `SchedulerOutput`. ahead: whether the step was scheduled before
        the one that was executed last had ended."""
        drafts = self._drafts.get(work.request_id, ())
        guesses = [*drafts[: len(work.guesses)], *work.guesses[len(drafts) :]]
        newcomers = [new.req_id for new in output.scheduled_new_reqs]
        if not ahead or work.request_id in (*newcomers, *output.scheduled_cached_reqs.resumed_req_ids):
            return replace(work, guesses=guesses)
        rejected = self._rejected.get(work.request_id, 0)
        return replace(work, start=work.start - rejected, end=work.end - rejected, guesses=guesses)

    def executed(self, works: Sequence[Work], sampled: Sequence[Sequence[int]]) -> None:
        """sampled: of each request, the tokens that the sampler gave, before the scheduler cuts off what is beyond a
        request's end."""
        self._rejected = {
            work.request_id: len(work.guesses) + 1 - len(tokens)
            for work, tokens in zip(works, sampled, strict=True)
            if tokens
        }

    def drafted(self, drafts: Mapping[str, list[int]]) -> None:
        """drafts: of each request that sampled, the drafter's guesses of its next tokens."""
        self._drafts = drafts
