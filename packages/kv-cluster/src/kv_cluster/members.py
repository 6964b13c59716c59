"""The servers of a fleet, as the settings of one of them find the others: by a directory, or a list.

A server's HTTP is at the host of its address for peers. An entry of a directory with TLS is signed by that host's key,
so no writer to the directory can send us, and the token, elsewhere.
"""

import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from kv_core.errors import ConfigError, InputError, TierDown
from kv_core.log import on_one_line
from kv_remote.host_port import HostPort, read_host_port
from kv_remote.messages import decoded
from kv_server.directory.directory import BEGINNING, DirectoryConfig, Position, Stream
from kv_server.directory.entries import Entry, decode
from kv_server.directory.mirror import MAX_OF_HOST
from kv_server.peers.security import check_protected, signatures_of
from kv_server.peers.tier import PeersTierConfig
from kv_tiers.approximate import fingerprint_of_tier
from kv_tiers.config import LaneConfig
from kv_tiers.options import read_options
from kv_tiers.tier import TierContext

KNOWN_S: Final = 300.0
"""A server that has written nothing for this long before the last entry is none of the fleet any more."""
_READ_S: Final = 20.0
_MAX_FORMATS: Final = 64
_WHERE: Final = "peers: directory"


@dataclass(frozen=True, slots=True)
class Member:
    """A server.

    name: the host and port where peers read from it.
    url: of its HTTP; empty: it is not known.
    withheld: why the token is not sent there; empty: it is.
    """

    name: str
    url: str
    withheld: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """How the HTTP of all members is reached.

    scheme, port: of each.
    is_unprotected: the operator says that the token may cross the network unencrypted, and go where unsigned entries
        lead.
    """

    scheme: str
    port: int
    is_unprotected: bool

    def member(self, address: HostPort, *, is_signed: bool) -> Member:
        withheld = ""
        if not self.is_unprotected:
            if self.scheme == "http" and not address.is_loopback:
                withheld = (
                    "the token would cross the network unencrypted: give --url https://{host}:PORT of a TLS proxy"
                )
            elif not is_signed:
                withheld = "entries of a directory without TLS are not signed, and could lead the token to anyone"
            withheld += ", or --unprotected" if withheld else ""
        return Member(str(address), f"{self.scheme}://{HostPort(address.host, self.port)}", withheld)


