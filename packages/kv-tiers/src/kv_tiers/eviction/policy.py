"""What an eviction policy must do: keep an order over keys. Bytes, tiers and leases are not its concern."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from kv_core.keys import ChunkKey


class EvictionPolicy(Protocol):
    """Called under the cache's lock, so every call must be short: constant time a key, no I/O, no call-out."""

    def added(self, key: ChunkKey) -> None:
        """The chunk is resident from now on."""

    def used(self, prefix: Sequence[ChunkKey]) -> None:
        """These chunks were asked for, in the order of the prompt."""

    def removed(self, key: ChunkKey) -> None:
        """The chunk is resident no more, for whatever reason."""

    def victims(self) -> Iterator[ChunkKey]:
        """All resident keys, the one to evict first leading. The caller takes a few and then changes the order."""
