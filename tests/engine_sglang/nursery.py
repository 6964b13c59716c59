"""SGLang engines without the half minute that each takes to import: forked from one process that has imported it.

SGLang starts its processes by `spawn`, and each imports torch and all of SGLang anew. Here they are forked from a
process that has imported both and done nothing else, and are the same processes from then on. An engine that cannot
start kills the process that wanted it, so each has one of its own; what it wrote is kept.
"""

import atexit
import functools
import importlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kv_testing.forked import overlook_what_is_there

if TYPE_CHECKING:
    from engines import Answer

_READY: Final = b"READY"
END_S: Final = 60
IDLE_MS: Final = 5


@dataclass(frozen=True)
class Ran:
    """What became of one engine.

    answers, hits of: each step that was done, in order. log: what all of its processes wrote.
    failed: whether it did not start, or not answer all.
    """

    answers: "list[list[Answer]]"
    hits_of: list[list[int]]
    log: str
    failed: bool

    @property
    def error(self) -> str:
        """What went wrong first."""
        found = re.search(r"^[\w.]+(Error|Exception)\b.*", self.log, re.MULTILINE)
        return found[0] if found else "it ended without a word"

    def answered(self, step: int) -> "list[Answer]":
        return self.answers[step]

    def hits(self, step: int) -> list[int]:
        """How many tokens of each prompt came from our storage."""
        return self.hits_of[step]


class EngineEnded(Exception):
    """With what its processes wrote last, such as what was raised."""


class Forked:
    """An `engines.Engine` in a process of its own: its methods, and its `hits`."""

    def __init__(self, connection: Connection, log: Path) -> None:
        self._connection = connection
        self._log = log
        self.within_s: float | None = None
        self.hits: list[int] = []

    def __getattr__(self, method: str) -> Any:
        return functools.partial(self.call, method)

    def call(self, method: str, *given: Any, **named: Any) -> Any:
        self.send((method, given, named))
        return self.result()

    def send(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # what it has said before it ended is there to be read
            self._connection.send_bytes(pickle.dumps(message))

    def result(self) -> Any:
        """What the last call returned. Raises `EngineEnded`: what raises in an engine's process ends it."""
        if not self._connection.poll(self.within_s):
            raise EngineEnded(f"no answer within {self.within_s} s: {self.log[-4000:]}")
        try:
            result, self.hits = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise EngineEnded(self.log[-4000:]) from None
        return result

    @property
    def log(self) -> str:
        """What its processes have written."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def end(self) -> None:
        """Shut it down and wait until nothing of it runs. What does not end is killed."""
        with suppress(OSError):
            self._connection.send_bytes(pickle.dumps(None))
        with suppress(EOFError):
            while self._connection.poll(END_S):
                self._connection.recv_bytes()
        self._connection.close()


class Nursery:
    """The process that engines are forked from. control: our end of a socket to it."""

    def __init__(self, control: socket.socket, directory: Path) -> None:
        self._control = control
        self._directory = directory
        self._engines = 0

    @contextmanager
    def started(
        self,
        model: str,
        *,
        faults: Mapping[str, Sequence[Any]] | None = None,
        within_s: float | None = None,
        **given: Any,
    ) -> Iterator[Forked]:
        """An engine, as `engines.in_this_process` starts it.

        faults: functions of `faults` that are called before the engine starts, by name, and what they are given.
        within_s: what its start and each call may take; None for what the test may.
        """
        self._engines += 1
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])
        forked = Forked(Connection(ours.detach()), self._directory / f"{self._engines}.log")
        forked.within_s = within_s
        asked = {"model": model, "faults": faults or {}, "given": given}
        forked.send(asked | {"log": str(forked._log), "environ": dict(os.environ), "path": sys.path})
        try:
            forked.result()
            yield forked
        finally:
            forked.end()

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
        """One engine that may fail.

        steps: `{"ask": prompts}`, one after the other with the engine's own caches emptied in between;
        `{"ask_about": questions}`, likewise of `Engine.ask_about`; `{"ask_at_once": prompts}`; `{"detach": None}`;
        `{"scale": [host pool, factor]}`, as `engines.corrupt`.
        """
        from engines import corrupt

        answers, hits, failed = [], [], False
        try:
            with self.started(model, cache=cache, faults=faults, within_s=within_s, **arguments) as forked:
                for step in steps:
                    ((what, given),) = step.items()
                    answered = []
                    if what == "scale":
                        corrupt(*given)
                    elif what == "detach":
                        forked.flush()
                        forked.detach()
                    else:
                        named = {"ask": "ask_in_turn", "ask_about": "ask_about", "ask_at_once": "ask"}
                        answered = forked.call(named[what], given)
                    answers.append(answered)
                    hits.append(list(forked.hits))
        except EngineEnded:
            failed = True
        log = (self._directory / f"{self._engines}.log").read_text(errors="replace")
        return Ran(answers, hits, log, failed)


@functools.cache
def nursery() -> Nursery:
    """The one of this process, which ends with it."""
    directory = tempfile.TemporaryDirectory(prefix="kv-engines")
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno()), *sys.path]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait(END_S)
        directory.cleanup()

    atexit.register(end)
    assert ours.recv(len(_READY)) == _READY, "the process that engines are forked from has ended"
    return Nursery(ours, Path(directory.name))


def _serve(control: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ended
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            os._exit(0)  # as it does not look for garbage in what it has imported, libraries would report leaks
        (descriptor,) = descriptors
        if os.fork() == 0:
            control.close()
            _keep(descriptor)
        os.close(descriptor)


def _keep(descriptor: int) -> None:
    """Fork the engine's process and wait for it. Then its descendants end too, which are in its session; and last the
    connection, by which the test knows."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _child(Connection(descriptor))
    os.waitpid(pid, 0)
    with suppress(ProcessLookupError):  # none is left
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _child(connection: Connection) -> None:
    os.setsid()
    asked = pickle.loads(connection.recv_bytes())
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for taken, given in ((0, nothing), (1, log), (2, log)):
        os.dup2(given, taken)
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.path[:] = asked["path"]
    importlib.invalidate_caches()
    has_ended = False
    try:
        _run(asked, connection)
        has_ended = True
    finally:
        if not has_ended:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run(asked: dict[str, Any], connection: Connection) -> None:
    import faults
    from engines import in_this_process

    for name, given in asked["faults"].items():
        getattr(faults, name)(*given)  # the engine's processes are forked from this one
    with in_this_process(asked["model"], **asked["given"]) as engine:
        connection.send_bytes(pickle.dumps((None, [])))
        while (called := pickle.loads(connection.recv_bytes())) is not None:
            method, given, named = called
            result = getattr(engine, method)(*given, **named)
            connection.send_bytes(pickle.dumps((result, engine.hits)))


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    sys.path[:] = sys.argv[2:]
    for name in ("entrypoints.engine", "managers.detokenizer_manager", "managers.scheduler", "models.registry"):
        importlib.import_module(f"sglang.srt.{name}")
    sys.modules["sglang.srt.models.registry"].ModelRegistry.get_supported_archs()
    # An engine without requests runs as fast as it can, or looks up once a second. Here it leaves its core to others.
    sleeper = importlib.import_module("sglang.srt.managers.scheduler_components.idle_sleeper").IdleSleeper
    sleeper.maybe_sleep = lambda self: self.poller.poll(IDLE_MS)
    # SGLang asks for `spawn` before it starts its processes.
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_given, **_named: None  # type: ignore[assignment]
    overlook_what_is_there()  # SGLang collects garbage each time that its caches are emptied: half a second
    control.send(_READY)
    _serve(control)


if __name__ == "__main__":
    _main()
