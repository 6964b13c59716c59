"""Layerwise loads in the scheduler half: leased before they are offered to the engine, until every rank has reported
that its copies have ended.

The chunks are leased a second time, in addition to the request's promise, with all shards of each. A rank copies its
own shard (`kv_connect.halves.layerwise`) and takes no lease, which could be refused when it is too late to report that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kv_core.keys import ChunkKey
from kv_core.service import CacheService, Holder, ReadLease
from kv_core.transfer import HostExtent

from kv_connect.halves.layerwise import LayerwiseReport


@dataclass(frozen=True, slots=True)
class LayerwiseRule:
    """Which loads the scheduler half promises for the step itself.

    always: all that are possible; else those whose copy is estimated to be hidden by the computation, or delays no
        other request.
    is_ready: whether memory of the pool is ready for the devices of all ranks (`LayerwiseCopier.prepare`). False: it
        is not, and the load runs between steps.
    """

    always: bool
    is_ready: Callable[[Sequence[HostExtent]], bool]

    def lease(self, service: CacheService, keys: Sequence[ChunkKey], holder: Holder) -> ReadLease | None:
        """Lease everything that a load needs to succeed; None: a chunk, or memory for it, is not available."""
        lease = service.load(keys, holder, lasting=True)
        if not isinstance(lease, ReadLease):
            return None
        if self.is_ready(lease.extents):
            return lease
        service.release(lease)
        return None


class RanksReports:
    """Which loads have ended on all ranks. Each rank reports its own copies, in whichever step they end."""

    def __init__(self) -> None:
        self._ended: dict[str, set[int]] = {}
        self._failed: set[str] = set()

    def receive(self, by_rank: Mapping[int, LayerwiseReport], *, ranks: int) -> LayerwiseReport:
        """Add these reports. Returns the loads that have now ended on all of `ranks` ranks; failed: those that failed
        on any."""
        for rank, report in by_rank.items():
            self._failed |= report.failed
            for request_id in report.ended:
                self._ended.setdefault(request_id, set()).add(rank)
        ended = {request_id for request_id, ended_ranks in self._ended.items() if len(ended_ranks) == ranks}
        for request_id in ended:
            del self._ended[request_id]
        failed = self._failed & ended
        self._failed -= failed
        return LayerwiseReport(frozenset(ended), frozenset(failed))
