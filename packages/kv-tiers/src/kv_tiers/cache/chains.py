"""The chains that keys form in their prompts: each group of layers and shard has one of its own."""

from collections.abc import Iterator, Mapping, Sequence

from kv_core.keys import ChunkKey, by_chain


def chains(
    keys: Sequence[ChunkKey], parents: Mapping[ChunkKey, ChunkKey], most: int
) -> Iterator[tuple[list[ChunkKey], int]]:
    """Divide these keys into pieces of at most `most`. For each, the prompt's keys up to the piece's last one, and the
    index of its first.

    parents: for each key the one before it in its prompt, as far as is known.
    """
    left = dict.fromkeys(keys)
    followed = {parent for key in keys if (parent := parents.get(key)) is not None and parent in left}
    for tail in [key for key in keys if key not in followed]:
        piece, here = [], tail
        while here in left:
            del left[here]
            piece.append(here)
            if (before := parents.get(here)) is None:
                break
            here = before
        if not piece:
            continue
        above: list[ChunkKey] = []
        at: ChunkKey | None = parents.get(piece[-1])
        seen = set(piece)
        while at is not None and at not in seen:
            seen.add(at)
            above.append(at)
            at = parents.get(at)
        chain = [*reversed(above), *reversed(piece)]
        for first in range(len(above), len(chain), most):
            yield chain[: first + most], first
    for key in left:  # those in a cycle, which wrong hints may form
        yield [key], 0


def parents_of(chain: Sequence[ChunkKey]) -> dict[ChunkKey, ChunkKey | None]:
    """The chunk before each of these in its group and shard; None: it is the first."""
    parents: dict[ChunkKey, ChunkKey | None] = {}
    for of_group in by_chain(chain).values():
        parents.update(zip(of_group, (None, *of_group), strict=False))
    return parents
