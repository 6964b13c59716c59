"""Processes without the time that each takes to import its modules: forked from one that has.

Python's own call that starts a program (`fork_exec`, below `subprocess` and `multiprocessing`) asks a nursery first: a
process that has imported what such a process does (`Kind`), and done nothing else. It makes a sibling of itself, which
thus is a child of whoever asked, in the same session and process group; takes the command line, environment, folder,
descriptors and processors that a new interpreter would have had; forks a nursery of its own; and runs. What cannot be
had so is left to the real call: other programs, and variables that are read as an interpreter starts or as its modules
are imported.

One difference is left: all hash as their nursery does. That ranks agree although sets of theirs have other orders is
shown by tests with real interpreters (`in_new_interpreters`).
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import os
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader
from multiprocessing import util
from pathlib import Path
from typing import Any, Final, NoReturn

_REAL: Final[Callable[..., int]] = subprocess._fork_exec  # type: ignore[attr-defined]
_PYTHON: Final = os.fsencode(sys.executable)
_flags: Final[Callable[[], list[str]]] = util._args_from_interpreter_flags  # type: ignore[attr-defined]
_READ_ONCE: Final = (
    *("GOMP_", "HF_", "KMP_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCHDYNAMO_", "TRANSFORMERS_"),
    *("VLLM_BATCH_INVARIANT", "VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE", "VLLM_TARGET_DEVICE"),
)
"""How variables begin that a process cannot be given once it has started."""
_TAKEN: Final = ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "PYTHONWARNINGS")
"""But for these: what they say is done as if they had been there."""
_NURSERY: Final = "import runpy, sys; del sys.path[0]; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Without the folder of its script, where modules are called like Python's own."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS: Final = 40
_SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_SIZE: Final = 8


@dataclass(frozen=True)
class Kind:
    """Which processes are forked, and from what.

    script: the file of this kind, which calls `be_nursery` where it is run. runs: whether the arguments of an
    interpreter are such a process's. commands: the installed commands that an interpreter runs. prepare: called once in
    a nursery, after which it has one thread. begin: called in each process, for what importing does that each does for
    itself. preloaded: the libraries that such processes preload.
    """

    script: str
    runs: Callable[[list[str]], bool]
    prepare: Callable[[], object]
    begin: Callable[[], object]
    preloaded: Callable[[], Sequence[Path]] = tuple
    commands: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Asked:
    """What a process is to be. arguments: those of the interpreter. numbers: of its descriptors, in the order in which
    they are sent. processors: where it may run. ignores_interrupts: as a shell's background jobs do, and what they
    start."""

    arguments: list[str]
    environ: dict[bytes, bytes]
    folder: str
    numbers: list[int]
    processors: set[int]
    in_new_session: bool
    ignores_interrupts: bool


class _Nursery:
    """The one of this process. control: our end of a socket to it, None until it is started. before: the variables that
    it has been started with, or will be."""

    def __init__(self, kind: Kind, control: socket.socket | None, before: Mapping[bytes, bytes]) -> None:
        self._kind = kind
        self._control = control
        self._before = before
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.is_open = True

    def fork_exec(self, command: Sequence[Any], programs: Sequence[bytes], *rest: Any) -> int:
        """As Python's own, and by that for what is not ours to fork. The nursery is started by the main thread: what is
        forked from it is a child of whichever thread started it, and a server that is to end with its parent would end
        with that thread."""
        may_start = self._control is not None or threading.current_thread() is threading.main_thread()
        if self.is_open and os.getpid() == self._owner and may_start:
            found = self._asked(command, programs, *rest)
            if found is not None:
                with self._lock:
                    pid = self._fork(*found)
                if pid > 0:
                    return pid
                self.is_open = False  # this kernel does not do it
        return _REAL(command, programs, *rest)

    def _asked(
        self,
        command: Sequence[Any],
        programs: Sequence[bytes],
        close: bool,
        kept: Sequence[int],
        folder: Any,
        environ: Any,
        *rest: Any,
    ) -> tuple[_Asked, list[int]] | None:
        """What is to be forked, and the descriptors that it gets. None: not for us."""
        stdin, _, _, stdout, _, stderr, _, until_exec, _, in_new_session, *others = rest
        arguments = [os.fsdecode(one) for one in command[1:]]
        if _PYTHON not in programs:
            arguments[:0] = self._kind.commands.intersection(map(os.fsdecode, programs))
        while arguments and arguments[0] in _flags():
            del arguments[0]
        given = dict(os.environb if environ is None else (one.split(b"=", 1) for one in environ))
        if (
            not close
            or not (_PYTHON in programs or self._kind.commands.intersection(arguments[:1]))
            or others[:6] != [-1, None, None, None, -1, None]  # groups, users, and what is run before
            or not self._kind.runs(arguments)
            or any(
                given.get(name) != self._before.get(name) for name in given.keys() | self._before if _is_read_once(name)
            )
        ):
            return None
        descriptors = {number: number for number in kept if number != until_exec}
        descriptors |= {number: number if one == -1 else one for number, one in enumerate((stdin, stdout, stderr))}
        asked = _Asked(
            arguments,
            given,
            os.path.join(os.getcwd(), os.fsdecode(folder or "")),
            list(descriptors),
            os.sched_getaffinity(0),
            bool(in_new_session),
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        )
        return asked, list(descriptors.values())

    def _fork(self, asked: _Asked, descriptors: list[int]) -> int:
        if self._control is None:
            self._control = _started(self._kind, self._before)
        message = pickle.dumps(vars(asked))
        socket.send_fds(self._control, [len(message).to_bytes(_SIZE, "big")], descriptors)
        self._control.sendall(message)
        return int.from_bytes(_exactly(self._control, _SIZE), "big", signed=True)


def overlook_what_is_there() -> None:
    """From now on garbage is looked for in what is made later. vLLM has it collected some ten times as an engine starts
    and ends, each time among all that has been imported: 2 s an engine; SGLang each time that its caches are emptied.
    What engines do for the same reason, and undo as they end, is left out."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


