"""How much the files of a shared directory take up, and which of them were used least recently.

No host knows what the others store and read, so each finds out by passing over all files, a few at a time. A pass gives
their total size and a sample of their ages, from which follows a time: files that were last used before it are what the
directory has too much of. The next pass removes those. The time stays as it is until a pass has ended, whatever is
removed meanwhile, so hosts that do this at once remove the same files, and together no more than one would.
"""

import math
import random
import threading
from dataclasses import dataclass
from typing import Final

_SAMPLES: Final = 4096
_HIGH: Final = 0.95
_LOW: Final = 0.85
"""What is removed brings the files down to this fraction of the capacity, because others store while a pass lasts."""
_STORED_A_PASS: Final = 0.02
"""A host that has stored this fraction of the capacity since its last pass makes the next."""


@dataclass(slots=True)
class _Pass:
    """nbytes: of the files passed over, `files` in number. sample: when some were last used, and their sizes."""

    nbytes: int = 0
    files: int = 0
    sample: list[tuple[float, int]] | None = None


class LeastUsed:
    """Safe to call from any thread, but one at a time for a pass."""

    def __init__(self, capacity_bytes: int) -> None:
        """capacity_bytes: 0: no limit."""
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._chance = random.Random()  # noqa: S311  # no secret depends on it
        self._pass = _Pass()
        self._passed_bytes: int | None = None
        self._stored_bytes = 0
        self._stored_before_bytes = 0  # of `_stored_bytes`, before the pass began
        self._evict_before_s = -math.inf

    @property
    def used_bytes(self) -> int | None:
        """Size of all files at the end of the last pass, and of those that this host has stored since it began, without
        those that it has removed; None: no pass has ended."""
        passed = self._passed_bytes
        return None if passed is None else passed + self._stored_bytes

    @property
    def is_pass_due(self) -> bool:
        """Whether a pass should begin at once: there is little room, or may be, as others probably store as well."""
        return self.is_nearly_full or 0 < self.capacity_bytes * _STORED_A_PASS < self._stored_bytes

    @property
    def is_nearly_full(self) -> bool:
        """Whether files are to be removed."""
        return 0 < self.capacity_bytes * _HIGH < (self.used_bytes or self._stored_bytes)

    @property
    def is_full(self) -> bool:
        return 0 < self.capacity_bytes < (self.used_bytes or self._stored_bytes)

    def is_evicted(self, used_at_s: float) -> bool:
        """Whether a file that was last used then is to be removed."""
        return used_at_s < self._evict_before_s

    def stored(self, nbytes: int) -> None:
        with self._lock:
            self._stored_bytes += nbytes

    def removed(self, nbytes: int) -> None:
        """This host has removed a file."""
        with self._lock:
            if self._passed_bytes is not None:
                self._passed_bytes = max(0, self._passed_bytes - nbytes)

    def begin_pass(self) -> None:
        with self._lock:
            self._pass, self._stored_before_bytes = _Pass(sample=[]), self._stored_bytes

    def passed(self, used_at_s: float, nbytes: int) -> None:
        """A file that stays."""
        current = self._pass
        if current.sample is None:  # no pass has begun
            return
        current.nbytes += nbytes
        current.files += 1
        if len(current.sample) < _SAMPLES:
            current.sample.append((used_at_s, nbytes))
        elif (place := self._chance.randrange(current.files)) < _SAMPLES:
            current.sample[place] = (used_at_s, nbytes)

    def end_pass(self, latest_s: float) -> None:
        """latest_s: files that were used after this time are not removed, whatever room they take."""
        ended, self._pass = self._pass, _Pass()
        if ended.sample is None:
            return
        with self._lock:
            self._stored_bytes -= self._stored_before_bytes
            self._stored_before_bytes = 0
            self._passed_bytes = ended.nbytes
        self._evict_before_s = -math.inf
        if self.is_nearly_full and ended.nbytes:
            excess = (ended.nbytes + self._stored_bytes - self.capacity_bytes * _LOW) / ended.nbytes
            self._evict_before_s = min(latest_s, _age_of_fraction(sorted(ended.sample), excess))

    def cleared(self) -> None:
        with self._lock:
            self._pass = _Pass()
            self._passed_bytes = None
            self._stored_bytes = self._stored_before_bytes = 0
            self._evict_before_s = -math.inf


def _age_of_fraction(sample: list[tuple[float, int]], fraction: float) -> float:
    """The time before which files with this fraction of all bytes were last used. sample: longest ago first."""
    wanted_bytes, older_bytes = fraction * sum(nbytes for _, nbytes in sample), 0.0
    for used_at_s, nbytes in sample:
        if older_bytes >= wanted_bytes:
            return used_at_s
        older_bytes += nbytes
    return math.inf
