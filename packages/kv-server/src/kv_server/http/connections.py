"""HTTP connections: how many there may be, for how long, and which one is replaced when the limit is reached.

When the limit is reached, a new connection replaces one whose client has kept the server waiting for a while (for a
request, its body, or for the answer to be read): the longest waiting one of the address that has the most connections.
A connection for which the server is working is never closed. If none can be replaced, the new one gets a place in a
reserve that serves only the health endpoints, once and within a short time. So health checks are answered whatever
clients do.
"""

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 64
MAX_OF_A_PEER: Final = 32
"""Of those, from one address. Behind a proxy, all come from the same one."""
HEALTH_CONNECTIONS: Final = 16
"""In addition to those, for health checks only."""
PATIENCE_S: Final = 1.0
"""A client that has kept the server waiting for this long may lose its place to a new one."""
HEALTH_S: Final = 2.0
"""How long a connection of the reserve may take in all."""
HEAD_BYTES: Final = 16 << 10
"""Of a request's line and headers."""
HEAD_S: Final = 10.0
"""How long a request's line and headers may take to arrive."""
UNREAD_S: Final = 10.0
"""How long a client may read nothing of an answer that does not fit into its socket's buffer."""
IDLE_S: Final = 15
"""How long a connection may be idle."""
CONNECTION_S: Final = 60.0
"""A connection's next answer after this long is its last."""
LAST_ANSWER_S: Final = 90.0
"""How much longer that answer may take."""

IS_LAST: Final = "kv_is_last"
IS_HEALTH_ONLY: Final = "kv_is_health_only"
"""In `state` of a request's scope, about its connection: its answer ends it; it may request health only."""


class HttpConnections:
    """The connections of HTTP. Used on HTTP's event loop only."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._connections: set[BoundedProtocol] = set()

    def admit(self, peer: str) -> bool | None:
        """Whether a new connection from this address may request health only; None: there is no place for it at all."""
        served = [one for one in self._connections if not one.is_health_only]
        crowds = Counter(one.peer for one in served)
        if len(served) < MAX_CONNECTIONS and crowds[peer] < MAX_OF_A_PEER:
            return False
        if crowds[peer] >= MAX_OF_A_PEER:
            candidates = [one for one in served if one.peer == peer]
        else:
            candidates = [one for one in served if one.peer == peer or crowds[one.peer] > crowds[peer]]
        if self._give_up_one(candidates, crowds, PATIENCE_S):
            return False
        reserve = [one for one in self._connections if one.is_health_only]
        if len(reserve) < HEALTH_CONNECTIONS:
            return True
        return True if self._give_up_one(reserve, Counter(one.peer for one in reserve), 0.0) else None

    def enter(self, connection: "BoundedProtocol") -> None:
        self._connections.add(connection)

    def leave(self, connection: "BoundedProtocol") -> None:
        self._connections.discard(connection)

    def _give_up_one(self, candidates: Iterable["BoundedProtocol"], crowds: Counter[str], patience_s: float) -> bool:
        now_s = self.now_s()
        waiting = [
            (crowds[one.peer], now_s - one.awaited_since_s, number, one)
            for number, one in enumerate(candidates)
            if one.awaited_since_s is not None and now_s - one.awaited_since_s >= patience_s
        ]
        if not waiting:
            return False
        *_, chosen = max(waiting)
        self.leave(chosen)  # now: the loop reports its loss only after we return
        chosen.transport.abort()
        return True


def peer_of(address: Any) -> str:
    """The address by which connections are counted: for IPv6 its /64, which belongs to one customer."""
    try:
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
    except (ValueError, IndexError, TypeError):
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits forever for a request's head, for its answer to be read, and for a
    connection to end."""

    def __init__(self, *arguments: Any, room: HttpConnections, peer: str, is_health_only: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {IS_LAST: is_health_only, IS_HEALTH_ONLY: is_health_only}
        self.peer = peer
        self.is_health_only = is_health_only
        self.awaited_since_s: float | None = None
        """Since when the server has been waiting for the client; None: the client is waiting."""
        self._room = room
        self._has_begun = True  # a request: on a new connection one is expected at once
        self._phase: tuple[str, int] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._room.enter(self)
        if self.is_health_only:
            self._ends = [self.loop.call_later(HEALTH_S, transport.abort)]
        else:
            self._ends = [
                self.loop.call_later(CONNECTION_S, self._tell_the_end),
                self.loop.call_later(CONNECTION_S + LAST_ANSWER_S, transport.abort),
            ]
        self._look()

    def data_received(self, data: bytes) -> None:
        self._has_begun = True
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def on_response_complete(self) -> None:
        self._has_begun = False
        super().on_response_complete()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._look()

    def shutdown(self) -> None:
        super().shutdown()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self)
        for timer in (*self._ends, self._timer):
            if timer is not None:
                timer.cancel()
        self._ends, self._timer = [], None
        super().connection_lost(exc)

    def _tell_the_end(self) -> None:
        self.app_state[IS_LAST] = True

    def _look(self) -> None:
        """Update what the connection is waiting for, since when, and for how long it may."""
        cycle = self.cycle
        if self.transport.is_closing():
            waits_for, most_s = "end", UNREAD_S  # until what is unsent has been read
        elif self.flow.write_paused:
            waits_for, most_s = "reader", UNREAD_S
        elif cycle is None or cycle.response_complete:
            # Connections that have been idle since are ended by uvicorn's own timer.
            waits_for, most_s = ("head", HEAD_S) if self._has_begun else ("idle", 0.0)
        elif cycle.more_body:
            waits_for, most_s = "body", 0.0  # `operation` has its own limit, and reports it
        else:
            waits_for, most_s = "", 0.0
        phase = (waits_for, id(cycle))
        if phase == self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if most_s:
            self._timer = self.loop.call_later(most_s, self.transport.abort)
        self.awaited_since_s = self._room.now_s() if waits_for else None
