"""What is forked is what a new interpreter would be."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kv_testing.forked import in_new_interpreters, is_possible
from kv_testing.wait import until

pytestmark = pytest.mark.slow  # it looks at how the tests run, not at what they test

_SPAWNED = "from multiprocessing.spawn import spawn_main\n"
"""With this vLLM's processes begin."""
_DESCRIBE = """
import json, logging, os, signal, sys, threading, warnings
imported = "vllm" in sys.modules
import vllm.logger
main = sys.modules["__main__"]
print(json.dumps({
    "imported": imported,
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "path": sys.path,
    "environ": dict(os.environ),
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "processors": sorted(os.sched_getaffinity(0)),
    "main": [main.__name__, sorted(name for name in vars(main) if name.startswith("__") and vars(main)[name])],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "level": logging.getLogger("vllm").level,
    "warnings": "ignore" in sys.warnoptions,
    "thread": threading.main_thread() is threading.current_thread() and threading.get_native_id() == os.getpid(),
    "given": sys.stdin.read(),
    "said": [os.read(int(number), 9).decode() for number in sys.argv[1:]],
}))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module", autouse=True)
def _where_it_is_possible() -> None:
    subprocess.run([sys.executable, "-c", _SPAWNED], timeout=120, check=True)
    if not is_possible():
        pytest.skip("new interpreters are started here")


def described(*arguments: str, **how: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", _SPAWNED + _DESCRIBE, *arguments]
    ran = subprocess.run(command, input="a line", capture_output=True, text=True, timeout=120, check=False, **how)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr.endswith("to stderr\n")
    return dict(json.loads(ran.stdout))


def test_all_that_a_new_interpreter_has(tmp_path: Path) -> None:
    lasting = os.environ | {"KV_SPOKEN": "ä", "LINES": "24", "COLUMNS": "80"}  # a terminal's library may add these
    for how in (
        {
            "env": lasting | {"VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONWARNINGS": "ignore"},
            "cwd": tmp_path,
            "start_new_session": True,
        },
        {"env": {name: value for name, value in lasting.items() if not name.startswith("VLLM_")}},
    ):
        found = described(**how)
        with in_new_interpreters():
            expected = described(**how)
        assert found.pop("imported") and not expected.pop("imported")
        # Importing vLLM adds to it.
        found["path"] = [entry for entry in found["path"] if entry in expected["path"]]
        assert found == expected


def test_what_is_read_as_an_interpreter_starts_has_it_started() -> None:
    assert not described(env=os.environ | {"PYTHONHASHSEED": "7"})["imported"]
    assert not described(env=os.environ | {"OMP_NUM_THREADS": "2"})["imported"]


def test_descriptors_keep_their_numbers_and_no_others_are_there() -> None:
    readers = []
    for what in (b"one", b"other"):
        reader, writer = os.pipe()
        os.write(writer, what)
        os.close(writer)
        readers.append(reader)
    try:
        numbers = [str(reader) for reader in reversed(readers)]
        found = described(*numbers, pass_fds=readers)
        assert found["imported"] and found["said"] == ["other", "one"]
    finally:
        for reader in readers:
            os.close(reader)
    code = f"{_SPAWNED}import os, sys; print(len(os.listdir('/proc/self/fd')))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert int(seen) == 5  # the three of every process, that of the folder, and its end of a socket to its nursery


def test_openmp_binds_a_process_to_the_processor_that_vllm_names() -> None:
    last = max(os.sched_getaffinity(0))
    found = described(env=os.environ | {"OMP_PLACES": f"{{{last}}}", "OMP_PROC_BIND": "true"})
    assert found["imported"] and found["processors"] == [last]


def _fail(_given: object) -> None:
    sys.exit(5)


def _wait(_given: object) -> None:
    signal.pause()


def test_a_process_of_multiprocessing_is_a_child_that_ends_as_it_does() -> None:
    context = multiprocessing.get_context("spawn")
    ended = context.Process(target=_fail, args=(None,))
    ended.start()
    ended.join(60)
    assert ended.exitcode == 5
    killed = context.Process(target=_wait, args=(None,))
    killed.start()
    assert killed.pid is not None
    assert os.waitpid(killed.pid, os.WNOHANG) == (0, 0)  # a child of ours, that lives
    assert killed.is_alive()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("how", ["ends", "is killed", "is killed with its group"])
def test_nothing_is_left_of_a_process(how: str) -> None:
    """Its nursery, which is in its session, ends with it; so do the processes that it has had forked, if their group is
    killed."""
    inner = f"{_SPAWNED}print('inner', flush=True)\nimport signal; signal.pause()"
    start = f"subprocess.Popen([sys.executable, '-c', {inner!r}])" if "group" in how else ""
    code = f"{_SPAWNED}import subprocess, sys\n{start}\nprint('outer', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = {process.stdout.readline() for _ in range(2 if start else 1)}
    assert said == ({"outer\n", "inner\n"} if start else {"outer\n"})
    if how == "ends":
        process.communicate(timeout=60)
    elif how == "is killed":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)

    def is_empty() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            return False
        return True

    until(is_empty, within_s=60)
    process.stdout.close()
