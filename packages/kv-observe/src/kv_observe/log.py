"""The log for operators: a tier that fails or recovers, damage, and stores that find no room for a long time.

For each kind of line, tier and cache there is at most one line in `every_s`; the number of suppressed ones is added to
the next, or logged at the end. The first few changes of a tier's health are logged at once, and further ones at most
once in `every_s`.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kv_core.log import RateLimit, on_one_line
from kv_tiers.events.bus import EventBus, Occurred, Subscriber
from kv_tiers.events.events import DamageFound, LeaseExpired, StoreBegun, TierHealth

_log = logging.getLogger(__name__)

EVERY_S: Final = 60.0
REFUSED_FOR_S: Final = 10.0
"""Seconds for which all stores must find no room before that is logged."""

Say = Callable[[int, str, dict[str, Any]], None]
"""Level, text, and the same as fields."""


@dataclass(slots=True)
class _Limit:
    next_s: float = 0.0
    suppressed: int = 0


class LogLines(Subscriber):
    """Writes the lines, by `log_text` or `log_json`."""

    wants_requests = False
    writes_log = True

    def __init__(
        self, bus: EventBus, say: Say, *, every_s: float = EVERY_S, refused_for_s: float = REFUSED_FOR_S
    ) -> None:
        self._bus = bus
        self._say = say
        self._every_s, self._refused_for_s = every_s, refused_for_s
        self._limits: dict[tuple[str, str, str], _Limit] = {}
        self._refused_since: dict[str, float] = {}
        self._health = RateLimit(every_s=every_s)

    def take(self, occurred: Occurred) -> None:
        cache = occurred.source.name
        match occurred.event:
            case TierHealth(tier, was, now, why):
                suppressed = self._health.admit((cache, tier), occurred.at_s)
                if suppressed is None:
                    return
                is_up = now == "UP"
                back = "takes chunks again" if was == "FULL" else "is back"
                text = f"tier {tier} {back}" if is_up else f"tier {tier} is {now.lower()}: {why}"
                if suppressed:
                    text += f" ({suppressed} changes were suppressed before)"
                level = logging.INFO if now == "CLOSED" else logging.WARNING
                self._log_line(occurred, level, text, event="tier_health", tier=tier, was=was, now=now, why=why)
            case DamageFound(tier, keys, reason):
                text = f"{len(keys)} damaged chunks were discarded in {tier}: {reason}"
                self._log_limited(occurred, text, event="damaged", tier=tier, chunks=len(keys), why=reason)
            case StoreBegun(reserved=reserved, refused=refused, why=why):
                if not refused:
                    if reserved:
                        self._refused_since.pop(cache, None)
                    return
                since = self._refused_since.setdefault(cache, occurred.at_s)
                if occurred.at_s - since >= self._refused_for_s:
                    seconds = round(occurred.at_s - since)
                    text = f"stores have found no room for {seconds} s: {why}"
                    self._log_limited(occurred, text, event="refused", seconds=seconds, chunks=len(refused), why=why)
            case LeaseExpired(holder, _, chunks, "load"):
                text = f"{holder} read {chunks} chunks for longer than its lease, and must not use them"
                self._log_limited(occurred, text, event="lease_expired", holder=holder, chunks=chunks)

    def close(self) -> None:
        for (kind, cache, tier), limit in self._limits.items():
            if limit.suppressed:
                where = " ".join(filter(None, (f"of cache {cache}" if cache else "", f"in {tier}" if tier else "")))
                fields = {"event": "kept_back", "kind": kind, "cache": cache, "tier": tier, "events": limit.suppressed}
                self._say(logging.WARNING, f"{limit.suppressed} more of kind {kind} {where}".rstrip(), fields)

    def _log_limited(self, occurred: Occurred, text: str, **fields: Any) -> None:
        limit = self._limits.setdefault((fields["event"], occurred.source.name, fields.get("tier", "")), _Limit())
        if occurred.at_s < limit.next_s:
            limit.suppressed += 1
            return
        if limit.suppressed:
            text += f" ({limit.suppressed} more like this before)"
            fields["kept_back"] = limit.suppressed
        limit.next_s, limit.suppressed = occurred.at_s + self._every_s, 0
        self._log_line(occurred, logging.WARNING, text, **fields)

    def _log_line(self, occurred: Occurred, level: int, text: str, **fields: Any) -> None:
        cache = occurred.source.name
        prefix = f"cache {cache}: " if cache else ""
        time_s = round(self._bus.wall_s(occurred.at_s), 3)
        self._say(level, prefix + text, {"time": time_s, "cache": cache, **fields})


def log_text(level: int, text: str, fields: dict[str, Any]) -> None:
    """To this process's log."""
    _log.log(level, "%s", on_one_line(text))


def log_json(level: int, text: str, fields: dict[str, Any]) -> None:
    """One JSON object per line on standard error."""
    sys.stderr.write(json.dumps({"level": logging.getLevelName(level), **fields, "text": text}) + "\n")
    sys.stderr.flush()
