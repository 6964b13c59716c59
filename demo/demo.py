"""The demo: a real engine skips the prefill of a prefix that another request computed.

Two prompts share a beginning: two questions about a document or, for a model without a tokenizer, two sequences of
numbers. Phase A sends both, phase B sends both again, with the engine's own prefix cache emptied before each. Then the
process ends, and a second one with a cold engine sends them again: the named host pool has outlived the first. Then
that pool is removed, as a reboot would do, and a third process finds the chunks on disk. Every row's tokens are
compared with those of an engine without a cache. The second and third process may run another engine.

An engine contributes two functions: one writes a tiny model, one answers the prompts of a phase.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kv_core.log import say
from kv_server.process import environment
from kv_tiers.pool.host_pool import HostPool, pool_path
from table import Row, table

SHARED_TOKENS = 512
PROMPT_TOKENS = (700, 620)
NEW_TOKENS = 32
ANSWER_TOKENS: Final = 96
"""Room for a whole answer, which a token of `Wanted.stop` ends."""
TINY: Final = "tiny"
CHUNK_TOKENS_OF_BOTH: Final = 128
"""A chunk size that both engines support: vLLM's block on a CPU has this many tokens, and SGLang's page may."""
_CAPACITY: Final = 1 << 29
_RESULT = "KV-DEMO "
_PHASES = {
    "reference": ("without us",),
    "first": ("A", "B"),
    "second": ("second process",),
    "third": ("from disk",),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """hit_tokens: how many of the prompt's the engine found. first_s: seconds to the first of the `tokens`."""

    hit_tokens: int
    first_s: float
    tokens: list[int]


Ask = Callable[[list[int]], Answer]
"""Answers one prompt greedily."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to start an engine for.

    model: the model to load, with this dtype.
    cache: our settings; None: without us.
    prompt_tokens: length of the longest prompt.
    new_tokens: length of an answer, unless a token of `stop` ends it.
    """

    model: str
    dtype: str
    cache: dict[str, Any] | None
    prompt_tokens: int
    stop: Sequence[int] = ()
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True, slots=True)
class Demo:
    """An engine's part of the demo.

    program: the script that runs this again, in a process of its own.
    engine: its name.
    environ: environment variables that that process needs.
    start: starts the engine.
    write_tiny: writes a tiny model to a directory.
    """

    program: Path
    engine: str
    environ: Mapping[str, str]
    start: Callable[[Wanted], Ask]
    write_tiny: Callable[[Path], Path]


