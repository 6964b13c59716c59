"""The blocks that a step assumes to be filled because we promised so, from the promise to vLLM's last question about
them.

vLLM computes on a synchronous load without asking whether it succeeded. It learns of a failure at the end of the step,
by block, and then recomputes those requests, unless it has already scheduled their next step. Under asynchronous
scheduling it has, and would return a token computed from blocks that were never filled
(https://github.com/vllm-project/vllm/issues/49250). There a failure therefore ends the engine, as a failed device does
anyway: it is the only way not to answer wrongly.
"""

from collections.abc import Iterable

from kv_core.errors import CopyFailed


class PromisedBlocks:
    """The scheduler's connector: of which requests loads are synchronous, and which blocks this step is to fill."""

    def __init__(self) -> None:
        self._requests: set[str] = set()
        self._blocks: set[int] = set()

    def promise(self, request_id: str, *, is_layerwise: bool) -> None:
        """Note the latest answer to vLLM for this request."""
        (self._requests.add if is_layerwise else self._requests.discard)(request_id)

    def allocated(self, request_id: str, blocks: Iterable[int]) -> bool:
        """vLLM takes the promise. False: it is not one of these, and the request waits for its load."""
        if request_id not in self._requests:
            return False
        self._requests.discard(request_id)
        self._blocks.update(blocks)
        return True

    def forget(self, request_id: str) -> None:
        """It has ended."""
        self._requests.discard(request_id)

    def take(self) -> tuple[int, ...]:
        """The blocks that the step that is built now is to fill."""
        blocks, self._blocks = tuple(sorted(self._blocks)), set()
        return blocks


class StepBlocks:
    """A worker's connector: the blocks that this step is to fill."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        """is_asynchronous: vLLM schedules a step before it knows the outcome of the previous one."""
        self._is_asynchronous = is_asynchronous
        self.blocks: set[int] = set()
        self.are_filled = False

    def begin(self, blocks: Iterable[int]) -> None:
        """Begin a step with these blocks. They count as unfilled until `are_filled` is set."""
        self.blocks, self.are_filled = set(blocks), False

    def take_unfilled(self) -> set[int]:
        """The blocks that do not hold what they should, to be reported to vLLM.

        Raises:
            CopyFailed: the report would come too late.
        """
        if not self.blocks:
            return set()
        blocks, self.blocks = self.blocks, set()
        if self.are_filled:
            return set()
        if self._is_asynchronous:
            raise CopyFailed(
                "chunks that were promised for this step are not in the engine's blocks. With asynchronous scheduling "
                "vLLM cannot compute the requests anew, so the engine ends rather than answer wrongly. The log says "
                "what failed; with load: async this cannot happen"
            )
        return blocks
