"""The two sides of a live upgrade: the old process, which passes everything on, and the new one, which takes over."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError, TierDown
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache

from kv_server import wire
from kv_server.address import ListeningSocket, Ports
from kv_server.connection import PACKAGE, ServerConnection, close_descriptor, is_gone
from kv_server.succession.channel import FORMAT, Begin, Channel, Prepared, QuotasSet, Remainder, TakerReady
from kv_server.succession.image import Passed
from kv_server.wire import Format

_log = limited_logger(__name__)

STOPPED_S: Final = 0.8
"""How long the old process waits for the new one while it serves nobody: engines wait a second for an answer."""
_CLOSING_S: Final = 30.0
"""How long calls of a tier may take to return. The pool is served meanwhile."""
_OPENING_S: Final = 600.0
"""How long the new process may take to open its tiers."""
_BEGIN_S: Final = 5.0


class PassingOn(threading.Thread):
    """The old process: the thread that prepares it, and what happens if it comes to nothing. Everything here runs on
    this thread, unless it says otherwise. The server serves meanwhile."""

    def __init__(
        self,
        channel: Channel,
        address: ListeningSocket,
        caches: dict[Format, LocalCache],
        quotas: QuotasSet,
        ports: Ports,
        *,
        pause_ports: Callable[[], None],
        stop: Callable[[Sequence[Passed]], "Future[bool]"],
        gone_on: Callable[[], object],
    ) -> None:
        """pause_ports: has clients of these wait from then on.
        stop: has the serving thread do nothing but send the rest: whether it is taken.
        gone_on: called when it has come to nothing, and the tiers are open again.
        """
        super().__init__(name="kv-passing-on", daemon=True)
        self.channel = channel
        self._address = address
        self.quotas = quotas
        self._ports = ports
        self._passed = [Passed(wanted, cache) for wanted, cache in caches.items()]
        self._pause_ports, self._stop, self._gone_on = pause_ports, stop, gone_on

    def run(self) -> None:
        why = "it has not taken over in time"
        try:
            if self._is_taken():
                return
        except TierDown as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the server goes on
            _log.exception("passing this server on hit a bug")
            why = f"a bug: {error}"
        _log.warning("no other process takes over from this server, which goes on: %s", why)
        self.channel.close()
        for passed in self._passed:
            try:
                passed.end()
                while not passed.cache.lower.pause(_CLOSING_S):
                    pass
                if passed.cache.parts.host.is_open:
                    passed.cache.lower.reopen()
                    passed.cache.attach_tiers()
            except Exception:  # noqa: BLE001  # the others, and the server, go on
                _log.exception("tiers that were closed to be passed on stay closed")
        self._gone_on()

    def _is_taken(self) -> bool:
        """Raises `TierDown`: the other process does not take over."""
        self.channel.receive(Begin, within_s=_BEGIN_S)
        for passed in self._passed:
            if not passed.cache.lower.pause(_CLOSING_S):
                raise TierDown(f"a call to a tier has not returned for {_CLOSING_S:g} s")
        quotas = [(wanted, tenant, quota) for (wanted, tenant), quota in self.quotas.items()]
        ports = self._ports.open()
        listening = {section: listen for section, (listen, _) in ports.items()}
        prepared = Prepared([passed.pool_image() for passed in self._passed], quotas, listening)
        pools = [passed.cache.pool.descriptor for passed in self._passed]
        of_ports = [descriptor for _, descriptor in ports.values()]
        self.channel.send(prepared, [*self._address.descriptors(), *pools, *of_ports])
        self.channel.receive(TakerReady, within_s=_OPENING_S)
        self._pause_ports()
        return self._stop(self._passed).result()


_ASKED_S: Final = 10.0
_GONE_S: Final = 2.0


class VanishedError(TierDown):
    """The old process has died before it had sent everything: the new one starts with empty pools."""


class TakingOver:
    """The new process: it asks the server at the socket for everything, and takes its place. For one thread. `prepared`
    has what the old process sent so far, and `descriptors` and `ports` those that came with it: of the listening
    socket, its lock and the pools, and of other ports. Whoever uses them takes them over."""

    prepared: Prepared
    descriptors: list[int]
    ports: Ports

    def __init__(self, path: Path) -> None:
        """Ask the server there, which changes nothing if it refuses.

        Raises:
            ConfigError: it refuses, and says why, or is another user's.
            NobodyListens: no server is there. VanishedError: it has died.
        """
        connection = ServerConnection(path, _ASKED_S)
        self._pidfd = connection.pidfd()
        try:
            answer = connection.receive(_ASKED_S)
            if isinstance(answer, wire.Welcome):
                self._know_process(answer.pid)
                answer = connection.ask(wire.TakeOver(FORMAT, PACKAGE))
        except TierDown as why:
            connection.close()
            raise self._not_taken(str(why)) from None
        if not isinstance(answer, wire.Done):
            connection.close()
            raise self._goes_on(answer.text if isinstance(answer, wire.Failed) else "it does not answer")
        self._channel = Channel(connection.socket)
        try:
            self._channel.send(Begin())
            self.prepared, descriptors = self._channel.receive(Prepared)
        except TierDown as why:
            raise self._not_taken(str(why)) from None
        count = 2 + len(self.prepared.pools)
        self.descriptors = descriptors[:count]
        of_ports = zip(self.prepared.ports.items(), descriptors[count:], strict=True)
        self.ports = Ports({section: (listen, descriptor) for (section, listen), descriptor in of_ports})

    def remainder(self) -> tuple[Remainder, list[int]]:
        """All is ready here: the rest, with the clients' descriptors. The old process serves nobody from here on.
        Raises `ConfigError`: it gives up, and goes on serving. Raises `VanishedError`: it has died."""
        try:
            self._channel.send(TakerReady())
            return self._channel.receive(Remainder)
        except TierDown as why:
            raise self._not_taken(str(why)) from None

    def commit(self) -> None:
        """From now on this process serves. Raises `ConfigError`: the old one has given up, and goes on serving."""
        if not self._channel.commit():
            raise self._not_taken("it has waited too long for this process, and goes on")

    def wait_for_end(self) -> None:
        """Wait until the old process has ended. Its ports are free only then: its end of the channel may close
        earlier."""
        self._channel.wait_for_end()
        is_gone(self._pidfd, within_s=_GONE_S)
        self.close()

    def close(self) -> None:
        self._channel.close()
        close_descriptor(self._pidfd)
        self._pidfd = -1

    def _know_process(self, pid: int) -> None:
        """The kernel names the process that opened the socket, and a server may have taken it over from that one."""
        if self._pidfd < 0 or is_gone(self._pidfd):
            with suppress(OSError):
                now = os.pidfd_open(pid)
                close_descriptor(self._pidfd)
                self._pidfd = now

    def _not_taken(self, why: str) -> ConfigError | VanishedError:
        if is_gone(self._pidfd, within_s=_GONE_S):
            return VanishedError("the server has died before this process could take over; it starts empty")
        return self._goes_on(why)

    def _goes_on(self, why: str) -> ConfigError:
        return ConfigError(f"the server at this socket is not taken over, and goes on: {why}")
