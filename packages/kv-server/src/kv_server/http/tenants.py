"""`/quota/{tenant}`: the quota of each tenant in the pool."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec
from kv_core.errors import ConfigError
from kv_core.keys import TENANT_BYTES
from kv_tiers.cache.local import LocalCache
from kv_tiers.options import BYTES_PATTERN, byte_count, spelled_as
from msgspec import Meta

from kv_server.http.operation import Operation
from kv_server.http.problem import Problem
from kv_server.http.relay import Relay
from kv_server.http.selector import FormatSelector, select_caches
from kv_server.wire import Format


class Quota(FormatSelector, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """quota_bytes: the tenant's own part of each format's pool, as a number or a text such as "4GiB"; only whole chunks
    count, and 0 means none at all."""

    quota_bytes: (
        Annotated[int, Meta(ge=0, lt=1 << 60)]
        | Annotated[str, spelled_as(BYTES_PATTERN, "a number of bytes, such as 4GiB")]
    )


class Use(msgspec.Struct, frozen=True):
    """A tenant's use of one format's pool. quota_bytes: null if the tenant uses the common share."""

    chunk_bytes: int
    fingerprint: str
    chunks: int
    used_bytes: int
    quota_bytes: int | None


class TenantState(msgspec.Struct, frozen=True):
    """name: from the settings, "" if it is not there. tag: as in the paths of keys."""

    name: str
    tag: str
    caches: list[Use]
    note: str = "a quota set here lasts until the server ends; what it starts with is in its settings (tenants)"


class TenantNames:
    """The names of tenants: those in the settings, or the tags in their keys."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """names: by tag."""
        self._names = dict(names)
        self._tags = {name: tag for tag, name in names.items()}

    def name(self, tag: bytes) -> str:
        return self._names.get(tag, "")

    def tag(self, tenant: str) -> bytes:
        """
        Raises:
            Problem: there is no such tenant.
        """
        if tenant in self._tags:
            return self._tags[tenant]
        if len(tenant) == 2 * TENANT_BYTES and set(tenant) <= set("0123456789abcdef"):
            return bytes.fromhex(tenant)
        known = ", ".join(sorted(self._tags)) or "none"
        raise Problem(
            404,
            f"no tenant is called {tenant[:100]!r}; the settings list {known}. Otherwise write the tag, "
            f"{2 * TENANT_BYTES} hex digits, as /status shows it",
        )


def operations(relay: Relay, names: TenantNames) -> list[Operation]:
    async def state(tag: bytes) -> TenantState:
        caches = await relay.caches()
        uses = [await relay.call(partial(_use, format_, cache, tag)) for format_, cache in caches.items()]
        return TenantState(names.name(tag), tag.hex(), uses)

    async def set_quota(tag: bytes, quota_bytes: int | None, of: FormatSelector) -> None:
        """In the caches that there are, and in those that are opened later."""
        caches = await select_caches(relay, of)
        await relay.call(partial(_set_all, caches, tag, quota_bytes))
        formats = None if of.matches_any else caches.keys()
        await relay.on_server(lambda server: server.formats.keep_quota(tag, quota_bytes, formats))
        if of.matches_any:
            opened = {format_: cache for format_, cache in (await relay.caches()).items() if format_ not in caches}
            await relay.call(partial(_set_all, opened, tag, quota_bytes))

    async def get(tenant: str) -> TenantState:
        return await state(names.tag(tenant))

    async def put(body: Quota, tenant: str) -> TenantState:
        tag = names.tag(tenant)
        try:
            quota_bytes = byte_count(body.quota_bytes, "quota_bytes")
        except ConfigError as error:
            raise Problem(409, str(error)) from None
        await set_quota(tag, quota_bytes, body)
        return await state(tag)

    async def delete(tenant: str) -> TenantState:
        tag = names.tag(tenant)
        await set_quota(tag, None, FormatSelector())
        return await state(tag)

    path = "/quota/{tenant}"
    return [
        Operation("GET", path, "What a tenant has of the pool", get, TenantState, failures=(404, 503)),
        Operation(
            "PUT",
            path,
            "Reserve a part of the pool for a tenant until the server ends",
            put,
            TenantState,
            Quota,
            failures=(404, 409, 503),
        ),
        Operation(
            "DELETE",
            path,
            "Have a tenant share with all others until the server ends",
            delete,
            TenantState,
            failures=(404, 503),
        ),
    ]


def _use(format_: Format, cache: LocalCache, tag: bytes) -> Use:
    for use in cache.admin.tenants():
        if use.tenant == tag:
            return Use(max(format_[0]), format_[1], use.chunks, use.used_bytes, use.quota_bytes)
    return Use(max(format_[0]), format_[1], 0, 0, None)


def _set_all(caches: Mapping[Format, LocalCache], tag: bytes, quota_bytes: int | None) -> None:
    """Set the quota in all of them or in none.

    Raises:
        Problem: one of them cannot grant it.
    """
    done: list[tuple[LocalCache, int | None]] = []
    try:
        for format_, cache in caches.items():
            before = _use(format_, cache, tag).quota_bytes
            cache.admin.set_quota(tag, quota_bytes)
            done.append((cache, before))
    except ConfigError as error:
        for cache, before in done:
            cache.admin.set_quota(tag, before)
        raise Problem(409, str(error)) from None
