"""Commands from their first import on: Ctrl-C at any moment, and settings that would refuse every client later."""

import ctypes
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import kv_core
import kv_tiers
import pytest

# Runs a console script as its file in bin/ does, or a module, and is interrupted where that module is imported.
SCRIPT = """
import importlib.metadata, os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it

moment, command = sys.argv[1:3]
del sys.argv[1:3]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

scripts = importlib.metadata.entry_points(group="console_scripts", name=command)
sys.meta_path.insert(0, Interrupt())
if not scripts:
    runpy.run_module(command, run_name="__main__", alter_sys=True)
for entry in scripts:
    sys.exit(entry.load()())
"""
SERVER = ["--capacity", "1MiB"]


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as made:
        yield Path(made)


def interrupted(command: str, moment: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, moment, command, *arguments],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "moment", "arguments"),
    [
        ("kv", "kv_core.tools.cli", ["keys", "-"]),
        ("kv", "argparse", ["keys", "-"]),
        ("kv", "xxhash", ["keys", "-"]),
        ("kv", "kv_observe.sim_cli", ["sim", "--help"]),
        ("kv", "msgspec", ["top", "--once"]),
        ("kv", "kv_server.config", ["top", "--once"]),
        ("kv-server", "kv_server.cli", SERVER),
        ("kv-server", "argparse", SERVER),
        ("kv-server", "kv_tiers.cache.local", SERVER),
        ("kv-server", "msgspec", SERVER),
        ("kv_server", "kv_server.cli", SERVER),
        ("kv_server", "kv_tiers.cache.local", SERVER),
    ],
)
def test_ctrl_c_while_a_command_is_imported_is_no_traceback(command: str, moment: str, arguments: list[str]) -> None:
    done = interrupted(command, moment, *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (130, -2), (done.returncode, done.stderr)


def test_ctrl_c_while_kv_server_makes_its_caches_leaves_no_socket(home: Path) -> None:
    """At the import of what only HTTP needs: its socket is not taken yet, or is given back."""
    path = home / "s" / "kv.sock"
    done = interrupted("kv-server", "uvicorn", *SERVER, "--http", "127.0.0.1:0", "--socket", str(path))
    assert "Traceback" not in done.stderr, done.stderr
    assert not list(home.rglob("*.sock*"))


def test_ctrl_c_while_kv_server_waits_for_its_settings_is_no_traceback(home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "nothing", "kv-server", "--config", "-"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wchan_is_pipe(process.pid)
        process.send_signal(2)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "")


def wchan_is_pipe(pid: int) -> None:
    """Wait until the process reads its standard input, which is empty: its system call is read(0, …)."""
    from kv_testing.wait import until

    until(lambda: Path(f"/proc/{pid}/syscall").read_text().startswith("0 0x0 "), 30)


def test_packages_have_their_names_though_late() -> None:
    for package in (kv_core, kv_tiers):
        for name in package.__all__:
            assert getattr(package, name) is vars(package)[name]
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            package.nothing  # noqa: B018


# What can be checked at start is checked at start.


def kv_server(*arguments: str, drop: int | None = None) -> "subprocess.CompletedProcess[str]":
    """With what it says when it does not start; one that starts is ended. drop: a capability that root goes without."""

    def without() -> None:
        if drop is not None and os.geteuid() == 0:
            ctypes.CDLL(None).prctl(24, drop, 0, 0, 0)  # PR_CAPBSET_DROP

    process = subprocess.Popen(
        [sys.executable, "-m", "kv_server", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=without,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 30)[0]
    finally:
        process.terminate()
        said, errors = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def refused(done: "subprocess.CompletedProcess[str]") -> str:
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("where", ["directory", "link", "no writing", "no file system", "mistyped"])
def test_a_socket_that_cannot_be_made_is_one_line(home: Path, where: str) -> None:
    path = home / "kv.sock"
    if where == "directory":
        Path(f"{path}.lock").mkdir()
    elif where == "link":
        Path(f"{path}.lock").symlink_to("/nowhere")
    elif where == "no writing":
        home.chmod(0o500)
    elif where == "mistyped":
        path = home / "mistyped" / "s" / "kv.sock"
    else:
        path = Path("/proc/self/s/kv.sock")
    line = refused(kv_server("--capacity", "1MiB", "--socket", str(path), drop=1))  # CAP_DAC_OVERRIDE
    assert str(path.parent) in line and "--socket" in line
    assert not (home / "mistyped").exists()
    home.chmod(0o700)


@pytest.mark.parametrize("name", ["kv.sock", "kv.sock.lock"])
@pytest.mark.parametrize("make", [lambda path: path.write_text("precious"), Path.mkdir, os.mkfifo])
def test_what_no_server_left_at_its_socket_is_left_alone(home: Path, name: str, make: Callable[[Path], object]) -> None:
    """It was removed: the file that somebody named as --socket where they meant --config."""
    make(home / name)
    before = (home / name).lstat()
    line = refused(kv_server("--capacity", "1MiB", "--socket", str(home / "kv.sock")))
    assert f"{home / name} exists and was not left by a server; write another socket (--socket)" in line
    assert [path.name for path in home.iterdir()] == [name]
    assert os.path.samestat((home / name).lstat(), before)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": {"capacity_bytes": 0}}, "host.capacity_bytes is 0"),
        ({"host": {"capacity": "1MiB"}}, "did you mean 'host.capacity_bytes'"),
        ({"host": {"capacity_bytes": "4kB"}}, "such as 4GiB"),
        ({"host": {"capacity_bytes": "1024TiB"}}, "write a capacity of at most"),
        ({"tiers": [{"type": "disk", "directory": "DISK"}]}, "`capacity_bytes` must be"),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "disk", "directory": "HOME/no/kv", "capacity_bytes": "1GiB"}]},
            "mkdir -p HOME/no",
        ),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "disk", "directory": "HOME/file", "capacity_bytes": "1GiB"}]},
            "choose another directory",
        ),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "disk", "directory": "HOME/closed", "capacity_bytes": "1GiB"}]},
            "cannot be written to",
        ),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "disk", "directory": "HOME/closed/kv", "capacity_bytes": "1GiB"}]},
            "cannot be written to",
        ),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "disk", "directory": "HOME/link", "capacity_bytes": "1GiB"}]},
            "is a link to HOME/unmounted, which is not there",
        ),
        (
            {"host": {"capacity_bytes": "1MiB"},
             "tiers": [{"type": "gds", "directory": "HOME/kv", "capacity_bytes": "1GiB"}]},
            "type: gds is not for a server, because the lease of a file does not cross its socket; write type: disk",
        ),
    ],
)  # fmt: skip
def test_what_would_refuse_every_client_later_ends_the_start(
    home: Path, settings: dict[str, object], says: str
) -> None:
    (home / "file").touch()
    (home / "closed").mkdir(0o500)
    (home / "link").symlink_to(home / "unmounted")
    text = json.dumps({"server": {"socket": str(home / "s" / "kv.sock")}, **settings}).replace("HOME", str(home))
    (home / "kv.json").write_text(text)
    line = refused(kv_server("--config", str(home / "kv.json"), drop=1))
    assert says.replace("HOME", str(home)) in line
    assert not (home / "s").exists()


