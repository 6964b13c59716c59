"""What names one chunk's bytes: a key space, a digest of the whole prefix, and which share of it.

Skeleton shared by all packages; the spellings follow.
"""


class ChunkKey(bytes):
    """One chunk's name as bytes: hashable and comparable at the speed of `bytes`, which is what an index needs."""

    __slots__ = ()
