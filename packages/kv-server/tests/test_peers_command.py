"""`kv peers`: what it makes, and what it refuses. That servers accept and refuse by it is in test_peer_server.py."""

import os
import re
import ssl
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from kv_core.testing import key_chain
from kv_core.tools.cli import main
from kv_testing.cache_servers import held, join_at, read, store
from kv_testing.servers import free_port
from kv_testing.wait import line, until


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


def test_revoking_a_host_revokes_all_that_it_was_ever_given(tmp_path: Path) -> None:
    """Whoever renews a certificate because its key has leaked would revoke the new one."""
    from cryptography.x509 import load_pem_x509_certificate, load_pem_x509_crl

    ours, serials = tmp_path / "p", set()
    for _ in range(3):
        assert run("init", str(ours), "a") == 0
        serials.add(load_pem_x509_certificate((ours / "a" / "cert.pem").read_bytes()).serial_number)
    assert run("revoke", str(ours), "a") == 0
    revoked = load_pem_x509_crl((ours / "ca.pem").read_bytes())
    assert {one.serial_number for one in revoked} == serials and len(serials) == 3


def test_an_authority_whose_key_is_elsewhere_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "p"
    assert run("init", str(ours), "a") == 0
    before = (ours / "ca.pem").read_bytes()
    (ours / "ca.key").rename(tmp_path / "safe")
    assert run("init", str(ours), "b") == 2 and "is missing" in capsys.readouterr().err
    assert (ours / "ca.pem").read_bytes() == before


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


def test_the_commands_of_docs_peers_start_two_hosts_that_read_from_each_other(home: Path) -> None:
    """As the page has them, but for the hosts, which are two names of this machine, the ports, and the disk's size."""
    page = (Path(__file__).parents[3] / "docs" / "peers.md").read_text().partition("\n## Two hosts\n")[2]
    settings, commands = re.findall(r"^```(?:yaml)?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    first, second = (line.partition("#")[0].split() for line in commands.splitlines())
    bin_of = Path(sys.executable).parent
    a, b = (("localhost", free_port()), ("127.0.0.1", free_port()))
    names = [name.replace("kv-a.internal", a[0]).replace("kv-b.internal", b[0]) for name in first]
    subprocess.run([bin_of / names[0], *names[1:]], cwd=home, check=True, capture_output=True, timeout=60)
    with ExitStack() as ending:
        caches = []
        for (name, port), (other, other_port) in ((a, b), (b, a)):
            (there := home / f"host-{name}").mkdir(mode=0o700)
            text = settings.replace("kv-b.internal:9500", f"{other}:{other_port}").replace(
                "10.0.0.1:9500", f"127.0.0.1:{port}"
            )
            text = text.replace("/etc/kv", str(home / "peers" / name)).replace("/var/cache/kv", str(there / "disk"))
            (there / "kv.yaml").write_text(text.replace("4GiB", "1MiB").replace("500GiB", "64MiB"))
            # Short, or the sockets would be elsewhere, both at one place.
            runtime = ending.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))
            process = ending.enter_context(
                subprocess.Popen(
                    [bin_of / second[0], *second[1:]],
                    cwd=there,
                    env=os.environ | {"XDG_RUNTIME_DIR": runtime},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            ending.callback(process.terminate)
            said = line(process.stdout)
            assert said.startswith("READY") and f"peers=127.0.0.1:{port}" in said
            caches.append(join_at(Path(said.split()[1])))
            ending.callback(caches[-1].close)
        store(caches[0], keys := key_chain(3))
        until(lambda: held(caches[1], keys) == 3, within_s=60)
        assert read(caches[1], keys)
