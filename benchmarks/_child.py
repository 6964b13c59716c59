"""An engine in a process of its own, asked by lines of JSON: what the benchmarks of real engines share.

A script that makes such children is started again for each, with `--serve` and what else it wants; there it calls
`serve`.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(ask: Callable[[list[int]], int], forget: Callable[[], None] = lambda: None) -> None:
    """In the child: answer every prompt with the seconds it took and the tokens that were found.

    forget: empty the engine's own caches; called for an empty prompt.
    """
    print("READY", flush=True)
    for line in sys.stdin:
        prompt = json.loads(line)
        start = time.perf_counter()
        found = ask(prompt) if prompt else forget()
        seconds = time.perf_counter() - start
        print("ANSWER " + json.dumps([seconds, found or 0]), flush=True)


class Child:
    """The other side of it."""

    def __init__(self, script: str, words: list[str], environ: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            [sys.executable, script, "--serve", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=inherited | environ,
        )
        self._wait_for("READY")

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and tokens that were found."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        seconds, hit = json.loads(self._wait_for("ANSWER "))
        return float(seconds), int(hit)

    @property
    def pid(self) -> int:
        return self._process.pid

    def forget(self) -> None:
        """Have the engine's own caches emptied."""
        self.ask([])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_for(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        command: Any = self._process.args
        raise SystemExit("an engine ended; run its command by hand to see why: " + shlex.join(command))


def progress(text: str) -> None:
    """Overwrite the line before, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
