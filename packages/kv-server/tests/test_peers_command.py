"""`kv peers`: what it makes, and what it refuses. That servers accept and refuse by it is in test_peer_server.py."""

import ssl
from pathlib import Path

import pytest
from kv_core.tools.cli import main


def run(*words: str) -> int:
    return main(["peers", *words])


def test_hosts_can_be_added_and_renewed_and_the_authority_stays(tmp_path: Path) -> None:
    ours = tmp_path / "new" / "peers"
    assert run("init", str(ours), "kv-a,10.0.0.1") == 0
    authority, first = (ours / "ca.pem").read_bytes(), (ours / "kv-a" / "cert.pem").read_bytes()
    assert run("init", str(ours), "kv-b", "--days", "2") == 0
    assert run("init", str(ours), "kv-a") == 0
    assert (ours / "ca.pem").read_bytes() == authority == (ours / "kv-b" / "ca.pem").read_bytes()
    assert (ours / "kv-a" / "cert.pem").read_bytes() != first
    for host in ("kv-a", "kv-b"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(ours / host / "cert.pem", ours / host / "key.pem")
    for secret in (ours / "ca.key", ours / "kv-a" / "key.pem"):
        assert secret.stat().st_mode & 0o777 == 0o600
    assert ours.stat().st_mode & 0o777 == 0o700
    assert not list(ours.glob("**/*.new"))


def test_who_was_revoked_stays_so_when_others_are(tmp_path: Path) -> None:
    from cryptography.x509 import load_pem_x509_crl

    assert run("init", str(tmp_path / "p"), "a", "b", "c") == 0
    assert run("revoke", str(tmp_path / "p"), "a") == run("revoke", str(tmp_path / "p"), "b") == 0
    for file in (tmp_path / "p").glob("**/ca.pem"):
        assert len(list(load_pem_x509_crl(file.read_bytes()))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["init", "HOME/p", "kv-a:9500,../x"], "no name or address of a host"),
        (["init", "HOME/p", ".."], "no name or address of a host"),
        (["init", "HOME/p", "a/b"], "no name or address of a host"),
        (["init", "HOME/p", ""], "no name or address of a host"),
        (["init", "HOME/p", "a", "--days", "0"], "write 1 to 3650"),
        (["revoke", "HOME/p", "a"], "has no authority; `kv peers init"),
        (["init", "HOME/open", "a"], "chmod 600"),
        (["init", "HOME/swapped", "a"], "is not the key of"),
        (["init", "HOME/spoilt", "a"], "cannot be used"),
        (["revoke", "HOME/good", "nobody"], "has no certificate of nobody"),
        (["revoke", "HOME/good", "../good/a"], "is no name of a host"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("open", "swapped", "spoilt", "good"):
        assert run("init", str(tmp_path / name), "a") == 0
    (tmp_path / "open" / "ca.key").chmod(0o644)
    (tmp_path / "swapped" / "ca.pem").write_bytes((tmp_path / "good" / "ca.pem").read_bytes())
    (tmp_path / "spoilt" / "ca.pem").write_bytes(b"nothing")
    capsys.readouterr()
    assert run(*[word.replace("HOME", str(tmp_path)) for word in words]) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1
    assert not (tmp_path / "p").exists()
