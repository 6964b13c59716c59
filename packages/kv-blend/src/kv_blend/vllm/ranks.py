"""The tensor-parallel ranks of an engine compute each forward pass together, or none of them does.

Each has its own share of a segment, so one may have lost what the others hold, or fail where they do not. A rank that
computed alone would wait for the others within the model for ever.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

_CANNOT = -1


class Ranks:
    """Every rank makes the same calls in the same order."""

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
