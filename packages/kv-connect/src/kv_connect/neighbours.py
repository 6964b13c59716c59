"""Warns about engines of another kind that use the same cache but cannot share chunks with this one.

vLLM and SGLang find each other's chunks if both store them in the canonical format, with the same chunk length and
dtype. If one of them cannot, each finds only its own, and nothing looks wrong. So at start an engine registers the
format that it stores, at the server that it joins or, for its tiers, in a small file of the same user, and compares it
with those of other engines.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kv_core.errors import KVError
from kv_core.log import limited_logger
from kv_server import wire
from kv_server.connection import ask_server_for
from kv_server.wire import MODEL_NAME
from kv_tiers.settings import Settings

from kv_connect.file_digests import cache_file, read_private, write_private
from kv_connect.identity import ServedModel, described

_log = limited_logger(__name__)

_NAMING: Final = ("directory", "url", "bucket", "endpoint", "prefix")
"""The options of tiers that identify the tier."""
_MAX_NOTES: Final = 1000
_LAST_S: Final = 30 * 86400.0
"""An engine that has not been started for this long is ignored."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The format in which an engine stores chunks.

    model: what determines its KV besides the weights, as a digest.
    fingerprint: the format's fingerprint; engines find only chunks of the same one.
    model_name: for people.
    """

    engine: str
    model: str
    kind: str
    fingerprint: str
    model_name: str = field(default="", compare=False)

    @classmethod
    def of(cls, model: ServedModel, kind: str, fingerprint: str) -> "StoredFormat":
        return cls(model.engine, described(model), kind, fingerprint, model.source)

    def facts(self) -> dict[str, str]:
        """For registration at a server, besides the engine's own facts."""
        return {
            "engine_kind": self.engine,
            "model": self.model,
            MODEL_NAME: self.model_name,
            "format_kind": self.kind,
        }


def warn_of_other_formats(
    settings: Settings, stored: StoredFormat, *, notes: Path | None = None, now_s: Callable[[], float] = time.time
) -> None:
    """Register what this engine stores, and warn of engines of another kind that store this model in another format.

    notes: this user's file; None for the default one.
    """
    try:
        for other, where in {**_at_server(settings), **_at_tiers(settings, stored, notes, now_s())}.items():
            is_other_kind = other.engine != stored.engine and other.model == stored.model
            if is_other_kind and other.fingerprint != stored.fingerprint:
                _warn(stored, other, where)
    except (KVError, OSError, ValueError) as error:
        _log.debug("other engines could not be looked for: %s", error)


def _warn(stored: StoredFormat, other: StoredFormat, where: str) -> None:
    if "blocks" in (stored.kind, other.kind):
        opaque = stored.engine if stored.kind == "blocks" else other.engine
        advice = (
            f"{opaque} stores opaque blocks, which no other kind of engine reads: see its log for why, or write "
            + ("format: canonical, which reports the reason at start")
        )
    else:
        advice = "both must have the same chunk_tokens (SGLang's --page-size), dtype and format"
    _log.warning(
        "%s uses %s with the same model in another format (%s there, %s here), so neither finds what the other "
        "computed: %s",
        other.engine,
        where,
        other.kind,
        stored.kind,
        advice,
    )


def _at_server(settings: Settings) -> dict[StoredFormat, str]:
    if not settings.server.socket:
        return {}
    status = ask_server_for(Path(settings.server.socket), wire.Status(), wire.Stated)
    format_places = {}
    for session in status.report.sessions:
        facts = session.facts
        if "engine_kind" in facts:
            other_format = StoredFormat(
                facts["engine_kind"], facts.get("model", ""), facts.get("format_kind", ""), session.fingerprint
            )
            format_places[other_format] = f"the server at {settings.server.socket}"
    return format_places


def _at_tiers(settings: Settings, stored: StoredFormat, notes: Path | None, now_s: float) -> dict[StoredFormat, str]:
    """The formats that engines have noted for the tiers of these settings, with the tier. Notes this engine's too."""
    file = cache_file("engines.json") if notes is None else notes
    if file is None or settings.server.socket or not settings.tiers:
        return {}
    places = {_place(tier): tier for tier in settings.tiers}
    format_places = {}
    newest = []
    for note in read_private(file) or ():
        match note:
            case [
                str(place),
                float(at_s),
                {"engine": str(engine), "model": str(model), "kind": str(kind), "fingerprint": str(fingerprint)},
            ] if now_s - at_s < _LAST_S:
                if place in places and (engine, model) == (stored.engine, stored.model):
                    continue  # superseded by this engine's own note
                newest.append(note)
                if place in places:
                    format_places[StoredFormat(engine, model, kind, fingerprint)] = _spelled(places[place])
    newest += [[place, now_s, asdict(stored)] for place in places]
    write_private(file, newest[-_MAX_NOTES:])
    return format_places


def _place(tier: Mapping[str, Any]) -> str:
    """Where a tier is, without revealing anything that may be secret."""
    named = [tier.get("type"), *(tier.get(name) for name in _NAMING)]
    return hashlib.sha256(json.dumps(named, default=str).encode()).hexdigest()


def _spelled(tier: Mapping[str, Any]) -> str:
    where = tier.get("directory") or tier.get("bucket") or ""
    return f"this {tier.get('type')} tier" + (f" ({where})" if where else "")
