"""The scheduler half: which tokens a request may load, which of its blocks are stored, and when a promise ends.

It runs on the engine's scheduler thread and never waits. The engine may ask for a match any number of times; the answer
is the number of tokens beyond those that the engine holds itself, and these are leased from the moment of the answer
until the request loads them, declines, is preempted, aborted or finished. Engine-specific code is in the caller.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from math import inf
from typing import Final

from kv_core.clock import Clock, HandClock
from kv_core.errors import MisuseError
from kv_core.hashing import Digest
from kv_core.keys import ChunkKey, KeySpace, tenant_tag
from kv_core.sequence import KeySequence
from kv_core.service import CacheService, Ended, Holder, LookupPlan, ReadLease
from kv_core.shape import ConnectShape
from kv_core.transfer import packed
from kv_server.hints import HintOutcomes, RetainHint

from kv_connect.figures import SchedulerCounts
from kv_connect.halves.engine_costs import EngineCosts
from kv_connect.halves.layerwise import LayerwiseRule
from kv_connect.halves.lazy_stores import LazyStores
from kv_connect.halves.request import (
    AWAITED,
    HOLDING,
    Awaited,
    Phase,
    RequestEvent,
    RequestTokens,
    Scheduled,
    Tracked,
    advance,
)
from kv_connect.halves.step import NO_SPACE, LoadStep, StateBlock, StepPlan, StoreStep

MIN_TAIL_TOKENS: Final = 16
"""A last chunk of fewer tokens is not stored: computing them takes no longer than a step does anyway."""
_FIRST_RETRY_S: Final = 0.002
_MAX_RETRY_S: Final = 0.008
"""An otherwise idle engine asks in every step, so this is how late the last chunk may be noticed."""
_PRIOR_STATES: Final = 8.0
_MIN_WORTH: Final = 1 / 8
"""Fraction of the best kind's hits below which a kind is not worth storing."""
_TRY_EVERY: Final = 16
"""Of a kind that is not worth storing, one state in this many is stored anyway."""
_MAX_REMEMBERED: Final = 1 << 16
_HALVE_ABOVE: Final = 1024.0
_NEVER: Final = 1 << 62
_PREFETCH: Final = "/prefetch"
"""The end of the name of a holder that is not the request's own."""
_MAX_PREFETCHES: Final = 4
"""How many requests are looked up in a step before the engine asks for them; further ones have their turn."""


