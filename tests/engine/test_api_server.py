"""vLLM's API server, as users start it: what they see of us in its log, and what is left when it has ended."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import SHARED
from kv_testing.servers import free_port
from kv_testing.wait import until

READY_S, END_S = 180, 60
PROMPT = SHARED[:600]


@contextmanager
def api_server(
    model: str,
    cache: dict[str, Any],
    directory: Path,
    runtime: Path,
    *arguments: str,
    connector: str = "KVTiersConnector",
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A running server, where it listens, and its log. Whatever happens, nothing of it is left running."""
    log, port = directory / "server.log", free_port()
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": cache,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer), *arguments]
    environ = {name: value for name, value in os.environ.items() if name not in ("VLLM_LOGGING_LEVEL",)}
    environ |= {"XDG_RUNTIME_DIR": str(runtime), "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environ, start_new_session=True)
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(END_S)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def is_healthy() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    until(is_healthy, READY_S, rest_s=0.2)


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Where sockets go. A socket's path may not be long, as pytest's directories are."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield Path(directory)


def complete(url: str, prompt: list[int], *, replica: int | None = None) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were found."""
    body = {"model": "", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    headers = {"Content-Type": "application/json"}
    if replica is not None:
        headers["X-data-parallel-rank"] = str(replica)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        completion = json.load(answer)
    details = completion["usage"].get("prompt_tokens_details") or {}
    return str(completion["choices"][0]["text"]), int(details.get("cached_tokens") or 0)


@pytest.mark.slow
def test_one_line_at_the_start_and_one_at_the_end_and_nothing_left(
    spelling_llama: str, tmp_path: Path, runtime: Path
) -> None:
    """What waits to be written back is on the disk when a SIGTERM has ended the server, and the next one finds it."""
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB", "write": "back"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier]}
    answers = []
    for requests, end in ((2, "2 lookups found 4 of 8 chunks"), (1, "1 lookups found 4 of 4 chunks")):
        with api_server(spelling_llama, cache, tmp_path, runtime) as (process, url, log):
            answers += [complete(url, PROMPT)[0] for _ in range(requests)]
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
            # The private server ends after vLLM has.
            until(lambda: "the KV cache is closed" in log.read_text(), END_S)
            said = log.read_text()
        assert len(re.findall(r"INFO .*the KV cache is on: chunks of 128 tokens in a pool of 64 MiB", said)) == 1, said
        assert len(re.findall(f"INFO .*the KV cache is closed: {end}, and 4 chunks entered the pool", said)) == 1, said
        # Neither a socket nor a lock is left.
        until(lambda: not [path for path in runtime.rglob("*") if not path.is_dir()], END_S)
    assert len(set(answers)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lives", [1, pytest.param(2, marks=pytest.mark.long)])
def test_replicas_share_a_private_server_and_its_disk(
    lives: int, spelling_llama: str, tmp_path: Path, runtime: Path
) -> None:
    """What one computed the other finds, and both after a restart, without a word in the settings about it."""
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "64MiB"}, "tiers": [tier]}
    arguments = ("--data-parallel-size", "2", "--enable-prompt-tokens-details")
    said = []
    for _ in range(lives):
        with api_server(spelling_llama, cache, tmp_path, runtime, *arguments) as (process, url, log):
            said += [complete(url, PROMPT, replica=replica) for replica in (0, 1, 0)]
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
            until(lambda: "the KV cache is closed" in log.read_text(), END_S)
    assert [found for _, found in said] == [0, *[512] * (3 * lives - 1)]
    assert len({answer for answer, _ in said}) == 1
