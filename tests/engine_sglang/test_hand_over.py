"""SGLang's own disaggregated prefill (`--disaggregation-mode`) through our transfer backend, on two real servers.

A request goes to both as SGLang's load balancer sends it: the same body, with the bootstrap's address and a number.
"""

import itertools
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from engines import NEW_TOKENS, ON_A_CORE_EACH, PAGE, PROMPTS, Answer, started
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_server.report import CacheReport
from kv_testing.cache_servers import assert_nothing_is_leased
from kv_testing.servers import free_port
from kv_testing.wait import until

LONG = [7 + (4211 * i) % 2000 for i in range(1500)]
LATER = [8 + (4211 * i) % 2000 for i in range(1000)]
"""Prompts of many steps: `--chunked-prefill-size` below."""
FLAGS = [
    *("--device=cpu", "--attention-backend=torch_native", "--sampling-backend=pytorch", "--dtype=float32"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--skip-tokenizer-init", "--max-total-tokens=4096"),
    *("--mem-fraction-static=0.5", f"--page-size={PAGE}", "--chunked-prefill-size=64", "--log-level=warning"),
    "--disaggregation-transfer-backend=kv",
]
_ROOMS = itertools.count(1)

pytestmark = pytest.mark.slow


@dataclass
class Pair:
    """An engine that computes prompts, one that decodes, and the server that both have joined. ranks: of each."""

    model: str
    socket: Path
    ranks: int = 1
    prefill_port: int = field(default_factory=free_port)
    decode_port: int = field(default_factory=free_port)
    bootstrap_port: int = field(default_factory=free_port)

    def serve(self) -> ServerProcess:
        return launch({"host": {"capacity_bytes": "64MiB"}}, socket=self.socket, detached=True)

    def prefill(self) -> "subprocess.Popen[bytes]":
        return self._start("prefill", self.prefill_port, f"--disaggregation-bootstrap-port={self.bootstrap_port}")

    def decode(self) -> "subprocess.Popen[bytes]":
        return self._start("decode", self.decode_port)

    def _start(self, mode: str, port: int, *more: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, "--port", str(port)]
        of_a_dead_one = {
            "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "5",  # a busy machine may miss some
            "KV_SERVER_SOCKET": str(self.socket),
        }
        of_ranks = ON_A_CORE_EACH if self.ranks > 1 else {}
        return subprocess.Popen(
            [*command, f"--disaggregation-mode={mode}", *FLAGS, f"--tp-size={self.ranks}", *more],
            env=os.environ | of_a_dead_one | of_ranks,
            start_new_session=True,
        )

    def body(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Of a request, the same for both."""
        return {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            "return_logprob": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(_ROOMS),
        }

    def ask(self, prompt: Sequence[int]) -> Answer | int:
        """What the engine that decodes answers, or its status."""
        with ThreadPoolExecutor(2) as both:
            _, decoded = both.map(partial(post, body=self.body(prompt)), (self.prefill_port, self.decode_port))
        assert decoded is not None
        if decoded.status_code != 200:
            print(decoded.text)  # shown if the test fails
            return int(decoded.status_code)
        answer: dict[str, Any] = decoded.json()
        logprobs = tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])
        return Answer(tuple(answer["output_ids"]), logprobs)

    def cache(self) -> CacheReport:
        answer = ask_server(self.socket, wire.Status())
        assert isinstance(answer, wire.Stated)
        (report,) = answer.report.caches
        return report


def post(port: int, body: dict[str, Any]) -> requests.Response | None:
    """None: it was killed."""
    try:
        return requests.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=120)
    except requests.ConnectionError:
        return None


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """The server and its schedulers, which are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def corrupt(server: ServerProcess) -> None:
    """Halve every float32 in the pool that it shares with the engines: what wrong bytes would do."""
    files = Path(f"/proc/{server.pid}/fd").iterdir()
    pool = next(each for each in files if "memfd:kv-tiers-" in os.readlink(each))
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        values = np.frombuffer(mapping, dtype=np.float32)
        values *= np.float32(0.5)
        del values


def answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def test_what_one_engine_computes_another_decodes(tiny_llama: str, reference: list[Answer], tmp_path: Path) -> None:
    pair = Pair(tiny_llama, tmp_path / "private" / "s")
    server = pair.serve()
    try:
        with ended(pair.decode()), ended(first := pair.prefill()):
            until(lambda: answers(pair.decode_port) and answers(pair.prefill_port), 300, rest_s=0.2)
            # In turn, and all at once; whole pages, partial ones, and a prompt that is shorter than a page.
            assert [pair.ask(prompt) for prompt in PROMPTS] == reference
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                assert list(pool.map(pair.ask, PROMPTS)) == reference
            # Each page once, the partial ones too.
            pages = {tuple(prompt[: at + PAGE]) for prompt in PROMPTS for at in range(0, len(prompt), PAGE)}
            assert pair.cache().counts.chunks_resident == len(pages)
            assert_nothing_is_leased(pair.socket)

            # A prefill engine that is killed in the middle of a prompt fails it, and nothing else.
            held = pair.cache().counts.chunks_resident
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(pair.ask, LONG)
                until(lambda: pair.cache().counts.chunks_resident > held, 60)
                kill(first)
                assert asked.result() == 500
            assert held < pair.cache().counts.chunks_resident < held + len(LONG) // PAGE
            with ended(second := pair.prefill()):
                until(lambda: answers(pair.prefill_port), 300, rest_s=0.2)
                until(lambda: pair.ask(PROMPTS[3]) == reference[3], 60)
                computed = pair.ask(LONG)  # what the first had stored is held already
                assert_nothing_is_leased(pair.socket)

                # So does one that is stopped there, which then goes on.
                held, body = pair.cache().counts.chunks_resident, pair.body(LATER)
                with ThreadPoolExecutor(2) as pool:
                    pool.submit(post, pair.prefill_port, body)
                    decoded = pool.submit(post, pair.decode_port, body)
                    until(lambda: pair.cache().counts.chunks_resident > held, 60)
                    os.killpg(second.pid, signal.SIGSTOP)
                    try:
                        failed = decoded.result(60)
                        assert failed is not None and failed.status_code == 500
                        assert pair.cache().counts.chunks_resident < held + len(LATER) // PAGE
                    finally:
                        os.killpg(second.pid, signal.SIGCONT)
                assert pair.cache().counts.chunks_resident == held + -(-len(LATER) // PAGE)
                until(lambda: pair.ask(PROMPTS[3]) == reference[3], 60)
                later = pair.ask(LATER)
                assert_nothing_is_leased(pair.socket)

                # The control: what is read is what the server has.
                corrupt(server)
                assert pair.ask(PROMPTS[0]) not in {reference[0], 500}

                # A server that is gone fails the request on both sides, and nothing else.
                server.stop()
                assert pair.ask(PROMPTS[1]) == 500
                server = pair.serve()
                until(lambda: pair.ask(PROMPTS[1]) == reference[1], 60)
                requests.post(f"http://127.0.0.1:{pair.prefill_port}/flush_cache", timeout=30).raise_for_status()
                assert (pair.ask(LONG), pair.ask(LATER)) == (computed, later)
                assert_nothing_is_leased(pair.socket)
    finally:
        server.stop()


@pytest.mark.long
def test_latents_that_two_ranks_read_are_held_until_both_have_them(tiny_deepseek: str, tmp_path: Path) -> None:
    with started(tiny_deepseek, tp_size=2, environ=ON_A_CORE_EACH) as plain:
        expected = plain.ask_in_turn(PROMPTS)
    pair = Pair(tiny_deepseek, tmp_path / "private" / "s", ranks=2)
    server = pair.serve()
    try:
        with ended(pair.decode()), ended(pair.prefill()):
            until(lambda: answers(pair.decode_port) and answers(pair.prefill_port), 300, rest_s=0.2)
            assert [pair.ask(prompt) for prompt in PROMPTS] == expected
            # The pages are the same for both ranks, so each is stored once.
            pages = {tuple(prompt[: at + PAGE]) for prompt in PROMPTS for at in range(0, len(prompt), PAGE)}
            assert pair.cache().counts.chunks_resident == len(pages)
            until(lambda: pair.cache().handed_over == 0, 10)  # one rank says so, after the answer has begun
            assert_nothing_is_leased(pair.socket)
    finally:
        server.stop()
