"""Detects when the weights that vLLM serves may have changed.

vLLM does not notify a connector about weights that are updated in place. All such operations go through its
executor's `collective_rpc` in the scheduler's process: `reload_weights`, `update_weights` and related calls, `sleep`,
`wake_up`, a user's function or method of a worker extension. So these calls are observed, and any that is not
known to leave the weights alone counts as a change. Code that writes weights without them must call
`reset_prefix_cache(reset_connector=True)`, which is passed on to us and counts as well, because no reason is given.

An engine with sleep mode has the bytes of its weights summed up by its workers once they are loaded. `sleep`,
`wake_up`, `reload_weights` and a pause only put the weights in doubt: before the next request is looked up or
scheduled they are summed up again, and equal sums on all ranks are the same weights, whose chunks stay.

A connector is created after the weights were loaded, and files may have been replaced meanwhile. So the plugin has the
engine's process look at them before.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import torch
from kv_connect.adapters import Unsure
from kv_connect.engine import Engine, EngineWeights
from kv_connect.halves.request import RequestTokens
from kv_connect.identity import LiveKeySpace, Origins, origins_of, sources_of
from kv_connect.interface import observe
from kv_core.log import limited_logger

from kv_vllm.served import served_model

_log = limited_logger(__name__)

LEAVES_WEIGHTS_ALONE: Final = frozenset(
    {
        # Calls that vLLM (0.32 and 0.33) itself makes while it starts, serves and ends, and calls that only read.
        "add_lora",
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
    }
)
RESTORES_WEIGHTS: Final = frozenset({"discard", "reload_weights", "sleep", "wake_up"})
"""Calls after which the weights may be the same, and which change nothing else that KV depends on."""
DECLARATION: Final = "kv_leaves_weights_alone"
"""The attribute by which a worker extension names those of its methods that leave the weights alone."""

_BEFORE: Final[dict[str, Origins]] = {}
"""The origins of the weights of this process's engines, before they were loaded, by vLLM's engine id."""
_WATCHES: "dict[str, VllmWeights]" = {}
"""The watches of this process by vLLM's engine id."""
_EXECUTORS: "Final[WeakValueDictionary[str, Any]]" = WeakValueDictionary()
_PAUSING: Final[set[str]] = set()
"""Engines that are resetting their caches because they pause or go to sleep."""
_LOCK: Final = threading.Lock()
_PART_WORDS: Final = 1 << 21
"""Summed up at once: temporary tensors of 16 MiB, few enough for a device that is full, large enough for its speed."""
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64, as signed numbers."""


class VllmWeights(EngineWeights):
    """The weights of a vLLM engine."""

    def __init__(self, space: LiveKeySpace, vllm_config: Any, requests: dict[str, tuple[Any, RequestTokens]]) -> None:
        """requests: this engine's requests, vLLM's and ours, by id."""
        super().__init__(space)
        self._requests = requests
        self._engine_id = str(vllm_config.kv_transfer_config.engine_id)
        self._doubt = ""
        self._sums: list[str] | None = None  # of the identified weights, by rank
        _watch(vllm_config)
        with _LOCK:
            _WATCHES[self._engine_id] = self
        if vllm_config.model_config.enable_sleep_mode:
            self._sums = self._sum_up()

    @property
    def are_pausing(self) -> bool:
        """Whether vLLM resets its caches for a pause, and not because a user asks for that."""
        return self._engine_id in _PAUSING

    def changed(self, why: str) -> None:
        """They may have changed, in a way that need not show in them."""
        self._doubt, self._sums = "", None
        self.identity.changed(why)

    def may_have_changed(self, why: str) -> None:
        """They may have changed, which `settle` will find out where the engine has sleep mode."""
        if self._sums is None:
            self.identity.changed(why)
        else:
            self._doubt = why

    def settle(self) -> None:
        """The engine is about to compute, so its weights are complete again: find out whether they have changed."""
        if self._doubt:
            if self._sum_up() != self._sums:
                self.changed(self._doubt)
            else:
                _log.info("%s: the weights are the same, byte by byte, and so are their chunks", self._doubt)
            self._doubt = ""

    def _sum_up(self) -> list[str] | None:
        """Of the weights of each rank; None: unknown."""
        executor = _EXECUTORS.get(self._engine_id)
        try:
            if executor is None or executor.is_sleeping:
                return None
            return list(executor.collective_rpc(sum_of_weights))
        except Exception as error:  # noqa: BLE001  # the weights are then others, for all that is known
            _log.warning("the engine's weights could not be read: %s", error)
            return None

    def adapter(self, lora: Any, request_id: str = "") -> str | Unsure | None:
        """The identity of a `LoRARequest`'s adapter, from `Adapters.identity`."""
        path = os.path.expanduser(lora.lora_path)
        return self.adapters.identity(lora.lora_int_id, lora.lora_name, path, request_id)

    def called(self, method: object, args: tuple[Any, ...]) -> None:
        """vLLM has its workers run this method, which may change weights or an adapter."""
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if method == "add_lora":
            lora = args[0] if args else None
            if lora is not None and lora.load_inplace:
                self.adapters.loaded_again(lora.lora_int_id, lora.lora_name, os.path.expanduser(lora.lora_path))
                self._leave_out(lora.lora_int_id)
            elif lora is not None and os.path.isdir(os.path.expanduser(lora.lora_path)):
                # Examined now: its first request may come long after its files were written over. An adapter of a hub
                # is not examined yet: vLLM is about to fetch it.
                self.adapter(lora)
        elif method in RESTORES_WEIGHTS:
            self.may_have_changed(f"vLLM's workers did {name}")
        else:
            self.changed(f"vLLM's workers did {name}")

    def _leave_out(self, number: int) -> None:
        """The adapter with this number was replaced while requests are named by its old content: from now on nothing is
        loaded or stored for these requests."""
        for request_id, (request, tokens) in self._requests.items():
            if tokens.lora is not None and request.lora_request.lora_int_id == number:
                controls = msgspec.structs.replace(tokens.controls, load=False, store=False)
                self._requests[request_id] = request, replace(tokens, controls=controls)

    def close(self) -> None:
        with _LOCK:
            if _WATCHES.get(self._engine_id) is self:
                del _WATCHES[self._engine_id]
                _BEFORE.pop(self._engine_id, None)
        super().close()


