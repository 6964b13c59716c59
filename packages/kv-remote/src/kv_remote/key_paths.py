"""Keys from the paths under which tiers of files and objects store chunks (`ChunkKey.path`)."""

from collections.abc import Iterable, Iterator

from kv_core.errors import InputError
from kv_core.keys import ChunkKey


def keys_in_paths(paths: Iterable[str]) -> Iterator[ChunkKey]:
    """The keys to which these paths belong. Other paths are skipped."""
    for path in paths:
        try:
            yield ChunkKey.from_path(path)
        except InputError:
            continue
