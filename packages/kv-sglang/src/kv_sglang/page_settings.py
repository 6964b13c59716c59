"""Our settings as they apply to SGLang's pages, read at its start and, before that, by `python -m kv_sglang flags`."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from kv_core.errors import ConfigError
from kv_tiers.settings import Setting, Settings, load

SGLANG_TAKES: Final = frozenset(
    ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path")
)
"""Entries of the extra config that are meant for SGLang, which adds the last one for any backend."""


def read_settings(extra: Mapping[str, Any], page_size: int, environ: Mapping[str, str]) -> Settings:
    """Read our settings from `--hicache-storage-backend-extra-config`, a file and the environment.

    Raises:
        ConfigError: a setting is wrong, or not possible for SGLang's pages.
    """
    cache_settings = {name: value for name, value in extra.items() if name not in SGLANG_TAKES}
    settings, in_force = load(cache_settings, environ)
    origins = {entry.path: entry for entry in in_force}
    _refuse_other(origins["chunk_tokens"], page_size, "a page of SGLang is a chunk: leave it out, or start with")
    _refuse_other(origins["algorithm"], "sha256", "SGLang names its pages itself, by sha256: leave it out;")
    if settings.format == "blocks":
        raise ConfigError('format is "blocks"; SGLang\'s pages are kept in the canonical format: leave it out')
    return msgspec.structs.replace(settings, chunk_tokens=page_size, algorithm="sha256")


def _refuse_other(given: Setting, wanted: object, why: str) -> None:
    if given.origin != "default" and given.value != wanted:
        flag = f" --page-size {given.value}" if given.path == "chunk_tokens" else ""
        raise ConfigError(f"{given.path} is {given.value} in {given.origin}, but {why}{flag}")
