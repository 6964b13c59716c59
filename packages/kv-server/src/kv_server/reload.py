"""Settings that change while a server runs: its file is read again on SIGHUP, for `kv reload` and for `POST /reload`.

Tenants and quotas change at once, in every cache or in none. All else takes another process, and the answer says so of
each setting. If it is wanted, this one starts a process like itself that takes over from it (`kv_server.succession`).
"""

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

import msgspec
from kv_core.errors import ConfigError, TierDown
from kv_core.log import limited_logger
from kv_tiers.cache.host import ClosedError
from kv_tiers.config import ServerSettings
from kv_tiers.pool.machine import spelled
from kv_tiers.tenants import Tenant, quotas_of

from kv_server.caches import set_quotas, why_not_passed_on
from kv_server.config import ServerConfig
from kv_server.report import ReloadReport
from kv_server.server import CacheServer

_log = limited_logger(__name__)
Then = Callable[[ReloadReport], object]

_HELD_S: Final = 10.0
"""How long to wait for caches that are being opened: they have the settings from before."""
_POLL_S: Final = 0.05
_TAKE_OVER_S: Final = 620.0
"""How long a process may take to open its tiers and take over."""
_FIXED: Final = {"host.max_capacity_bytes", "host.name", "server.socket", "server.name"}
"""Settings that a server which takes over keeps, as it has the same pool and socket."""
_OF_ENGINES: Final = {"server.answer_s"}


