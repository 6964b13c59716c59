"""The servers of a Redis or Valkey tier, and the connections to them: which server has which values, and login.

A server's answers are not trusted: each is read with a time-out and a size limit. Addresses are resolved when they are
needed, so that a tier can be created while its servers are down.
"""

import binascii
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
from typing import Annotated, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.log import on_one_line

from kv_tiers.config import Timeout
from kv_tiers.pool.private_files import read_secret, without_newline
from kv_tiers.tier import RemovalRefusedError
from kv_tiers.tiers.resp import Connection, ErrorReply, ProtocolError, Reply, command
from kv_tiers.tiers.tls_files import TlsFiles, load_certificate

T = TypeVar("T")

_SCHEMES: Final = {
    **dict.fromkeys(("redis", "valkey"), "tcp"),
    **dict.fromkeys(("rediss", "valkeys"), "tls"),
    "unix": "unix",
}
_SLOTS: Final = 16384
_MAX_ANSWER_BYTES: Final = 16 << 20
"""For the answer to a large query: all slots of a cluster, or a thousand names with what a server adds to them."""
_KEEPALIVE_S: Final = 60
"""How often an idle connection is shown to be alive. Load balancers and firewalls forget one that is idle for some
minutes, and tell neither side: the next request then waits for its time-out. The system's own interval is two hours."""
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEFAULT_PORT: Final = {"single": 6379, "cluster": 6379, "sentinel": 26379}


class RedisAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the servers are, and how to log in."""

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
    """Empty: the system's authorities. Server names are verified in any case."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    prefix: str = "kv"
    """Prefix of every key: letters, digits and . _ -"""
    connections: int = 8
    """Kept open to each server between calls."""
    connect_timeout_s: Timeout = 1.0
    timeout_s: Timeout = 5.0
    """For sending one value, and for one reply; up to twice that if it arrives slowly."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix is {self.prefix!r}; write 1 to 64 letters, digits and . _ -")
        if self.connections < 1:
            raise ValueError("connections must be positive")
        if (self.mode == "sentinel") != bool(self.sentinel_master):
            raise ValueError('mode = "sentinel" and sentinel_master go together')
        if self.password_file and self.password_env:
            raise ValueError("write password_file or password_env, not both")
        if self.username and not (self.password_file or self.password_env):
            raise ValueError("username goes with password_file or password_env")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ValueError("tls_cert_file and tls_key_file go together")


class RedisConfig(RedisAccess, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The servers, and how values are stored there. Caches that share chunks need the same `prefix` and
    `piece_bytes`."""

    piece_bytes: int = 4 << 20
    """Size of the largest value, so that one reply does not delay others for long."""
    ttl_s: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0
    """Chunks expire this long after they were stored; 0: never, except when the server needs room."""
    refresh_ttl: bool = False
    """Every load restarts the time to live."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 4096 <= self.piece_bytes <= 64 << 20:
            raise ValueError(f"piece_bytes is {self.piece_bytes}; write 4KiB to 64MiB")
        if self.refresh_ttl and not self.ttl_s:
            raise ValueError("refresh_ttl needs a ttl_s")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server. port 0: `host` is the path of a unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        host = on_one_line(self.host)  # another server may have named it
        return f"{host}:{self.port}" if self.port else host


@dataclass(frozen=True, slots=True)
class Url:
    """The parsed `RedisAccess.url`. kind: tcp, tls or unix."""

    kind: str
    addresses: tuple[Address, ...]
    database: int


class ConnectionLostError(TierDown):
    """A server closed a connection on which it had answered the login, or on which something was being sent."""


class Servers:
    """The servers of one tier. Safe to call from any thread."""

    def __init__(self, config: RedisAccess, where: str) -> None:
        """
        Raises:
            ConfigError: the settings contradict each other, or cannot be used on this machine.
        """
        self._config = config
        self._url = read_url(config, where)
        self._tls = _tls_files(config, where) if self._url.kind == "tls" else None
        if config.password_file:
            read_secret(Path(config.password_file), f"{where}: password_file")
        if config.password_env and not self._password():
            what = "is empty" if config.password_env in os.environ else "does not exist"
            raise ConfigError(f"{where}: password_env: the environment variable {config.password_env} {what}")
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = defaultdict(list)
        self._closed = False
        # Under a separate lock, because finding the servers waits for them.
        self._finding = threading.Lock()
        self._masters: list[Address] = []
        self._slots: list[Address | None] = []

    def addresses_of(self, names: Sequence[bytes]) -> list[Address]:
        """For each of these values, the server of the cluster that stores it.

        Raises:
            TierDown: it cannot be determined.
        """
        _, slots = self._find_servers()
        addresses = []
        for name in names:
            slot = key_slot(name)
            address = slots[slot]
            if address is None:
                raise TierDown(f"no server of the cluster serves slot {slot}")
            addresses.append(address)
        return addresses

    def explained(self, refusal: ErrorReply) -> str:
        """The refusal, with the mistake in the settings that it shows."""
        is_cluster = refusal.code in ("MOVED", "ASK") and self._config.mode != "cluster"
        return f'{refusal.text} (this is a cluster; write mode = "cluster")' if is_cluster else refusal.text

    def masters(self) -> list[Address]:
        """Every server that takes writes. Raises `TierDown`."""
        return self._find_servers()[0]

    def forget(self) -> None:
        """Before the next use, query again which server serves what: something has changed."""
        with self._finding:
            self._masters = []
        if self._config.mode == "single":  # its one address may belong to another server by now
            self._drop(self._url.addresses[0])

    def talk(self, address: Address, work: Callable[[Connection], T]) -> T:
        """The result of a conversation with this server. `work` is restarted on a new connection if an idle one turns
        out to be dead: the server may have been restarted meanwhile.

        Raises:
            TierDown: it cannot be reached, is too slow, or does not speak the protocol; `ConnectionLostError` if it
                closed a new connection.
        """
        with self._lock:
            idle = self._idle[address].pop() if self._idle[address] else None
        if idle is not None:
            try:
                return self._talk(address, idle, work)
            except (TimeoutError, ProtocolError) as error:
                raise self._down(address, error) from error
            except OSError:
                self._drop(address)
        try:
            return self._talk(address, self._connect(address), work)
        except (OSError, ProtocolError) as error:
            raise self._down(address, error) from error

    def find(
        self, address: Address, pattern: bytes, on_names: Callable[[list[bytes]], object], *, looks: int | None = None
    ) -> None:
        """Call `on_names` with the names of this server's values that match, some at a time.

        looks: the most requests to send; None: continue until all are found.

        Raises:
            RemovalRefusedError: names are not for us, so what they name cannot be removed.
            TierDown: the server cannot be reached, or does not name its values.
        """
        cursor, requests_sent = b"0", 0
        while requests_sent != looks and not self._closed:  # a server may claim forever that there is more
            question = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")

            def ask(connection: Connection, question: bytes = question) -> Reply:
                connection.send([question])
                return connection.read_reply(_MAX_ANSWER_BYTES)

            match self.talk(address, ask):
                case [bytes(cursor), list(answer)] if cursor.isdigit() and len(cursor) <= 20:
                    names = [name for name in answer if isinstance(name, bytes)]
                case ErrorReply(code="NOPERM") as refusal:
                    raise RemovalRefusedError(f"{address}: {refusal.text}")
                case unexpected:
                    raise _unexpected(address, unexpected)
            requests_sent += 1
            if names:
                on_names(names)
            if cursor == b"0":
                return

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
        is_lost = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
        kind = ConnectionLostError if is_lost else TierDown
        return kind(f"{address}: {str(error) or type(error).__name__}")

    def _connect(self, address: Address, *, log_in: bool = True) -> Connection:
        limit_s = self._config.connect_timeout_s
        if address.port:
            try:
                sock = socket.create_connection((address.host, address.port), limit_s)
            except ValueError as error:  # also UnicodeError: a server's answer may name what is no host's name
                raise OSError(f"{address.host!r} is no name of a host: {error}") from error
        else:
            sock = socket.socket(socket.AF_UNIX)
        try:
            if address.port:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            else:
                sock.settimeout(limit_s)
                sock.connect(address.host)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=address.host)
            connection = Connection(sock, self._config.timeout_s)
            if log_in:
                self._log_in(address, connection)
        except BaseException:
            sock.close()
            raise
        return connection

    def _log_in(self, address: Address, connection: Connection) -> None:
        password = self._password()
        words = [b"AUTH"] + [word.encode() for word in (self._config.username, password) if word]
        if len(words) > 1:
            connection.send([command(*words)])
            refusal = connection.read_ok()
            if refusal is not None:
                reason = refusal.text.partition(", with args")[0]  # a server without AUTH repeats what was sent
                why = refusal.code if password in reason else reason
                raise TierDown(f"{address} does not allow us to log in: {why}")
        if self._url.database:
            connection.send([command(b"SELECT", b"%d" % self._url.database)])
            refusal = connection.read_ok()
            if refusal is not None:
                raise TierDown(f"{address} has no database {self._url.database} for us: {refusal.text}")

    def _password(self) -> str:
        if self._config.password_env:
            return without_newline(os.environ.get(self._config.password_env, ""))
        if self._config.password_file:
            try:
                secret = read_secret(Path(self._config.password_file), "password_file")
            except ConfigError as error:  # the file was changed since the start
                raise TierDown(str(error)) from None
            return without_newline(secret.decode("utf-8", "surrogateescape"))
        return ""

    def _find_servers(self) -> tuple[list[Address], list[Address | None]]:
        """All masters, and in a cluster the master of each slot."""
        with self._finding:
            if not self._masters:
                if self._config.mode == "cluster":
                    self._masters, self._slots = self._cluster_slots()
                elif self._config.mode == "sentinel":
                    self._masters = [self._sentinels_master()]
                else:
                    self._masters = [self._url.addresses[0]]
                with self._lock:
                    stale = self._idle.keys() - set(self._masters)
                for address in stale:  # after a failover; nothing else would close their connections
                    self._drop(address)
            return self._masters, self._slots

    def _cluster_slots(self) -> tuple[list[Address], list[Address | None]]:
        known = dict.fromkeys([*self._url.addresses, *(address for address in self._slots if address is not None)])
        reasons = []
        for node in known:
            try:
                slots = _slots_in(self._ask(node, b"CLUSTER", b"SLOTS"), node)
            except TierDown as error:
                reasons.append(str(error))
                continue
            masters = list(dict.fromkeys(address for address in slots if address is not None))
            if masters:
                return masters, slots
            reasons.append(f"{node} knows of no slots")
        raise TierDown("; ".join(reasons))

    def _sentinels_master(self) -> Address:
        master = self._config.sentinel_master
        reasons = []
        for sentinel in self._url.addresses:
            try:
                # Sentinels have neither users nor databases.
                answer = self._ask(sentinel, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.encode(), log_in=False)
                match answer:
                    case [bytes(host), bytes(port)] if port.isdigit() and len(port) <= 5 and int(port) < 1 << 16:
                        return Address(host.decode("utf-8", "replace"), int(port))
                    case None:
                        reasons.append(f"{sentinel} knows of no master {master!r}")
                    case unexpected:
                        raise _unexpected(sentinel, unexpected)
            except TierDown as error:
                reasons.append(str(error))
        raise TierDown("; ".join(reasons))

    def _ask(self, address: Address, *words: bytes, log_in: bool = True) -> Reply:
        """The answer, over a connection of its own, because this is called while the servers are being found."""
        try:
            with closing(self._connect(address, log_in=log_in)) as connection:
                connection.send([command(*words)])
                return connection.read_reply(_MAX_ANSWER_BYTES)
        except (OSError, ProtocolError) as error:
            raise TierDown(f"{address}: {str(error) or type(error).__name__}") from error


def key_slot(name: bytes) -> int:
    """The cluster slot of a value with this name. If there is anything between its first braces, only that counts."""
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    hashed = name[start + 1 : end] if 0 <= start < end - 1 else name
    return binascii.crc_hqx(hashed, 0) % _SLOTS


def _slots_in(answer: Reply, node: Address) -> list[Address | None]:
    """The server of each slot, from an answer to CLUSTER SLOTS: ranges, and the servers of each, the master first.

    Raises:
        TierDown: the answer is something else.
    """
    slots: list[Address | None] = [None] * _SLOTS
    for entry in answer if isinstance(answer, list) else [answer]:
        match entry:
            case [int(first), int(last), [bytes() | None as host, int(port), *_], *_] if (
                0 <= first <= last < _SLOTS and 0 < port < 1 << 16
            ):
                address = Address((host or b"").decode("utf-8", "replace") or node.host, port)
                slots[first : last + 1] = [address] * (last + 1 - first)
            case unexpected:
                raise _unexpected(node, unexpected)
    return slots


def _unexpected(address: Address, answer: Reply) -> TierDown:
    """The exception for an answer that does not fit the query."""
    if isinstance(answer, ErrorReply):
        return TierDown(f"{address}: {answer.text}")
    return TierDown(f"{address} sends an unrequested answer: {str(answer)[:100]}")


def read_url(config: RedisAccess, where: str) -> Url:
    """Raises `ConfigError`."""
    # Before anything else: other errors repeat parts of the url, and a password may have a / or a # in it.
    if "@" in config.url and not config.url.startswith("unix:///"):
        raise ConfigError(f"{where}: url holds a user or password; write username, and password_file or password_env")
    try:
        parts = urlsplit(config.url)
    except ValueError as error:
        raise ConfigError(f"{where}: url: {error}") from None
    kind = _SCHEMES.get(parts.scheme)
    if kind is None:
        raise ConfigError(
            f"{where}: url: {parts.scheme}:// is not one of {', '.join(f'{name}://' for name in _SCHEMES)}"
        )
    number = parts.query.removeprefix("db=") if kind == "unix" else parts.path.removeprefix("/")
    if number and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{where}: url names the database {number!r}; write a number")
    if kind == "unix":
        if config.mode != "single" or not parts.path:
            raise ConfigError(f'{where}: a unix:// url names one socket\'s path and goes with mode = "single"')
        return Url(kind, (Address(unquote(parts.path), 0),), int(number or 0))
    addresses = []
    for text in parts.netloc.split(","):
        host_url = urlsplit(f"//{text}")
        try:
            host, port = host_url.hostname, host_url.port or _DEFAULT_PORT[config.mode]
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


def _tls_files(config: RedisAccess, where: str) -> TlsFiles:
    def make() -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=config.tls_ca_file or None)
            if config.tls_cert_file:
                load_certificate(context, config.tls_cert_file, config.tls_key_file, where)
        except OSError as error:
            raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
        return context

    return TlsFiles(make, (config.tls_ca_file, config.tls_cert_file, config.tls_key_file), where)
