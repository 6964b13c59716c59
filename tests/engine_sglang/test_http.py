"""SGLang's own end-to-end tests of storage, imported from its wheel, against a server started as users start it.

Speculation is left out of the first, as its drafts need kernels that a CPU lacks: what it compares then is what the
second run of the server loads from our storage. The tier is written back, so all of it is stored as the first run ends.
The server starts with exactly the flags that `python -m kv_sglang flags` prints, `--hicache-size` among them.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from engines import PAGE, PROMPTS, SHARED
from sglang.test import test_utils
from sglang.test.hicache_spec_storage_common import HiCacheSpecStorageMixin
from sglang.test.kl_multiturn_utils import test_input_output_logprobs_match_prefill_cache_hit_helper as match_logprobs
from sglang.utils import wait_for_http_ready

ON_A_CPU = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--dtype=float32",
    "--disable-cuda-graph",
    "--skip-tokenizer-init",
    "--max-total-tokens=4096",
    "--mem-fraction-static=0.5",
    "--hicache-storage-prefetch-policy=wait_complete",
    "--enable-cache-report",
    "--log-level=warning",
]


def _answers(process: subprocess.Popen[bytes], url: str, _api_key: str | None, within_s: float) -> tuple[bool, None]:
    """In the place of SGLang's, which looks only every ten seconds."""
    wait_for_http_ready(f"{url}/health_generate", int(within_s), process)
    return True, None


test_utils._wait_for_server_health = _answers


class Server(HiCacheSpecStorageMixin, test_utils.CustomTestCase):  # type: ignore[misc]
    """SGLang's flow: ask, stop the server, start it again, ask again, and see where the second answer came from."""

    __test__ = False
    flags: list[str]
    storage_backend = "dynamic"
    expected_storage_backend = "KVStorage"
    min_expected_accept_length = 1.0

    def runTest(self) -> None:  # unittest's name
        """There is none of its own: pytest calls the flow."""

    @classmethod
    def _get_spec_server_args(cls) -> list[str]:
        return [*cls.flags, *ON_A_CPU]

    @classmethod
    def _get_spec_server_env(cls) -> dict[str, str]:
        return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}

    @classmethod
    def _build_spec_prompt(cls) -> None:
        cls.prompt_input_ids = SHARED[: cls.input_token_len]

    def _get_spec_accept_length(self, response_json: dict[str, Any]) -> float:
        assert "spec_accept_length" not in response_json["meta_info"]
        return 1.0

    def _wait_for_storage_before_restart(self) -> None:
        """SGLang writes to storage behind the answer. Once its own caches are empty, only storage can hit."""
        self.flush()
        assert self.ask(self.prompt_input_ids)["meta_info"]["cached_tokens_details"]["storage"] == 1008

    def flush(self) -> None:
        requests.post(f"{self.base_url}/flush_cache", params={"timeout": 30}, timeout=40).raise_for_status()

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        answer: dict[str, Any] = requests.post(f"{self.base_url}/generate", json=asked, timeout=60).json()
        return answer


@pytest.fixture(scope="module")
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    Server.model = tiny_llama
    directory = tmp_path_factory.mktemp("tier")
    disk = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB", "write": "back"}
    settings = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    (directory / "kv.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "kv_sglang", "flags", "--config-file", str(directory / "kv.json")]
    command += ["--page-size", str(PAGE), "--hicache-size", "1"]
    Server.flags = shlex.split(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "--hicache-size=1" in Server.flags
    Server._launch_spec_server()
    yield Server()
    Server._stop_spec_server()


@pytest.mark.slow
class TestStorageOverHttp:
    def test_what_a_server_stored_the_next_one_loads(self, server: Server) -> None:
        server._run_storage_loadback_keeps_spec_accept_length()

    def test_logprobs_after_hits_are_those_of_a_prefill(self, server: Server) -> None:
        """The first of SGLang's calls has the prompts stored, the second begins with what storage has of them."""

        def assert_hit(result: dict[str, Any], tokens: int, _label: str) -> None:
            assert result["meta_info"]["cached_tokens"] == (tokens - 1) // PAGE * PAGE

        for _ in range(2):
            match_logprobs(
                server.base_url,
                server.model,
                1e-6,
                [PROMPTS[0], PROMPTS[2]],
                max_new_tokens=8,
                assert_prefill_cached_tokens=assert_hit,
            )
        server.flush()
        assert server.ask(PROMPTS[0])["meta_info"]["cached_tokens_details"]["storage"] == 592
