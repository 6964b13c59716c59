"""A server's process, and the pool that it shares."""

import gc
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from kv_core.errors import ConfigError, MisuseError, TierDown
from kv_core.testing import key_chain
from kv_server import launch, wire
from kv_server.config import default_socket, read_config
from kv_server.connection import ask_server
from kv_server.process import environment
from kv_server.remote_cache import MappedPool
from kv_testing.cache_servers import (
    SLOT_BYTES,
    held,
    join_at,
    join_server,
    peak_rss_bytes,
    read,
    report_of,
    settings_for,
    start_server,
    store,
)
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import line, until
from kv_tiers import HostPool


def test_it_is_small(home: Path) -> None:
    """The pool is large and not touched; no torch, no plotting, no network library is loaded."""
    server = launch({"host": {"capacity_bytes": "1GiB"}}, socket=home / "s")
    cache = join_server(home)
    store(cache, key_chain(4))
    assert peak_rss_bytes(server.pid) < 100 << 20
    cache.close()
    server.stop()
    code = "import sys, kv_server.cli; print(sorted(name for name in sys.modules if '.' not in name))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    for name in ("torch", "vllm", "matplotlib", "redis", "obstore", "asyncio", "pickle5"):
        assert f"'{name}'" not in loaded


def test_it_is_not_bound_to_the_processor_of_the_process_that_starts_it(home: Path) -> None:
    """As an engine's worker is, whose parents, up to the program that started the engine, are not."""
    if len(allowed := os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kv_server import launch\n"
        f"os.sched_setaffinity(0, {{{min(allowed)}}})\n"
        "server = launch({'host': {'capacity_bytes': '1MiB'}}, socket=Path(sys.argv[1]))\n"
        "bound = Path(f'/proc/{server.pid}/environ').read_bytes().count(b'GOMP_CPU_AFFINITY')\n"
        "print([*(sorted(os.sched_getaffinity(process)) for process in (0, server.pid)), bound])\n"
        "server.stop()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, home / "s"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"GOMP_CPU_AFFINITY": str(min(allowed))},
    )
    assert json.loads(ran.stdout) == [[min(allowed)], sorted(allowed), 0]


