"""A service manager learns when a server serves, that its serving thread lives, and when it stops."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from kv_server import cli
from kv_server.cli import ServiceManager
from kv_testing.wait import line

SERVER = [sys.executable, "-m", "kv_server", "--capacity", "1MiB", "--http", "127.0.0.1:0"]


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The value of NOTIFY_SOCKET, and the socket of that name."""
    tmp_path.chmod(0o700)
    name = str(tmp_path / "notify") if request.param == "path" else f"@kv-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(60)
        listener.bind(name.replace("@", "\0"))
        yield name, listener


def test_a_server_says_that_it_serves_that_it_lives_and_that_it_stops(
    manager: tuple[str, socket.socket], tmp_path: Path
) -> None:
    name, listener = manager
    command = [*SERVER, "--socket", str(tmp_path / "s" / "kv.sock")]
    environment = os.environ | {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "20000"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert line(process.stdout).startswith("READY")
        heard = [listener.recv(100) for _ in range(6)]
        process.send_signal(signal.SIGTERM)
        while heard[-1] != b"STOPPING=1":
            heard.append(listener.recv(100))
        assert process.wait(60) == 0
    assert heard.count(b"READY=1") == heard.count(b"STOPPING=1") == 1
    assert set(heard) == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}


def test_signs_of_life_come_from_the_serving_thread(manager: tuple[str, socket.socket]) -> None:
    name, listener = manager
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    ours = ServiceManager(environment)
    assert environment == {"HOME": "/"}  # what we start speaks for itself
    submitted: SimpleQueue[Callable[[], None]] = SimpleQueue()
    ours.keep_alive(submitted.put)
    first, second = submitted.get(timeout=60), submitted.get(timeout=60)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(100)
    first()
    second()
    assert listener.recv(100) == listener.recv(100) == b"WATCHDOG=1"
    ours.stopping()
    assert listener.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_no_signs_of_life_are_given_where_none_are_asked_of_us(watchdog: dict[str, str]) -> None:
    def submit(_: Callable[[], None]) -> None:
        raise AssertionError

    ServiceManager({"NOTIFY_SOCKET": "@nobody"} | watchdog).keep_alive(submit)


def test_a_private_server_leaves_the_manager_to_its_engine(manager: tuple[str, socket.socket], tmp_path: Path) -> None:
    name, listener = manager
    reader, writer = os.pipe()
    command = [*SERVER, "--socket", str(tmp_path / "s" / "kv.sock"), "--lifeline", str(reader)]
    environment = os.environ | {"NOTIFY_SOCKET": name}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, pass_fds=[reader]) as process:
        assert line(process.stdout).startswith("READY")
        os.close(writer)
        assert process.wait(60) == 0
    os.close(reader)
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(100)


def test_a_server_that_is_told_to_end_ends_the_process_that_was_to_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take it for killed, and serve in its place."""
    sleeping = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    monkeypatch.setattr(cli, "module_command", lambda module: sleeping)
    ours = ServiceManager({})
    successor = ours.start_successor(["--config", "kv.yaml", "--detach", "--take-over"])
    assert successor.args == [*sleeping, "--config", "kv.yaml", "--take-over"]
    assert successor.poll() is None
    ours.stopping()
    assert successor.wait(60) == -signal.SIGTERM


def test_a_manager_that_is_gone_stops_no_server(tmp_path: Path) -> None:
    command = [*SERVER, "--socket", str(tmp_path / "s" / "kv.sock")]
    environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "2000"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert line(process.stdout).startswith("READY")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
