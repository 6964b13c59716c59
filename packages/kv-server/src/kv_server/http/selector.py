"""Selects the caches of a server by format; a server has one cache for each format that clients registered."""

from typing import Annotated

import msgspec
from kv_tiers.cache.local import LocalCache
from msgspec import UNSET, Meta, UnsetType

from kv_server.http.problem import Problem
from kv_server.http.relay import Relay
from kv_server.wire import Format


class FormatSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A format, as /status shows it. A field that is left out matches any.

    chunk_bytes: of the largest chunk.
    """

    fingerprint: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET
    chunk_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)] | UnsetType = UNSET

    @property
    def matches_any(self) -> bool:
        """No field is given."""
        return self.fingerprint is UNSET and self.chunk_bytes is UNSET

    def matches(self, one: Format) -> bool:
        group_bytes, fingerprint = one
        return self.fingerprint in (UNSET, fingerprint) and self.chunk_bytes in (UNSET, max(group_bytes))


async def select_caches(relay: Relay, selector: FormatSelector) -> dict[Format, LocalCache]:
    """All caches that match. Matching none is a problem only if a field was given.

    Raises:
        Problem: there is no such format, or the server does not answer.
    """
    caches = await relay.caches()
    found = {one: cache for one, cache in caches.items() if selector.matches(one)}
    if not found and not selector.matches_any:
        raise Problem(404, f"no cache of this format; there are {_listed(caches)}")
    return found


async def check_opened(relay: Relay, selector: FormatSelector) -> None:
    """
    Raises:
        Problem: a cache that matches is being opened, and what its tiers hold cannot be reached yet.
    """
    opening = sum(selector.matches(one) for one in await relay.on_server(lambda server: list(server.formats.opening)))
    if opening:
        raise Problem(503, f"{opening} caches are being opened; ask again soon", {"retry-after": "1"})


async def select_cache(relay: Relay, selector: FormatSelector) -> tuple[Format, LocalCache]:
    """
    Raises:
        Problem: no cache matches, or several do.
    """
    found = await select_caches(relay, selector)
    if not found:
        raise Problem(404, "there is no cache yet; a client that registers its format makes one")
    if len(found) > 1:
        raise Problem(409, f"several caches match; give the fingerprint and chunk_bytes of one: {_listed(found)}")
    return next(iter(found.items()))


def _listed(caches: dict[Format, LocalCache]) -> str:
    shown = [f"{fingerprint} with chunks of {max(group_bytes)} bytes" for group_bytes, fingerprint in caches]
    return "; ".join(shown) or "none yet"
