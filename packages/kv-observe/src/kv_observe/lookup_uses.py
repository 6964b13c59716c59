"""What lookups found: by engine, and by the first chunk of the prompts.

Constant time a lookup, and bounded memory: of more than so many, those that were not looked up for longest are dropped.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import Final, TypeVar

from kv_core.keys import ChunkKey

Name = TypeVar("Name", str, bytes)
_REMEMBERED: Final = 1024
MAX_LISTED: Final = 10


@dataclass(slots=True)
class LookupUse:
    """Lookups that have something in common, since the server started. All counts only grow.

    name: the engine's, or the key of the prompts' first chunk, hex.
    lookups: answered.
    chunks_asked, chunks_hit: in those, and held of them.
    hit_bytes: of the held ones, with every group and shard.
    saved_s: seconds of prefill that engines were advised to save, as they measured; 0: those that measure nothing.
    """

    name: str
    lookups: int = 0
    chunks_asked: int = 0
    chunks_hit: int = 0
    hit_bytes: int = 0
    saved_s: float = 0.0


class LookupUses:
    """For the serving thread."""

    def __init__(self) -> None:
        self._of_engines: OrderedDict[str, LookupUse] = OrderedDict()
        self._of_prefixes: OrderedDict[bytes, LookupUse] = OrderedDict()
        self.saved_s = 0.0
        """Of all."""

    def note(self, engine: str, first: ChunkKey, chunks: tuple[int, int], chunk_bytes: int, saved_s: float) -> None:
        """A lookup has ended. first: its first key. chunks: in the lookup, and held."""
        chunks_asked, chunks_hit = chunks
        self.saved_s += saved_s
        for use in (_of(self._of_engines, engine), _of(self._of_prefixes, bytes(first))):
            use.lookups += 1
            use.chunks_asked += chunks_asked
            use.chunks_hit += chunks_hit
            use.hit_bytes += chunks_hit * chunk_bytes
            use.saved_s += saved_s

    def of_engines(self) -> list[LookupUse]:
        """Those with the most bytes, at most `MAX_LISTED`, the greatest first."""
        return _greatest(self._of_engines.values())

    def of_prefixes(self) -> list[LookupUse]:
        """As `of_engines`."""
        return _greatest(self._of_prefixes.values())


def _of(uses: "OrderedDict[Name, LookupUse]", name: Name) -> LookupUse:
    use = uses.get(name)
    if use is None:
        use = uses[name] = LookupUse(name if isinstance(name, str) else name.hex())
        if len(uses) > _REMEMBERED:
            uses.popitem(last=False)
    uses.move_to_end(name)
    return use


def _greatest(uses: Iterable[LookupUse]) -> list[LookupUse]:
    greatest = nlargest(MAX_LISTED, uses, key=lambda use: (use.hit_bytes, use.chunks_asked))
    return [replace(use) for use in greatest]  # for another thread, while these go on
