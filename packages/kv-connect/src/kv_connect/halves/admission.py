"""Admission of linear-layer states: which are worth storing, learnt online.

A state is as large as many chunks, serves hits at one boundary only, and most are never requested. Marconi (Pan et al.,
MLSys 2025) stores those at which prompts diverge and those at which a conversation ends, and no others. Here each kind
has to earn its room: the hits per stored state of a kind are compared with those of the best kind. A kind that does not
pay is still stored now and then, so that a change is noticed.
"""

from collections import OrderedDict
from enum import Enum
from typing import Final


class StateKind(Enum):
    __hash__ = object.__hash__  # as in `kv_connect.halves.request.Phase`
    JUNCTION = "prompts diverge here"
    TAIL = "the last whole chunk of a prompt"
    STEP = "a forward pass happened to end here"


_PRIOR_HITS: Final = {StateKind.JUNCTION: 8.0, StateKind.TAIL: 8.0, StateKind.STEP: 1.0}
"""Prior: hits per 8 states that each kind is assumed to bring before anything is known."""
_PRIOR_STATES: Final = 8.0
_MIN_WORTH: Final = 1 / 8
"""Fraction of the best kind's hits below which a kind is not worth storing."""
_TRY_EVERY: Final = 16
"""Of a kind that is not worth storing, one state in this many is stored anyway."""
_MAX_REMEMBERED: Final = 1 << 16
_HALVE_ABOVE: Final = 1024.0


class StateAdmission:
    """One scheduler's statistics. Constant time per call, bounded memory."""

    def __init__(self) -> None:
        self._stored = dict.fromkeys(StateKind, _PRIOR_STATES)
        self._hits = dict(_PRIOR_HITS)
        self._refused = dict.fromkeys(StateKind, 0)
        self._kind_of: OrderedDict[bytes, StateKind] = OrderedDict()  # by digest, the oldest first

    def admits(self, digest: bytes, kind: StateKind) -> bool:
        """Whether to store the state at the end of this chunk. If so, it is counted as stored."""
        if self.worth(kind) < _MIN_WORTH * max(map(self.worth, StateKind)):
            self._refused[kind] += 1
            if self._refused[kind] % _TRY_EVERY:
                return False
        if digest not in self._kind_of:
            self._stored[kind] += 1
            if self._stored[kind] > _HALVE_ABOVE:
                self._stored[kind] /= 2
                self._hits[kind] /= 2
        self._kind_of[digest] = kind
        if len(self._kind_of) > _MAX_REMEMBERED:
            self._kind_of.popitem(last=False)
        return True

    def hit(self, digest: bytes) -> None:
        """A load ended at this chunk."""
        if (kind := self._kind_of.get(digest)) is not None:
            self._hits[kind] += 1

    def worth(self, kind: StateKind) -> float:
        """Recent hits per stored state of this kind."""
        return self._hits[kind] / self._stored[kind]
