"""The systemd unit: verified by systemd's own tool, and a server that works under the unit's limits on system calls."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from secrets import token_hex
from urllib.request import urlopen

import pytest
from kv_core.testing import key_chain
from kv_testing.cache_servers import held, join_at, store
from kv_testing.wait import line
from kv_tiers.pool.host_pool import pool_path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kv-server.service"
ANALYZE = shutil.which("systemd-analyze")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ANALYZE, reason="there is no systemd-analyze")]

CONFINED = """
import ctypes, errno, os, sys
import pyseccomp
if sys.argv[1] == "yes":  # MemoryDenyWriteExecute; older kernels lack it
    ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)  # PR_SET_MDWE
filter = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
for name in sys.argv[2].split():
    try:
        filter.add_rule(pyseccomp.ALLOW, name)
    except (RuntimeError, OSError):
        pass  # of another architecture
filter.load()
os.execv(sys.executable, [sys.executable, "-m", "kv_server", *sys.argv[3:]])
"""


def options(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.M)


def calls(name: str) -> set[str]:
    """Of a set of systemd's, or a call itself."""
    if not name.startswith("@"):
        return {name}
    said = subprocess.run([str(ANALYZE), "syscall-filter", name], capture_output=True, text=True, check=True).stdout
    inside = [text.strip() for text in said.splitlines()[1:] if text.strip() and not text.strip().startswith("#")]
    return set().union(*map(calls, inside))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with the unit, systemd's own, and commands that do nothing."""
    shutil.copytree("/usr/lib/systemd/system", tmp_path / "usr/lib/systemd/system", symlinks=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    shutil.copy(UNIT, tmp_path / "etc/systemd/system")
    for told in options("ExecStart") + options("ExecReload"):
        command = tmp_path / told.split()[0].lstrip("/")
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)
    return tmp_path


def analyze(root: Path, *verb: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ANALYZE), *verb, f"--root={root}", "--no-pager", UNIT.name]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_unit_is_one_to_systemd(root: Path) -> None:
    verified = analyze(root, "verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    installed = root / "etc/systemd/system" / UNIT.name
    installed.write_text(UNIT.read_text().replace("WatchdogSec", "WatchdogSecs"))
    assert "WatchdogSecs" in analyze(root, "verify").stderr


def test_the_unit_is_hardened(root: Path) -> None:
    """Exposure at most 1.5 of 10: what is left is the network, and files that it must read."""
    rated = analyze(root, "security", "--offline=true", "--threshold=15")
    assert rated.returncode == 0, rated.stdout


def test_a_server_works_under_the_units_limits_on_system_calls(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    allowed: set[str] = set()
    for entry in options("SystemCallFilter"):
        named = set().union(*map(calls, entry.lstrip("~").split()))
        allowed = allowed - named if entry.startswith("~") else allowed | named
    assert "read" in allowed and "mount" not in allowed and "setpriority" not in allowed
    name = f"test-{token_hex(6)}"
    text = (UNIT.parent / "kv.yaml").read_text().replace("name: kv ", f"name: {name} ")
    text = text.replace("64GiB", "64MiB").replace("500GiB", "1GiB")
    settings = tmp_path / "kv.yaml"
    settings.write_text(re.sub(r"/(run|var/cache|var/lib)/kv-server", str(tmp_path), text).replace(":9400", ":0"))
    (limits,) = options("MemoryDenyWriteExecute")
    command = [sys.executable, "-c", CONFINED, limits, " ".join(sorted(allowed)), "--config", str(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            ready = line(process.stdout).split()
            assert ready[:1] == ["READY"], process.communicate()
            assert "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text()
            cache = join_at(tmp_path / "kv.sock")
            store(cache, key_chain(3, branch="unit"))
            assert held(cache, key_chain(3, branch="unit")) == 3
            cache.close()
            with urlopen(f"{ready[3]}readyz", timeout=30) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert any((tmp_path / "chunks").rglob("slab-*"))
    left = sorted(pool_path(name).parent.glob(f"{name}.*"))
    assert [path.suffix for path in left][1:] == [".index"]  # for the next server
    for path in left:
        path.unlink()