class Reloading(threading.Thread):
    """Reads the settings again for each `want`, one after the other."""

    def __init__(
        self,
        server: CacheServer,
        config: ServerConfig,
        read: Callable[[], ServerConfig],
        succeed: Callable[[], "subprocess.Popen[bytes]"],
    ) -> None:
        """config: in force. read: the settings as they are now; raises `ConfigError`. succeed: starts a process with
        these settings that takes over."""
        super().__init__(name="kv-reload", daemon=True)
        self._server, self._config, self._read, self._succeed = server, config, read, succeed
        self._wanted: queue.SimpleQueue[tuple[Then, bool]] = queue.SimpleQueue()

    def want(self, then: Then = lambda report: None, *, take_over: bool = False) -> None:
        """From any thread or signal handler, at any time.

        then: called on this thread with what has become of it.
        take_over: have another process take over, with all of the settings.
        """
        self._wanted.put((then, take_over))

    def run(self) -> None:
        while True:
            waiting = [self._wanted.get()]
            while not self._wanted.empty():  # all of these want what the file holds from now on
                waiting.append(self._wanted.get())
            report = self._reload(take_over=any(take_over for _, take_over in waiting))
            for then, _ in waiting:
                then(report)

    def _reload(self, *, take_over: bool) -> ReloadReport:
        try:
            report = self._take(self._read(), take_over=take_over)
        except ConfigError as error:
            report = ReloadReport([], {}, str(error))
        except (ClosedError, TierDown):
            return ReloadReport([], {}, "the server is stopping")
        except Exception as error:  # noqa: BLE001  # whatever it is, the next file may be read
            _log.exception("reading the settings again hit a bug")
            report = ReloadReport([], {}, f"a bug, which is in the log: {error}")
        if report.why:
            _log.error("the settings stay as they are: %s", report.why)
        for refusal in report.refusals():
            _log.warning("%s", refusal)
        _log.info("the settings were read again: %s", "; ".join(report.changed) or "nothing has changed")
        return report

    def _take(self, new: ServerConfig, *, take_over: bool) -> ReloadReport:
        """Raises `ConfigError`: the tenants cannot have these quotas, or not now, or no other process takes over;
        nothing has changed."""
        old = self._config
        differing = [path for path in _differing(old, new) if path not in _OF_ENGINES]
        caches = self._server.submit(lambda: list(self._server.caches.values())).result()
        fixed = [path for path in differing if path in _FIXED]
        if any(new.host.capacity_bytes // cache.pool.slot_bytes > cache.pool.mapped_slots for cache in caches):
            fixed += [path for path in differing if path == "host.capacity_bytes"]
        others = [path for path in differing if path not in (*fixed, "tenants")]
        refused: dict[str, Literal["take-over", "restart"]] = dict.fromkeys(fixed, "restart")
        changed = _tenants_changed(old.tenants, new.tenants)
        if take_over:
            self._be_replaced()
            changed += [*(f"{path} is as in the file" for path in others), "another process has taken over"]
            return ReloadReport(changed, refused)
        refused |= dict.fromkeys(others, "take-over")
        if "tenants" in differing:
            _check_quotas_in_force(old.tiers, new.tenants)
            until_s = time.monotonic() + _HELD_S
            while why := self._server.submit(self._hold).result():
                if time.monotonic() >= until_s:
                    raise ConfigError(f"{why}: reload again when that is done")
                time.sleep(_POLL_S)
            try:
                self._change_tenants(quotas_of(old.tenants), new.tenants)
            finally:
                self._server.submit(self._allow_opening)
            self._config = msgspec.structs.replace(old, tenants=new.tenants)
        return ReloadReport(changed, refused)

    def _be_replaced(self) -> None:
        """Raises `ConfigError`: no other process has taken over."""
        if os.getpid() == 1:
            raise ConfigError("this server is process 1 of a container that would end with it: restart the container")
        if why := self._server.submit(lambda: why_not_passed_on(self._server.formats)).result():
            raise ConfigError(why)
        successor = self._succeed()
        until_s = time.monotonic() + _TAKE_OVER_S
        while not self._server.is_passed_on:
            if (status := successor.poll()) is not None and not self._server.is_passed_on:
                raise ConfigError(f"the process that was to take over has ended with status {status}; its log says why")
            if time.monotonic() >= until_s:
                successor.terminate()
                raise ConfigError(f"the process that was to take over has not done so within {_TAKE_OVER_S:g} s")
            time.sleep(_POLL_S)

    def _hold(self) -> str:
        """On the serving thread: let no cache be opened. Returns why that cannot be now; empty: it is so."""
        formats = self._server.formats
        why = "a cache is being opened" if formats.opening else formats.held_for
        if not why:
            formats.held_for = "its settings are being read again"
        return why

    def _allow_opening(self) -> None:
        self._server.formats.held_for = ""

    def _change_tenants(self, before: Mapping[bytes, int], tenants: list[Tenant]) -> None:
        after = quotas_of(tenants)
        changed = {tag: after.get(tag) for tag in {**before, **after} if before.get(tag) != after.get(tag)}
        set_quotas(self._server.submit(lambda: self._server.caches).result().values(), changed)

        def keep() -> None:
            formats = self._server.formats
            formats.config = msgspec.structs.replace(formats.config, tenants=tenants)
            formats.quotas_set = {key: quota for key, quota in formats.quotas_set.items() if key[1] not in changed}
            self._server.tenant_names = {tenant.tag: tenant.name for tenant in tenants}

        self._server.submit(keep).result()


def _differing(old: ServerConfig, new: ServerConfig) -> list[str]:
    """The paths of the settings that are not as they were."""
    paths = []
    for name in ServerConfig.__struct_fields__:
        was, now = getattr(old, name), getattr(new, name)
        if isinstance(was, msgspec.Struct):
            fields = was.__struct_fields__
            paths += [f"{name}.{field}" for field in fields if getattr(was, field) != getattr(now, field)]
        elif was != now:
            paths.append(f"server.{name}" if name in ServerSettings.__struct_fields__ else name)
    return paths


def _check_quotas_in_force(tiers: Sequence[Mapping[str, object]], tenants: Sequence[Tenant]) -> None:
    """Raises `ConfigError`: a tier that stays as it is has a quota for a tenant that would have gone, so that no more
    caches could be opened."""
    quotas = [tier.get("quota_bytes") for tier in tiers]
    named = {name for one in quotas if isinstance(one, Mapping) for name in one}
    if gone := named - {tenant.name for tenant in tenants}:
        raise ConfigError(
            f"tenant {min(gone)} has a quota in a tier, which stays until another process takes over: reload with "
            "--take-over"
        )


def _tenants_changed(old: Sequence[Tenant], new: Sequence[Tenant]) -> list[str]:
    before, after = ({tenant.tag: tenant for tenant in tenants} for tenants in (old, new))
    texts = []
    for tag in {**before, **after}:
        was, now = before.get(tag), after.get(tag)
        if was is None and now is not None:
            texts.append(f"tenant {now.name} is new, with {_quota(now)}")
        elif was is not None and now is None:
            texts.append(f"tenant {was.name} is no longer listed, and has no quota")
        elif was is not None and now is not None and was != now:
            name = now.name if was.name == now.name else f"{was.name} is called {now.name}, and"
            texts.append(f"tenant {name} has {_quota(now)} (before: {_quota(was)})")
    return texts


def _quota(tenant: Tenant) -> str:
    return "no quota" if tenant.quota_bytes is None else f"a quota of {spelled(tenant.quota_bytes)}"
