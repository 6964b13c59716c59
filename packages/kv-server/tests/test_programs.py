"""Programs beside a server learn what is served, are started again if they fail, and end with it, however it ends."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from kv_core.errors import ConfigError
from kv_server import launch, programs
from kv_server.config import read_config
from kv_server.programs import Programs
from kv_testing.cache_servers import settings_for
from kv_testing.upgrades import UpgradedServers
from kv_testing.wait import until
from kv_tiers.settings import load

# Writes its number and what it was told to a file of its own, and then does what its second argument says.
PROGRAM = """\
import json, os, pathlib, signal, subprocess, sys, time
home, what = pathlib.Path(sys.argv[1]), sys.argv[2]
child = subprocess.Popen(["sleep", "600"]) if what == "forks" else None
if what == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
told = {name: text for name, text in os.environ.items() if name.startswith("KV_SERVER_")}
told["child"] = child.pid if child else 0
(home / ".new").write_text(json.dumps(told))
(home / ".new").rename(home / f"{time.time_ns()}.{os.getpid()}")
if what.isdigit():
    sys.exit(int(what))
time.sleep(600)
"""


def command(home: Path, what: str = "waits") -> list[str]:
    home.mkdir(exist_ok=True)
    return [sys.executable, "-c", PROGRAM, str(home), what]


def started(home: Path) -> list[Path]:
    """What was started, the first first. Its suffix is its number."""
    return sorted(home.glob("[0-9]*"))


def pid_of(path: Path) -> int:
    return int(path.suffix[1:])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_learns_what_is_served_and_ends_with_the_server(tmp_path: Path) -> None:
    told = tmp_path / "told"
    server = launch(
        {
            "host": {"capacity_bytes": "1MiB"},
            "http": {"listen": "127.0.0.1:0"},
            "peers": {"listen": "127.0.0.1:0", "unprotected": True},
            "server": {"programs": [command(told, "forks")]},
        }
    )
    until(lambda: started(told))
    (mine,) = started(told)
    says = json.loads(mine.read_text())
    child = says.pop("child")
    assert says == {
        "KV_SERVER_SOCKET": str(server.socket),
        "KV_SERVER_PID": str(server.pid),
        "KV_SERVER_HTTP": server.url,
        "KV_SERVER_PEERS": server.peers,
    }
    assert load({}, says)[0].server.socket == str(server.socket)  # an engine that it starts joins the server
    assert runs(pid_of(mine)) and runs(child)
    server.stop()
    assert not runs(pid_of(mine))
    until(lambda: not runs(child))  # which it had started


def test_one_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    server = launch({"host": {"capacity_bytes": "1MiB"}, "server": {"programs": [command(told)]}})
    until(lambda: started(told))
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not runs(pid_of(started(told)[0])))
    server.stop()


def test_a_server_that_takes_over_starts_its_own(home: Path) -> None:
    told = home / "told"
    settings = settings_for(home, 8)
    settings["server"] = {**settings.get("server", {}), "programs": [command(told)]}  # type: ignore[dict-item]
    servers = UpgradedServers(home, settings)
    until(lambda: len(started(told)) == 1)
    servers.upgrade()
    until(lambda: len(started(told)) == 2)
    first, second = map(pid_of, started(told))
    assert not runs(first) and runs(second)
    servers.close()
    until(lambda: not runs(second))


def test_one_that_fails_is_started_again_and_one_that_is_done_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(programs, "_FIRST_REST_S", 0.01)
    monkeypatch.setattr(programs, "_MAX_REST_S", 0.02)
    fails, done = tmp_path / "fails", tmp_path / "done"
    running = Programs([command(fails, "3"), command(done, "0")])
    running.start({})
    until(lambda: len(started(fails)) >= 4 and started(done))
    running.stop()
    assert f"server.programs[0] ({sys.executable}) has ended with status 3; it is started again in 0.01" in caplog.text
    assert "it is started again in 0.02 s" in caplog.text
    assert "server.programs[1]" not in caplog.text
    count = len(started(fails))
    running.start({})  # by a server that takes over just as it is stopped
    assert (len(started(fails)), len(started(done))) == (count, 1)


def test_one_that_ignores_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "END_S", 0.3)
    running = Programs([command(tmp_path / "told", "stays")])
    running.start({})
    until(lambda: started(tmp_path / "told"))
    running.stop()
    assert not runs(pid_of(started(tmp_path / "told")[0]))


def test_one_that_cannot_be_run_says_so_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no-program").write_text("text")
    (tmp_path / "no-program").chmod(0o755)
    running = Programs([[str(tmp_path / "no-program")]])
    running.start({})
    says = []
    until(lambda: says.append(capfd.readouterr().err) or "".join(says))
    running.stop()
    assert "".join([*says, capfd.readouterr().err]) == f"{tmp_path}/no-program cannot be run: Exec format error\n"


@pytest.mark.parametrize("wrong", [[], ["/no/such/command"], ["no-such-command"]])
def test_what_is_no_command_stops_the_start(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"server.programs\[1\]: .*command"):
        read_config({"server": {"programs": [["true"], wrong]}})
