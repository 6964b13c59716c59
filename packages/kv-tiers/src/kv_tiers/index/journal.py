"""The keys of an index whose presence has changed, for one reader that then queries the index for the current state.

It records neither what happened nor in which order, so it stays small, and a reader that queries later misses nothing.
If more keys have changed than it can hold, the reader has to examine all of them.
"""

import threading
from collections.abc import Iterable
from typing import Final

from kv_core.keys import ChunkKey

MAX_KEYS: Final = 1 << 18


class Journal:
    """Thread-safe. Nothing here blocks."""

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
        """The keys that have changed since the last call. None: any may have, as at the first call."""
        with self._lock:
            keys, self._keys = self._keys, set()
            return keys
