"""Commands of a shell without the time that each takes to import its modules: started by the test's process, from which
they are forked (`kv_testing.forked`).

In the shell each command is this file, run by an interpreter that imports little. It hands its arguments, environment,
folder and standard streams to the test's process, passes signals on, and ends as what is started there ends. What is
started ends with it, however it ends.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def launching(commands: Mapping[str, Sequence[str]]) -> Iterator[Path]:
    """A folder for a shell's PATH, with commands by these names, each of which starts what is given for it."""
    with tempfile.TemporaryDirectory(prefix="kv") as home, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(home)
        listener.bind(address := str(folder / "socket"))
        listener.listen(64)
        for name, command in commands.items():
            line = shlex.join([sys.executable, "-I", "-S", __file__, address, *command])
            (folder / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (folder / name).chmod(0o700)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        try:
            yield folder
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket) -> None:
    with suppress(OSError):  # it has been shut down
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0],), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    stdin, stdout, stderr = descriptors
    with connection, connection.makefile() as lines:
        asked = json.loads(lines.readline())
        process = subprocess.Popen(
            asked["command"], cwd=asked["folder"], env=asked["environ"],
            stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        for descriptor in descriptors:
            os.close(descriptor)
        threading.Thread(target=_tell_the_end, args=(process, connection), daemon=True).start()
        with suppress(ConnectionResetError):
            for number in lines:
                process.send_signal(int(number))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _tell_the_end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    status = process.wait()
    with suppress(OSError):  # nobody waits for it any longer
        connection.sendall(b"%d\n" % status)


def _main() -> None:
    address, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)

        def pass_on(number: int, _frame: FrameType | None) -> None:
            connection.sendall(b"%d\n" % number)

        asked = {"command": command, "folder": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(connection, [b"x"], [0, 1, 2])
        connection.sendall(json.dumps(asked).encode() + b"\n")
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as it is of what a shell runs behind it
                signal.signal(number, pass_on)
        status = int(connection.makefile().readline() or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    _main()
