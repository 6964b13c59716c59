"""vLLM's real scheduler, a model that is a hash, and a cache whose every byte is known.

The KV of a context token is a function of the whole prefix up to it, written by vLLM's own cache-update operation into
blocks laid out as vLLM's CPU backend lays them out. Before a step computes anything, all context it would attend to is
read back and compared: one wrong, stale or foreign byte anywhere fails the test that ran the step. The next token is a
hash of the prefix too, so what a request generates does not depend on who computed its KV.

Of a sliding window the context is what it still sees. Of a linear layer it is the state after the last computed token,
which each step takes from the block where vLLM keeps it and leaves in the block of its own last token. A reference
window (R-SWA) shows a generated token less than it would see in a prompt, so its KV is another. A window that vLLM
replays (`bounded_replay`) is computed again after a hit, while nothing else of these tokens is written.

With guesses a step computes tokens that may turn out wrong (`guessed_states` has their states), and one that was
scheduled ahead is corrected when its turn comes (`work`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from guessed_states import GuessedStates
from kv_connect.engine import Engine as Attached
from kv_connect.engine import engines
from kv_vllm.connector import KVTiersConnector
from kv_vllm.weights import look_before_loading
from packaging.version import Version
from vllm.config import KVEventsConfig, KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.version import __version__ as version
from work import BlockTables, StepsAhead, Work

BLOCK_TOKENS = 32
KV_HEADS = 2
HEAD_DIM = 32
LAYERS = 2
STATES = ((3, 8), (2, 4, 4))
"""Shapes of a linear layer's two states."""
VOCABULARY = 50
_MODULUS = (1 << 61) - 1
_GENERATED = 1 << 23
"""What the KV of a generated token differs by under a reference window."""
_NO_TOKEN = 2
"""A guess that is never right."""
NGRAM = {"method": "ngram", "prompt_lookup_max": 2}
"""The drafter that needs no model."""
HAS_NEWER_RUNNER = Version(version) >= Version("0.33")
"""Whether a CPU's configuration takes vLLM's newer model runner."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Both halves of the connector are here, and vLLM would have them apart on a CPU."""