_nursery: _Nursery | None = None


def fork_from(kind: Kind, control: socket.socket | None = None) -> None:
    """From now on, in this process and in those that it starts. Where processes have one thread: others do not live on
    in what is forked."""
    import _posixsubprocess

    global _nursery
    if _SYS_CLONE is not None and os.environ.get("OMP_NUM_THREADS") == "1":
        _nursery = _Nursery(kind, control, dict(os.environb) if control is None else _BEFORE)
        subprocess._fork_exec = _posixsubprocess.fork_exec = _nursery.fork_exec  # type: ignore[attr-defined, assignment]


@contextmanager
def forking(kind: Kind) -> Iterator[None]:
    """What this process starts meanwhile, and what that starts."""
    if _nursery is None:
        fork_from(kind)
    if _nursery is None:
        yield
        return
    _nursery.is_open = True
    try:
        yield
    finally:
        _nursery.is_open = False


@contextmanager
def in_new_interpreters() -> Iterator[None]:
    """What this process starts meanwhile, and what that starts."""
    if _nursery is None:
        yield
        return
    _nursery.is_open = False
    try:
        yield
    finally:
        _nursery.is_open = True


def is_possible() -> bool:
    """Whether processes are forked here, as far as it is known: not with GPUs, several threads, or another kernel."""
    return _nursery is not None and _nursery.is_open


def _is_read_once(variable: bytes) -> bool:
    name = os.fsdecode(variable)
    return name.startswith(_READ_ONCE) and name not in _TAKEN


def _started(kind: Kind, before: Mapping[bytes, bytes]) -> socket.socket:
    ours, theirs = socket.socketpair()
    environ = dict(before)
    if preloaded := kind.preloaded():
        environ[b"LD_PRELOAD"] = os.fsencode(":".join(map(str, preloaded)))
    command = [sys.executable, *_flags(), "-c", _NURSERY, kind.script, str(theirs.fileno())]
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        os.posix_spawn(sys.executable, command, environ, file_actions=nowhere)  # nobody waits for its end
    return ours


