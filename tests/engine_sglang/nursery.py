"""SGLang engines without the half minute that each takes to import: forked from one process that has imported it.

SGLang starts its processes by `spawn`, and each imports torch and all of SGLang anew. Here they are forked from a
process that has imported both and done nothing else, and are the same processes from then on. An engine that cannot
start kills the process that wanted it, so each has one of its own; what it wrote is kept.
"""

import importlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from engines import Answer

_READY: Final = "READY"


@dataclass(frozen=True)
class Ran:
    """What became of one engine.

    answers: of each step, in order: tokens, log-probabilities and hits of each prompt; of those steps that were done.
    log: what all of its processes wrote.
    failed: whether it did not start, or not answer all.
    """

    answers: list[list[dict[str, Any]]]
    log: str
    failed: bool

    @property
    def error(self) -> str:
        """What went wrong first."""
        found = re.search(r"^[\w.]+(Error|Exception)\b.*", self.log, re.MULTILINE)
        return found[0] if found else "it ended without a word"

    def answered(self, step: int) -> "list[Answer]":
        from engines import Answer

        return [Answer(tuple(each["tokens"]), tuple(each["logprobs"])) for each in self.answers[step]]

    def hits(self, step: int) -> list[int]:
        """How many tokens of each prompt came from our storage."""
        return [each["hits"] for each in self.answers[step]]


class Nursery:
    """Runs one engine after the other."""

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._runs = 0

    def run(
        self,
        model: str,
        steps: Sequence[Mapping[str, Any]],
        *,
        cache: dict[str, Any] | None = None,
        within_s: float = 240,
        faults: Mapping[str, Sequence[Any]] | None = None,
        **arguments: Any,
    ) -> Ran:
        """steps: `{"ask": prompts}`, one after the other with the engine's own caches emptied in between;
        `{"ask_about": questions}`, likewise of `Engine.ask_about`; `{"ask_at_once": prompts}`; `{"detach": None}`;
        `{"scale": [host pool, factor]}`, as `engines.corrupt`.
        faults: functions of `faults` that are called before the engine starts, by name, and what they are given.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._runs += 1
        log, out = self._directory / f"{self._runs}.log", self._directory / f"{self._runs}.json"
        asked = {"model": model, "steps": steps, "cache": cache, "arguments": arguments, "within_s": within_s}
        asked["faults"] = faults or {}
        print(json.dumps(asked | {"log": str(log), "out": str(out)}), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline().strip()
        assert status, "the process that engines are forked from has ended"
        answers = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return Ran(answers, log.read_text(errors="replace") if log.exists() else "", status != "0")


@contextmanager
def nursery(directory: Path) -> Iterator[Nursery]:
    """directory: for what engines write."""
    here = subprocess.Popen(
        [sys.executable, __file__, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert here.stdin is not None and here.stdout is not None
    try:
        assert here.stdout.readline().strip() == _READY
        yield Nursery(here, directory)
    finally:
        here.stdin.close()
        here.wait(timeout=60)


def _serve(requests: IO[str], answers: IO[str]) -> None:
    for line in requests:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(asked)
        print(_wait(pid, asked["within_s"]), file=answers, flush=True)


def _wait(pid: int, within_s: float) -> int:
    """The status that the child ended with. Then its descendants end too, which are in its session."""
    until = time.monotonic() + within_s
    status = 1
    while time.monotonic() < until:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with suppress(ProcessLookupError):  # none is left
        os.killpg(pid, signal.SIGKILL)
    return status


def _child(asked: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        _run(asked)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(asked: dict[str, Any]) -> None:
    import faults
    from engines import corrupt, started

    for name, given in asked["faults"].items():
        getattr(faults, name)(*given)  # the engine's processes are forked from this one
    with started(asked["model"], cache=asked["cache"], **asked["arguments"]) as engine, open(asked["out"], "w") as out:
        for step in asked["steps"]:
            ((what, given),) = step.items()
            answers = []
            if what == "scale":
                corrupt(*given)
            elif what == "detach":
                engine.flush()
                engine.detach()
            else:
                ask = {"ask": engine.ask_in_turn, "ask_about": engine.ask_about, "ask_at_once": engine.ask}[what]
                answers = ask(given)
            done = [
                {"tokens": answer.tokens, "logprobs": answer.logprobs, "hits": hits}
                for answer, hits in zip(answers, engine.hits, strict=False)
            ]
            print(json.dumps(done), file=out, flush=True)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    sys.path[:] = sys.argv[1:]
    for name in ("entrypoints.engine", "managers.detokenizer_manager", "managers.scheduler", "models.registry"):
        importlib.import_module(f"sglang.srt.{name}")
    sys.modules["sglang.srt.models.registry"].ModelRegistry.get_supported_archs()
    # SGLang asks for `spawn` before it starts its processes.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_given, **_named: None  # type: ignore[assignment]
    print(_READY, file=answers, flush=True)
    _serve(sys.stdin, answers)


if __name__ == "__main__":
    _main()
