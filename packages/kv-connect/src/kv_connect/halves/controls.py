"""Per-request controls: what one request may load and store, on top of the engine's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kv_core.cost import Use


@dataclass(frozen=True, slots=True)
class Controls:
    """The defaults are those of a request without options.

    loads: whether held chunks may be loaded for it.
    promotes: whether lower tiers are queried and waited for; else only what is in the pool now counts.
    stores: whether what it computes may be stored.
    min_load_tokens: a smaller hit is computed instead.
    min_store_tokens: if fewer tokens could be stored, none are.
    max_store_tokens: tokens beyond these are not stored; None: no limit. A hit is a prefix, so the end is the only part
        that can be left out without making what follows it useless.
    retain_s: for how long its chunks stay in the pool, however often they are read, within limits. 0: no longer than
        others.
    use: when held chunks are used; None: as the engine's settings say.
    hands_over_tokens: another engine continues after this many tokens of the prompt (`handover`): they are
        stored including the last, partial chunk, and held in the pool until they are read. 0: none does.
    awaits_tokens: another engine is storing this many tokens of the prompt. 0: none is.
    tiers: the tiers that may be read and written for it, besides the pool; None: all.
    tags: part of the root of its chain (docs/formats/keys.md), so that only requests with the same tags share chunks.
    """

    loads: bool = True
    promotes: bool = True
    stores: bool = True
    min_load_tokens: int = 0
    min_store_tokens: int = 0
    max_store_tokens: int | None = None
    retain_s: float = 0.0
    use: Use | None = None
    hands_over_tokens: int = 0
    awaits_tokens: int = 0
    tiers: tuple[str, ...] | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def retain_ms(self) -> int:
        return round(self.retain_s * 1000)

    def storable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens may be stored."""
        if not self.stores or tokens < self.min_store_tokens:
            return 0
        return tokens if self.max_store_tokens is None else min(tokens, self.max_store_tokens)


NO_CONTROLS: Final = Controls()
"""The controls of a request without options."""
