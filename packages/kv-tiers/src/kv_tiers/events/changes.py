"""The record of changes to a pool, in order, for readers that mirror its content, such as a router's tree through
vLLM.

Unlike a subscriber, which is called a moment later on another thread, a reader polls and gets everything that has
happened before the poll. The record is bounded in keys; a reader that falls behind is notified that changes are
missing, and starts over. Nothing is recorded before the first poll.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.keys import ChunkKey

from kv_tiers.events.events import Committed, DamageFound, Event, Evicted, Forgotten, Promoted

MAX_KEYS: Final = 1 << 18
"""About 6 MB."""
POOL: Final = "host"


@dataclass(frozen=True, slots=True)
class Change:
    """entered: from now on these keys can be found in the pool; else no longer. No keys: everything has left."""

    entered: bool
    keys: Sequence[ChunkKey]


@dataclass(frozen=True, slots=True)
class Changes:
    """What has happened since a reader's last poll.

    upto: what to pass to the next poll.
    is_whole: nothing is missing. False: earlier changes were lost, so discard what was known before.
    changes: in order.
    """

    upto: int
    is_whole: bool
    changes: tuple[Change, ...]


class ChangeLog:
    """The record of one pool. Thread-safe."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self._keys = 0
        self._upto = 0

    @classmethod
    def restored(cls, upto: int, changes: Sequence[Change]) -> "ChangeLog":
        """One that goes on where another ended."""
        log = cls()
        for change in changes:
            log._append(change)
        log._upto = upto
        return log

    def note(self, event: Event) -> None:
        """Record the changes to the pool in this event. Called under the cache's lock: nothing here waits."""
        match event:
            case Committed(keys=keys) | Promoted(keys=keys) if keys:
                self._append(Change(True, keys))
            case Evicted(tier=tier, keys=keys) | DamageFound(tier=tier, keys=keys) if keys and tier == POOL:
                self._append(Change(False, keys))
            case Forgotten(keys=keys, everything=everything) if keys or everything:
                self._append(Change(False, keys))

    def since(self, upto: int) -> Changes:
        """upto: as in the last answer; 0 at first."""
        with self._lock:
            first = self._upto - len(self._changes)
            is_whole = first <= upto <= self._upto
            count = self._upto - upto if is_whole else len(self._changes)
            return Changes(self._upto, is_whole, tuple(self._changes)[len(self._changes) - count :])

    def _append(self, change: Change) -> None:
        with self._lock:
            self._changes.append(change)
            self._upto += 1
            self._keys += 1 + len(change.keys)
            while self._keys > self._max_keys:
                self._keys -= 1 + len(self._changes.popleft().keys)
