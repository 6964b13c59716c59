"""The token that whoever changes something must show: read from a file that nobody else can read, or made there."""

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError

_LEAST_CHARS: Final = 16
_MOST_NBYTES: Final = 4096


def read_token(path: Path) -> str:
    """What the file holds, without spaces and newlines around it. A file that is not there is made, with a new token.

    Raises:
        ConfigError: others could read it, or it holds no token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _make_token(path)
    except OSError as error:
        raise ConfigError(f"http: token_file: {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"http: token_file: {path} is not a file of this user")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise ConfigError(f"http: token_file: others may read {path} (mode {mode:04o}); run: chmod 600 {path}")
        token = os.read(descriptor, _MOST_NBYTES).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if len(token) < _LEAST_CHARS or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            f"http: token_file: {path} holds no token of at least {_LEAST_CHARS} visible characters; remove the file "
            "and a new one is made"
        )
    return token


def _make_token(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        raise ConfigError(f"http: token_file: {path} cannot be made: {error.strerror}") from None
    return token
