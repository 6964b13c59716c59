"""The scheduler half of blending: finds a request's segments, and offers everything up to the last one's end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from kv_connect.figures import FIGURES, Figure
from kv_connect.halves.request import RequestTokens
from kv_connect.request_options import Controls
from kv_core.errors import InputError
from kv_core.keys import NO_TENANT, ChunkKey, KeySpace, keys_in, tenant_tag
from kv_core.log import limited_logger
from kv_core.service import CacheService, Ended, StoreOptions
from kv_core.shape import ConnectShape
from kv_vllm.stats import PromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kv_blend.figures import BLEND_FIGURES
from kv_blend.keys import SegmentKeys, keys_of_plan
from kv_blend.plan import KEY, BlendPlan, Moved, is_marked, read_plan

_log = limited_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one forward pass: tokens, and entries. max_position: the longest sequence of the model."""

    tokens: int
    entries: int
    max_position: int


@dataclass(frozen=True, slots=True)
class SegmentStep(SegmentKeys):
    """One segment of a request.

    is_held: whether the cache had all of its chunks.
    may_store: whether it may be computed behind its context and stored.
    """

    is_held: bool = False
    may_store: bool = False


@dataclass(frozen=True, slots=True)
class BlendStep:
    """One request.

    tokens: up to the last segment's end.
    computed: this many tokens at its start are in its blocks already.
    space_id, tenant: of the segments' keys.
    storing: how segments that are computed are stored.
    """

    request_id: str
    plan: BlendPlan
    tokens: Sequence[int]
    segments: tuple[SegmentStep, ...]
    space_id: bytes
    tenant: bytes
    storing: StoreOptions
    blocks: Sequence[int] = ()
    computed: int = 0


@dataclass(eq=False)
class BlendMetadata(KVConnectorMetadata):  # type: ignore[misc]  # the engine's classes are untyped here
    """A step's messages: the exact half's, and blended requests'.

    space_id: of the weights that the engine has now; empty if that is not known. Requests that were begun with others
        are not blended.
    """

    exact: Any
    steps: tuple[BlendStep, ...]
    space_id: bytes


@dataclass(slots=True)
class BlendCounts:
    """Of the scheduler half, under the names of `BLEND_FIGURES`."""

    blend_requests: int = 0
    blend_refused: int = 0
    blend_segment_tokens: int = 0
    blend_held_tokens: int = 0
    blend_recomputed_tokens: int = 0


class BlendMetrics(PromMetrics):
    """The exact half's figures, and these."""

    figures: ClassVar[Mapping[str, Figure]] = {**FIGURES, **BLEND_FIGURES}


@dataclass(slots=True)
class _Blended:
    """A request with a plan.

    step: what the workers will be sent when its blocks are known.
    controls: the request's options.
    keys: of each segment's chunks.
    held: for each segment, how many leading ones of these the cache has; None until that is known.
    promised: the segments that were looked up. What the pool has of one is promised while lower tiers are searched.
    report: what becomes of its tokens, for its answer.
    has_failed: the workers could not fill its blocks: it is computed whole.
    """

    step: BlendStep
    controls: Controls
    keys: list[list[ChunkKey]]
    held: list[int | None]
    promised: set[int] = field(default_factory=set)
    has_failed: bool = False
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Refused:
    """A request whose plan is refused."""

    report: dict[str, Any]


