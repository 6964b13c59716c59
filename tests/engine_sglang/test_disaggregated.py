"""One engine computes prompts, another one goes on with them, in all four pairings of SGLang and vLLM at one server.

The tokens are those of the second engine without us. SGLang is asked for one token, as a proxy would, and then the
other engine is asked for all; vLLM is told what a proxy tells it.
"""

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Answer, Engine, started
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_testing.wait import until
from test_both_engines import PAGE, VLLM, of, run_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside SGLang: scripts/setup.sh vllm"),
]

BY_SGLANG, BY_VLLM = [0, 2], [1]
"""Prompts by the engine that computes them. The last shares 512 tokens with the others; its tail has 22."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_prefill": True, "do_remote_decode": False}


def whole_pages(number: int) -> int:
    return (len(PROMPTS[number]) - 1) // PAGE * PAGE


def prefill_by_sglang(engine: Engine, prompts: list[list[int]], server: ServerProcess) -> None:
    before = chunks_in(server)
    for prompt in prompts:
        engine.ask([prompt], new_tokens=1)
    wanted = before + len({tuple(prompt[:at]) for prompt in prompts for at in range(PAGE, len(prompt) + 1, PAGE)})
    until(lambda: chunks_in(server) >= wanted, 60)  # SGLang stores behind its answer


def chunks_in(server: ServerProcess) -> int:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return sum(cache.counts.chunks_resident for cache in answer.report.caches)


def handed_over(server: ServerProcess) -> int:
    """How many chunks are kept for an engine that decodes."""
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return sum(cache.handed_over for cache in answer.report.caches)


def assert_nothing_is_leased(server: ServerProcess) -> None:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    for cache in answer.report.caches:
        assert cache.counts.read_leases == cache.counts.write_leases == cache.handed_over == 0


def test_each_goes_on_with_what_the_other_or_its_like_computed(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    expected, _, _ = run_vllm(tiny_llama, BY_SGLANG + BY_VLLM, None)
    server = launch({"host": {"capacity_bytes": "64MiB"}}, socket=tmp_path / "private" / "s", detached=True)
    cache: dict[str, Any] = {"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}}
    of_vllm = cache | {"chunk_tokens": PAGE, "handover": {"wait_s": 20.0, "hold_s": 600.0}}
    try:
        with started(tiny_llama, page=PAGE, cache=cache) as sglang:
            prefill_by_sglang(sglang, of(PROMPTS, BY_SGLANG), server)
            # SGLang to vLLM; and the same vLLM computes for others.
            params = [DECODE] * len(BY_SGLANG) + [PREFILL] * len(BY_VLLM)
            tokens, hits, _ = run_vllm(tiny_llama, BY_SGLANG + BY_VLLM, of_vllm, params)
            assert tokens == expected
            assert hits == [512, 1023, 512]
            # vLLM to SGLang, which releases what it will not read: it has the first pages, and computes the tail.
            assert handed_over(server) > 0
            assert sglang.ask(of(PROMPTS, BY_VLLM), custom_params=DECODE) == of(reference, BY_VLLM)
            until(lambda: handed_over(server) == 0, 10)
            assert sglang.ask_in_turn(of(PROMPTS, BY_VLLM)) == of(reference, BY_VLLM)
            assert sglang.hits == [whole_pages(number) for number in BY_VLLM]
        # vLLM to another vLLM, with the last partial chunk.
        said = [DECODE | {"remote_num_tokens": len(PROMPTS[number])} for number in BY_VLLM]
        tokens, hits, _ = run_vllm(tiny_llama, BY_VLLM, of_vllm, said)
        assert tokens == expected[len(BY_SGLANG) :]
        assert hits == [len(PROMPTS[number]) - 1 for number in BY_VLLM]
        # SGLang to another SGLang.
        with started(tiny_llama, page=PAGE, cache=cache) as another:
            assert another.ask_in_turn(of(PROMPTS, BY_SGLANG)) == of(reference, BY_SGLANG)
            assert another.hits == [whole_pages(number) for number in BY_SGLANG]
        until(lambda: not _sessions(server), 30)
        assert_nothing_is_leased(server)
    finally:
        server.stop()


def _sessions(server: ServerProcess) -> int:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return len(answer.report.sessions)
