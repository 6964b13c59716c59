"""The servers of a Redis or Valkey tier, and the connections to them.

Bulk values use our own connections (`resp`). Rare requests are left to redis-py: a cluster's slots, a sentinel's
master, a server's keys. Addresses are resolved when they are needed, so that a tier can be created while its servers
are down.
"""

import os
import re
import socket
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from kv_core.errors import ConfigError, TierDown

from kv_tiers.pool.private_files import read_secret
from kv_tiers.tiers.resp import Connection, ErrorReply, ProtocolError, command

T = TypeVar("T")

_SCHEMES: Final = {
    **dict.fromkeys(("redis", "valkey"), "tcp"),
    **dict.fromkeys(("rediss", "valkeys"), "tls"),
    "unix": "unix",
}
_NOBODY: Final = {"db": 0, "username": None, "password": None}
_SLOTS: Final = 16384
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEFAULT_PORT: Final = {"single": 6379, "cluster": 6379, "sentinel": 26379}


class RedisAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the servers are, and how to log in there."""

    url: str
    """redis://host:port/database, rediss:// for TLS, unix:///path?db=number; valkey:// and valkeys:// mean the same.
    Several hosts, separated by commas, for a cluster or its sentinels. Must not contain a user or password."""
    mode: Literal["single", "cluster", "sentinel"] = "single"
    sentinel_master: str = ""
    """The master's name at the sentinels."""
    username: str = ""
    password_file: str = ""
    """Read at every connection, so that the password may be changed at run time. Must be closed to all others
    (0600)."""
    password_env: str = ""
    """Or the name of an environment variable."""
    tls_ca_file: str = ""
    """Empty: the system's authorities. Servers must prove their names in any case."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    prefix: str = "kv"
    """Prefix of every key: letters, digits and . _ -"""
    connections: int = 8
    """Kept open to each server between calls."""
    connect_timeout_s: float = 1.0
    timeout_s: float = 5.0
    """For sending one value, and for one reply; up to twice that if it arrives slowly."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix is {self.prefix!r}; write 1 to 64 letters, digits and . _ -")
        if min(self.connect_timeout_s, self.timeout_s) < 0.001 or self.connections < 1:
            raise ValueError("time-outs and connections are positive")
        if (self.mode == "sentinel") != bool(self.sentinel_master):
            raise ValueError('mode = "sentinel" and sentinel_master go together')
        if self.password_file and self.password_env:
            raise ValueError("write password_file or password_env, not both")
        if self.username and not (self.password_file or self.password_env):
            raise ValueError("username goes with password_file or password_env")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")


