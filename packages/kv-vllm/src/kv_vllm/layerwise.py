"""Layerwise loads in vLLM's messages: the blocks that a step assumes to be filled because we promised so, and the
ranks' reports on them.

vLLM computes with a synchronous load without checking whether it succeeded. It learns of a failure at the end of the
step, by block, and then recomputes those requests, unless it has already scheduled their next step. Under asynchronous
scheduling it has, and would return a token computed from blocks that were never filled
(https://github.com/vllm-project/vllm/issues/49250). There a failure therefore ends the engine, as a failed device does
anyway: it is the only way to avoid a wrong answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kv_connect.engine import Engine, PartOf
from kv_connect.guard import always, guarded
from kv_connect.halves.layerwise import LayerLoads, RanksReports
from kv_connect.halves.step import NO_REPORT, StepPlan, StepReport
from kv_connect.pools import PoolPart
from kv_core.errors import CopyFailed


@dataclass(frozen=True, slots=True)
class LayerwiseStep:
    """The scheduler's message about layerwise loads with each plan, even to a worker that cannot read the plan.

    requests: the requests whose layerwise loads are in the plan.
    pool: the part of the pool that the scheduler would promise from; None: workers know it, or nothing is promised.
    is_planned: whether the plan has the loads of all these blocks. False: something failed after they were promised.
    """

    blocks: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()
    pool: PoolPart | None = None
    is_planned: bool = True


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """One rank's report on layerwise loads.

    ready: for each pool, how many of its first bytes the rank can copy from.
    """

    report: StepReport = NO_REPORT
    ready: Mapping[str, int] = field(default_factory=dict)


NO_LAYERWISE: Final = LayerwiseStep()
"""The message of nearly every step."""


class LayerwisePromised(PartOf):
    """In the scheduler's connector: the requests whose loads are synchronous, and those loads in flight.

    requests: those that vLLM was last promised a synchronous load for.
    accepted: those among them that got their blocks in this step.
    blocks: these blocks.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.requests: set[str] = set()
        self.accepted: set[str] = set()
        self.blocks: set[int] = set()
        self._reports = RanksReports()
        self._sent: set[str] = set()
        self._idle_message = NO_LAYERWISE

    @property
    def are_under_way(self) -> bool:
        """Whether chunks are leased until workers report, so that the engine has to go on stepping to get reports."""
        return bool(self._sent)

    def promise(self, request_id: str, *, is_layerwise: bool) -> None:
        """Note the latest answer to vLLM for this request."""
        (self.requests.add if is_layerwise else self.requests.discard)(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.requests.discard(request_id)

    @guarded(lambda self, plan: LayerwiseStep(tuple(self.blocks), is_planned=False), even_off=True)
    def to_send(self, plan: StepPlan) -> LayerwiseStep:
        """The message that goes with the plan of the current step."""
        cache, ready = self._engine.cache, self._engine.ready
        pool = None if ready is None or cache is None else ready.wanted(cache.pool.name)
        if not self.blocks and pool == self._idle_message.pool:
            return self._idle_message
        requests = tuple(load.request_id for load in plan.loads if load.extents)
        self._sent.update(requests)
        blocks, self.blocks = tuple(sorted(self.blocks)), set()
        accepted, self.accepted = self.accepted, set()
        self.requests -= accepted
        self._idle_message = LayerwiseStep(pool=pool)
        return LayerwiseStep(blocks, requests, pool, is_planned=accepted.issubset(requests))

    def receive(self, answers: Mapping[int, RankAnswer]) -> StepReport:
        """Add ranks' answers. Returns the loads that have now ended on all of them."""
        half, ready = self._engine.scheduler, self._engine.ready
        if half is not None and any(answer.report.failed for answer in answers.values()):
            half.stop_layerwise()
        if ready is not None:
            for rank, answer in answers.items():
                ready.receive(rank, answer.ready)
        reports = {rank: answer.report for rank, answer in answers.items()}
        report = self._reports.receive(reports, ranks=self._engine.share.ranks)
        self._sent -= report.finished
        return report


def _all_given_up(self: "LayerwiseRank") -> RankAnswer:
    """While the cache of this rank is off: nothing is copied any more, and nothing is ready."""
    worker = self._engine.worker
    return RankAnswer() if worker is None else RankAnswer(worker.layers.give_up())


class LayerwiseRank(PartOf):
    """In a worker's connector: the blocks that this step is to fill, and the last report to the scheduler."""

    def __init__(self, engine: Engine, *, is_asynchronous: bool) -> None:
        """is_asynchronous: vLLM schedules a step before it knows the outcome of the previous one."""
        super().__init__(engine)
        self._is_asynchronous = is_asynchronous
        self._last_answer = RankAnswer()
        self._is_planned = True
        self.blocks: set[int] = set()
        self.are_filled: bool | None = None  # not known before the step's forward pass is over

    def begin(self, step: LayerwiseStep) -> None:
        """Begin a step. Its blocks count as unfilled until `are_filled` is True."""
        self.blocks, self.are_filled, self._is_planned = set(step.blocks), None, step.is_planned
        if step.requests and self._engine.worker is not None:
            self._engine.worker.layers.expected.update(step.requests)
        if step.pool is not None:
            self._follow(step.pool)

    def forward_ended(self, loads: LayerLoads) -> bool:
        """Whether the step's forward pass found what was promised in its blocks. loads: this rank's."""
        self.are_filled = loads.forward_ended() and self._is_planned
        return self.are_filled

    @guarded(lambda self: self._unfilled(), even_off=True, meant=CopyFailed)
    def take_unfilled(self) -> set[int]:
        """The blocks that do not hold what they should, to be reported to vLLM.

        Raises:
            CopyFailed: the report would come too late.
        """
        return set() if self.are_filled else self._unfilled()

    def _unfilled(self) -> set[int]:
        if not self.blocks:
            return set()
        if self._is_asynchronous:
            raise CopyFailed(
                "chunks that were promised for this step are not in the engine's blocks. With asynchronous scheduling "
                "vLLM cannot compute the requests again, so the engine ends rather than answer wrongly. The log says "
                "what failed; with load: async this cannot happen"
            )
        return self.blocks

    def news(self) -> RankAnswer | None:
        """The report that the scheduler does not have yet; None: there is none."""
        answer = self._answer()
        if not answer.report.finished and answer.ready == self._last_answer.ready:
            return None
        self._last_answer = answer
        return answer

    @guarded(_all_given_up)
    def _answer(self) -> RankAnswer:
        worker, pools = self._engine.worker, self._engine.pools
        if worker is None or pools is None:
            return self._last_answer
        return RankAnswer(worker.take_layerwise(), pools.ready)

    @guarded(lambda self, pool: None)
    def _follow(self, pool: PoolPart) -> None:
        if self._engine.pools is not None:
            self._engine.pools.follow(pool)


class LayerPlace(NamedTuple):
    """The number of one of our groups, and of a layer in it."""

    group: int
    layer: int


class LayerHooks(PartOf):
    """A worker's hooks. Layers not known here hold none of our chunks, or cannot be told apart."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._places: Mapping[str, LayerPlace] = {}
        self._computes: dict[str, LayerPlace] = {}

    def bound(self, places: Mapping[str, LayerPlace]) -> None:
        """Set the place of each layer, by vLLM's names, layers that compute KV before layers that share it."""
        self._places = places
        first_names = {place: name for name, place in reversed(list(places.items()))}
        self._computes = {name: place for place, name in first_names.items()}

    @guarded(always(None))
    def wait_for(self, layer_name: str) -> None:
        """The forward pass reads this layer next."""
        if self._engine.worker is not None:
            place = self._places.get(layer_name)
            self._engine.worker.layers.wait_for(None if place is None else place.layer)

    @guarded(always(None))
    def computed(self, layer_name: str, step: StepPlan) -> None:
        """The forward pass has computed this layer, in a step that stores something."""
        place = self._computes.get(layer_name)
        if place is not None and self._engine.worker is not None:
            self._engine.worker.stores.layer_computed(step, place.group, place.layer)
