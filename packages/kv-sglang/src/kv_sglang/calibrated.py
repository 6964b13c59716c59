"""A calibration of the codec `kvtc`, checked against what SGLang stores."""

from collections.abc import Mapping, Sequence

from kv_codecs.calibrated import Division, GroupLayers, calibration_of, divide, fingerprint_of
from kv_codecs.calibration import Calibration
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat

from kv_sglang.attach import KV, Rank


def bind_calibration(
    tiers: Sequence[Mapping[str, object]], rank: Rank, formats: Mapping[str, ChunkFormat]
) -> tuple[str, dict[str, str]]:
    """The name of the codec and its calibration, and the fingerprint of each pool's pages.

    Raises:
        ConfigError: the calibration cannot be read, or does not fit this engine.
    """
    calibration = calibration_of(tiers)
    divisions = _divisions(calibration, rank, formats)
    prints = {name: fingerprint_of(calibration, one.fingerprint, divisions[name]) for name, one in formats.items()}
    return calibration.name, prints


def _divisions(calibration: Calibration, rank: Rank, formats: Mapping[str, ChunkFormat]) -> dict[str, Division | None]:
    """The layers and heads of each pool's pages. Pages that only SGLang can read (states) are stored unencoded.

    Raises:
        ConfigError: the calibration is for another model, or SGLang does not report which layers a pool has, or the
            order of its keys.
    """
    if rank.stages > 1:
        raise ConfigError(
            f"codec kvtc: the engine has {rank.stages} pipeline stages, whose pages have the same names in SGLang: "
            "use tensor parallelism, or another codec"
        )
    if not calibration.shape.order.is_usual:
        raise ConfigError(
            f"codec kvtc: the calibration is of {calibration.shape.model}, which rotates a part of each key, or "
            "neighbouring elements, and nothing shows that SGLang stores such keys in the order that `kv judge` saw: "
            "use vLLM, or another codec"
        )
    others = [name for name, one in formats.items() if name != KV and one.kind != "blocks"]
    if others:
        raise ConfigError(
            f"codec kvtc: the engine has pools {KV} and {', '.join(others)}, and SGLang does not say which of the "
            "model's layers each has: use another codec"
        )
    kv_format = formats[KV]
    layers = GroupLayers(f"pool {KV}", kv_format, tuple(range(kv_format.layers)))
    as_they_are = Division((None,), shards=rank.ranks)
    return dict.fromkeys(formats, as_they_are) | {KV: divide(calibration, [layers], shards=rank.ranks)}
