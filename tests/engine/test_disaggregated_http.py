"""The example proxy before vLLM's API servers: what passes through it is what vLLM's own proxies pass."""

import importlib.util
import json
import re
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from engines import SHARED
from kv_server.process import launch
from test_api_server import END_S, api_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "11_disaggregated_prefill.py"
PROMPT = SHARED[:700]  # two chunks and 188 tokens


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=180) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        found = re.findall(rf"^vllm:kv_tiers_{name}\{{.*\}} (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.slow
def test_a_prompt_goes_through_the_example_and_is_answered_also_when_nobody_computes_it(
    spelling_llama: str, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    server = launch({"host": {"capacity_bytes": "64MiB"}}, socket=tmp_path / "private" / "s")
    cache = {"server": {"socket": str(server.socket), "answer_s": 20}, "handover": {"wait_s": 20.0}}
    body = {"model": spelling_llama, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    homes = [tmp_path / name for name in ("prefill", "decode")]
    for home in homes:
        home.mkdir()
    try:
        with (
            api_server(spelling_llama, cache, homes[0], homes[0]) as (process, prefill, _),
            api_server(spelling_llama, cache, homes[1], homes[1]) as (_, decode, _),
        ):
            proxy = example.Proxy([prefill], [decode]).serve("127.0.0.1", 0)
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{proxy.server_port}"
            alone = {"kv_transfer_params": {"kv_tiers": {"load": False, "store": False}}}
            expected = post(decode, body | alone)["choices"][0]["text"]
            answered = post(url, body)
            assert answered["choices"][0]["text"] == expected
            assert metric(prefill, "handovers_given_total") == 1
            assert metric(decode, "handovers_received_total") == 1
            assert metric(decode, "handovers_late_total") == 0
            assert metric(decode, "loaded_tokens_total") == len(PROMPT) - 1
            process.send_signal(signal.SIGKILL)
            process.wait(END_S)
            other = body | {"prompt": PROMPT[100:]}
            assert post(url, other)["choices"][0]["text"] == post(decode, other | alone)["choices"][0]["text"]
            proxy.shutdown()
            proxy.server_close()
    finally:
        server.stop()