def watch_for_loading() -> None:
    """Have every engine of this process examine its model's files before it loads them. Idempotent."""
    from vllm.v1.executor.abstract import Executor

    def around(init: Any) -> Any:
        def start(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            if vllm_config.kv_transfer_config is not None:
                look_before_loading(vllm_config)
                _EXECUTORS[str(vllm_config.kv_transfer_config.engine_id)] = self
            init(self, vllm_config, *args, **kwargs)

        return start

    observe(Executor, "__init__", around)


def look_before_loading(vllm_config: Any) -> None:
    """This engine is about to load its weights: remember the origins of all of them."""
    try:
        origins = origins_of(sources_of(served_model(vllm_config, kv_scales="")))
        _BEFORE[str(vllm_config.kv_transfer_config.engine_id)] = origins
    except Exception as error:  # noqa: BLE001  # the engine must start; its weights then have no lasting name
        _log.warning("the files of the model could not be examined: %s", error)


def before_loading(vllm_config: Any) -> Origins | None:
    """The origins of this engine's weights before it loaded them; None: nobody looked."""
    return _BEFORE.get(str(vllm_config.kv_transfer_config.engine_id))


@torch.inference_mode()
def sum_of_weights(worker: Any) -> str:
    """A sum over all bytes of a vLLM worker's weights, its draft's too. If any differ, the sum does, but for one case
    in 2**64. Computed where the weights are, at a fraction of the speed of its memory.

    Raises:
        TypeError: a tensor keeps its bytes in others.
    """
    digest, seen, sums = hashlib.sha256(), dict[int, int](), list[torch.Tensor]()
    for model in (worker.model_runner.get_model(), worker.get_draft_model()):
        for name, tensor in () if model is None else _tensors_of(model):
            storage = tensor.untyped_storage()
            number = seen.setdefault(storage.data_ptr(), len(seen))
            if number == len(sums):
                sums.append(_sum_of_bytes(storage))
            place = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), storage.nbytes())
            digest.update(f"{name} {number} {place}\n".encode())
    digest.update(str([int(total) for total in sums]).encode())
    return digest.hexdigest()


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and what vLLM derives from them when it has loaded them; not the KV cache."""
    for module_name, module in model.named_modules():
        for key, value in vars(module).items():
            within = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
            for within_name, tensor in value.items() if isinstance(value, dict) else within:
                name = f"{module_name}.{key}.{within_name}"
                if not isinstance(tensor, torch.Tensor) or key == "kv_cache":
                    continue
                if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "partitions"):
                    raise TypeError(f"{name} is a {type(tensor).__name__}, which keeps its bytes in other tensors")
                yield name, tensor


def _sum_of_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Of each 8 bytes at their place a number that looks random; these added up, modulo 2**64."""
    octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    words = octets[: len(octets) // 8 * 8].view(torch.int64)
    rest = torch.nn.functional.pad(octets[len(words) * 8 :], (0, -len(octets) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=storage.device)
    place = 1
    for part in (*torch.split(words, _PART_WORDS), rest):
        mixed = torch.arange(place, place + len(part), device=storage.device).mul_(_GOLDEN).add_(part)
        for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
            mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
        total += mixed.sum()
        place += len(part)
    return total


def adapter_identity(weights: EngineWeights | None) -> Callable[[Any, str], str | Unsure | None] | None:
    """The function that names the content of an adapter, for the request of this id; None: adapters have no names."""
    return weights.adapter if isinstance(weights, VllmWeights) else None


def note_resets(kv_cache_manager: Any, engine: Engine, ours: Callable[[], set[int]]) -> None:
    """Inform the scheduler half whenever vLLM has emptied its own prefix cache, of which vLLM itself notifies only a
    connector that is to be reset, too.

    vLLM refuses while any block is in use. A caller who has changed the weights and takes no notice would get KV of the
    old ones, so the cache is emptied if nobody but we use blocks: no request reads them, and none will find them.

    ours: the blocks that copies of ours read or fill, for no request that runs.
    """
    if engine.off:  # perhaps because this vLLM has no such method
        return
    reset: Callable[[], bool] = kv_cache_manager.reset_prefix_cache

    def empty_beside() -> bool:
        pool = kv_cache_manager.block_pool
        try:
            used = {block.block_id: block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null}
            if any(owners > 1 for owners in used.values()) or not used.keys() <= ours() or pool._reuse_watchers:
                return False
            kv_cache_manager.evict_blocks({block.block_id for block in pool.blocks})
            if kv_cache_manager.log_stats:
                kv_cache_manager.prefix_cache_stats.reset = True
            return True
        except Exception as error:  # noqa: BLE001  # as in `guarded`
            engine.turn_off(f"emptying vLLM's cache beside our copies raised {type(error).__name__}: {error}", error)
            return False

    @functools.wraps(reset)
    def reset_prefix_cache() -> bool:
        is_empty, half, weights = reset() or empty_beside(), engine.scheduler, engine.weights
        if is_empty and half is not None and weights is not None and not engine.off:
            try:
                weights.follow(half)  # first: vLLM has just forgotten the blocks of weights from before a change
                half.engine_emptied()
            except Exception as error:  # noqa: BLE001  # as in `guarded`
                engine.turn_off(f"noting vLLM's reset raised {type(error).__name__}: {error}", error)
        return is_empty

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache


def _watch(vllm_config: Any) -> None:
    """Observe the calls to this engine's executor, and pauses. Installed once per class, for the process's life."""
    from vllm.v1.executor.abstract import Executor

    _watch_pauses()

    def around(call: Any) -> Any:
        def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
            if _leaves_weights_alone(self, method) and method != "add_lora":
                return call(self, method, *args, **kwargs)
            call_args = kwargs.get("args", args[1] if len(args) > 1 else ())
            if method == "add_lora":  # a later change of the files may or may not be loaded
                _notify(self, method, call_args)
                return call(self, method, *args, **kwargs)
            try:
                return call(self, method, *args, **kwargs)
            finally:
                # Even if the call failed: some workers may have done it. Notified after it, as steps are planned then.
                _notify(self, method, call_args)

        return collective_rpc

    observe(Executor.get_class(vllm_config), "collective_rpc", around)


def _watch_pauses() -> None:
    from vllm.v1.engine.core import EngineCore

    def around(reset: Any) -> Any:
        def _reset_caches(self: Any, *args: Any, **kwargs: Any) -> None:
            transfer = self.vllm_config.kv_transfer_config
            engine_id = "" if transfer is None else str(transfer.engine_id)
            _PAUSING.add(engine_id)
            try:
                reset(self, *args, **kwargs)
            finally:
                _PAUSING.discard(engine_id)

        return _reset_caches

    if hasattr(EngineCore, "_reset_caches"):
        observe(EngineCore, "_reset_caches", around)


def _leaves_weights_alone(executor: Any, method: object) -> bool:
    if not isinstance(method, str):
        return method is sum_of_weights
    return method in LEAVES_WEIGHTS_ALONE or method in declared_calls(executor.parallel_config.worker_extension_cls)


@functools.cache
def declared_calls(extension: str) -> frozenset[str]:
    """The methods that this worker extension declares; none if it cannot be read. vLLM has loaded it by then."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if not extension:
        return frozenset()
    try:
        names = getattr(resolve_obj_by_qualname(extension), DECLARATION, ())
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{names!r} is not a collection of methods' names")
        return frozenset(names)
    except Exception as error:  # noqa: BLE001  # a third party's module; without it every call counts as a change
        _log.warning("%s.%s is ignored: %s", extension, DECLARATION, error)
        return frozenset()


def _notify(executor: Any, method: object, args: Any) -> None:
    try:
        transfer = executor.vllm_config.kv_transfer_config  # None: an engine without a connector in the same process
        weights = None if transfer is None else _WATCHES.get(str(transfer.engine_id))
        if weights is not None:
            weights.called(method, tuple(args))
    except Exception as error:  # noqa: BLE001  # the engine's own call must not fail because of us
        _log.exception("a call to vLLM's workers was not understood, so no stored chunk may be used: %s", error)
        for weights in list(_WATCHES.values()):
            weights.changed("a call to vLLM's workers was not understood")
