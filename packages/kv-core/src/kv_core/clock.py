"""Clocks passed as values, so that tests of deadlines need not wait."""

from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class HandClock:
    """A clock that moves only when a test advances it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
