"""A certificate authority for the servers of some hosts, as a directory of files:

    ca.pem              its certificate and its list of revoked certificates
    ca.key              its key: whoever has it can be any host
    NAME/ca.pem cert.pem key.pem      what the host of this name gets
    NAME/serials        of all certificates that were issued for it

Files are replaced as a whole, so an interrupted call leaves the ones of before.
"""

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from kv_core.errors import ConfigError, InputError
from kv_tiers.pool.private_files import own_directory, read_secret

_AUTHORITY_DAYS: Final = 3650
_EARLIER: Final = timedelta(hours=1)
"""Certificates are valid from this long ago, because clocks differ."""
_NAME: Final = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kv-server peers")])
_SERIALS: Final = "serials"
_REMEDY: Final = "name a directory of your own"


class Authority:
    """Not safe to use from two processes at once."""

    def __init__(self, directory: Path, *, create: bool) -> None:
        """Raises `ConfigError`: there is none and `create` is False, or its files are not ours alone or cannot be used.
        Raises `OSError`: they cannot be read or written."""
        self._directory = directory
        key_file, ca_file = directory / "ca.key", directory / "ca.pem"
        if not key_file.exists():
            if ca_file.exists():
                raise ConfigError(f"{key_file}, the key of {ca_file}, is missing: put it there meanwhile")
            if not create:
                raise ConfigError(f"{directory} has no authority; `kv peers init {directory} HOST` makes one")
            own_directory(directory, _REMEDY, parents=True)
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._certificate, self._revoked = self._self_signed(), self._list([])
            _replace(key_file, _pem(self._key), mode=0o600)
            _replace(ca_file, self._public())
            return
        try:
            key = load_pem_private_key(read_secret(key_file, "the authority's key"), None)
            self._certificate = x509.load_pem_x509_certificate(ca_file.read_bytes())
            self._revoked = x509.load_pem_x509_crl(ca_file.read_bytes())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{ca_file} or {key_file} cannot be used: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self._certificate.public_key():
            raise ConfigError(f"{key_file} is not the key of {ca_file}")
        self._key = key

    def issue(self, names: list[str], days: int) -> Path:
        """The directory with the files of the host of these names and addresses. Those of before are replaced, and stay
        valid until they expire or are revoked."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
        made = self._builder(subject, key.public_key(), days, now)
        made = made.add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        host = self._directory / names[0]
        own_directory(host, _REMEDY)
        certificate = made.sign(self._key, SHA256())
        with (host / _SERIALS).open("a") as serials:
            serials.write(f"{certificate.serial_number}\n")
        _replace(host / "key.pem", _pem(key), mode=0o600)
        _replace(host / "cert.pem", certificate.public_bytes(Encoding.PEM))
        _replace(host / "ca.pem", self._public())
        return host

    def revoke(self, name: str) -> list[Path]:
        """Revoke all certificates issued for this name; returns all `ca.pem`, which say so from now on. Raises
        `InputError`: there is no such certificate."""
        host = self._directory / name
        try:
            certificate = x509.load_pem_x509_certificate((host / "cert.pem").read_bytes())
            issued = {int(serial) for serial in (host / _SERIALS).read_text().split()}
        except (OSError, ValueError) as error:
            raise InputError(f"{self._directory} has no certificate of {name}: {error}") from None
        serials = {revoked.serial_number for revoked in self._revoked} | {certificate.serial_number} | issued
        self._revoked = self._list(sorted(serials))
        files = [self._directory / "ca.pem", *sorted(self._directory.glob("*/ca.pem"))]
        for file in files:
            _replace(file, self._public())
        return files

    def _public(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM) + self._revoked.public_bytes(Encoding.PEM)

    def _self_signed(self) -> x509.Certificate:
        made = self._builder(_NAME, self._key.public_key(), _AUTHORITY_DAYS, datetime.now(UTC))
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        return made.add_extension(usage, critical=True).sign(self._key, SHA256())

    def _list(self, serials: list[int]) -> x509.CertificateRevocationList:
        now = datetime.now(UTC)
        made = x509.CertificateRevocationListBuilder().issuer_name(_NAME).last_update(now - _EARLIER)
        made = made.next_update(now + timedelta(days=_AUTHORITY_DAYS))  # OpenSSL refuses everyone by one out of date
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - _EARLIER)
            made = made.add_revoked_certificate(revoked.build())
        return made.sign(self._key, SHA256())

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime
    ) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder(
            _NAME, subject, key, x509.random_serial_number(), now - _EARLIER, now + timedelta(days=days)
        )
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return made.add_extension(issuer, critical=False)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _replace(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
