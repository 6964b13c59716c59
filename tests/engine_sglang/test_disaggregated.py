"""One engine computes prompts, another one goes on with them, in all four pairings of SGLang and vLLM, at one server or
from host to host.

The tokens are those of the second engine without us. SGLang is asked for one token, as a proxy would, and then the
other engine is asked for all; vLLM is told what a proxy tells it.
"""

import os
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from engines import PROMPTS, Answer, Engine, started
from kv_core.testing import key_chain
from kv_server import process
from kv_server.process import ServerProcess
from kv_testing.cache_servers import assert_nothing_is_leased, held, join_at, report_of, store
from kv_testing.peers import PATIENT
from kv_testing.servers import free_port
from kv_testing.wait import until
from test_both_engines import PAGE, VLLM, of, run_vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside SGLang: scripts/setup.sh vllm"),
]

HAS_NIXL = any((VLLM.parents[1] / "lib").glob("python*/site-packages/nixl"))
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
    return sum(cache.counts.chunks_resident for cache in report_of(server.socket).caches)


def handed_over(server: ServerProcess) -> int:
    """How many chunks are kept for an engine that decodes."""
    return sum(cache.handed_over for cache in report_of(server.socket).caches)


def staged_by(server: ServerProcess) -> int:
    """How many chunks have been put where others read them by NIXL."""
    peers = report_of(server.socket).peers
    return peers.staged if peers is not None else 0


class Hosts:
    """Where engines have their servers: three, each of which reads from the others as its peers, or one.

    At `first` is the SGLang that computes, at `second` the vLLM that does, and at `third` are those that only decode.
    """

    def __init__(self, ending: ExitStack, home: Path, by: str) -> None:
        """by: how chunks go from one to another; empty: there is one."""
        self._by = by
        ports = [free_port() for _ in range(3)] if by else [0]
        is_nixl = by == "NIXL"
        self._servers = []
        for number, port in enumerate(ports):
            config: dict[str, Any] = {"host": {"capacity_bytes": "64MiB"}, "cold": {"wait_s": 20.0}}
            if by:
                hosts = [f"127.0.0.1:{other}" for other in ports if other != port]
                config["peers"] = {"listen": f"127.0.0.1:{port}", "unprotected": True, "nixl": is_nixl}
                config["tiers"] = [{"type": "peers", "hosts": hosts, "nixl": is_nixl, **PATIENT}]
            # NIXL is in vLLM's environment only: an engine needs none.
            command = patch.object(process, "module_command", lambda module: [str(VLLM), "-m", module])
            with command, patch.dict(os.environ, {"UCX_TLS": "tcp"}):
                # No child of ours: SGLang ends all the children of whoever started it.
                server = process.launch(config, socket=home / str(number) / "s", detached=True)
            ending.callback(server.stop)
            self._servers.append(server)
        self.first, self.second, self.third = self._servers * (1 if by else 3)
        self._staged = 0

    def warm(self) -> None:
        """Have NIXL's processes ready, in the format of the engine that has come: until then chunks come by TCP."""
        if self._by != "NIXL":
            return
        (format_,) = report_of(self.first.socket).caches
        joined = {"group_bytes": (format_.chunk_bytes,), "timeout_s": 30.0}
        caches = [join_at(server.socket, format_.fingerprint, **joined) for server in self._servers]
        cold = [(reader, owner) for reader in range(3) for owner in range(3) if reader != owner]
        turns = count()

        def is_warm() -> bool:
            reader, owner = cold[0]
            keys = key_chain(1, branch=f"warm {next(turns)}")
            store(caches[owner], keys)
            before = staged_by(self._servers[owner])
            assert held(caches[reader], keys) == 1
            if staged_by(self._servers[owner]) > before:
                cold.pop(0)
            for cache in (caches[owner], caches[reader]):
                cache.forget(keys)  # or the pools fill up
            return not cold

        until(is_warm, within_s=120)
        for cache in caches:
            cache.close()
        self._staged = sum(map(staged_by, self._servers))

    def assert_moved(self) -> None:
        """Since the last time, and by what they were to be moved by."""
        now = sum(map(staged_by, self._servers))
        assert (now > self._staged) == (self._by == "NIXL")
        self._staged = now

    def assert_nothing_is_leased(self) -> None:
        for server in self._servers:
            until(lambda: not report_of(server.socket).sessions, 30)  # noqa: B023  # it is called at once
            assert_nothing_is_leased(server.socket)


@pytest.mark.parametrize(
    "by",
    [
        pytest.param("", id="one server", marks=pytest.mark.long),
        pytest.param("TCP", marks=pytest.mark.long),
        pytest.param("NIXL", marks=pytest.mark.skipif(not HAS_NIXL, reason="NIXL is missing: scripts/setup.sh nixl")),
    ],
)
def test_each_goes_on_with_what_the_other_or_its_like_computed(
    tiny_llama: str, reference: list[Answer], tmp_path: Path, by: str
) -> None:
    expected, _, _ = run_vllm(tiny_llama, BY_SGLANG + BY_VLLM, None)
    with ExitStack() as ending:
        hosts = Hosts(ending, tmp_path, by)

        def cache_at(server: ServerProcess, **more: Any) -> dict[str, Any]:
            return {"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}, **more}

        of_vllm = {"chunk_tokens": PAGE, "handover": {"wait_s": 20.0, "hold_s": 600.0}}
        with started(tiny_llama, page=PAGE, cache=cache_at(hosts.first)) as sglang:
            hosts.warm()
            prefill_by_sglang(sglang, of(PROMPTS, BY_SGLANG), hosts.first)
            # SGLang to vLLM; and the same vLLM computes for others.
            params = [DECODE] * len(BY_SGLANG) + [PREFILL] * len(BY_VLLM)
            tokens, hits, _ = run_vllm(tiny_llama, BY_SGLANG + BY_VLLM, cache_at(hosts.second, **of_vllm), params)
            assert tokens == expected
            assert hits == [512, 1023, 512]
            hosts.assert_moved()
            # vLLM to SGLang, which releases what it will not read: it has the first pages, and computes the tail.
            assert handed_over(hosts.second) > 0
            assert sglang.ask(of(PROMPTS, BY_VLLM), custom_params=DECODE) == of(reference, BY_VLLM)
            until(lambda: handed_over(hosts.second) == 0, 10)
            assert sglang.ask_in_turn(of(PROMPTS, BY_VLLM)) == of(reference, BY_VLLM)
            assert sglang.hits == [whole_pages(number) for number in BY_VLLM]
            hosts.assert_moved()
        # vLLM to another vLLM, with the last partial chunk.
        said = [DECODE | {"remote_num_tokens": len(PROMPTS[number])} for number in BY_VLLM]
        tokens, hits, _ = run_vllm(tiny_llama, BY_VLLM, cache_at(hosts.third, **of_vllm), said)
        assert tokens == expected[len(BY_SGLANG) :]
        assert hits == [len(PROMPTS[number]) - 1 for number in BY_VLLM]
        hosts.assert_moved()
        # SGLang to another SGLang.
        with started(tiny_llama, page=PAGE, cache=cache_at(hosts.third)) as another:
            assert another.ask_in_turn(of(PROMPTS, BY_SGLANG)) == of(reference, BY_SGLANG)
            assert another.hits == [whole_pages(number) for number in BY_SGLANG]
        hosts.assert_moved()
        hosts.assert_nothing_is_leased()
