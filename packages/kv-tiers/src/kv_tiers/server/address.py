"""The place where a server listens: one owner each, in a directory that is closed to other users.

A lock file beside the socket says who owns it, for as long as the owner lives: the kernel takes the lock back however
it dies. So a socket whose lock can be had is a dead server's, and is replaced.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path

from kv_core.errors import ConfigError


class Address:
    """A listening socket and the lock that goes with it."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: another server listens here, or nobody could without being open to other users.
        """
        self.path = path
        _make_private(path.parent)
        self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another server listens at {path}; join that one, end it, or give this one another name"
                ) from None
            path.unlink(missing_ok=True)
            self.listener.bind(os.fspath(path))
            path.chmod(0o600)
            self.listener.setblocking(False)
            self.listener.listen(128)
        except OSError as error:
            self._let_go()
            raise ConfigError(f"no server can listen at {path}: {error.strerror}") from None
        except ConfigError:
            self._let_go()
            raise

    def stop_listening(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener.close()

    def close(self) -> None:
        """From here another server may have the place. The lock file stays: removing it would let two have it."""
        self._let_go()

    def _let_go(self) -> None:
        self.listener.close()
        os.close(self._lock)


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made for a server's socket: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not a directory of this user closed to others (0700), so who listens there cannot be "
            "trusted; name another one for the socket"
        )
