"""Which of a server's caches is meant: it has one for each format of chunks that clients registered."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kv_tiers.cache.local import LocalCache
from kv_tiers.server.caches import Format
from kv_tiers.server.http.problem import Problem
from kv_tiers.server.http.relay import Relay


class Which(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A format, as /status tells it. What is left out is any."""

    fingerprint: Annotated[str, Meta(max_length=4096)] | UnsetType = UNSET
    chunk_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)] | UnsetType = UNSET


async def chosen(relay: Relay, which: Which) -> dict[Format, LocalCache]:
    """All caches of that format. None is a problem only if one was asked for by name.

    Raises:
        Problem: there is no such format, or no server to ask.
    """
    caches = await relay.caches()
    found = {
        (nbytes, fingerprint): cache
        for (nbytes, fingerprint), cache in caches.items()
        if which.fingerprint in (UNSET, fingerprint) and which.chunk_bytes in (UNSET, nbytes)
    }
    if not found and (which.fingerprint is not UNSET or which.chunk_bytes is not UNSET):
        raise Problem(404, f"no cache of this format; there are {_listed(caches)}")
    return found


async def chosen_one(relay: Relay, which: Which) -> tuple[Format, LocalCache]:
    """
    Raises:
        Problem: there is no such format, or several are meant.
    """
    found = await chosen(relay, which)
    if not found:
        raise Problem(404, "there is no cache yet; a client that registers its format makes one")
    if len(found) > 1:
        raise Problem(409, f"several caches are meant; say the fingerprint and chunk_bytes of one: {_listed(found)}")
    return next(iter(found.items()))


def _listed(caches: dict[Format, LocalCache]) -> str:
    shown = [f"{fingerprint} with chunks of {nbytes} bytes" for nbytes, fingerprint in caches]
    return "; ".join(shown) or "none yet"
