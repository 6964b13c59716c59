"""Whoever writes into the directory, listens where a server was, or answers anything: the token goes to the servers of
the fleet alone, and nothing that others say reaches the terminal as they wrote it."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from kv_cluster.client import Client, NotDone
from kv_cluster.members import Finder, Member, Reach
from kv_cluster.verbs import _Count, _tls
from kv_core.errors import ConfigError
from kv_remote.authority import Authority
from kv_remote.host_port import HostPort
from kv_server.directory.entries import VERSION, Entry, encode
from kv_server.directory.mirror import MAX_OF_HOST
from kv_server.directory.signatures import Signatures
from kv_testing.cache_servers import join_at, store
from kv_testing.fleet import TOKEN, FourServers, free_port, prompt
from kv_testing.servers import Answering
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.config import PeerSecurity
from kv_tiers.tier import TierContext

NAMESPACE = TierContext(CHUNK_BYTES, CHUNK_BYTES, "f").namespace
KINDS = ("ca", "cert", "key")
STATUS: dict[str, Any] = {
    "package": "0.1.0",
    "uptime_s": 1.0,
    "caches": [
        {
            "chunk_bytes": CHUNK_BYTES,
            "fingerprint": "f",
            "counts": {"slots_total": 1, "slots_used": 0, "chunks_resident": 0},
        }
    ],
}


class Impostor:
    """Answers every request with the same, and keeps what it was sent."""

    def __init__(self, host: str, port: int, tls: dict[str, str] | None = None) -> None:
        """tls: the files of its certificate."""
        self.received: list[bytes] = []
        self._tls = None
        if tls is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(tls["tls_cert_file"], tls["tls_key_file"])
        self.answer = answered(STATUS)
        self._listener = socket.create_server((host, port))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with suppress(OSError), connection:
                    connection.settimeout(5)
                    with (
                        connection if self._tls is None else self._tls.wrap_socket(connection, server_side=True) as said
                    ):
                        self.received.append(said.recv(1 << 16))
                        said.sendall(self.answer)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        joined(self._thread)
        self._listener.close()


def answered(body: object, status: str = "200 OK") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(text), text)


@pytest.fixture
def impostor(fleet: FourServers) -> Iterator[Impostor]:
    """Where no server is, at the fleet's port of HTTP."""
    made = Impostor("127.0.0.66", fleet.port)
    yield made
    made.close()


def write(fleet: FourServers, *entries: bytes, namespace: str = NAMESPACE) -> None:
    with redis.Redis.from_url(fleet.url) as client:
        for entry in entries:
            client.xadd(f"kv:directory:{namespace}", {"e": entry})


def entry_at(address: str, host: bytes = bytes(15) + b"i", **more: Any) -> Entry:
    return Entry(VERSION, host, address, 1, 0, bytes(8), **more)


def security_of(files: Path) -> PeerSecurity:
    return PeerSecurity(**{f"tls_{kind}_file": str(files / f"{kind}.pem") for kind in ("ca", "cert", "key")})


def signed(entry: Entry, files: Path, namespace: str = NAMESPACE) -> bytes:
    return Signatures(security_of(files), namespace, "test").signed(entry)


def test_a_poisoned_directory_leads_the_token_nowhere(fleet: FourServers, impostor: Impostor, tmp_path: Path) -> None:
    keys = prompt("secret", 2)
    store(fleet.caches[0], keys)
    others = Authority(tmp_path / "others", create=True).issue(["127.0.0.66"], 1)
    ours = Path(fleet.tls[0]["tls_cert_file"]).parent
    replayed = msgspec.msgpack.decode(signed(entry_at(fleet.name(0)), ours))
    moved = [encode(entry_at(f"127.0.0.66:{fleet.peers_port}")), *replayed[1:]]
    write(
        fleet,
        encode(entry_at(f"127.0.0.66:{fleet.peers_port}")),  # not signed
        signed(entry_at(f"127.0.0.66:{fleet.peers_port}"), others),  # by another authority
        msgspec.msgpack.encode(moved),  # another's signature
        signed(entry_at(fleet.name(1)), Path(fleet.tls[1]["tls_cert_file"]).parent, "another directory"),
        b"\xff" * 40000,
        b"",
    )
    texts = fleet.texts("where", keys=keys)
    assert len(texts) == 4 and texts[0].startswith("holds 2 of 2")
    assert fleet.said == "kv cluster: 6 entries of the directory are invalid, and not used\n"
    assert len(fleet.texts("clear", keys=keys)) == 4
    assert impostor.received == []