def _exactly(connection: socket.socket, size: int) -> bytes:
    read = connection.recv(size, socket.MSG_WAITALL)
    if len(read) < size:
        raise OSError("the process that others are forked from has ended")
    return read


def be_nursery(kind: Kind) -> None:
    """Until this process is one of those that are forked, which runs what it is to run and ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, 1 << 16)  # what whoever started this leaves open
    kind.prepare()
    assert len(os.listdir("/proc/self/task")) == 1, "threads that importing starts cannot be forked"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    overlook_what_is_there()  # or each process would copy all of it as it collects garbage
    while True:
        asked, descriptors = _serve(control)
        control.close()
        if asked.in_new_session:
            os.setsid()
        ours, theirs = socket.socketpair()
        if os.fork():
            break
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        control = theirs
    theirs.close()
    _take(kind, asked, descriptors, ours)
    _end_with(_run, asked.arguments)


def _serve(control: socket.socket) -> tuple[_Asked, list[int]]:
    """Returns in each process that is forked. Ends with whoever is at the other end."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(control, _SIZE, 250)
        if not size:
            os._exit(0)
        asked = _Asked(**pickle.loads(_exactly(control, int.from_bytes(size, "big"))))
        pid = _fork_sibling()
        if pid == 0:
            return asked, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(pid.to_bytes(_SIZE, "big", signed=True))


def _fork_sibling() -> int:
    """As `os.fork`, but the new process is our parent's. Negative: it cannot be."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    own_id = ctypes.c_void_p()  # where the C library keeps it
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(own_id), 0, 0, 0):
        return -1
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    python.PyOS_BeforeFork()
    pid = libc.syscall(ctypes.c_long(_SYS_CLONE or -1), ctypes.c_ulong(flags), None, None, own_id, own_id)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return int(pid)


def _take(kind: Kind, asked: _Asked, descriptors: list[int], control: socket.socket) -> None:
    """What a new interpreter would have."""
    above = max(*asked.numbers, 2) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in (*descriptors, control.fileno())]
    for one in descriptors:
        os.close(one)
    control.close()
    for number, one in zip(asked.numbers, moved, strict=False):
        os.dup2(one, number)
        os.close(one)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        was = getattr(sys, name)
        stream = open(number, mode, -1 if number < 2 else 1, was.encoding, was.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environb.update(asked.environ)
    if not asked.ignores_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, _processors(asked))
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        sys.warnoptions.append(option)
        warnings._setoption(option)  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed()
    kind.begin()
    importlib.invalidate_caches()
    fork_from(kind, socket.socket(fileno=moved[-1]))


def _processors(asked: _Asked) -> set[int]:
    """OpenMP binds a process's thread as it starts, and so those that it starts: vLLM names one processor for each."""
    named = asked.environ.get(b"GOMP_CPU_AFFINITY") or asked.environ.get(b"OMP_PLACES", b"").strip(b"{}")
    return {int(one) for one in named.replace(b",", b" ").split()} or asked.processors


def _run(arguments: list[str]) -> None:
    """As the interpreter runs what it is given."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    first, *rest = arguments
    if is_safe := first == "-P":
        first, *rest = rest
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        if not is_safe:
            sys.path.insert(0, "")
        sys.argv[:] = ["-c", *rest[1:]]
        main.__loader__ = BuiltinImporter
        exec(rest[0], vars(main))
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv[:] = arguments
        main.__file__, main.__loader__ = first, SourceFileLoader("__main__", first)
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


def _end_with(run: Callable[[list[str]], None], arguments: list[str]) -> NoReturn:
    """As the interpreter ends, but for taking all modules apart, as Python ends what it forks."""
    code: Any = 1
    try:
        run(arguments)
        code = None
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


_BEFORE: Final = dict(os.environb)
"""Of a nursery: the variables that it has started with."""
