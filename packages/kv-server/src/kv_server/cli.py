"""`kv-server`: the cache in a process of its own. Prints one line when it is ready, and stops on SIGTERM or SIGINT."""

import argparse
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from kv_core.errors import ConfigError, TierDown
from kv_core.log import limited_logger, say
from kv_tiers.build import check_settings, refuse_gds
from kv_tiers.settings import STANDARD_INPUT, Layer, read_file, resolve
from kv_tiers.threads import OutOfThreadsError, must_start, start_thread

from kv_server.address import Ports, allow_descriptors
from kv_server.config import ServerConfig, default_socket, server_config
from kv_server.connection import PACKAGE, NobodyListens
from kv_server.http.start import check_http, open_http
from kv_server.process import environment, module_command
from kv_server.programs import Programs
from kv_server.reload import Reloading
from kv_server.server import CacheServer
from kv_server.succession.upgrade import TakingOver, VanishedError

if TYPE_CHECKING:
    from kv_server.http.thread import HttpThread

_log = limited_logger(__name__)


_WAIT_S: Final = 5.0


class ServiceManager:
    """Tells a service manager when the server serves, that it lives, and when it stops: systemd's protocol,
    sd_notify(3).

    The manager is a datagram socket, named by NOTIFY_SOCKET; without one nothing is sent.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take what concerns us out of the environment, so that no child of ours speaks for us."""
        self._address = environment.pop("NOTIFY_SOCKET", "").replace("@", "\0", 1)  # an abstract one begins with @
        interval_us, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        is_for_us = pid in ("", str(os.getpid())) and interval_us.isascii() and interval_us.isdigit()
        self._beat_s = int(interval_us) / 2e6 if self._address and is_for_us else 0.0
        self._ended = threading.Event()
        self._successor: subprocess.Popen[bytes] | None = None
        self._given = {"NOTIFY_SOCKET": self._address.replace("\0", "@", 1)} if self._address else {}
        if self._beat_s:
            self._given["WATCHDOG_USEC"] = interval_us

    def ready(self) -> None:
        self._notify("READY=1", _WAIT_S)

    def stopping(self) -> None:
        """No more signs of life are due, and no process is to take over."""
        self._ended.set()
        if self._successor is not None:
            self._successor.terminate()
        self._notify("STOPPING=1", _WAIT_S)

    def start_successor(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a server with these arguments that takes over from this one, and then speaks to the manager."""
        same = [one for one in arguments if one not in ("--detach", "--take-over")]
        command = [*module_command("kv_server"), *same, "--take-over"]
        self._successor = subprocess.Popen(command, env=environment() | self._given)  # noqa: S603  # our own
        return self._successor

    def passed_on(self) -> None:
        """The service goes on in the successor, if it was started here."""
        self._ended.set()
        if self._successor is not None:
            self._notify(f"MAINPID={self._successor.pid}", _WAIT_S)

    def keep_alive(self, submit: Callable[[Callable[[], None]], object]) -> None:
        """Give signs of life until `stopping`, from the serving thread itself: one that hangs gives none. Raises
        `OutOfThreadsError`: the system has no thread for it."""
        if self._beat_s:
            must_start(threading.Thread(target=self._beat, args=(submit,), name="kv-watchdog", daemon=True))

    def _beat(self, submit: Callable[[Callable[[], None]], object]) -> None:
        while not self._ended.wait(self._beat_s):
            submit(partial(self._notify, "WATCHDOG=1", 0.0))

    def _notify(self, state: str, wait_s: float) -> None:
        if not self._address:
            return
        # A manager that does not listen is told nothing; the server serves as before.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(wait_s)
            sender.sendto(state.encode(), self._address)


_PR_SET_PDEATHSIG: Final = 1
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_EPILOG = """\
The settings are a file of YAML, TOML or JSON, by how its name ends; docs/settings.md has them all. Engines read the
same file, and join this server if server.socket is set in it. In YAML:

  host:
    capacity_bytes: 4GiB          # of each format's pool; allocated as it is used
    name: kv                      # the pool outlives this server, if that is stopped and not killed
    lease_s: 300                  # how long chunks stay leased for a client that has gone silent
    policy: prefix                # what is evicted when room is needed
  tiers:                          # below the pool, hottest first; as many as you like
    - {type: disk, directory: /var/cache/kv, capacity_bytes: 100GiB}
  cold:
    wait_s: 1.0                   # how long a request may wait for chunks being promoted
    drain_s: 5.0                  # how long stopping may take
  tenants:                        # who has a share of the pool (docs/tenants.md); as many as you like
    - {name: team-a, salt_file: /…/team-a, quota_bytes: 1GiB}
  observe:                        # what watches the caches: docs/observability.md
    log: text                     # or json: a line for each event that concerns an operator
    record: requests.jsonl        # a trace for kv sim; each cache's name is put before the suffix
    otel: false                   # spans and metrics, sent where OTEL_EXPORTER_OTLP_ENDPOINT and the like point
    history_keys: 1048576         # how many keys kv explain remembers
  server:
    name: default                 # distinguishes servers of one user
    socket: /run/…/kv.sock        # instead of the place that the name gives; in a directory of mode 0700
    max_formats: 4                # formats of chunks (models) served at once
    max_sessions: 128             # clients served at once
    programs: [[/…/register]]     # commands that run beside it, and end with it
  peers:                          # other hosts' servers that read from this one (docs/peers.md)
    listen: 10.0.0.1:9500         # off unless set
    tls_ca_file: /…/ca.pem        # who may connect; `kv peers init` makes all three files
    tls_cert_file: /…/cert.pem
    tls_key_file: /…/key.pem      # mode 0600
    token_file: /…/token          # a secret that all peers have, besides the files
  http:                           # pip install 'kv-server[http]'; GET /openapi.json lists the requests
    listen: 127.0.0.1:9400        # a page at /, /metrics, /status and more; off unless set
    token_file: /…/token          # created if missing; without it nothing can be changed over HTTP
    archive_directory: /…/saved   # where prefixes are exported to and imported from
    endpoints: [mine]             # of other packages

When it serves it prints READY, its socket, its process number, the page's address and peers=HOST:PORT on one line.
SIGTERM and SIGINT stop it: it accepts no more clients, stores what is waiting for the lower tiers, and exits. So does
SIGHUP (unless nohup has it ignored) without a file; with one, it has the file read again, as `kv reload` does: tenants
and quotas change at once, all else by `kv reload --take-over`. Only processes of the user that started it are served at
the socket.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.detach:
        _detach()
    output = None if args.lifeline is None else _own_output()
    manager = ServiceManager(os.environ if args.lifeline is None else {})  # a private server's engine speaks for itself
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = _config(args)
        _allow_descriptors(config)
        succession = _succession(config) if args.take_over else None
        # A signal between these two would leave the socket behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        ports = Ports() if succession is None else succession.ports
        is_open = succession is None or ports.open_now("http", config.http.listen)
        http = open_http(config.http, ports) if is_open else None
        server = CacheServer(config, succession=succession, ports=ports)
        if succession is not None:
            try:
                server.take_over()
            except VanishedError as error:
                _log.warning("%s", error)
                succession = None
                http = http or open_http(config.http, ports)
                server = CacheServer(config, address=server.address, ports=ports)
    except (ConfigError, OutOfThreadsError) as error:
        say(f"kv-server: {error}", file=sys.stderr)
        return 2

    def stop(*_: object) -> None:
        server.stop()
        manager.stopping()

    reloads = args.config not in {None, STANDARD_INPUT}
    ending = [number for number in _ENDING if number != signal.SIGHUP or not reloads]
    if reloads:
        succeed = partial(manager.start_successor, sys.argv[1:] if argv is None else argv)
        reloading = Reloading(server, config, lambda: _config(args), succeed)
        if why := start_thread(reloading):
            _log.warning("the settings are not read again while this server runs: %s", why)
        else:
            server.reload = reloading.want
        signal.signal(signal.SIGHUP, lambda *_: reloading.want())
    for number in ending:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    if args.lifeline is not None:
        server.watch(args.lifeline)
    if args.owner is not None:
        _end_with(args.owner, server)
    if args.parent is not None:
        _terminate_with(args.parent)
    status = 0
    programs = Programs(config.programs)
    try:
        if http is not None and succession is None:
            http.start(server)
        manager.keep_alive(server.submit)
        if succession is None:
            _announce(server, http, output, manager)
            programs.start(_served(server, http))
    except OutOfThreadsError as error:
        say(f"kv-server: {error}", file=sys.stderr)
        status, http = 2, None
        server.stop()
    later = _Later(server, config, http, output=output, manager=manager, programs=programs)
    if succession is not None:
        later.start()
    try:
        server.serve()
    except OutOfThreadsError as error:
        say(f"kv-server: {error}", file=sys.stderr)
        status = 2
    if later.http is not None:
        later.http.stop()  # first: programs may take seconds, and clients would get 503 meanwhile
    programs.stop()
    if server.is_passed_on:
        manager.passed_on()
        sys.stdout = None
        logging.shutdown()
        os._exit(status)  # a thread may still wait for what this process no longer has
    if args.own_directory:
        with suppress(OSError):
            server.socket_path.parent.rmdir()
    return status


class _Later(threading.Thread):
    """What a server that has taken over does while it serves already, most of it once the other process has ended."""

    def __init__(
        self,
        server: CacheServer,
        config: ServerConfig,
        http: "HttpThread | None",
        *,
        output: int | None,
        manager: ServiceManager,
        programs: Programs,
    ) -> None:
        """http: None: its port, if it has one, is to be had only then."""
        super().__init__(name="kv-taken-over", daemon=True)
        self.http = http
        self._server, self._config, self._output, self._manager = server, config, output, manager
        self._programs = programs

    def run(self) -> None:
        is_http_open = self.http is not None
        if is_http_open:
            self._serve_http()
        try:
            self._server.finish_take_over()
        except TierDown:  # it has been stopped meanwhile
            return
        if not is_http_open:
            self._serve_http()
        _announce(self._server, self.http, self._output, self._manager)
        self._programs.start(_served(self._server, self.http))

    def _serve_http(self) -> None:
        try:
            self.http = self.http or open_http(self._config.http, self._server.ports)
            if self.http is not None:
                self.http.start(self._server)
        except (ConfigError, OutOfThreadsError) as error:
            _log.error("nothing is served over HTTP: %s", error)
            self.http = None


def _served(server: CacheServer, http: "HttpThread | None") -> dict[str, str]:
    """For programs: the variables that say what is served."""
    served = {"KV_SERVER_SOCKET": str(server.socket_path), "KV_SERVER_PID": str(os.getpid())}
    if http is not None:
        served["KV_SERVER_HTTP"] = http.url
    if server.peers_address is not None:
        served["KV_SERVER_PEERS"] = str(server.peers_address)
    return served


def _announce(server: CacheServer, http: "HttpThread | None", output: int | None, manager: ServiceManager) -> None:
    ready = ["READY", str(server.socket_path), str(os.getpid())]
    if http is not None:
        ready.append(http.url)
    if server.peers_address is not None:
        ready.append(f"peers={server.peers_address}")
    try:
        if output is None:
            say(*ready, flush=True)
        else:
            os.write(output, f"{' '.join(ready)}\n".encode())
    except OSError as error:  # the reader has gone; if it was our owner, a lifeline ends us
        _log.warning("no process reads the line that says that this server is ready: %s", error.strerror)
        sys.stdout = None  # or it would be flushed again when we end
    manager.ready()


def _succession(config: ServerConfig) -> TakingOver | None:
    """None: there is no server to take over from. Raises `ConfigError`: it refuses, or the settings cannot be
    honoured."""
    check_http(config.http)
    try:
        return TakingOver(config.socket_path())
    except (NobodyListens, VanishedError) as why:
        _log.warning("there is no server to take over from, so this one starts with empty pools: %s", why)
        return None


def _allow_descriptors(config: ServerConfig) -> None:
    wanted = config.descriptors()
    allowed = allow_descriptors(wanted)
    if allowed < wanted:
        _log.warning(
            "this process may open %d descriptors, and %d clients (max_sessions) may need %d: some may be refused. "
            "Raise the limit (ulimit -n %d, or LimitNOFILE=%d in its unit), or write a smaller max_sessions",
            allowed, config.max_sessions, wanted, wanted, wanted,
        )  # fmt: skip


def _config(args: argparse.Namespace) -> ServerConfig:
    """Raises `ConfigError`: the settings cannot be read or honoured."""
    given = {
        "server.socket": args.socket,
        "server.name": args.name,
        "host.capacity_bytes": args.capacity,
        "http.listen": args.http,
        "peers.listen": args.listen,
    }
    layers = [Layer("the command line", {path: value for path, value in given.items() if value is not None})]
    if (file := args.config) is not None:
        origin = "standard input" if file == STANDARD_INPUT else f"file {file}"
        layers.append(Layer(origin, read_file(file)))
    config = server_config(resolve(layers, {})[0])
    check_settings(config.host, config.tiers)
    refuse_gds(config.tiers, "is not for a server, because the lease of a file does not cross its socket")
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kv-server",
        description="Keep KV chunks in a process of its own, which any number of engines of this user can share.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        "--file",
        metavar="FILE",
        help="the settings, which other options override; - reads JSON or YAML from standard input",
    )
    parser.add_argument("--capacity", metavar="BYTES", help="host.capacity_bytes, such as 4GiB")
    place = str(default_socket()).replace("%", "%%")  # argparse fills in what follows a single one
    parser.add_argument("--name", help=f"server.name; by default it listens at {place}")
    parser.add_argument("--socket", metavar="PATH", help="server.socket: where to listen")
    parser.add_argument("--http", metavar="HOST:PORT", help="http.listen: where to serve the page and the metrics")
    parser.add_argument("--listen", metavar="HOST:PORT", help="peers.listen: where other hosts' servers read from it")
    # For an engine that starts a private server, which stops when a descriptor is closed or a process exits.
    parser.add_argument("--lifeline", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--owner", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--own-directory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the place of the server that listens there, with all that it holds and its clients",
    )
    parser.add_argument(
        "--detach", action="store_true", help="continue detached from the parent process, in a session of its own"
    )
    parser.add_argument(
        "--log-level",
        default="warning",
        choices=["debug", "info", "warning", "error"],
        help="of the lines on standard error (default: warning)",
    )
    parser.add_argument("--version", action="version", version=f"kv-server {PACKAGE}")
    return parser


def _detach() -> None:
    """Must run before there are threads. The process that started us sees us end, and continues to read the output that
    the child shares: first the child's number, so that a child that does not become ready can be ended."""
    if child := os.fork():
        with suppress(OSError):  # nobody reads it any more
            os.write(1, f"{child}\n".encode())
        os._exit(0)
    os.setsid()


def _own_output() -> int:
    """Keep the pipe to ourselves from which our owner reads one line, and by whose end it learns of ours. What others
    print, such as the package of a tier, goes to standard error instead."""
    output = os.dup(1)  # which no process that we start inherits
    if sys.stderr is not None:
        os.dup2(2, 1)
    return output


def _end_with(owner: int, server: CacheServer) -> None:
    """Stop the server when this process ends. The lifeline does not suffice: the process's children may outlive it, and
    inherit the pipe."""
    try:
        server.watch(os.pidfd_open(owner))
    except ProcessLookupError:
        server.stop()
    except (AttributeError, OSError):
        _log.debug("the kernel cannot watch process %d; only the lifeline stops this server", owner)


def _terminate_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when the thread that started us ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before this was set
        signal.raise_signal(signal.SIGTERM)
