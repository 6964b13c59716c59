"""Real vLLM engines for tests: started with and without us, asked, looked into, and shut down."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

NEW_TOKENS = 12
CHUNK_TOKENS = 256
"""Of the engines here, two of vLLM's blocks on a CPU, so that a chunk has several blocks as it has on GPUs."""
SHARED = [3 + (7919 * i) % 2000 for i in range(1024)]
PROMPTS = [
    SHARED[:512] + [11 + i for i in range(90)],
    SHARED[:512] + [1200 + i for i in range(150)],
    SHARED[:1024],  # whole chunks only: a full hit must leave one token to compute
    SHARED[:1000],
    [5 + (31 * i) % 1900 for i in range(130)],  # shorter than a chunk: never stored
    SHARED[256:900],  # the same tokens at other positions are another prefix
]
WARM_HITS = [512, 512, 1023, 768, 0, 512]
"""Tokens of each prompt that are found once all have been stored."""
Answer = tuple[int, ...]
_Read = TypeVar("_Read")


class Engine:
    """One `LLM`, asked in token ids."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.hits: list[int] = []

    def ask(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, salt: str = "", **sampling: Any
    ) -> list[Answer]:
        """Generate greedily for all prompts at once. `hits` then says how many tokens of each were found.

        salt: the tenant's, as vLLM's `cache_salt`.
        """
        from vllm import SamplingParams, TokensPrompt

        salted = {"cache_salt": salt} if salt else {}
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt), **salted) for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True, **sampling),
            use_tqdm=False,
        )
        self.hits = [output.num_cached_tokens or 0 for output in outputs]
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def ask_in_turn(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS, *, settles: bool = False
    ) -> list[Answer]:
        """One prompt after the other, so that each finds what those before it left.

        settles: each waits until those before it are in the lower tiers too. Until then their chunks keep their slots,
            and where a small pool has no others, what comes next is neither stored nor promoted.
        """
        answers, hits = [], []
        for prompt in prompts:
            if settles:
                self.inside("kv_settle")
            answers += self.ask([prompt], new_tokens)
            hits += self.hits
        self.hits = hits
        return answers

    def inside(self, method: str) -> Any:
        """Call a method of `kv_testing.vllm_inspect.Inspect` in every worker, wherever it lives; rank 0's answer."""
        return self.inside_all(method)[0]

    def inside_all(self, method: str) -> list[Any]:
        """As `inside`, by rank."""
        return list(self.llm.collective_rpc(method))

    def assert_at_rest(self) -> dict[str, Any]:
        """No lease is left, no slot is lost, no request is remembered, the counters add up, and no fault was hidden."""
        self.inside("kv_settle")
        seen = self.inside("kv_snapshot")
        assert seen["off"] == "" and seen["faults"] == []
        assert seen["phases"] == {}
        cache = seen["cache"]
        assert cache["read_leases"] == cache["write_leases"] == cache["chunks_reserved"] == 0, cache
        assert cache["slots_used"] == cache["chunks_resident"], cache
        assert all(tier["lane"]["queued"] == tier["spill"]["under_way"] == 0 for tier in seen["tiers"].values()), seen
        assert cache["chunks_reserved_ever"] == cache["chunks_committed"] + cache["chunks_aborted"], cache
        gone = cache["chunks_evicted"] + cache["chunks_forgotten"] + cache["chunks_damaged"]
        assert cache["chunks_committed"] + cache["chunks_adopted"] == cache["chunks_resident"] + gone, cache
        scheduler, worker = seen["scheduler"], seen["worker"]
        if scheduler is None:  # it is in another process
            return dict(seen)
        assert scheduler["loads"] + scheduler["loads_refused"] == worker["loads_finished"] + worker["loads_failed"]
        return dict(seen)


@contextmanager
def started(
    model: str,
    *,
    cache: dict[str, Any] | None,
    own_process: bool = False,
    policy: str = "recompute",
    role: str = "kv_both",
    chunk_tokens: int | None = CHUNK_TOKENS,
    connector: str = "KVTiersConnector",
    **arguments: Any,
) -> Iterator[Engine]:
    """A running engine; `cache` is our extra config, None for an engine without us.

    chunk_tokens: unless `cache` says it. None: nobody does, and it adapts to the engine's blocks; for models with
        states.
    """
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if cache is not None:
        if chunk_tokens is not None:
            cache = {"chunk_tokens": chunk_tokens} | cache
        transfer = KVTransferConfig(
            kv_connector=connector,
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=cache,
        )
        arguments.setdefault("worker_extension_cls", "kv_testing.vllm_inspect.Inspect")
    chosen = {
        "dtype": "float32",
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enforce_eager": True,
    }
    if torch.cuda.is_available():  # which engines of other tests share: each takes what it would have on a CPU
        chosen |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
    chosen |= arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if own_process else "0")
        llm = LLM(model, kv_transfer_config=transfer, **chosen)
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


def assert_half_evicted_is_stored_again(engine: Engine, reference: Sequence[Answer]) -> None:
    """After every second chunk was evicted, the tokens are the same, and what is missing is found again afterwards."""
    engine.ask_in_turn(PROMPTS)
    engine.inside("kv_forget_half")
    assert engine.ask_in_turn(PROMPTS) == reference
    assert engine.ask_in_turn(PROMPTS) == reference
    assert engine.hits == WARM_HITS


def in_pool(read: Callable[[memoryview], _Read]) -> dict[str, _Read]:
    """What `read` returns for every chunk in the pool of the one engine of this process, by its key."""
    from kv_connect.engine import engines

    (engine,) = engines().values()
    assert engine.cache is not None
    found = {}
    for key in engine.cache.admin.resident_keys():
        slot = engine.cache._index.find(key)
        assert slot is not None
        with engine.cache.pool.chunk(slot, engine.cache.pool.sizes.of(key)) as chunk:
            found[key.hex()] = read(chunk)
    return found


def empty_the_pool() -> None:
    """Evict everything from the pool of the one engine of this process, as other requests would."""
    from kv_connect.engine import engines

    (engine,) = engines().values()
    assert engine.cache is not None
    host, index = engine.cache._host, engine.cache._index
    with host.lock:
        for slot in range(host.pool.slots):
            if index.key_at(slot) is not None and not index.is_leased(slot):
                host.evict(slot)
                host.free([slot])
