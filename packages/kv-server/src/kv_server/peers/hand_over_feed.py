"""The feed of handed-over chunks, announced to the servers of other hosts while the prompt is still being computed.

Announcements are numbered. A follower names the last one that it has seen and waits for those after it, so it misses
none, whatever happens to a connection. Announcements whose hold has expired are dropped, and the list is bounded; a
follower that misses some finds the chunks by its next lookup.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.clock import Clock
from kv_core.keys import ChunkKey

_MAX_KEYS: Final = 1 << 20
"""Limit of keys in all announcements together: about 100 MB."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Chunks that can be read from now on.

    number: of the announcement, from 1.
    chain: the prompt's keys of one group and shard, up to the last of these chunks.
    first: the position of the first one in the chain. Not all from there on need be held.
    until_s: until when they are held, by the cache's clock.
    """

    number: int
    chain: Sequence[ChunkKey]
    first: int
    until_s: float


class HandOverFeed:
    """The feed of one cache. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self.name = secrets.token_bytes(16)
        """Unique to this feed for ever, because the numbers of another feed mean nothing here."""
        self._clock = clock
        self._changed = threading.Condition()
        self._announced: deque[HandedOver] = deque()
        self._keys = 0
        self._number = 0

    def announce(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        with self._changed:
            self._number += 1
            self._announced.append(HandedOver(self._number, chain, first, until_s))
            self._keys += len(chain)
            now_s = self._clock.now_s()
            while self._announced and (self._keys > _MAX_KEYS or self._announced[0].until_s <= now_s):
                self._keys -= len(self._announced.popleft().chain)
            self._changed.notify_all()

    def seconds_left(self, announced: HandedOver) -> float:
        """How much longer these chunks are held."""
        return max(0.0, announced.until_s - self._clock.now_s())

    def after(self, number: int, timeout_s: float, max_keys: int) -> tuple[int, list[HandedOver]]:
        """The valid announcements after this number, oldest first, with at most `max_keys` keys; and the number up to
        which they are complete. Waits until there is one, or the time is up.
        """
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while self._number <= number and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            announcements: list[HandedOver] = []
            keys, now_s = 0, self._clock.now_s()
            for announcement in self._announced:
                if announcement.number <= number or announcement.until_s <= now_s or len(announcement.chain) > max_keys:
                    continue
                keys += len(announcement.chain)
                if keys > max_keys:
                    return announcements[-1].number, announcements
                announcements.append(announcement)
            return self._number, announcements
