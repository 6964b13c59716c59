"""What one request is allowed and what is worth its while, beside the engine's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kv_core.cost import Use


@dataclass(frozen=True, slots=True)
class Controls:
    """The defaults are a request that says nothing.

    loads: it may be given what is held.
    promotes: slower tiers are asked too, and it may wait for them; else only what is in the pool now counts.
    stores: what it computes may be kept.
    min_load_tokens: a load of fewer tokens is not worth its while; they are computed.
    min_store_tokens: a request of fewer tokens that could be kept is not kept at all.
    max_store_tokens: its tokens beyond these are not kept; None: all may be. A hit is a prefix, so an end is the only
        part that can be left out without making what follows it useless.
    use: when what is held is used; None: as the engine's settings say.
    tags: part of the root of its chain (docs/formats/keys.md), so that only requests with the same ones share chunks.
    """

    loads: bool = True
    promotes: bool = True
    stores: bool = True
    min_load_tokens: int = 0
    min_store_tokens: int = 0
    max_store_tokens: int | None = None
    use: Use | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    def kept(self, tokens: int) -> int:
        """How many of the first `tokens` tokens, all that could be kept, are."""
        if not self.stores or tokens < self.min_store_tokens:
            return 0
        return tokens if self.max_store_tokens is None else min(tokens, self.max_store_tokens)


NO_CONTROLS: Final = Controls()
"""Of a request that says nothing."""
