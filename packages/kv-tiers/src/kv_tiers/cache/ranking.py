"""The chunks of a pool in the order in which they are worth keeping, and how they follow each other."""

from collections.abc import Iterator, Mapping, Sequence

from kv_core.keys import ChunkKey

from kv_tiers.cache.host import AT_ONCE, HostTier
from kv_tiers.index.residency import Residency


def most_worth_first(host: HostTier, index: Residency) -> list[int]:
    """The slots of all resident chunks, those that the policy would evict last first, and heads before their tails.

    It takes the lock, for a few at a time. It asks the policy for one victim after the other: policies that judge by
    age see all as used when it is over, so it is for a pool that is about to be given up.
    """
    order: dict[int, None] = {}
    try:
        while True:
            with host.lock:
                host.check_open()
                some = index.set_aside(AT_ONCE)
            if not some:
                break
            for slot in some:
                order.pop(slot, None)  # it was used meanwhile
                order[slot] = None
    finally:
        best_first = list(reversed(order))
        for at in reversed(range(0, len(best_first), AT_ONCE)):
            with host.lock:
                index.take_back(best_first[at : at + AT_ONCE])
    with host.lock:
        everywhere = map(index.find, index.keys())
        in_use = [slot for slot in everywhere if slot is not None and slot not in order]
    return [*in_use, *best_first]


def chains(
    keys: Sequence[ChunkKey], parents: Mapping[ChunkKey, ChunkKey], most: int
) -> Iterator[tuple[list[ChunkKey], int]]:
    """These keys in pieces of chains: each is a prompt's keys up to its last one of these, and the place from which on
    they are these; at most so many of them.

    parents: of each key the one before it in its prompt, as far as is known.
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
    for key in left:  # of a circle, which hints may make
        yield [key], 0