def test_without_signatures_or_encryption_the_token_is_sent_only_if_the_operator_says_so(
    fleet: FourServers, impostor: Impostor
) -> None:
    """What needs no token is asked."""
    keys = prompt("unprotected", 2)
    peers = {"type": "peers", "directory": {"url": fleet.url}, "unprotected": True}
    config = fleet.write_config("unsigned.json", {**fleet.settings(0), "tiers": [peers], "peers": {}})
    write(fleet, encode(entry_at(f"127.0.0.66:{fleet.peers_port}")))
    status, answer = fleet.run("health", config=config)
    assert [one["server"].partition(":")[0] for one in answer["servers"]] == ["127.0.0.66"] and status == 0
    status, answer = fleet.run("where", keys=keys, config=config)
    assert status == 1 and "entries of a directory without TLS are not signed" in answer["servers"][0]["text"]
    assert all(TOKEN.encode() not in received for received in impostor.received) and impostor.received
    fleet.run("where", "--unprotected", keys=keys, config=config)
    assert TOKEN.encode() in impostor.received[-1]
    # To another host, in the clear. Nobody is there; what counts is that it is not tried.
    peers = {"type": "peers", "hosts": ["203.0.113.1:9500"], "unprotected": True}
    config = fleet.write_config("listed.json", {**fleet.settings(0), "tiers": [peers], "peers": {}})
    (member,) = Finder([peers], Reach("http", 9400, False)).listed()
    assert "unencrypted" in member.withheld
    (member,) = Finder([peers], Reach("https", 9443, False)).listed()
    assert member.withheld == "" and member.url == "https://203.0.113.1:9443"


def test_the_token_goes_through_tls_to_whom_the_certificate_names(fleet: FourServers, tmp_path: Path) -> None:
    keys = prompt("through a proxy", 2)
    peers = {"type": "peers", "hosts": [fleet.name(0)], **fleet.tls[0]}
    config = fleet.write_config("proxied.json", {**fleet.settings(0), "tiers": [peers]})
    others = Authority(tmp_path / "others", create=True).issue(["127.0.0.11"], 1)
    strange = {f"tls_{kind}_file": str(others / f"{kind}.pem") for kind in ("cert", "key")}
    port = free_port()
    for files, is_right in ((fleet.tls[0], True), (fleet.tls[1], False), (strange, False)):
        proxy = Impostor("127.0.0.11", port, files)
        try:
            status, answer = fleet.run("where", "--url", f"https://{{host}}:{port}", keys=keys, config=config)
        finally:
            proxy.close()
        assert status == 1
        assert (TOKEN.encode() in b"".join(proxy.received)) == is_right
        assert ("certificate verify failed" in answer["servers"][0]["text"]) != is_right


def test_a_revoked_host_is_sent_no_token_and_the_systems_authorities_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, port = tmp_path / "ours", free_port()
    ours, others = Authority(made, create=True), Authority(tmp_path / "systems", create=True)
    files = {name: directory.issue(["127.0.0.11"], 1) for name, directory in (("ours", ours), ("systems", others))}
    monkeypatch.setenv("SSL_CERT_FILE", str(files["systems"] / "ca.pem"))

    def cleared(issuer: str) -> tuple[bool, str]:
        """Whether a proxy with this certificate was sent the token, and why not."""
        proxy = Impostor("127.0.0.11", port, {f"tls_{kind}_file": str(files[issuer] / f"{kind}.pem") for kind in KINDS})
        member = Reach("https", port, False).member(HostPort("127.0.0.11", 9500), is_signed=True)
        try:
            Client(TOKEN, _tls(str(made / "ca.pem"))).post(member, "/clear", {}, _Count)
            text = ""
        except NotDone as why:
            text = str(why)
        finally:
            proxy.close()
        return TOKEN.encode() in b"".join(proxy.received), text

    assert cleared("ours")[0] and cleared("systems")[0]
    ours.revoke("127.0.0.11")
    was_sent, text = cleared("ours")
    assert not was_sent and "certificate revoked" in text
    assert cleared("systems")[0]
    monkeypatch.setenv("SSL_CERT_FILE", str(made / "ca.pem"))  # where the system trusts the same authority
    was_sent, text = cleared("ours")
    assert not was_sent and "certificate revoked" in text


