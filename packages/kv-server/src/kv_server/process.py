"""A private server, which ends when the process that started it ends, however that happens.

It is normally a child process. A detached one is not a child and has its own session, for a parent that is ended by
killing it with all of its descendants. It can then still complete pending spills, within `cold.drain_s`.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.config import ColdConfig
from kv_tiers.threads import start_thread

from kv_server.address import remove_stale

_log = limited_logger(__name__)

READY_S: Final = 30.0
"""How long a server may take to become ready. It takes less than a second."""
_STOP_S: Final = 15.0
# With -P nothing of the current directory is imported before this has set the path. An engine that was itself started
# with `python -m` has it in its path, as have all that it spawned; it is kept only where the environment or an
# installed package names it. What the environment has had added since this process began comes last.
_START: Final = """\
import os, runpy, sys
module, count = sys.argv[1], int(sys.argv[2])
given, own = sys.argv[3:3 + count], set(sys.path)
del sys.argv[1:3 + count]
try:
    here = os.path.realpath(os.getcwd())
except OSError:
    here = None
given = [path for path in given if path in own or os.path.realpath(path) != here]
sys.path[:] = given + [path for path in sys.path if path not in given]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_FLAGS: Final = {"ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}


class ServerProcess:
    """A running server. `stop` it, or let it end with this process.

    pid: of the server. url: where it serves HTTP; empty: nowhere. peers: where it serves other hosts' servers; empty:
    nowhere. stop_s: how long stopping may take.
    """

    def __init__(
        self, process: "subprocess.Popen[str]", socket: Path, lifeline: int, home: Path | None, stop_s: float
    ) -> None:
        """process: announces readiness on its standard output, which the server (maybe another process) keeps open."""
        self.stop_s = stop_s
        self.socket = socket
        self.url = self.peers = ""
        self.pid = process.pid
        assert process.stdout is not None
        self.output = process.stdout
        """Readable once it has ended: after `launch` it writes nothing more, and closes it with its end."""
        self._process = process
        self._lifeline = lifeline
        self._home = home

    def is_running(self) -> bool:
        return self._lifeline >= 0 and not self._has_ended(0)

    def stop(self, timeout_s: float | None = None) -> None:
        """Have it complete pending spills and end. It is killed if that takes too long.

        timeout_s: None: `stop_s`.
        """
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        for number, patience_s in (
            (signal.SIGTERM, self.stop_s if timeout_s is None else timeout_s),
            (signal.SIGKILL, _STOP_S),
        ):
            if not self._has_ended(0):
                with suppress(ProcessLookupError):  # one that is no child of ours may have gone just now
                    os.kill(self.pid, number)
                self._has_ended(patience_s)
        self._process.wait()
        self.output.close()
        remove_stale(self.socket)  # if it was killed
        if self._home is not None:
            with suppress(FileNotFoundError):
                self._home.rmdir()

    def _has_ended(self, timeout_s: float) -> bool:
        return is_readable(self.output.fileno(), timeout_s)


def launch(
    config: Mapping[str, object],
    *,
    socket: Path | None = None,
    ready_s: float = READY_S,
    log_level: str = "warning",
    detached: bool = False,
) -> ServerProcess:
    """Start a server with these settings (as in its file) and wait until it serves.

    It stops when this process ends: it watches this process and a pipe that closes with it. A child started on the main
    thread also gets a signal from the kernel (which is tied to the thread, so it is not used on other threads).

    socket: where it listens; None: in a directory made for it, which `stop` removes.
    log_level: of its lines on our standard error.
    detached: start it outside our session and not as a child.

    Raises:
        ConfigError: it did not become ready; the text is its own message.
        OSError: the system does not start a process.
    """
    home = None
    if socket is None:
        home = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
        socket = home / "kv.sock"
    watched, lifeline = os.pipe()
    command = [*module_command("kv_server"), "--config", "-", "--socket", str(socket)]
    command += ["--lifeline", str(watched), "--owner", str(os.getpid()), "--log-level", log_level]
    if home is not None:
        command.append("--own-directory")
    if detached:
        command.append("--detach")
    elif threading.current_thread() is threading.main_thread():
        command += ["--parent", str(os.getpid())]
    try:
        with _on_all_processors():
            process = subprocess.Popen(  # noqa: S603  # ourselves
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(watched,),
                text=True,
                env={name: value for name, value in environment().items() if name not in _BINDING},
            )
    except BaseException:
        os.close(lifeline)
        if home is not None:
            home.rmdir()
        raise
    finally:
        os.close(watched)
    server = ServerProcess(process, socket, lifeline, home, _STOP_S + _drain_s(config))
    try:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(dict(config)).decode())
        until_s = time.monotonic() + ready_s
        lines = _Lines(process.stdout.fileno(), until_s)
        output = lines.take()
        if detached and output is not None and output.strip().isdigit():  # of the process that goes on
            server.pid = int(output)
            output = lines.take()
        if output is None:
            raise ConfigError(f"the cache server was not ready within {ready_s} s")
        if not output.startswith("READY"):
            raise ConfigError(f"the cache server did not start: {output.strip() or 'its error output says why'}")
        pid, *addresses = output.removeprefix(f"READY {socket} ").split()
        server.pid = int(pid)
        for address in addresses:
            if address.startswith("peers="):
                server.peers = address.removeprefix("peers=")
            else:
                server.url = address
    except BaseException as error:
        server.stop()
        if isinstance(error, BrokenPipeError):
            raise ConfigError("the cache server ended while it started; its error output says why") from None
        raise
    return server


