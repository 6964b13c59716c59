"""The keys of an index whose presence has changed, for one reader that asks the index itself what is true now.

It says neither what happened nor in which order, so it stays small, and a reader that asks later misses nothing. If
more keys have changed than it keeps, the reader is told to look at all of them.
"""

import threading
from collections.abc import Iterable
from typing import Final

from kv_core.keys import ChunkKey

MAX_KEYS: Final = 1 << 18


class Journal:
    """Thread-safe. Nothing here waits."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: set[ChunkKey] | None = None

    def note(self, keys: Iterable[ChunkKey]) -> None:
        """These entered or left the index. Called under the index's lock."""
        with self._lock:
            if self._keys is not None:
                self._keys.update(keys)
                if len(self._keys) > self._max_keys:
                    self._keys = None

    def take(self) -> set[ChunkKey] | None:
        """What has changed since the last call. None: anything may have, as at the first call."""
        with self._lock:
            keys, self._keys = self._keys, set()
            return keys
