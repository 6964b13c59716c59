"""The commands of docs/tutorials in one shell, page after page, as a reader pastes them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kv_testing.forked import in_new_interpreters
from kv_testing.launched import launching
from kv_testing.servers import ValkeyServer, free_port
from test_remote_media import S3, WORKSPACE, running

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = ("one-engine", "server", "tenants", "disk", "redis", "s3", "two-hosts")
WITHIN_S = 600
VLLM = """\
vllm() {{
  shift
  exec {python} -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager \\
    --distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor --model "$@"
}}"""
"""What `vllm serve` runs (docs/cpu.md). Compiling would take minutes and is not what is shown."""


def commands_of(page: str) -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", (TUTORIALS / f"{page}.md").read_text(), re.DOTALL))


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize("are_forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_page_finds_what_it_says(spelling_llama: str, tmp_path: Path, are_forked: bool) -> None:
    """As they are, but for the model, the ports, and sizes. are_forked: the engines, or each imports all of vLLM."""
    valkey = ValkeyServer()
    with (
        tempfile.TemporaryDirectory(prefix="kv") as home,
        running(S3, str(tmp_path)) as bucket,
        nullcontext() if are_forked else in_new_interpreters(),
        launching({"python": [sys.executable]}) as folder,
    ):
        ports = {port: str(free_port()) for port in ("8000", "9400", "9500")}
        ports |= {"6379": str(valkey.port), "9000": str(urlsplit(bucket["endpoint"]).port)}
        other = {"MODEL": spelling_llama, "4GiB": "64MiB", "1GiB": "16MiB", "kv-cache": bucket["bucket"]}
        lines = "\n".join(f"echo '== {page}'\n{commands_of(page)}" for page in PAGES)
        lines = re.sub("|".join(other), lambda found: other[found[0]], lines)
        lines = re.sub(r'(127\.0\.0\.1|"\$[12]):(\d+)', lambda found: f"{found[1]}:{ports[found[2]]}", lines)
        lines = lines.replace(f"serve {spelling_llama}", f"serve {spelling_llama} --port {ports['8000']}")
        environ = os.environ | {
            "PATH": f"{WORKSPACE}:{os.environ['PATH']}",
            "AWS_ACCESS_KEY_ID": bucket["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": Path(bucket["secret_access_key_file"]).read_text().strip(),
        }
        with (tmp_path / "said").open("w") as said, (tmp_path / "log").open("w") as log:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", f"{VLLM.format(python=folder / 'python')}\n{lines}"],
                cwd=home, env=environ, stdout=said, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            shell.wait(WITHIN_S)
        finally:
            with suppress(ProcessLookupError):  # the last lines end all that the others start
                os.killpg(shell.pid, signal.SIGKILL)
            valkey.remove()
    text = (tmp_path / "said").read_text()
    assert shell.returncode == 0, (text, (tmp_path / "log").read_text()[-4000:])
    of_page = dict(re.findall(r"^== (\S+)\n(.*?)(?=^== |\Z)", text, re.MULTILINE | re.DOTALL))
    found = {page: re.findall(r'tier="(\w+)"} ([\d.]+)$', part, re.MULTILINE) for page, part in of_page.items()}
    assert found["one-engine"] == found["server"] == [("host", "1024.0")], text
    assert found["tenants"] == [("host", "2048.0")] * 2, text
    for page, tier in {"disk": "disk", "redis": "valkey", "s3": "s3", "two-hosts": "peers"}.items():
        assert (tier, "1024.0") in found[page], text