class Oracle:
    """One engine: scheduler, connector halves, cache tensors. `step` is one round of the engine's loop."""

    def __init__(
        self,
        model: str,
        *,
        blocks: int = 64,
        batch_tokens: int = 96,
        sequences: int = 8,
        asynchronous: bool = False,
        prefix_caching: bool = False,
        policy: str = "recompute",
        connector: bool = True,
        kinds: Sequence[str] = ("full",),
        events: bool = False,
        guesses: int = 0,
        drafter: Mapping[str, Any] = NGRAM,
        saves: str = "before",
        **extra: Any,
    ) -> None:
        """kinds: of each group of layers: full, window:TOKENS, replayed:TOKENS, reference:TOKENS or state. sequences:
        how many requests run at once. events: vLLM is to publish KV events. guesses: tokens a step, of which none to
        all are right. drafter: how vLLM is told that they are guessed; not every method goes with an asynchronous
        scheduler. saves: whether the runner calls `wait_for_save` before it takes the step's reports, after, or never:
        while tokens are guessed, vLLM's older one does the second, and on pipeline stages before the last the third."""
        transfer = KVTransferConfig(
            kv_connector="KVTiersConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"chunk_tokens": 64, "host": {"capacity_bytes": "64MiB"}} | extra,
        )
        self.vllm_config = EngineArgs(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=BLOCK_TOKENS,
            max_model_len=1024,
            max_num_seqs=sequences,
            max_num_batched_tokens=batch_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=prefix_caching,
            async_scheduling=asynchronous,
            enforce_eager=True,
            distributed_executor_backend=ONE_PROCESS,
            kv_transfer_config=transfer if connector else None,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
            speculative_config={"num_speculative_tokens": guesses} | dict(drafter) if guesses else None,
        ).create_engine_config()
        self.vllm_config.scheduler_config.async_scheduling = asynchronous  # vLLM turns it off on a CPU
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        if "state" in kinds:  # vLLM would choose its blocks by the model's real layers
            cached = self.vllm_config.cache_config
            cached.mamba_cache_mode, cached.block_size, cached.mamba_block_size = "align", BLOCK_TOKENS, BLOCK_TOKENS
        self.kinds = tuple(kinds)
        self.guesses = guesses
        self._saves = saves
        self._guessed_states = GuessedStates(BLOCK_TOKENS)
        self._first_layer = 0  # what layers are counted from, in what they write
        self._tables = BlockTables()
        self._steps_ahead = StepsAhead()
        self.names = [[f"group.{group}.layer.{layer}" for layer in range(LAYERS)] for group in range(len(kinds))]
        self.kv_cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(names, _spec(kind, guesses)) for names, kind in zip(self.names, kinds, strict=True)
            ],
        )
        self.caches: dict[str, torch.Tensor] = {}
        self.layers: dict[str, Any] = {}
        with set_current_vllm_config(self.vllm_config):
            for names, kind in zip(self.names, kinds, strict=True):
                for name in names:
                    self.caches[name], self.layers[name] = _state_layer(blocks) if kind == "state" else _layer(blocks)
        self.worker: KVTiersConnector | None = None
        if connector:
            self._start_worker()
        self.asynchronous = asynchronous
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=self.vllm_config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self.tokens: dict[str, list[int]] = {}
        self.prompt_tokens: dict[str, int] = {}
        self.generated: dict[str, list[int]] = {}
        self.external: dict[str, int] = {}
        self.errors: set[str] = set()
        self.unfilled: set[int] = set()  # blocks that are reported as not holding what was promised
        self.answers: dict[str, dict[str, Any]] = {}  # by request, the `kv_transfer_params` that its proxy gets
        self._pending: deque[tuple[Any, list[Work], bool]] = deque()
        """Steps that were scheduled, and whether that was before the one before them was executed."""

    def _start_worker(self) -> None:
        self.vllm_config.compilation_config.static_forward_context.update(self.layers)
        look_before_loading(self.vllm_config)
        self.worker = KVTiersConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config)
        self.worker.register_kv_caches(self.caches)

    @property
    def engine(self) -> Attached:
        return engines()[str(self.vllm_config.kv_transfer_config.engine_id)]

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        new_tokens: int = 4,
        asked: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """asked: its options (`kv_connect.request_options`). params: its `kv_transfer_params` besides."""
        given = (params or {}) | ({} if asked is None else {"kv_tiers": asked})
        said = {"kv_transfer_params": given} if given else None
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, extra_args=said)
        hasher = getattr(self, "_block_hasher", None)
        if hasher is None and self.vllm_config.cache_config.enable_prefix_caching:
            init_none_hash(sha256)
            hasher = self._block_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
            **options,
        )
        self.tokens[request_id] = list(prompt)
        self.prompt_tokens[request_id] = len(prompt)
        self.generated[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run_until_it_waits(self, request_id: str, steps: int = 500) -> None:
        """Step until this streaming session waits for its next input."""
        for _ in range(steps):
            if self.scheduler.requests[request_id].status is RequestStatus.WAITING_FOR_STREAMING_REQ:
                self.drain()
                return
            self.step()
        raise AssertionError(f"{request_id} does not wait after {steps} steps")

    def go_on(self, request_id: str, prompt: list[int], new_tokens: int) -> None:
        """The next input of a streaming session that waits. What it generated is prompt now, but for its last token."""
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=sampling,
                pooling_params=None,
                resumable=True,
            )
        )
        request = self.scheduler.requests[request_id]
        self.tokens[request_id] = list(request.all_token_ids)
        self.prompt_tokens[request_id] = request.num_prompt_tokens
        self.generated[request_id] = []

    def run(self, steps: int = 500) -> None:
        """Step until nothing is left; a scheduler that starves is a failure, not a hang."""
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._pending:
                return
            self.step()
        raise AssertionError(f"not finished after {steps} steps: {self.scheduler.get_request_counts()}")

    def step(self) -> None:
        """Schedule, and run what was scheduled: at once, or one step later when scheduling runs ahead."""
        output = self.scheduler.schedule()
        self._tables.follow(output)
        works = [self._work(request_id, output) for request_id in output.num_scheduled_tokens]
        self._pending.append((output, works, bool(self._pending)))
        while len(self._pending) > (1 if self.asynchronous and works else 0):
            self._execute(*self._pending.popleft())

    def drain(self) -> None:
        while self._pending:
            self._execute(*self._pending.popleft())

    def _work(self, request_id: str, output: Any) -> Work:
        request = self.scheduler.requests[request_id]
        scheduled = output.num_scheduled_tokens[request_id]
        end = request.num_computed_tokens  # already advanced by schedule()
        tables = self._tables.of(request_id)
        guesses = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
        return Work(request_id, end - scheduled, end, tables, not request.is_prefill_chunk, guesses)

    def _execute(self, output: Any, works: list[Work], ahead: bool) -> None:
        if self.asynchronous and self.guesses:
            works = [self._steps_ahead.corrected(work, output, ahead=ahead) for work in works]
        sampled = [self._sampled(work) if work.samples else [] for work in works]
        result = self._forward(output, works, sampled)
        if result is None:
            return
        if self.guesses:  # after the stores, as the sampler's answer comes after the forward pass
            for work, tokens in zip(works, sampled, strict=True):
                self._settle_states(work, max(1, len(tokens)))
            self._steps_ahead.executed(works, sampled)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for entry in outputs.outputs:
                if entry.request_id in self.generated:
                    self.generated[entry.request_id] += entry.new_token_ids
                    if entry.kv_transfer_params is not None:
                        self.answers[entry.request_id] = entry.kv_transfer_params
                    if entry.finish_reason is not None and str(entry.finish_reason) == "error":
                        self.errors.add(entry.request_id)
        if self.guesses:
            drafts = {work.request_id: self._guesses(work.request_id) for work in works if work.samples}
            if self.asynchronous:  # the scheduler does not hear of them
                self._steps_ahead.drafted(drafts)
            else:
                self.scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [*drafts.values()]))

    def _forward(self, output: Any, works: list[Work], sampled: list[list[int]]) -> ModelRunnerOutput | None:
        """What the worker does in a step. None: vLLM would not have called it."""
        if self.worker is not None:
            self.worker.handle_preemptions(output.kv_connector_metadata)
            self.worker.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                self.worker.start_load_kv(None)
        if self.guesses:
            resumed = output.scheduled_cached_reqs.resumed_req_ids
            self._guessed_states.forget([*output.finished_req_ids, *(output.preempted_req_ids or ()), *resumed])
        failure = self._compute(works)
        if failure is not None and not output.has_sync_kv_loads:
            raise failure  # else vLLM may hear of it at the step's end, and drop what was computed
        if not works and self.worker is None:
            return None
        result = ModelRunnerOutput(
            req_ids=[work.request_id for work in works],
            req_id_to_index={work.request_id: index for index, work in enumerate(works)},
            sampled_token_ids=sampled,
            kv_connector_output=self._connector_output(output),
        )
        if failure is not None and not result.kv_connector_output.invalid_block_ids:
            raise failure
        return result

    def _sampled(self, work: Work) -> list[int]:
        """What comes after the first token that is no guess, and after each guess that is right."""
        sampled = [self._token(work.request_id, work.settled)]
        for guess in work.guesses:
            if guess != sampled[-1]:
                break
            sampled.append(self._token(work.request_id, work.settled + len(sampled)))
        return sampled

    def _guesses(self, request_id: str) -> list[int]:
        """Of the tokens to come. How many are right depends on what was."""
        known = self.prompt_tokens[request_id] + len(self.generated[request_id])
        right = _digest(self.tokens[request_id][:known]) % (self.guesses + 1)
        return [self._token(request_id, known + at) if at < right else _NO_TOKEN for at in range(self.guesses)]

    def _fed(self, work: Work) -> list[int]:
        """The request's tokens up to the end of this step."""
        if work.settled:
            self._token(work.request_id, work.settled - 1)
        return [*self.tokens[work.request_id][: work.settled], *(max(guess, _NO_TOKEN) for guess in work.guesses)]

    def _connector_output(self, output: Any) -> KVConnectorOutput | None:
        worker = self.worker
        if worker is None:
            return None
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        if self._saves == "before":
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )
        made.invalid_block_ids = worker.get_block_ids_with_load_errors()
        self.unfilled |= made.invalid_block_ids
        made.kv_connector_worker_meta = worker.build_connector_worker_meta()
        if self._saves == "after":
            worker.wait_for_save()
        worker.clear_connector_metadata()
        return made

    def _token(self, request_id: str, position: int) -> int:
        """The token at `position`: the prompt's, or what the hash of everything before it says."""
        tokens = self.tokens[request_id]
        while len(tokens) <= position:
            tokens.append(3 + _digest(tokens) % (VOCABULARY - 3))
        return tokens[position]

    def _compute(self, works: list[Work]) -> AssertionError | None:
        """As a forward pass does it: in each layer everyone writes, and then everyone attends, between vLLM's hooks.
        What is attended to must be what computing it would have written; the first that is not."""
        failure: AssertionError | None = None
        values = [_values(self._fed(work)) for work in works]
        guessed = self._guessed_states
        places = [guessed.begin(work.request_id, work.start, work.end) if self.guesses else None for work in works]
        for group, (kind, names) in enumerate(zip(self.kinds, self.names, strict=True)):
            if kind == "state":
                for work, of_work, at in zip(works, values, places, strict=True):
                    self._go_on(work, names, work.tables[group], of_work, at)
                continue
            expected = [_rows(self._differing(kind, *each)) for each in zip(works, values, strict=True)]
            for number, name in enumerate(names, self._first_layer):
                for work, rows in zip(works, expected, strict=True):
                    written = work if kind.startswith("replayed") else self._behind_replayed(work)
                    if written.start < written.end:
                        self._write(written, name, work.tables[group], rows[written.start :] + number)
                if self.worker is not None and works:
                    self.worker.wait_for_layer_load(name)
                try:
                    for work, rows in zip(works, expected, strict=True):
                        self._check(work, kind, name, number, work.tables[group], rows)
                except AssertionError as error:
                    failure = failure or error
                if self.worker is not None and works:
                    self.worker.save_kv_layer(name, self.caches[name], None)
        return failure

    def _write(self, work: Work, name: str, table: list[int], rows: torch.Tensor) -> None:
        slots = torch.tensor(
            [table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(work.start, work.end)]
        )
        layer = self.layers[name]
        layer.impl.do_kv_cache_update(layer, rows, -rows, self.caches[name], slots)

    def _differing(self, kind: str, work: Work, values: list[int]) -> list[int]:
        """The values as layers of this kind have them."""
        if not kind.startswith("reference"):
            return values
        prompt_tokens = self.prompt_tokens[work.request_id]
        return [*values[:prompt_tokens], *(value + _GENERATED for value in values[prompt_tokens:])]

    def _go_on(
        self, work: Work, names: list[str], table: list[int], values: list[int], places: tuple[int, int, int] | None
    ) -> None:
        """places: as of `GuessedStates.begin`."""
        last = (work.end - 1) // BLOCK_TOKENS
        newest, first, now = places or ((work.start - 1) // BLOCK_TOKENS, last, last)
        for number, name in enumerate(names):
            for state in self.layers[name].kv_cache:
                if work.start:
                    before = state[table[newest]].clone()
                    where = f"request {work.request_id}, layer {number}, after token {work.start} (to {work.end})"
                    assert torch.equal(before, _state_of(values[work.start - 1] + number, state)), (
                        f"wrong state: {where}"
                    )
                    state[table[first]] = before
                for at, value in enumerate(values[work.settled - 1 :]):
                    assert table[now + at], f"no block for the state of a guess: request {work.request_id}"
                    state[table[now + at]] = _state_of(value + number, state)

    def _settle_states(self, work: Work, accepted: int) -> None:
        copied = self._guessed_states.end(work.request_id, work.settled, accepted)
        if copied is None:
            return
        source, into = copied
        for kind, names, table in zip(self.kinds, self.names, work.tables, strict=True):
            for name in names if kind == "state" else ():
                for state in self.layers[name].kv_cache:
                    state[table[into]] = state[table[source]]

    def _behind_replayed(self, work: Work) -> Work:
        """The share without the tokens of a hit that are computed for the replayed window alone."""
        first = self._replayed_from(work)
        end = first + self.scheduler.prefix_replay_tokens
        return replace(work, start=min(work.end, end)) if first and first <= work.start < end else work

    def _replayed_from(self, work: Work) -> int:
        """Of the replayed window the request has nothing before this token; 0: nothing is replayed."""
        request = self.scheduler.requests.get(work.request_id)
        return request.replay_start if request is not None else 0

    def _check(self, work: Work, kind: str, name: str, number: int, table: list[int], expected: torch.Tensor) -> None:
        replays = kind.startswith("replayed")
        window = int(kind.partition(":")[2]) if replays or kind.startswith("window") else 0
        seen_from = max(0, work.start - window + 1) if window else 0
        if replays:
            seen_from = max(seen_from, self._replayed_from(work))
        self._check_layer(work, name, number, table, expected, seen_from, self._gone(kind, work))

    def _gone(self, kind: str, work: Work) -> range:
        """The tokens that nothing sees any more between what is always seen and what still is."""
        if not kind.startswith("reference"):
            return range(0)
        return range(self.prompt_tokens[work.request_id], work.start - int(kind.partition(":")[2]))

    def _check_layer(
        self, work: Work, name: str, number: int, table: list[int], expected: torch.Tensor, seen_from: int, gone: range
    ) -> None:
        # Written down here a second time, apart from the layout under test: K as [dim, token], then V.
        cache = self.caches[name]
        block = cache.reshape(cache.shape[0], KV_HEADS, 2, BLOCK_TOKENS * HEAD_DIM)
        for index in range(seen_from // BLOCK_TOKENS, -(-work.end // BLOCK_TOKENS)):
            first = index * BLOCK_TOKENS
            if first in gone and first + BLOCK_TOKENS - 1 in gone:
                continue
            page = block[table[index]]
            wanted = expected[first : first + BLOCK_TOKENS] + number
            seen = slice(max(0, seen_from - first), len(wanted))
            keys = page[:, 0].reshape(KV_HEADS, HEAD_DIM, BLOCK_TOKENS).permute(2, 0, 1)
            values = page[:, 1].reshape(KV_HEADS, BLOCK_TOKENS, HEAD_DIM).permute(1, 0, 2)
            where = f"request {work.request_id}, {name}, tokens from {first} (step {work.start}–{work.end})"
            assert torch.equal(keys[seen], wanted[seen]), f"wrong K: {where}"
            assert torch.equal(values[seen], -wanted[seen]), f"wrong V: {where}"

    def ask(
        self,
        request_id: str,
        prompt: list[int],
        new_tokens: int = 4,
        asked: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
    ) -> int:
        """Run one request to its end and check what it generated; how many tokens it loaded."""
        before = self.loaded
        self.submit(request_id, prompt, new_tokens, asked, params)
        self.run()
        assert self.generated[request_id] == self.expected_tokens(request_id, len(prompt), new_tokens)
        return self.loaded - before

    @property
    def loaded(self) -> int:
        """Tokens that requests were given instead of computing them."""
        assert self.engine.worker is not None
        return self.engine.worker.counts.loaded_tokens

    def expected_tokens(self, request_id: str, prompt_tokens: int, new_tokens: int) -> list[int]:
        self._token(request_id, prompt_tokens + new_tokens)
        return self.tokens[request_id][prompt_tokens : prompt_tokens + new_tokens]

    def assert_at_rest(self) -> None:
        """No lease, no half-written chunk, no lost slot, and counters that add up; no fault was swallowed."""
        engine = self.engine
        assert engine.faults == []
        assert engine.scheduler is not None and engine.cache is not None
        assert engine.scheduler.tracked_phases() == {}
        counts = engine.cache.counts()
        assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0
        assert counts.slots_used == counts.chunks_resident
        assert (
            counts.chunks_committed + counts.chunks_adopted
            == counts.chunks_resident + counts.chunks_evicted + counts.chunks_forgotten + counts.chunks_damaged
        )
        assert counts.chunks_reserved_ever == counts.chunks_committed + counts.chunks_aborted

    def close(self, *, drain: bool = True) -> None:
        if drain:
            self.drain()
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler.shutdown()


def _spec(kind: str, guesses: int = 0) -> Any:
    shape: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM}
    name, _, tokens = kind.partition(":")
    if name == "window":
        return SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=int(tokens))
    if name == "replayed":
        return SlidingWindowMLASpec(**shape, dtype=torch.float32, sliding_window=int(tokens), bounded_replay=True)
    if name == "reference":
        return RSWASpec(**shape, dtype=torch.float32, rswa_window=int(tokens))
    if name == "state":
        return MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=STATES,
            dtypes=(torch.float32,) * len(STATES),
            page_size_padded=_spec("full").page_size_bytes,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            mamba_cache_mode="align",
            num_speculative_blocks=guesses,
        )
    return FullAttentionSpec(**shape, dtype=torch.float32)


