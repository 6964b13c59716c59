"""A certificate authority and certificates for tests of TLS. Needs `cryptography`."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """Its certificate is in `ca_file`, whatever it issues in the same directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {directory.name}")])
        self.ca_file = str(directory / "ca.pem")
        own = self._builder(self._name, self._key.public_key())
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(
            x509.KeyUsage(False, False, False, False, False, key_cert_sign=True, crl_sign=True, encipher_only=False,
                          decipher_only=False), critical=True,
        )  # fmt: skip
        Path(self.ca_file).write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self, host: str, *, valid_h: float = 24.0, passphrase: bytes = b"", kind: str = "ecdsa"
    ) -> dict[str, str]:
        """The three files of a peer that is called so, by the names of their settings. Those of before are replaced.

        valid_h: for how many hours from now; it began an hour ago.
        passphrase: of the key. kind: of the key: ecdsa, rsa or ed25519.
        """
        key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
        match kind:
            case "rsa":
                key = rsa.generate_private_key(65537, 2048)
            case "ed25519":
                key = ed25519.Ed25519PrivateKey.generate()
            case _:
                key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        made = self._builder(name, key.public_key(), valid_h)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        cert_file, key_file = self._directory / f"{host}.pem", self._directory / f"{host}.key"
        cert_file.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        key_file.touch(0o600)
        encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        return {"tls_ca_file": self.ca_file, "tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}

    def _builder(
        self, subject: x509.Name, key: CertificatePublicKeyTypes, valid_h: float = 24.0
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        ends = now + timedelta(hours=valid_h)
        made = x509.CertificateBuilder(
            self._name, subject, key, x509.random_serial_number(), now - timedelta(hours=1), ends
        )
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return made.add_extension(authority, critical=False)
