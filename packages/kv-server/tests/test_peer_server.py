"""The address for other hosts' servers: who is served there, what malformed peers cost, and nothing stays leased."""

import errno
import importlib.util
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core.errors import ConfigError, MisuseError, TierDown
from kv_core.outcome import Absent, Loaded, LoadOutcome
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_remote.messages import HEADER, Keys, pack_keys
from kv_remote.redis import make_redis_tier
from kv_server import launch
from kv_server.address import Ports
from kv_server.config import read_config
from kv_server.peers import server as peers
from kv_server.peers import wire as peers_wire
from kv_server.peers.side import PeerReads, peer_side
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_server.peers.wire import (
    MAX_FETCHED,
    MAX_OFFERED,
    MAX_REQUEST_BYTES,
    VERSION,
    Fetch,
    Follow,
    Offer,
    PeerHeld,
    PeerHello,
    PeerHolds,
    PeerReceived,
    PeerStream,
    Staging,
    frame,
)
from kv_testing.cache_servers import SLOT_BYTES, ThreadedServer, bytes_on, join_at, store
from kv_testing.certificates import Authority
from kv_testing.peers import PATIENT, address_of, is_whole, listening, reads_of, served_by
from kv_testing.servers import Answering, Proxy
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import joined, until
from kv_tiers.config import PeersConfig
from kv_tiers.tier import TierContext

pytestmark = pytest.mark.usefixtures("peers_in_process")
CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
KEYS = key_chain(3)


def filled(ending: ExitStack, **options: object) -> ThreadedServer:
    """A server that peers may ask, and that has `KEYS`."""
    server = listening(peers=options)
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    store(cache, KEYS)
    return server


