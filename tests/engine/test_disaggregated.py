"""Real vLLM engines: one computes prompts, another one goes on with them, by the protocol of vLLM's own proxies.

Both engines are at one server, or each at its own, of which the second reads from the first as its peer.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Answer, Engine, started
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import CacheReport
from kv_testing.peers import PATIENT
from kv_testing.two_hosts import ADDRESSES, TwoHosts, available
from kv_testing.wait import until

pytestmark = pytest.mark.slow
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's proxies send, word for word."""
CHUNK_BYTES = 1 << 19  # more than one of the tiny model's


def with_params(params: dict[str, Any]) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": params}}


@dataclass
class Pair:
    """prefill_server, decode_server: the same one where the engines share it. keeper: which of them keeps what is
    handed over until it is read."""

    prefill: Engine
    decode: Engine
    prefill_server: ServerProcess
    decode_server: ServerProcess
    keeper: ServerProcess

    def compute(self, prompt: list[int]) -> dict[str, Any]:
        """By the prefill engine; what the proxy gets to hand over."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, **with_params(PREFILL))
        (output,) = self.prefill.llm.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        assert output.kv_transfer_params is not None
        return dict(output.kv_transfer_params)

    def go_on(self, prompt: list[int], params: dict[str, Any]) -> tuple[Answer, int]:
        """By the decode engine; how many tokens it loaded."""
        before = self.loaded
        (answer,) = self.decode.ask([prompt], **with_params(params))
        return answer, self.loaded - before

    @property
    def loaded(self) -> int:
        return int(self.decode.inside("kv_snapshot")["scheduler"]["loaded_tokens"])

    def assert_at_rest(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.assert_at_rest()
        for server in (self.prefill_server, self.decode_server):
            counts = report_of(server).counts
            assert counts.read_leases == counts.write_leases == counts.chunks_reserved == 0


def report_of(server: ServerProcess) -> CacheReport:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    return answer.report.caches[0]


NAMESPACES = pytest.mark.skipif(not available(), reason="no network namespaces for us")


@pytest.fixture(
    scope="module",
    params=[
        "one server",
        "two hosts",
        pytest.param("two network namespaces, followed", marks=NAMESPACES),
    ],
)
def pair(request: pytest.FixtureRequest, tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The prefill engine only stores, and the decode engine only loads. At a pool of sixteen chunks."""
    home = tmp_path_factory.mktemp("disaggregated")
    config: dict[str, Any] = {"host": {"capacity_bytes": 16 * CHUNK_BYTES}, "cold": {"wait_s": 20.0}}
    with ExitStack() as ending:
        if request.param == "two network namespaces, followed":
            first, second = in_two_namespaces(ending, config, home)
        else:
            first = second = launch(
                {**config, "peers": {"listen": "127.0.0.1:0", "unprotected": True}}, socket=home / "1" / "s"
            )
            ending.callback(first.stop)
        if request.param == "two hosts":
            tiers = [{"type": "peers", "hosts": [first.peers], **PATIENT}]
            second = launch({**config, "tiers": tiers}, socket=home / "2" / "s")
            ending.callback(second.stop)
        # At a peer's the decode engine loads in the step that computes the last token.
        loading = {"handover": {"wait_s": 20.0}, "load": "layerwise" if request.param == "two hosts" else "async"}
        caches = [{"server": {"socket": str(server.socket), "answer_s": 20}} for server in (first, second)]
        prefill_cache = caches[0] | {"peers": {"listen": first.peers, "unprotected": True}}
        prefill = ending.enter_context(started(tiny_llama, cache=prefill_cache, role="kv_producer", own_process=True))
        decode = ending.enter_context(started(tiny_llama, cache=caches[1] | loading, role="kv_consumer"))
        yield Pair(prefill, decode, first, second, first if request.param == "two hosts" else second)


def in_two_namespaces(ending: ExitStack, config: dict[str, Any], home: Path) -> tuple[ServerProcess, ServerProcess]:
    """The second one fetches what is handed over at the first while it is computed."""
    hosts = TwoHosts()
    ending.callback(hosts.close)
    tiers = [
        {
            "type": "peers",
            "hosts": [f"{ADDRESSES[0]}:9500"],
            "unprotected": True,
            "follow": True,
            **PATIENT,
        }
    ]
    servers = []
    for host, more in enumerate([{}, {"tiers": tiers}]):
        (home / str(host)).mkdir(mode=0o700)
        servers.append(hosts.serve(host, {**config, **more}, home / str(host) / "s"))
        ending.callback(servers[-1].stop)
    return servers[0], servers[1]


def test_tokens_are_those_of_one_engine_and_one_token_is_computed(pair: Pair, reference: list[Answer]) -> None:
    for prompt, expected in zip(PROMPTS, reference, strict=True):
        params = pair.compute(prompt)
        assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
        assert f"{params['remote_host']}:{params['remote_port']}" == pair.prefill_server.peers
        assert params["remote_num_tokens"] == len(prompt)
        assert pair.go_on(prompt, params) == (expected, len(prompt) - 1)
        # Nothing stays behind of what the decode side had a copy of already, either.
        until(lambda: report_of(pair.prefill_server).handed_over == report_of(pair.decode_server).handed_over == 0)
        pair.assert_at_rest()


def test_what_is_handed_over_stays_while_other_prompts_fill_the_pool(pair: Pair) -> None:
    prompt = [9 + (29 * i) % 1800 for i in range(602)]
    (expected,) = pair.decode.ask([prompt], **with_params({"kv_tiers": {"load": False}}))
    params = pair.compute(prompt)
    until(lambda: report_of(pair.keeper).handed_over == 3)
    evicted = report_of(pair.prefill_server).counts.chunks_evicted
    for number in range(10):
        pair.prefill.ask([[7 + (number * 131 + 17 * i) % 1900 for i in range(600)]], 1)
    assert report_of(pair.prefill_server).counts.chunks_evicted > evicted
    assert pair.go_on(prompt, params) == (expected, len(prompt) - 1)
    pair.assert_at_rest()


def test_an_address_that_comes_with_a_request_is_never_connected_to(pair: Pair, reference: list[Answer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        params = pair.compute(PROMPTS[1]) | {"remote_host": "127.0.0.1", "remote_port": trap.getsockname()[1]}
        assert pair.go_on(PROMPTS[1], params) == (reference[1], len(PROMPTS[1]) - 1)
        unknown = [9 + (13 * i) % 1700 for i in range(300)]
        pair.go_on(unknown, params | {"remote_num_tokens": 10})
        with pytest.raises(TimeoutError):
            trap.accept()


def test_wrong_bytes_would_change_the_tokens(pair: Pair, reference: list[Answer]) -> None:
    """Without this the comparisons above could not fail."""
    prompt = PROMPTS[5]
    pair.decode.inside("kv_snapshot")
    params = pair.compute(prompt)
    pair.prefill.inside("kv_corrupt")
    if pair.decode_server is not pair.prefill_server:
        pair.decode.inside("kv_corrupt")  # it may have a copy of before
    answer, loaded = pair.go_on(prompt, params)
    assert answer != reference[5] and loaded == len(prompt) - 1