def _state_layer(blocks: int) -> tuple[torch.Tensor, Any]:
    """A linear layer as far as its states go: two of them in each of vLLM's pages, behind one another."""
    page_bytes = _spec("full").page_size_bytes
    pages = torch.zeros(blocks, 1, 1, page_bytes, dtype=torch.int8)
    numbers = pages.view(torch.float32).reshape(blocks, page_bytes // 4)
    views, at = [], 0
    for shape in STATES:
        size = prod(shape)
        views.append(numbers[:, at : at + size].unflatten(1, shape))
        at += size
    return pages, SimpleNamespace(kv_cache=tuple(views))


def _layer(blocks: int) -> tuple[torch.Tensor, Any]:
    """An attention layer as far as the cache goes: vLLM's own implementation object, which owns the update."""
    cache = torch.zeros(blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    impl = CPUAttentionBackendImpl(
        num_heads=KV_HEADS,
        head_size=HEAD_DIM,
        scale=1.0,
        num_kv_heads=KV_HEADS,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    layer = SimpleNamespace(
        impl=impl,
        isa="vec",
        kv_cache=cache,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_DIM,
        kv_cache_dtype="auto",
        kv_cache_torch_dtype=torch.float32,
        _k_scale_float=1.0,
        _v_scale_float=1.0,
    )
    return cache, layer


def _digest(tokens: list[int]) -> int:
    digest = 7
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % _MODULUS
    return digest


def _values(tokens: list[int]) -> list[int]:
    """For each token a whole number that float32 holds, a function of all tokens up to it."""
    digest = 7
    values = []
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % _MODULUS
        values.append(digest % (1 << 22))
    return values


def _rows(values: list[int]) -> torch.Tensor:
    """[tokens, heads, head_dim] float32."""
    places = torch.arange(KV_HEADS * HEAD_DIM, dtype=torch.float32).reshape(KV_HEADS, HEAD_DIM)
    return torch.tensor(values, dtype=torch.float32)[:, None, None] + places * 3


def _state_of(value: int, state: torch.Tensor) -> torch.Tensor:
    """The state of one block after a token of this value."""
    return value + torch.arange(state[0].numel(), dtype=torch.float32).reshape(state.shape[1:])
