"""The lines of `docs/disaggregated.md` for SGLang's own disaggregation, pasted into a shell: a server, two engines and
SGLang's router, as a reader starts them."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import requests
from engines import NEW_TOKENS, PROMPTS, Answer
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import module_command
from kv_testing.launched import launching
from kv_testing.servers import free_port
from kv_testing.wait import until
from test_hand_over import FLAGS

ROOT = Path(__file__).parents[2]
START_S = 300
LAUNCH = """\
python() {{
  case "$2" in sglang.launch_server) shift 2; set -- -m sglang.launch_server {flags} "$@" ;; esac
  command python "$@"
}}"""
"""What an engine on a CPU needs besides."""


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
@pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="scripts/setup.sh sglang-router has not installed it"
)
def test_the_pages_lines_for_sglangs_bootstrap_start_what_they_say(
    tiny_llama: str, reference: list[Answer], tmp_path: Path
) -> None:
    """As they are, but for the model, the ports and the size of the pool."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "disaggregated.md").read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "--disaggregation-mode prefill" in block]
    pasted = lines.replace("MODEL", tiny_llama).replace("4GiB", "64MiB")
    ports = {port: free_port() for port in ("30000", "30001", "30002", "8998")}
    for port, free in ports.items():
        pasted = re.sub(rf"\b{port}\b", str(free), pasted)
    page_given = [flag for flag in FLAGS if not flag.startswith(("--page-size", "--disaggregation"))]
    commands = {"python": [sys.executable], "kv-server": module_command("kv_server")}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        launching(commands) as folder,
        (tmp_path / "log").open("w+") as log,
    ):
        environ = os.environ | {"XDG_RUNTIME_DIR": runtime, "PATH": f"{folder}:{os.environ['PATH']}"}
        command = ["bash", "-euo", "pipefail", "-c", f"{LAUNCH.format(flags=' '.join(page_given))}\n{pasted}"]
        shell = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            until(lambda: shell.poll() is not None or is_ready(ports["30000"]), START_S, rest_s=0.2)
            assert shell.poll() is None, Path(log.name).read_text()[-4000:]
            said = [ask(ports["30000"], prompt) for prompt in PROMPTS]
            assert said == [list(answer.tokens) for answer in reference], Path(log.name).read_text()[-4000:]
            stated = ask_server(Path(runtime) / "kv" / "kv.sock", wire.Status())
            assert isinstance(stated, wire.Stated)
            (cache,) = stated.report.caches
            assert cache.counts.chunks_resident > 0 and cache.handed_over == cache.counts.read_leases == 0
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate(timeout=60)


def is_ready(router: int) -> bool:
    """Whether it has found an engine of either kind. It answers 503 before."""
    try:
        return requests.get(f"http://127.0.0.1:{router}/readiness", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def ask(port: int, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    answer = requests.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=120)
    answer.raise_for_status()
    return list(answer.json()["output_ids"])
