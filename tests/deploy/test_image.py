"""The image, as far as a machine without images can run it: the Dockerfile's own commands over this machine's system,
and the server over the result as a container has it: read-only, as any user, as process 1 of its own namespaces.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from kv_testing.wait import line

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "image" / "Dockerfile").read_text()
BASE = shlex.split("""
    bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/sbin /sbin --symlink usr/lib /lib
    --symlink usr/lib64 /lib64 --proc /proc --dev /dev --dir /opt --dir /etc --dir /run --dir /var --dir /var/cache
    --dir /etc/kv --die-with-parent --unshare-pid --unshare-ipc --unshare-uts
    --clearenv --setenv PATH /opt/kv-server/bin:/usr/sbin:/usr/bin:/bin
""")
MAY_SET_USER = ["--cap-drop", "ALL"] + [
    part for name in ("SETUID", "SETGID", "SETPCAP") for part in ("--cap-add", f"CAP_{name}")
]
USER = "setpriv --reuid {0} --regid {0} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all".format

CLIENT = """
import sys, time
from pathlib import Path
from kv_core.testing import key_chain
from kv_server import RemoteCache

cache = RemoteCache(Path("/run/kv/server/kv.sock"), group_bytes=(4096,), fingerprint="my-format", connect_timeout_s=5)
keys = key_chain(3, branch="image")
if sys.argv[1] == "store":
    cache.commit(cache.begin_store(keys, holder="writer"))
end = time.monotonic() + 20
while (found := cache.lookup(keys, holder="reader", wait_for_promotion=True).chunks) < 3 and time.monotonic() < end:
    pass  # they are on their way from disk
print(found)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Stage(NamedTuple):
    """Of the Dockerfile."""

    runs: list[str]
    health: list[str]


