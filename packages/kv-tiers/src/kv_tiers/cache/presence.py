"""What the tiers below the pool hold of the keys that somebody waits for, and how long each tier is waited for.

Tiers are asked hottest first, each for what those above it lack. One that answers from memory says so at once, and a
remote one on another thread: until then what is known counts, and the rest is not there.

Each tier earns its patience. A wait that ends before all has come halves what the next one gets, and what arrives in
time doubles it again, up to `wait_s`: a tier that is always too slow soon costs next to nothing, and what it brings
late still serves later requests. A remote tier that answers slowly and hardly ever has anything still gets the
question, but its answer is not waited for until it has something again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Lock
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey

from kv_tiers.lanes.lane import Lane

_MIN_PATIENCE_S: Final = 0.01
_MIN_WORTH: Final = 0.05
_MIN_ANSWER_S: Final = 0.005
_LATELY: Final = 16


@dataclass(slots=True)
class _Lately:
    """How a remote tier has answered lately.

    worth: how often with anything, from 0 to 1.
    seconds: after how long.
    """

    worth: float = 1.0
    seconds: float = 0.0

    def answered(self, with_anything: bool, seconds: float) -> None:
        self.worth += (float(with_anything) - self.worth) / _LATELY
        self.seconds += (seconds - self.seconds) / _LATELY

    def is_worth_waiting_for(self) -> bool:
        return self.worth > _MIN_WORTH or self.seconds < _MIN_ANSWER_S


@dataclass(slots=True)
class Asked:
    """What one holder's wait has learnt.

    began_s: since when it waits.
    answers: of each remote tier, by its place, whether it holds a key; None while it has not answered.
    lost: (tier, key) for what a tier said it has and did not bring.
    worth_s: how long an answer is waited for at most, as computing is quicker then.
    """

    began_s: float
    answers: dict[int, dict[ChunkKey, bool | None]] = field(default_factory=dict)
    lost: set[tuple[int, ChunkKey]] = field(default_factory=set)
    worth_s: float = inf

    def unanswered(self) -> set[int]:
        """The tiers that owe an answer."""
        return {tier for tier, answers in self.answers.items() if None in answers.values()}


class Presence:
    """Of all tiers below one pool. Called without the host's lock."""

    def __init__(self, lanes: Sequence[Lane], lock: Lock, clock: Clock, wait_s: float) -> None:
        """lock: the host's, taken to note how quick an answer was. wait_s: the most that anybody waits."""
        self._lanes = lanes
        self._lock = lock
        self._clock = clock
        self._wait_s = wait_s
        self._lately = [_Lately() for _ in lanes]
        self.patience_s = [wait_s] * len(lanes)
        """How long each tier is waited for."""

    def disappointed(self, tier: int) -> None:
        self.patience_s[tier] = max(self.patience_s[tier] / 2, min(_MIN_PATIENCE_S, self._wait_s))

    def pleased(self, tier: int) -> None:
        self.patience_s[tier] = min(2 * self.patience_s[tier], self._wait_s)

    def find(self, keys: Sequence[ChunkKey], asked: Asked, now_s: float) -> tuple[dict[ChunkKey, int], bool]:
        """The hottest tier that has each of the keys, of those that any has; and whether every tier has answered."""
        found: dict[ChunkKey, int] = {}
        lacking = list(keys)
        for tier, lane in enumerate(self._lanes):
            if not lacking:
                break
            held = lane.holds(lacking) if lane.holds_is_local else self._answers(tier, lacking, asked, now_s)
            if held is None:
                return found, False
            found.update(
                (key, tier) for key, there in zip(lacking, held, strict=True) if there and (tier, key) not in asked.lost
            )
            lacking = [key for key in lacking if key not in found]
        return found, True

    def _answers(self, tier: int, keys: Sequence[ChunkKey], asked: Asked, now_s: float) -> list[bool] | None:
        """None: it has not answered yet, and is waited for."""
        answers = asked.answers.setdefault(tier, {})
        if new := [key for key in keys if key not in answers]:
            answers.update(dict.fromkeys(new, None))
            self._ask(tier, new, answers)
        if any(answers[key] is None for key in keys):
            lately = self._lately[tier]
            if now_s >= asked.began_s + min(self.patience_s[tier], asked.worth_s):  # it answers too late, if it does
                answers.update((key, False) for key in keys if answers[key] is None)
                self.disappointed(tier)
            elif lately.is_worth_waiting_for() and lately.seconds < asked.worth_s:
                return None
        return [bool(answers[key]) for key in keys]

    def _ask(self, tier: int, keys: list[ChunkKey], answers: dict[ChunkKey, bool | None]) -> None:
        sent_s = self._clock.now_s()

        def answered(held: Sequence[bool]) -> None:
            with self._lock:
                self._lately[tier].answered(any(held), self._clock.now_s() - sent_s)
            for key, is_there in zip(keys, held, strict=True):
                if answers[key] is None:
                    answers[key] = is_there

        if not self._lanes[tier].ask(keys, answered):
            answers.update(dict.fromkeys(keys, False))
