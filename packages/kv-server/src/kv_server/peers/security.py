"""Authentication between peers: certificates of one authority, a shared token, or loopback addresses only.

A token alone is proved once, when a connection begins. The proofs name the address at which the connecting side has
reached the other, so that nobody can pass them on from another address. But nothing protects what follows from those on
the way, or from a user of the host who listens at a peer's address in its place: whoever wants that has to say so.
"""

import hmac
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError
from kv_remote.tls_files import TlsFiles, load_certificate
from kv_tiers.config import PeerSecurity
from kv_tiers.host_port import HostPort
from kv_tiers.pool.private_files import read_secret

_MIN_TOKEN_BYTES: Final = 16


def check_protected(security: PeerSecurity, addresses: Sequence[HostPort], where: str) -> None:
    """
    Raises:
        ConfigError: an address is reachable from other machines, and they would not be authenticated; or a token is to
            be used without TLS, and the settings do not say that this is meant.
    """
    if security.token_file and not security.tls_ca_file and not security.token_without_tls:
        raise ConfigError(
            f"{where}: a token_file without tls_ca_file, tls_cert_file and tls_key_file protects nothing from anyone "
            "on the way, or who listens where a peer should, as any user of this host can; write the tls files, or "
            "token_without_tls: true if nobody else can be there"
        )
    for address in addresses:
        if not is_protected(security, address):
            raise ConfigError(
                f"{where}: {address} is beyond this machine; write tls_ca_file, tls_cert_file and tls_key_file, or a "
                "token_file, or unprotected: true if everyone who can reach the network may read and forge chunks"
            )


def is_protected(security: PeerSecurity, address: HostPort) -> bool:
    """Whether a server may listen at this address, or a client connect to it."""
    return bool(security.tls_ca_file or security.token_file or security.unprotected) or address.is_loopback


def read_token(security: PeerSecurity, where: str) -> bytes:
    """The secret that all peers have; empty: there is none.

    Raises:
        ConfigError: others could read it, or it is short.
    """
    if not security.token_file:
        return b""
    token = read_secret(Path(security.token_file), f"{where}: token_file")
    if len(token) < _MIN_TOKEN_BYTES:
        raise ConfigError(
            f"{where}: token_file {security.token_file} holds {len(token)} bytes; a token has {_MIN_TOKEN_BYTES}"
        )
    return token


def tls_files(security: PeerSecurity, where: str, *, is_server: bool) -> TlsFiles | None:
    """The files for connections on which both sides must present a certificate; None: none are configured.

    Raises:
        ConfigError: the files cannot be used.
    """
    files = (security.tls_ca_file, security.tls_cert_file, security.tls_key_file)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"{where}: tls_ca_file, tls_cert_file and tls_key_file go together")

    def make() -> ssl.SSLContext:
        # A client's context compares the certificate's names with the host that it connects to.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(security.tls_ca_file)
            load_certificate(context, security.tls_cert_file, security.tls_key_file, where)
        except OSError as error:
            raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
        return context

    return TlsFiles(make, files, where)


def prove(token: bytes, side: bytes, conversation: bytes) -> bytes:
    """Proof that this side of this conversation has the token; empty if there is no token.

    conversation: the nonces of both sides, and the address of the listening one.
    """
    return hmac.digest(token, side + conversation, "sha256") if token else b""


def is_proof(proof: bytes, token: bytes, side: bytes, conversation: bytes) -> bool:
    return hmac.compare_digest(proof, prove(token, side, conversation))
