"""The commands of docs/tutorials/sglang.md in a shell, as a reader pastes them."""

import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from kv_testing.forked import in_new_interpreters
from kv_testing.launched import launching
from kv_testing.servers import free_port
from test_http import ON_A_CPU

WITHIN_S = 300


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S + 60)
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_page_finds_what_it_says(tiny_llama: str, tmp_path: Path, is_forked: bool) -> None:
    """As they are, but for the model, the port, and the flags of an engine on a CPU. is_forked: the engine, or it
    imports all of SGLang."""
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "sglang.md").read_text()
    (lines,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    port, flags = free_port(), " ".join(flag for flag in ON_A_CPU if flag != "--enable-cache-report")
    pasted = lines.replace("MODEL", f"{tiny_llama} {flags} --port {port}").replace("4GiB", "64MiB")
    pasted = pasted.replace("127.0.0.1:30000", f"127.0.0.1:{port}")
    with (
        (tmp_path / "said").open("w") as said,
        (tmp_path / "log").open("w") as log,
        nullcontext() if is_forked else in_new_interpreters(),
        launching({"python": [sys.executable]}) as folder,
    ):
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", pasted],
            cwd=tmp_path, env=os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
            stdout=said, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            shell.wait(WITHIN_S)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)  # the engine, which still runs
    text = (tmp_path / "said").read_text()
    assert shell.returncode == 0, (text, (tmp_path / "log").read_text()[-4000:])
    assert '"storage":960' in text, text
