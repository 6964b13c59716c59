"""What the stand-ins add to SGLang on a CPU, so that a timing there is of the cache and not of what lay in memory."""

import threading

import hicache_on_cpu
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.plugins import load_plugins

TOKENS, HEADS, DIM, CACHED = 32, 2, 8, 16


def attend(requests: int = 1) -> torch.Tensor:
    """Requests of which the first half is cached, through SGLang's own attention."""
    new = TOKENS - CACHED
    backend = object.__new__(TorchNativeAttnBackend)
    backend.use_sliding_window_kv_pool = False
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(requests * TOKENS, HEADS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(requests * new, HEADS, DIM, generator=generator)
    output = torch.empty_like(query)
    one = torch.tensor
    backend._run_sdpa_forward_extend(
        query,
        output,
        keys,
        values,
        torch.arange(requests * TOKENS).view(requests, TOKENS),
        torch.arange(requests),
        one([TOKENS] * requests),
        one([CACHED] * requests),
        one([new] * requests),
        scaling=DIM**-0.5,
        causal=True,
    )
    return output


def test_attention_flushes_denormals_on_whichever_thread_it_runs_and_says_the_same() -> None:
    """SGLang 0.5.23 multiplies rows of memory that nobody wrote; where those are denormal it is many times slower."""
    load_plugins()
    tiny = torch.full((64,), 1 << 20, dtype=torch.int32).view(torch.float32)  # made without arithmetic
    seen: list[tuple[bool, bool, torch.Tensor]] = []

    def run() -> None:
        torch.set_flush_denormal(False)
        before = bool((tiny * 1.0).any())
        answer = attend()
        seen.append((before, bool((tiny * 1.0).any()), answer))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join(60)
    (before, after, first), (_, after_too, second) = seen
    assert before and not after and not after_too
    assert torch.equal(first, second)
    assert bool(first.isfinite().all())


def test_attending_only_to_queries_says_what_attending_to_the_whole_prompt_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `benchmarks/blend.py` asks for; a mask that is one token off, or another request's rows, would differ."""
    load_plugins()
    whole = attend(3)
    # Puts SGLang's own back when the test is over.
    own = TorchNativeAttnBackend._run_sdpa_forward_extend
    monkeypatch.setattr(TorchNativeAttnBackend, "_run_sdpa_forward_extend", own)
    hicache_on_cpu._attend_only_to_queries()
    assert TorchNativeAttnBackend._run_sdpa_forward_extend is not own
    torch.testing.assert_close(attend(3), whole, rtol=1e-5, atol=1e-6)
