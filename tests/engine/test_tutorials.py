"""The commands of docs/tutorials in one shell, page after page, as a reader pastes them."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kv_testing.servers import ValkeyServer, free_port
from test_remote_media import S3, WORKSPACE, running

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = ("one-engine", "server", "disk", "redis", "s3", "tenants")
WITHIN_S = 150
VLLM = 'vllm() {{ shift; exec {python} -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager --model "$@"; }}'
"""What `vllm serve` runs (docs/cpu.md). Compiling would take minutes and is not what is shown."""


def commands_of(page: str) -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", (TUTORIALS / f"{page}.md").read_text(), re.DOTALL))


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 60)
def test_every_page_finds_what_it_says(spelling_llama: str, tmp_path: Path) -> None:
    """As they are, but for the model, the ports, and sizes."""
    valkey = ValkeyServer()
    with tempfile.TemporaryDirectory(prefix="kv") as home, running(S3, str(tmp_path)) as bucket:
        s3_port = str(urlsplit(bucket["endpoint"]).port)
        ports = {"8000": str(free_port()), "9400": str(free_port()), "6379": str(valkey.port), "9000": s3_port}
        other = {"MODEL": spelling_llama, "4GiB": "64MiB", "1GiB": "16MiB", "kv-cache": bucket["bucket"]}
        lines = "\n".join(f"echo '== {page}'\n{commands_of(page)}" for page in PAGES)
        lines = re.sub("|".join(other), lambda found: other[found[0]], lines)
        lines = re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found[0]], lines)
        lines = lines.replace(f"serve {spelling_llama}", f"serve {spelling_llama} --port {ports['8000']}")
        environ = os.environ | {
            "PATH": f"{WORKSPACE}:{os.environ['PATH']}",
            "AWS_ACCESS_KEY_ID": bucket["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": Path(bucket["secret_access_key_file"]).read_text().strip(),
        }
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"{VLLM.format(python=sys.executable)}\n{lines}\nkill $server $engine"],
            cwd=home, env=environ, stdout=subprocess.PIPE, stderr=(tmp_path / "log").open("w"), text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = shell.communicate(timeout=WITHIN_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
            valkey.remove()
    assert shell.returncode == 0, (said, (tmp_path / "log").read_text()[-4000:])
    of_page = dict(re.findall(r"^== (\S+)\n(.*?)(?=^== |\Z)", said, re.MULTILINE | re.DOTALL))
    found = {page: re.findall(r'tier="(\w+)"} ([\d.]+)$', text, re.MULTILINE) for page, text in of_page.items()}
    assert found["one-engine"] == [("host", "768.0")]
    assert found["server"] == [("host", "768.0")]
    for page, tier in {"disk": "disk", "redis": "valkey", "s3": "s3"}.items():
        assert (tier, "768.0") in found[page], said
    first, second = found["tenants"][::2], found["tenants"][1::2]
    assert len(found["tenants"]) > 1 and first == second or found["tenants"][: len(found["tenants"]) // 2] == found["tenants"][len(found["tenants"]) // 2 :]
