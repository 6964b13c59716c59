"""Settings that change while a server runs: on SIGHUP it reads its file again.

Tenants' quotas change at once. All else needs another process (`kv_server.succession`), and the log says so.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from kv_core.errors import ConfigError, TierDown
from kv_core.log import limited_logger
from kv_tiers.cache.host import ClosedError
from kv_tiers.cache.local import LocalCache
from kv_tiers.tenants import quotas_of
from msgspec.structs import replace

from kv_server.config import ServerConfig
from kv_server.server import CacheServer

_log = limited_logger(__name__)


class Reloading(threading.Thread):
    """Reads the settings after each `want`."""

    def __init__(self, server: CacheServer, config: ServerConfig, read: Callable[[], ServerConfig]) -> None:
        """config: in force. read: the settings as they are now; raises `ConfigError`."""
        super().__init__(name="kv-reload", daemon=True)
        self._server, self._config, self._read = server, config, read
        self._wanted, self._wants = os.pipe()
        os.set_blocking(self._wants, False)

    def want(self) -> None:
        """From a signal handler, at any time."""
        with suppress(BlockingIOError):  # thousands are waiting already
            os.write(self._wants, b"w")

    def run(self) -> None:
        while os.read(self._wanted, 1):
            try:
                self._reload()
            except ConfigError as error:
                _log.error("the settings stay as they are: %s", error)
            except (ClosedError, TierDown):  # the server has been stopped meanwhile
                return

    def _reload(self) -> None:
        """
        Raises:
            ConfigError: the file cannot be read or honoured; nothing has changed.
        """
        old, new = self._config, self._read()
        before, after = quotas_of(old.tenants), quotas_of(new.tenants)
        changed = [tenant for tenant in {**before, **after} if before.get(tenant) != after.get(tenant)]
        # First those that leave more to the others.
        changed.sort(key=lambda tenant: after.get(tenant, 0) - before.get(tenant, 0))
        self._config = replace(old, tenants=new.tenants)
        for cache in self._server.submit(lambda: self._apply(changed)).result():
            for tenant in changed:
                try:
                    cache.admin.set_quota(tenant, after.get(tenant))
                except ConfigError as error:
                    _log.error("tenant %s keeps its quota: %s", tenant.hex(), error)
        names = ServerConfig.__struct_fields__
        as_before = replace(new, tenants=old.tenants)
        others = [name for name in names if getattr(old, name) != getattr(as_before, name)]
        if others:
            _log.warning("changes of %s take effect with kv-server --take-over", ", ".join(others))
        _log.info("the settings were read again: %d quotas have changed", len(changed))

    def _apply(self, changed: list[bytes]) -> list[LocalCache]:
        """On the serving thread: for caches that are opened from now on. Returns those that are open."""
        formats = self._server.formats
        formats.config = replace(formats.config, tenants=self._config.tenants)
        formats.quotas_set = {key: quota for key, quota in formats.quotas_set.items() if key[1] not in changed}
        self._server.tenant_names.update({tenant.tag: tenant.name for tenant in self._config.tenants})
        return list(formats.by_format().values())
