"""The rules for secrets and for our own files and directories: who may have access to them.

A **secret** is a regular file owned by this user or root, to which no other user has any access. Links are followed if
they too are owned by this user or root, because Kubernetes mounts secrets through them. Nothing here blocks on a pipe.

**Our own files and directories** are owned by this user and closed to all others (0600, 0700), regular, not links, and
have no second name, so no other user can have put anything there. Missing ones are created that way.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError

_NO_LOCKS: Final = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
MAX_SECRET_BYTES: Final = 64 << 10
_KUBERNETES: Final = (
    "for a secret that Kubernetes mounts write defaultMode: 0400; with fsGroup, which opens it to that group, run as "
    "root or have an init container copy it"
)


def read_secret(path: Path, what: str, *, empty_hint: str = "write the secret into it") -> bytes:
    """The content of the file, without a newline at its end. Raises `ConfigError`: there is no such file, others have
    access to it, or it is empty. The text does not contain the secret.

    what: the setting that names the file, for errors.
    empty_hint: what to do about an empty file.
    """
    description = f"{what} {path}"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        # A socket or a device without a driver cannot even be opened.
        why = "it is not a file" if error.errno == errno.ENXIO else error.strerror
        raise ConfigError(f"{description} cannot be read: {why}") from None
    try:
        _check_link(path, description)
        _check_secret(os.fstat(file), path, description)
        secret = os.read(file, MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{description} cannot be read: {error.strerror}") from None
    finally:
        os.close(file)
    if len(secret) > MAX_SECRET_BYTES:
        raise ConfigError(f"{description} has more than {MAX_SECRET_BYTES} bytes; name the file that the secret is in")
    secret = secret.removesuffix(b"\n").removesuffix(b"\r")
    if not secret:
        raise ConfigError(f"{description} is empty; {empty_hint}")
    return secret


def without_newline(secret: str) -> str:
    """The secret from a file or an environment variable, both of which editors and `$(cat …)` in manifests end with a
    newline that belongs to no secret."""
    return secret.rstrip("\r\n")


def _check_link(path: Path, description: str) -> None:
    """The owner of a link chooses which of our files is read, and sent."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):
        owner = f"user {status.st_uid}"
        raise ConfigError(f"{description} is a link of {owner}, who could point it anywhere; name the file itself")


def _check_secret(status: os.stat_result, path: Path, description: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{description} is not a file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{description} is a file of user {status.st_uid}; run chown {os.geteuid()} {path} and chmod 600 {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        access = "be read" if mode & 0o044 else "be changed" if mode & 0o022 else "be run"
        raise ConfigError(
            f"{description} can {access} by others: run chmod 600 {path} (mode {mode:04o}; {_KUBERNETES})"
        )


def own_directory(path: Path, remedy: str, *, parents: bool = False) -> None:
    """Create the directory if it does not exist, and check that it is ours alone. remedy: what to do if it is not.

    parents: create those above it too, closed to others whatever the umask is.

    Raises:
        ConfigError: it is not ours alone.
        OSError: it cannot be created.
    """
    for directory in [parent for parent in reversed(path.parents) if parents and not parent.exists()] + [path]:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    _check_directory(path.lstat(), path, remedy)


def open_own_directory(path: Path, remedy: str) -> int:
    """Open the directory, which must exist. Raises `ConfigError` and `OSError`: as for `own_directory`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_directory(os.fstat(descriptor), path, remedy)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def open_own_file(path: Path, flags: int, remedy: str, *, directory: int | None = None) -> int:
    """Open the file; create it if it does not exist and `flags` says so. Never blocks.

    directory: open, the one that `path` is in. remedy: what to do if the file is not ours alone.

    Raises:
        ConfigError: it is not ours alone.
        OSError: it cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(path if directory is None else path.name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a symbolic link; {remedy}") from None
        # The system's own words for a directory, a socket or a pipe may be no more than "Invalid argument".
        with suppress(OSError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise _not_ours(path, remedy) from None
        raise
    status = os.fstat(file)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if not is_plain or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o177:
        os.close(file)
        raise _not_ours(path, remedy)
    return file


def open_locked(path: Path, open_file: Callable[[], int]) -> int | None:
    """Open the file at this path and lock it. None: another process or descriptor has the lock. Raises `ConfigError`:
    the file system has no locks.

    A file that was removed before it was locked protects nothing, so the file that has replaced it is opened instead.
    """
    while True:
        file = open_file()
        try:
            lock(file, path)
            if os.path.samestat(os.fstat(file), path.lstat()):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def lock(file: int, path: Path) -> None:
    """Lock the open file, until it is closed.

    Raises:
        BlockingIOError: another process or descriptor has the lock.
        ConfigError: its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise ConfigError(
            f"{path} cannot be locked, because its file system has no file locks ({error.strerror}): mount it with "
            "them (Lustre: -o flock, or localflock; NFS: with its lock daemon), or use another file system"
        ) from None


def _not_ours(path: Path, remedy: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a plain file of this user alone (0600), so its content cannot be trusted; {remedy}"
    )


def _check_directory(status: os.stat_result, path: Path, remedy: str) -> None:
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is not a directory of this user closed to others (0700), so what lies there cannot be trusted; "
            f"{remedy}"
        )
