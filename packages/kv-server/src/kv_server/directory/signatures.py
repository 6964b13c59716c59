"""Signatures on the directory's entries: whoever may write there cannot speak for a host.

An entry is signed with the key of its host's TLS certificate, and carries the certificate. A reader accepts it if the
certificate is one of its own authority's, is valid now, and names the host of the entry's address: that host is then
the only one that a reader connects to. A certificate that the authority has revoked counts no more. Someone who
repeats an old entry, or leaves entries out, causes misses: a host is read only once the process that signed has
answered there, so entries need no time in them.
"""

import re
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import (
    BasicConstraints,
    Certificate,
    DNSName,
    ExtensionType,
    IPAddress,
    SubjectAlternativeName,
    load_der_x509_certificate,
    load_pem_x509_certificates,
    load_pem_x509_crl,
)
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store
from kv_core.errors import ConfigError, InputError
from kv_remote.messages import Message, decoded
from kv_remote.tls_files import WatchedFiles
from kv_tiers.config import PeerSecurity

from kv_server.directory.entries import MAX_CHAIN_BYTES, MAX_ENTRY_BYTES, Entry, decode, encode

_MAX_VERIFIED: Final = 4096
_MAX_CHAIN: Final = 4
_LISTS: Final = re.compile(b"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_CONTEXT: Final = b"kv-directory "
"""What the keys sign here begins with this, so that it is nothing else that they might sign."""

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey
Der = Annotated[bytes, msgspec.Meta(max_length=MAX_CHAIN_BYTES)]


class SignedEntry(Message):
    """entry: as `entries.encode` writes it. chain: the certificate and those between it and the authority, as DER."""

    entry: Annotated[bytes, msgspec.Meta(max_length=MAX_ENTRY_BYTES)]
    chain: Annotated[list[Der], msgspec.Meta(min_length=1, max_length=_MAX_CHAIN)]
    signature: Annotated[bytes, msgspec.Meta(max_length=1 << 10)]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(SignedEntry)


class _Own:
    """Our key and certificates."""

    def __init__(self, cert_file: str, key_file: str, where: str) -> None:
        try:
            key = load_pem_private_key(Path(key_file).read_bytes(), None)
            chain = load_pem_x509_certificates(Path(cert_file).read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
        if not isinstance(key, Key):
            raise ConfigError(f"{where}: tls_key_file {key_file} is no key of ECDSA, RSA or Ed25519, which can sign")
        self.key = key
        self.chain = [certificate.public_bytes(Encoding.DER) for certificate in chain[:_MAX_CHAIN]]
        if sum(map(len, self.chain)) > MAX_CHAIN_BYTES:
            raise ConfigError(f"{where}: tls_cert_file {cert_file} has more than {MAX_CHAIN_BYTES} bytes")


class _Authority:
    """The certificate authorities, what they have revoked, and which certificates they were found to have issued."""

    def __init__(self, ca_file: str, where: str) -> None:
        try:
            file = Path(ca_file).read_bytes()
            self._store = Store(load_pem_x509_certificates(file))
            self._lists = [load_pem_x509_crl(found[0]) for found in _LISTS.finditer(file)]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: the tls files cannot be used: {error}") from error
        self._verified: dict[tuple[bytes, str], tuple[PublicKey, datetime]] = {}

    def key_of(self, chain: list[bytes], host: str) -> PublicKey:
        """The key of a host with this certificate. Raises `InputError`: the certificate is not valid, or does not name
        the host."""
        now = datetime.now(UTC)
        known = self._verified.get((chain[0], host))
        if known is None or now > known[1]:
            try:
                certificate, *others = map(load_der_x509_certificate, chain)
                verified = self._verify(certificate, others, host, now)
            except Exception as error:  # noqa: BLE001  # what a malformed certificate raises has no common class
                raise InputError(f"no certificate of {host} that is accepted here: {error}") from None
            known = verified, certificate.not_valid_after_utc
            if len(self._verified) >= _MAX_VERIFIED:
                self._verified.clear()
            self._verified[chain[0], host] = known
        return known[0]

    def _verify(self, certificate: Certificate, others: list[Certificate], host: str, now: datetime) -> PublicKey:
        try:
            name: DNSName | IPAddress = IPAddress(ip_address(host))
        except ValueError:
            name = DNSName(host)
        # What authorities of one's own write into other extensions is their affair, as it is OpenSSL's for connections.
        policy = PolicyBuilder().store(self._store).time(now)
        policy = policy.extension_policies(ca_policy=_needs(BasicConstraints), ee_policy=_needs(SubjectAlternativeName))
        issuer = policy.build_server_verifier(name).verify(certificate, others)[:2][-1]
        for revoked in self._lists:
            if (
                revoked.issuer == issuer.subject
                and revoked.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None
                and revoked.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]  # it has signed, so it can
            ):
                raise ValueError("it was revoked")
        key = certificate.public_key()
        if not isinstance(key, PublicKey):
            raise ValueError("its key signs nothing")
        return key


def _needs(extension: type[ExtensionType]) -> ExtensionPolicy:
    return ExtensionPolicy.permit_all().require_present(extension, Criticality.AGNOSTIC, None)


def _scheme(key: Key | PublicKey) -> tuple[Any, ...]:
    """What a key of this kind signs and verifies with, besides the message."""
    match key:
        case ec.EllipticCurvePrivateKey() | ec.EllipticCurvePublicKey():
            return (ec.ECDSA(SHA256()),)
        case rsa.RSAPrivateKey() | rsa.RSAPublicKey():
            return (padding.PKCS1v15(), SHA256())
    return ()


class Signatures:
    """For one thread. It follows files that are replaced."""

    def __init__(self, security: PeerSecurity, namespace: str, where: str) -> None:
        """namespace: of the directory, so that an entry counts in no other. Raises `ConfigError`: the tls files cannot
        be used."""
        ca_file, cert_file, key_file = security.tls_ca_file, security.tls_cert_file, security.tls_key_file
        self._own = WatchedFiles(lambda: _Own(cert_file, key_file, where), (cert_file, key_file), where)
        self._authority = WatchedFiles(lambda: _Authority(ca_file, where), (ca_file,), where)
        self._context = _CONTEXT + namespace.encode() + b" "

    def signed(self, entry: Entry) -> bytes:
        """Raises `ConfigError`: others would refuse it."""
        own, encoded = self._own.current(), encode(entry)
        signature = own.key.sign(self._context + encoded, *_scheme(own.key))
        written = _ENCODER.encode(SignedEntry(encoded, own.chain, signature))
        try:
            self.verified(written)
        except InputError as error:
            raise ConfigError(
                f"other hosts would refuse what we write into the directory: {error}; tls_cert_file must name the "
                f"host of {entry.address} (directory.address, or peers.listen)"
            ) from None
        return written

    def verified(self, written: bytes) -> Entry:
        """Raises `InputError`: it is no entry, or not one of the host at its address."""
        if len(written) > MAX_ENTRY_BYTES + MAX_CHAIN_BYTES:
            raise InputError(f"an entry of {len(written)} bytes is too large")
        signed = decoded(_DECODER, written, "not a signed entry of a directory")
        entry = decode(signed.entry)
        host, message = entry.host_port().host, self._context + signed.entry
        key = self._authority.current().key_of(signed.chain, host)
        try:
            key.verify(signed.signature, message, *_scheme(key))
        except InvalidSignature:
            raise InputError(f"an entry for {entry.address} that its host has not signed") from None
        return entry