def test_a_list_of_the_others_leaves_its_own_server_out_of_nothing(fleet: FourServers) -> None:
    """Else what all but one were cleared of would be read there again."""
    keys = prompt("listed by the others", 2)
    peers = {"type": "peers", "hosts": [fleet.name(number) for number in (1, 2, 3)], **fleet.tls[0]}
    config = fleet.write_config("others.json", {**fleet.settings(0), "tiers": [peers]})
    store(fleet.caches[0], keys)
    assert len(fleet.run("clear", keys=keys, config=config)[1]["servers"]) == 4
    assert fleet.held(keys) == [0, 0, 0, 0]


def test_a_server_in_its_own_list_is_one_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(own: str, *hosts: str) -> list[str]:
        peers = {"type": "peers", "hosts": hosts, "unprotected": True}
        return [member.name for member in Finder([peers], Reach("http", 9400, False), own).listed()]

    named = {"kv-a.internal": "10.0.0.1", "kv-b.internal": "10.0.0.2"}

    def resolved(host: str, port: int, **_: Any) -> Any:
        if host.endswith(".unknown"):
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (named.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    both = ["kv-a.internal:95", "kv-b.internal:95"]
    assert listed("10.0.0.1:95", *both) == listed("kv-a.internal:95", *both) == listed("", *both) == both
    assert listed("10.0.0.1:95", both[1]) == ["10.0.0.1:95", both[1]]
    assert listed("10.0.0.1:95", "kv-a.internal:96", "kv-c.unknown:95")[0] == "10.0.0.1:95"
    assert listed("0.0.0.0:95", "127.0.0.1:95", both[1]) == ["127.0.0.1:95", both[1]]
    with pytest.raises(ConfigError, match="names no address of this host with port 95"):
        listed("0.0.0.0:95", "203.0.113.1:95", "127.0.0.1:96")
    assert listed("127.0.0.1:0", both[1]) == [both[1]]  # the port is not known, so nobody's list has it


def test_a_server_that_has_left_one_stream_is_still_in_the_other(fleet: FourServers) -> None:
    """As one that closed the cache of a format."""
    with closing(join_at(fleet.servers[0].socket, "g")) as cache:
        store(cache, prompt("of another format", 1))
        other = TierContext(CHUNK_BYTES, CHUNK_BYTES, "g").namespace
        with redis.Redis.from_url(fleet.url) as client:
            until(lambda: client.xlen(f"kv:directory:{other}"))
            ((_, fields),) = client.xrevrange(f"kv:directory:{other}", count=1)
        files = Path(fleet.tls[0]["tls_cert_file"]).parent
        last = Signatures(security_of(files), other, "test").verified(fields[b"e"])
        write(fleet, signed(entry_at(last.address, leaves=True, host=last.host), files, other), namespace=other)
        assert len(fleet.texts("health")) == 4


def test_one_host_takes_no_more_than_its_places_in_the_list(fleet: FourServers) -> None:
    """Its certificate signs for any port of its name, and so for as many as would keep the others out."""
    finder = Finder([{"type": "peers", "directory": {"url": fleet.url}, **fleet.tls[0]}], Reach("http", 9400, False))
    for port in range(1, 41):
        finder._note("n", entry_at(f"127.0.0.11:{port}", port.to_bytes(16, "little")), 20)
    assert len(finder.listed()) == MAX_OF_HOST
    finder._note("n", entry_at("127.0.0.11:1", (1).to_bytes(16, "little"), leaves=True), 20)
    for address in ("127.0.0.11:99", "127.0.0.11:100", "127.0.0.12:1"):
        finder._note("n", entry_at(address), 20)
    assert len(finder.listed()) == MAX_OF_HOST + 1


def test_a_name_of_several_servers_is_not_taken_for_one(fleet: FourServers, monkeypatch: pytest.MonkeyPatch) -> None:
    found, known = socket.getaddrinfo, fleet.name(0)

    def many(host: str, *rest: Any, **more: Any) -> Any:
        if host != "many.internal":
            return found(host, *rest, **more)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{number}", fleet.port)) for number in (11, 12)]

    monkeypatch.setattr(socket, "getaddrinfo", many)
    peers = {"type": "peers", "hosts": [known, f"many.internal:{fleet.peers_port}"], "unprotected": True}
    config = fleet.write_config("many.json", {**fleet.settings(0), "tiers": [peers], "peers": {}})
    status, answer = fleet.run("health", config=config)
    assert status == 1 and [one["done"] for one in answer["servers"]] == [True, False]
    assert "many.internal has 2 addresses" in answer["servers"][1]["text"]


HOSTILE = {
    "no JSON": answered(b"{"),
    "of another kind": answered({"package": 5}),
    "deep": answered(b"[" * 100000),
    "no HTTP": b"\x00" * 1000,
    "of no status": b"HTTP/1.1 banana\r\n\r\n",
    "cut": answered(STATUS)[:-5],
    "long": answered(b" " * (17 << 20)),
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    "elsewhere": answered(b"", "302 Found\r\nLocation: http://127.0.0.66:1/"),
    "a terminal's control": answered({"detail": "\x1b]0;owned\x07" + "x" * 5000}, "409 Conflict"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_a_server_answers_is_shown_in_a_line(fleet: FourServers, impostor: Impostor, kind: str) -> None:
    peers = {"type": "peers", "hosts": [f"127.0.0.66:{fleet.peers_port}", fleet.name(0)], "unprotected": True}
    config = fleet.write_config("hostile.json", {**fleet.settings(0), "tiers": [peers], "peers": {}})
    impostor.answer = HOSTILE[kind]
    status, answer = fleet.run("health", config=config)
    good, bad = answer["servers"]
    assert status == 1 and good["done"] and not bad["done"]
    assert bad["text"].isprintable() and len(bad["text"]) < 450


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"])
def test_an_answer_that_comes_in_drops_ends_in_time(begins: bytes) -> None:
    """Each byte comes soon enough, in the headers or the body."""
    ended = threading.Event()

    def drip(sock: socket.socket) -> None:
        sock.sendall(begins)
        for sent in range(500):
            sock.sendall(b"HTTP/1.1 200 OK\r\nA: "[sent : sent + 1] or b"a")
            if ended.wait(0.01):
                return

    drips = Answering(drip)
    client, began_s = Client("", []), time.monotonic()
    try:
        with pytest.raises(NotDone, match=r"no answer from .* within 0\.5 s"):
            client._ask(Member("a", f"http://127.0.0.1:{drips.port}"), "/status", None, _Count, 0.5)
        assert time.monotonic() - began_s < 2.5
    finally:
        ended.set()
        drips.close()


def test_what_a_server_says_of_itself_is_shown_escaped(fleet: FourServers, impostor: Impostor) -> None:
    peers = {"type": "peers", "hosts": [f"127.0.0.66:{fleet.peers_port}"], "unprotected": True}
    config = fleet.write_config("escaped.json", {**fleet.settings(0), "tiers": [peers], "peers": {}})
    impostor.answer = answered({**STATUS, "package": "\x1b[2J" + "y" * 1000})
    _, answer = fleet.run("health", config=config)
    assert "\\x1b[2Jyyy" in answer["servers"][0]["text"] and len(answer["servers"][0]["text"]) < 400
    impostor.answer = answered({**STATUS, "chunks": 10**9, "tiers": {"\x1b": 3}, "fingerprint": "f", "chunk_bytes": 1})
    status, answer = fleet.run("where", "--unprotected", keys=prompt("lied about", 2), config=config)
    assert status == 1 and "it says that it holds 1000000000 of 2 chunks" in answer["servers"][0]["text"]


def test_the_token_is_a_file_of_ones_own(fleet: FourServers, tmp_path: Path) -> None:
    keys = prompt("token", 2)
    token = tmp_path / "token"
    assert fleet.run("where", "--token-file", str(token), keys=keys)[0] == 2 and not token.exists()
    token.write_text("another-token-of-some-length")
    token.chmod(0o644)
    assert fleet.run("where", "--token-file", str(token), keys=keys)[0] == 2 and "chmod 600" in fleet.said
    token.chmod(0o600)
    status, answer = fleet.run("where", "--token-file", str(token), keys=keys)
    assert status == 1
    assert all(one["text"].startswith("it has another token") for one in answer["servers"])