def test_a_disk_whose_directory_can_be_made_is_not_made_yet(home: Path) -> None:
    text = json.dumps(
        {"host": {"capacity_bytes": "1MiB"}, "server": {"socket": str(home / "s" / "kv.sock")},
         "tiers": [{"type": "disk", "directory": str(home / "kv"), "capacity_bytes": "1GiB"}]}
    )  # fmt: skip
    (home / "kv.json").write_text(text)
    done = kv_server("--config", str(home / "kv.json"))
    assert done.returncode == 0 and done.stdout.startswith("READY"), done
    assert not (home / "kv").exists()


def test_a_disks_directory_may_be_read_by_others(home: Path) -> None:
    """What lies in it is in directories of its own, which others cannot enter."""
    (home / "open").mkdir(0o755)
    text = json.dumps(
        {"host": {"capacity_bytes": "1MiB"}, "server": {"socket": str(home / "s" / "kv.sock")},
         "tiers": [{"type": "disk", "directory": str(home / "open"), "capacity_bytes": "1GiB"}]}
    )  # fmt: skip
    (home / "kv.json").write_text(text)
    done = kv_server("--config", str(home / "kv.json"))
    assert done.returncode == 0 and done.stdout.startswith("READY"), done


def test_a_command_imports_no_torch_because_another_one_needs_it() -> None:
    code = "import sys\nfrom kv_core.tools.cli import main\nmain(['--help'])\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "bench" in done.stdout and done.stdout.splitlines()[-1] == "False"


def test_the_commands_are_started_where_nothing_is_imported_yet() -> None:
    scripts = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="console_scripts")}
    assert scripts["kv"] == "kv_core.tools.command:main"
    assert scripts["kv-server"] == "kv_server.__main__:main"


def test_a_terminal_that_lacks_a_character_is_no_traceback() -> None:
    """In a locale of ISO 8859-1, say, which has no ellipsis."""
    done = subprocess.run(
        [sys.executable, "-m", "kv_server", "--help"], env=os.environ | {"PYTHONIOENCODING": "iso8859-1"},
        capture_output=True, encoding="iso8859-1", timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "socket: /run/\\u2026/kv.sock" in done.stdout


WITH_THREADS = """
import sys, threading
from kv_testing.threads import threads_left
from kv_server.cli import main
with threads_left(int(sys.argv.pop(1))):
    sys.exit(main())
"""


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_server_that_may_start_too_few_threads_says_so_in_one_line(home: Path, threads: int) -> None:
    """Of those for events, HTTP and peers."""
    path = home / "s" / "kv.sock"
    options = [*SERVER, "--socket", str(path), "--http", "127.0.0.1:0", "--listen", "127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-c", WITH_THREADS, str(threads), *options, "--config", "-"],
        input='{"peers": {"unprotected": true}}', capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "kv-server: no more threads can be started" in done.stderr and "ulimit -u" in done.stderr
    assert not path.exists()


def test_help_names_a_socket_with_a_per_cent_sign(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_server.cli import main

    (home / "100%").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "100%"))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert f"{home}/100%/kv-tiers-{os.geteuid()}" in "".join(capsys.readouterr().out.split())


def test_settings_from_an_input_that_is_closed_are_one_line() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m kv_server --config - <&-', sys.executable],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused(done) == "kv-server: standard input is closed; name a file instead of -"