def test_a_private_server_ends_with_whoever_started_it() -> None:
    code = (
        "import os, signal, sys\n"
        "from kv_server import launch\n"
        "server = launch({'host': {'capacity_bytes': '1MiB'}})\n"
        "print(server.pid, server.socket, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    pid, path = line(process.stdout).split()
    watched = os.pidfd_open(int(pid))
    process.kill()
    process.wait(60)
    process.stdout.close()
    process.stdin.close()
    assert select.select([watched], [], [], 10)[0]
    os.close(watched)
    assert not Path(path).parent.exists()


def test_a_detached_server_stores_what_was_to_be_written_back_after_its_engine_was_killed(home: Path) -> None:
    """It is no descendant and not in the session of whoever started it, which is how engines find what to kill."""
    code = (
        "import json, pathlib, sys\n"
        "from kv_server import launch\n"
        "server = launch(json.loads(sys.argv[1]), socket=pathlib.Path(sys.argv[2]), detached=True)\n"
        "print(server.pid, server.is_running(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    config = settings_for(home, slots=40, disk=True, write="back")
    command = [sys.executable, "-c", code, json.dumps(config), str(home / "s")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    pid, is_running = line(process.stdout).split()
    assert is_running == "True" and os.getsid(int(pid)) == int(pid) != process.pid
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) not in (process.pid, os.getpid())
    cache = join_server(home)
    store(cache, key_chain(5))
    watched = os.pidfd_open(int(pid))
    process.kill()
    process.wait(60)
    assert select.select([watched], [], [], 10)[0]
    os.close(watched)
    process.stdout.close()
    process.stdin.close()
    cache.close()
    server = start_server(home, slots=40, disk=True)
    again = join_server(home)
    assert held(again, key_chain(5)) == 5
    assert read(again, key_chain(5))
    again.close()
    server.stop()


def test_a_detached_server_is_stopped_like_a_child(home: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        server = launch(settings_for(home), socket=home / "s", detached=True)
        watched = os.pidfd_open(server.pid)
        assert server.is_running()
        if number == signal.SIGKILL:
            os.kill(server.pid, number)
        server.stop()
        assert select.select([watched], [], [], 10)[0] and not server.is_running()
        os.close(watched)
        server.stop()


def test_a_server_that_goes_as_it_is_told_to_is_stopped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached one is no child, so its process is gone as soon as it has ended."""
    server = launch(settings_for(home), socket=home / "s", detached=True)
    kill = os.kill

    def too_late(pid: int, _: int) -> None:
        kill(pid, signal.SIGKILL)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", too_late)
    server.stop()
    assert not server.is_running() and not (home / "s").exists()


def test_a_process_with_many_connections_starts_and_stops_a_server(home: Path) -> None:
    """An API server has more descriptors than `select` can watch."""
    with ExitStack() as many:
        for _ in range(1024):
            many.enter_context(open(os.devnull))
        server = launch(settings_for(home), socket=home / "s")
        assert server.is_running()
        server.stop()
        assert not server.is_running()


def command(
    home: Path, stdout: int = subprocess.PIPE, ignored: signal.Signals | None = None
) -> "subprocess.Popen[str]":
    """`kv-server` with a disk to which nothing is written before it must. ignored: by it, from its start on."""

    def have_default_signals() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which whoever runs the tests may have had ignored, as nohup does
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)

    (home / "kv.json").write_text(json.dumps(settings_for(home, disk=True, write="back")))
    return subprocess.Popen(
        [sys.executable, "-m", "kv_server", "--config", str(home / "kv.json"), "--socket", str(home / "s")],
        stdout=stdout, stderr=subprocess.PIPE, text=True,
        preexec_fn=have_default_signals,
    )  # fmt: skip


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGINT], marks=pytest.mark.slow),
        [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM],
    ],
)
def test_however_it_is_told_to_end_it_stores_what_waits(home: Path, numbers: list[signal.Signals]) -> None:
    process, keys = command(home), key_chain(5)
    assert line(process.stdout).startswith("READY")
    cache = join_server(home)
    store(cache, keys)
    for number in numbers:
        process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert not (home / "s").exists()
    cache.close()
    server = start_server(home, disk=True)
    again = join_server(home)
    until(lambda: held(again, keys) == 5)
    again.close()
    server.stop()


ELSEWHERE = """
import runpy, signal, threading, time
from kv_server.server import CacheServer

serve = CacheServer.serve


def served(self):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    serve(self)


CacheServer.serve = served
runpy.run_module("kv_server", run_name="__main__", alter_sys=True)
"""
"""`kv-server` that gets SIGTERM on a thread that does not serve, as if it came just before the one that does waits."""


def test_a_signal_that_interrupts_no_wait_ends_it_too(home: Path) -> None:
    options = ["--capacity", "1MiB", "--socket", str(home / "s")]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", ELSEWHERE, *options], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert line(process.stdout).startswith("READY")
        report_of(home / "s")  # it waits for requests from now on, however long
        process.terminate()
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_terminal_that_closes_does_not_end_what_nohup_started(home: Path) -> None:
    process = command(home, ignored=signal.SIGHUP)
    assert line(process.stdout).startswith("READY")
    cache = join_server(home)
    store(cache, key_chain(5))
    process.send_signal(signal.SIGHUP)
    assert held(cache, key_chain(5)) == 5
    cache.close()
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_what_it_makes_is_closed_to_others_whatever_the_umask(home: Path) -> None:
    """Socket, lock, disk, trace and token, in a directory that others may look into."""
    settings = settings_for(home, disk=True)
    settings |= {"observe": {"record": str(home / "trace"), "log": "text"}}
    settings |= {"http": {"listen": "127.0.0.1:0", "token_file": str(home / "token")}}
    before = os.umask(0)
    try:
        server = launch(settings, socket=home / "own" / "s")
    finally:
        os.umask(before)
    cache = join_at(home / "own" / "s")
    store(cache, key_chain(3))
    cache.lookup(key_chain(3), "r")
    until(lambda: list(home.glob("trace*")) and list(home.glob("disk/*/slab-*")))
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in home.rglob("*")}
    cache.close()
    server.stop()
    assert {"s", "s.lock", "own", "disk", "lock", "index", "slab-0000", "token"} <= made.keys()
    assert not [name for name, mode in made.items() if mode & 0o077]


def test_it_serves_though_nobody_reads_that_it_is_ready(home: Path) -> None:
    unread, output = os.pipe()
    os.close(unread)
    process = command(home, stdout=output)
    os.close(output)

    def answers() -> bool:
        with suppress(TierDown):
            return ask_server(home / "s", wire.Ping()) == wire.Done()
        return False

    until(answers, 30)
    cache = join_server(home)
    store(cache, key_chain(5))
    assert held(cache, key_chain(5)) == 5
    cache.close()
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors and "no process reads the line" in errors
    assert not (home / "s").exists()


def test_a_private_server_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="the cache server"):
        launch({"host": {"capacity_bytes": "1MiB"}, "teirs": []})
    assert "did you mean 'tiers'" in capfd.readouterr().err


def test_what_a_tiers_package_prints_is_neither_its_ready_line_nor_its_end(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its standard output is how a private server says that it is ready, and that it has ended."""
    code = (
        "from kv_tiers.build import tier_factory\n"
        "print('loud is imported')\n"
        "def make(options, context):\n"
        "    print('loud is made', flush=True)\n"
        "    return tier_factory('dram')(options, context)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(plugin(home, "loud", code)))
    tiers = [{"type": "loud", "capacity_bytes": "1MiB"}]
    server = launch({"host": {"capacity_bytes": "1MiB"}, "tiers": tiers}, socket=home / "s")
    cache = join_server(home)
    assert server.is_running()
    cache.close()
    server.stop()
    assert not server.is_running()
    assert {"loud is imported", "loud is made"} <= set(capfd.readouterr().err.splitlines())


def plugin(home: Path, name: str, code: str) -> Path:
    """A package that offers a tier of this name. Returns what belongs in PYTHONPATH."""
    info = home / "path" / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[kv_tiers.tiers]\n{name} = {name}:make\n")
    (home / "path" / f"{name}.py").write_text(code)
    return home / "path"


def test_a_detached_server_that_hangs_while_it_starts_is_ended(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else knows of it."""
    started = home / "started"
    code = f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    monkeypatch.setenv("PYTHONPATH", str(plugin(home, "hung", code)))
    config = {"host": {"capacity_bytes": "1MiB"}, "tiers": [{"type": "hung"}]}
    with pytest.raises(ConfigError, match="not ready within"):
        launch(config, socket=home / "s", ready_s=6.0, detached=True)
    pid = int(started.read_text())
    until(lambda: not lives(pid))


def lives(pid: int) -> bool:
    """Whether this process, which may be nobody's child, has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_private_server_that_the_system_does_not_start_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no memory for a process, starting it is tried again and again."""
    monkeypatch.setattr(sys, "executable", str(home / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    gc.collect()  # earlier tests' clients would let go of their pools meanwhile
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="none"):
        launch({"host": {"capacity_bytes": "1MiB"}})
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert list(home.iterdir()) == []


def test_a_private_server_that_ended_can_be_stopped_twice() -> None:
    server = launch({"host": {"capacity_bytes": "1MiB"}})
    assert server.is_running()
    home = server.socket.parent
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    server.stop()
    assert not server.is_running()
    assert not home.exists()


def test_where_a_server_is_and_what_it_cannot_be(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    assert default_socket("x") == home / f"kv-tiers-{os.geteuid()}" / "x.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "nowhere"))
    assert default_socket("x").parent.parent == Path(tempfile.gettempdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_runtime_directory_is_not_used(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    with tempfile.TemporaryDirectory() as readable:
        os.chmod(readable, 0o755)
        for runtime in (readable, str(home / "closed")):
            monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
            os.seteuid(12345)
            try:
                socket = default_socket("x")
            finally:
                os.seteuid(0)
            assert socket.parent.parent == Path(tempfile.gettempdir())


def test_a_container_without_a_place_for_temporary_files_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """`kv-server --help` names the default place, and so does every start."""

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for runtime, parent in ((home, home), (home / "nowhere", Path("/tmp"))):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert default_socket("x").parent.parent == parent


def test_a_server_has_a_socket_wherever_temporary_files_are(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system's directory and an engine's name together are longer than a socket's path may be."""
    engine = "engine-6f1c7b0e-55bd-4b3c-8a53-0d1f0e5d9c11_dp0-node1"
    scratch = Path("/tmp/job.4711.of.a.cluster.whose.name.is.long.example.org")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert default_socket("x").is_relative_to(scratch)
    assert default_socket(engine) == Path(f"/tmp/kv-tiers-{os.geteuid()}/{engine}.sock")
    server = launch({"host": {"capacity_bytes": "1MiB"}}, socket=default_socket(engine))
    server.stop()
    for wrong in (
        {"server": {"max_formats": 0}},
        {"server": {"name": "a/b"}},
        {"server": {"socket": "/" + "a" * 120}},
        {"server": {"sokcet": "s"}},
    ):
        with pytest.raises(ConfigError):
            read_config(wrong)


def test_the_command_says_what_is_wrong(home: Path) -> None:
    for arguments in (["--config", str(home / "none")], ["--capacity", "lots"]):
        done = subprocess.run(
            [sys.executable, "-m", "kv_server", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 2
        assert done.stderr.startswith("kv-server: ")


def test_a_shared_pool_cannot_be_cut_short() -> None:
    pool = HostPool.shared("s", CHUNK_BYTES, 4)
    seen = MappedPool("s", (CHUNK_BYTES,), 4, os.dup(pool.descriptor))
    slot = pool.allocate()
    assert slot is not None
    assert pool.back([slot]) == set()
    seen.view[:3] = b"abc"
    with pool.chunk(slot, CHUNK_BYTES) as chunk:
        assert bytes(chunk[:3]) == b"abc"
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(pool.descriptor, 0)
    pool.close()
    assert bytes(seen.view[:3]) == b"abc"


def test_without_memfd_an_unlinked_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pool = HostPool.shared("s", CHUNK_BYTES, 4)
    assert os.fstat(pool.descriptor).st_nlink == 0
    assert pool.back([0, 1]) == set()
    assert os.fstat(pool.descriptor).st_blocks * 512 == 2 * SLOT_BYTES
    pool.close()


def test_only_a_shared_pool_has_a_descriptor() -> None:
    pool = HostPool.anonymous("p", CHUNK_BYTES, 1)
    with pytest.raises(MisuseError, match="not shared"):
        _ = pool.descriptor
    pool.close()
