"""An engine's private server, when the engine ends by a signal: what waits is stored below, and nothing is left.

Real processes: an engine that makes its cache as engines do, with a child of its own, in a process group of its own.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_core.testing import key_chain
from kv_server import RemoteCache, launch
from kv_server.process import ServerProcess
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import line, until
from kv_tiers.pool.host_pool import slot_bytes_for
from kv_tiers.testing.tier_contract import content

SLOTS = 40
CHUNKS = 12

# Stores chunks that only `write: back` stores below, says where its server is, and computes for ever.
ENGINE = """
import json, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from kv_core.testing import key_chain
from kv_connect.open_cache import Format, open_remote
from kv_tiers.settings import load
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.testing.tier_contract import content

settings, _ = load(json.loads(sys.argv[1]), {})
cache, server = open_remote(settings, Format((CHUNK_BYTES,), "f"), engine_id=sys.argv[2], is_first=True, facts={})
lease = cache.begin_store(key_chain(int(sys.argv[3])), "w")
for key, extent in zip(lease.keys, lease.extents, strict=True):
    cache.pool.view[extent.offset : extent.offset + extent.nbytes] = content(key, extent.nbytes)
cache.commit(lease)
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(server.pid, server.socket, flush=True)
sys.stdin.read()
"""


class Engine:
    """One in a process group of its own, as a service manager or a shell starts it."""

    def __init__(self, home: Path) -> None:
        self.disk = {"type": "disk", "directory": str(home / "disk"), "capacity_bytes": "64MiB", "write": "back"}
        extra = {"host": {"capacity_bytes": str(SLOTS * slot_bytes_for(CHUNK_BYTES))}, "tiers": [self.disk]}
        self.id = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(extra), self.id, str(CHUNKS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(home)},
        )  # fmt: skip
        assert self.process.stdout is not None
        pid, path = line(self.process.stdout).split()
        self.server, self.socket = int(pid), Path(path)
        self._pidfd = os.pidfd_open(self.server)

    def tree(self) -> list[int]:
        """The engine and its descendants."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
        found = [self.process.pid]
        for pid in found:
            found += parents.get(pid, [])
        return found

    def server_ends(self, within_s: float = 30) -> bool:
        return bool(select.select([self._pidfd], [], [], within_s)[0])

    def close(self) -> None:
        for pid in [*self.tree(), *([] if self.server_ends(0) else [self.server])]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate(timeout=30)
        os.close(self._pidfd)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:  # a socket's path must be short
        made = Engine(Path(home))
        yield made
        made.close()


def to_group(*numbers: int) -> Callable[[Engine], None]:
    def send(engine: Engine) -> None:
        for number in numbers:
            os.killpg(engine.process.pid, number)

    return send


def to_tree(*numbers: int) -> Callable[[Engine], None]:
    """As engines and supervisors do: all descendants, found before the first is gone."""

    def send(engine: Engine) -> None:
        pids = engine.tree()
        for number in numbers:
            for pid in pids:
                os.kill(pid, number)

    return send


def to_engine(number: int) -> Callable[[Engine], None]:
    return lambda engine: os.kill(engine.process.pid, number)


