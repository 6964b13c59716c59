"""Descriptors of processes, by which the kernel tells when one has ended."""

import os
import select
import socket
from typing import Final

_SO_PEERPIDFD: Final = 77  # of Linux 6.5; Python has no name for it


def open_pidfd(connection: socket.socket, pid: int) -> int:
    """Of the process at the other end; -1 if none is available, as for another container's before Linux 6.5.

    pid: its number; 0 if it is not visible here.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def close_descriptor(descriptor: int) -> None:
    """-1: there is none."""
    if descriptor >= 0:
        os.close(descriptor)


def is_gone(pidfd: int, *, within_s: float = 0.0) -> bool:
    """within_s: wait until then: a process that ends closes what it has open a moment before."""
    if pidfd < 0:
        return False
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(within_s * 1000))
