"""A prefix that vLLM computed is a hit in SGLang, and the other way round, with the tokens of each engine without us.

vLLM lives in an environment beside SGLang's. A page of SGLang is a chunk, so vLLM's chunk_tokens says the same number.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ask_vllm import MARK
from engines import NEW_TOKENS, PROMPTS, Answer, Engine, started
from kv_server.process import launch
from kv_testing.servers import free_port
from kv_testing.wait import line

PAGE = 128
"""vLLM's block on a CPU."""
FIRST, SECOND = [0, 2], [1, 5]
"""Prompts that one engine computes first; the other's share 512 tokens with them, or none."""
VLLM = Path(sys.prefix).parent / "vllm" / "bin" / "python"

T = TypeVar("T")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed beside SGLang: scripts/setup.sh vllm"),
]


@functools.cache
def vllm() -> "subprocess.Popen[str]":
    """The process that those which `run_vllm` asks are forked from. It ends with this one, which holds its input."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    # Without SGLang's stand-ins.
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if "standins" not in path]
    return subprocess.Popen(
        [str(VLLM), str(Path(__file__).with_name("ask_vllm.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def run_vllm(
    model: str, numbers: list[int], cache: dict[str, Any] | None, params: list[dict[str, Any]] | None = None
) -> tuple[list[tuple[int, ...]], list[int], str]:
    """The tokens of each answer, the hits of each prompt, and what vLLM logged. params: each's `kv_transfer_params`."""
    prompts = [PROMPTS[number] for number in numbers]
    asked = {"model": model, "prompts": prompts, "new_tokens": NEW_TOKENS, "cache": cache, "params": params}
    with tempfile.NamedTemporaryFile("r") as file:
        print(json.dumps(asked | {"log": file.name}), file=vllm().stdin, flush=True)
        status = line(vllm().stdout, 300)
        log = file.read()
    found = [said for said in log.splitlines() if MARK in said]
    assert status == "0\n" and found, log[-4000:]
    answers = json.loads(found[0].split(MARK, 1)[1])
    return [tuple(answer["tokens"]) for answer in answers], [answer["hits"] for answer in answers], log


def of(given: list[T], numbers: list[int]) -> list[T]:
    return [given[number] for number in numbers]


@pytest.fixture(scope="module")
def of_vllm(tiny_llama: str) -> list[tuple[int, ...]]:
    """What vLLM without us answers. Before SGLang starts, whose idle scheduler keeps a core busy."""
    tokens, _, _ = run_vllm(tiny_llama, FIRST + SECOND, None)
    return tokens


def assert_vllm_finds_it(model: str, cache: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    """Two prompts whose whole chunks SGLang computed, one that shares 512 tokens with them, and a new one."""
    tokens, hits, log = run_vllm(model, FIRST + SECOND, cache | {"chunk_tokens": PAGE})
    assert tokens == expected
    assert hits == [512, 1023, 512, 0]
    assert "another format" not in log


def assert_vllm_with_opaque_blocks_is_warned(
    model: str, cache: dict[str, Any], expected: list[tuple[int, ...]]
) -> None:
    """It finds nothing of what SGLang computed, and the reason is in its log."""
    tokens, hits, log = run_vllm(model, FIRST, cache | {"chunk_tokens": PAGE, "format": "blocks"})
    assert tokens == of(expected, [0, 1])
    assert hits[0] == 0
    assert "sglang uses the server at" in log and "vllm stores opaque blocks" in log


def assert_sglang_finds_it(sglang: Engine, reference: list[Answer]) -> None:
    """The last has been computed by vLLM alone."""
    assert sglang.ask_in_turn(of(PROMPTS, SECOND)) == of(reference, SECOND)
    assert sglang.hits == [640, 640]


@pytest.mark.parametrize("opaque", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_finds_at_a_server_what_the_other_computed(
    tiny_llama: str, reference: list[Answer], of_vllm: list[tuple[int, ...]], tmp_path: Path, opaque: bool
) -> None:
    """vLLM comes while SGLang serves, and both have the server's cache. opaque: vLLM keeps blocks as they are."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    config = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk]}
    # No child of ours: SGLang ends all the children of whoever started it.
    server = launch(config, socket=tmp_path / "private" / "s", detached=True)
    cache = {"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}}
    try:
        with started(tiny_llama, page=PAGE, cache=cache) as sglang:
            assert sglang.ask_in_turn(of(PROMPTS, FIRST)) == of(reference, FIRST)
            assert sglang.hits == [0, 512]
            if opaque:
                assert_vllm_with_opaque_blocks_is_warned(tiny_llama, cache, of_vllm)
                return
            assert_vllm_finds_it(tiny_llama, cache, of_vllm)
            assert_sglang_finds_it(sglang, reference)
    finally:
        server.stop()


@pytest.mark.long
def test_each_finds_at_another_hosts_server_what_the_other_computed(
    tiny_llama: str, reference: list[Answer], of_vllm: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Each engine has a server of its own, and the other's as its peer."""
    ports = [free_port(), free_port()]
    with ExitStack() as ending:
        caches = []
        for name, mine, theirs in (("sglang", *ports), ("vllm", *ports[::-1])):
            config = {
                "host": {"capacity_bytes": "32MiB"},
                "peers": {"listen": f"127.0.0.1:{mine}", "unprotected": True},
                "tiers": [
                    {"type": "peers", "hosts": [f"127.0.0.1:{theirs}"], "answer_timeout_s": 10.0, "unprotected": True}
                ],
                "cold": {"wait_s": 10.0},
            }
            server = launch(config, socket=tmp_path / name / "s", detached=True)
            ending.callback(server.stop)
            caches.append({"server": {"socket": str(server.socket)}, "cold": {"wait_s": 10.0}})
        with started(tiny_llama, page=PAGE, cache=caches[0]) as sglang:
            assert sglang.ask_in_turn(of(PROMPTS, FIRST)) == of(reference, FIRST)
            assert sglang.hits == [0, 512]
            assert_vllm_finds_it(tiny_llama, caches[1], of_vllm)
            assert_sglang_finds_it(sglang, reference)


def test_each_finds_in_a_directory_what_the_other_computed(
    tiny_llama: str, reference: list[Answer], of_vllm: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """One after the other, as a directory has one owner."""
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    cache = {"host": {"capacity_bytes": "32MiB"}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    with started(tiny_llama, page=PAGE, cache=cache) as sglang:
        assert sglang.ask_in_turn(of(PROMPTS, FIRST)) == of(reference, FIRST)
        assert sglang.hits == [0, 512]
        sglang.detach()
    assert_vllm_finds_it(tiny_llama, cache, of_vllm)
    with started(tiny_llama, page=PAGE, cache=cache) as sglang:
        assert_sglang_finds_it(sglang, reference)