def tier_at(ending: ExitStack, port: str, **options: object) -> PeersTier:
    tier = make_peers_tier({"hosts": [f"localhost:{port}"], **PATIENT, **options}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    return tier


def port_of(server: ThreadedServer) -> str:
    return address_of(server).rpartition(":")[2]


def leased_slots(server: ThreadedServer) -> list[int]:
    (cache,) = server.server.caches.values()
    return [slot for slot in range(cache.pool.slots) if cache._index.is_leased(slot)]


def connected(ending: ExitStack, server: ThreadedServer) -> PeerStream:
    """A peer that is served, and says what it likes."""
    sock = socket.create_connection(("127.0.0.1", int(port_of(server))))
    stream = PeerStream(sock)
    ending.callback(stream.close)
    stream.introduce(b"", time.monotonic() + 10)
    return stream


# Who is served.


def test_peers_with_certificates_of_one_authority_know_each_other(ending: ExitStack, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    server = filled(ending, **authority.issue("localhost"))
    tier = tier_at(ending, port_of(server), **authority.issue("elsewhere"))
    assert tier.holds(KEYS) == [True] * 3
    assert tier._hosts.peers()[0]._idle[0]._encrypted


@pytest.mark.parametrize(
    ("server_name", "server_of", "client_of"),
    [
        ("localhost", "ours", None),  # no certificate, no TLS
        ("localhost", "ours", "others"),
        ("localhost", "others", "ours"),
        ("another.host", "ours", "ours"),  # it proves a name that it was not asked by
        ("localhost", None, "ours"),
    ],
)
def test_who_has_no_right_certificate_is_nobody(
    ending: ExitStack, tmp_path: Path, server_name: str, server_of: str | None, client_of: str | None
) -> None:
    authorities = {name: Authority(tmp_path / name) for name in ("ours", "others")}
    server = filled(ending, **authorities[server_of].issue(server_name) if server_of else {})
    options = authorities[client_of].issue("client") if client_of else {}
    with pytest.raises(TierDown):
        tier_at(ending, port_of(server), **options).holds(KEYS)
    assert served_by(server).asked == 0


def test_a_client_that_shows_no_certificate_is_not_served(ending: ExitStack, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    server = filled(ending, **authority.issue("localhost"))
    context = ssl.create_default_context(cafile=authority.ca_file)
    with socket.create_connection(("127.0.0.1", int(port_of(server)))) as sock:
        sock.settimeout(10)
        # In TLS 1.3 the client's handshake ends before the server has looked at it.
        with (
            context.wrap_socket(sock, server_hostname="localhost") as wrapped,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        ):
            wrapped.recv(1)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is not None, reason="tests/engine/test_peers_by_nixl.py has it")
def test_where_nixl_is_missing_chunks_come_as_without(ending: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    server = filled(ending, nixl=True)
    tier = tier_at(ending, port_of(server), nixl=True)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["peers", "peers"]
    assert "kv-server[nixl]" in caplog.text
    assert [type(outcome) for outcome in tier.load(reads_of(CONTEXT, KEYS))] == [Loaded] * 3
    stream = connected(ending, server)
    stream.send_message(Fetch(CONTEXT.namespace, pack_keys(KEYS), staged=True), time.monotonic() + 10)
    stream.send_message(PeerHolds(CONTEXT.namespace, pack_keys(KEYS)), time.monotonic() + 10)
    assert stream.answer(Staging, time.monotonic() + 10) == Staging(b"", 0)
    assert stream.answer(PeerHeld, time.monotonic() + 10).held == b"\1" * 3  # nothing followed
    assert served_by(server).staged == 0


@pytest.mark.parametrize("expired", ["localhost", "elsewhere"])
def test_an_expired_certificate_counts_no_more_and_a_renewed_one_for_new_connections(
    ending: ExitStack, tmp_path: Path, expired: str
) -> None:
    """The server's, or its client's."""
    authority = Authority(tmp_path / "ours")
    files, options = (
        authority.issue(name, valid_h=-0.5 if name == expired else 24) for name in ("localhost", "elsewhere")
    )
    server = filled(ending, **files)
    with pytest.raises(TierDown, match="certificate.has.expired" if expired == "localhost" else None):
        tier_at(ending, port_of(server), **options).holds(KEYS)
    assert served_by(server).asked == 0
    authority.issue(expired)
    assert tier_at(ending, port_of(server), **options).holds(KEYS) == [True] * 3


def test_another_authority_counts_for_new_connections_of_a_running_tier(ending: ExitStack, tmp_path: Path) -> None:
    files, others = Authority(tmp_path / "ours").issue("localhost"), Authority(tmp_path / "others").issue("localhost")
    server = filled(ending, **others)
    tier = tier_at(ending, port_of(server), **files)
    with pytest.raises(TierDown, match="certificate"):
        tier.holds(KEYS)
    for name, file in files.items():
        Path(others[name]).replace(file)

    def holds() -> bool:
        with suppress(TierDown):  # it is left alone for a while
            return tier.holds(KEYS) == [True] * 3
        return False

    until(holds)


@pytest.mark.parametrize("wrong", ["key", "passphrase", "mode", "gone"])
def test_files_that_cannot_be_used_leave_a_running_server_with_those_of_before(
    ending: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    authority = Authority(tmp_path / "ours")
    files, options = authority.issue("localhost"), authority.issue("elsewhere")
    server = filled(ending, **files)
    key = Path(files["tls_key_file"])
    match wrong:
        case "key":  # renewed, and the certificate not yet
            key.write_bytes(Path(options["tls_key_file"]).read_bytes())
        case "passphrase":
            authority.issue("localhost", passphrase=b"hush")
        case "mode":
            key.chmod(0o644)
        case "gone":
            key.unlink()
    assert tier_at(ending, port_of(server), **options).holds(KEYS) == [True] * 3
    assert "the previous ones stay in use" in caplog.text
    caplog.clear()
    key.unlink(missing_ok=True)
    authority.issue("localhost")
    assert tier_at(ending, port_of(server), **options).holds(KEYS) == [True] * 3
    assert "the previous ones" not in caplog.text


def token_file(path: Path, token: str) -> str:
    path.touch(0o600)
    path.write_text(token)
    return str(path)


def files_in(directory: Path) -> dict[str, str]:
    return {f"tls_{kind}_file": str(directory / f"{kind}.pem") for kind in ("ca", "cert", "key")}


@dataclass
class Tap:
    """Somebody on the way to a server, who sees all and changes nothing."""

    port: int
    said: bytearray
    answered: bytearray


@pytest.fixture
def tapped(ending: ExitStack) -> Callable[[ThreadedServer], Tap]:
    def tap(server: ThreadedServer) -> Tap:
        line = Proxy(int(port_of(server)))
        ending.callback(line.close)
        made = Tap(line.port, bytearray(), bytearray())
        line.spoil_questions = lambda data: (made.said.extend(data), data)[1]
        line.spoil = lambda data: (made.answered.extend(data), data)[1]
        return made

    return tap


def test_a_token_is_checked_inside_tls_besides_the_certificates(
    ending: ExitStack, tmp_path: Path, tapped: Callable[[ThreadedServer], Tap]
) -> None:
    authority = Authority(tmp_path / "ours")
    files = authority.issue("localhost")
    ours, others = (token_file(tmp_path / name, f"{name} is a secret of some length") for name in ("ours.", "others."))
    server = filled(ending, **files, token_file=ours)
    tap = tapped(server)
    assert tier_at(ending, str(tap.port), **files, token_file=ours).holds(KEYS) == [True] * 3
    assert len(tap.said) > 500 and len(tap.answered) > 500 and b"secret" not in tap.said + tap.answered
    for token in ({"token_file": others}, {}):
        with pytest.raises(TierDown, match="for peers that have its token"):
            tier_at(ending, port_of(server), **files, **token).holds(KEYS)


def test_what_was_overheard_opens_nothing(
    ending: ExitStack, tmp_path: Path, tapped: Callable[[ThreadedServer], Tap]
) -> None:
    """Replayed to the server, and reflected to the client that said it."""
    files = Authority(tmp_path / "ours").issue("localhost")
    server = filled(ending, **files)
    tap = tapped(server)
    assert tier_at(ending, str(tap.port), **files).holds(KEYS) == [True] * 3
    asked = served_by(server).asked
    with socket.create_connection(("127.0.0.1", int(port_of(server)))) as sock:
        sock.settimeout(10)
        sock.sendall(tap.said)
        with suppress(OSError):
            while sock.recv(1 << 16):
                pass
    assert served_by(server).asked == asked

    def reflect(sock: socket.socket) -> None:
        sock.settimeout(10)
        with suppress(OSError):
            while received := sock.recv(1 << 16):
                sock.sendall(received)

    mirror = Answering(reflect)
    ending.callback(mirror.close)
    with pytest.raises(TierDown):
        tier_at(ending, str(mirror.port), **files).holds(KEYS)


def test_who_listens_in_a_peers_place_is_not_believed(ending: ExitStack, tmp_path: Path) -> None:
    """As any user of this host can at a loopback port, with a relay to the peer or a certificate of another name."""
    authority = Authority(tmp_path / "ours")
    files = authority.issue("localhost")
    impostor = filled(ending, **authority.issue("another.host"))
    with pytest.raises(TierDown, match="certificate"):
        tier_at(ending, port_of(impostor), **files).holds(KEYS)
    open_to_all = filled(ending)
    with pytest.raises(TierDown):
        tier_at(ending, port_of(open_to_all), **files).holds(KEYS)
    assert served_by(impostor).asked == served_by(open_to_all).asked == 0


@pytest.mark.parametrize("revoked", ["server", "client"])
def test_a_revoked_certificate_counts_no_more(ending: ExitStack, tmp_path: Path, revoked: str) -> None:
    """By `kv peers`, for servers that run: the list is in ca.pem."""
    assert main(["peers", "init", str(tmp_path / "peers"), "localhost,127.0.0.1", "client"]) == 0
    server_files, client_files = (files_in(tmp_path / "peers" / name) for name in ("localhost", "client"))
    server = filled(ending, **server_files)
    assert tier_at(ending, port_of(server), **client_files).holds(KEYS) == [True] * 3
    assert main(["peers", "revoke", str(tmp_path / "peers"), "localhost" if revoked == "server" else "client"]) == 0
    asked = served_by(server).asked
    with pytest.raises(TierDown, match="revoked" if revoked == "server" else None):  # a server may just hang up
        tier_at(ending, port_of(server), **client_files).holds(KEYS)
    assert served_by(server).asked == asked
    assert main(["peers", "init", str(tmp_path / "peers"), "localhost", "client"]) == 0
    assert tier_at(ending, port_of(server), **client_files).holds(KEYS) == [True] * 3


@pytest.mark.parametrize("revoked", ["server", "client"])
def test_a_revocation_ends_connections_that_are_open(ending: ExitStack, tmp_path: Path, revoked: str) -> None:
    """On the side that has the list. Who was not revoked connects again at once."""
    assert main(["peers", "init", str(tmp_path / "peers"), "localhost", "client", "other"]) == 0
    server_files, client_files = (files_in(tmp_path / "peers" / name) for name in ("localhost", "client"))
    former = tmp_path / "former.pem"
    former.write_bytes(Path(server_files["tls_ca_file"]).read_bytes())
    (server_files if revoked == "server" else client_files)["tls_ca_file"] = str(former)
    server = filled(ending, **server_files)
    tier = tier_at(ending, port_of(server), **client_files)
    assert tier.holds(KEYS) == [True] * 3
    (idle,) = tier._hosts.peers()[0]._idle
    assert main(["peers", "revoke", str(tmp_path / "peers"), "other"]) == 0
    assert tier.holds(KEYS) == [True] * 3
    assert tier._hosts.peers()[0]._idle != [idle]
    assert main(["peers", "revoke", str(tmp_path / "peers"), "localhost" if revoked == "server" else "client"]) == 0
    asked = served_by(server).asked
    with pytest.raises(TierDown):
        tier.holds(KEYS)
    assert served_by(server).asked == asked


def test_a_format_that_differs_in_smaller_groups_leaves_the_first_one_to_its_peers(ending: ExitStack) -> None:
    server = filled(ending)
    tier, formats = tier_at(ending, port_of(server)), server.server.formats
    first = formats.for_peers(CONTEXT.namespace)
    assert first is not None
    other = join_at(server.path, group_bytes=(CHUNK_BYTES, CHUNK_BYTES // 2))
    ending.callback(other.close)
    assert len(server.server.caches) == 2
    assert formats.for_peers(CONTEXT.namespace) == first and tier.holds(KEYS) == [True] * 3
    formats.publish(((CHUNK_BYTES,), "f"), first[0])  # as with tiers that were opened again
    again = formats.for_peers(CONTEXT.namespace)
    assert again is not None and again[0] is first[0] and again[1] is not first[1]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "10.0.0.1:9500"])
@pytest.mark.parametrize("token", [False, True])
def test_without_certificates_the_settings_must_say_that_this_is_meant(
    address: str, tmp_path: Path, token: bool
) -> None:
    """On loopback too, where any user of this host can listen in the place of a peer that is down; and a token protects
    nothing there."""
    secret = {"token_file": token_file(tmp_path / "token", "a secret of some length")} if token else {}
    message = "inside TLS only" if token else "or unprotected: true"
    refused: list[Mapping[str, object]] = [{"hosts": [address]}, {"directory": {"url": "redis://h"}}]
    for options in refused:
        with pytest.raises(ConfigError, match=message):
            make_peers_tier({**options, **secret}, CONTEXT)
        make_peers_tier({**options, "unprotected": True}, CONTEXT).close()
    with pytest.raises(ConfigError, match=message):
        peers.read_peers(PeersConfig(listen=address, **secret))
    if token:
        with pytest.raises(ConfigError, match=message):
            peers.read_peers(PeersConfig(listen=address, unprotected=True, **secret))
    peers.read_peers(PeersConfig(listen=address, unprotected=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "127.0.0.1:0"}, "`kv peers init` makes"),
        ({"listen": "127.0.0.1"}, "write a host and a port"),
        ({"listen": "127.0.0.1:0", "tls_cert_file": "/x"}, "go together"),
        ({"listen": "127.0.0.1:0", "token": "x"}, "did you mean 'peers.token_file'"),
    ],
)
def test_settings_that_cannot_be_honoured_end_the_start(
    options: Mapping[str, object], message: str, home: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        peers.PeerServer(read_config({"peers": options}).peers, lambda _: None, lambda _: None, Ports())


def test_secrets_that_others_can_read_end_the_start(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").issue("localhost")
    readable = Path(token_file(tmp_path / "token", "a secret of some length"))
    readable.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        peers.PeerServer(
            PeersConfig(listen="127.0.0.1:0", **files, token_file=str(readable)),
            lambda _: None,
            lambda _: None,
            Ports(),
        )
    Path(files["tls_key_file"]).chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        peers.PeerServer(PeersConfig(listen="127.0.0.1:0", **files), lambda _: None, lambda _: None, Ports())


def test_a_key_with_a_passphrase_ends_the_start_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").issue("localhost", passphrase=b"hush")
    with pytest.raises(ConfigError, match=f"{files['tls_key_file']} needs a passphrase"):
        peers.PeerServer(PeersConfig(listen="127.0.0.1:0", **files), lambda _: None, lambda _: None, Ports())
    redis = {"url": "rediss://h", **files}
    with pytest.raises(ConfigError, match=f"{files['tls_key_file']} needs a passphrase"):
        make_redis_tier(redis, CONTEXT)


def test_the_command_says_where_it_listens(home: Path) -> None:
    server = launch(
        {"host": {"capacity_bytes": SLOT_BYTES}, "peers": {"listen": "127.0.0.1:0", "unprotected": True}},
        socket=home / "s",
    )
    try:
        with socket.create_connection(("127.0.0.1", int(server.peers.rpartition(":")[2])), 10) as sock:
            PeerStream(sock).introduce(b"", time.monotonic() + 10)
    finally:
        server.stop()
    with pytest.raises(ConfigError, match="did not start"):
        launch({"peers": {"listen": "0.0.0.0:0"}}, socket=home / "s")


# What peers do wrong.


@pytest.fixture(scope="module")
def sturdy() -> Iterator[ThreadedServer]:
    """A server that hostile peers share."""
    with ExitStack() as stack:
        yield filled(stack)


def still_serves(server: ThreadedServer) -> bool:
    with ExitStack() as stack:
        stream = connected(stack, server)
        stream.send_message(PeerHolds(CONTEXT.namespace, pack_keys(KEYS)), time.monotonic() + 10)
        return stream.answer(PeerHeld, time.monotonic() + 10).held == b"\1\1\1"


MESSAGES = [
    PeerHello("x", b""),
    PeerHolds(CONTEXT.namespace, pack_keys(KEYS)),
    Fetch(CONTEXT.namespace, pack_keys(KEYS), staged=False),
    Fetch("another namespace", pack_keys(KEYS), staged=True),
    Follow(CONTEXT.namespace, b"", 0, 0.01),
    Follow("another namespace", bytes(16), 7, 0.01),
    PeerReceived(CONTEXT.namespace, pack_keys(KEYS)),
    Offer(CONTEXT.namespace, pack_keys(KEYS), 1, None),
    Offer("another namespace", pack_keys(key_chain(5, branch="offered")), 0, None),
]


@settings(max_examples=150, deadline=None)
@given(
    greeted=st.booleans(),
    data=st.one_of(
        st.binary(max_size=200),
        st.builds(lambda body: HEADER.pack(len(body), VERSION) + body, st.binary(max_size=200)),
        st.lists(st.sampled_from(MESSAGES), max_size=3).map(lambda some: b"".join(map(frame, some))),
        st.tuples(st.sampled_from(MESSAGES), st.integers(0, 1 << 16), st.integers(0, 7)).map(
            lambda drawn: flipped(frame(drawn[0]), drawn[1], drawn[2])
        ),
    ),
)
def test_whatever_comes_costs_its_own_connection_only(sturdy: ThreadedServer, greeted: bool, data: bytes) -> None:
    with ExitStack() as stack, suppress(ConnectionError):
        if greeted:
            connected(stack, sturdy).send([data], time.monotonic() + 10)
        else:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(port_of(sturdy)))))
            sock.sendall(data)
            with suppress(OSError):  # it has hung up already
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            while bytes_on(sock):
                pass
    assert still_serves(sturdy)
    until(lambda: served_by(sturdy).connections == 0)
    assert leased_slots(sturdy) == []


def flipped(data: bytes, at: int, bit: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        HEADER.pack(MAX_REQUEST_BYTES + 1, VERSION),
        HEADER.pack((1 << 32) - 1, VERSION),
        HEADER.pack(10, VERSION + 1) + bytes(10),
        frame(Fetch(CONTEXT.namespace, pack_keys(key_chain(MAX_FETCHED + 1)), staged=False)),
        frame(Fetch(CONTEXT.namespace, Keys(5, b"x" * 10), staged=True)),
        frame(PeerReceived(CONTEXT.namespace, Keys(5, b"x" * 10))),
        frame(Follow(CONTEXT.namespace, b"", 0, 1e9)),
        frame(Offer(CONTEXT.namespace, pack_keys(KEYS), len(KEYS), None)),
        frame(Offer(CONTEXT.namespace, pack_keys(KEYS), len(KEYS) + 9, None)),
        frame(Offer(CONTEXT.namespace, pack_keys(key_chain(MAX_OFFERED + 1)), 0, None)),
        frame(Offer(CONTEXT.namespace, pack_keys([*KEYS, *key_chain(2, salt="another")]), 0, None)),
        frame(Offer(CONTEXT.namespace, Keys(5, b"x" * 10), 0, None)),
        frame(Offer(CONTEXT.namespace, pack_keys(KEYS), 0, -1.0)),
        frame(PeerHello("again", b"")),
    ],
)
def test_what_is_no_request_ends_the_conversation(sturdy: ThreadedServer, data: bytes) -> None:
    with ExitStack() as stack:
        stream = connected(stack, sturdy)
        stream.send([data], time.monotonic() + 10)
        with pytest.raises(ConnectionResetError):
            stream.answer(PeerHeld, time.monotonic() + 10)
    assert still_serves(sturdy)


