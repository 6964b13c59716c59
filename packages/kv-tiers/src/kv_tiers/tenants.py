"""Tenants as written in the settings: a name, the salt or tag that identifies their requests, and a quota.

A salt may be a secret. It is read, turned into its tag and not retained: below this module tenants are known only by
their tags, and no message contains a salt.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from kv_core.errors import ConfigError, InputError
from kv_core.keys import TENANT_BYTES, tenant_tag

from kv_tiers.config import TenantConfig
from kv_tiers.options import read_options
from kv_tiers.pool.machine import spelled
from kv_tiers.pool.private_files import read_secret


class Tenant(msgspec.Struct, frozen=True):
    """A tenant with a name. tag: as `ChunkKey.tenant`. quota_bytes: None if it shares what the quotas leave."""

    name: str
    tag: bytes
    quota_bytes: int | None = None


def read_tenants(listed: object, *, capacity_bytes: int) -> list[Tenant]:
    """Parse a list of `TenantConfig` from a file. capacity_bytes: of the pool. Raises `ConfigError`: an option is
    unknown, missing or out of range; a salt's file is accessible to others; a name or a salt is repeated; the quotas
    exceed the pool."""
    if not isinstance(listed, Sequence) or not all(isinstance(entry, Mapping) for entry in listed):
        raise ConfigError("tenants: write a list with the name, salt_file and quota_bytes of each tenant")
    tenants = [_read(options, f"tenants[{number}]") for number, options in enumerate(listed)]
    _check_once(tenants)
    quotas = sum(tenant.quota_bytes or 0 for tenant in tenants)
    if quotas > capacity_bytes:
        raise ConfigError(
            f"tenants: the quotas are {quotas} bytes ({spelled(quotas)}) in all, and the pool has {capacity_bytes} "
            f"({spelled(capacity_bytes)}); write smaller quota_bytes or a larger capacity"
        )
    return tenants


def quotas_of(tenants: Iterable[Tenant]) -> dict[bytes, int]:
    """Quotas in bytes by tag, of the tenants that have one."""
    return {tenant.tag: tenant.quota_bytes for tenant in tenants if tenant.quota_bytes is not None}


def _read(options: Mapping[str, object], where: str) -> Tenant:
    config = read_options(TenantConfig, options, where)
    where = f"{where} ({config.name})"
    identifiers = [name for name in ("salt", "salt_file", "tag") if getattr(config, name) is not None]
    if len(identifiers) != 1:
        present = " and ".join(identifiers) or "none"
        raise ConfigError(f"{where}: write one of salt, salt_file and tag; there is {present}")
    return Tenant(config.name, _tag(config, where), config.quota_bytes)


def _tag(config: TenantConfig, where: str) -> bytes:
    if config.tag is not None:
        digits = 2 * TENANT_BYTES
        if len(config.tag) != digits or not set(config.tag) <= set("0123456789abcdef"):
            raise ConfigError(
                f"{where}: a tag is {digits} lower-case hex digits, as the status and a key's path show it"
            )
        return bytes.fromhex(config.tag)
    salt = config.salt if config.salt_file is None else _salt_in(Path(config.salt_file), where)
    try:
        return tenant_tag(salt)
    except InputError as error:
        raise ConfigError(f"{where}: {error}") from None


def _salt_in(path: Path, where: str) -> str:
    salt = read_secret(path, f"{where}: salt_file", empty_hint="write the salt into it, as requests carry it")
    try:
        return salt.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: salt_file {path} is not UTF-8") from None


def _check_once(tenants: Sequence[Tenant]) -> None:
    name_of_tag: dict[bytes, str] = {}
    names: set[str] = set()
    for tenant in tenants:
        if tenant.name in names:
            raise ConfigError(f"tenants: there are two called {tenant.name!r}; give each a name of its own")
        names.add(tenant.name)
        if (first_name := name_of_tag.setdefault(tenant.tag, tenant.name)) != tenant.name:
            raise ConfigError(f"tenants: {first_name!r} and {tenant.name!r} have the same salt; list it once")
