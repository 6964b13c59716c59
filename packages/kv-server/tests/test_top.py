"""`kv top`, on real servers: in a terminal, as one picture, as JSON, and while the server is away."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from kv_core.coverage import ALL, STATE, ChunkShape
from kv_core.service import CacheCounts
from kv_core.testing import key_chain
from kv_server import RemoteCache, ServerProcess, launch
from kv_server.report import CacheReport, Report
from kv_server.tools.top import Picture, Watch, draw, plain_console
from kv_testing.http import store
from kv_testing.shapes import keys_for
from kv_testing.wait import line, until
from kv_tiers.tier import TierUsage
from kv_tiers.tier_state import Health, LaneCounts, SpillCounts, TierQuota, TierState

CHUNK_BYTES = 64 << 10
# Ctrl-C ends it as in a terminal, also where whoever runs the tests ignores SIGINT, as nohup and jobs of scripts do.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from kv_core.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMMAND = [sys.executable, "-c", CODE, "top"]


def start(home: Path) -> ServerProcess:
    disk = {"type": "disk", "name": "nvme", "directory": str(home / "kv"), "capacity_bytes": "64MiB"}
    return launch({"host": {"capacity_bytes": "4MiB"}, "tiers": [disk]}, socket=home / "s" / "kv.sock")


def join(server: ServerProcess, engine: str = "engine-1") -> RemoteCache:
    return RemoteCache(server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="llama", engine=engine)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=180, check=False)


class Terminal:
    """`kv top` in a terminal of its own, 120 by 40."""

    def __init__(self, *arguments: str, kind: str = "xterm-256color") -> None:
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": kind}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self.raw = b""

    def until(self, text: str, seconds: float = 30) -> str:
        """What was shown until this was, from now on."""
        self.raw = b""
        end = time.monotonic() + seconds
        while text not in (shown := self.shown()):
            assert select.select([self._end], [], [], max(0.0, end - time.monotonic()))[0], f"no {text!r} in {shown}"
            self.raw += os.read(self._end, 1 << 16)
        return shown

    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw.decode(errors="replace"))

    def end(self, seconds: float = 30) -> int:
        self.process.send_signal(signal.SIGINT)
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # the other side is closed
            while select.select([self._end], [], [], max(0.0, end - time.monotonic()))[0]:
                self.raw += os.read(self._end, 1 << 16)
        os.close(self._end)
        return self.process.wait(max(1.0, end - time.monotonic()))


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    made: list[Terminal] = []
    yield made
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait(60)


def test_in_a_terminal_it_follows_the_server_and_says_when_it_is_away(
    tmp_path: Path, terminals: list[Terminal]
) -> None:
    server = start(tmp_path)
    cache = join(server, "engine \x1b[31m-1")
    store(cache, 30)
    assert cache.lookup(key_chain(40), "r").chunks == 30
    terminal = Terminal("--socket", str(server.socket), "--every", "0.1")
    terminals.append(terminal)
    shown = terminal.until("nvme")
    assert f"process {server.pid}" in shown
    shown += terminal.until("75.0% in all")
    shown += terminal.until("engine \\x1b[31m-1")  # no engine's name moves the cursor
    assert "● up" in shown
    cache.close()
    server.stop()
    shown = terminal.until("away at")
    assert "no server answers" in shown
    shown = terminal.until("the last known state")
    server = start(tmp_path)
    terminal.until(f"process {server.pid}")
    assert "away" not in terminal.until("0 sessions")
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.raw  # the terminal is as it was
    server.stop()


def test_it_waits_for_a_server_that_is_not_there_yet(tmp_path: Path, terminals: list[Terminal]) -> None:
    socket = tmp_path / "s" / "kv.sock"
    terminal = Terminal("--socket", str(socket), "--every", "0.1")
    terminals.append(terminal)
    terminal.until("away at")
    server = start(tmp_path)
    terminal.until(f"process {server.pid}")
    assert terminal.end() == 0
    server.stop()


def test_a_terminal_without_a_cursor_gets_one_plain_picture(tmp_path: Path, terminals: list[Terminal]) -> None:
    server = start(tmp_path)
    terminal = Terminal("--socket", str(server.socket), "--every", "0.1", kind="dumb")
    terminals.append(terminal)
    terminal.until(f"process {server.pid}")
    assert terminal.process.wait(30) == 0
    server.stop()


def test_once_is_one_plain_picture(tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = join(server)
    store(cache, 16)
    for arguments in (["--once"], []):  # nor is there a terminal here
        done = run("--socket", str(server.socket), "--every", "0.1", *arguments)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        (host,) = [line.split() for line in done.stdout.splitlines() if line.startswith("host ")]
        assert host[1:6] == ["1.0", "MiB", "4.0", "MiB", "16"]
        assert "engine-1" in done.stdout
        assert "25%" in done.stdout
    cache.close()
    server.stop()


def test_chunks_of_several_groups_of_layers_are_counted_once_in_every_tier(tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = RemoteCache(server.socket, group_bytes=(CHUNK_BYTES, CHUNK_BYTES), fingerprint="hybrid")
    shape = ChunkShape(4, (ALL, STATE))
    keys = keys_for(shape, 5)
    lease = cache.begin_store(keys[:9], "w")  # the last chunk has no state
    cache.commit(lease)

    def shown() -> list[str]:
        done = run("--socket", str(server.socket), "--once", "--every", "0.05")
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if line.startswith(("host ", "nvme "))]

    until(lambda: all(" 5 (5 / 4) " in row for row in shown()))
    cache.close()
    server.stop()


def test_json_is_the_servers_report(tmp_path: Path) -> None:
    server = start(tmp_path)
    cache = join(server)
    store(cache, 3)
    done = run("--socket", str(server.socket), "--json", "--once")
    (only,) = done.stdout.splitlines()
    report = msgspec.json.decode(only, type=Report)
    assert (report.pid, report.caches[0].counts.chunks_resident) == (server.pid, 3)
    following = subprocess.Popen(
        [*COMMAND, "--socket", str(server.socket), "--json", "--every", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert following.stdout is not None and following.stderr is not None
    assert [json.loads(line(following.stdout))["pid"] for _ in range(3)] == [server.pid] * 3
    cache.close()
    server.stop()
    until(lambda: "top: away" in line(following.stderr))
    server = start(tmp_path)
    until(lambda: json.loads(line(following.stdout))["pid"] == server.pid)
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 0
    following.stdout.close()
    following.stderr.close()
    server.stop()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--socket", "/nowhere/kv.sock", "--once"], "start one with kv-server"),
        (["--socket", "/nowhere/kv.sock", "--json", "--once"], "start one with kv-server"),
        (["--name", "no-such-server", "--once"], "no-such-server.sock"),
        (["--every", "0"], "0.05 to 3600"),
        (["--every", "nan"], "0.05 to 3600"),
    ],
)
def test_what_cannot_be_shown_is_said_with_status_2(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_without_rich_it_says_what_to_install(tmp_path: Path) -> None:
    server = start(tmp_path)
    code = "import sys; sys.modules['rich'] = None; from kv_core.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "top", "--socket", str(server.socket)]
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2
    assert "pip install 'kv-server[top]'" in done.stderr
    done = subprocess.run([*command, "--json", "--once"], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0
    server.stop()


# What is made of two reports.


def counts(**changes: int) -> CacheCounts:
    return CacheCounts(**{**dict.fromkeys(CacheCounts.__dataclass_fields__, 0), **changes})


def reported(
    at_s: float, loaded: int = 0, stored: int = 0, pid: int = 1, tier_name: str = "nvme", **changes: int
) -> Report:
    lane, spill = LaneCounts(loaded=loaded, stored=stored), SpillCounts(waiting=2, under_way=1)
    usage = TierUsage(quotas=(TierQuota("01", 700, 900),))
    tier = TierState(tier_name, Health.DOWN, "on fire", usage, lane, spill)
    fields = {"slots_total": 10, **changes}
    cache = msgspec.convert(
        {
            "chunk_bytes": 100, "group_bytes": [100], "fingerprint": "f", "pool": "p", "sessions": 0,
            "counts": msgspec.to_builtins(counts(**fields)), "held": {"chunks": 0, "payload_bytes": 0, "by_group": []},
            "tiers": [msgspec.to_builtins(tier)],
            "tenants": [{"name": "acme", "tag": "01", "chunks": 2, "used_bytes": 200, "quota_bytes": 300},
                        {"name": "", "tag": "00", "chunks": 1, "used_bytes": 100, "quota_bytes": None}],
            "tenants_known": 7, "name": "c1", "models": ["one\nmodel"],
        },
        CacheReport,
    )  # fmt: skip
    return Report(pid, "0", [], 0, [cache], uptime_s=at_s)


def drawn(picture: Picture, away: str = "") -> list[str]:
    console = plain_console()
    with console.capture() as captured:
        console.print(draw(picture, "here", away))
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_flows_are_differences_by_the_servers_clock() -> None:
    watch = Watch()
    first = drawn(watch.take(reported(10, loaded=5, stored=7, chunks_asked=10, chunks_hit=5)))
    name = first.index("cache c1 of one\\nmodel")
    assert first[name + 1].startswith("hit ratio – now, 50.0% in all ")
    assert "host 0 B 1000 B 0 – – 0 ░░░░░░░░░░░░ 0% ● up" in first
    assert "nvme – – – – – 3 ▲ down: on fire" in first
    later = reported(12, loaded=9, stored=8, chunks_asked=30, chunks_hit=20, chunks_committed=4, bytes_loaded=1500)
    second = drawn(watch.take(later))
    assert any(line.startswith("hit ratio 75.0% now, 66.7% in all ") for line in second)
    assert "host 0 B 1000 B 0 200 B 750 B 0 ░░░░░░░░░░░░ 0% ● up" in second
    assert "nvme – – – 50 B 200 B 3 ▲ down: on fire" in second
    same = {"chunks_asked": 30, "chunks_hit": 20, "chunks_committed": 4}
    idle = drawn(watch.take(reported(13, loaded=9, stored=8, bytes_loaded=1500, **same)))
    assert any(line.startswith("hit ratio – now, 66.7% in all ") for line in idle)
    assert "nvme – – – 0 B 0 B 3 ▲ down: on fire" in idle


def test_another_servers_report_is_no_difference() -> None:
    watch = Watch()
    watch.take(reported(10, loaded=5))
    for restarted in (reported(0.5, loaded=0), reported(11, loaded=3, pid=2)):
        assert "nvme – – – – – 3 ▲ down: on fire" in drawn(watch.take(restarted))


def test_a_tier_that_fails_is_told_in_words() -> None:
    text = "\n".join(drawn(Watch().take(reported(10)), "no answer"))
    assert "▲ down: on fire" in text
    assert "away at" in text
    assert "the last known state" in text


def test_tenants_are_told_by_name_with_their_quotas() -> None:
    lines = drawn(Watch().take(reported(10)))
    assert "acme 200 B 300 B 2 nvme 700 B of 900 B" in lines
    assert "(shared) 100 B – 1 –" in lines


def test_a_tiers_name_is_shown_as_it_is() -> None:
    for name in ("s3[eu]", "s3[/eu]"):
        assert name in "\n".join(drawn(Watch().take(reported(10, tier_name=name))))