def stage(name: str) -> Stage:
    text = re.split(r"^FROM ", re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)), flags=re.M)
    (found,) = (part for part in text if part.splitlines() and part.splitlines()[0].endswith(f" AS {name}"))
    health = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])", found, re.M)
    return Stage(re.findall(r"^RUN (.*)", found, re.M), json.loads(health[0]) if health else [])


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `opt` as the image has it."""
    if os.geteuid() or not shutil.which("bwrap"):
        pytest.skip("running it as other users needs root and bubblewrap")
    if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip"], capture_output=True, check=False).returncode:
        pytest.skip("the system's Python makes no virtual environments (Debian: python3-venv)")
    made = tmp_path_factory.mktemp("image")
    leave = shutil.ignore_patterns("tests", "__pycache__", "*.so")
    shutil.copytree(ROOT / "packages", made / "source" / "packages", ignore=leave)
    binds = [
        part
        for name in ("source", "wheels", "build", "opt/kv-server")
        for part in ("--bind", str(made / name), f"/{name}")
    ]
    for name in ("wheels", "build", "opt/kv-server"):
        (made / name).mkdir(parents=True)
    inside = [*BASE, "--ro-bind", "/etc", "/etc", "--tmpfs", "/tmp", *binds, "--chdir", "/source"]
    inside += [
        part
        for name in ("PIP_CERT", "SSL_CERT_FILE")
        if name in os.environ
        for part in ("--setenv", name, os.environ[name])
    ]
    for command in stage("wheels").runs:
        ran = subprocess.run([*inside, "sh", "-c", command], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
    return made


class Container(NamedTuple):
    user: int
    process: "subprocess.Popen[str]"
    pid: int
    """Of its process 1, here."""

    def run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        """As `docker exec` and `kubectl exec` do."""
        enter = ["nsenter", "--target", str(self.pid), "--all", "--wd=/", *USER(self.user).split(), *command]
        environment = {"PATH": "/opt/kv-server/bin:/usr/sbin:/usr/bin:/bin"}
        return subprocess.run(enter, capture_output=True, text=True, env=environment, timeout=60, check=False)


def confined(image: Path, volumes: Path, user: int) -> list[str]:
    binds = ["--ro-bind", str(image / "opt" / "kv-server"), "/opt/kv-server"]
    binds += ["--ro-bind", str(ROOT / "deploy" / "image" / "kv.yaml"), "/etc/kv/kv.yaml"]
    binds += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    binds += ["--setenv", "PYTHONDONTWRITEBYTECODE", "1"]
    for path in ("run/kv", "var/cache/kv"):
        binds += ["--bind", str(volumes / path), f"/{path}"]
    return [*BASE, *binds, "--unshare-net", "--remount-ro", "/", *MAY_SET_USER, "--as-pid-1", *USER(user).split()]


@pytest.fixture(params=[10001, 1000700000], ids=["its own user", "any user"])
def start(request: pytest.FixtureRequest, image: Path, tmp_path: Path) -> Iterator[Callable[[], Container]]:
    """Starts a server; its volumes are the same each time."""
    inside = [*BASE, "--bind", str(tmp_path / "run"), "/run", "--bind", str(tmp_path / "var"), "/var"]
    (tmp_path / "run").mkdir()
    (tmp_path / "var" / "cache").mkdir(parents=True)
    for command in stage("server").runs:
        subprocess.run([*inside, "sh", "-c", command], check=True)
    with ExitStack() as ends:

        def started() -> Container:
            return ends.enter_context(server(image, tmp_path, request.param))

        yield started


@contextmanager
def server(image: Path, volumes: Path, user: int) -> Iterator[Container]:
    reader, writer = os.pipe()
    command = [*confined(image, volumes, user), "kv-server", "--config", "/etc/kv/kv.yaml"]
    command[1:1] = ["--json-status-fd", str(writer)]
    with (
        os.fdopen(reader) as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[writer]) as process,
    ):
        os.close(writer)
        pid = json.loads(status.readline())["child-pid"]
        try:
            assert line(process.stdout).startswith("READY /run/kv/server/kv.sock 1 ")
            yield Container(user, process, pid)
        finally:
            if process.poll() is None:
                os.kill(pid, signal.SIGKILL)  # a process that has changed its user would outlive bwrap


def client(image: Path, volumes: Path, user: int, verb: str) -> "subprocess.CompletedProcess[str]":
    """An engine's, in a pod of its own."""
    command = [*confined(image, volumes, user), "/opt/kv-server/bin/python", "-c", CLIENT, verb]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_server_runs_read_only_as_any_user_and_is_healthy(start: Callable[[], Container]) -> None:
    container = start()
    status = Path(f"/proc/{container.pid}/status").read_text()
    assert re.search(rf"^Uid:\t{container.user}\t", status, re.M) and re.search(r"^CapBnd:\t0+$", status, re.M)
    assert "Read-only" in container.run(["touch", "/opt/kv-server/x", "/x"]).stderr
    assert container.run(stage("server").health).returncode == 0
    for host in ("localhost:9400", "10.1.2.3:9400", "[fd00::1]:9400"):  # what probes say that know an address only
        asked = f"print(r.urlopen(r.Request('http://127.0.0.1:9400/readyz', headers={{'Host': '{host}'}})).status)"
        asked = f"import urllib.request as r; {asked}"
        assert container.run(["python3", "-c", asked]).stdout == "200\n", host
    assert all(container.run(["python", "-c", f"import {name}"]).returncode for name in ("vllm", "sglang", "torch"))


def test_engines_in_other_namespaces_share_the_pool_if_their_user_is_the_servers(
    start: Callable[[], Container], image: Path, tmp_path: Path
) -> None:
    user = start().user
    assert client(image, tmp_path, user, "store").stdout == "3\n"
    assert client(image, tmp_path, user, "find").stdout == "3\n"
    refused = client(image, tmp_path, user + 1, "find")
    assert refused.returncode and "3\n" not in refused.stdout


def test_a_server_that_is_stopped_and_started_again_finds_its_chunks(
    start: Callable[[], Container], image: Path, tmp_path: Path
) -> None:
    container = start()
    assert client(image, tmp_path, container.user, "store").stdout == "3\n"
    os.kill(container.pid, signal.SIGTERM)
    assert container.process.wait(60) == 0
    start()
    assert client(image, tmp_path, container.user, "find").stdout == "3\n"
