"""The servers of a Redis or Valkey tier: the settings, and which server has which values.

Connections are redis-py's (`redis_connection`). Which server has what is ours, because redis-py's clients for clusters
and sentinels send commands one by one over connections of their own, cannot be given a class of connection, need the
right to COMMAND, and take what a server says of its slots as it is: a false range costs any amount of memory.

Addresses are resolved when they are needed, so that a tier can be created while its servers are down.
"""

import os
import re
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.log import on_one_line
from kv_tiers.config import Timeout
from kv_tiers.pool.private_files import read_secret, without_newline
from kv_tiers.tier import RemovalRefusedError

from kv_remote.resp import ErrorReply, Reply
from kv_remote.tls_files import TlsFiles, load_certificate

if TYPE_CHECKING:  # redis-py is imported when a tier is made
    from kv_remote.redis_connection import Connection, RedisPool

T = TypeVar("T")

_SCHEMES: Final = {
    **dict.fromkeys(("redis", "valkey"), "tcp"),
    **dict.fromkeys(("rediss", "valkeys"), "tls"),
    "unix": "unix",
}
_SLOTS: Final = 16384
_MAX_ANSWER_BYTES: Final = 2 << 20
"""For the answer to a large query: all slots of a cluster, or a thousand names with what a server adds to them."""
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DEFAULT_PORT: Final = {"single": 6379, "cluster": 6379, "sentinel": 26379}


class RedisAccess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the servers are, and how to log in."""

    url: str
    """redis://host:port/database, rediss:// for TLS, unix:///path?db=number; valkey:// and valkeys:// mean the same.
    Several hosts, separated by commas, for a cluster or its sentinels. ?protocol=3 for RESP3; every server speaks 2.
    Must not contain a user or password."""
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
    """The parsed `RedisAccess.url`. kind: tcp, tls or unix. protocol: the version of RESP."""

    kind: str
    addresses: tuple[Address, ...]
    database: int
    protocol: int


class ConnectionLostError(TierDown):
    """A server closed a connection that it had accepted."""


class Servers:
    """The servers of one tier. Safe to call from any thread."""

    def __init__(self, config: RedisAccess, where: str) -> None:
        """Raises `ConfigError`: the settings contradict each other, or cannot be used on this machine."""
        try:
            from redis.crc import key_slot

            from kv_remote import redis_connection
        except ImportError as error:
            raise ConfigError(
                f"{where}: Redis and Valkey need the package redis ({error}); pip install 'kv-remote[redis]'"
            ) from error
        self._config = config
        self._url = read_url(config, where)
        self._tls = _tls_files(config, where) if self._url.kind == "tls" else None
        if config.password_file:
            read_secret(Path(config.password_file), f"{where}: password_file")
        if config.password_env and not self._password():
            what = "is empty" if config.password_env in os.environ else "does not exist"
            raise ConfigError(f"{where}: password_env: the environment variable {config.password_env} {what}")
        self._slot_of = key_slot
        self._make_pool = redis_connection.RedisPool
        has_password = config.password_file or config.password_env
        self._credentials = redis_connection.Credentials(self._read_credentials) if has_password else None
        self._lock = threading.Lock()
        self._pools: dict[Address, RedisPool] = {}
        self._closed = False
        # Under a separate lock, because finding the servers waits for them.
        self._finding = threading.Lock()
        self._masters: list[Address] = []
        self._slots: list[Address | None] = []

    def addresses_of(self, names: Sequence[bytes]) -> list[Address]:
        """For each of these values, the server of the cluster that stores it. Raises `TierDown`: it cannot be
        determined."""
        _, slots = self._find_servers()
        addresses = []
        for name in names:
            slot = self._slot_of(name)
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
            self._pool(self._url.addresses[0]).disconnect(inuse_connections=False)

    def talk(self, address: Address, work: "Callable[[Connection], T]") -> T:
        """The result of a conversation with this server (`RedisPool.talk`). Raises `TierDown`."""
        try:
            return self._pool(address).talk(work)
        except TierDown:
            self.forget()
            raise

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
            match self._ask(address, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"):
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
            for pool in self._pools.values():
                pool.keep = 0
                pool.disconnect(inuse_connections=False)

    def _pool(self, address: Address) -> "RedisPool":
        with self._lock:
            if address not in self._pools:
                # Sentinels have neither users nor databases.
                is_sentinel = self._config.mode == "sentinel" and address in self._url.addresses
                self._pools[address] = self._make_pool(
                    address.host,
                    address.port,
                    keep=0 if self._closed else self._config.connections,
                    timeout_s=self._config.timeout_s,
                    tls=self._tls,
                    socket_connect_timeout=self._config.connect_timeout_s,
                    db=0 if is_sentinel else self._url.database,
                    protocol=self._url.protocol,
                    credential_provider=None if is_sentinel else self._credentials,
                    encoding_errors="surrogateescape",
                )
            return self._pools[address]

    def _read_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._password()
        return (self._config.username, password) if self._config.username else (password,)

    def _password(self) -> str:
        if self._config.password_env:
            return without_newline(os.environ.get(self._config.password_env, ""))
        try:
            secret = read_secret(Path(self._config.password_file), "password_file")
        except ConfigError as error:  # the file was changed since the start
            raise TierDown(str(error)) from None
        return without_newline(secret.decode("utf-8", "surrogateescape"))

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
                    # After a failover; nothing else would close them.
                    for address in self._pools.keys() - {*self._masters, *self._url.addresses}:
                        self._pools.pop(address).disconnect(inuse_connections=False)
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
                match self._ask(sentinel, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.encode()):
                    case [bytes(host), bytes(port)] if port.isdigit() and len(port) <= 5 and int(port) < 1 << 16:
                        return Address(host.decode("utf-8", "replace"), int(port))
                    case None:
                        reasons.append(f"{sentinel} knows of no master {master!r}")
                    case unexpected:
                        raise _unexpected(sentinel, unexpected)
            except TierDown as error:
                reasons.append(str(error))
        raise TierDown("; ".join(reasons))

    def _ask(self, address: Address, *words: bytes) -> Reply:
        """The answer. Forgets nothing, because this is called while the servers are being found. Raises `TierDown`."""
        return self._pool(address).talk(lambda connection: connection.ask(*words, max_bytes=_MAX_ANSWER_BYTES))


def _slots_in(answer: Reply, node: Address) -> list[Address | None]:
    """The server of each slot, from an answer to CLUSTER SLOTS: ranges, and the servers of each, the master first.
    Raises `TierDown`: the answer is something else."""
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
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    number = query.pop("db", "") if kind == "unix" else parts.path.removeprefix("/")
    protocol = query.pop("protocol", "2")
    if query or parts.fragment or protocol not in ("2", "3"):  # not repeated: it may be a password
        may_be = "db=number and protocol=3" if kind == "unix" else "protocol=3; a database is written after a /"
        raise ConfigError(f"{where}: url: after the ? there may only be {may_be}")
    if number and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{where}: url names the database {number!r}; write a number")
    if kind == "unix":
        if config.mode != "single" or not parts.path:
            raise ConfigError(f'{where}: a unix:// url names one socket\'s path and goes with mode = "single"')
        return Url(kind, (Address(unquote(parts.path), 0),), int(number or 0), int(protocol))
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
    return Url(kind, tuple(addresses), int(number or 0), int(protocol))


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
