"""Layerwise loads: layer n is copied while the layers before it are computed, in the same step.

The engine treats the tokens as computed as soon as they are promised, and a promise cannot be taken back. Whatever can
go wrong is therefore settled before it (`layerwise_promises`): the chunks are in the pool, verified, and leased until
every copy has ended, and their memory is ready for the device. A reset or an eviction in the meantime changes nothing,
because leased bytes stay where they are. What remains is a copy that fails. It is repeated once, in one piece, and the
forward pass waits for it. Only if that fails too, or if the failure shows after a layer was read, `forward_ended`
reports that the step was wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_core.device import CopyEvent, LayerwiseCopier
from kv_core.keys import ChunkKey
from kv_core.log import limited_logger
from kv_core.service import CacheService, Holder, ReadLease
from kv_core.transfer import HostExtent, TransferPlan

from kv_connect.halves.copies import Copies
from kv_connect.halves.step import NO_REPORT, StepReport

_log = limited_logger(__name__)


@dataclass(slots=True)
class _StepLoads:
    """The layerwise loads of one step.

    plan: all their copies; None: they could not be planned.
    layers: for each layer, the event that its bytes have arrived.
    copies: all that were begun, and may still be in flight.
    waits: how often the forward pass has waited for a layer.
    is_retried: whether the copies were made again in one piece.
    failure: why the blocks do not hold what they should, or "".
    """

    requests: tuple[str, ...]
    plan: TransferPlan | None = None
    layers: Sequence[CopyEvent] = ()
    copies: Copies = field(default_factory=Copies)
    waits: int = 0
    is_retried: bool = False
    failure: str = ""


class LayerLoads:
    """A worker's layerwise loads: at most one batch per step, and earlier batches whose copies have not ended.

    expected: requests that were promised loads, whose chunks the scheduler keeps leased until it learns that these have
        ended.
    """

    def __init__(self, copier: LayerwiseCopier) -> None:
        self._copier = copier
        self._current: _StepLoads | None = None
        self._ending: list[_StepLoads] = []
        self.expected: set[str] = set()

    def start(self, requests: Sequence[str], plan: TransferPlan) -> None:
        """Start copying, before the forward pass. All requests in one plan, so that every request's first layer comes
        before any request's second."""
        batch = self._current = _StepLoads(tuple(requests), plan)
        try:
            batch.layers = self._copier.load_layers(plan)
            batch.copies.add(batch.layers)
        except Exception as error:  # noqa: BLE001  # a bug here would cost the engine more than the wait
            self._copy_again(batch, error)

    def refuse(self, requests: Sequence[str], why: str) -> None:
        """The loads of these requests could not be planned."""
        self._current = _StepLoads(tuple(requests), failure=why)

    def wait_for(self, layer: int | None) -> None:
        """The forward pass reads this layer next; None: it may read any layer."""
        batch = self._current
        if batch is None or batch.failure:
            return
        batch.waits += 1
        for event in batch.layers if layer is None else batch.layers[layer : layer + 1]:
            try:
                event.hold_engine()
            except Exception as error:  # noqa: BLE001  # as above
                self._copy_again(batch, error)
                return

    def forward_ended(self) -> bool:
        """Whether the step's forward pass found the promised bytes in the blocks."""
        batch, self._current = self._current, None
        if batch is None:
            return True
        if not batch.waits and not batch.failure:
            batch.failure = "the forward pass has waited for no layer: are full CUDA graphs in use?"
        batch.copies.hold_engine()  # a later pass may read what this one has not
        self._note_failure(batch)
        if batch.failure:
            _log.error("a layerwise load has failed: %s", batch.failure)
            batch.copies.have_stopped(wait=True)  # nothing may be written to blocks that are recomputed
        self._ending.append(batch)
        return not batch.failure

    def take_ended(self, *, wait: bool = False) -> StepReport:
        """Loads that have ended among those whose forward pass is over. wait: wait for all copies first."""
        if not self._ending:
            return NO_REPORT
        ended: set[str] = set()
        failed: set[str] = set()
        for batch in list(self._ending):
            if batch.copies.have_stopped(wait=wait):
                self._note_failure(batch)
                self._ending.remove(batch)
                ended.update(batch.requests)
                failed.update(batch.requests if batch.failure else ())
        self.expected -= ended
        return StepReport(frozenset(ended), frozenset(failed))

    def give_up(self) -> StepReport:
        """After `close`: all loads that are still expected count as failed."""
        if not self.expected:
            return NO_REPORT
        ended, self.expected = frozenset(self.expected), set()
        return StepReport(ended, ended)

    def close(self) -> bool:
        """Wait for every copy, and forget all loads. False: copies may still be in flight."""
        batches = (*self._ending, *([self._current] if self._current else []))
        self._ending, self._current = [batch for batch in batches if not batch.copies.have_stopped(wait=True)], None
        self.expected -= {request for batch in self._ending for request in batch.requests}  # they must not be reported
        return not self._ending

    def _copy_again(self, batch: _StepLoads, failed: Exception) -> None:
        """Copy the same chunks to the same blocks again, and wait, before anything is computed from them. The step is
        late, but correct."""
        if batch.is_retried or batch.plan is None:
            batch.failure = batch.failure or str(failed)
            return
        batch.is_retried = True
        _log.warning("a layerwise load has failed and is retried as a whole: %s", failed)
        batch.layers = ()
        if not batch.copies.have_stopped(wait=True):  # no copy of the first attempt may follow the second
            batch.failure = str(failed)
            return
        batch.copies = Copies()
        try:
            batch.copies.add([self._copier.load(batch.plan)])
            batch.copies.have_stopped(wait=True)
            self._note_failure(batch)
        except Exception as error:  # noqa: BLE001  # then the step's blocks are reported
            batch.failure = str(error)

    def _note_failure(self, batch: _StepLoads) -> None:
        if batch.copies.failure is not None:
            batch.failure = batch.failure or str(batch.copies.failure)


@dataclass(frozen=True, slots=True)
class LayerwiseRule:
    """Which loads the scheduler half promises for the step itself.

    The chunks are leased a second time, in addition to the request's promise, with all shards of each. A rank copies
    its own shard (`kv_connect.halves.layerwise`) and takes no lease, which could be refused when it is too late to
    report that.

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

    def receive(self, by_rank: Mapping[int, StepReport], *, ranks: int) -> StepReport:
        """Add these reports. Returns the loads that have now ended on all of `ranks` ranks; failed: those that failed
        on any."""
        for rank, report in by_rank.items():
            self._failed |= report.failed
            for request_id in report.finished:
                self._ended.setdefault(request_id, set()).add(rank)
        ended = {request_id for request_id, ended_ranks in self._ended.items() if len(ended_ranks) == ranks}
        for request_id in ended:
            del self._ended[request_id]
        failed = self._failed & ended
        self._failed -= failed
        return StepReport(frozenset(ended), frozenset(failed))
