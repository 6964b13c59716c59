"""The lines of `docs/disaggregated.md`, pasted into a shell: two engines, a server and the proxy, as a reader starts
them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from kv_server.process import module_command
from kv_testing.launched import launching
from kv_testing.servers import free_port
from kv_testing.wait import line
from test_disaggregated_http import PROMPT, metric, post

ROOT = Path(__file__).parents[2]
START_S = 240
COMMAND = 'vllm() { shift; python -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager --model "$@"; }'
"""What `vllm serve` runs. The command itself does not start from vLLM's wheel for CPUs, as it looks for one of another
name. Compiling would take minutes and is not what is shown."""


@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
def test_the_pages_lines_start_what_they_say(spelling_llama: str, tmp_path: Path) -> None:
    """As they are, but for the model, the ports and the size of the pool."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "disaggregated.md").read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "vllm serve" in block]
    ports = {port: str(free_port()) for port in ("8000", "8001", "8002")}
    pasted = lines.replace("MODEL", spelling_llama).replace("4GiB", "64MiB")
    pasted = re.sub(r"\b800[012]\b", lambda found: ports[found[0]], pasted)
    commands = {"python": [sys.executable], "kv-server": module_command("kv_server")}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as runtime,
        launching(commands) as folder,
        (tmp_path / "log").open("w+") as log,
    ):
        environ = {
            name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"
        }  # not everybody has it
        environ |= {"HOME": runtime, "VLLM_CPU_KVCACHE_SPACE": "1"}
        environ["PATH"] = f"{folder}:{environ['PATH']}"
        command = ["bash", "-euo", "pipefail", "-c", f"{COMMAND}\n{pasted}\necho; echo answered; wait"]
        shell = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, stderr=log, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            assert shell.stdout is not None
            said = [line(shell.stdout, START_S)]
            while said[-1] not in ("", "answered\n"):
                said.append(line(shell.stdout, START_S))
            log.seek(0)
            assert any('"choices"' in one for one in said), (said, log.read()[-4000:])
            url, prefill, decode = (f"http://127.0.0.1:{port}" for port in ports.values())
            body = {"model": spelling_llama, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            assert post(url, body)["choices"][0]["text"]
            assert metric(prefill, "handovers_given_total") == metric(decode, "handovers_received_total") == 1
            assert metric(decode, "loaded_tokens_total") == len(PROMPT) - 1
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate(timeout=60)
