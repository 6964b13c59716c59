"""Signed entries of a directory: who may write there speaks for no host, and sends nobody elsewhere."""

import select
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st
from kv_core.errors import ConfigError, InputError
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_server.directory.entries import VERSION, Entry, encode, names_of, pack
from kv_server.directory.signatures import Signatures, SignedEntry
from kv_server.peers.tier import PeersTier, make_peers_tier
from kv_testing.cache_servers import SLOT_BYTES, join_at, store
from kv_testing.certificates import Authority
from kv_testing.peers import listening, reads_of, served_by
from kv_testing.redis_servers import running
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until
from kv_tiers.config import PeerSecurity
from kv_tiers.tier import TierContext

pytestmark = pytest.mark.usefixtures("peers_in_process", "redis_servers_end")
CONTEXT = TierContext(CHUNK_BYTES, SLOT_BYTES, "f")
ENTRY = Entry(VERSION, bytes(16), "localhost:9500", 1, 0, bytes(8))
QUICK = {"interval_s": 0.02, "lease_s": 1.0, "timeout_s": 0.5}


def signatures(files: dict[str, str], namespace: str = "n") -> Signatures:
    return Signatures(PeerSecurity(**files), namespace, "test")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.mark.parametrize("kind", ["ecdsa", "rsa", "ed25519"])
def test_an_entry_that_its_host_signed_is_accepted(authority: Authority, kind: str) -> None:
    ours, theirs = signatures(authority.issue("localhost", kind=kind)), signatures(authority.issue("reader"))
    for entry in (ENTRY, msgspec.structs.replace(ENTRY, leaves=True)):
        assert theirs.verified(ours.signed(entry)) == entry


def test_addresses_are_names_too(tmp_path: Path) -> None:
    assert main(["peers", "init", str(tmp_path / "ours"), "kv-a,10.0.0.1,::1"]) == 0
    files = {f"tls_{kind}_file": str(tmp_path / "ours" / "kv-a" / f"{kind}.pem") for kind in ("ca", "cert", "key")}
    for address in ("kv-a:1", "10.0.0.1:1", "[::1]:1"):
        entry = msgspec.structs.replace(ENTRY, address=address)
        assert signatures(files).verified(signatures(files).signed(entry)) == entry
    with pytest.raises(ConfigError, match="tls_cert_file must name the host of"):
        signatures(files).signed(msgspec.structs.replace(ENTRY, address="10.0.0.2:1"))


@pytest.mark.parametrize("wrong", ["unsigned", "entry", "host", "namespace", "expired", "another's key", "authority"])
def test_what_its_host_did_not_sign_is_refused(authority: Authority, tmp_path: Path, wrong: str) -> None:
    files = authority.issue("localhost")
    reader, written = signatures(authority.issue("reader")), signatures(files).signed(ENTRY)
    assert reader.verified(written) == ENTRY
    signed = msgspec.msgpack.decode(written, type=SignedEntry)
    moved = encode(msgspec.structs.replace(ENTRY, address="reader:9500"))
    match wrong:
        case "unsigned":
            written = encode(ENTRY)
        case "entry":
            other = msgspec.structs.replace(ENTRY, sequence=2)
            written = msgspec.msgpack.encode(msgspec.structs.replace(signed, entry=encode(other)))
        case "host":  # a peer, for another one
            written = msgspec.msgpack.encode(msgspec.structs.replace(signed, entry=moved))
        case "namespace":
            written = signatures(files, "another").signed(ENTRY)
        case "expired":
            expired = authority.issue("localhost", valid_h=-0.5)
            with pytest.raises(ConfigError, match="other hosts would refuse"):
                signatures(expired).signed(ENTRY)
            return
        case "another's key":
            stolen = load_pem_private_key(Path(authority.issue("stranger")["tls_key_file"]).read_bytes(), None)
            assert isinstance(stolen, ec.EllipticCurvePrivateKey)
            signature = stolen.sign(b"kv-directory n " + signed.entry, ec.ECDSA(SHA256()))
            written = msgspec.msgpack.encode(msgspec.structs.replace(signed, signature=signature))
        case "authority":
            written = signatures(Authority(tmp_path / "others").issue("localhost")).signed(ENTRY)
    with pytest.raises(InputError):
        reader.verified(written)


