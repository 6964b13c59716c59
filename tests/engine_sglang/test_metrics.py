"""Our figures in the `/metrics` of an SGLang that is started as users start it, whichever way it reaches the cache."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from engines import PAGE, PROMPTS, WARM_HITS
from kv_connect.figures import FIGURES, TIER_TOKENS
from kv_server.process import launch
from kv_sglang.metrics import COUNTED
from kv_testing.servers import free_port
from kv_testing.wait import until
from prometheus_client.parser import text_string_to_metric_families
from sglang.srt.utils import kill_process_tree
from sglang.test.test_utils import popen_launch_server
from test_http import ON_A_CPU

PREFIX = "sglang:kv_tiers_"
DASHBOARD = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
TOKEN_BYTES = 2048
"""Of the tiny model."""


@contextmanager
def sglang_over_http(model: str, settings: dict[str, Any], directory: Path, *flags: str) -> Iterator[str]:
    """A running server's address."""
    (directory / "kv.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kv_sglang", "flags", "--config-file", str(directory / "kv.json")]
    command += ["--page-size", str(PAGE), *flags]
    ours = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    url = f"http://127.0.0.1:{free_port()}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    arguments = [*ours, *ON_A_CPU, "--enable-metrics"]
    process = popen_launch_server(model, url, timeout=300, other_args=arguments, env={**os.environ, "PATH": path})
    try:
        yield url
    finally:
        kill_process_tree(process.pid)


def ask(url: str, prompt: list[int]) -> None:
    """Once its own caches are empty."""
    requests.post(f"{url}/flush_cache", params={"timeout": 30}, timeout=40).raise_for_status()
    asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    requests.post(f"{url}/generate", json=asked, timeout=60).raise_for_status()


def scraped(url: str) -> dict[str, float]:
    """By name, and by tier where there is one."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    return {
        sample.name.removeprefix(PREFIX) + (f"[{tier}]" if (tier := sample.labels.get("tier")) else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX) and sample.labels["tp_rank"] == sample.labels["pp_rank"] == "0"
        if sample.labels["model_name"]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "flags"),
    [
        pytest.param("in process", ["--hicache-size", "1"], marks=pytest.mark.long),
        ("shared server", ["--hicache-size", "1"]),
        ("in process", ["--linker"]),
    ],
    ids=["in process", "shared server", "linker"],
)
def test_what_requests_do_is_in_the_metrics(tiny_llama: str, tmp_path: Path, where: str, flags: list[str]) -> None:
    host = {"capacity_bytes": "32MiB"}
    server = launch({"host": host}, socket=tmp_path / "private" / "s") if where == "shared server" else None
    settings = {"host": host} if server is None else {"server": {"socket": str(server.socket)}}
    hit = WARM_HITS[0]
    try:
        with sglang_over_http(tiny_llama, settings, tmp_path, *flags) as url:
            ask(url, PROMPTS[0])
            until(lambda: scraped(url).get("stored_tokens_total", 0) >= hit)
            ask(url, PROMPTS[0])
            until(lambda: scraped(url)["loaded_tokens_total"] == hit)
            now = scraped(url)
    finally:
        if server is not None:
            server.stop()
    suffixed = {name + ("_total" if FIGURES[name].kind == "counter" else "") for name in COUNTED}
    created = {name for name in now if name.endswith("_created")}
    assert now.keys() - created == suffixed | {f"{TIER_TOKENS}_total[host]"}
    assert all(re.search(rf"\|sglang\):kv_tiers_{name}\b", DASHBOARD) for name in suffixed)
    pages = (len(PROMPTS[0]) - 1) // PAGE * PAGE
    assert (now["lookups_total"], now["asked_tokens_total"], now["found_tokens_total"]) == (2, 2 * pages, hit)
    assert now[f"{TIER_TOKENS}_total[host]"] == hit
    assert now["loaded_bytes_total"] == hit * TOKEN_BYTES
    assert now["stored_bytes_total"] == now["stored_tokens_total"] * TOKEN_BYTES
    assert now["loads_total"] >= 1 and now["loads_failed_total"] == now["stores_failed_total"] == 0
    assert now["on"] == 1
    assert hit * TOKEN_BYTES <= now["pool_used_bytes"] < now["pool_bytes"] <= 32 << 20
