"""What blending did, beside the other figures in vLLM's `/metrics` and statistics log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from kv_connect.figures import FIGURES, Figure
from kv_vllm.stats import PromMetrics

BLEND_FIGURES: Final[Mapping[str, Figure]] = {
    "blend_requests": Figure("counter", "Requests with a plan whose segments were put in their places."),
    "blend_refused": Figure("counter", "Requests with a plan that were computed whole instead."),
    "blend_segment_tokens": Figure("counter", "Tokens of segments that were put in their places."),
    "blend_held_tokens": Figure("counter", "Those of these tokens whose KV the cache held, behind whatever text."),
    "blend_recomputed_tokens": Figure("counter", "Those of these tokens that were computed again in their context."),
}


@dataclass(slots=True)
class BlendCounts:
    """Of the scheduler half."""

    requests: int = 0
    refused: int = 0
    segment_tokens: int = 0
    held_tokens: int = 0
    recomputed_tokens: int = 0


OF_COUNTS: Final = {f"blend_{name}": name for name in BlendCounts.__slots__}
"""By the name of each figure, the count that it is."""


class BlendMetrics(PromMetrics):
    """The exact half's figures, and these."""

    figures: ClassVar[Mapping[str, Figure]] = {**FIGURES, **BLEND_FIGURES}
