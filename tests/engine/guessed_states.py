"""Which of a request's blocks has its states while tokens are guessed: vLLM's runner retold (v1/worker/mamba_utils.py).

The state after the first token that is not a guess is in the request's running block, the one after each guess in the
block behind. How many guesses were right is known when the forward pass and the connector's stores are over. Only then
does the state of a block's end go into that block.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Running:
    """block: of its table, where its running state is. accepted: how many blocks on, less one, is the newest."""

    block: int
    accepted: int = 1


@dataclass(slots=True)
class GuessedStates:
    """Of one engine's requests. block_tokens: of the table of states."""

    block_tokens: int
    _running: dict[str, _Running] = field(default_factory=dict)

    def forget(self, request_ids: Iterable[str]) -> None:
        """They have ended, or lost their blocks."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def begin(self, request_id: str, start: int, end: int) -> tuple[int, int, int]:
        """A step computes the tokens from `start` to `end`: where the newest state is, where the running block has to
        have it first, and where the states of this step begin."""
        running = self._running.get(request_id) or _Running((start - 1) // self.block_tokens)
        newest, now = running.block + running.accepted - 1, (end - 1) // self.block_tokens
        into = newest
        if running.block not in (-1, now):
            running.accepted, into = 1, now
        running.block = now
        self._running[request_id] = running
        return newest, into, now

    def end(self, request_id: str, settled: int, accepted: int) -> tuple[int, int] | None:
        """settled: the tokens up to the first guess. accepted: how many tokens the sampler gave, at least one. From
        which block to which a state is to be copied."""
        running = self._running[request_id]
        running.accepted = accepted
        computed = settled + accepted - 1
        aligned = computed // self.block_tokens * self.block_tokens
        if aligned < settled:
            return None
        source, into = running.block + aligned - settled, aligned // self.block_tokens - 1
        if into == running.block:
            running.accepted = 1
        return (source, into) if source != into else None
