"""Every example runs as it is."""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytestmark = pytest.mark.slow  # a process for each
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_the_router_learns_the_size_of_the_engines_chunks(tmp_path: Path) -> None:
    """Its made-up engines have chunks of 512 tokens, and it begins with 256: else it would find nothing held."""
    router = ROOT / "examples" / "10_route.py"
    ran = subprocess.run([sys.executable, str(router)], cwd=tmp_path, capture_output=True, text=True)
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == ["engine-0", "engine-1"], ran.stdout + ran.stderr


def test_there_is_something_to_run() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.slow
def test_the_page_about_sizing_shows_what_its_command_prints() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```\n(policy .*?)```", page, re.DOTALL)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert set(shown.splitlines()) <= set(said.stdout.splitlines()), said.stdout + said.stderr


class Engine(ThreadingHTTPServer):
    """Answers as kv-vllm does, and keeps what it was asked. answer: another answer."""

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        asked: list[dict[str, Any]] = []
        answer = answer or {"kv_transfer_params": {"do_remote_prefill": True, "remote_num_tokens": 3}}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = asked
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_a_request_keeps_what_it_asks_of_the_cache_through_the_proxy() -> None:
    """Without its tags a prompt was stored for everybody, and with more than one token demanded it was not computed
    beforehand at all, as vLLM refuses that beside `max_tokens` 1."""
    proxy = runpy.run_path(str(ROOT / "examples" / "11_disaggregated_prefill.py"))["Proxy"]
    options = {"tags": {"session": "42"}}
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "min_tokens": 2, "kv_transfer_params": {"kv_tiers": options}}
    with Engine() as prefill:
        to_decode = proxy([prefill.url], []).hand_over("/v1/completions", body)
        prefill.shutdown()
    (first,) = prefill.asked
    assert first["max_tokens"] == 1 and "min_tokens" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert to_decode["kv_transfer_params"]["do_remote_prefill"] is True
    assert first["kv_transfer_params"]["kv_tiers"] == to_decode["kv_transfer_params"]["kv_tiers"] == options
    assert (to_decode["max_tokens"], to_decode["min_tokens"]) == (8, 2)


def test_the_proxy_goes_on_without_engines_that_are_down() -> None:
    """Every other prompt was computed where it was decoded, and every other client got no answer."""
    proxy = runpy.run_path(str(ROOT / "examples" / "11_disaggregated_prefill.py"))["Proxy"]
    nobody = address_of_nobody()
    with Engine() as prefill, Engine() as decode:
        between = proxy([nobody, prefill.url], [nobody, decode.url])
        for _ in range(4):
            body = between.hand_over("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8})
            assert body["kv_transfer_params"]["do_remote_prefill"] is True
            with between.decode("/v1/completions", body) as answer:
                assert answer.status == 200
        prefill.shutdown()
        decode.shutdown()
    assert (len(prefill.asked), len(decode.asked)) == (4, 4)
    assert proxy([nobody], [nobody]).decode("/v1/completions", {}) is None


def address_of_nobody() -> str:
    """A URL at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def test_the_router_goes_on_without_an_engine_that_is_down() -> None:
    """It had each text made into tokens by the first engine, and sent each prompt to the one that nobody had measured:
    no client got an answer while such an engine was down."""
    router = runpy.run_path(str(ROOT / "examples" / "10_route.py"))["Router"]
    nobody = address_of_nobody()
    with Engine({"tokens": [1, 2, 3]}) as engine:
        routing = router({}, {"down": nobody, "up": engine.url})
        answers = []
        for _ in range(3):
            with routing.listen("127.0.0.1", 0) as proxy:
                threading.Thread(target=proxy.serve_forever, daemon=True).start()
                asked = Request(
                    f"http://127.0.0.1:{proxy.server_port}/v1/completions",
                    b'{"prompt": "a text"}',
                    {"content-type": "application/json"},
                )
                with urlopen(asked, timeout=60) as answer:
                    answers.append((answer.status, answer.headers["x-engine"]))
                proxy.shutdown()
        engine.shutdown()
    assert answers == [(200, "up")] * 3
    with router({}, {"down": nobody}).listen("127.0.0.1", 0) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"http://127.0.0.1:{proxy.server_port}/v1/completions", b'{"prompt": [1]}'), timeout=60)
        proxy.shutdown()
    refused.value.close()
    assert refused.value.code == 502
