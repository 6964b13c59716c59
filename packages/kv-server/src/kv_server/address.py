"""Where a server listens: a socket with one owner, in a directory that is closed to other users, or a port.

A lock file next to the socket shows who owns it for as long as the owner lives; the kernel releases the lock however
the owner dies. So a socket whose lock can be acquired belongs to a dead server and is replaced. The owner removes both
when it ends. A lock counts only if its file is the one that exists now: a file that was opened before it was removed
protects nothing.
"""

import errno
import os
import resource
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from kv_remote.host_port import HostPort, read_host_port
from kv_tiers.pool.private_files import open_locked, open_own_directory, own_directory

_log = limited_logger(__name__)

PRIVATE_PREFIX: Final = "engine-"
"""The prefix of the names of engines' private servers in a user's own directory. Files left there by killed ones are
removed."""
_ATTEMPTS: Final = 5
_RETRY_S: Final = 0.02


def user_directory(parent: Path) -> Path:
    """The directory for this user's sockets."""
    return parent / f"kv-tiers-{os.geteuid()}"


class ListeningSocket:
    """A listening socket and the lock that goes with it."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError`: another server listens here, or the path cannot be used without exposing it to other
        users."""
        self.path = path
        _make_private(path.parent)
        if path.parent.name == user_directory(path.parent.parent).name:
            for left in path.parent.glob(f"{PRIVATE_PREFIX}*.sock.lock"):
                if left.name != _lock_path(path).name:
                    remove_stale(left.with_suffix(""))
        self._lock = _own(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            self.listener.bind(os.fspath(path))
            path.chmod(0o600)
            self.listener.setblocking(False)
            self.listener.listen(128)
        except OSError as error:
            self.close()
            raise _cannot_listen(path, error) from None

    @classmethod
    def handed_over(cls, path: Path, listener: int, lock: int) -> "ListeningSocket":
        """The descriptors of another process's, which are ours from now on."""
        made = cls.__new__(cls)
        made.path, made._lock = path, lock
        made.listener = socket.socket(fileno=listener)
        made.listener.setblocking(False)
        return made

    def descriptors(self) -> tuple[int, int]:
        """For `handed_over`: of the socket and of its lock. They stay ours too, until `abandon`."""
        return self.listener.fileno(), self._lock

    def abandon(self) -> None:
        """Close both, and leave the files to the process that has been handed them."""
        self.listener.close()
        os.close(self._lock)

    def stop_listening(self) -> None:
        with suppress(OSError):  # something else may be there by now, and a server that stops has more to do
            self.path.unlink(missing_ok=True)
        self.listener.close()

    def close(self) -> None:
        """From now on another server may listen here."""
        self.listener.close()
        _release(self.path, self._lock)


def remove_stale(path: Path) -> None:
    """Remove the socket and the lock that a killed server left. Those of a live server stay."""
    with suppress(OSError, ConfigError):
        _check_replaceable(path)
        lock = _try_lock(path, os.O_RDWR)
        if lock is not None:
            path.unlink(missing_ok=True)
            _release(path, lock)


def _own(path: Path) -> int:
    """Raises `ConfigError`: another server owns it, or it cannot be owned."""
    _check_replaceable(path)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_RETRY_S)  # a process that cleans up holds it for a moment
        try:
            lock = _try_lock(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _cannot_listen(path, error) from None
        if lock is not None:
            return lock
    raise ConfigError(f"another server listens at {path}; join that one, stop it, or give this one another name")


def _check_replaceable(path: Path) -> None:
    """Check that whatever exists was left by a server: a socket, and an empty lock file. Both will be removed.

    Raises:
        ConfigError: it is something else, such as a settings file that was given as the socket.
        OSError: it cannot be inspected.
    """
    for file, type_ in ((path, stat.S_IFSOCK), (_lock_path(path), stat.S_IFREG)):
        with suppress(FileNotFoundError):
            found = file.lstat()
            if stat.S_IFMT(found.st_mode) != type_ or found.st_size:
                raise ConfigError(f"{file} exists and was not left by a server; write another socket (--socket)")


def _try_lock(path: Path, flags: int) -> int | None:
    """The lock's descriptor; None: another process has the lock."""
    lock = _lock_path(path)
    return open_locked(lock, lambda: os.open(lock, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _release(path: Path, lock: int) -> None:
    with suppress(OSError):
        os.unlink(_lock_path(path))  # while it is ours
    os.close(lock)


def _lock_path(path: Path) -> Path:
    return Path(f"{path}.lock")


def _cannot_listen(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"no server can listen at {path}: {error.strerror}; write another socket (--socket), in a directory that this "
        "user can write to"
    )


def _make_private(directory: Path, own: Callable[[Path, str], object] = own_directory) -> None:
    try:
        own(directory, "name another one for the socket")
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} cannot be made for a server's socket, as there is no directory {directory.parent}; make that "
            "one, or write another socket (--socket)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made for a server's socket: {error.strerror}; write another socket (--socket)"
        ) from None


def check_directory(directory: Path) -> bool:
    """Check the directory of a server's socket as far as that goes without making it. False: it is still to be made.
    Raises `ConfigError`: a server would refuse it."""
    if not os.path.lexists(directory) and os.path.isdir(directory.parent):
        return False
    _make_private(directory, lambda path, remedy: os.close(open_own_directory(path, remedy)))
    return True


ACCEPTED_A_TURN: Final = 8
REST_S: Final = 0.5
"""How long to ignore a listener from which nothing can be accepted at all."""
_BACKLOG: Final = 64
_SHORTAGES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def allow_descriptors(wanted: int) -> int:
    """Raise this process's limit of open descriptors to this many, or to its hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


class Ports:
    """The ports at which a server listens, by the section of their settings. Whoever uses one closes it; one that is
    still open is used again, so that a process that takes over, or goes on after all, refuses no connection meanwhile.
    """

    def __init__(self, handed_over: Mapping[str, tuple[str, int]] | None = None) -> None:
        """handed_over: by another process: `listen` in its settings, and the descriptor, which is ours from now on."""
        self._open = {
            section: (listen, socket.socket(fileno=descriptor))
            for section, (listen, descriptor) in (handed_over or {}).items()
        }
        self._of_another = {listener.getsockname()[1] for _, listener in self._open.values()}

    def open(self) -> dict[str, tuple[str, int]]:
        """As `handed_over`, for another process. The descriptors stay ours too."""
        return {section: (listen, one.fileno()) for section, (listen, one) in self._open.items() if one.fileno() >= 0}

    def keep(self, section: str, listen: str) -> bool:
        """Whether it is open at this address. Otherwise it is closed."""
        was, listener = self._open.get(section, ("", None))
        if listener is None or (was == listen and listener.fileno() >= 0):
            return listener is not None
        listener.close()
        return False

    def open_now(self, section: str, listen: str) -> bool:
        """Whether it is open at this address now. False: it is not wanted, or the process that hands over has the port
        until it ends. Raises `ConfigError`: it is not possible to listen there."""
        if self.keep(section, listen) or not listen:
            return bool(listen)
        try:
            self.listen(section, listen)
        except ConfigError:
            if read_host_port(listen, section).port in self._of_another:
                return False
            raise
        return True

    def listen(self, section: str, listen: str) -> tuple[socket.socket, HostPort]:
        """A listener that does not block, and its address. Raises `ConfigError`: it is not possible to listen there."""
        where = f"{section}: listen"
        address = read_host_port(listen, where)
        if not self.keep(section, listen):
            try:
                found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                family, _, _, _, place = found[0]
                self._open[section] = listen, socket.create_server(place[:2], family=family, backlog=_BACKLOG)
            except OSError as error:
                raise ConfigError(f"{where}: cannot listen at {address}: {error.strerror or error}") from None
        _, listener = self._open[section]
        listener.setblocking(False)
        return listener, HostPort(address.host, listener.getsockname()[1])


class Acceptor:
    """Accepts connections even when this process is out of file descriptors. For one thread. `close` closes the
    descriptor in reserve, but not the listener.

    A listener whose queue cannot be drained stays readable, so a loop that only retries would spin. One descriptor is
    therefore kept in reserve: it is closed, and the new connection is accepted in its place, sent the reason why it is
    not served, and closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        greet: Callable[[socket.socket], None],
        turn_away: Callable[[socket.socket], None],
    ) -> None:
        """listener: non-blocking.

        greet: takes over each connection. turn_away: sends the reason, without waiting, to one for which there are no
            descriptors; it is closed here.
        """
        self._listener = listener
        self._greet = greet
        self._turn_away = turn_away
        self._spare = _spare()

    def accept(self, at_most: int = ACCEPTED_A_TURN) -> float:
        """Accept waiting connections. Returns for how many seconds to ignore the listener then: 0 or `REST_S`."""
        for _ in range(at_most):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return 0.0
            except (ConnectionAbortedError, InterruptedError):
                continue
            except OSError as error:
                if error.errno in _SHORTAGES and self._let_one_in():
                    continue
                _log.warning(
                    "connections cannot be accepted; trying again in %g s: %s", REST_S, error.strerror or error
                )
                return REST_S
            accepted.setblocking(False)
            self._greet(accepted)
        return 0.0

    def close(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _let_one_in(self) -> bool:
        """Accept a connection for long enough to send why it is not served. False: it could not be accepted at all."""
        if self._spare < 0:
            self._spare = _spare()
            return self._spare >= 0
        self.close()
        try:
            accepted, _ = self._listener.accept()
            with accepted:
                accepted.setblocking(False)
                self._turn_away(accepted)
        except BlockingIOError:
            return True  # the next attempt finds no connection
        except OSError:
            return False
        finally:
            self._spare = _spare()
        _log.warning(
            "a connection is refused: this process may open no more descriptors; raise its limit (ulimit -n, or "
            "LimitNOFILE= of its unit)"
        )
        return True


def _spare() -> int:
    """A descriptor in reserve; -1: not even that is available."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
