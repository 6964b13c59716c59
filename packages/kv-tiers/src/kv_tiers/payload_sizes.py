"""The sizes of a cache's chunks: each group of layers has its own."""

from collections.abc import Sequence
from typing import Final

from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey

MAX_GROUPS: Final = 1 << 10


class PayloadSizes:
    """The sizes of one pool's chunks.

    group_bytes: the size of each group's chunks.
    largest: the largest of these.
    are_equal: whether all groups have the same size.
    """

    def __init__(self, group_bytes: Sequence[int]) -> None:
        """group_bytes: by `ChunkKey.group`. A group beyond these is unknown and has the largest size.
        Raises `ConfigError`: no groups, too many, or one of size 0."""
        self.group_bytes = tuple(group_bytes)
        if not 0 < len(self.group_bytes) <= MAX_GROUPS or min(self.group_bytes) <= 0:
            raise ConfigError(
                f"chunks of {', '.join(map(str, self.group_bytes[:8])) or 'no'} bytes; there are 1 to {MAX_GROUPS} "
                "groups of layers, and the size of each must be positive"
            )
        self.largest = max(self.group_bytes)
        self.are_equal = min(self.group_bytes) == self.largest

    def of(self, key: ChunkKey) -> int:
        """Bytes of this chunk."""
        return self.of_group(key[24] << 8 | key[25])  # the property would cost as much as the rest

    def of_group(self, group: int) -> int:
        """Bytes of one of its chunks."""
        return self.group_bytes[group] if group < len(self.group_bytes) else self.largest

    def total(self, keys: Sequence[ChunkKey]) -> int:
        """Bytes of all these chunks."""
        return len(keys) * self.largest if self.are_equal else sum(map(self.of, keys))

    def spelled(self) -> str:
        """For digests and names: one size if all groups are equal, so that it does not depend on their number."""
        return str(self.largest) if self.are_equal else " ".join(map(str, self.group_bytes))
