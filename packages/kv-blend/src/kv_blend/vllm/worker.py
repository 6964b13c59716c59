"""The worker half of blending: fills requests' blocks one after the other, a forward pass at a time.

No step of the engine waits for more than one forward pass. Whatever goes wrong, on this rank or on another, the request
is reported as failed, and vLLM computes all of it.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_core.log import limited_logger

from kv_blend.vllm.job import BlendStep
from kv_blend.vllm.ranks import Ranks

_log = limited_logger(__name__)


class CannotBlendError(Exception):
    """This request cannot be blended; the text says why."""


@dataclass(frozen=True, slots=True)
class Together:
    """What all ranks do at once, if they want the same.

    plan: what this rank wants; None: it cannot go on.
    act: does it.
    is_pass: whether that is a forward pass.
    """

    plan: bytes | None
    act: Callable[[], Any] = lambda: None
    is_pass: bool = False


Filling = Generator[Together, Any, None]
"""Fills one request's blocks. It is sent what each `act` returned. Ends when they are filled; raises if it cannot."""
_FAILED: Final = Together(None)
_FILLED: Final = Together(b"filled")


def refuse(why: str) -> Callable[[BlendStep], Filling]:
    """For a rank that fills nothing."""

    def fill(step: BlendStep) -> Filling:
        _log.warning("request %s is not blended and will be computed whole: %s", step.request_id, why)
        yield _FAILED

    return fill


@dataclass(eq=False)
class _Job:
    """wanted: what it waits for; None: it has to be asked. result: of the last `act`."""

    step: BlendStep
    filling: Filling
    wanted: Together | None = None
    result: Any = None


class BlendWorker:
    """Used on vLLM's worker thread only. All ranks are given the same requests, in the same order."""

    def __init__(self, ranks: Ranks, fill: Callable[[BlendStep], Filling]) -> None:
        """fill: begins with a request."""
        self._ranks = ranks
        self._fill = fill
        self._jobs: deque[_Job] = deque()
        self._space_id = b""

    def add(self, steps: Sequence[BlendStep], space_id: bytes) -> None:
        """Begin with these requests. space_id: of the weights that the engine has now."""
        self._space_id = space_id
        self._jobs += [_Job(step, self._fill(step)) for step in steps]

    def advance(self, *, off: bool = False) -> tuple[set[str], set[str]]:
        """Compute one forward pass of the requests begun, the oldest first. Returns those whose blocks are filled, and
        those that failed. off: this rank computes none; then all fail, on all ranks."""
        finished: set[str] = set()
        failed: set[str] = set()
        has_computed = False
        while self._jobs:
            job = self._jobs[0]
            if off:
                job.wanted = _FAILED
            elif job.wanted is None:
                job.wanted = self._resume(job)
            # Each rank votes as often as the others, whatever it wants.
            if not self._ranks.agree(job.wanted.plan):
                failed.add(job.step.request_id)
                self._drop(job)
            elif job.wanted is _FILLED:
                finished.add(job.step.request_id)
                self._drop(job)
            elif job.wanted.is_pass and has_computed:
                break
            else:
                has_computed |= job.wanted.is_pass
                self._act(job)
        return finished, failed

    def give_up(self) -> set[str]:
        """Stop, without a word to other ranks. Returns the requests that were begun and not reported."""
        given_up = {job.step.request_id for job in self._jobs}
        while self._jobs:
            self._drop(self._jobs[0])
        return given_up

    def _resume(self, job: _Job) -> Together:
        def resume() -> Together:
            if job.step.space_id != self._space_id:
                raise CannotBlendError("the engine's weights have changed")
            return job.filling.send(job.result)

        wanted: Together = self._attempt(job, resume)
        return wanted

    def _act(self, job: _Job) -> None:
        assert job.wanted is not None
        job.result = self._attempt(job, job.wanted.act)
        job.wanted = _FAILED if job.result is _FAILED else None

    def _attempt(self, job: _Job, call: Callable[[], Any]) -> Any:
        """What the call returns; `_FILLED` if the job has ended, `_FAILED` if it cannot go on."""
        try:
            return call()
        except StopIteration:
            return _FILLED
        except CannotBlendError as error:
            _log.warning("request %s is not blended and will be computed whole: %s", job.step.request_id, error)
        except Exception:  # noqa: BLE001  # vLLM's model runs in here, which may raise anything; the engine must go on
            _log.exception("request %s is not blended and will be computed whole", job.step.request_id)
        return _FAILED

    def _drop(self, job: _Job) -> None:
        self._jobs.popleft()
        job.filling.close()
