"""A program that runs beside a server and ends with it: it tells a registry where the server is while it serves, and
withdraws that at the end. Settings name it, word by word:

    server: {programs: [[python, /opt/kv/register.py, /run/registry]]}

The server tells it in its environment what is served, starts it again if it fails, and ends it with SIGTERM.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from kv_server import launch


def register(registry: Path) -> None:
    """The program. The registry is a directory here."""
    mine = registry / os.environ["KV_SERVER_PID"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        mine.write_text(os.environ["KV_SERVER_HTTP"])
        while True:
            time.sleep(10)  # a real one renews its entry
    finally:
        mine.unlink(missing_ok=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        program = [sys.executable, os.path.abspath(__file__), home]
        server = launch(
            {
                "host": {"capacity_bytes": "1MiB"},
                "http": {"listen": "127.0.0.1:0"},
                "server": {"programs": [program]},
            }
        )
        entry = Path(home, str(server.pid))
        until_s = time.monotonic() + 30
        while not entry.exists() or not entry.read_text():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        print(f"registered: {entry.read_text()}")
        server.stop()
        print("withdrawn" if not entry.exists() else "still there")


if __name__ == "__main__":
    register(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
