"""The new process of a live upgrade: it asks the server at the socket for everything, and takes its place."""

from pathlib import Path
from typing import Final

from kv_core.errors import ConfigError, TierDown

from kv_server import wire
from kv_server.connection import PACKAGE, ServerConnection
from kv_server.pidfds import close_descriptor, is_gone
from kv_server.succession.channel import FORMAT, Channel
from kv_server.succession.messages import Begin, Prepared, Remainder, TakerReady

_ASKED_S: Final = 10.0
_GONE_S: Final = 2.0


class VanishedError(TierDown):
    """The old process has died before it had sent everything: the new one starts with empty pools."""


class TakingOver:
    """For one thread. `prepared` has what the old process sent so far, and `descriptors` those that came with it: of
    the listening socket, its lock and the pools. Whoever uses them takes them over."""

    prepared: Prepared
    descriptors: list[int]

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
                answer = connection.ask(wire.TakeOver(FORMAT, PACKAGE))
        except TierDown as why:
            connection.close()
            raise self._not_taken(str(why)) from None
        if not isinstance(answer, wire.Done):
            connection.close()
            reason = answer.text if isinstance(answer, wire.Failed) else "it does not answer"
            raise self._not_taken(reason)
        self._channel = Channel(connection.release())
        try:
            self._channel.send(Begin())
            self.prepared, self.descriptors = self._channel.receive(Prepared)
        except TierDown as why:
            raise self._not_taken(str(why)) from None

    def remainder(self) -> tuple[Remainder, list[int]]:
        """All is ready here: the rest, with the clients' descriptors. The old process serves nobody from here on.

        Raises:
            ConfigError: it gives up, and goes on serving. VanishedError: it has died.
        """
        try:
            self._channel.send(TakerReady())
            return self._channel.receive(Remainder)
        except TierDown as why:
            raise self._not_taken(str(why)) from None

    def commit(self) -> None:
        """From now on this process serves.

        Raises:
            ConfigError: the old one has given up, and goes on serving.
        """
        if not self._channel.commit():
            raise self._not_taken("it has waited too long for this process, and goes on")

    def wait_for_end(self) -> None:
        """Wait until the old process has ended."""
        self._channel.wait_for_end()
        self.close()

    def close(self) -> None:
        self._channel.close()
        close_descriptor(self._pidfd)
        self._pidfd = -1

    def _not_taken(self, why: str) -> ConfigError | VanishedError:
        if is_gone(self._pidfd, within_s=_GONE_S):
            return VanishedError("the server has died before this process could take over; it starts empty")
        return ConfigError(f"the server at this socket is not taken over, and goes on: {why}")
