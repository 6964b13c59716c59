"""Encryption at rest: what a tier keeps of a chunk is AES-256-GCM ciphertext, under a key of the chunk's tenant.

The operator's key, from a file, encrypts nothing itself: each tenant's key is derived from it (HKDF-SHA256, RFC 5869),
and the chunk's own name is authenticated with its bytes (NIST SP 800-38D). So bytes that are changed, or moved to
another chunk's or tenant's place, are damaged, whoever wrote them. The headers stay readable: they have keys, which are
hashes, sizes, and in the place of a checksum the ciphertext's tag, and none of the chunk's own bytes.

Encrypted chunks are of a chunk format of their own, one for each key of an operator, and formats share no namespace. So
a cache with another key, or without one, finds none of these chunks, nor touches them.
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey

from kv_tiers.chunk_header import format_id
from kv_tiers.pool.private_files import read_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADCipherContext, CipherAlgorithm

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
_MAX_TENANTS: Final = 1024
"""How many tenants' keys are remembered. Deriving one takes microseconds."""


class Cipher:
    """Encrypts and decrypts for one lane. Thread-safe. A tenant's key is good for 2³² chunks: a nonce is random.

    fingerprint: identifies the format of the encrypted chunks, with this key.
    plain_format_id: identifies the format of the same chunks unencrypted (`chunk_header.format_id`).
    """

    def __init__(self, key: bytes, fingerprint: str) -> None:
        """key: 32 bytes. fingerprint: identifies the format of the unencrypted chunks.
        Raises `ConfigError`: the package cryptography is not installed."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives import ciphers
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise ConfigError("encryption needs the package cryptography; pip install 'kv-tiers[encryption]'") from None

        def aes_of(tenant: bytes) -> ciphers.CipherAlgorithm:
            return ciphers.algorithms.AES256(HKDF(SHA256(), KEY_BYTES, None, b"kv-tiers tenant " + tenant).derive(key))

        self._library = ciphers
        self._invalid = InvalidTag
        self._aes_of = aes_of
        self._by_tenant: dict[bytes, ciphers.CipherAlgorithm] = {}
        self.fingerprint = f"{fingerprint} aes-256-gcm {hashlib.sha256(b'kv-tiers key ' + key).hexdigest()}"
        self.plain_format_id = format_id(fingerprint)

    def encrypt(self, key: ChunkKey, names: bytes, payload: memoryview, out: memoryview) -> tuple[bytes, bytes]:
        """Write the ciphertext of a payload to `out`, which is as long, and may be the same memory. Returns its nonce
        and its tag, which verifies it as a checksum would.

        names: what else identifies these bytes.
        """
        nonce = os.urandom(NONCE_BYTES)
        running = self._library.Cipher(self._aes(key.tenant), self._library.modes.GCM(nonce)).encryptor()
        running.authenticate_additional_data(bytes(key) + names)
        _run(running, payload, out)
        return nonce, running.tag

    def decrypt(self, key: ChunkKey, names: bytes, nonce: bytes, tag: bytes, payload: memoryview) -> bool:
        """Decrypt a payload in its place. False: these are not the bytes that were encrypted, and what is there now is
        of no use.

        nonce, tag: from `encrypt`.
        """
        if len(nonce) != NONCE_BYTES:
            return False
        running = self._library.Cipher(self._aes(key.tenant), self._library.modes.GCM(nonce, tag)).decryptor()
        running.authenticate_additional_data(bytes(key) + names)
        try:
            _run(running, payload, payload)
        except self._invalid:
            return False
        return True

    def _aes(self, tenant: bytes) -> "CipherAlgorithm":
        known = self._by_tenant.get(tenant)
        if known is None:
            if len(self._by_tenant) >= _MAX_TENANTS:
                self._by_tenant = {}
            known = self._by_tenant[tenant] = self._aes_of(tenant)
        return known


def _run(running: "AEADCipherContext", source: memoryview, out: memoryview) -> None:
    running.update_into(source, out)  # without the interpreter's lock, since release 50 of the library
    running.finalize()


def read_cipher(path: str, fingerprint: str, where: str) -> Cipher:
    """The cipher with the key in a file: 32 bytes, or 64 hex digits, of a file that is this user's alone. Raises
    `ConfigError`: there is no such file, others have access to it, or it has something else.

    fingerprint: of the unencrypted chunks.
    where: the user's name for this place, for errors.
    """
    secret = read_secret(Path(path), f"{where}: encryption_key_file", empty_hint="make one with: openssl rand -hex 32")
    key = secret
    if len(secret) == 2 * KEY_BYTES:
        try:
            key = bytes.fromhex(secret.decode("ascii"))
        except ValueError:
            key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{where}: encryption_key_file {path} has {len(secret)} bytes that are no key of {KEY_BYTES} bytes in "
            f"{2 * KEY_BYTES} hex digits; make one with: openssl rand -hex {KEY_BYTES}"
        )
    return Cipher(key, fingerprint)
