"""TLS from files that may be replaced while we run: certificates expire, and are renewed under the same names.

Replaced files apply to new connections. While the files cannot be used, as between the renewal of a certificate and
that of its key, the previous ones stay in use, and the files are checked again at the next use.
"""

import os
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_tiers.pool.private_files import read_secret

_log = limited_logger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What is made from these files, made again when they have changed. Safe to use from any thread."""

    def __init__(self, make: Callable[[], T], files: Sequence[str], where: str) -> None:
        """make: makes it from the files as they are now. It may raise `ConfigError`, and so may this.

        files: those of the settings; "" for one that is not set.
        where: for the log.
        """
        self._make, self._files, self._where = make, [file for file in files if file], where
        self._lock = threading.Lock()
        self._states = self._file_states()
        self._made = make()

    def current(self) -> T:
        with self._lock:
            # The states are taken before the files are read, so that a change in between is noticed the next time.
            states = self._file_states()
            if states != self._states:
                try:
                    self._made = self._make()
                except ConfigError as error:
                    _log.warning("%s; until then the previous ones stay in use", error)
                else:
                    self._states = states
                    _log.info("%s: the tls files have changed, and apply from now on", self._where)
            return self._made

    def _file_states(self) -> list[tuple[int, ...]]:
        """The states of the files, which change when one is replaced, written to, or made accessible to others."""
        states: list[tuple[int, ...]] = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError as error:
                states.append((error.errno or 0,))
            else:
                states.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return states


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str, where: str) -> None:
    """Have the context present this certificate.

    Raises:
        ConfigError: others can read the key, or it cannot be read without a passphrase.
        OSError: the files cannot be used.
    """

    def passphrase() -> str:
        # Without this OpenSSL prompts at the terminal, and waits.
        raise ConfigError(
            f"{where}: tls_key_file {key_file} needs a passphrase, which is never prompted for; write the key "
            "without one"
        )

    read_secret(Path(key_file), f"{where}: tls_key_file")
    context.load_cert_chain(cert_file, key_file, passphrase)


TlsFiles = WatchedFiles[ssl.SSLContext]
"""A context for connections."""
