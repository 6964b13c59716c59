"""Programs beside the server (setting server.programs): started when it serves, ended with it, restarted if they fail.

A program learns from its environment what is served: KV_SERVER_SOCKET, KV_SERVER_PID, and, if there are such addresses,
KV_SERVER_HTTP (of HTTP) and KV_SERVER_PEERS. It is a process, so it can neither delay nor crash the server.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.threads import start_thread

from kv_server.process import environment

_log = limited_logger(__name__)

_FIRST_REST_S: Final = 1.0
_MAX_REST_S: Final = 300.0
_STEADY_S: Final = 60.0
"""After a program that ran at least this long, the rest before the next start is the first again."""
END_S: Final = 5.0
"""How long a program may take to end once it has got SIGTERM, before it is killed."""
# The kernel ends it with the thread that started it, so with a killed server too. Not by preexec_fn: that copies the
# page tables of all pools.
_RUN: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be run: {error.strerror}")
"""


def check_programs(commands: Sequence[Sequence[str]]) -> None:
    """Raises `ConfigError`: one of them is no command that this user can run."""
    for number, command in enumerate(commands):
        if not command:
            raise ConfigError(f"server.programs[{number}]: write a command and its arguments, each as a text")
        if shutil.which(command[0]) is None:
            raise ConfigError(f"server.programs[{number}]: there is no command {command[0]!r} that this user can run")


class Programs:
    """All of a server's. `start` them when it serves, and `stop` them before its process ends."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._lock = threading.Lock()
        self._running: list[_Program] = []
        self._is_stopped = False

    def start(self, served: Mapping[str, str]) -> None:
        """served: the variables that say what is served."""
        with self._lock:
            for number, command in enumerate([] if self._is_stopped else self._commands):
                program = _Program(number, command, environment() | dict(served))
                if why := start_thread(program):
                    _log.error("%s is not started: %s", program.place, why)
                else:
                    self._running.append(program)

    def stop(self) -> None:
        """Returns when all have ended, `END_S` and a moment from now at the latest."""
        with self._lock:
            self._is_stopped = True
        for program in self._running:
            program.end(signal.SIGTERM)
        until_s = time.monotonic() + END_S
        for program in self._running:
            program.join(max(0.0, until_s - time.monotonic()))
            program.end(signal.SIGKILL)
            program.join(END_S)


class _Program(threading.Thread):
    """Runs one program, again and again as long as it fails. It and what it starts are a group of processes."""

    def __init__(self, number: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__(name="kv-program", daemon=True)
        self.place = f"server.programs[{number}] ({command[0]})"  # its arguments may be secrets
        self._command, self._variables = command, variables
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._pid = 0  # 0: none runs

    def end(self, number: signal.Signals) -> None:
        """Send it this signal, and do not start it again."""
        with self._lock:
            self._is_ending.set()
            self._signal(number)

    def run(self) -> None:
        rest_s = _FIRST_REST_S
        while True:
            began_s = time.monotonic()
            why = self._run_once()
            if not why or self._is_ending.is_set():
                return
            if time.monotonic() - began_s >= _STEADY_S:
                rest_s = _FIRST_REST_S
            _log.warning("%s %s; it is started again in %g s", self.place, why, rest_s)
            if self._is_ending.wait(rest_s):
                return
            rest_s = min(2 * rest_s, _MAX_REST_S)

    def _run_once(self) -> str:
        """Why it has to be started again; empty: it need not."""
        with self._lock:
            if self._is_ending.is_set():
                return ""
            output = subprocess.DEVNULL if sys.stderr is None else 2  # our standard output is for the line READY
            try:
                process = subprocess.Popen(  # noqa: S603  # what the settings say
                    [sys.executable, "-P", "-I", "-S", "-c", _RUN, str(os.getpid()), *self._command],
                    env=dict(self._variables),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            except OSError as error:
                return f"cannot be started: {error.strerror}"
            self._pid = process.pid
        with suppress(ChildProcessError):  # it has ended, and SIGCHLD is ignored
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._signal(signal.SIGKILL)  # what it has left behind, while the group's number is still its own
            self._pid = 0
            status = process.wait()
        return f"has ended with status {status}" if status else ""

    def _signal(self, number: signal.Signals) -> None:
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, number)
