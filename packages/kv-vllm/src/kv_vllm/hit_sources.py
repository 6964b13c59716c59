"""Our tiers as sources in vLLM's metric `vllm:prompt_tokens_by_source`."""

from collections.abc import Mapping
from typing import Final

from kv_tiers.settings import Settings
from vllm.v1.metrics.cache_hit_source import CacheHitSource

_SOURCES: Final[Mapping[str, CacheHitSource]] = {
    "host": CacheHitSource.HOST,
    "dram": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "gds": CacheHitSource.DISK,
}
"""By a tier's type. Other tiers use vLLM's fallback, which also means "a remote store"."""


class HitSources:
    """The source in vLLM's terms for each tier of these settings."""

    def __init__(self, settings: Settings) -> None:
        """A joined server has its own tiers: those that are named after their type are known here too."""
        types = {str(tier.get("name") or tier["type"]): str(tier["type"]) for tier in settings.tiers}
        unspecified = CacheHitSource.EXTERNAL_UNSPECIFIED
        self._sources = {**_SOURCES, **{name: _SOURCES.get(kind, unspecified) for name, kind in types.items()}}

    def of(self, tokens_by_tier: Mapping[str, int], tokens: int) -> dict[CacheHitSource, int]:
        """The tokens of a hit by source. If their number is not the one offered, the source is unknown."""
        if tokens != sum(tokens_by_tier.values()):
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {}
        tokens_by_source: dict[CacheHitSource, int] = {}
        for tier, count in tokens_by_tier.items():
            source = self._sources.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            tokens_by_source[source] = tokens_by_source.get(source, 0) + count
        return tokens_by_source
