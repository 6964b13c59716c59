"""A prefix that vLLM computed is a hit in SGLang, and the other way round, with the tokens of each engine without us.

vLLM lives in an environment beside SGLang's. A page of SGLang is a chunk, so vLLM's chunk_tokens says the same number.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ask_vllm import MARK
from engines import NEW_TOKENS, PROMPTS, Answer, started
from kv_tiers.server.launch import launch

PAGE = 128
"""vLLM's block on a CPU."""
FIRST, SECOND = [0, 2], [1, 5]
"""Prompts that one engine computes first; the other's share 512 tokens with them, or none."""
VLLM = Path(sys.prefix).parent / "vllm" / "bin" / "python"

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside SGLang: scripts/setup.sh vllm")


def ask_vllm(model: str, numbers: list[int], cache: dict[str, Any] | None) -> tuple[list[tuple[int, ...]], list[int]]:
    asked = {"model": model, "prompts": [PROMPTS[number] for number in numbers], "new_tokens": NEW_TOKENS}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    # Without SGLang's stand-ins.
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if "standins" not in path]
    ran = subprocess.run(
        [str(VLLM), str(Path(__file__).with_name("ask_vllm.py")), json.dumps(asked | {"cache": cache})],
        capture_output=True,
        text=True,
        env=environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=300,
        check=False,
    )
    found = [line for line in ran.stdout.splitlines() if MARK in line]
    assert ran.returncode == 0 and found, ran.stdout[-4000:] + ran.stderr[-4000:]
    answers = json.loads(found[0].split(MARK, 1)[1])
    return [tuple(answer["tokens"]) for answer in answers], [answer["hits"] for answer in answers]


@pytest.fixture(params=["directory", pytest.param("server", marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What both engines are told: one disk directory, each with a pool of its own; or one server."""
    tier = {"type": "disk", "path": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    if request.param == "directory":
        yield {"host": {"capacity": "32MiB"}, "tiers": [tier], "cold": {"wait_s": 10.0}}
        return
    config = {"host": {"capacity_bytes": "32MiB"}, "tiers": [tier]}
    # No child of ours: SGLang ends all the children of whoever started it.
    server = launch(config, socket=tmp_path / "private" / "s", detached=True)
    yield {"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}}
    server.stop()


def test_each_finds_what_the_other_computed(tiny_llama: str, reference: list[Answer], shared: dict[str, Any]) -> None:
    vllm_cache = shared | {"chunk_tokens": PAGE}
    expected, _ = ask_vllm(tiny_llama, FIRST + SECOND, None)
    with started(tiny_llama, page=PAGE, cache=shared) as sglang:
        assert sglang.ask_in_turn([PROMPTS[number] for number in FIRST]) == [reference[number] for number in FIRST]
        assert sglang.hits == [0, 512]
    # SGLang → vLLM: two prompts whose whole chunks it computed, one that shares 512 tokens with them, and a new one.
    tokens, hits = ask_vllm(tiny_llama, FIRST + SECOND, vllm_cache)
    assert tokens == expected
    assert hits == [512, 1023, 512, 0]
    # vLLM → SGLang: the last has been computed by vLLM alone.
    with started(tiny_llama, page=PAGE, cache=shared) as sglang:
        assert sglang.ask_in_turn([PROMPTS[number] for number in SECOND]) == [reference[number] for number in SECOND]
        assert sglang.hits == [640, 640]