class BlendScheduler:
    """Used on vLLM's scheduler thread only."""

    def __init__(
        self,
        cache: CacheService,
        shape: ConnectShape,
        limits: Limits,
        read_exact: Callable[[Any], Any],
        *,
        name: str,
    ) -> None:
        """read_exact: what the exact half knows of a request, a `RequestTokens`. name: distinguishes this engine's
        holders."""
        self._cache = cache
        self._shape = shape
        self._limits = limits
        self._read_exact = read_exact
        self._name = name
        self._requests: dict[str, _Blended | _Refused | None] = {}  # None: without a plan
        self._steps: list[BlendStep] = []
        self._loading: set[str] = set()
        self._exact: list[Any] = []  # requests for which vLLM is to look up its own cache again
        self.counts = BlendCounts()

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def read(self, request: Any, space: KeySpace | None, why_not: str) -> bool:
        """Whether the exact half must not see this request: it is blended, or vLLM's own cache may have blended KV for
        it, whose plan is refused. why_not: why none can be blended; empty if they can."""
        request_id = request.request_id
        if request_id not in self._requests:
            try:
                self._requests[request_id] = self._read(request, space, why_not)
            except InputError as error:
                _log.warning("request %s is computed as if it had no plan: %s", request_id, error)
                self._requests[request_id] = _Refused({"refused": str(error)})
                self.counts.blend_refused += 1
        return isinstance(self._requests[request_id], _Blended) or is_marked(request.cache_salt)

    def match(self, request: Any, computed: int) -> int | None:
        """How many tokens beyond `computed` the workers will provide. None: lower tiers are still being searched, or
        what vLLM itself has of a request that is to be exact may be blended."""
        request_id = request.request_id
        blended = self._requests[request_id]
        if not isinstance(blended, _Blended) or blended.has_failed:
            if computed:
                self._exact.append(request)
                return None
            return 0
        offered = blended.step.plan.end - computed
        if offered <= 0:
            self._release(request_id, blended)
            return 0
        is_pending = False
        for number, segment in enumerate(blended.step.segments):
            if segment.place.end <= computed or blended.held[number] == len(segment.digests):
                continue
            holder, keys = self._holder(request_id, number), blended.keys[number]
            blended.promised.add(number)
            plan = self._cache.lookup(
                keys,
                holder,
                shape=self._shape.chunk,
                wait_for_promotion=blended.controls.promote,
                tiers=blended.controls.tiers,
            )
            if plan.ended is Ended.PENDING:
                is_pending = True
            else:
                blended.held[number] = plan.chunks
        if is_pending:
            return None
        if blended.step.plan.edits and not computed and not any(blended.held):
            self._refuse(blended, "nothing of the conversation before its edits is held; it was computed whole")
            return 0
        return offered

    def make_exact(self) -> None:
        """Have vLLM look up its own cache no more for requests that are to be exact. Not while it asks for a match: it
        would then use what it has found."""
        for request in self._exact:
            request.skip_reading_prefix_cache = True
        self._exact.clear()

    def allocated(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """The engine has allocated blocks for the offered tokens."""
        blended = self._requests[request_id]
        assert isinstance(blended, _Blended)
        computed = blended.step.plan.end - external_tokens
        plan, segments = blended.step.plan, []
        for each, held in zip(blended.step.segments, blended.held, strict=True):
            # What exact requests have not stored of a conversation is computed in its place.
            part = each.leading(held or 0, self._shape.scheme.chunk_tokens) if plan.edits else each
            if part.place.end > max(part.place.first, computed):
                segments.append(SegmentStep(part.place, part.digests, held == len(part.digests), each.may_store))
        self._loading.add(request_id)
        self._steps.append(replace(blended.step, blocks=tuple(blocks), computed=computed, segments=tuple(segments)))

        def tokens(moved: Iterable[Moved]) -> int:
            return sum(max(0, each.end - max(each.first, computed)) for each in moved)

        blended.report = {
            "segment_tokens": tokens(plan.moved),
            "held_tokens": tokens(each.place for each in segments if each.is_held),
            "recomputed_tokens": sum(plan.recomputed(each.place) for each in segments),
        }

    @property
    def is_loading(self) -> bool:
        """Whether the workers have requests that they have not reported yet."""
        return bool(self._loading)

    def take_steps(self) -> tuple[BlendStep, ...]:
        """What the workers are to do in this step."""
        steps, self._steps = tuple(self._steps), []
        return steps

    def give_up(self) -> set[str]:
        """Drop the requests that were not sent to the workers, and return them."""
        given_up = {step.request_id for step in self._steps}
        self._steps.clear()
        return given_up

    def ended(self, request_id: str, *, failed: bool) -> None:
        """The workers have filled the request's blocks, or could not: then the engine computes all of it."""
        self._loading.discard(request_id)
        blended = self._requests.get(request_id)
        if not isinstance(blended, _Blended):
            return
        self._release(request_id, blended)
        if failed:
            self._refuse(blended, "its segments could not be loaded; it was computed whole")
        else:
            self.counts.blend_requests += 1
            for name, tokens in blended.report.items():
                setattr(self.counts, f"blend_{name}", getattr(self.counts, f"blend_{name}") + tokens)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Forget the request. Returns the report for its answer; None: it had no plan."""
        request = self._requests.pop(request_id, None)
        if isinstance(request, _Blended):
            self._release(request_id, request)
        return None if request is None else {KEY: request.report}

    def _refuse(self, blended: _Blended, why: str) -> None:
        blended.report = {"refused": why}
        blended.has_failed = True
        self.counts.blend_refused += 1

    def _read(self, request: Any, space: KeySpace | None, why_not: str) -> _Blended | None:
        read = read_plan(request.kv_transfer_params, request.cache_salt, request.num_prompt_tokens)
        if read is None:
            return None
        plan, tenant = read
        if why_not:
            raise InputError(f"{KEY}: {why_not}")
        if space is None:
            raise InputError(f"{KEY}: the weights of the engine are not known yet")
        reasons = {
            "an adapter": request.lora_request is not None,
            "media": bool(request.mm_features),
            "prompt embeddings": request.prompt_embeds is not None,
            "a streaming session": request.resumable,
            "pooling": request.pooling_params is not None,
            "log-probabilities of its prompt": request.skip_reading_prefix_cache,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise InputError(f"{KEY}: a request with {', '.join(found)} cannot be blended")
        if not set(plan.question) <= set(request.all_token_ids):  # vLLM has checked no others
            raise InputError(f"{KEY}: the question has tokens that the prompt does not have")
        tokens = list(request.all_token_ids[: plan.end])
        tag = tenant_tag(tenant) if tenant else NO_TENANT
        exact = self._read_exact(request)
        if not (self._shape.loads and isinstance(exact, RequestTokens) and exact.controls.load):
            raise InputError(f"{KEY}: this request may load nothing, or this engine (kv_role)")
        controls = exact.controls
        self._check(plan, tokens)
        segments = keys_of_plan(plan, tokens, tenant, self._shape.scheme, controls.tags)
        keys = [
            keys_in(space.fingerprint, each.digests, shards=range(self._shape.shards), tenant=tag) for each in segments
        ]

        def may_store(end: int) -> bool:
            """Of an edited conversation nothing: its keys are exact requests' own."""
            return self._shape.stores and not plan.edits and controls.storable(end) == end

        steps = tuple(
            SegmentStep(each.place, each.digests, may_store=may_store(each.place.source_end)) for each in segments
        )
        storing: StoreOptions = {
            "tiers": controls.tiers,
            "retain_s": controls.retain_ms / 1000,
            "leaves_first": controls.is_demoted,
        }
        step = BlendStep(request.request_id, plan, tokens, steps, space.fingerprint, tag, storing)
        return _Blended(step, controls, keys, [None] * len(keys))

    def _check(self, plan: BlendPlan, tokens: Sequence[int]) -> None:
        """
        Raises:
            InputError: this engine cannot do what the plan says.
        """
        if plan.edits:
            before, most = len(plan.conversation(tokens)), self._limits.max_position
            if before > most:
                raise InputError(
                    f"{KEY}: before its edits the conversation had {before} tokens, more than the {most} of the model "
                    "(max_model_len)"
                )
            return
        longest, most = max(end - first for first, end in plan.segments) + plan.context_tokens, self._limits.tokens
        if longest > most:
            raise InputError(
                f"{KEY}: a segment is {longest} tokens long with its context, and the engine computes at most "
                f"{most} at once (max_num_batched_tokens): divide it"
            )

    def _holder(self, request_id: str, number: int) -> str:
        return f"{self._name}/blend/{number}/{request_id}"

    def _release(self, request_id: str, blended: _Blended) -> None:
        for number in blended.promised:
            self._cache.end(self._holder(request_id, number))
            blended.held[number] = None
        blended.promised.clear()
