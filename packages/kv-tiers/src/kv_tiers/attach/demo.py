"""The running example: watch a real engine skip the prefill of a prefix that another request computed.

Two prompts share their first 512 tokens. Phase A sends both, phase B sends both again, all with the engine's own prefix
cache empty; then the process ends and a second one, whose engine is cold, sends them once more: the named host pool has
outlived the first. Then that pool is removed, as a restart of the machine would do, and a third process finds the
chunks on disk. Every row's tokens are compared with those of an engine without us.

What is an engine's own is two functions: one that writes a tiny model, one that answers the prompts of a phase.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv_tiers.pool.host_pool import HostPool

SHARED_TOKENS = 512
PROMPT_TOKENS = (700, 620)
NEW_TOKENS = 16
_RESULT = "KV-DEMO "
_PHASES = {
    "reference": ("without us",),
    "first": ("A", "B"),
    "second": ("second process",),
    "third": ("from disk",),
}


Ask = Callable[[list[int]], tuple[int, list[int]]]
"""Answers one prompt greedily with `NEW_TOKENS` tokens: how many of its tokens the engine found, and what it made."""


@dataclass(frozen=True, slots=True)
class Demo:
    """An engine's part of it.

    program: the module that runs this again, in a process of its own.
    engine: its name.
    environ: what that process needs.
    start: a model, its dtype and our settings (None: without us) → the engine, and the size of its vocabulary.
    write_tiny: writes a tiny model to a directory.
    """

    program: str
    engine: str
    environ: Mapping[str, str]
    start: Callable[[str, str, dict[str, Any] | None], tuple[Ask, int]]
    write_tiny: Callable[[Path], Path]


@dataclass(frozen=True, slots=True)
class Row:
    """One request.

    request: its name.
    phase: when it was sent.
    hit_tokens: what the engine says it found.
    seconds: how long it took.
    tokens: what it generated.
    """

    request: str
    phase: str
    hit_tokens: int
    seconds: float
    tokens: list[int]


def run(demo: Demo, arguments: list[str] | None = None) -> int:
    """The command line of an engine's demo; its exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {demo.program}",
        description=f"Watch real {demo.engine} skip the prefill of a prefix that another request computed.",
    )
    parser.add_argument("--model", help="a model that it can load (default: a tiny random Llama, made on the spot)")
    parser.add_argument(
        "--dtype", default="", help="the model's dtype (default: float32 for the tiny model, else auto)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON lines instead of a table")
    parser.add_argument("--run", choices=tuple(_PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.run:
        _serve(demo, args.run, args.model, args.dtype, json.loads(args.cache))
        return 0
    with tempfile.TemporaryDirectory(prefix="kv-demo-") as scratch:
        return _show(demo, args, Path(scratch))


def _show(demo: Demo, args: argparse.Namespace, scratch: Path) -> int:
    model, dtype = args.model, args.dtype or "auto"
    if model is None:
        model, dtype = str(demo.write_tiny(scratch / "tiny-llama")), args.dtype or "float32"
    pool = f"demo-{os.getpid()}"
    disk = {"type": "disk", "directory": str(scratch / "kv"), "capacity_bytes": "256MiB"}
    cache = {"host": {"capacity_bytes": "256MiB", "name": pool}, "tiers": [disk], "cold": {"wait_s": 10.0}}
    try:
        reference = _run(demo, "reference", "an engine without us", model, dtype=dtype, cache=None, scratch=scratch)
        ours = _run(demo, "first", "an engine with us", model, dtype=dtype, cache=cache, scratch=scratch)
        ours += _run(
            demo, "second", "a second process, its engine cold", model, dtype=dtype, cache=cache, scratch=scratch
        )
        HostPool.unlink(pool)
        ours += _run(demo, "third", "a third, with the disk alone", model, dtype=dtype, cache=cache, scratch=scratch)
    finally:
        HostPool.unlink(pool)
    expected = {row.request: row.tokens for row in reference}
    equal = [row.tokens == expected[row.request] for row in ours]
    if args.json:
        for row, same in zip(ours, equal, strict=True):
            print(json.dumps({**asdict(row), "tokens_equal": same}))
        return 0 if all(equal) else 1
    baseline = {row.request: row.seconds for row in reference}
    print(f"\n{'request':<9} {'phase':<18} {'hit tokens':>10} {'time':>9} {'without us':>11}  tokens equal")
    for row, same in zip(ours, equal, strict=True):
        print(
            f"{row.request:<9} {row.phase:<18} {row.hit_tokens:>10} {row.seconds * 1e3:>6.0f} ms "
            f"{baseline[row.request] * 1e3:>8.0f} ms  {'yes' if same else 'NO'}"
        )
    if not all(equal):
        print("\nTokens differ. In float32 that is a bug; in bfloat16 another split of the prefill rounds differently.")
    return 0 if all(equal) else 1


def _run(
    demo: Demo, name: str, what: str, model: str, *, dtype: str, cache: dict[str, Any] | None, scratch: Path
) -> list[Row]:
    """Run one engine in a process of its own, with a line that says how long it has been at it."""
    command = [sys.executable, "-m", demo.program, "--run", name, "--model", model, "--dtype", dtype]
    command += ["--cache", json.dumps(cache)]
    log = scratch / f"{name}.log"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environ.update(demo.environ)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)  # noqa: S603
        while True:
            try:
                process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                _progress(f"starting {what} … {time.monotonic() - start:.0f} s", end=False)
    lines = log.read_text(errors="replace").splitlines()
    rows = [Row(**json.loads(line.split(_RESULT, 1)[1])) for line in lines if _RESULT in line]
    if process.returncode or not rows:
        _progress(f"{what}: failed", end=True)
        print("\n".join(lines[-40:]), file=sys.stderr)
        raise SystemExit(f"the engine ended with status {process.returncode}; its last lines are above")
    _progress(f"{what}: done in {time.monotonic() - start:.0f} s", end=True)
    return rows


def _progress(text: str, *, end: bool) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\n" if end else "", file=sys.stderr, flush=True)
    elif end:
        print(text, file=sys.stderr, flush=True)


def _serve(demo: Demo, name: str, model: str, dtype: str, cache: dict[str, Any] | None) -> None:
    ask, vocabulary = demo.start(model, dtype, cache)
    ask([5] * 200)  # the first forward pass of a process pays for more than its tokens
    for phase in _PHASES[name]:
        for request, prompt in zip(("prompt 1", "prompt 2"), _prompts(vocabulary), strict=True):
            start = time.perf_counter()
            hit_tokens, tokens = ask(prompt)
            row = Row(request, phase, hit_tokens, time.perf_counter() - start, tokens)
            print(_RESULT + json.dumps(asdict(row)), flush=True)


def _prompts(vocabulary: int) -> list[list[int]]:
    """Two prompts of the same first 512 tokens, which then go their own ways."""
    shared = [3 + (7919 * i) % (vocabulary - 3) for i in range(SHARED_TOKENS)]
    return [
        shared + [3 + (104729 * (number + 1) + 31 * i) % (vocabulary - 3) for i in range(length - SHARED_TOKENS)]
        for number, length in enumerate(PROMPT_TOKENS)
    ]
