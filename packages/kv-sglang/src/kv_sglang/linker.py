"""SGLang's external linker: pages directly between its device blocks and our host memory. Experimental.

Each method translates its arguments and makes one call; the logic is in `kv_sglang.lanes`. All are called on the
scheduler's main thread, so none copies or waits for a tier: only pages in host memory are promised, and those in slower
tiers are promoted for a later lookup. SGLang changed this interface three times in five weeks, so arguments that it
adds are accepted and ignored.

A load that was promised and then fails cannot become a miss: SGLang aborts its requests (503). This happens only if a
lease expires while it is being read, or the device fails. Any other error turns the cache off, and every later lookup
is a miss.
"""

import os
from collections.abc import Collection, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from kv_connect.guard import OffSwitch, always, guarded
from kv_connect.interface import call_differences, unknown_calls
from kv_core.errors import ConfigError
from kv_core.log import limited_logger
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kv_sglang.attach import KV, Rank, attach, check_hashes, other_sglang
from kv_sglang.cli import read_settings
from kv_sglang.lanes import Chains, LoadLane, StoreLane
from kv_sglang.metrics import engine_figures
from kv_sglang.pools import describe_device
from kv_sglang.scheduler_calls import follow_matches, matched_by
from kv_sglang.served import served_model
from kv_sglang.weights import engine_name, watch_updates

_log = limited_logger(__name__)

_CALLS: Final = {
    "lookup": ["rid", "transfers"],
    "load": ["rid", "transfers"],
    "start_layer_wise_loading": [],
    "finish_layer_wise_loading": ["counter_index"],
    "cancel_queued_load": ["rid"],
    "offload": ["transfers"],
    "num_completed_offloads": [],
    "pop_completed_offload": [],
    "record_offload_ready": [],
    "reset": [],
    "close": [],
}
"""The calls of SGLang that are implemented here. Additional arguments are ignored."""


