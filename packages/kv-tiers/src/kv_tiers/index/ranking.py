"""The chunks of an index in the order in which they are worth keeping."""

import threading
from typing import Final

from kv_tiers.index.residency import Residency

_BATCH_CHUNKS: Final = 256
"""Chunks that are ranked each time the lock is taken."""


def most_worth_first(index: Residency, lock: threading.Lock) -> list[int]:
    """The slots of all resident chunks, those that the policy would evict last first, and heads before their tails.

    It takes the index's lock, for a few chunks at a time. It requests one victim after another from the policy.
    Policies that judge by age see all chunks as used afterwards, so it is for a medium that is about to be given up.
    """
    order: dict[int, None] = {}
    try:
        while True:
            with lock:
                batch = index.set_aside(_BATCH_CHUNKS)
            if not batch:
                break
            for slot in batch:
                order.pop(slot, None)  # it was used meanwhile
                order[slot] = None
    finally:
        best_first = list(reversed(order))
        for start in reversed(range(0, len(best_first), _BATCH_CHUNKS)):
            with lock:
                index.take_back(best_first[start : start + _BATCH_CHUNKS])
    with lock:
        resident = map(index.find, index.keys())
        in_use = [slot for slot in resident if slot is not None and slot not in order]
    return [*in_use, *best_first]
