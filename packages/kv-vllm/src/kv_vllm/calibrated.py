"""A calibration of the codec `kvtc`, checked against what vLLM computes: its layers, and how its model rotates keys.

A connector has no access to the model. But models get their rotary embeddings from one function, which caches them for
the next layer with the same parameters, in this process and until the engine ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kv_codecs.calibrated import EngineRotation, GroupLayers, calibration_of, check_rotations, divide, fingerprint_of
from kv_codecs.calibration import Calibration
from kv_connect.nodes import RankShare
from kv_core.errors import ConfigError
from kv_core.format import ChunkFormat
from kv_cuda.bind import BoundGroups
from numpy.typing import NDArray


def bind_calibration(
    vllm_config: Any, tiers: Sequence[Mapping[str, object]], bound: BoundGroups, share: RankShare
) -> tuple[str, tuple[ChunkFormat, ...], str]:
    """The name of the codec and its calibration, the formats that a verdict has to cover, and the fingerprint of the
    chunks.

    Raises:
        ConfigError: the calibration cannot be read, or is for another model or other keys.
    """
    calibration, layers = calibration_of(tiers), group_layers(bound)
    division = divide(calibration, layers, stages=share.stages, shards=share.shards)
    check_calibration(vllm_config, calibration, share)
    judged = tuple(group.format for group in layers if not group.is_state)
    return calibration.name, judged, fingerprint_of(calibration, bound.fingerprint, division)


def group_layers(bound: BoundGroups) -> list[GroupLayers]:
    """The groups that a calibration is compared with."""
    return [
        GroupLayers(
            f"group {group.table} of this model's layers ({group.coverage})",
            group.format,
            group.numbers,
            is_state=group.coverage.kind == "state",
        )
        for group in bound.groups
    ]


def check_calibration(vllm_config: Any, calibration: Calibration, share: RankShare) -> None:
    """
    Raises:
        ConfigError: the calibration is for keys rotated differently from this engine's, or vLLM does not report how.
    """
    if vllm_config.model_config.using_transformers_backend():
        return  # it computes what `kv judge` measured
    check_rotations(
        calibration, made_rotations(), stage=share.shard * share.stages // share.shards, stages=share.stages
    )


def made_rotations() -> list[EngineRotation]:
    """The rotations that models of this process have requested from vLLM.

    Raises:
        ConfigError: this vLLM does not cache them where the supported versions do.
    """
    from vllm.model_executor.layers import rotary_embedding

    instances = getattr(rotary_embedding, "_ROPE_DICT", None)
    if not isinstance(instances, dict):
        raise ConfigError("codec kvtc: this vLLM does not say how its models rotate keys; use another codec")
    return [
        EngineRotation(
            head_dim=int(embedding.head_size),
            rotated=int(embedding.rotary_dim),
            neighbours=not getattr(embedding, "is_neox_style", True),  # a class that supports only one way uses this
            frequencies=_frequencies(embedding),
        )
        for embedding in instances.values()
        if hasattr(embedding, "head_size") and hasattr(embedding, "rotary_dim")
    ]


def _frequencies(embedding: Any) -> NDArray[np.float64] | None:
    """From its table of cosines and sines, [positions, rotated]; None if it has another form."""
    table = getattr(embedding, "cos_sin_cache", None)
    if table is None or table.ndim != 2 or len(table) < 2 or table.shape[1] != embedding.rotary_dim:
        return None
    cos, sin = table[1].double().cpu().chunk(2)
    angles: NDArray[np.float64] = np.arctan2(sin.numpy(), cos.numpy())
    return angles
