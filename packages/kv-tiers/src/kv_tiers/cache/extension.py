"""What takes part in a cache from outside it, such as its side towards other hosts (`kv_server.peers`).

The cache knows nothing of the network: it tells its extensions what happens, and they work with its parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kv_core.clock import Clock
from kv_core.coverage import ChunkShape
from kv_core.keys import ChunkKey
from kv_core.service import Holder
from kv_core.transfer import FileExtent
from kv_eviction.coverage import BoundedGroups

from kv_tiers.cache.host import CacheTotals, Doubtful, HostTier
from kv_tiers.cache.leases import Holds, Leases
from kv_tiers.cache.lower_tiers import LowerTiers
from kv_tiers.index.residency import Residency


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The parts of one cache. `host.lock` guards all but `lower` and `clock`.

    verify: checks adopted chunks that `HostTier.lease_doubtful` reports. Called without the lock.
    refuse_new: from now on nothing new is stored, and this says why; "": chunks are stored again. Takes the lock.
    fetch_held: fetch chunks from the lower tier of this number and hold them for another engine. Then as in
        `Extension.held`, with the seconds for which they are held. False: the tier takes no requests for now. Takes
        the lock.
    cleared_for_s: as `LocalCache` has it.
    """

    host: HostTier
    index: Residency
    lower: LowerTiers
    holds: Holds
    leases: Leases
    totals: CacheTotals
    bounded: BoundedGroups
    clock: Clock
    verify: Callable[[Doubtful], None]
    refuse_new: Callable[[str], None]
    fetch_held: Callable[[int, Sequence[ChunkKey], int, float], bool]
    cleared_for_s: Callable[[], float | None]


@runtime_checkable
class Extension(Protocol):
    """An extension of one cache, or a tier that is one. Its methods return at once, but for `detach`."""

    def attach(self, parts: CacheParts) -> None:
        """Called once, before the cache is used."""

    def held(self, chain: Sequence[ChunkKey], first: int, until_s: float) -> None:
        """Chunks are held for another engine until this time of the cache's clock. Called under the lock.

        chain: the prompt's keys of one group and shard, up to the last of these chunks. first: the position of the
        first one. Not all from there on need be held.
        """

    def received(self, keys: Sequence[ChunkKey]) -> None:
        """Another engine has what it needs of these chunks, so nobody need hold them for it any more."""

    def detach(self) -> None:
        """The cache is about to be closed. It may wait for a bounded time."""


@runtime_checkable
class FindsInFiles(Extension, Protocol):
    """An extension whose engine reads the files of one of the tiers itself, instead of having chunks promoted. Its
    methods wait for nothing.

    tier: the name of that tier.
    """

    tier: str

    def find(
        self,
        keys: Sequence[ChunkKey],
        shape: ChunkShape,
        holder: Holder,
        *,
        hit: int,
        lower: frozenset[int] | None,
        pays: Callable[[tuple[str, int, int, int]], bool],
    ) -> Sequence[FileExtent] | None:
        """Where the chunks after the first `hit` are, leased to the holder until it ends or looks up others. Empty:
        they are to be promoted. None: ask again.

        lower: the numbers of the tiers that may be read; None: all. pays: whether to read this part, as for
            `LowerTiers.worth`, instead of computing it.
        """

    def holding(self, keys: Sequence[ChunkKey], lower: frozenset[int] | None) -> set[ChunkKey]:
        """Those that an engine has read in the files, where it finds them again: it need not store these."""

    def renew(self, holder: Holder) -> bool | None:
        """Whether what is leased to the holder may still be used: none of it was forgotten. None: nothing is."""

    def end(self, holder: Holder) -> None:
        """End the holder's lease."""

    def forget(self, is_gone: Callable[[ChunkKey], bool]) -> None:
        """These chunks are being forgotten: what is read of them must not be used."""
