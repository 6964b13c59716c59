"""How vLLM's models rotate their keys, to check a calibration of the codec `kvtc` against.

A connector has no access to the model. But models get their rotary embeddings from one function, which caches them for
the next layer with the same parameters, in this process and until the engine ends.
"""

from typing import Any

import numpy as np
from kv_core.errors import ConfigError
from kv_tiers.attach.ranks import RankShare
from kv_tiers.attach.rotations import EngineRotation, check_rotations
from kv_tiers.codecs.calibration import Calibration
from numpy.typing import NDArray


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
