"""docs/http.md beside the server that it names: every command, as it is written there."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerProcess, launch
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import line, until
from kv_tiers.pool.host_pool import slot_bytes_for

ROOT = Path(__file__).parents[4]
DOCS = (ROOT / "docs" / "http.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCS, flags=re.DOTALL)
URL, HOME = "http://127.0.0.1:9400", "/tmp/kv-example"


@contextmanager
def example(home: Path) -> Iterator[str]:
    """The documented server, as documented but for its address and directory; its URL."""
    (command,) = re.findall(r"^python (examples/4_watch_a_server.py .*--home.*)$", DOCS, flags=re.MULTILINE)
    arguments = command.replace("127.0.0.1:9400", "127.0.0.1:0").replace(HOME, str(home)).split()
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield line(process.stdout).split()[2].rstrip("/")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def pasted(block: str, url: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """-x shows each command that ran, so that a failure names it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", block.replace(URL, url).replace(HOME, str(home))],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "PATH": path},
    )  # fmt: skip


def test_the_documented_walk_works_on_the_documented_server() -> None:
    assert shutil.which("curl") and shutil.which("bash"), "install curl and bash: the document uses them"
    assert len(BLOCKS) >= 4 and sum(len(re.findall(r"curl |\(post ", block)) for block in BLOCKS) >= 15
    with tempfile.TemporaryDirectory(prefix="kv-") as scratch:
        home = Path(scratch) / "example"
        with example(home) as url:
            until(lambda: httpx.get(f"{url}/status").json()["caches"], 30)
            done = pasted("\n".join(BLOCKS), url, home)
            assert done.returncode == 0, (done.stdout, done.stderr)
            everything = done.stdout
            assert not re.search(r'"status":[45]|"state":"failed"', everything), everything
            archive = home / "prefixes" / "system.kv"
            assert archive.stat().st_size > 8 * (256 << 10)
    assert everything.count('"state":"done","chunks":8,') >= 3  # warmed up, exported, imported
    assert "kv_pool_bytes" in everything and '"unpinned"' not in everything
    assert (
        everything.count('"outcome":"accepted","granted":{"chunks":8') == 1 and '"outcome":"rejected"' not in everything
    )
    assert '"ttft_s":' in everything, "the router's question is about an engine"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        http = {"listen": "127.0.0.1:0", "token_file": f"{home}/token", "archive_directory": home}
        made = launch({"host": {"capacity_bytes": 16 * slot_bytes_for(CHUNK_BYTES)}, "http": http})
        made.home = Path(home)  # type: ignore[attr-defined]
        yield made
        made.stop()


@pytest.mark.parametrize("what", ["warm-up", "export"])
def test_a_job_that_found_nothing_has_failed_and_says_so(server: ServerProcess, what: str) -> None:
    home: Path = server.home  # type: ignore[attr-defined]
    cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    headers = {"authorization": f"Bearer {(home / 'token').read_text().strip()}"}
    body = {"keys": [key.hex() for key in key_chain(3)], **({"file": "x.kv"} if what == "export" else {"name": "x"})}
    job = httpx.post(f"{server.url}prefixes/{what}", json=body, headers=headers).json()
    until(lambda: httpx.get(f"{server.url}prefixes/jobs/{job['id']}").json()["state"] != "running")
    found = httpx.get(f"{server.url}prefixes/jobs/{job['id']}").json()
    assert (found["state"], found["chunks"]) == ("failed", 0)
    assert "nothing was" in found["reason"] and "these 3 chunks" in found["reason"] and "kv keys" in found["reason"]
    assert not (home / "x.kv").exists()
    assert httpx.get(f"{server.url}prefixes").json()["pins"] == []
    cache.close()
