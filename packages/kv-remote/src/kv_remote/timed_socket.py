"""A stream that moves bytes between its socket and borrowed memory, every operation within a deadline.

Bytes are neither copied nor joined: they are sent from where they are (sendmsg) and received where they belong
(recv_into). After any exception the state of the conversation is unknown: close the stream.
"""

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

_MAX_BUFFERS: Final = 64  # per call of sendmsg; every system accepts more
Buffer = bytes | bytearray | memoryview


class TimedSocket:
    """For one thread at a time. Every call may raise `OSError`, including `TimeoutError`.

    Deadlines are in the time of `time.monotonic`.
    """

    def __init__(self, sock: socket.socket, wait_s: float) -> None:
        """Takes ownership of `sock`. wait_s: the longest that one system call waits, and so the most by which a
        deadline may be missed."""
        self._sock = sock
        self.received_bytes = 0
        # A TLS socket returns what one record holds and heeds only Python's own time-outs. Over TCP the kernel waits
        # until the borrowed memory is full: one call for a value, and a tenth faster (4 MiB on 2 cores). Over a unix
        # socket that is a tenth slower.
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._whole = 0 if self._encrypted or sock.family == socket.AF_UNIX else socket.MSG_WAITALL
        if not self._encrypted:
            sock.settimeout(None)
            limit = struct.pack("@ll", int(wait_s), int(wait_s % 1 * 1e6))
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, direction, limit)

    def close(self) -> None:
        self._sock.close()

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        pending, index = [memoryview(buffer) for buffer in buffers if len(buffer)], 0
        while index < len(pending):
            sent = self._send_some(pending[index : index + _MAX_BUFFERS], deadline)
            while index < len(pending) and sent >= len(pending[index]):
                sent -= len(pending[index])
                index += 1
            if sent:
                pending[index] = pending[index][sent:]

    def receive(self, into: memoryview, deadline: float) -> int:
        """Wait for bytes. Returns how many were received, at least one."""
        return self._receive(into, 0, deadline)

    def fill(self, into: memoryview, deadline: float) -> None:
        """Wait until `into` is full."""
        offset = 0
        while offset < len(into):
            offset += self._receive(into[offset:], self._whole, deadline)

    def _receive(self, into: memoryview, flags: int, deadline: float) -> int:
        while True:
            self._arm(deadline)
            try:
                received = self._sock.recv_into(into, 0, flags)
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            self.received_bytes += received
            return received

    def _send_some(self, buffers: list[memoryview], deadline: float) -> int:
        while True:
            self._arm(deadline)
            try:
                return self._sock.send(buffers[0]) if self._encrypted else self._sock.sendmsg(buffers)
            except BlockingIOError:
                continue

    def _arm(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        if self._encrypted:
            self._sock.settimeout(left_s)
