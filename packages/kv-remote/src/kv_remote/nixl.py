"""NIXL in a process of its own: it lets other hosts read memory, or reads theirs.

UCX, by which NIXL moves bytes, trusts whoever reaches it: over TCP a packet names any address of the process, and bad
ones abort it. So this process maps the bytes on their way and nothing else of ours. It is killed when it is late or
fails, and its memory is then dropped with it, as late bytes may still arrive there. Run as a program, this module is
that process.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from kv_core.log import on_one_line
from kv_tiers.pool.core_dumps import keep_out

MAX_METADATA_BYTES: Final = 1 << 14
_ADDRESS: Final = struct.Struct("<Q")
_READ: Final = struct.Struct("<QQ")  # the address there and the size, before the metadata
_SERVE: Final = {False: b"0", True: b"1"}
_DONE: Final = b"done"
_MAX_MESSAGE_BYTES: Final = MAX_METADATA_BYTES + _READ.size
_MAX_HOSTS: Final = 1 << 10
_END_S: Final = 5.0
_REST_S: Final = 1e-4
"""Between looks at UCX, which moves nothing by itself without a thread that keeps a core busy."""


class NixlProcess:
    """For one thread at a time. Whatever raises `OSError` leaves it broken: `close` it.

    memory: the first byte that others may read, or that `read` writes, and all after it.
    address, metadata: by which others read `memory`, once `is_ready`.
    """

    address: int
    metadata = b""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], nbytes: int) -> None:
        """Does not wait until it is ready. command: runs this module. nbytes: of `memory`. Raises `OSError`."""
        self.is_broken = False
        descriptor = os.memfd_create("kv-nixl", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            self.memory = memoryview(keep_out(mmap.mmap(descriptor, nbytes)))
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                given = (descriptor, theirs.fileno())
                self._process = subprocess.Popen(  # noqa: S603  # our own
                    [*command, *map(str, given)],
                    pass_fds=given,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        finally:
            os.close(descriptor)

    def is_ready(self) -> bool:
        """Does not wait. Raises `OSError`: it has ended."""
        if self._process.poll() is not None:
            raise ConnectionError(f"NIXL's process ended with status {self._process.returncode}")
        if not self.metadata:
            try:
                greeting = self._control.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            if len(greeting) <= _ADDRESS.size:
                raise ConnectionError("NIXL's process ends")
            (self.address,), self.metadata = _ADDRESS.unpack_from(greeting), greeting[_ADDRESS.size :]
        return True

    def serve(self, is_serving: bool) -> None:
        """Whether others may read for now: bytes move by the work of both sides unless there is RDMA."""
        self._control.send(_SERVE[is_serving], socket.MSG_DONTWAIT)

    def read(self, metadata: bytes, address: int, nbytes: int, timeout_s: float) -> None:
        """Read so many bytes of a host to the start of `memory`. Nothing of what arrives has been verified. Raises
        `OSError`: it failed, or was not done in time."""
        self.is_broken = True
        self._control.settimeout(timeout_s)
        self._control.send(_READ.pack(address, nbytes) + metadata)
        answer = self._control.recv(_MAX_MESSAGE_BYTES)
        if answer != _DONE:
            why = on_one_line(answer.decode(errors="replace")) or "its process ended"
            raise ConnectionError(f"not read by NIXL: {why}")
        self.is_broken = False

    def close(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._control.close()


class _Agent:
    """The other side."""

    def __init__(self, descriptor: int, control: socket.socket) -> None:
        sys.modules["torch"] = None  # type: ignore[assignment]  # NIXL imports it if it can: seconds, and 150 MB
        from nixl._api import nixl_agent, nixl_agent_config

        self._control = control
        self._memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        options = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(secrets.token_hex(16), options)
        self._address = self._memory.ctypes.data
        self._agent.register_memory([(self._address, self._memory.nbytes, 0, "")], "DRAM")
        self._hosts: dict[bytes, object] = {}
        """The name of each, by its metadata."""
        control.send(_ADDRESS.pack(self._address) + self._agent.get_agent_metadata())

    def run(self) -> None:
        """Until the other side of `control` is closed."""
        is_serving = False
        while True:
            if is_serving:
                self._agent.get_new_notifs()
                if not self._has_message(_REST_S):
                    continue
            message = self._control.recv(_MAX_MESSAGE_BYTES)
            if len(message) > _READ.size:
                address, nbytes = _READ.unpack_from(message)
                self._control.send(self._read(message[_READ.size :], address, nbytes))
            elif message:
                is_serving = message == _SERVE[True]
            else:
                return

    def _has_message(self, within_s: float) -> bool:
        return bool(select.select([self._control], [], [], within_s)[0])

    def _read(self, metadata: bytes, address: int, nbytes: int) -> bytes:
        try:
            if metadata not in self._hosts:
                name = self._agent.add_remote_agent(metadata)
                if name in self._hosts.values() or len(self._hosts) >= _MAX_HOSTS:
                    return b"another host has its name, or there are too many"
                self._hosts[metadata] = name
            here, there = (
                self._agent.get_xfer_descs([(start, nbytes, 0)], "DRAM") for start in (self._address, address)
            )
            transfer = self._agent.initialize_xfer("READ", here, there, self._hosts[metadata])
            state = self._agent.transfer(transfer)
            while state == "PROC" and not self._has_message(_REST_S):
                state = self._agent.check_xfer_state(transfer)
            self._agent.release_xfer_handle(transfer)
        except Exception as error:  # noqa: BLE001  # whatever NIXL raises, the other side is to hear of it
            return f"{type(error).__name__}: {error}".encode()[:256]
        return _DONE if state == "DONE" else f"state {state}".encode()


def main(descriptor: str, control: str) -> None:
    try:
        _Agent(int(descriptor), socket.socket(fileno=int(control))).run()
    finally:
        os._exit(0)  # NIXL 1.5 crashes where an agent ends with the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