_BINDING: Final = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
"""Variables by which OpenMP binds a process to processors when it is loaded. vLLM sets the first on a CPU, and preloads
OpenMP, in a worker's environment."""


@contextmanager
def _on_all_processors() -> Iterator[None]:
    """A child that this thread starts meanwhile may run wherever this engine's processes may.

    Engines bind their workers to processors which they then keep busy, and a child inherits that.
    """
    own = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, own | _processors_of_parents())
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def _processors_of_parents() -> set[int]:
    """Where the processes may run from which ours descends, as far as they run the same program: the engine's
    launcher may have limited it, and need not be limited itself."""
    found: set[int] = set()
    with suppress(OSError, ValueError):  # one that ends meanwhile, or belongs to somebody else
        parent, program = os.getppid(), os.readlink("/proc/self/exe")
        while parent > 1 and os.readlink(f"/proc/{parent}/exe") == program:
            found |= os.sched_getaffinity(parent)
            state = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8", errors="replace")
            parent = int(state.rpartition(")")[2].split()[1])
    return found


class _Lines:
    """Lines from a pipe, with few calls: after each, this thread waits for the interpreter, and an engine that is busy
    on another thread leaves it to us rarely. Not by `readline`, as `is_readable` does not see what that reads ahead.
    """

    def __init__(self, descriptor: int, until_s: float) -> None:
        """until_s: when to give up, as `time.monotonic` counts."""
        self._descriptor, self._until_s = descriptor, until_s
        self._read = b""

    def take(self) -> str | None:
        """The next line, or what there is of it at the end. None: it was not complete in time."""
        while b"\n" not in self._read:
            if not is_readable(self._descriptor, max(0.0, self._until_s - time.monotonic())):
                return None
            more = os.read(self._descriptor, 4096)
            if not more:
                break
            self._read += more
        line, end, self._read = self._read.partition(b"\n")
        return (line + end).decode()


