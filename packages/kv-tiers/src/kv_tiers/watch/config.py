"""Settings of what watches a cache."""

from typing import Literal

import msgspec


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who subscribes to a cache's events. Metrics are not here: they begin with whoever asks for them."""

    log: Literal["none", "text", "json"] = "none"
    """A line for what an operator must know, at most one of a kind in a while: to the log, or as JSON on stderr. With
    none, tiers that fail and each damaged chunk are logged where it happens, and the rest is not."""
    record: str = ""
    """A file for the requests, which `kv sim` replays; a server puts each cache's name before the file's suffix."""
    record_bytes: int = 64 << 20
    """How long each such file may become; what comes then is counted and left out."""
    otel: bool = False
    """Spans for OpenTelemetry, sent where the standard OTEL_… environment variables say."""
    history_keys: int = 1 << 20
    """How many keys of each cache are remembered for `kv explain`, at about 100 bytes each. 0: none."""