class Finder:
    """Finds the members: in a directory by the formats of their chunks, as each has a stream of its own there."""

    def __init__(self, tiers: Iterable[Mapping[str, object]], reach: Reach, listen: str = "") -> None:
        """tiers: as in the settings of a server. listen: its `peers.listen`; empty: these are no server's.
        Raises `ConfigError`: none is of type peers, or one cannot be honoured."""
        peers = [tier for tier in tiers if tier.get("type") == "peers"]
        if not peers:
            raise ConfigError("these settings name no other servers: there is no tier of type peers")
        self._tier = peers[0]
        own = {name: value for name, value in self._tier.items() if name not in ("type", *LaneConfig.__struct_fields__)}
        self._config = read_options(PeersTierConfig, own, "peers")
        check_protected(self._config, "peers")
        self._reach = reach
        self._own = read_host_port(listen, "peers: listen") if listen else None
        self._read: set[str] = set()
        self._latest: dict[tuple[str, str], Entry] = {}  # by stream and address, as a server may leave one of them
        self._of_host: Counter[tuple[str, bytes]] = Counter()  # by stream
        self.invalid = 0
        """Entries that are not what a server of this authority writes."""

    @property
    def has_directory(self) -> bool:
        return self._config.directory is not None

    @property
    def ca_file(self) -> str:
        return self._config.tls_ca_file

    def listed(self) -> list[Member]:
        """Those of the setting `hosts`, or found in the directory so far; of a host with several, none is reachable.
        Raises `ConfigError`: `hosts` may leave out the server whose settings these are, and its address is not
        known."""
        if self._config.directory is None:
            addresses = _with_own({read_host_port(host, "peers: hosts") for host in self._config.hosts}, self._own)
        else:
            addresses = {entry.host_port() for entry in self._latest.values()}
        is_signed = self._config.directory is None or bool(self._config.tls_ca_file)
        hosts = Counter(address.host for address in addresses)
        members = {address: self._reach.member(address, is_signed=is_signed) for address in sorted(addresses, key=str)}
        return [member if hosts[address.host] == 1 else replace(member, url="") for address, member in members.items()]

    def read(self, formats: Iterable[tuple[int, str]]) -> bool:
        """Read the directory for chunks of these sizes and fingerprints. Returns whether it was for any the first time.
        Raises `ConfigError`: the directory cannot be read, or has too many formats."""
        config = read_options(DirectoryConfig, self._config.directory or {}, _WHERE)
        contexts = [
            TierContext(size, size, fingerprint_of_tier(self._tier, fingerprint)) for size, fingerprint in formats
        ]
        new = {context.namespace for context in contexts} - self._read
        if len(new) + len(self._read) > _MAX_FORMATS:
            raise ConfigError(
                f"the servers have more than {_MAX_FORMATS} formats of chunks, which is more than is read"
            )
        for namespace in sorted(new):
            self._read.add(namespace)
            try:
                self._take(config, namespace)
            except TierDown as error:
                raise ConfigError(f"the directory cannot be read: {on_one_line(str(error))}") from None
        return bool(new)

    def _take(self, config: DirectoryConfig, namespace: str) -> None:
        signatures = signatures_of(self._config, namespace, _WHERE)
        stream = Stream(config, namespace, _WHERE)
        until_s = time.monotonic() + _READ_S
        try:
            last_ms, _ = stream.last()
            position: Position = max(BEGINNING, (last_ms - int(1000 * KNOWN_S), 0))
            while True:
                entries = stream.read(position)
                position = entries.upto
                for written in entries.written:
                    try:
                        claimed = decode(written if signatures is None else _inside(written))
                        known = self._latest.get((namespace, claimed.address))
                        if known is None or known.host != claimed.host or claimed.leaves:  # else it says nothing new
                            entry = claimed if signatures is None else signatures.verified(written)
                            self._note(namespace, entry, config.max_hosts)
                    except InputError:
                        self.invalid += 1
                if entries.is_all:
                    return
                if time.monotonic() > until_s:
                    raise ConfigError(f"the directory was not read to its end within {_READ_S:g} s")
        finally:
            stream.close()

    def _note(self, namespace: str, entry: Entry, max_hosts: int) -> None:
        place, host = (namespace, entry.address), (namespace, entry.host_port().identity)
        known = self._latest.get(place)
        has_room = len(self._latest) < max_hosts and self._of_host[host] < MAX_OF_HOST
        if not entry.leaves and (known is not None or has_room):
            self._latest[place] = entry
            self._of_host[host] += known is None
        elif entry.leaves and known is not None and known.host == entry.host:  # else another has taken its address over
            del self._latest[place]
            self._of_host[host] -= 1


def _with_own(listed: set[HostPort], own: HostPort | None) -> set[HostPort]:
    """A server need not list itself, but is one of all. Raises `ConfigError`: as for `listed`."""
    if own is None or not own.port or own in listed:
        return listed
    is_own = _is_local if own.is_unspecified else _addresses(own).__contains__
    if any(is_own(address) for host in listed if host.port == own.port for address in _addresses(host)):
        return listed
    if own.is_unspecified:
        raise ConfigError(
            f"peers: hosts names no address of this host with port {own.port}, so verbs for all servers would leave "
            "this one out: add it, which it skips itself"
        )
    return listed | {own}


def _addresses(host: HostPort) -> set[str]:
    try:
        return {str(address[0]) for *_, address in socket.getaddrinfo(host.host, host.port, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _is_local(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def _inside(written: bytes) -> bytes:
    """The entry in a signed one, which is not verified yet. Raises `InputError`: it is none."""
    from kv_server.directory.signatures import SignedEntry  # needs `cryptography`, as only TLS does

    return decoded(msgspec.msgpack.Decoder(SignedEntry), written, "not a signed entry of a directory").entry