class KVLinker(OffSwitch, UnifiedCacheLinker):  # type: ignore[misc]  # the engine's classes are untyped here
    """`--unified-cache-external-linker-backend dynamic`, with this class's name in the linker's config."""

    def __init__(
        self,
        _server_args: Any,
        params: Any,
        *,
        components: Collection[ComponentType] = (),
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
        **_added: Any,
    ) -> None:
        """
        Raises:
            ConfigError: the settings cannot be honoured, the model cannot be served, or SGLang's interface is a
                different one.
        """
        check_interface()
        self.forward_stream = forward_stream
        refuse_what_is_not_served(params, components)
        self._group = params.attn_tp_cache_group or params.tp_cache_group
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        settings = read_settings(extra_config or {}, int(params.page_size), os.environ)
        described = describe_device(pool, int(params.page_size), settings.format)
        rank = rank_of(described.replicated, self._group)
        self._writes = not described.replicated or rank.number == 0
        watch_updates()
        name = engine_name(rank.ranks)
        figures = engine_figures(number=rank.number, stage=rank.stage, replica=rank.replica)
        pools = {KV: described.pages}
        self._attached = attach(settings, served_model(rank), rank, pools, engine_name=name, figures=figures)
        watch = self._attached.follow_scheduler()
        follow_matches()
        store = self._attached.stores[KV]
        self._ranks = rank.ranks
        self._loads = LoadLane(store, described.copier(), self.turn_off)
        self._stores = StoreLane(store, self.turn_off)
        watch.settle = self._stores.settle
        self._chains = Chains()
        self.layer_done_counter = self._loads.gate
        self.pools = {PoolName.KV: described.pages}
        _log.info("the linker of kv-sglang (experimental) keeps pages of %d tokens", settings.chunk_tokens)

    def turn_off(self, why: str, error: BaseException | None = None) -> None:
        super().turn_off(why, error)
        self._attached.figures.off()

    # In.

    @guarded(lambda *_args, **_named: cast(list[int], []))
    def lookup(self, rid: str, transfers: Sequence[PoolTransfer], *_added: Any, **_named: Any) -> list[int]:
        hashes = _pages(transfers).keys or []
        before = matched_by(self)
        self._chains.tell([before.last_page, *hashes] if before.last_page else hashes)
        if hashes and before.tokens and self._attached.prefill is not None:
            self._attached.prefill.will_look_up(hashes[0], before.tokens)
        return list(range(1, self._loads.ready(rid, hashes) + 1))

    def load(self, rid: str, transfers: Sequence[PoolTransfer], *_added: Any, **_named: Any) -> bool:
        # Every rank must give the same answer, so each takes part, even if its cache is off.
        if self._all_ranks(self._take(rid, transfers)):
            return True
        self._loads.give_back(rid)
        return False

    @guarded(always(False))
    def _take(self, rid: str, transfers: Sequence[PoolTransfer]) -> bool:
        pages = _pages(transfers)
        return self._loads.take(rid, pages.keys or [], pages.device_indices)

    def _not_started(self) -> int:
        self._loads.give_all_back()
        return -1

    @guarded(_not_started, even_off=True, last_resort=-1)
    def start_layer_wise_loading(self) -> int:
        # A slot may be one of a request that has ended, which the forward pass in flight still writes to.
        return self._loads.start(self.record_offload_ready())

    @guarded(always(False), even_off=True)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        # SGLang asks about -1 where it has loads that were to start, and did not.
        return counter_index >= 0 and self._loads.gate.finish(counter_index)

    @guarded(always(False), even_off=True)
    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.give_back(rid)

    # Out.

    def offload(self, transfers: Sequence[PoolTransfer], *_added: Any, **_named: Any) -> bool:
        # Ranks count each other's answers, so there is one for every offer, at once or in its turn.
        if not self._offer(transfers):
            self._stores.answer_in_turn(not self._writes)
        return True

    @guarded(always(False))
    def _offer(self, transfers: Sequence[PoolTransfer]) -> bool:
        pages = _pages(transfers)
        hashes = pages.keys or []
        if not self._writes or not hashes:
            return False
        before = self._chains.before(hashes[0])
        self._chains.tell(hashes)
        self._stores.offer(hashes, before, pages.device_indices, self.record_offload_ready())
        return True

    def num_completed_offloads(self) -> int:
        return self._stores.answered()

    def pop_completed_offload(self) -> bool:
        return self._stores.take_answer()

    # The rest.

    def reset(self) -> None:
        """SGLang empties its caches. Stored pages stay."""
        self._loads.reset()
        self._stores.reset()
        if self._attached.watch is not None:
            self._attached.watch.emptied()

    def close(self) -> None:
        self.off = self.off or "it is closed"
        self._loads.close()
        self._stores.close()
        self._attached.close()

    def _all_ranks(self, answer: bool) -> bool:
        """Whether all ranks give this answer."""
        if self._ranks == 1:
            return answer
        agreed = torch.tensor([int(answer)], dtype=torch.int)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        return bool(agreed.item())


def check_interface() -> None:
    """Check that SGLang calls what is implemented here.

    Raises:
        ConfigError: it does not; the text says what differs and what to install.
    """
    differences = [*call_differences(UnifiedCacheLinker, _CALLS), *unknown_calls(UnifiedCacheLinker, _CALLS)]
    if differences:
        raise other_sglang(
            "linker", differences, "use the storage of HiCache, `python -m kv_sglang flags` without --linker"
        )
    check_hashes()


def refuse_what_is_not_served(params: Any, components: Collection[ComponentType]) -> None:
    """
    Raises:
        ConfigError: the linker does not serve this model or this parallelism.
    """
    from sglang.srt.runtime_context import get_parallel

    names = sorted(component.name for component in components if component is not ComponentType.FULL)
    refused = {
        f"a model with {', '.join(names)}": bool(names),
        "pipeline parallelism": params.pp_size > 1,
        # With `--dcp-size` each rank has other rows of a page, also where all have the same heads.
        "context parallelism": params.attn_cp_size > 1 or get_parallel().attn_dcp_size > 1,
        "a draft model's KV": bool(params.mtp_draft_device_pools or params.sidecar_draft_device_pools),
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        raise ConfigError(
            f"the linker of kv-sglang does not serve {' and '.join(found)}: use the storage of HiCache, "
            "`python -m kv_sglang flags` without --linker"
        )


def rank_of(replicated: bool, group: Any) -> Rank:
    """The share of the engine that this process has. group: of the ranks that share a page."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    return Rank.here(dist.get_rank(group) if ranks > 1 else 0, ranks, replicated=replicated)


def _pages(transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)