def run(demo: Demo, arguments: list[str] | None = None) -> int:
    """The command line of an engine's demo; its exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python demo/{demo.program.name}",
        description=f"Watch real {demo.engine} skip the prefill of a prefix that another request computed.",
    )
    parser.add_argument(
        "--model", default=TINY, help="a model that it can load (default: tiny, a random Llama created on the spot)"
    )
    parser.add_argument(
        "--dtype", default="", help="the model's dtype (default: float32 for the tiny model, else auto)"
    )
    parser.add_argument("--document", type=Path, help="ask about this text, if the model has a tokenizer")
    parser.add_argument("--question", action="append", default=[], help="twice: what to ask about it")
    parser.add_argument("--then", default="", help="another engine's demo, as a command: it runs the phases after B")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON lines instead of a table")
    parser.add_argument("--run", choices=tuple(_PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="null", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.document is not None and len(args.question) != 2:
        parser.error("a document needs two questions")
    if args.document is not None and not args.document.is_file():
        parser.error(f"--document {args.document} is not a file")
    if args.run:
        os.environ.update(demo.environ)
        _serve(demo, args)
        return 0
    with tempfile.TemporaryDirectory(prefix="kv-demo-") as scratch:
        return _show(demo, args, Path(scratch))


def _show(demo: Demo, args: argparse.Namespace, scratch: Path) -> int:
    model_args = ["--model", args.model, "--dtype", args.dtype or "auto"]
    if args.model == TINY:
        model_args = ["--model", str(demo.write_tiny(scratch / "tiny-llama")), "--dtype", args.dtype or "float32"]
    elif args.document is not None:
        model_args += ["--document", str(args.document), "--question", args.question[0], "--question", args.question[1]]
    pool = f"demo-{os.getpid()}"
    disk = {"type": "disk", "directory": str(scratch / "kv"), "capacity_bytes": _CAPACITY}
    cache = {"host": {"capacity_bytes": _CAPACITY, "name": pool}, "tiers": [disk], "cold": {"wait_s": 20.0}}
    if shutil.disk_usage(pool_path(pool).parent.parent).free < 2 * _CAPACITY:
        del cache["host"]["name"]  # type: ignore[attr-defined]  # a small shared memory: all is found on disk
    command, other_command = [sys.executable, str(demo.program)], ["env", *shlex.split(args.then)] if args.then else []
    if other_command:
        cache["chunk_tokens"] = CHUNK_TOKENS_OF_BOTH  # type: ignore[assignment]
    engines = [
        _Engine(demo.engine, command, scratch, model_args),
        _Engine("the other engine" if other_command else demo.engine, other_command or command, scratch, model_args),
    ]
    try:
        different = engines if other_command else engines[:1]
        references = [engine.run("reference", "an engine without us", None) for engine in different]
        rows = engines[0].run("first", "an engine with us", cache)
        rows += engines[1].run("second", "a second process, its engine cold", cache)
        HostPool.unlink(pool)
        rows += engines[1].run("third", "a third, with the disk alone", cache)
    finally:
        HostPool.unlink(pool)
    without_us = {(row.engine, row.request): row for reference in references for row in reference}
    equal = [row.tokens == without_us[row.engine, row.request].tokens for row in rows]
    if args.json:
        for row, same in zip(rows, equal, strict=True):
            say(json.dumps({**asdict(row), "tokens_equal": same}))
    else:
        say(*table(rows, without_us).split("\n"), sep="\n")
    return 0 if all(equal) else 1


@dataclass(frozen=True, slots=True)
class _Engine:
    """Runs phases, each in a process of its own."""

    name: str
    program: Sequence[str]
    scratch: Path
    model_args: Sequence[str]

    def run(self, phase: str, what: str, cache: Mapping[str, Any] | None) -> list[Row]:
        """Shows a line with the time that it has taken so far."""
        command = [*self.program, "--run", phase, *self.model_args, "--cache", json.dumps(cache)]
        what = f"{self.name}: {what}"
        log = self.scratch / f"{phase}.log"
        environ = {key: value for key, value in environment().items() if key != "PYTHONDONTWRITEBYTECODE"}
        start = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
            while True:
                try:
                    process.wait(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    _progress(f"{what} … {time.monotonic() - start:.0f} s", end=False)
        lines = log.read_text(errors="replace").splitlines()
        rows = [Row(**json.loads(line.split(_RESULT, 1)[1])) for line in lines if _RESULT in line]
        if process.returncode or not rows:
            _progress(f"{what}: failed", end=True)
            say(*lines[-40:], sep="\n", file=sys.stderr)
            raise SystemExit(f"the engine ended with status {process.returncode}; its last lines are above")
        _progress(f"{what}: done in {time.monotonic() - start:.0f} s", end=True)
        return rows


def _progress(text: str, *, end: bool) -> None:
    if sys.stderr.isatty():
        say(text, start="\r\033[K", end="\n" if end else "", file=sys.stderr, flush=True)
    elif end:
        say(text, file=sys.stderr, flush=True)


def _serve(demo: Demo, args: argparse.Namespace) -> None:
    """One process's phases, a line of output for each request."""
    tokenizer, stop, names, new_tokens = None, [], ["prompt 1", "prompt 2"], NEW_TOKENS
    if args.document is None:
        prompts = _numbers(_vocabulary(args.model))
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        text, new_tokens = args.document.read_text(encoding="utf-8"), ANSWER_TOKENS
        prompts, stop, names = (
            [_tokens_of(tokenizer, text, question) for question in args.question],
            [tokenizer.eos_token_id],
            args.question,
        )
    wanted = Wanted(args.model, args.dtype, json.loads(args.cache), max(map(len, prompts)), stop, new_tokens)
    ask = demo.start(wanted)
    ask([5] * 200)  # the first forward pass of a process pays for more than its tokens
    for phase in _PHASES[args.run]:
        for request, prompt in zip(names, prompts, strict=True):
            answer = ask(prompt)
            text = "" if tokenizer is None else tokenizer.decode(answer.tokens, skip_special_tokens=True)
            row = Row(demo.engine, request, phase, len(prompt), text=text, **asdict(answer))
            say(_RESULT + json.dumps(asdict(row)), flush=True)


def _tokens_of(tokenizer: Any, document: str, question: str) -> list[int]:
    """The document first, so that all questions about it share their beginning."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{document}\n\nQuestion: {question}\nAnswer:"))
    chat = [{"role": "user", "content": f"{document}\n\n{question}"}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def _vocabulary(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def _numbers(vocabulary: int) -> list[list[int]]:
    """Two prompts with the same first 512 tokens, which then differ."""
    shared = [3 + (7919 * i) % (vocabulary - 3) for i in range(SHARED_TOKENS)]
    return [
        shared + [3 + (104729 * (number + 1) + 31 * i) % (vocabulary - 3) for i in range(length - SHARED_TOKENS)]
        for number, length in enumerate(PROMPT_TOKENS)
    ]