class HandOvers:
    """The hand-overs of one engine. Used on the scheduler's thread; per-request state is in `Tracked`.

    A hand-over is a hit in a shared cache (docs/adr/0011), so there is little to add. The prefill engine also stores
    the last, partial chunk, under the digest of exactly those tokens, and has all chunks held in the pool until they
    are read. The decode engine knows how many tokens to expect. While some of them are still being written it repeats
    its lookup, for a bounded time, and then computes what has not arrived.
    """

    def __init__(self, shape: ConnectShape, clock: Clock, *, wait_s: float = 0.0, hold_s: float = 0.0) -> None:
        """wait_s: how long a request may wait for the chunks that it expects. hold_s: how long chunks that are handed
        over stay in the pool unless they are read earlier."""
        self._shape = shape
        self._clock = clock
        self._wait_s = wait_s
        self._hold_ms = round(hold_s * 1000)

    # On the prefill side.

    def hold_ms(self, request: RequestTokens) -> int:
        """How long this request's chunks are held in the pool for another engine; 0: they are not held."""
        return self._hold_ms if request.controls.hands_over_tokens else 0

    def tail_to_store(self, request: RequestTokens, tracked: Tracked | None, computed_tokens: int) -> int:
        """The number of tokens of the last, partial chunk if this step completes it and it is to be stored; else 0.

        A hit is a whole number of chunks for windows and states, so only models without them have such chunks.
        """
        tokens = request.controls.hands_over_tokens
        if not tokens or computed_tokens != tokens or not self._cuts or not self._shape.stores:
            return 0
        if tracked is not None and (tracked.stored_tail_tokens or tracked.mixed):
            return 0
        tail = tokens % self._shape.chunk_tokens
        return tail if tail >= MIN_TAIL_TOKENS and request.controls.storable(tokens) == tokens else 0

    # On the decode side.

    def tail_to_load(self, request: RequestTokens, tracked: Tracked) -> Digest:
        """The digest of the last, partial chunk that this request expects; empty: it expects none. All of the
        request's tokens have been hashed."""
        keys, tokens = tracked.keys, request.controls.awaits_tokens
        is_whole_prompt = tokens == keys.tokens and tokens % self._shape.chunk_tokens >= MIN_TAIL_TOKENS
        return (keys.tail_digest() or b"") if self._cuts and is_whole_prompt else b""

    def is_early(self, tracked: Tracked) -> bool:
        """Whether it is too soon to ask the cache again."""
        awaited = tracked.awaited
        return awaited is not None and self._clock.now_s() < min(awaited.retry_at_s, awaited.until_s)

    def lacks(self, request: RequestTokens, tracked: Tracked) -> bool:
        """Whether chunks that the request expects are missing.

        The request does not name the states that are stored, so the groups that need the whole prefix stand for all.
        """
        chunk_tokens, tokens = self._shape.chunk_tokens, request.controls.awaits_tokens
        if self._shape.chunk.is_plain:
            return tracked.promised_chunks < tokens // chunk_tokens + bool(tracked.tail)
        wanted_chunks = min(tokens, tracked.keys.tokens - 1) // chunk_tokens
        held_chunks = max(tracked.promised_chunks, tracked.junction // chunk_tokens)
        return bool(self._shape.chunk.whole_groups) and held_chunks < wanted_chunks

    def awaits(self, request: RequestTokens, tracked: Tracked, costs: EngineCosts | None) -> bool:
        """Whether to ask the cache again before the request is computed or loaded. It waits once, and never for longer
        than computing what is missing would take, where that is known."""
        if tracked.has_awaited or not request.controls.awaits_tokens:
            return False
        awaited, tracked.awaited = tracked.awaited, None
        now_s = self._clock.now_s()
        if awaited is None:
            learnt = None if costs is None else costs.of(0)
            missing_from = tracked.promised_chunks * self._shape.chunk_tokens
            compute_s = None if learnt is None else learnt.compute_s(missing_from, request.controls.awaits_tokens)
            awaited = Awaited(now_s + min(self._wait_s, inf if compute_s is None else compute_s), 0.0, _FIRST_RETRY_S)
        if now_s >= awaited.until_s or not self.lacks(request, tracked):
            tracked.has_awaited = True
            return False
        awaited.retry_at_s = now_s + awaited.retry_s
        awaited.retry_s = min(2 * awaited.retry_s, _MAX_RETRY_S)
        tracked.awaited = awaited
        return True

    def is_taken(self, request: RequestTokens, tracked: Tracked) -> bool:
        """Whether the holds on chunks handed over to this request can now end, because it has its own lease on those
        that it loads. Notes that it was asked: True at most once per request."""
        is_first = request.controls.awaits_tokens > 0 and not tracked.has_taken
        tracked.has_taken = tracked.has_taken or is_first
        return is_first

    @property
    def _cuts(self) -> bool:
        return self._shape.cuts_chunks and self._shape.chunk.is_plain


class StateKind(Enum):
    __hash__ = object.__hash__  # as in `kv_connect.halves.request.Phase`
    JUNCTION = "prompts diverge here"
    TAIL = "the last whole chunk of a prompt"
    STEP = "a forward pass happened to end here"


_PRIOR_HITS: Final = {StateKind.JUNCTION: 8.0, StateKind.TAIL: 8.0, StateKind.STEP: 1.0}
"""Prior: hits per 8 states that each kind is assumed to bring before anything is known."""


class StateAdmission:
    """One scheduler's statistics. Constant time per call, bounded memory.

    A state is as large as many chunks, serves hits at one boundary only, and most are never requested. Marconi (Pan et
    al., MLSys 2025) stores those at which prompts diverge and those at which a conversation ends, and no others. Here
    each kind has to earn its room: the hits per stored state of a kind are compared with those of the best kind. A kind
    that does not pay is still stored now and then, so that a change is noticed.
    """

    def __init__(self) -> None:
        self._stored = dict.fromkeys(StateKind, _PRIOR_STATES)
        self._hits = dict(_PRIOR_HITS)
        self._refused = dict.fromkeys(StateKind, 0)
        self._kind_of: OrderedDict[bytes, StateKind] = OrderedDict()  # by digest, the oldest first

    def admits(self, digest: bytes, kind: StateKind) -> bool:
        """Whether to store the state at the end of this chunk. If so, it is counted as stored."""
        if self.worth(kind) < _MIN_WORTH * max(map(self.worth, StateKind)):
            self._refused[kind] += 1
            if self._refused[kind] % _TRY_EVERY:
                return False
        if digest not in self._kind_of:
            self._stored[kind] += 1
            if self._stored[kind] > _HALVE_ABOVE:
                self._stored[kind] /= 2
                self._hits[kind] /= 2
        self._kind_of[digest] = kind
        if len(self._kind_of) > _MAX_REMEMBERED:
            self._kind_of.popitem(last=False)
        return True

    def hit(self, digest: bytes) -> None:
        """A load ended at this chunk."""
        if (kind := self._kind_of.get(digest)) is not None:
            self._hits[kind] += 1

    def worth(self, kind: StateKind) -> float:
        """Recent hits per stored state of this kind."""
        return self._hits[kind] / self._stored[kind]


class SchedulerHalf:
    """The scheduler half of one engine. Not thread-safe: used only on the scheduler's thread."""

    def __init__(
        self,
        service: CacheService,
        shape: ConnectShape,
        *,
        name: str,
        costs: EngineCosts | None = None,
        layerwise: LayerwiseRule | None = None,
        handovers: HandOvers | None = None,
        shares_blocks: bool = False,
    ) -> None:
        """name: distinguishes this engine's holders from other engines' in the same cache. costs: learns how long the
        engine's work takes; without it, whatever is held is loaded. layerwise: which loads run within a step; None:
        none. It requires one group of layers that needs the whole prefix. handovers: None: no request waits for another
        engine, and no chunk is held for one. shares_blocks: whether requests with the same prefix get the same blocks
        from the engine, so that one of them can load it for all."""
        self._service = service
        self.shape = shape
        """What both halves agree on."""
        self.space = shape.space
        """The key space in use."""
        self._engine_has_old_blocks = False
        self._name = name
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[LoadStep] = []
        self._refused: list[str] = []
        self._blocks: dict[Holder, int] = {}  # allocated in this step
        self._pending = 0
        self._prefetched: dict[str, RequestTokens] = {}  # by request, those whose promotion goes on
        self._admission = StateAdmission()
        self._shares_loads = shares_blocks and shape.chunk.is_plain
        self._has_states = any(group.coverage.kind == "state" for group in shape.groups)
        self._layerwise = layerwise
        self._handovers = handovers or HandOvers(shape, HandClock())
        self.costs = costs
        self.lazy: LazyStores | None = None
        """If set, chunks are stored only when the engine reuses their blocks. It requires one group of layers that
        needs the whole prefix, and an engine that keeps the blocks of requests that have ended."""
        self.counts = SchedulerCounts()

    def match(self, request: RequestTokens, computed_tokens: int) -> int | None:
        """How many tokens beyond `computed_tokens` (a whole number of blocks) the engine may load.

        None: more is being promoted from lower tiers, or another request is loading the same chunks into blocks that
        both will have; leave the request waiting and ask again in the next step. Each ends within a bounded time and
        happens once per request, unless it is preempted. A request that may not load, or not so few tokens, is not
        looked up. Chunks that are estimated to be quicker to compute (`kv_core.cost`) are not offered.

        At least one token is always left to compute: the engine needs a logit. Cheap to call again: while the promise
        stands, nothing is hashed or looked up.
        """
        tracked = self._track(request)
        if tracked.phase in (Phase.FILLING, Phase.DRAINING):
            return None  # preempted, or another with the id of one that has ended; the load's copies will soon end
        if tracked.follows and (leader := self._tracked.get(tracked.follows)) and leader.phase is Phase.LOADING:
            return None
        if tracked.phase not in (Phase.WAITING, Phase.PENDING, Phase.PROMISED, Phase.RUNNING):
            raise MisuseError(f"request {request.request_id} was looked up while it is {tracked.phase.name}")
        if tracked.phase is Phase.RUNNING:
            tracked.mixed = tracked.is_counted = False  # preempted: its blocks are gone
        if computed_tokens and self._engine_has_old_blocks:
            tracked.mixed = True
        chunk_tokens = self.shape.chunk_tokens
        usable = len(request.tokens) - 1
        worthwhile = max(1, request.controls.min_load_tokens)
        offered = 0
        if self.space is None:
            # Without a key space its chunks have no keys, so nothing of it is held or promised.
            self._move(request.request_id, tracked, RequestEvent.MISS)
            return 0
        in_whole_blocks = not any(computed_tokens % group.block_tokens for group in self.shape.groups)
        may_load = self.shape.loads and request.controls.load and usable - computed_tokens >= worthwhile
        if may_load and in_whole_blocks:
            if self._handovers.is_early(tracked):
                return None
            own_chunks = 0 if self.lazy is None else computed_tokens // chunk_tokens
            may_renew = tracked.phase is Phase.PROMISED and tracked.own_chunks <= own_chunks
            if not (may_renew and self._service.renew(self._holder(request.request_id))):
                self._drop_layerwise(tracked)
                if tracked.phase is Phase.RUNNING:
                    tracked.may_wait = True
                tracked.own_chunks = own_chunks
                plan = self._look_up(request, tracked, usable, computed_tokens)
                tracked.promised_chunks, tracked.tiers, tracked.files = plan.chunks, plan.tiers, plan.files
                tracked.junction = plan.prefix_chunks * chunk_tokens if plan.prefix_chunks > plan.chunks else 0
                if plan.ended is Ended.PENDING:  # the lookup goes on: ending it here would begin it anew in every step
                    self._move(request.request_id, tracked, RequestEvent.PEND)
                    return None
                if self._is_on_its_way(tracked, plan.chunks) or self._handovers.awaits(request, tracked, self.costs):
                    self._move(request.request_id, tracked, RequestEvent.PEND)
                    self._service.end(self._holder(request.request_id))  # only a new lookup asks the lower tiers again
                    return None
                tracked.pays = plan.choice is None or plan.choice.chunks == plan.chunks
                if tracked.pays and (leader_id := self._leader(tracked, computed_tokens, usable)):
                    tracked.follows = leader_id
                    self.counts.loads_shared += 1
                    self._move(request.request_id, tracked, RequestEvent.PEND)
                    self._service.end(self._holder(request.request_id))  # there will be less to load
                    return None
                tracked.may_wait = False
                self._count_lookup(request, tracked, usable, computed_tokens)
                if self.costs is not None and plan.choice is not None and plan.chunks * chunk_tokens > computed_tokens:
                    self.costs.chose(to_load=tracked.pays)
            offered = self.shape.loadable(tracked.promised_chunks, usable) - computed_tokens if tracked.pays else 0
        if self._handovers.is_taken(request, tracked):
            self._service.received(self._prompt_keys(request, tracked))
        if offered < worthwhile:
            had_promise = tracked.promised_chunks > tracked.own_chunks
            self._move(request.request_id, tracked, RequestEvent.MISS, had_promise=had_promise)
            return 0
        is_another = (tracked.offered_from, tracked.offered_tokens) != (computed_tokens, offered)
        tracked.offered_from, tracked.offered_tokens = computed_tokens, offered
        if is_another or tracked.layerwise is None:
            self._drop_layerwise(tracked)
            tracked.layerwise = self._lease_layerwise(request, tracked)
        self._move(request.request_id, tracked, RequestEvent.PROMISE)
        return offered

    def prefetch(self, request: RequestTokens) -> None:
        """Have lower tiers' chunks of a request that has just arrived promoted, whether or not that pays. Their leases
        end with the promotion: until the request is matched they are chunks like others."""
        self._prefetched[request.request_id] = request
        if len(self._prefetched) <= _MAX_PREFETCHES:
            self._go_on_prefetching(request)

    def _go_on_prefetching(self, request: RequestTokens) -> None:
        if self.space is None or not self.shape.loads:
            return
        keys, tiers = self._prompt_keys(request, self._track(request)), request.controls.tiers
        holder = self._holder(request.request_id) + _PREFETCH
        plan = self._service.lookup(keys, holder, shape=self.shape.chunk, wait_for_promotion=True, tiers=tiers)
        if plan.ended is not Ended.PENDING:
            self._end_prefetch(request.request_id)

    def _end_prefetch(self, request_id: str) -> None:
        if self._prefetched.pop(request_id, None) is not None:
            self._service.end(self._holder(request_id) + _PREFETCH)

    def is_layerwise(self, request_id: str) -> bool:
        """Whether the tokens last offered to this request are loaded in the step in which it gets its blocks, so that
        the engine considers them computed from then on. Otherwise the engine waits until the load is reported as ended.
        """
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.layerwise is not None

    def allocated(self, request_id: str, external_tokens: int, blocks: tuple[Sequence[int], ...]) -> None:
        """The engine has allocated blocks; `external_tokens` of the offered tokens are to be loaded into them.

        An inconsistent load (a count that was not offered, a table too short) is refused here, where the numbers are
        known, and reported as failed by the workers: the engine then computes the tokens itself.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            if external_tokens:
                self._refused.append(request_id)
            return
        self._blocks[self._holder(request_id)] = sum(map(len, blocks))
        if external_tokens == 0:
            if tracked.phase is not Phase.LOADING:
                self._move(request_id, tracked, RequestEvent.ADMIT)
            return
        if tracked.phase is not Phase.PROMISED:
            # No promise, no lease: there is nothing to load, and the engine must be told.
            self._refused.append(request_id)
            self.counts.loads_refused += 1
            return
        first, last = tracked.offered_from, tracked.offered_from + external_tokens
        tables = self.shape.tables
        ends = [len(table) * block_tokens for table, block_tokens in zip(blocks, tables, strict=False) if block_tokens]
        fits = len(blocks) >= len(tables) and min(ends) >= last
        layerwise = tracked.layerwise
        self._move(request_id, tracked, RequestEvent.LOAD if layerwise is None else RequestEvent.FILL)
        tracked.has_loaded = True
        if external_tokens != tracked.offered_tokens or not fits:
            if layerwise is None:
                self._refused.append(request_id)
            else:  # no worker will report it: the engine goes by its own record of what the step was to fill
                self._move(request_id, tracked, RequestEvent.LOADED)
            self.counts.loads_refused += 1
            return
        chunk_tokens = self.shape.chunk_tokens
        # A full hit leaves one token to compute, yet its block is loaded whole: what is computed there is the same.
        block_tokens = max(tables)
        last = min(-(-last // block_tokens) * block_tokens, tracked.promised_chunks * chunk_tokens, *ends)
        first_chunk, last_chunk = first // chunk_tokens, -(-last // chunk_tokens)
        if self._has_states:
            self._admission.hit(tracked.keys.digests[last_chunk - 1])
        self._loads.append(
            LoadStep(
                request_id,
                first_chunk,
                tracked.digests(first_chunk, last_chunk),
                tracked.tenant,
                tuple(packed(table) for table in blocks),
                first,
                last,
                () if layerwise is None else layerwise.extents,
                tracked.files_of(first_chunk, last_chunk),
            )
        )
        self.counts.loads += 1
        self.counts.loads_layerwise += layerwise is not None
        self.counts.tokens_to_load += external_tokens
        for tier, tokens in self.sources(request_id).items():
            self.counts.tokens_by_tier[tier] = self.counts.tokens_by_tier.get(tier, 0) + tokens

    def sources(self, request_id: str) -> dict[str, int]:
        """How many of the last offered tokens come from each tier: a chunk counts for the slowest tier of its parts."""
        tracked = self._tracked.get(request_id)
        return {} if tracked is None else tracked.offered_by_tier(self.shape.chunk_tokens)

    def junction(self, request_id: str) -> int:
        """The boundary, in tokens, up to which other requests have computed this prompt, although the state that a hit
        needs there is missing: a forward pass that ends there makes it a hit for the next request. 0: none."""
        tracked = self._tracked.get(request_id)
        return tracked.junction if tracked is not None and self._has_states else 0

    def completes_chunk(self, request: RequestTokens, computed_tokens: int) -> bool:
        """Whether a step that ends at `computed_tokens` has something to store: ask before fetching a block table."""
        tracked = self._tracked.get(request.request_id)
        if self._handovers.tail_to_store(request, tracked, computed_tokens):
            return self.space is not None
        wanted = 1 if tracked is None else tracked.stored_chunks + 1
        if min(computed_tokens, request.keep_tokens) < wanted * self.shape.scheme.chunk_tokens or self.space is None:
            return False  # nearly always: this runs for every request in every step
        return (tracked is None or not tracked.mixed) and self._storable_chunks(request, computed_tokens) >= wanted

    def build_step(self, scheduled: Iterable[Scheduled], *, trial: int = 0) -> StepPlan:
        """Everything for this step: the loads that were allocated, and the chunks that it completes.

        trial: as in `StepPlan`.
        """
        for request in list(islice(self._prefetched.values(), _MAX_PREFETCHES)):
            self._go_on_prefetching(request)
        stores = [store for entry in scheduled if (store := self._store(entry)) is not None]
        space_id = NO_SPACE if self.space is None else self.space.fingerprint
        overwritten = () if self.lazy is None else self.lazy.take()
        plan = StepPlan(
            tuple(self._loads), tuple(stores), tuple(self._refused), space_id, trial=trial, overwritten=overwritten
        )
        for store in stores:
            tracked = self._tracked[store.request_id]
            tracked.first_trial = min(tracked.first_trial, trial)
        if self.costs is not None:
            for load in self._loads:
                if not (load.extents or load.files):
                    self.costs.load_began(load.request_id, load.last_token - load.first_token)
            if measured := self.costs.take_measured():
                self._service.measured(measured)
        self._loads, self._refused = [], []
        if self._blocks:
            allocated, self._blocks = self._blocks, {}
            self._service.allocated(allocated)
        return plan

    def loads_ended(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """All workers have reported these loads; `failed` ones will be looked up again or computed."""
        finished, failed = set(finished), set(failed)
        # Loads of other connectors, with which the engine may have this one share its requests, are reported here too.
        tracked_ids = finished & self._tracked.keys()
        awaited = {request_id for request_id in tracked_ids if self._tracked[request_id].phase in AWAITED}
        if awaited - failed:
            self.counts.loads_failed_in_a_row = 0
        elif awaited:
            self.counts.loads_failed_in_a_row += 1  # however many: a server that is restarted fails all of them at once
        for request_id in failed:
            self.counts.loads_failed += request_id in awaited
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.store_again()  # what could not be loaded will be computed, and is worth storing again
        for request_id in finished:
            if self.costs is not None:
                self.costs.load_ended(request_id, failed=request_id in failed)
            if request_id in awaited:
                tracked = self._tracked[request_id]
                self.counts.loaded_tokens += tracked.offered_tokens if request_id not in failed else 0
                self._move(request_id, tracked, RequestEvent.LOADED)

    def not_filled(self, request_id: str, first_token: int, *, judged: int) -> None:
        """Another connector has not filled the request's blocks from this token on, which the engine has computed with:
        forget the chunks that were stored from them. The engine computes again, and then they are stored again.

        judged: all trials up to this one were passed; what is stored in later ones has yet to be committed.
        """
        if (tracked := self._tracked.get(request_id)) is None:
            return
        first_chunk, per_chunk = first_token // self.shape.chunk_tokens, self.shape.chunk.keys_per_chunk
        if tracked.first_trial <= judged and first_chunk < tracked.stored_chunks:
            self._service.forget(tracked.chunk_keys[first_chunk * per_chunk : tracked.stored_chunks * per_chunk])
        tracked.store_again()

    def distrust(self, request_id: str) -> None:
        """The request computes from blocks that hold other tokens' KV: store nothing of it, unless it is preempted."""
        if (tracked := self._tracked.get(request_id)) is not None:
            tracked.mixed = True

    def given_tokens(self, request_id: str) -> int:
        """How many of its leading tokens another engine can load: those that are stored, or being stored."""
        tracked = self._tracked.get(request_id)
        tokens = 0
        if tracked is not None and not tracked.mixed:
            tokens = tracked.stored_chunks * self.shape.chunk_tokens + tracked.stored_tail_tokens
        self.counts.handovers_given += tokens > 0
        return tokens

    def turn_ended(self, request_id: str) -> None:
        """The request was answered without a call of a tool. Call this before `finished`."""
        if (tracked := self._tracked.get(request_id)) is not None and tracked.chunk_keys:
            self.counts.turns_ended += 1
            self._service.turn_ended(tracked.chunk_keys)

    def hinted(self, request_id: str, hinted: HintOutcomes) -> HintOutcomes:
        """What has become of the request's hints, now that its prompt and budget are known. Call this before
        `finished`."""
        tracked, per_chunk = self._tracked.get(request_id), self.shape.chunk.keys_per_chunk
        retains = any(one.action_type == RetainHint.KIND and one.outcome != "rejected" for one in hinted.outcomes)
        if retains and tracked is not None and tracked.chunk_keys:
            fitting = self._service.retainable(tracked.chunk_keys)
            if fitting is not None and fitting < len(tracked.chunk_keys):
                hinted = hinted.retained(fitting // per_chunk)
        self.counts.hints += len(hinted.outcomes)
        self.counts.hints_rejected += sum(one.outcome == "rejected" for one in hinted.outcomes)
        return hinted

    def finished(self, request_id: str) -> None:
        """The engine is done with the request: finished, aborted or failed. Idempotent."""
        self._end_prefetch(request_id)
        tracked = self._tracked.get(request_id)
        if tracked is not None and tracked.phase is not Phase.DRAINING:
            self._move(request_id, tracked, RequestEvent.FINISH)

    def name_weights(self, space: KeySpace) -> None:
        """Set the key space once the engine's weights are known. Nothing was loaded or stored before."""
        assert self.space is None
        self.space = space
        for tracked in self._tracked.values():
            self._rename_keys(tracked)

    def weights_changed(self, space: KeySpace | None) -> None:
        """The engine's weights may have changed; their KV belongs in `space` (None: not known yet).

        Chunks already held stay under their keys: they are right for engines with the old weights. The KV in the
        engine's own blocks belongs to the old weights and must not be stored under a new key.
        """
        self.space = space
        self._engine_has_old_blocks = True
        self._forget_deferred()
        # A layerwise load cannot be taken back: like a running request, it continues with the KV of the old weights.
        self._refused += [load.request_id for load in self._loads if not load.extents]
        self._loads = [load for load in self._loads if load.extents]
        for request_id, tracked in self._tracked.items():
            tracked.store_again()
            tracked.offered_tokens = 0
            # A waiting request has blocks too, if a load has filled some.
            has_no_blocks = tracked.phase is Phase.WAITING and not tracked.has_loaded
            tracked.mixed = not (has_no_blocks or tracked.phase in (Phase.PENDING, Phase.PROMISED))
            self._rename_keys(tracked)
            if tracked.phase in (Phase.PENDING, Phase.PROMISED):
                self._service.end(self._holder(request_id))  # the next lookup finds no promise to renew

    def engine_emptied(self) -> None:
        """The engine has forgotten what is in its own blocks."""
        self._engine_has_old_blocks = False
        self._forget_deferred()

    def reset(self) -> None:
        """Forget everything held. Earlier promises are void, and so are the leases of the loads in progress: the
        workers will report those as failed.
        """
        self._service.clear()
        self._forget_deferred()
        for request_id, tracked in self._tracked.items():
            tracked.store_again()
            if tracked.phase in (Phase.PENDING, Phase.PROMISED):
                self._service.end(self._holder(request_id))  # the next lookup finds no promise to renew

    def close(self, *, but_filling: bool = False) -> None:
        """Release every promise and forget every request; for an engine that continues without us.

        but_filling: except those that workers in other processes may be copying layer by layer, until they report it
            (`loads_ended`).
        """
        filling = {request_id for request_id, tracked in self._tracked.items() if but_filling and tracked.is_filling}
        filling -= {load.request_id for load in self._loads}  # no worker will receive these
        for request_id in list(self._prefetched):
            self._end_prefetch(request_id)
        for request_id in self._tracked.keys() - filling:
            self._service.end(self._holder(request_id))
            del self._tracked[request_id]
        self._pending, self._loads, self._refused = 0, [], []
        self._forget_deferred()

    def is_waiting(self) -> bool:
        """Whether a request is waiting for promotions from lower tiers."""
        return self._pending > 0

    def stop_layerwise(self) -> None:
        """A layerwise load has failed, which must not happen: from now on all loads run between steps."""
        self._layerwise = None

    def tracked_phases(self) -> dict[str, Phase]:
        """Every tracked request and its phase; empty when the engine is idle."""
        return {request_id: tracked.phase for request_id, tracked in self._tracked.items()}

    def draining(self) -> list[str]:
        """Requests that have ended while their blocks are being filled."""
        return [request_id for request_id, tracked in self._tracked.items() if tracked.phase is Phase.DRAINING]

    def _is_on_its_way(self, tracked: Tracked, chunk: int) -> bool:
        digests = tracked.keys.digests
        return self.lazy is not None and chunk < len(digests) and self.lazy.is_on_its_way(digests[chunk])

    def _forget_deferred(self) -> None:
        if self.lazy is not None:
            self.lazy.forget()

    def _holder(self, request_id: str) -> str:
        return f"{self._name}/{request_id}"

    def _track(self, request: RequestTokens) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            root = self.shape.scheme.root(salt=request.salt, lora=request.lora, tags=request.controls.tags)
            keys = KeySequence(self.shape.scheme, root=root, items=request.items)
            tracked = self._tracked[request.request_id] = Tracked(keys, tenant_tag(request.salt))
        return tracked

    def _hash_up_to(self, request: RequestTokens, tracked: Tracked, tokens: int) -> None:
        """Extend the request's chain over its first `tokens` tokens. Those hashed before cost nothing."""
        if tokens > (hashed := tracked.keys.tokens):
            tracked.chunk_keys += self._keys(tracked, tracked.keys.append(request.tokens[hashed:tokens]))

    def _keys(self, tracked: Tracked, digests: Sequence[bytes]) -> list[ChunkKey]:
        assert self.space is not None
        shape = self.shape
        return self.space.keys(digests, groups=len(shape.groups), shards=shape.shards, tenant=tracked.tenant)

    def _prompt_keys(self, request: RequestTokens, tracked: Tracked) -> list[ChunkKey]:
        self._hash_up_to(request, tracked, len(request.tokens))
        tracked.tail = self._handovers.tail_to_load(request, tracked)
        return self._all_keys(tracked)

    def _all_keys(self, tracked: Tracked) -> list[ChunkKey]:
        """The keys of its chunks, with the partial one that another engine hands over."""
        return [*tracked.chunk_keys, *self._keys(tracked, [tracked.tail])] if tracked.tail else tracked.chunk_keys

    def _rename_keys(self, tracked: Tracked) -> None:
        tracked.chunk_keys = [] if self.space is None else self._keys(tracked, tracked.keys.digests)

    def _look_up(self, request: RequestTokens, tracked: Tracked, usable: int, computed_tokens: int) -> LookupPlan:
        keys, shape, controls = self._prompt_keys(request, tracked), self.shape.chunk, request.controls
        own_chunks = tracked.own_chunks  # where stores are deferred, what the engine has itself need not be held
        keys = keys[own_chunks * shape.keys_per_chunk :]
        if not shape.is_plain:  # windows and states are held for whole chunks
            keys = keys[: usable // shape.chunk_tokens * shape.keys_per_chunk]
        costs = None
        if self.costs is not None:
            stores = self.shape.stores and controls.store
            rule = self._layerwise
            layerwise_tokens = len(request.tokens) if rule and (rule.always or self._is_alone(tracked)) else 0
            costs = self.costs.of(computed_tokens, controls.use, stores=stores, layerwise_tokens=layerwise_tokens)
            if own_tokens := own_chunks * shape.chunk_tokens:
                computed_tokens, layerwise_tokens = computed_tokens - own_tokens, max(0, layerwise_tokens - own_tokens)
                costs = replace(
                    costs,
                    computed_tokens=computed_tokens,
                    before_tokens=own_tokens,
                    layerwise_tokens=layerwise_tokens,
                )
        plan = self._service.lookup(
            keys,
            self._holder(request.request_id),
            shape=shape,
            wait_for_promotion=tracked.may_wait and controls.promote,
            costs=costs,
            tiers=controls.tiers,
            reads_files=True,
        )
        return plan.after(own_chunks)

    def _leader(self, tracked: Tracked, computed_tokens: int, usable: int) -> str:
        """The request whose load to wait for, because the engine will share its blocks; empty if there is none.

        Waiting costs latency where the loads differ: at least half of what this one would load must be in the other,
        and the other may be at most twice as long.
        """
        wanted = self.shape.loadable(tracked.promised_chunks, usable) - computed_tokens
        if not self._shares_loads or tracked.follows or wanted <= 0:
            return ""
        chunk_tokens, digests = self.shape.chunk_tokens, tracked.keys.digests
        for request_id, other in self._tracked.items():
            if other.phase is Phase.LOADING and other.offered_tokens <= 2 * wanted:
                # A chain's digests differ from the first difference on.
                theirs = other.keys.digests
                ends = range(min(len(digests), len(theirs)))
                common = bisect_left(ends, True, key=lambda at: digests[at] != theirs[at]) * chunk_tokens
                shared = min(common, other.offered_from + other.offered_tokens) - computed_tokens
                if 2 * shared >= wanted:
                    return request_id
        return ""

    def _lease_layerwise(self, request: RequestTokens, tracked: Tracked) -> ReadLease | None:
        """A second lease of the offered chunks, with their places in the pool; None: they are loaded between steps."""
        rule, shape, chunk_tokens = self._layerwise, self.shape.chunk, self.shape.chunk_tokens
        first, last = tracked.offered_from, tracked.offered_from + tracked.offered_tokens
        if rule is None or tracked.files:
            return None
        if not (rule.always or self._suits_layerwise(tracked, first, last, len(request.tokens))):
            return None
        first_key = first // chunk_tokens * shape.keys_per_chunk
        end_key = -(-last // chunk_tokens) * shape.keys_per_chunk
        return rule.lease(self._service, self._all_keys(tracked)[first_key:end_key], self._holder(request.request_id))

    def _suits_layerwise(self, tracked: Tracked, first: int, last: int, prompt_tokens: int) -> bool:
        """The part of a copy that is not hidden delays all requests of the step."""
        prolonged_s = None if self.costs is None else self.costs.prolonged_s(first, last, prompt_tokens)
        return prolonged_s is not None and (prolonged_s == 0.0 or self._is_alone(tracked))

    def _is_alone(self, tracked: Tracked) -> bool:
        """Whether no other request would be in a step with this one."""
        running = (Phase.RUNNING, Phase.FILLING)
        return not any(other.phase in running for other in self._tracked.values() if other is not tracked)

    def _drop_layerwise(self, tracked: Tracked) -> None:
        if tracked.layerwise is not None:
            self._service.release(tracked.layerwise)
            tracked.layerwise = None

    def _count_lookup(self, request: RequestTokens, tracked: Tracked, usable: int, computed_tokens: int) -> None:
        if not tracked.is_counted:
            tracked.is_counted = True
            if request.controls.awaits_tokens:
                self.counts.handovers_received += 1
                self.counts.handovers_late += self._handovers.lacks(request, tracked)
            self.counts.lookups += 1
            self.counts.asked_tokens += max(0, usable - computed_tokens)
            hit = max(0, min(tracked.promised_chunks * self.shape.chunk_tokens, usable) - computed_tokens)
            self.counts.found_tokens += hit
            self.counts.declined_tokens += 0 if tracked.pays else hit

    def _storable_chunks(self, request: RequestTokens, computed_tokens: int) -> int:
        return min(computed_tokens, request.kept_tokens) // self.shape.chunk_tokens if self.shape.stores else 0

    def _store(self, entry: Scheduled) -> StoreStep | None:
        tracked = self._track(request := entry.request)
        if self.space is None or tracked.mixed:
            return None
        chunk_tokens = self.shape.chunk_tokens
        chunks = self._storable_chunks(request, entry.computed_tokens)
        boundaries = {
            state.boundary
            for state in entry.states
            if 0 < state.boundary <= chunks * chunk_tokens and state.boundary % chunk_tokens == 0
        }
        tail_tokens = self._handovers.tail_to_store(request, tracked, entry.computed_tokens)
        if chunks <= tracked.stored_chunks and not boundaries and not tail_tokens:
            return None
        self._hash_up_to(request, tracked, chunks * chunk_tokens + tail_tokens)
        digests = tuple(tracked.keys.digests[:chunks])
        if tail_tokens and (tail := tracked.keys.tail_digest()) and tracked.keys.tokens == entry.computed_tokens:
            digests = (*digests, tail)
        else:
            tail_tokens = 0  # it has generated more meanwhile
        first_chunk, tracked.stored_chunks, tracked.stored_tail_tokens = tracked.stored_chunks, chunks, tail_tokens
        admitted = {boundary for boundary in boundaries if self._admits(request, tracked, boundary)}
        states = tuple(
            StateBlock(state.table, state.block, state.boundary // chunk_tokens - 1)
            for state in entry.states
            if state.boundary in admitted
        )
        store = StoreStep(
            request.request_id,
            digests,
            tracked.tenant,
            tuple(
                packed(table[: -(-(chunks * chunk_tokens + tail_tokens) // block_tokens)] if block_tokens else ())
                for table, block_tokens in zip(entry.blocks, self.shape.tables, strict=False)
            ),
            states,
            tail_tokens,
            self._handovers.hold_ms(request),
            request.controls.retain_ms,
            request.controls.tiers,
            request.controls.is_demoted,
        )
        is_awaited = request.controls.hands_over_tokens or request.controls.retain_ms
        if self.lazy is not None and not is_awaited and self.lazy.defer(store, first_chunk):
            return None
        return store

    def _admits(self, request: RequestTokens, tracked: Tracked, boundary: int) -> bool:
        chunk_tokens = self.shape.chunk_tokens
        is_tail = boundary + chunk_tokens >= request.kept_tokens
        kind = StateKind.JUNCTION if boundary == tracked.junction else StateKind.TAIL if is_tail else StateKind.STEP
        admitted = self._admission.admits(tracked.keys.digests[boundary // chunk_tokens - 1], kind)
        self.counts.states_refused += not admitted
        return admitted

    def _move(self, request_id: str, tracked: Tracked, event: RequestEvent, *, had_promise: bool = False) -> None:
        """Advance the request's phase, and release its promise where the table ends it."""
        previous = tracked.phase
        tracked.phase = advance(previous, event)
        self._pending += (tracked.phase is Phase.PENDING) - (previous is Phase.PENDING)
        if (previous in HOLDING or had_promise) and tracked.phase not in HOLDING:
            self._service.end(self._holder(request_id))
            tracked.promised_chunks, tracked.layerwise, tracked.files = 0, None, ()
        if previous is Phase.RUNNING and tracked.phase is not Phase.RUNNING:
            # Preempted: its blocks are gone, and it will get others. Chunks already held stay held; the rest follow.
            tracked.store_again()
        if tracked.phase is Phase.GONE:
            del self._tracked[request_id]


class QuietSteps:
    """The quiet steps of one scheduler. Not thread-safe.

    Most steps of an engine decode one token for each request. After a step in which all requests were examined, it is
    known how many more tokens each needs before something of it could be stored. The smallest of these numbers says how
    many of the following steps are quiet. So a step costs the same for one request as for hundreds.
    """

    def __init__(self, shape: ConnectShape) -> None:
        self.shape = shape
        self._quiet_tokens = 0

    def passes(self, tokens: int) -> bool:
        """Whether a step that computes at most `tokens` tokens of any request completes nothing. It may contain only
        requests that were examined.
        """
        self._quiet_tokens -= tokens
        return self._quiet_tokens > 0

    def begin(self) -> None:
        """Begin a step in which every request is examined."""
        self._quiet_tokens = _NEVER

    def looked_at(self, request: RequestTokens, computed_tokens: int) -> None:
        """A request of that step was examined: after the step it has `computed_tokens`, and the chunks that they
        complete are stored."""
        if (needed := tokens_to_store(self.shape, request, computed_tokens)) < self._quiet_tokens:
            self._quiet_tokens = needed

    def end(self) -> None:
        """Something other than tokens has changed: examine every request in the next step."""
        self._quiet_tokens = 0


def tokens_to_store(shape: ConnectShape, request: RequestTokens, computed_tokens: int) -> int:
    """The least number of further tokens of this request after which a step may have a chunk of it to store.

    A computed chunk whose last tokens are not known yet (in a step scheduled ahead) may be stored by any step.
    """
    needed, chunk_tokens = _NEVER, shape.chunk_tokens
    limit = request.controls.storable(request.keep_tokens) if shape.stores else 0
    boundary = (computed_tokens // chunk_tokens + 1) * chunk_tokens
    if boundary <= limit:
        needed = boundary - computed_tokens
    if min(computed_tokens, limit) // chunk_tokens > request.kept_tokens // chunk_tokens:
        needed = 1
    if request.controls.hands_over_tokens > computed_tokens:
        needed = min(needed, request.controls.hands_over_tokens - computed_tokens)
    return needed
