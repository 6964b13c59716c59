"""The sections of the settings, one record each: names, types, ranges and defaults. `kv_tiers.settings` reads them.

Ranges are part of the types, so values out of range are refused when the settings are read. A setting in bytes is named
`…_bytes`; in a file it may be text such as "4GiB". `docs/settings.md` has the same as a table.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from kv_core.errors import ConfigError

from kv_tiers.eviction.registry import DEFAULT_POLICY, PolicySpec

DEFAULT_CAPACITY_BYTES: Final = 4 << 30

Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool and how long its promises last."""

    capacity_bytes: Count = DEFAULT_CAPACITY_BYTES
    """How much of the host's memory holds chunks; taken from the machine as it is used. Whole chunks count."""
    name: str = ""
    """Empty: the pool ends with its process. A name: it stays in shared memory (0600) for the next process."""
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """How long chunks stay put for a request, or another holder, from whom nothing more is heard."""
    policy: PolicySpec = DEFAULT_POLICY
    """The eviction policy: its name, or a mapping of `name` and its parameters.
    `kv sim` compares policies on a trace."""


def check_lease(lease_s: float) -> None:
    """
    Raises:
        ConfigError: it would be over before anything could be read.
    """
    if not lease_s > 0:
        raise ConfigError(f"lease_s={lease_s}: a lease must last longer than nothing; 300 is the default")


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tenant that is reported by name, or has a part of the pool for itself. One of salt, salt_file and tag."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """What reports call it."""
    quota_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How much of the pool is this tenant's alone, and all it gets there. Left out: it shares what the quotas leave."""
    salt: str | None = None
    """What its requests carry. Better in a file."""
    salt_file: str | None = None
    """The file that the salt is in, readable by its owner alone. A newline at its end does not count."""
    tag: str | None = None
    """Instead of the salt: 14 hex digits of its hash. Zeros: requests without a salt."""

    def __repr__(self) -> str:
        return f"TenantConfig(name={self.name!r}, quota_bytes={self.quota_bytes})"  # and never a salt


class LaneConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options that every tier has, whatever its type."""

    name: str = ""
    """What it is called in logs and metrics; its type where nothing is said."""
    write: Literal["through", "back", "never"] = "through"
    """When chunks are stored there: as soon as may be, when the pool is about to evict them, or not at all. What is not
    stored by this cache is not removed by it either: with `never`, clearing hides the tier until the next start."""
    threads: Count = 2
    """How many calls to it may be under way at a time."""
    codec: str | dict[str, object] = ""
    """What makes chunks smaller on their way there: the name of a codec, or its `type` and its options. Empty: they are
    stored as they are. What is there already is read whatever it was stored with."""
    approximate: bool = False
    """Read less than all of chunks that the codec `progressive` stored, a quarter at least, which decodes to an
    approximation: tokens may differ. `write` must be never in every tier of such a cache (docs/quality.md)."""


class ColdConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tiers below the host pool are used."""

    wait_s: Seconds = 1.0
    """How long a request may wait for chunks on their way up before it gets what has arrived. 0: never waits."""
    prefetch_share: Share = 0.5
    """The part of the pool that may be waiting for bytes from below."""
    spill_share: Share = 0.25
    """The part of the pool that may be held in place while it is stored below."""
    batch_bytes: Count = 32 << 20
    """How much one call to a tier carries. At least one chunk."""
    drain_s: Seconds = 5.0
    """How long closing waits for what is still to be stored below."""


class HandoverConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompts that one engine computes and another goes on with (docs/disaggregated.md). vLLM only."""

    hold_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    """How long what was computed for another engine stays in the pool, unless it has been read before. 0: it may leave
    like any other chunk. All of it together is half of the pool at most."""
    wait_s: Seconds = 1.0
    """How long a request waits for what the other engine is still storing, and never for longer than computing it is
    estimated to take. What has not come by then is computed. 0: never waits."""


class CostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `use: auto`, besides what it measures."""

    prefill_tokens_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """How many tokens of a prompt the engine computes in a second. 0: measured in vLLM; SGLang does not say, so there
    whatever is held is used."""


class JudgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The verdict that a lossy format needs before it is used (docs/quality.md)."""

    verdict: str = ""
    """The file that `kv judge MODEL --out FILE` wrote for this model."""
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The mean KL divergence from exact KV's answers that a format may have, in nats. One with more is refused at
    start, and so is one that was not measured. 0: nothing is demanded."""


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Subscribers of a cache's events. Metrics are not listed: they start when they are first read."""

    log: Literal["none", "text", "json"] = "none"
    """A line for what an operator must know, at most one of a kind in a while: to the log, or as JSON on stderr. With
    none, tiers that fail and each damaged chunk are logged where it happens, and the rest is not."""
    record: str = ""
    """A file for the requests, which `kv sim` replays; a server puts each cache's name before the file's suffix."""
    record_bytes: Count = 64 << 20
    """How long each such file may become; what comes then is counted and left out."""
    otel: bool = False
    """Spans and metrics for OpenTelemetry, sent where the standard OTEL_… environment variables say."""
    subscribers: list[str | dict[str, Any]] = []
    """Others' code that gets every event: the names of entry points, or mappings of `name` and parameters."""
    history_keys: Annotated[int, msgspec.Meta(ge=0)] = 1 << 20
    """How many keys of each cache are remembered for `kv explain`, at about 100 bytes each. 0: none."""


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cache in a process of its own: where `kv-server` listens and an engine finds it."""

    socket: str = ""
    """For kv-server: the path that it listens at; empty: a place that follows from its name. For an engine: the path of
    the kv-server to join, whose host, tiers, cold, tenants and observe are then its own; empty: the cache is in the
    engine's process, or where it has several in a private server that ends with it."""
    name: str = "default"
    """Tells the servers of one user apart."""
    max_formats: Count = 4
    """How many formats of chunks (models) kv-server serves at once. The machine must be able to hold so many pools."""
    max_sessions: Count = 128
    """How many clients kv-server serves at once."""
    answer_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """For an engine: how long an answer of the server may take before it counts as lost, and is a miss. A step waits
    that long at most. Write more where processes share few cores."""


class PeerSecurity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How servers of several hosts know each other. The same files for those that listen and those that connect."""

    tls_ca_file: str = ""
    """The authorities of all peers: who shows no certificate of theirs is not served, nor believed. The three files go
    together; without them nothing is encrypted."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    token_file: str = ""
    """A secret that all peers have, of mode 0600. Each proves to the other that it has it; it is never sent."""
    unprotected: bool = False
    """Beyond loopback with neither certificates nor a token."""


class PeersConfig(PeerSecurity, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address at which `kv-server` serves other hosts' servers, if `listen` is set."""

    listen: str = ""
    """A host and a port, such as 10.0.0.1:9500 or 127.0.0.1:9500."""
    max_connections: Count = 64
    """How many are served at once. One has a thread, and reads one chunk at a time."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long a peer may take to read a chunk, and a second more for each megabyte of it. A slower one is
    disconnected."""


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The address and options of `kv-server` over HTTP, if `listen` is set."""

    listen: str = ""
    """A host and a port, such as 127.0.0.1:9400 or [::1]:9400. What other machines can reach needs a token_file."""
    token_file: str = ""
    """Holds the token without which nothing can be changed; made if it is not there. Empty: nothing can be changed."""
    hosts: list[str] = []
    """Names that this server is asked for by, beside its own: of a proxy before it, for example."""
    archive_directory: str = ""
    """Where prefixes are exported to and imported from. Empty: nowhere."""
