"""The chains that keys form in their prompts: each group of layers and shard has one of its own."""

from collections.abc import Iterator, Mapping, Sequence

from kv_core.keys import ChunkKey, by_chain


def chains(
    keys: Sequence[ChunkKey], parents: Mapping[ChunkKey, ChunkKey], max_keys: int
) -> Iterator[tuple[list[ChunkKey], int]]:
    """Divide these keys into pieces of at most `max_keys`. For each piece, its prompt's keys up to its last one, and
    the index of its first.

    parents: for each key the one before it in its prompt, as far as is known.
    """
    remaining = dict.fromkeys(keys)
    followed = {parent for key in keys if (parent := parents.get(key)) is not None and parent in remaining}
    for tail in [key for key in keys if key not in followed]:
        piece, current = [], tail
        while current in remaining:
            del remaining[current]
            piece.append(current)
            if (parent := parents.get(current)) is None:
                break
            current = parent
        if not piece:
            continue
        ancestors: list[ChunkKey] = []
        ancestor: ChunkKey | None = parents.get(piece[-1])
        visited = set(piece)
        while ancestor is not None and ancestor not in visited:
            visited.add(ancestor)
            ancestors.append(ancestor)
            ancestor = parents.get(ancestor)
        chain = [*reversed(ancestors), *reversed(piece)]
        for first in range(len(ancestors), len(chain), max_keys):
            yield chain[: first + max_keys], first
    for key in remaining:  # those in a cycle, which wrong hints may form
        yield [key], 0


def parents_of(chain: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkKey | None]:
    """The chunk before each of these in its group and shard; None: it is the first."""
    parents: dict[ChunkKey, ChunkKey | None] = {}
    for group_keys in by_chain(chain).values():
        parents.update(zip(group_keys, (None, *group_keys), strict=False))
    return parents