def left_in(engine: Engine) -> list[str]:
    return sorted(path.name for path in engine.socket.parent.iterdir())


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(to_group(signal.SIGTERM), id="SIGTERM to the group"),
        pytest.param(to_tree(signal.SIGTERM), id="SIGTERM to the tree", marks=pytest.mark.slow),
        pytest.param(
            to_group(signal.SIGTERM, signal.SIGKILL), id="SIGTERM and SIGKILL to the group", marks=pytest.mark.slow
        ),
        pytest.param(
            to_tree(signal.SIGTERM, signal.SIGKILL), id="SIGTERM and SIGKILL to the tree", marks=pytest.mark.slow
        ),
        pytest.param(to_group(signal.SIGINT), id="Ctrl-C"),
        pytest.param(to_engine(signal.SIGKILL), id="SIGKILL to the engine"),
    ],
)
def test_what_waits_is_stored_when_the_engine_ends(engine: Engine, end: Callable[[Engine], None]) -> None:
    end(engine)
    assert engine.server_ends()
    assert left_in(engine) == []
    heir = launch({"host": {"capacity_bytes": SLOTS * slot_bytes_for(CHUNK_BYTES)}, "tiers": [engine.disk]})
    cache = RemoteCache(heir.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f")
    until(lambda: cache.lookup(key_chain(CHUNKS), "r", wait_for_promotion=True).chunks == CHUNKS)
    lease = cache.load(key_chain(CHUNKS), "l")
    for key, extent in zip(lease.keys, lease.extents, strict=True):  # type: ignore[union-attr]
        assert cache.pool.view[extent.offset : extent.offset + extent.nbytes] == content(key, extent.nbytes)
    cache.close()
    heir.stop()


def test_a_child_of_the_engine_that_lives_on_does_not_keep_the_server(tmp_path: Path) -> None:
    """One that was forked has what the engine had open, also what the server takes for the engine's life."""
    code = (
        "import os, sys, time\n"
        "from kv_server import launch\n"
        "server = launch({'host': {'capacity_bytes': '1MiB'}}, detached=True)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    print(server.pid, child, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server, child = map(int, line(process.stdout).split())
    watched, lives = os.pidfd_open(server), os.pidfd_open(child)
    process.kill()
    assert select.select([watched], [], [], 15)[0]
    assert not select.select([lives], [], [], 0)[0]
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=30)
    os.close(watched)
    os.close(lives)


def test_a_private_server_in_a_directory_of_its_own_takes_that_with_it() -> None:
    code = (
        "import sys\n"
        "from kv_server import launch\n"
        "server = launch({'host': {'capacity_bytes': '1MiB'}})\n"
        "print(server.pid, server.socket, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, path = line(process.stdout).split()
    watched = os.pidfd_open(int(pid))
    process.kill()
    process.communicate(timeout=30)
    assert select.select([watched], [], [], 15)[0]
    os.close(watched)
    assert not Path(path).parent.exists()


def start(home: Path, name: str = "kv") -> ServerProcess:
    return launch({"host": {"capacity_bytes": "1MiB"}}, socket=directory(home) / f"{name}.sock")


def directory(home: Path) -> Path:
    """As a user's own is called."""
    return home / f"kv-tiers-{os.geteuid()}"


def test_a_killed_server_hinders_no_later_one_and_its_files_go(tmp_path: Path) -> None:
    killed = start(tmp_path, "engine-1")
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not killed.is_running())
    assert sorted(path.name for path in directory(tmp_path).iterdir()) == ["engine-1.sock", "engine-1.sock.lock"]
    other = start(tmp_path, "engine-2")  # whoever comes next into the directory tidies up
    assert sorted(path.name for path in directory(tmp_path).iterdir()) == ["engine-2.sock", "engine-2.sock.lock"]
    again = start(tmp_path, "engine-1")
    RemoteCache(again.socket, group_bytes=(4096,), fingerprint="f").close()
    for server in (killed, other, again):
        server.stop()
    assert list(directory(tmp_path).iterdir()) == []


def test_stopping_removes_what_a_killed_server_left(tmp_path: Path) -> None:
    killed = start(tmp_path)
    os.kill(killed.pid, signal.SIGKILL)
    killed.stop()
    assert list(directory(tmp_path).iterdir()) == []


def test_a_lock_that_was_removed_meanwhile_is_no_lock(tmp_path: Path) -> None:
    """Two that start at once: one has opened the lock file that the other, which ends, removes."""
    first = start(tmp_path)
    path = Path(f"{first.socket}.lock")
    with path.open("r+b") as waiting:
        first.stop()
        assert not path.exists()
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of a file that is nobody's
        second = start(tmp_path)
        assert path.exists()
        second.stop()


def test_the_owner_waits_for_as_long_as_draining_may_take(tmp_path: Path) -> None:
    plain = start(tmp_path, "plain")
    assert plain.stop_s >= 15
    plain.stop()
    slow = launch(
        {"host": {"capacity_bytes": "1MiB"}, "cold": {"drain_s": 100.0}}, socket=directory(tmp_path) / "kv.sock"
    )
    assert slow.stop_s > 100
    began = time.monotonic()
    slow.stop()
    assert time.monotonic() - began < 50  # there was nothing to drain
