"""Two hosts on one machine: two network namespaces with a link between them, and a server in each.

They share the file system, so a test can join either server at its socket. No privileges are needed if the kernel
allows user namespaces; `available` says whether this machine does.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from unittest import mock

from kv_server.process import ServerProcess, launch

_TOOLS_S: Final = 10
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")
_IDLE: Final = ("sh", "-c", "echo; exec sleep infinity")
_OWN_SYS: Final = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs none /sys && exec "$0" "$@"')
"""UCX looks there for the interfaces that it may use, and would find the machine's."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to packets in both directions.

    delay_s: what each takes.
    jitter_s: what it takes in addition, at most, so that packets overtake each other.
    loss: probability that one is lost.
    """

    delay_s: float
    jitter_s: float
    loss: float


def available(disturbance: Disturbance | None = None) -> bool:
    with suppress(OSError, subprocess.SubprocessError):
        TwoHosts(disturbance).close()
        return True
    return False


class TwoHosts:
    """The hosts are 0 and 1, at `ADDRESSES`. `close` it when its servers have stopped."""

    def __init__(self, disturbance: Disturbance | None = None) -> None:
        """disturbance: of a line that needs /dev/net/tun, and carries far less than without.

        Raises:
            OSError, subprocess.SubprocessError: this machine has no namespaces for us, or lacks a tool.
        """
        self._holders: list[subprocess.Popen[str]] = []
        try:
            self._hold("unshare", "--user", "--map-root-user", "--net", *_IDLE)
            self._hold(*self._at(0, network=False), "unshare", "--net", *_IDLE)
            if disturbance is None:
                self._ip(0, f"link add line type veth peer name line netns {self._holders[1].pid}")
            else:
                self._disturb(disturbance)
            for host, address in enumerate(ADDRESSES):
                self._ip(host, f"address add {address}/24 dev line")
                self._ip(host, "link set lo up")
                self._ip(host, "link set line up")
        except BaseException:
            self.close()
            raise

    def serve(self, host: int, config: Mapping[str, object], socket: Path, *, nixl: bool = False) -> ServerProcess:
        """A server of this host, that peers may ask at port 9500. The namespace is no protection, nor is anything."""
        peers = {"listen": f"{ADDRESSES[host]}:9500", "unprotected": True, "nixl": nixl}
        python = socket.with_suffix(".python")
        own_sys = _OWN_SYS if nixl else ()
        python.write_text(f'#!/bin/sh\nexec {shlex.join([*self._at(host), *own_sys, sys.executable])} "$@"\n')
        python.chmod(0o700)
        with mock.patch.object(sys, "executable", str(python)):
            return launch({**config, "peers": peers}, socket=socket)

    def cut(self) -> None:
        """From now on nothing arrives, and no error is reported."""
        self._ip(0, "link set line down")

    def mend(self) -> None:
        self._ip(0, "link set line up")

    def throttle(self, rate: str) -> None:
        """Limit what host 0 sends. rate: in the syntax of `tc`, such as 100mbit."""
        self._run(*self._at(0), *f"tc qdisc replace dev line root tbf rate {rate} burst 256kb latency 50ms".split())

    def close(self) -> None:
        for holder in reversed(self._holders):
            holder.kill()
            holder.communicate(timeout=_TOOLS_S)

    def _disturb(self, disturbance: Disturbance) -> None:
        for host in range(len(ADDRESSES)):
            self._ip(host, "tuntap add mode tun dev line")
        options = {"--delay-s": disturbance.delay_s, "--jitter-s": disturbance.jitter_s, "--loss": disturbance.loss}
        pids = [str(holder.pid) for holder in self._holders]
        module = [sys.executable, "-m", "kv_testing.disturbed_line", *pids]
        self._hold(*self._at(0, network=False), *module, *(str(part) for option in options.items() for part in option))

    def _hold(self, *command: str) -> None:
        """Keep this process until the end: the namespaces exist as long as processes are in them. It prints a line when
        it is ready."""
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise subprocess.SubprocessError(f"no namespace: {holder.communicate(timeout=_TOOLS_S)[1]}")

    def _at(self, host: int, *, network: bool = True) -> list[str]:
        enter = ["nsenter", "--target", str(self._holders[host].pid), "--user", "--preserve-credentials"]
        return [*enter, "--net"] if network else enter

    def _ip(self, host: int, arguments: str) -> None:
        self._run(*self._at(host), "ip", *arguments.split())

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, timeout=_TOOLS_S, capture_output=True)  # ours