def is_readable(descriptor: int, timeout_s: float) -> bool:
    """Whether there is something to read within this time, or the end. `select` would refuse descriptors from 1024 on,
    which an engine with many connections has.
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def _drain_s(config: Mapping[str, object]) -> float:
    """How long these settings let a cache drain; a server has one, or two for an engine with two kinds of layers."""
    cold = config.get("cold", {})
    drain_s = cold.get("drain_s") if isinstance(cold, Mapping) else None
    return 2 * float(drain_s if isinstance(drain_s, int | float) else ColdConfig().drain_s)


def module_command(module: str) -> list[str]:
    """The command that runs this module as `python -m` would, with the modules of this process and none of the current
    directory's; append its arguments. Start it with `environment`.

    `python -m` puts the current directory first: a file `token.py` there hides the standard library's, and in a
    directory where others may write it is their code that runs. And a new interpreter knows nothing of the paths that
    this one was given while it ran (pex, Bazel, zip files, `site.addsitedir`).
    """
    flags = [flag for name, flag in _FLAGS.items() if getattr(sys.flags, name)]
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and path]  # "": wherever we are
    return [sys.executable, "-P", *flags, "-c", _START, module, str(len(paths)), *paths]


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """These variables, without directories in PYTHONPATH that depend on the current one."""
    cleaned = dict(environ)
    if "PYTHONPATH" in cleaned:
        paths = [path for path in cleaned["PYTHONPATH"].split(os.pathsep) if os.path.isabs(path)]
        cleaned["PYTHONPATH"] = os.pathsep.join(paths)
    return cleaned


FIRST_REST_S: Final = 1.0
_MAX_REST_S: Final = 300.0
_STEADY_S: Final = 60.0
"""After a server that ran at least this long, the rest before the next is the first again."""


class SupervisedServer:
    """A private server that is started again, at the same socket, when it ends unexpectedly, as when the system runs
    out of memory and kills it. `stop` it, or let it end with this process.

    What only its pool held is lost and computed again; what tiers below it hold is found there. Clients reconnect by
    themselves (`RemoteCache`).
    """

    def __init__(self, start: Callable[[], ServerProcess], *, first_rest_s: float = FIRST_REST_S) -> None:
        """start: starts a server, always at the same socket, or raises `ConfigError`.

        first_rest_s: how long to wait before the next server; twice as long each time when servers end at once.

        Raises:
            ConfigError: the first one could not be started.
        """
        self._start = start
        self._first_rest_s = first_rest_s
        self._server = start()
        self._stopped, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-server-watch", daemon=True)
        if error := start_thread(self._thread):
            _log.warning("if the private cache server ends, nothing starts another: %s", error)

    @property
    def pid(self) -> int:
        """Of the server that runs, or ran last."""
        return self._server.pid

    @property
    def socket(self) -> Path:
        return self._server.socket

    def stop(self) -> None:
        """Have the server complete pending spills and end (`ServerProcess.stop`), and start no other."""
        with suppress(OSError):  # stopped before
            self._stop.shutdown(socket.SHUT_RDWR)  # closing does not suffice: a forked child has it open too
        self._stop.close()
        if self._thread.ident is not None:
            self._thread.join()
            self._stopped.close()
        self._server.stop()

    def _run(self) -> None:
        rest_s = self._first_rest_s
        while True:
            began_s = time.monotonic()
            if self._is_stopped_before(self._server):
                return
            pid = self._server.pid
            self._server.stop()  # closes what is left of it
            if time.monotonic() - began_s >= _STEADY_S:
                rest_s = self._first_rest_s
            _log.warning(
                "the private cache server (process %d) has ended unexpectedly, perhaps because memory ran out; "
                "another is started in %g s, and what only the host pool held is computed again", pid, rest_s,
            )  # fmt: skip
            while True:
                if is_readable(self._stopped.fileno(), rest_s):
                    return
                rest_s = min(2 * rest_s, _MAX_REST_S)
                try:
                    self._server = self._start()
                except (ConfigError, OSError) as error:
                    _log.warning("the private cache server was not started, next try in %g s: %s", rest_s, error)
                else:
                    _log.warning("a new private cache server runs (process %d)", self._server.pid)
                    break

    def _is_stopped_before(self, server: ServerProcess) -> bool:
        """Waits for either: that we are stopped, or that the server ends (False)."""
        poller = select.poll()
        poller.register(self._stopped, select.POLLIN)
        poller.register(server.output, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll()]
        return self._stopped.fileno() in ready
