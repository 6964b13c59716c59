"""Caches whose tiers use the codec `kvtc`: which calibration, and how such caches are separated from all others.

What an engine loads from such a tier is an approximation, and so is what it computes from that. So the calibration's
name is part of the fingerprint of the engine's chunks, as the kind of a format is: keys, headers, pools and namespaces
of tiers differ from those of exact caches and of other calibrations (docs/adr/0010).
"""

from collections.abc import Iterator, Mapping, Sequence

from kv_core.errors import ConfigError
from kv_tiers.approximate import CALIBRATED

from kv_codecs.calibration import Calibration, read_calibration
from kv_codecs.division import Division


def calibration_of(tiers: Sequence[Mapping[str, object]]) -> Calibration:
    """The calibration with which these tiers encode, of which one or more use the codec.

    Raises:
        ConfigError: the file cannot be used, or two tiers name different ones.
    """
    by_id = {calibration.id: calibration for calibration in map(read_calibration, dict.fromkeys(_paths(tiers)))}
    if len(by_id) != 1:
        raise ConfigError("tiers: all that use codec kvtc must name the same calibration")
    return next(iter(by_id.values()))


def fingerprint_of(calibration: Calibration, fingerprint: str, division: Division | None = None) -> str:
    """The fingerprint of chunks that may have been through tiers with this calibration.

    fingerprint: the fingerprint of their format.
    division: how they divide the calibration's model.
    """
    words = [calibration.name, *([] if division is None else [division.text])]
    return " ".join([fingerprint, *words])


def _paths(tiers: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for tier in tiers:
        codec = tier.get("codec")
        if isinstance(codec, Mapping) and codec.get("type") == CALIBRATED:
            yield str(codec.get("calibration", ""))
        elif codec == CALIBRATED:
            raise ConfigError("codec kvtc needs a calibration: write codec: {type: kvtc, calibration: FILE}")