def test_chunks_that_cannot_be_had_take_no_longer_together_than_one(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader that waits for one after the other takes its tier to hang, and reads from no other host either."""
    monkeypatch.setattr(peers, "LOWER_S", 0.5)
    server = listening(2, tiers=[{"type": "dram", "capacity_bytes": 16 * SLOT_BYTES}])
    ending.callback(server.close)
    cache = join_at(server.path)
    ending.callback(cache.close)
    keys = [key_chain(1, branch=str(number))[0] for number in range(12)]
    for key in keys:
        store(cache, [key])
        (local,) = server.server.caches.values()
        until(partial(lambda local, key: local.lower.locate([key]) == ["dram"], local, key))
    in_pool = local.admin.resident_keys()
    below = [key for key in keys if key not in in_pool]
    tier, found = tier_at(ending, port_of(server)), list[LoadOutcome]()
    wanted = reads_of(CONTEXT, [*below[4:], *in_pool])
    reading = threading.Thread(target=lambda: found.extend(tier.load(wanted)), daemon=True)
    of_peers = server.server.formats.for_peers(CONTEXT.namespace)
    assert of_peers is not None
    with ExitStack() as slow:
        for key in below[:4]:  # peers on slow lines have all the memory for chunks of lower tiers
            assert slow.enter_context(of_peers[1].read(key, 60.0)) is not None
        reading.start()
        joined(reading, within_s=10.0)
    assert found == [Absent()] * 6 + [Loaded(CHUNK_BYTES)] * 2


def test_a_peer_that_reads_nothing_is_given_up_and_holds_no_chunk(ending: ExitStack) -> None:
    nbytes = 1 << 20
    server = listening(-(-2 * nbytes // SLOT_BYTES), peers={"timeout_s": 0.3})
    ending.callback(server.close)
    cache = server.join(group_bytes=(nbytes,))
    ending.callback(cache.close)
    cache.commit(cache.begin_store(KEYS[:1], "w"))
    stream = connected(ending, server)
    namespace = TierContext(nbytes, nbytes, "f").namespace
    stream.send_message(Fetch(namespace, pack_keys(KEYS[:1] * 32), staged=False), time.monotonic() + 10)
    until(lambda: leased_slots(server) != [])
    until(lambda: leased_slots(server) == [])
    until(lambda: served_by(server).connections == 0)


def test_a_bug_ends_the_connection_and_is_logged(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def confuse(*_arguments: object) -> NoReturn:
        raise MisuseError("a chunk that is ABSENT cannot EVICT")

    server = filled(ending)
    tier = tier_at(ending, port_of(server))
    monkeypatch.setattr(PeerReads, "holds", confuse)
    with pytest.raises(TierDown):
        tier.holds(KEYS)
    until(lambda: "serving a peer hit a bug" in caplog.text)


def test_a_newcomer_that_says_nothing_is_given_up(ending: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GREETING_S", 0.2)
    server = filled(ending)
    with socket.create_connection(("127.0.0.1", int(port_of(server)))):
        until(lambda: served_by(server).connections == 1)
        until(lambda: served_by(server).connections == 0)


def test_a_newcomer_that_begins_late_has_no_more_time_than_one_that_says_nothing(ending: ExitStack) -> None:
    ours, theirs = socket.socketpair()
    stream = PeerStream(ours)
    for each in (stream, theirs):
        ending.callback(each.close)
    theirs.sendall(b"\1")
    began_s = time.monotonic()
    with (
        mock.patch.object(stream, "fill", side_effect=TimeoutError) as fill,
        mock.patch.object(peers_wire, "time", mock.Mock(monotonic=mock.Mock(side_effect=[began_s, began_s + 4.0]))),
        pytest.raises(TimeoutError),
    ):
        stream.admit(b"", 5.0)
    assert fill.call_args.args[1] == began_s + 5.0


def test_a_peer_whose_host_is_gone_is_given_up(ending: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a half-open connection nothing is ever heard, not even its end."""
    monkeypatch.setattr(peers, "_IDLE_S", 0.2)
    server = filled(ending)
    connected(ending, server)
    until(lambda: served_by(server).connections == 0)


def test_there_are_no_more_connections_than_the_settings_allow(
    ending: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    server = filled(ending, max_connections=2)
    first, _ = connected(ending, server), connected(ending, server)
    with pytest.raises(ConnectionResetError):
        connected(ending, server)
    assert served_by(server).turned_away == 1
    until(lambda: "peers.max_connections allows, 2" in caplog.text)
    first.close()
    until(lambda: served_by(server).connections == 1)
    assert still_serves(server)


def test_a_peer_for_which_there_is_no_descriptor_is_counted_as_refused(
    ending: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, accept, shortages = filled(ending), socket.socket.accept, [errno.EMFILE]

    def short(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.family == socket.AF_INET and shortages:
            raise OSError(shortages.pop(), "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short)
    with pytest.raises(ConnectionError):
        connected(ending, server)
    until(lambda: "raise its limit (ulimit -n" in caplog.text)
    assert served_by(server).turned_away == 1
    assert still_serves(server)


def test_what_peers_read_changes_nothing_that_the_cache_counts_or_evicts_by(ending: ExitStack) -> None:
    server = filled(ending)
    (cache,) = server.server.caches.values()
    before = cache.counts()
    tier = tier_at(ending, port_of(server))
    assert tier.holds([*KEYS, *key_chain(1, branch="nobody's")]) == [True] * 3 + [False]
    assert cache.counts() == before
    assert leased_slots(server) == []


def test_a_chunk_that_is_forgotten_while_it_is_sent_leaves_afterwards(ending: ExitStack) -> None:
    server = filled(ending)
    (cache,) = server.server.caches.values()
    reads = peer_side(cache).reads("f")
    with reads.read(KEYS[0], 1.0) as stored:
        assert stored is not None
        was = bytes(stored.payload)
        cache.forget(KEYS)
        again = join_at(server.path)
        store(again, key_chain(7, branch="others"))  # of eight slots
        again.close()
        assert bytes(stored.payload) == was
    assert reads.holds(KEYS) == [False] * 3
    assert cache.counts().slots_used == 7


def test_a_server_that_stops_waits_for_no_peer(ending: ExitStack) -> None:
    nbytes = 8 << 20
    server = listening(-(-2 * nbytes // SLOT_BYTES))
    cache = server.join(group_bytes=(nbytes,))
    cache.commit(cache.begin_store(KEYS[:1], "w"))
    stream = connected(ending, server)
    namespace = TierContext(nbytes, nbytes, "f").namespace
    stream.send_message(Fetch(namespace, pack_keys(KEYS[:1] * 8), staged=False), time.monotonic() + 10)
    until(lambda: leased_slots(server) != [])
    cache.close()
    server.close()  # and its pool is unmapped, which a lent slot would keep from happening


def test_a_line_that_is_cut_anywhere_is_a_miss(ending: ExitStack) -> None:
    """Whatever byte of a whole conversation is the last that arrives."""
    server = filled(ending)
    line = Proxy(int(port_of(server)))
    ending.callback(line.close)
    rng = random.Random(1)
    whole = 0
    soon = {"connect_timeout_s": 0.2, "answer_timeout_s": 0.2, "timeout_s": 0.2}
    for _ in range(20):
        left = [rng.randrange(1, 2500)]

        def cut(data: bytes, left: list[int] = left) -> bytes | None:
            passed, left[0] = data[: left[0]], max(0, left[0] - len(data))
            return passed or None

        line.spoil = cut
        tier = tier_at(ending, str(line.port), **soon)
        with suppress(TierDown):
            assert sum(tier.holds(KEYS)) in (0, 3)
            reads = reads_of(CONTEXT, KEYS)
            for read, outcome in zip(reads, tier.load(reads), strict=True):
                assert outcome == Absent() or (outcome == Loaded(CHUNK_BYTES) and is_whole(CONTEXT, read))
                whole += isinstance(outcome, Loaded)
    assert 0 < whole < 20 * 3
    until(lambda: leased_slots(server) == [])


def test_while_another_process_takes_over_peers_are_answered_first_or_wait(ending: ExitStack) -> None:
    server = listening()
    ending.callback(server.close)
    admitted, asked = connected(ending, server), PeerHolds(CONTEXT.namespace, pack_keys(KEYS))
    pausing = threading.Thread(target=server.server._pause_ports)
    pausing.start()
    until(lambda: server.server._peers is not None and server.server._peers.is_closed)
    address = server.server.peers_address
    assert address is not None
    waiting = ending.enter_context(socket.create_connection((address.host, address.port), 10))
    deadline = time.monotonic() + 10
    admitted.send_message(asked, deadline)
    assert admitted.answer(peers_wire.PeerHeld, deadline).held == bytes(len(KEYS))
    joined(pausing)
    server.server.submit(server.server._go_on_serving).result(10)  # the other process has died
    assert server.server.peers_address == address
    late = PeerStream(waiting)
    late.introduce(b"", deadline)
    late.send_message(asked, deadline)
    assert late.answer(peers_wire.PeerHeld, deadline).held == bytes(len(KEYS))