def test_renewed_files_count_at_once(authority: Authority, tmp_path: Path) -> None:
    files, reader_files = authority.issue("localhost"), authority.issue("reader")
    ours, reader = signatures(files), signatures(reader_files)
    assert reader.verified(ours.signed(ENTRY)) == ENTRY
    authority.issue("localhost")
    assert reader.verified(ours.signed(ENTRY)) == ENTRY
    others = Authority(tmp_path / "others")
    Path(authority.ca_file).write_bytes(Path(others.ca_file).read_bytes())
    with pytest.raises(ConfigError, match="other hosts would refuse"):  # and not by what it remembers
        ours.signed(ENTRY)


def test_a_revoked_host_signs_nothing_more(tmp_path: Path) -> None:
    """Nor for a reader that knows its certificate already; a list that another authority signed revokes nothing."""
    made = tmp_path / "ours"
    assert main(["peers", "init", str(made), "localhost", "reader"]) == 0
    ours, theirs = ({f"tls_{kind}_file": str(made / name / f"{kind}.pem") for kind in ("ca", "cert", "key")}
                    for name in ("localhost", "reader"))  # fmt: skip
    public = (made / "ca.pem").read_bytes()
    reader, written = signatures(theirs), signatures(ours).signed(ENTRY)
    assert reader.verified(written) == ENTRY
    assert main(["peers", "revoke", str(made), "localhost"]) == 0
    with pytest.raises(InputError, match="it was revoked"):
        reader.verified(written)
    assert main(["peers", "init", str(tmp_path / "others"), "localhost"]) == 0
    (tmp_path / "others" / "localhost" / "cert.pem").write_bytes((made / "localhost" / "cert.pem").read_bytes())
    assert main(["peers", "revoke", str(tmp_path / "others"), "localhost"]) == 0
    forged = (tmp_path / "others" / "ca.pem").read_bytes()
    Path(theirs["tls_ca_file"]).write_bytes(public + forged[forged.index(b"-----BEGIN X509 CRL") :])
    assert reader.verified(written) == ENTRY


@given(st.binary(max_size=300), st.integers(0, 1 << 14), st.integers(0, 7))
def test_damaged_entries_say_nothing_else(sturdy: tuple[Signatures, bytes], junk: bytes, at: int, bit: int) -> None:
    reader, written = sturdy
    flipped = bytearray(written)
    flipped[at % len(flipped)] ^= 1 << bit
    for wrong in (junk, bytes(flipped), written[: at % len(written)], bytes(1 << 16)):
        with suppress(InputError):
            assert reader.verified(wrong) == ENTRY  # a certificate's encoding has bits that mean nothing


@pytest.fixture(scope="module")
def sturdy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Signatures, bytes]:
    files = Authority(tmp_path_factory.mktemp("ca") / "ours").issue("localhost")
    return signatures(files), signatures(files).signed(ENTRY)


def test_servers_find_each_other_by_signed_entries_and_by_no_others(ending: ExitStack, authority: Authority) -> None:
    """A writer without a key names an address for a host that exists, one of its own, and says that the host left."""
    valkey, server, tier, cache, _keys = found(ending, authority)
    state = tier.directory_state()
    assert state is not None and state.hosts == 1
    (host,) = tier._directory._mirror._hosts.values()  # type: ignore[union-attr]
    (stream,) = valkey.ask("KEYS", "kv:directory:*")
    with socket.create_server(("127.0.0.1", 0)) as trap:
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        there = str(host.address)
        for entry in (
            Entry(VERSION, b"l" * 16, address, 1, 1 << 20, bytes(8)),
            Entry(VERSION, host.id, address, 1 << 20, 1 << 20, bytes(8)),
            Entry(VERSION, b"l" * 16, there, 1, 0, bytes(8)),
            Entry(VERSION, host.id, there, 1 << 40, 0, bytes(8), leaves=True),
        ):
            valkey.ask("XADD", stream, "*", "e", encode(entry))
        store(cache, key_chain(6))
        until(lambda: tier.holds(key_chain(6)) == [True] * 6)
        assert not select.select([trap], [], [], 0.2)[0], "nobody has connected"
    assert [known.id for known in tier._directory._mirror._hosts.values()] == [host.id]  # type: ignore[union-attr]
    assert served_by(server).turned_away == 0


