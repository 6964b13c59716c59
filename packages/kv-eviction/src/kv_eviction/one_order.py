"""Common code of policies that keep their chunks in a single order."""

from collections import OrderedDict

from kv_eviction.policy import EvictionPolicy


class OneOrder(EvictionPolicy):
    """Offers the oldest chunk. The policy decides which that is, and where reinserted ones go."""

    def __init__(self) -> None:
        self._oldest_first: OrderedDict[int, None] = OrderedDict()
        self._excluded: set[int] = set()

    def removed(self, slot: int) -> None:
        if slot in self._excluded:
            self._excluded.remove(slot)
        else:
            del self._oldest_first[slot]

    def victim(self) -> int | None:
        return next(iter(self._oldest_first), None)

    def demote(self, slot: int) -> None:
        """Offer this one next, unless it is excluded."""
        if slot not in self._excluded:
            self._oldest_first.move_to_end(slot, last=False)

    def exclude(self, slot: int) -> None:
        del self._oldest_first[slot]
        self._excluded.add(slot)
