"""The worker half of blending: fills requests' blocks one after the other, a forward pass at a time.

No step of the engine waits for more than one forward pass. Whatever goes wrong, on this rank or on another, the request
is reported as failed, and vLLM computes all of it.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from kv_core.log import limited_logger
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from kv_blend.vllm.scheduler import BlendStep

_CANNOT = -1

_log = limited_logger(__name__)


class Ranks:
    """Every rank makes the same calls in the same order.

    The tensor-parallel ranks of an engine compute each forward pass together, or none of them does.

    Each has its own share of a segment, so one may have lost what the others hold, or fail where they do not. A rank
    that computed alone would wait for the others within the model for ever.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """group: of the ranks, on the CPU. None: there is one."""
        self._group = group

    def agree(self, plan: bytes | None) -> bool:
        """Whether all ranks have the same plan. None: this one has none."""
        if self._group is None:
            return plan is not None
        mine = _CANNOT if plan is None else int.from_bytes(hashlib.sha256(plan).digest()[:7])
        bounds = torch.tensor([mine, -mine])
        all_reduce(bounds, ReduceOp.MIN, self._group)
        least, most = bounds[0], -bounds[1]
        return bool(least == most) and bool(least != _CANNOT)

    def in_all(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are set on all ranks. As many on each."""
        if self._group is None or not flags:
            return list(flags)
        shared = torch.tensor(flags, dtype=torch.int32)
        all_reduce(shared, ReduceOp.MIN, self._group)
        return [bool(flag) for flag in shared]

    def add(self, values: torch.Tensor) -> None:
        """Replace the values by their sums over all ranks. values: on the CPU, of one shape on each rank."""
        if self._group is not None:
            all_reduce(values, ReduceOp.SUM, self._group)


def ranks_here() -> Ranks:
    """Of the engine that this process is a worker of."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks(group.cpu_group if group.world_size > 1 else None)


class CannotBlendError(Exception):
    """This request cannot be blended; the text says why."""


@dataclass(frozen=True, slots=True)
class Together:
    """What all ranks do at once, if they want the same.

    plan: what this rank wants; None: it cannot go on.
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

    def advance(self, ended: Collection[str] = (), *, off: bool = False) -> tuple[set[str], set[str]]:
        """Compute one forward pass of the requests begun, the oldest first. Returns those whose blocks are filled, and
        those that failed. ended: requests that fail because nobody waits for them. off: this rank computes none; then
        all fail, on all ranks."""
        for job in self._jobs:
            if job.step.request_id in ended:
                job.wanted = _FAILED
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
