"""Which of the keys that a lookup waits for the lower tiers hold, and how long each tier is waited for.

Tiers are queried hottest first, each for the keys that the tiers above it lack. A tier that answers from memory is
queried in place, a remote one on another thread: until it answers, its keys count as absent.

Each tier has a time limit of its own. A wait that ends before everything has arrived halves it, and an arrival in time
doubles it again, up to `wait_s`: a tier that is always too slow soon costs next to nothing, and what it delivers late
still serves later requests. What comes late, but within `wait_s`, shows how long the tier needs, so that one that was
slow for a moment is not waited for in vain from then on. A remote tier that answers slowly and hardly ever has a key is
still queried, but its answer is not waited for until it has had one again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Lock
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey

from kv_tiers.lanes.lane import Lane

_MIN_LIMIT_S: Final = 0.01
_HEADROOM: Final = 1.5
"""How many times as long as a tier needed it may take the next time."""
_MIN_HIT_RATE: Final = 0.05
_QUICK_S: Final = 0.005
_SAMPLES: Final = 16


@dataclass(slots=True)
class _RecentAnswers:
    """Moving averages over a remote tier's last answers.

    hit_rate: the share of answers that found any key, from 0 to 1.
    seconds: from query to answer.
    """

    hit_rate: float = 1.0
    seconds: float = 0.0

    def add(self, found_any: bool, seconds: float) -> None:
        self.hit_rate += (float(found_any) - self.hit_rate) / _SAMPLES
        self.seconds += (seconds - self.seconds) / _SAMPLES

    def is_worth_waiting_for(self) -> bool:
        return self.hit_rate > _MIN_HIT_RATE or self.seconds < _QUICK_S


@dataclass(slots=True)
class Answers:
    """The tiers' answers to one holder.

    began_s: when its wait began.
    by_tier: for each remote tier, by its index, whether it holds a key; None until it has answered.
    lost: (tier, key) of chunks that a tier claimed to hold but did not deliver.
    max_wait_s: how long to wait for an answer; beyond that computing is quicker.
    lower: the numbers of the tiers that may be read for this holder; None: all.
    """

    began_s: float
    by_tier: dict[int, dict[ChunkKey, bool | None]] = field(default_factory=dict)
    lost: set[tuple[int, ChunkKey]] = field(default_factory=set)
    max_wait_s: float = inf
    lower: frozenset[int] | None = None

    def may_read(self, tier: int) -> bool:
        return self.lower is None or tier in self.lower

    def pending_tiers(self) -> set[int]:
        """The tiers that have not answered yet."""
        return {tier for tier, held in self.by_tier.items() if None in held.values()}


class Presence:
    """Queries all tiers below one pool. Called without the host's lock."""

    def __init__(self, lanes: Sequence[Lane], lock: Lock, clock: Clock, wait_s: float) -> None:
        """lock: the host's, taken to record how quick an answer was. wait_s: the longest wait for any tier."""
        self._lanes = lanes
        self._lock = lock
        self._clock = clock
        self._wait_s = wait_s
        self._recent = [_RecentAnswers() for _ in lanes]
        self.limit_s = [wait_s] * len(lanes)
        """How long to wait for each tier."""

    def was_late(self, tier: int) -> None:
        """A wait ended before this tier had answered or delivered."""
        self.limit_s[tier] = max(self.limit_s[tier] / 2, min(_MIN_LIMIT_S, self._wait_s))

    def was_in_time(self, tier: int) -> None:
        self.limit_s[tier] = min(2 * self.limit_s[tier], self._wait_s)

    def came(self, tier: int, seconds: float) -> None:
        """An answer or chunks came from this tier, this long after they were requested, whether in time or too late."""
        if seconds <= self._wait_s:
            self.limit_s[tier] = max(self.limit_s[tier], min(_HEADROOM * seconds, self._wait_s))

    def find(self, keys: Sequence[ChunkKey], answers: Answers, now_s: float) -> tuple[dict[ChunkKey, int], bool]:
        """The hottest tier of each key that any tier holds; and whether every tier has answered."""
        found: dict[ChunkKey, int] = {}
        missing = list(keys)
        for tier, lane in enumerate(self._lanes):
            if not missing:
                break
            if not answers.may_read(tier):
                continue
            held = lane.holds(missing) if lane.holds_is_local else self._held(tier, missing, answers, now_s)
            if held is None:
                return found, False
            found.update(
                (key, tier)
                for key, is_held in zip(missing, held, strict=True)
                if is_held and (tier, key) not in answers.lost
            )
            missing = [key for key in missing if key not in found]
        return found, True

    def _held(self, tier: int, keys: Sequence[ChunkKey], answers: Answers, now_s: float) -> list[bool] | None:
        """Which of these a remote tier holds. None: it has not answered yet, and waiting for it pays."""
        held = answers.by_tier.setdefault(tier, {})
        if new := [key for key in keys if key not in held]:
            held.update(dict.fromkeys(new, None))
            self._query(tier, new, held)
        if any(held[key] is None for key in keys):
            recent = self._recent[tier]
            if now_s >= answers.began_s + min(self.limit_s[tier], answers.max_wait_s):
                held.update((key, False) for key in keys if held[key] is None)
                self.was_late(tier)
            elif recent.is_worth_waiting_for() and recent.seconds < answers.max_wait_s:
                return None
        return [bool(held[key]) for key in keys]

    def _query(self, tier: int, keys: list[ChunkKey], held: dict[ChunkKey, bool | None]) -> None:
        sent_s = self._clock.now_s()

        def answered(holds: Sequence[bool]) -> None:
            took_s = self._clock.now_s() - sent_s
            with self._lock:
                self._recent[tier].add(any(holds), took_s)
                self.came(tier, took_s)
            for key, is_there in zip(keys, holds, strict=True):
                if held[key] is None:
                    held[key] = is_there

        if not self._lanes[tier].ask(keys, answered):
            held.update(dict.fromkeys(keys, False))
