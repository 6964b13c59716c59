"""What the two processes of a live upgrade tell each other, after the new one has asked at the server's socket."""

import msgspec

from kv_server import wire
from kv_server.session import LastingLease, SessionImage
from kv_server.succession.image import CacheImage, PoolImage
from kv_server.wire import Format

QuotasSet = dict[tuple[Format | None, bytes], int | None]
"""Quotas in bytes by format (None: all) and tenant."""


class Begin(msgspec.Struct):
    """The new process has read that the old one is willing."""


class Prepared(msgspec.Struct):
    """Descriptors: of the listening socket, of its lock, and of each pool.

    quotas: those that differ from the settings.
    """

    pools: list[PoolImage]
    quotas: list[tuple[Format | None, bytes, int | None]]

    def quotas_set(self) -> QuotasSet:
        return {(wanted, tenant): quota for wanted, tenant, quota in self.quotas}


class TakerReady(msgspec.Struct):
    """The new process has opened its tiers and lacks only the last part."""


class ClientImage(msgspec.Struct):
    """A client's connection. Descriptors: of the socket, and the pidfd if `has_pidfd`.

    waiting: a request that was being answered. frames: what has arrived of the next. unsent: what has not left.
    """

    number: int
    pid: int
    has_pidfd: bool
    is_greeted: bool
    waiting: wire.Register | wire.Explain | None
    register: wire.Register | None
    session: SessionImage | None
    token: bytes
    frames: bytes
    unsent: bytes
    last_seen_s: float


class OrphanImage(msgspec.Struct):
    """Descriptor: the pidfd, if `has_pidfd`."""

    token: bytes
    format: Format
    leases: dict[int, LastingLease]
    pid: int
    has_pidfd: bool
    lost_s: float
    unmapped_s: float | None


class Remainder(msgspec.Struct):
    """The last part. The old process does nothing from here on, unless it refuses.

    caches: in the order of `Prepared.pools`. last_number: of a client. stopped_s: since when, by the monotonic clock.
    """

    caches: list[CacheImage]
    clients: list[ClientImage]
    orphans: list[OrphanImage]
    last_number: int
    stopped_s: float
