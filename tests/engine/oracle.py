"""vLLM's real scheduler, a model that is a hash, and a cache whose every byte is known.

The KV of a context token is a function of the whole prefix up to it, written by vLLM's own cache-update operation into
blocks laid out as vLLM's CPU backend lays them out. Before a step computes anything, all context it would attend to is
read back and compared: one wrong, stale or foreign byte anywhere fails the test that ran the step. The next token is a
hash of the prefix too, so what a request generates does not depend on who computed its KV.
"""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from kv_tiers.attach.engine import Engine as Attached
from kv_tiers.attach.engine import engines
from kv_vllm.connector import KVTiersConnector
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 32
KV_HEADS = 2
HEAD_DIM = 32
LAYERS = 2
VOCABULARY = 50
_MODULUS = (1 << 61) - 1


@dataclass(slots=True)
class Work:
    """One request's share of a step, as it stood when the step was scheduled."""

    request_id: str
    start: int
    end: int
    blocks: list[int]
    samples: bool


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
        asynchronous: bool = False,
        prefix_caching: bool = False,
        policy: str = "recompute",
        connector: bool = True,
        **extra: Any,
    ) -> None:
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
            max_num_seqs=8,
            max_num_batched_tokens=batch_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=prefix_caching,
            async_scheduling=asynchronous,
            enforce_eager=True,
            distributed_executor_backend=ONE_PROCESS,
            kv_transfer_config=transfer if connector else None,
        ).create_engine_config()
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32
        )
        names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        self.kv_cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        )
        storage = torch.zeros(LAYERS, blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
        self.caches = {name: storage[layer] for layer, name in enumerate(names)}
        with set_current_vllm_config(self.vllm_config):
            self.layers = {name: _layer(self.caches[name]) for name in names}
        self.worker: KVTiersConnector | None = None
        if connector:
            self.vllm_config.compilation_config.static_forward_context.update(self.layers)
            self.worker = KVTiersConnector(self.vllm_config, KVConnectorRole.WORKER, self.kv_cache_config)
            self.worker.register_kv_caches(self.caches)
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
        self.generated: dict[str, list[int]] = {}
        self.external: dict[str, int] = {}
        self.errors: set[str] = set()
        self._pending: deque[tuple[Any, list[Work]]] = deque()

    @property
    def engine(self) -> Attached:
        return engines()[str(self.vllm_config.kv_transfer_config.engine_id)]

    def submit(self, request_id: str, prompt: list[int], new_tokens: int = 4, **options: Any) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        hasher = getattr(self, "_block_hasher", None)
        if hasher is None and self.vllm_config.cache_config.enable_prefix_caching:
            from vllm.utils.hashing import sha256
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

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
        self.generated[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

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
        works = [self._work(request_id, output) for request_id in output.num_scheduled_tokens]
        self._pending.append((output, works))
        while len(self._pending) > (1 if self.asynchronous and works else 0):
            self._execute(*self._pending.popleft())

    def drain(self) -> None:
        while self._pending:
            self._execute(*self._pending.popleft())

    def _work(self, request_id: str, output: Any) -> Work:
        request = self.scheduler.requests[request_id]
        scheduled = output.num_scheduled_tokens[request_id]
        end = request.num_computed_tokens  # already advanced by schedule()
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return Work(request_id, end - scheduled, end, list(blocks), not request.is_prefill_chunk)

    def _execute(self, output: Any, works: list[Work]) -> None:
        if self.worker is not None:
            self.worker.handle_preemptions(output.kv_connector_metadata)
            self.worker.bind_connector_metadata(output.kv_connector_metadata)
        # As a forward pass does it: everyone writes first, then everyone attends.
        for work in works:
            self._write(work)
        for work in works:
            self._check(work)
        sampled = [[self._token(work.request_id, work.end)] if work.samples else [] for work in works]
        if works or self.worker is not None:
            result = ModelRunnerOutput(
                req_ids=[work.request_id for work in works],
                req_id_to_index={work.request_id: index for index, work in enumerate(works)},
                sampled_token_ids=sampled,
                kv_connector_output=self._connector_output(output),
            )
            for outputs in self.scheduler.update_from_output(output, result).values():
                for entry in outputs.outputs:
                    if entry.request_id in self.generated:
                        self.generated[entry.request_id] += entry.new_token_ids
                        if entry.finish_reason is not None and str(entry.finish_reason) == "error":
                            self.errors.add(entry.request_id)

    def _connector_output(self, output: Any) -> KVConnectorOutput | None:
        worker = self.worker
        if worker is None:
            return None
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )
        made.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return made

    def _token(self, request_id: str, position: int) -> int:
        """The token at `position`: the prompt's, or what the hash of everything before it says."""
        tokens = self.tokens[request_id]
        while len(tokens) <= position:
            tokens.append(3 + _digest(tokens) % (VOCABULARY - 3))
        return tokens[position]

    def _write(self, work: Work) -> None:
        self._token(work.request_id, work.end - 1)
        rows = _rows(self.tokens[work.request_id][: work.end])[work.start :]
        slots = torch.tensor(
            [work.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(work.start, work.end)]
        )
        for number, (name, layer) in enumerate(self.layers.items()):
            layer.impl.do_kv_cache_update(layer, rows + number, -rows - number, self.caches[name], slots)

    def _check(self, work: Work) -> None:
        """Everything the step attends to must be what computing it would have written."""
        expected = _rows(self.tokens[work.request_id][: work.end])
        for number, cache in enumerate(self.caches.values()):
            # Written down here a second time, apart from the layout under test: K as [dim, token], then V.
            block = cache.reshape(cache.shape[0], KV_HEADS, 2, BLOCK_TOKENS * HEAD_DIM)
            for index in range(-(-work.end // BLOCK_TOKENS)):
                page = block[work.blocks[index]]
                first = index * BLOCK_TOKENS
                wanted = expected[first : first + BLOCK_TOKENS] + number
                keys = page[:, 0].reshape(KV_HEADS, HEAD_DIM, BLOCK_TOKENS).permute(2, 0, 1)[: len(wanted)]
                values = page[:, 1].reshape(KV_HEADS, BLOCK_TOKENS, HEAD_DIM).permute(1, 0, 2)[: len(wanted)]
                where = f"request {work.request_id}, layer {number}, tokens from {first} (step {work.start}–{work.end})"
                assert torch.equal(keys, wanted), f"wrong K: {where}"
                assert torch.equal(values, -wanted), f"wrong V: {where}"

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


def _layer(cache: torch.Tensor) -> Any:
    """An attention layer as far as the cache goes: vLLM's own implementation object, which owns the update."""
    impl = CPUAttentionBackendImpl(
        num_heads=KV_HEADS,
        head_size=HEAD_DIM,
        scale=1.0,
        num_kv_heads=KV_HEADS,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
    )
    return SimpleNamespace(
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


def _digest(tokens: list[int]) -> int:
    digest = 7
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % _MODULUS
    return digest


def _rows(tokens: list[int]) -> torch.Tensor:
    """[tokens, heads, head_dim] float32: row p is a function of tokens 0 … p, in whole numbers that float32 holds."""
    digest = 7
    digests = []
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % _MODULUS
        digests.append(digest % (1 << 22))
    places = torch.arange(KV_HEADS * HEAD_DIM, dtype=torch.float32).reshape(KV_HEADS, HEAD_DIM)
    return torch.tensor(digests, dtype=torch.float32)[:, None, None] + places * 3
