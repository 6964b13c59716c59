"""The sections of the settings, one record each: names, types, ranges and defaults. `kv_tiers.settings` reads them.

Ranges are part of the types, so values out of range are refused when the settings are read. A setting in bytes is named
`…_bytes`; in a file it may be text such as "4GiB". `docs/settings.md` has the same as a table.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from kv_core.errors import ConfigError
from kv_eviction.registry import DEFAULT_POLICY, PolicySpec

DEFAULT_CAPACITY_BYTES: Final = 4 << 30

Count = Annotated[int, msgspec.Meta(ge=1)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=256)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
MAX_SECONDS: Final = 1_000_000
"""System calls that wait reject timeouts beyond some 24 days, and JSON has no infinity."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
SomeSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
Timeout = Annotated[float, msgspec.Meta(ge=0.001, le=MAX_SECONDS)]
"""A limit to a wait for a tier's medium. Much less than a millisecond would be no wait at all to a system call."""
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool and the lifetime of its leases."""

    capacity_bytes: Count = DEFAULT_CAPACITY_BYTES
    """Host memory for chunks, allocated as it is used. Rounded down to whole chunks."""
    max_capacity_bytes: Bytes = 0
    """How far `kv reload --take-over` may raise a kv-server's capacity, in address space only. 0: no further."""
    name: str = ""
    """Empty: the pool ends with its process. A name: it stays in shared memory (0600) for the next process."""
    lease_s: SomeSeconds = 300.0
    """How long chunks stay leased for a request, or another holder, that makes no further call."""
    core_dump: bool = False
    """Whether a core dump has the pool in it: users' prompts, once for each process that maps it."""
    policy: PolicySpec = DEFAULT_POLICY
    """The eviction policy: its name, or a mapping of `name` and its parameters. `kv sim` compares policies on a
    trace."""


def check_lease(lease_s: float) -> None:
    """Raises `ConfigError`: it is not positive."""
    if not lease_s > 0:
        raise ConfigError(f"lease_s={lease_s}: a lease must last longer than 0 s; 300 is the default")


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant with a name in reports, or a quota. Identified by one of salt, salt_file and tag."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Its name in reports."""
    quota_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The part of the pool that this tenant has to itself, and its limit. If unset, it shares what the quotas leave."""
    salt: str | None = None
    """The salt of its requests. Better in a file."""
    salt_file: str | None = None
    """A file with the salt, readable by its owner only. A newline at its end is ignored."""
    tag: str | None = None
    """Instead of the salt: 14 hex digits of its hash. Zeros: requests without a salt."""

    def __repr__(self) -> str:
        return f"TenantConfig(name={self.name!r}, quota_bytes={self.quota_bytes})"  # and never a salt


class LaneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options that every tier has, whatever its type."""

    name: str = ""
    """Its name in logs and metrics; its type, if empty."""
    write: Literal["through", "back", "never"] = "through"
    """When chunks are stored there: as soon as possible, when the pool is about to evict them, or never. With `never`
    this cache does not remove chunks there either: clearing hides the tier until the next start."""
    threads: Threads = 2
    """Concurrent calls to it, 256 at most."""
    codec: str | dict[str, object] = ""
    """Compression of chunks stored there: the name of a codec, or its `type` and options. Empty: none. Chunks that are
    already there are read whatever their codec."""
    encryption_key_file: str = ""
    """A file (0600) with a key of 32 bytes, in 64 hex digits: chunks are stored encrypted, with AES-256-GCM under a key
    of their tenant's. Chunks of another key, or unencrypted ones, are misses. Not with `approximate`."""
    approximate: bool = False
    """Read only the first parts of chunks that the codec `progressive` stored, at least a quarter, which decodes to an
    approximation: tokens may differ. `write` must be never in every tier of such a cache that does not drop parts
    (docs/quality.md)."""


class ColdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Promotion from the lower tiers and spilling to them."""

    wait_s: Seconds = 1.0
    """How long a request may wait for chunks being promoted before it gets what has arrived. 0: it never waits."""
    prefetch_share: Share = 0.5
    """The part of the pool that promotions may take."""
    spill_share: Share = 0.25
    """The part of the pool that may be leased while it is being spilled. Tiers that are written to share it equally."""
    batch_bytes: Count = 32 << 20
    """Size of one call to a tier. At least one chunk."""
    drain_s: Seconds = 5.0
    """How long closing waits for chunks still to be spilled."""


class HandoverConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Disaggregated prefill (docs/disaggregated.md)."""

    hold_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    """How long chunks computed for another engine are held in the pool, unless they are read earlier. 0: they may be
    evicted like any others. All holds together take at most half of the pool."""
    wait_s: Seconds = 1.0
    """How long a request waits for chunks that the other engine is still storing, but never longer than computing them
    is estimated to take. What has not arrived by then is computed. 0: it never waits."""
    protocol: Literal["auto", "always", "never"] = "auto"
    """Whether a vLLM engine takes part in hand-overs that proxies request. `auto`: unless vLLM's MultiConnector has
    other connectors beside ours, of which one may be for that: two answers to a proxy end the engine."""


class CostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `use: auto`, besides what it measures."""

    prefill_tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Prefill speed of the engine. 0: it is measured."""


class JudgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The verdict that a lossy format needs before it is used (docs/quality.md)."""

    verdict: str = ""
    """The file that `kv judge MODEL --out FILE` wrote for this model."""
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The largest mean KL divergence from answers with exact KV that a format may have, in nats. A format with more, or
    without a measurement, is refused at start. 0: no limit."""


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Subscribers of a cache's events. Metrics are not listed: they start when they are first read."""

    log: Literal["none", "text", "json"] = "none"
    """A rate-limited line for each condition that an operator should know about: to the log, or as JSON on stderr. With
    none, failing tiers and each damaged chunk are logged where they occur, and nothing else."""
    record: str = ""
    """A trace file of the requests, for `kv sim`; a server inserts each cache's name before the file's suffix."""
    record_bytes: Count = 64 << 20
    """Size limit of each such file; further requests are counted and left out."""
    otel: bool = False
    """Send spans and metrics by OpenTelemetry as the standard OTEL_… environment variables say."""
    subscribers: list[str | dict[str, Any]] = []
    """Event subscribers of other packages: names of entry points, or mappings of `name` and parameters."""
    history_keys: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20
    """Keys of each cache that `kv explain` remembers, at about 100 bytes each. 0: none."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cache in a process of its own: where `kv-server` listens and an engine finds it."""

    socket: str = ""
    """For kv-server: the path at which it listens; empty: derived from its name. For an engine: the path of the
    kv-server to join, whose host, tiers, cold, tenants and observe then apply; empty: the cache is in the engine's
    process or, if it has several, in a private server that ends with it."""
    url: str = ""
    """For an engine whose host has no kv-server: kvs://HOST:PORT, the `peers.listen` of another host's with
    `peers.take_stores`. It keeps what a small pool here cannot. Certificates: as in `peers`."""
    name: str = "default"
    """Distinguishes the servers of one user."""
    max_formats: Count = 4
    """Formats of chunks (models) that kv-server serves at once. The machine must have memory for that many pools."""
    max_sessions: Count = 128
    """Clients that kv-server serves at once."""
    programs: list[list[str]] = []
    """Commands that kv-server runs beside itself, word by word: started when it serves, ended with it."""
    answer_s: SomeSeconds = 1.0
    """For an engine: how long an answer of the server may take before it counts as lost, which is a miss. A step waits
    no longer than that. Choose more where processes share few cores."""


class PeerSecurity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How servers of several hosts authenticate each other: by TLS 1.3, with certificates of both sides. The same files
    for those that listen and those that connect; `kv peers init` makes them."""

    tls_ca_file: str = ""
    """The certificate authorities of all peers, and their revocation lists, if any: a peer without a valid certificate
    from them is neither served nor trusted. The three files go together."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    token_file: str = ""
    """A secret of all peers besides, mode 0600, for an authority that issues certificates to others too. It is sent
    to a peer once its certificate has been verified."""
    unprotected: bool = False
    """Without TLS. Everyone who reaches an address, or listens at it, may read and forge chunks: any user of this host,
    if it is loopback."""
    nixl: bool = False
    """Read chunks by NIXL where both sides do: RDMA, or neither encrypted nor authenticated (docs/peers.md)."""


class PeersConfig(PeerSecurity, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address at which `kv-server` serves other hosts' servers, if `listen` is set."""

    listen: str = ""
    """A host and a port, such as 10.0.0.1:9500 or 127.0.0.1:9500."""
    max_connections: Count = 64
    """Peers served at once. Each has a thread, and reads one chunk at a time."""
    timeout_s: SomeSeconds = 10.0
    """How long a peer may take to read a chunk, plus a second for each megabyte of it. A slower one is disconnected."""
    take_offers: bool = True
    """Whether to fetch chunks that a peer offers before it leaves (`kv drain`), into at most half of the pool."""
    take_stores: bool = False
    """Whether engines of other hosts may store, forget and clear chunks here, as this host's own may."""


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address and options of `kv-server` over HTTP, if `listen` is set."""

    listen: str = ""
    """A host and a port, such as 127.0.0.1:9400 or [::1]:9400. An address beyond loopback needs a token_file."""
    token_file: str = ""
    """The token for requests that change something; created if it does not exist. Empty: nothing can be changed."""
    hosts: list[str] = []
    """Host names to accept besides this machine's own, such as a proxy's."""
    archive_directory: str = ""
    """Where prefixes are exported to and imported from. Empty: nowhere."""
    endpoints: list[str | dict[str, Any]] = []
    """Endpoints of other packages: names of entry points, or mappings of `name` and parameters."""
