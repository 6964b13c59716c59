"""The old process of a live upgrade: the thread that prepares it, and what happens if it comes to nothing."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kv_core.errors import TierDown
from kv_core.log import limited_logger
from kv_tiers.cache.local import LocalCache

from kv_server.address import ListeningSocket
from kv_server.succession.channel import Channel
from kv_server.succession.image import Passed
from kv_server.succession.messages import Begin, Prepared, QuotasSet, TakerReady
from kv_server.succession.phases import PassingPhase, PhaseEvent, next_phase
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
    """Everything here runs on this thread, unless it says otherwise. The server serves meanwhile."""

    def __init__(
        self,
        channel: Channel,
        address: ListeningSocket,
        caches: dict[Format, LocalCache],
        quotas: QuotasSet,
        *,
        close_peers: Callable[[], None],
        stop: Callable[[Sequence[Passed]], "Future[bool]"],
        gone_on: Callable[[], object],
    ) -> None:
        """close_peers: ends what other hosts read.
        stop: has the serving thread do nothing but send the rest: whether it is taken.
        gone_on: called when it has come to nothing, and the tiers are open again.
        """
        super().__init__(name="kv-passing-on", daemon=True)
        self.channel = channel
        self.phase = next_phase(PassingPhase.SERVING, PhaseEvent.ASKED)
        self._address = address
        self._quotas = quotas
        self._passed = [Passed(wanted, cache) for wanted, cache in caches.items()]
        self._close_peers, self._stop, self._gone_on = close_peers, stop, gone_on

    def run(self) -> None:
        why = "it has not taken over in time"
        try:
            if self._is_taken():
                self._meet(PhaseEvent.TAKEN)
                return
        except TierDown as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, the server goes on
            _log.exception("passing this server on hit a bug")
            why = f"a bug: {error}"
        _log.warning("no other process takes over from this server, which goes on: %s", why)
        self._meet(PhaseEvent.LOST)
        self.channel.close()
        for passed in self._passed:
            passed.end()
            while not passed.cache.lower.pause(_CLOSING_S):
                pass
            if passed.cache.parts.host.is_open:
                passed.cache.lower.reopen()
                passed.cache.attach_tiers()
        self._meet(PhaseEvent.REOPENED)
        self._gone_on()

    def _meet(self, event: PhaseEvent) -> None:
        self.phase = next_phase(self.phase, event)

    def _is_taken(self) -> bool:
        """
        Raises:
            TierDown: the other process does not take over.
        """
        self.channel.receive(Begin, within_s=_BEGIN_S)
        for passed in self._passed:
            if not passed.cache.lower.pause(_CLOSING_S):
                raise TierDown(f"a call to a tier has not returned for {_CLOSING_S:g} s")
        quotas = [(wanted, tenant, quota) for (wanted, tenant), quota in self._quotas.items()]
        prepared = Prepared([passed.pool_image() for passed in self._passed], quotas)
        pools = [passed.cache.pool.descriptor for passed in self._passed]
        self.channel.send(prepared, [*self._address.descriptors(), *pools])
        self._meet(PhaseEvent.CLOSED)
        self.channel.receive(TakerReady, within_s=_OPENING_S)
        self._close_peers()
        self._meet(PhaseEvent.READY)
        return self._stop(self._passed).result()
