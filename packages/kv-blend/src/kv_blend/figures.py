"""What an engine that blends counts, besides what all engines do."""

from collections.abc import Mapping
from typing import Final

from kv_connect.figures import Figure

BLEND_FIGURES: Final[Mapping[str, Figure]] = {
    "blend_requests": Figure("counter", "Requests with a plan whose segments were put in their places."),
    "blend_refused": Figure("counter", "Requests with a plan that were computed whole instead."),
    "blend_segment_tokens": Figure("counter", "Tokens of segments that were put in their places."),
    "blend_held_tokens": Figure("counter", "Those of these tokens whose KV the cache held, behind whatever text."),
    "blend_recomputed_tokens": Figure("counter", "Those of these tokens that were computed again in their context."),
}
