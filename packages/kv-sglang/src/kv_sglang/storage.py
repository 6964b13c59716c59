"""The class that SGLang calls. Each method translates its arguments and makes one call; the logic is in
`kv_sglang.pages`.

SGLang's threads for lookups, reads and writes call concurrently, and a decode engine's scheduler looks up too, which
must not wait. No exception leaves a hook once the engine serves: a
bug of ours turns the cache off with a traceback in the log, and the engine continues. Before it serves, anything that
cannot be served correctly is an error that says what to do.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from kv_connect.guard import OffSwitch, always, guarded
from kv_connect.interface import call_differences
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kv_sglang.attach import KV, Attached, Rank, attach, check_hashes, other_sglang
from kv_sglang.cli import read_settings
from kv_sglang.metrics import engine_figures
from kv_sglang.pages import PageStore
from kv_sglang.pools import PoolPages, describe, first_slots
from kv_sglang.served import served_model
from kv_sglang.weights import engine_name, watch_updates

_log = limited_logger(__name__)

_CALLS: Final = {
    "batch_exists": ["keys", "extra_info"],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "batch_exists_v2": ["keys", "pool_transfers", "extra_info"],
    "batch_get_v2": ["transfers", "extra_info"],
    "batch_set_v2": ["transfers", "extra_info"],
    "register_mem_pool_host": ["mem_pool_host"],
    "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
    "on_host_pools_registered": [],
}
"""The calls of SGLang that are implemented here."""
_MAX_PREFIXES: Final = 16
"""Number of restorable prefixes of a hybrid model to report, longest first; ranks agree on one that all of them
have."""


def none_of(_self: Any, keys: Sequence[str], *_rest: Any, **_named: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_any(_self: Any, transfers: Sequence[PoolTransfer], *_rest: Any, **_named: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class KVStorage(OffSwitch, HiCacheStorage):  # type: ignore[misc]  # the engine's classes are untyped here
    """The backend of HiCache: `--hicache-storage-backend dynamic` with this class's name in the extra config."""

    def __init__(self, storage_config: HiCacheStorageConfig, _extra: Any = None) -> None:
        """
        Raises:
            ConfigError: the settings cannot be honoured, or SGLang's interface is a different one.
        """
        check_interface()
        self._config = storage_config
        self._pools: dict[str, Any] = {}
        self._pages: dict[str, PoolPages] = {}
        self._attached = Attached()
        self._stats = _Stats()
        self._scheduler = threading.get_ident()  # SGLang makes its storage on the scheduler's thread
        if getattr(storage_config, "attn_cp_size", 1) > 1:
            raise ConfigError(
                "kv-sglang cannot tell which share of a page a rank of context parallelism has; start with "
                "--attn-cp-size 1, or without --hicache-storage-backend"
            )

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        super().turn_off(why, error)
        self._attached.figures.off()

    # Before the engine serves.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self._pools[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(host_pool_name)
        if self._attached.stores and name not in self._attached.stores:
            _log.warning("host pool %s was registered after the start; its pages are never found", name)
            return
        self._pools.setdefault(name, host_pool)

    def on_host_pools_registered(self) -> None:
        """All pools are known. SGLang 0.5.23 calls this before it serves.

        Raises:
            ConfigError: the settings cannot be honoured, or a pool cannot be described.
        """
        from sglang.srt.runtime_context import get_memory

        settings = read_settings(self._config.extra_config or {}, int(self.mem_pool_host.page_size), os.environ)
        self._pages = {name: describe(pool, name, settings.format) for name, pool in self._pools.items()}
        rank = rank_of(self._config)
        # At run time, SGLang records the name of a storage only after it has been attached.
        watch_updates(has_served=get_memory().hicache_storage_backend is None)
        warn_without_prefixes(get_memory().hicache_storage_backend_extra_config)
        name = engine_name(rank.ranks)
        figures = engine_figures(number=rank.number, stage=rank.stage, replica=rank.replica)
        model = served_model(rank)
        self._attached = attach(settings, model, rank, self._pages, engine_name=name, figures=figures)
        watch = self._attached.follow_scheduler()
        watch.watch_for_clear(self.mem_pool_host)
        formats = ", ".join(f"{name}: {pages.format.kind}" for name, pages in self._pages.items())
        _log.info("kv-sglang keeps pages of %d tokens (%s)", settings.chunk_tokens, formats)

    # Zero copy.

    @guarded(always(0))
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        if threading.get_ident() == self._scheduler:
            # An engine that decodes for another one asks in its loop, and again in each step until the request fits.
            return self._kv.ready(keys, f"{self._kv.name}-in-the-loop-{keys[-1] if keys else ''}")
        return self._kv.held(keys)

    @guarded(none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._read(KV, keys, host_indices)

    @guarded(none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._write(KV, keys, host_indices, _before(extra_info))

    # The same for several pools.

    @guarded(lambda *_args, **_named: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        pages = self._kv.held(keys)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or []:
            store = self._attached.stores.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages: it does not decide; without a result it is not read
            if store is None:
                covered: set[int] = set()
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or []))
                covered = set(store.trailing(keys[: max(restorable, default=0)], window, _MAX_PREFIXES))
            else:
                covered = set(range(1, store.held(keys[:pages]) + 1))
            if covered:
                hits[transfer.name] = max(covered)
            restorable &= covered
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    @guarded(_none_of_any)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._read(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    @guarded(_none_of_any)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        behind = _before(extra_info)
        return {
            each.name: self._write(str(each.name), each.keys or [], each.host_indices, (), behind) for each in transfers
        }

    # One page at a time, as the tensor that SGLang flattens it to. For configurations without interface_v1.

    @guarded(always(None))
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        flat, copier = self._one_page()
        if self._kv.read([key], [0], copier) != [True]:
            return None
        if target_location is None:
            return flat
        target_location.view(-1).copy_(flat)
        return target_location  # type: ignore[no-any-return]

    @guarded(lambda _self, keys, *_args, **_named: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = target_locations if target_locations is not None else [None] * len(keys)
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    @guarded(always(False))
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        flat, copier = self._one_page()
        flat.copy_(value.reshape(-1))
        return self._kv.write([key], [0], copier=copier) == [True]

    @guarded(always(False))
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    @guarded(always(False))
    def exists(self, key: str) -> bool:
        return self._kv.held([key]) == 1

    # The rest.

    @guarded(always(None))
    def clear(self) -> None:
        """Forget every page, in lower tiers too. SGLang's `flush_cache` does not call this; clearing storage does."""
        for store in self._attached.stores.values():
            store.cache.clear()

    @guarded(always(None))
    def get_stats(self) -> Any:
        """The reads and writes since the last call, for SGLang's metrics."""
        return self._stats.take() if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """Release everything. SGLang's threads have stopped by then."""
        self.off = self.off or "it is closed"
        self._attached.close()

    @property
    def _kv(self) -> PageStore:
        return self._attached.stores[KV]

    def _read(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        return self._move("prefetch", pool, keys, host_indices, PageStore.read)

    def _write(
        self,
        pool: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        before: Sequence[str],
        behind: Sequence[str] = (),
    ) -> list[bool]:
        return self._move("backup", pool, keys, host_indices, partial(PageStore.write, before=before, behind=behind))

    def _move(
        self,
        what: str,
        pool: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        move: Callable[[PageStore, Sequence[str], list[int]], list[bool]],
    ) -> list[bool]:
        store = self._attached.stores.get(pool)
        slots = None if store is None else first_slots(host_indices, len(keys), store.pages.page_slots)
        if store is None or slots is None:
            return [False] * len(keys)
        began = time.perf_counter()
        answers = move(store, keys, slots)
        self._stats.add(what, sum(answers), store.pages.format.nbytes, time.perf_counter() - began)
        return answers

    def _one_page(self) -> tuple[torch.Tensor, Any]:
        make_page = self._pages[KV].one_page
        if make_page is None:
            raise ConfigError('this model\'s pages need zero copy: write "interface_v1": 1 in the extra config')
        return make_page()


class _Stats:
    """Pages and bandwidths between two reads of SGLang's metrics. Bounded, in case they are never read."""

    _MAX_SPEEDS: Final = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    def add(self, what: str, pages: int, page_bytes: int, seconds: float) -> None:
        if pages:
            with self._lock:
                del self._seen[what][: -self._MAX_SPEEDS]
                self._seen[what].append((pages, pages * page_bytes / max(seconds, 1e-9) / 1e9))

    def take(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            seen, self._seen = self._seen, {"prefetch": [], "backup": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in seen["prefetch"]],
            backup_pgs=[pages for pages, _ in seen["backup"]],
            prefetch_bandwidth=[speed for _, speed in seen["prefetch"]],
            backup_bandwidth=[speed for _, speed in seen["backup"]],
        )


def rank_of(config: HiCacheStorageConfig) -> Rank:
    """The share of the engine that this process has."""
    return Rank.here(
        config.tp_rank, config.tp_size, replicated=config.is_mla_model, stage=config.pp_rank, stages=config.pp_size
    )


def check_interface() -> None:
    """Check that SGLang calls what is implemented here, with the arguments expected here.

    Raises:
        ConfigError: it does not; the text says what differs and what to install.
    """
    if differences := [*call_differences(HiCacheStorage, _CALLS)]:
        raise other_sglang("storage", differences)
    check_hashes()


def warn_without_prefixes(extra_config: str | None) -> None:
    """Warn if SGLang will not name the pages before those that it writes.

    extra_config: `--hicache-storage-backend-extra-config`, from which SGLang removes this setting; None: not known, as
        for storage that is attached to a running engine.
    """
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    if extra_config and not HybridCacheController.parse_storage_backend_extra_config(extra_config)[-1]:
        _log.warning(
            "generated pages are stored whatever their request says (store, save_decode), and a long prompt may evict "
            'its own beginning: add "hicache_storage_pass_prefix_keys": true to --hicache-storage-backend-extra-config'
        )


def _before(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys or ()) if extra_info is not None else ()
