"""Cuts groups with large payloads by layers, so that slots of one size suit all groups.

Every payload takes a slot of the pool, however small it is. A group with far more bytes than another (all layers'
states next to one layer's keys) is therefore divided by layers into several groups with the same coverage and block
table. A slot holds as many whole layers as fit, which is more than half of it, so a group of n bytes takes fewer than 2
n / slot + 1 slots. The size is chosen for the least waste, which is usually far below that, because engines that share
pages between groups give their layers pages of equal size.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Final

_WORTH: Final = Fraction(1, 32)
"""Fraction of all slots' bytes that may be wasted to get fewer groups, each of which adds a key to every chunk."""
MOST_GROUPS: Final = 64


def cuts(layer_bytes: Sequence[int], layers: Sequence[int]) -> tuple[int, list[list[int]]]:
    """The size of a slot and, for each group, the number of layers in each of its parts.

    layer_bytes: for each group, the bytes that one layer adds to its payload. layers: for each group, the number of its
    layers.
    """
    largest = max(layer_bytes)
    sizes = {
        nbytes * count
        for nbytes, layer_count in zip(layer_bytes, layers, strict=True)
        for count in range(1, layer_count + 1)
    }
    choices = []
    for slot_bytes in sorted(size for size in sizes if size >= largest):
        parts = sum(_parts(nbytes, count, slot_bytes) for nbytes, count in zip(layer_bytes, layers, strict=True))
        choices.append((parts * slot_bytes, parts, slot_bytes))
    # With slots for whole groups, no group is cut: that many parts are always allowed.
    allowed = [choice for choice in choices if choice[1] <= max(MOST_GROUPS, len(layers))]
    least = min(total_bytes for total_bytes, _, _ in allowed)
    _, _, slot_bytes = min((choice[1], choice[0], choice[2]) for choice in allowed if choice[0] <= least * (1 + _WORTH))
    parts_of = [
        _even_sizes(count, _parts(nbytes, count, slot_bytes)) for nbytes, count in zip(layer_bytes, layers, strict=True)
    ]
    return max(nbytes * max(parts) for nbytes, parts in zip(layer_bytes, parts_of, strict=True)), parts_of


def _parts(layer_bytes: int, layers: int, slot_bytes: int) -> int:
    return -(-layers // (slot_bytes // layer_bytes))


def _even_sizes(layers: int, parts: int) -> list[int]:
    """Sizes as equal as whole layers allow, the larger ones first."""
    return [layers // parts + (number < layers % parts) for number in range(parts)]


def runs(parts: Sequence[int]) -> list[range]:
    """The layers of each part, in order."""
    return [range(first, end) for first, end in pairwise(accumulate(parts, initial=0))]
