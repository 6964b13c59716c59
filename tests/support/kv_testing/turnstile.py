"""A cache's lock that has somebody else take a turn whenever it is released."""

import threading
from collections.abc import Callable

from kv_tiers.cache.local import LocalCache


class Turnstile:
    def __init__(self, cache: LocalCache, turn: Callable[[], None]) -> None:
        self.is_held = self.is_turn = False
        self._lock, self._turn = threading.Lock(), turn
        cache._lock = cache._host.lock = self  # type: ignore[assignment]

    def __enter__(self) -> None:
        self._lock.acquire()
        self.is_held = True

    def __exit__(self, *_: object) -> None:
        self.is_held = False
        self._lock.release()
        if not self.is_turn:
            self.is_turn = True
            self._turn()
            self.is_turn = False
