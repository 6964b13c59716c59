"""How long a tier takes to bring chunks, as its lane sees it: from the submission to the arrival, whatever is between.

What a load takes follows the bytes that were submitted before it and have not arrived, and its own: so a queue, threads
that share a medium, and a medium that answers many at once are all in what is measured, and need not be known apart. A
load that is overdue counts before it has ended: as much slower as it is, so much slower all is that comes after it.

Nothing here locks or knows the time: the lane does, and holds its one lock around every call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.estimate import Estimator

_SOON_S: Final = 0.05
"""Of a tier of which nothing is known a load that has not come for so long says something."""


@dataclass(slots=True)
class _UnderWay:
    """began_s: when it was submitted. nbytes: its own. upto_bytes: with those before it. expected_s: what was estimated
    for it."""

    began_s: float
    nbytes: int
    upto_bytes: int
    expected_s: float | None


class LoadSpeed:
    """Of one lane's loads."""

    def __init__(self) -> None:
        self._estimator = Estimator(2, memory=32, min_samples=3)
        self._under_way: dict[int, _UnderWay] = {}  # by number, oldest first
        self._bytes = 0

    def seconds(self, nbytes: int, now_s: float) -> float | None:
        """Until so many bytes, submitted now, would be here; None: nothing is known yet."""
        estimate = self._estimator.seconds((1.0, self._bytes + nbytes))
        if self._under_way:
            oldest = next(iter(self._under_way.values()))
            age_s = now_s - oldest.began_s
            if estimate is None:
                return age_s * (self._bytes + nbytes) / oldest.upto_bytes if age_s > _SOON_S else None
            if oldest.expected_s is not None and age_s > oldest.expected_s > 0.0:
                estimate *= age_s / oldest.expected_s
        return estimate

    def share_within(self, budget_s: float, nbytes: int, shares: Sequence[int], now_s: float) -> int | None:
        """The first of these that, as one of so many equal shares of the bytes, would be here in time; None: none."""
        for share in shares:
            expected_s = self.seconds(nbytes // share, now_s)
            if expected_s is not None and expected_s <= budget_s:
                return share
        return None

    def began(self, number: int, nbytes: int, now_s: float) -> None:
        """number: tells it from others under way."""
        nbytes = max(1, nbytes)
        expected_s = self._estimator.seconds((1.0, self._bytes + nbytes))
        self._bytes += nbytes
        self._under_way[number] = _UnderWay(now_s, nbytes, self._bytes, expected_s)

    def ended(self, number: int, now_s: float, *, brought: bool) -> None:
        """brought: all of it is here. What failed or was refused says nothing."""
        if (load := self._under_way.pop(number, None)) is None:
            return
        self._bytes -= load.nbytes
        if brought:
            self._estimator.add((1.0, load.upto_bytes), now_s - load.began_s)

    def coefficients(self) -> tuple[float, float] | None:
        """Seconds a load, and seconds a byte; None: not known."""
        known = self._estimator.coefficients
        return None if known is None else (known[0], known[1])
