"""Authentication between peers: TLS 1.3 with certificates of both sides, unless the settings say that everyone who
reaches the network is a peer.

A client compares the certificate's names with the host that it connects to, so nobody can listen in a peer's place. A
token comes on top, for an authority that others have certificates of too, and is sent inside TLS only.
"""

import importlib.util
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_remote.nixl import NixlProcess
from kv_remote.tls_files import TlsFiles, load_certificate
from kv_tiers.config import PeerSecurity
from kv_tiers.pool.private_files import read_secret

from kv_server.peers.wire import MAX_TOKEN_BYTES
from kv_server.process import environment, module_command

if TYPE_CHECKING:  # it needs `cryptography`, as only directories do
    from kv_server.directory.signatures import Signatures

_log = limited_logger(__name__)
_MIN_TOKEN_BYTES: Final = 16
_CRL: Final = b"-----BEGIN X509 CRL-----"


def check_protected(security: PeerSecurity, where: str) -> None:
    """Raises `ConfigError`: there are no certificates, and the settings do not say that this is meant; or a token
    without them."""
    if any(_files(security)):
        return
    if security.token_file:
        raise ConfigError(
            f"{where}: a token_file is used inside TLS only; write tls_ca_file, tls_cert_file and tls_key_file, which "
            "`kv peers init` makes, or leave the token out"
        )
    if not security.unprotected:
        raise ConfigError(
            f"{where}: write tls_ca_file, tls_cert_file and tls_key_file, which `kv peers init` makes, or unprotected: "
            "true if everyone who can reach the network, any user of this host included, may read and forge chunks"
        )


def read_token(security: PeerSecurity, where: str) -> bytes:
    """The secret that all peers have; empty: there is none. Raises `ConfigError`: others could read it, or it is short
    or long."""
    if not security.token_file:
        return b""
    token = read_secret(Path(security.token_file), f"{where}: token_file")
    if not _MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(
            f"{where}: token_file {security.token_file} holds {len(token)} bytes; a token has {_MIN_TOKEN_BYTES} to "
            f"{MAX_TOKEN_BYTES}"
        )
    return token


def tls_files(security: PeerSecurity, where: str, *, is_server: bool) -> TlsFiles | None:
    """The files for connections on which both sides must present a certificate; None: none are configured. Raises
    `ConfigError`: the files cannot be used."""
    files = _files(security)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"{where}: tls_ca_file, tls_cert_file and tls_key_file go together; write all three")

    def make() -> ssl.SSLContext:
        # A client's context compares the certificate's names with the host that it connects to.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            trust(context, security.tls_ca_file)
            load_certificate(context, security.tls_cert_file, security.tls_key_file, where)
        except OSError as error:
            raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
        return context

    return TlsFiles(make, files, where)


def trust(context: ssl.SSLContext, ca_file: str) -> None:
    """Have the context accept what these authorities issued and, by the lists in the file, have not revoked. Raises
    `OSError`: the file cannot be used."""
    context.load_verify_locations(ca_file)
    if _CRL in Path(ca_file).read_bytes():
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def nixl_starter(security: PeerSecurity, where: str) -> Callable[[int], NixlProcess] | None:
    """Starts a process of NIXL with so many bytes. None: the settings do not allow it, or it is not installed, as the
    log then says."""
    if security.nixl and importlib.util.find_spec("nixl") is None:
        _log.warning("%s: chunks do not go by NIXL, which is not installed: pip install 'kv-server[nixl]'", where)
    elif security.nixl:
        return partial(NixlProcess, module_command("kv_remote.nixl"), environment())
    return None


def signatures_of(security: PeerSecurity, namespace: str, where: str) -> "Signatures | None":
    """Signatures for a directory's entries; None: there are no certificates. Raises `ConfigError`: the files cannot be
    used, or a package is missing."""
    if not security.tls_ca_file:
        return None
    try:
        from kv_server.directory.signatures import Signatures
    except ImportError as error:
        raise ConfigError(
            f"{where}: a directory with TLS needs cryptography ({error}); pip install 'kv-server[peers]'"
        ) from None
    return Signatures(security, namespace, where)


def _files(security: PeerSecurity) -> tuple[str, str, str]:
    return security.tls_ca_file, security.tls_cert_file, security.tls_key_file
