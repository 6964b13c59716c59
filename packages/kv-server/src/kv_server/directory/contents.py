"""What this server holds for others to read, as listed in the directory: names, their sums, and numbered changes.

Indexes only report which keys to check again. Whether peers may read a chunk is decided where their requests are
answered, so the directory agrees with those answers, however a chunk came or left. Periodically all keys are checked,
to catch what no index notices: a tier that went down, or came back.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from kv_core.keys import ChunkKey
from kv_tiers.index.journal import Journal

from kv_server.directory.entries import (
    HOST_BYTES,
    MAX_CHANGES,
    NAME_BYTES,
    VERSION,
    Entry,
    Names,
    names_of,
    no_sums,
    pack,
    root_of,
    shards_of,
    toggle,
)
from kv_server.directory.holders import HolderTable

SCAN_S: Final = 120.0
"""How often all keys are checked."""
_OWN_HOST: Final = 1
_BATCH_KEYS: Final = 1 << 14
_MAX_DOUBTED: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class KeySource:
    """An index: where it notes changes, and all of its keys."""

    journal: Journal
    all_keys: Callable[[], Sequence[ChunkKey]]


class Contents:
    """The contents of one cache. Safe to call from any thread, `update` from one at a time."""

    def __init__(
        self,
        holds: Callable[[Sequence[ChunkKey]], list[bool]],
        sources: Sequence[KeySource],
        *,
        scan_s: float = SCAN_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """holds: whether peers may read these now."""
        self.id = secrets.token_bytes(HOST_BYTES)
        """Unique to this object, because the numbers of another mean nothing here."""
        self._holds = holds
        self._sources = sources
        self._scan_s, self._now_s = scan_s, now_s
        self._scan_at_s = now_s()
        self._doubted: set[ChunkKey] = set()
        self._lock = threading.Lock()  # guards what follows
        self._table = HolderTable()
        self._sums = no_sums()
        self._sequence = 0

    @property
    def count(self) -> int:
        """How many names there are."""
        return self._table.entries

    def doubt(self, keys: Iterable[ChunkKey]) -> None:
        """Check these again: a peer requested them in vain."""
        with self._lock:
            if len(self._doubted) < _MAX_DOUBTED:
                self._doubted.update(keys)

    def update(self, address: str) -> Entry:
        """Collect what has changed; returns the entry that reports it. One without changes shows that this server is
        alive.

        address: where peers read from it.
        """
        with self._lock:
            changed_keys, self._doubted = self._doubted, set()
        scans = self._now_s() >= self._scan_at_s
        for source in self._sources:
            journalled = source.journal.take()
            scans = scans or journalled is None
            changed_keys |= journalled or set()
        if scans:
            self._scan_at_s = self._now_s() + self._scan_s
            changed_keys.update(*(source.all_keys() for source in self._sources))
        keys = list(changed_keys)
        held: list[bool] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            held += self._holds(keys[start : start + _BATCH_KEYS])
        names, is_held = names_of(keys), np.asarray(held, np.bool_)
        held_names, left_names = np.unique(names[is_held]), np.unique(names[~is_held])
        with self._lock:
            if scans:
                left_names = np.union1d(left_names, self._table.names_of(_OWN_HOST))
            left_names = np.setdiff1d(left_names, held_names, assume_unique=True)
            added = held_names[self._table.add(held_names, _OWN_HOST)]
            removed = left_names[self._table.remove(left_names, _OWN_HOST)]
            toggle(self._sums, added)
            toggle(self._sums, removed)
            changes = len(added) + len(removed)
            self._sequence += bool(changes)
            if changes > MAX_CHANGES:
                added = removed = added[:0]  # no entry has these changes
            count, root = self._table.entries, root_of(self._sums)
            return Entry(VERSION, self.id, address, self._sequence, count, root, pack(added), pack(removed))

    def goodbye(self, address: str) -> Entry:
        """The entry of a server that shuts down."""
        return Entry(VERSION, self.id, address, self._sequence, 0, bytes(NAME_BYTES), leaves=True)

    def sums(self) -> tuple[int, bytes]:
        """The number of the last change, and the sum of each shard."""
        with self._lock:
            return self._sequence, pack(self._sums)

    def names_in(self, shards: Sequence[int], max_names: int) -> tuple[int, int, Names]:
        """The number of the last change; how many of these shards there is room for, at least one; and the names in
        them.

        If the first shard alone exceeds `max_names`, only that many of its names.
        """
        with self._lock:
            sequence, names = self._sequence, self._table.names_of(_OWN_HOST)
        name_shards = shards_of(names)
        sizes = np.bincount(name_shards, minlength=1)
        room, answered = max_names, 0
        for shard in shards:
            size = int(sizes[shard]) if shard < len(sizes) else 0
            if answered and size > room:
                break
            room, answered = room - size, answered + 1
        return sequence, answered, names[np.isin(name_shards, list(shards[:answered]))][:max_names]
