"""A `kv-server` that does not see its clients' processes, as in a container of its own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_testing.wait import line

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]


@contextlib.contextmanager
def server_apart(directory: Path, settings: dict[str, Any], *, faulty: bool = False) -> Iterator[dict[str, Any]]:
    """What an engine says to join it. faulty: its tiers fail at random."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may not make PID namespaces")
    directory.chmod(0o700)
    file, path = directory / "kv.json", directory / "kv.sock"
    file.write_text(json.dumps(settings))
    server = [str(Path(__file__).with_name("faulty_server.py"))] if faulty else ["-m", "kv_server"]
    command = [*UNSHARE, sys.executable, *server, "--config", str(file), "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert line(process.stdout).startswith("READY")
            yield {"server": {"socket": str(path)}}
        finally:
            process.kill()  # and with it, by the kernel, the server