def test_a_hosts_former_entries_that_are_repeated_cost_misses_only(ending: ExitStack, authority: Authority) -> None:
    """Of a process that has ended: at its former address another one listens, at the same one its successor."""
    valkey, _server, tier, _cache, keys = found(ending, authority)
    mirror = tier._directory._mirror  # type: ignore[union-attr]
    (host,) = mirror._hosts.values()
    (stream,) = valkey.ask("KEYS", f"kv:directory:{CONTEXT.namespace}")
    files, lost = signatures(authority.issue("localhost"), CONTEXT.namespace), key_chain(4, branch="lost")
    names = pack(names_of(lost))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        moved = Entry(VERSION, b"m" * 16, f"localhost:{stranger.getsockname()[1]}", 1, 4, bytes(8), added=names)
        before = Entry(VERSION, b"b" * 16, str(host.address), 1, 4, bytes(8), added=names)
        for entry in (moved, before):
            valkey.ask("XADD", stream, "*", "e", files.signed(entry))
        assert select.select([stranger], [], [], 10.0)[0], "TLS begins there, and a stranger has no certificate"
        with stranger.accept()[0] as connection:
            assert connection.recv(1)
        assert tier.holds(lost) == [False] * 4
    until(lambda: tier.holds(keys) == [True] * 4)
    assert tier.holds(lost) == [False] * 4
    assert tier.load(reads_of(CONTEXT, keys)) == [Loaded(CHUNK_BYTES)] * 4


def test_a_server_whose_certificate_does_not_name_its_address_says_so(ending: ExitStack, authority: Authority) -> None:
    directory = {"url": running("signed directory").url, **QUICK, "address": "elsewhere:9500"}
    files = authority.issue("localhost")
    server = listening(8, tiers=[{"type": "peers", "directory": directory, **files}], peers=files)
    ending.callback(server.close)
    cache = server.join("f")
    ending.callback(cache.close)

    def why() -> str:
        (one,) = server.report().caches
        return one.directories["peers"].why

    until(lambda: "tls_cert_file must name the host of elsewhere:9500" in why())


def found(ending: ExitStack, authority: Authority) -> tuple[Any, Any, PeersTier, Any, list[ChunkKey]]:
    """A directory, a server in it, a reader, a client of the server, and what it has stored and the reader finds."""
    valkey = running("signed directory")
    directory = {"url": valkey.url, **QUICK}
    server, tier, keys = listed(ending, authority, directory), reader(ending, authority, directory), key_chain(4)
    cache = join_at(server.path)
    ending.callback(cache.close)
    store(cache, keys)
    until(lambda: tier.holds(keys) == [True] * 4)
    return valkey, server, tier, cache, keys


def listed(ending: ExitStack, authority: Authority, directory: dict[str, object]) -> Any:
    files = authority.issue("localhost")
    options = {**directory, "address": ""}
    server = listening(
        8, tiers=[{"type": "peers", "directory": options, **files}], peers={**files, "listen": "localhost:0"}
    )
    ending.callback(server.close)
    return server


def reader(ending: ExitStack, authority: Authority, directory: dict[str, object]) -> PeersTier:
    tier = make_peers_tier({"directory": directory, **authority.issue("reader"), "answer_timeout_s": 10.0}, CONTEXT)
    assert isinstance(tier, PeersTier)
    ending.callback(tier.close)
    tier.holds(key_chain(1, branch="nobody's"))
    return tier
