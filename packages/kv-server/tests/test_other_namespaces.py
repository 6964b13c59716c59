"""A server that does not see its clients' processes, as in a container of its own, with clients that lose it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_core.testing import key_chain
from kv_testing.cache_servers import SLOT_BYTES, join_at, read, report_of, store
from kv_testing.wait import line, until

SLOTS = 8
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]

# Reserves room, loses its connection and is stopped in the middle of its copy; goes on with it once it is continued.
WRITER = """
import os, signal, sys
from pathlib import Path
from kv_core.testing import key_chain
from kv_testing.cache_servers import die, join_at

cache = join_at(Path(sys.argv[1]))
lease = cache.begin_store(key_chain(4, branch="writer"), "w")
assert len(lease.keys) == 4
child = os.fork() if sys.argv[2] == "fork" else 0
if child:
    os._exit(0)  # without a word: what two processes say may be mixed up
print("copying", os.getpid(), flush=True)
die(cache)
os.kill(os.getpid(), signal.SIGSTOP)
for extent in lease.extents:
    cache.pool.view[extent.offset : extent.offset + extent.nbytes] = b"w" * extent.nbytes
print("copied", flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """The socket of a server in a PID namespace of its own. Its leases last half a second."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may not make PID namespaces")
    tmp_path.chmod(0o700)
    settings, path = tmp_path / "kv.yaml", tmp_path / "kv.sock"
    settings.write_text(f"host: {{capacity_bytes: {SLOTS * SLOT_BYTES}, lease_s: 0.5}}\n")
    command = [sys.executable, "-m", "kv_server", "--config", str(settings), "--socket", str(path)]
    with subprocess.Popen([*UNSHARE, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process.stdout).startswith("READY")
            yield path
        finally:
            process.kill()  # and with it, by the kernel, the server


@contextlib.contextmanager
def writer(path: Path, how: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["stop", "fork"])
def test_who_is_stopped_in_mid_copy_overwrites_nothing(server: Path, how: str) -> None:
    """For longer than a lease, when another client asks for all the room there is. With `fork` a child goes on
    copying whose parent has ended."""
    with contextlib.closing(join_at(server)) as other, writer(server, how) as process:
        pid = int(line(process.stdout).split()[1])
        stopped = Path(f"/proc/{pid}/stat")
        until(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T")
        assert {session.pid for session in report_of(server).sessions} == {0}

        def has_all() -> bool:
            lease = other.begin_store(key_chain(SLOTS), "w")
            other.release(lease)
            return len(lease.keys) == SLOTS

        with contextlib.suppress(AssertionError):
            until(has_all, 3)
        mine = store(other, key_chain(SLOTS)).keys
        os.kill(pid, signal.SIGCONT)
        assert line(process.stdout) == "copied\n"
        assert all(read(other, [key]) for key in mine)
        assert len(mine) == SLOTS - 4 and report_of(server).orphans == 1
        os.kill(pid, signal.SIGKILL)
        until(lambda: other.counts().slots_used == len(mine), 30)