class RedisConfig(RedisAccess, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """And how values are stored there. Caches that share chunks need the same `prefix` and `piece_bytes`."""

    piece_bytes: int = 4 << 20
    """Size of the largest value, so that one reply does not delay others for long."""
    ttl_s: int = 0
    """Chunks expire this long after they were stored; 0: when the server needs room."""
    refresh_ttl: bool = False
    """Every load restarts the time to live."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 4096 <= self.piece_bytes <= 64 << 20:
            raise ValueError(f"piece_bytes is {self.piece_bytes}; write 4KiB to 64MiB")
        if self.ttl_s < 0:
            raise ValueError("ttl_s is not negative")
        if self.refresh_ttl and not self.ttl_s:
            raise ValueError("refresh_ttl needs a ttl_s")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server. port 0: `host` is the path of a unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class Url:
    """The parsed `RedisAccess.url`. kind: tcp, tls or unix."""

    kind: str
    addresses: tuple[Address, ...]
    database: int


class Servers:
    """The servers of one tier. Safe to call from any thread."""

    def __init__(self, config: RedisAccess, where: str) -> None:
        """
        Raises:
            ConfigError: redis-py is not installed, or the settings do not fit each other or this machine.
        """
        try:
            import redis
            import redis.backoff
            import redis.crc
            import redis.retry
        except ImportError as error:
            raise ConfigError(f"{where}: a Redis tier needs redis-py; pip install 'kv-tiers[redis]'") from error
        self._redis: Any = redis  # half of it has no types
        self._config = config
        self._url = read_url(config, where)
        self._tls = _tls_context(config, where) if self._url.kind == "tls" else None
        if config.password_file:
            read_secret(Path(config.password_file), f"{where}: password_file")
        if config.password_env and config.password_env not in os.environ:
            raise ConfigError(f"{where}: password_env: there is no environment variable {config.password_env}")
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = defaultdict(list)
        self._closed = False
        # Under a lock of its own: finding the servers waits for them.
        self._finding = threading.Lock()
        self._masters: list[Address] = []
        self._slots: list[Address | None] = []

    def addresses_of(self, names: Sequence[bytes]) -> list[Address]:
        """For each of these values, the server of the cluster that keeps it.

        Raises:
            TierDown: it cannot be found out.
        """
        _, slots = self._found()
        addresses = []
        for name in names:
            slot = self._redis.crc.key_slot(name)
            address = slots[slot]
            if address is None:
                raise TierDown(f"no server of the cluster serves slot {slot}")
            addresses.append(address)
        return addresses

    def masters(self) -> list[Address]:
        """Every server that takes writes. Raises `TierDown`."""
        return self._found()[0]

    def forget(self) -> None:
        """Ask anew who serves what, before the next use: something has changed."""
        with self._finding:
            self._masters = []

    def talk(self, address: Address, work: Callable[[Connection], T]) -> T:
        """The result of a conversation with this server. `work` is begun again on a new connection if an
        idle one turns out to be dead: the server may have been started anew meanwhile.

        Raises:
            TierDown: it cannot be reached, is too slow, or does not speak the protocol.
        """
        with self._lock:
            idle = self._idle[address].pop() if self._idle[address] else None
        if idle is not None:
            try:
                return self._talk(address, idle, work)
            except TimeoutError as error:
                raise self._down(address, error) from error
            except OSError:
                self._drop(address)
            except ProtocolError as error:
                raise self._down(address, error) from error
        try:
            return self._talk(address, self._connect(address), work)
        except (OSError, ProtocolError) as error:
            raise self._down(address, error) from error

    def find(
        self, address: Address, pattern: bytes, found: Callable[[list[bytes]], object], *, looks: int | None = None
    ) -> None:
        """Call `found` with the names of this server's values that match, some at a time. Raises `TierDown`.

        looks: requests at most; None: until all are found.
        """

        def scan(client: Any) -> None:
            cursor, looked = None, 0
            while cursor != 0 and looked != looks:
                cursor, names = client.scan(cursor or 0, match=pattern, count=1000)
                looked += 1
                if names:
                    found(names)

        self._ask(address, scan)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [connection for connections in self._idle.values() for connection in connections]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _talk(self, address: Address, connection: Connection, work: Callable[[Connection], T]) -> T:
        try:
            result = work(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            room = len(self._idle[address]) < self._config.connections
            keep = room and connection.settled and not self._closed
            if keep:
                self._idle[address].append(connection)
        if not keep:
            connection.close()
        return result

    def _drop(self, address: Address) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def _down(self, address: Address, error: Exception) -> TierDown:
        self._drop(address)
        self.forget()
        return TierDown(f"{address}: {str(error) or type(error).__name__}")

    def _connect(self, address: Address) -> Connection:
        limit_s = self._config.connect_timeout_s
        if address.port:
            sock = socket.create_connection((address.host, address.port), limit_s)
        else:
            sock = socket.socket(socket.AF_UNIX)
        try:
            if address.port:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            else:
                sock.settimeout(limit_s)
                sock.connect(address.host)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=address.host)
            connection = Connection(sock, self._config.timeout_s)
            self._log_in(address, connection)
        except BaseException:
            sock.close()
            raise
        return connection

    def _log_in(self, address: Address, connection: Connection) -> None:
        words = [b"AUTH"] + [word.encode() for word in (self._config.username, self._password()) if word]
        if len(words) > 1:
            connection.send([command(*words)])
            refusal = connection.read_ok()
            if refusal is not None:  # its text may repeat what was sent
                raise TierDown(f"{address} does not let us log in: {refusal.code}")
        if self._url.database:
            connection.send([command(b"SELECT", b"%d" % self._url.database)])
            refusal = connection.read_ok()
            if refusal is not None:
                raise TierDown(f"{address} has no database {self._url.database} for us: {refusal.text}")

    def _password(self) -> str:
        if self._config.password_env:
            return os.environ.get(self._config.password_env, "")
        if self._config.password_file:
            try:
                secret = read_secret(Path(self._config.password_file), "password_file")
            except ConfigError as error:  # it was changed since the start
                raise TierDown(str(error)) from None
            return secret.decode("utf-8", "surrogateescape").rstrip("\r\n")
        return ""

    def _found(self) -> tuple[list[Address], list[Address | None]]:
        with self._finding:
            if not self._masters:
                if self._config.mode == "cluster":
                    self._masters, self._slots = self._cluster_slots()
                elif self._config.mode == "sentinel":
                    self._masters = [self._sentinels_master()]
                else:
                    self._masters = [self._url.addresses[0]]
            return self._masters, self._slots

    def _cluster_slots(self) -> tuple[list[Address], list[Address | None]]:
        known = dict.fromkeys([*self._url.addresses, *(address for address in self._slots if address is not None)])
        reasons = []
        for node in known:
            try:
                ranges = self._ask(node, _cluster_slots)
            except TierDown as error:
                reasons.append(str(error))
                continue
            slots: list[Address | None] = [None] * _SLOTS
            for first, last, (host, port, *_), *_ in ranges:
                address = Address((host or b"").decode() or node.host, port)
                slots[first : last + 1] = [address] * (last + 1 - first)
            masters = list(dict.fromkeys(address for address in slots if address is not None))
            if len(slots) == _SLOTS and masters:
                return masters, slots
            reasons.append(f"{node} knows of no slots")
        raise TierDown("; ".join(reasons))

    def _sentinels_master(self) -> Address:
        question = ("SENTINEL GET-MASTER-ADDR-BY-NAME", self._config.sentinel_master)
        reasons = []
        for sentinel in self._url.addresses:
            try:
                answer = self._ask(sentinel, lambda client: client.execute_command(*question), a_sentinel=True)
            except TierDown as error:
                reasons.append(str(error))
                continue
            if answer is not None:
                host, port = answer
                return Address(host.decode() if isinstance(host, bytes) else host, int(port))
            reasons.append(f"{sentinel} knows of no master {self._config.sentinel_master!r}")
        raise TierDown("; ".join(reasons))

    def _ask(self, address: Address, work: Callable[[Any], T], *, a_sentinel: bool = False) -> T:
        """By redis-py, over a connection of this question's own. Sentinels have neither users nor databases."""
        password = ""
        try:
            options = self._client_options() | (_NOBODY if a_sentinel else {})
            password = options["password"] or ""
            if address.port:
                options |= {"host": address.host, "port": address.port}
            else:
                options["unix_socket_path"] = address.host
            with closing(self._redis.Redis(**options)) as client:
                return work(client)
        except (TypeError, ValueError) as error:
            raise TierDown(f"{address} answers what was not asked: {error}") from error
        except (self._redis.RedisError, OSError) as error:
            # Of an error that repeats what was sent nothing may reach a log, not even as this one's cause.
            text = str(error).replace(password, "…") if password else str(error)
            raise TierDown(f"{address}: {text}") from None

    def _client_options(self) -> dict[str, Any]:
        config = self._config
        options: dict[str, Any] = {
            "db": self._url.database,
            "username": config.username or None,
            "password": self._password() or None,
            "socket_connect_timeout": config.connect_timeout_s,
            "socket_timeout": config.timeout_s,
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            "protocol": 2,
        }
        if self._tls is not None:
            options |= {
                "ssl": True,
                "ssl_ca_certs": config.tls_ca_file or None,
                "ssl_certfile": config.tls_cert_file or None,
                "ssl_keyfile": config.tls_key_file or None,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            }
        return options


def _cluster_slots(client: Any) -> list[list[Any]]:
    """First slot, last slot, and the servers of this range, the master first, as they were received."""
    client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
    ranges = client.execute_command("CLUSTER SLOTS")
    for first, last, (host, port, *_), *_ in ranges:
        if not (0 <= first <= last < _SLOTS and 0 < port < 1 << 16 and isinstance(host, bytes | None)):
            raise ValueError(f"slots {first} to {last} at {host!r}:{port}")
    return list(ranges)


def refused_for_now(reply: ErrorReply) -> bool:
    """The server keeps what it has and takes nothing more."""
    return reply.code in ("OOM", "NOPERM", "MISCONF", "NOREPLICAS")


def read_url(config: RedisAccess, where: str) -> Url:
    """Raises `ConfigError`."""
    parts = urlsplit(config.url)
    kind = _SCHEMES.get(parts.scheme)
    if kind is None:
        raise ConfigError(f"{where}: url: {parts.scheme}:// is none of {', '.join(f'{name}://' for name in _SCHEMES)}")
    if "@" in parts.netloc:
        raise ConfigError(f"{where}: url holds a user or password; write username, and password_file or password_env")
    number = parts.query.removeprefix("db=") if kind == "unix" else parts.path.removeprefix("/")
    if number and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{where}: url names the database {number!r}; write a number")
    if kind == "unix":
        if config.mode != "single" or not parts.path:
            raise ConfigError(f'{where}: a unix:// url names one socket\'s path and goes with mode = "single"')
        return Url(kind, (Address(unquote(parts.path), 0),), int(number or 0))
    addresses = []
    for text in parts.netloc.split(","):
        one = urlsplit(f"//{text}")
        try:
            host, port = one.hostname, one.port or _DEFAULT_PORT[config.mode]
        except ValueError as error:
            raise ConfigError(f"{where}: url: {error}") from None
        if not host:
            raise ConfigError(f"{where}: url names no host")
        addresses.append(Address(host, port))
    if config.mode == "single" and len(addresses) > 1:
        raise ConfigError(f'{where}: url names several hosts; that needs mode = "cluster" or "sentinel"')
    if config.mode == "cluster" and int(number or 0):
        raise ConfigError(f"{where}: url: a cluster has database 0 only")
    return Url(kind, tuple(addresses), int(number or 0))


def _tls_context(config: RedisAccess, where: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca_file or None)
        if config.tls_cert_file:
            read_secret(Path(config.tls_key_file), f"{where}: tls_key_file")
            context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
    except OSError as error:
        raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
    return context
