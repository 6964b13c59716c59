"""Which page follows which, as learnt from lookups.

SGLang offers pages for storing without the prompt that precedes them. The store needs it: a page is worthless without
the pages before it, so these must not be evicted to make room.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_MAX_PAGES: Final = 1 << 16


class Chains:
    """Bounded: the pages seen longest ago are forgotten. Not thread-safe."""

    def __init__(self, max_pages: int = _MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._before: OrderedDict[str, str] = OrderedDict()  # a page's hash → the hash of the page before it

    def tell(self, hashes: Sequence[str]) -> None:
        """Record that these follow each other in a prompt."""
        for before, page in pairwise(hashes):
            self._before[page] = before
            self._before.move_to_end(page)
        while len(self._before) > self._max_pages:
            self._before.popitem(last=False)

    def before(self, page: str) -> list[str]:
        """The pages before this one, from the prompt's first, or from the first that is known."""
        found: list[str] = []
        while (page := self._before.get(page, "")) and len(found) < self._max_pages:
            found.append(page)
        return found[::-1]
