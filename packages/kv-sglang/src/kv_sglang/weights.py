"""Detects when SGLang's weights may have changed, and which of its pages may still belong to the old ones.

SGLang does not notify storage or linker. All its operations for new weights (`update_weights_from_disk`, `…_tensor`,
`…_distributed`, `…_ipc`, and `end_weight_update` for those that write past it) end in methods of one class in the
scheduler's process, and releasing and resuming memory in two of another; these are observed. The engine's pages on the
device and in its host memory are then in doubt until its caches are emptied, which the operations do themselves unless
configured otherwise, and which `flush_cache` does. A change ends with an operation that empties nothing any more
(`end_weight_update`, `resume_memory_occupation`): where nothing was computed since the one before, no page is in doubt.

SGLang can detach its storage and attach one while it runs. Weights can change in between, so the observations are kept
in this module rather than in a storage; the weights of an engine that served before it was observed are unknown.
"""

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from kv_connect.identity import LiveWeights, Origins, origins_of
from kv_connect.interface import observe
from kv_core.log import limited_logger

_log = limited_logger(__name__)

_UPDATES: Final = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "load_weights_from_distributed",
    "begin_weight_update",
    "end_weight_update",
)
_RELEASE: Final = "release_memory_occupation"
_MEMORY: Final = (_RELEASE, "resume_memory_occupation")
_WATCHES: "WeakSet[WeightsWatch]" = WeakSet()


@dataclass(slots=True)
class _Seen:
    """The observations of this process's engine, by any watch.

    changed: why its weights may differ from those of its arguments; empty while they do not.
    holds_old_pages: its own caches may have pages of weights other than the current ones.
    passes: how many forward passes each of its model runners had made at the last change. Empty: that is not known, or
        there are pages that none of them computed.
    before: the origins of the weights before they were loaded; None: nobody looked.
    """

    changed: str = ""
    holds_old_pages: bool = False
    passes: "WeakKeyDictionary[Any, int]" = field(default_factory=WeakKeyDictionary)
    before: Origins | None = None


_SEEN: Final = _Seen()


def look_before_loading(*_args: Any, **_named: Any) -> None:
    """SGLang is about to load weights: examine the files of all of them, once in a process."""
    if _SEEN.before is None:
        try:
            from kv_sglang.served import sources

            _SEEN.before = origins_of(sources())
        except Exception as error:  # noqa: BLE001  # the engine must start; its weights then have no lasting name
            _log.warning("the files of the model could not be examined: %s", error)


def before_loading() -> Origins | None:
    """The origins of the weights before this process loaded them; None: not known."""
    return _SEEN.before


class WeightsWatch:
    """One engine's weights, in one of its processes. Thread-safe.

    settle: called before SGLang releases its memory; returns once nothing of ours accesses that.
    """

    def __init__(self, weights: LiveWeights) -> None:
        self.weights = weights
        self.settle: Callable[[], None] = lambda: None
        _WATCHES.add(self)
        if _SEEN.changed:
            weights.changed(_SEEN.changed)
        if _SEEN.holds_old_pages:
            _log.warning("SGLang's own caches may hold pages of other weights: nothing is stored until /flush_cache")

    def holds_old_pages(self) -> bool:
        """Whether the engine's own caches may hold pages of earlier weights."""
        return _SEEN.holds_old_pages

    def emptied(self) -> None:
        """The engine's own caches are empty now."""
        _SEEN.holds_old_pages = False

    def filled(self) -> None:
        """The engine gets pages from another one."""
        _SEEN.passes.clear()

    def watch_for_clear(self, host_pool: Any) -> None:
        """Watch for emptied caches: SGLang empties its host memory with the device's, which storage can observe."""

        def around(clear: Any) -> Any:
            def cleared(*args: Any, **kwargs: Any) -> Any:
                done = clear(*args, **kwargs)
                self.emptied()
                return done

            return cleared

        observe(host_pool, "clear", around)

    def close(self) -> None:
        _WATCHES.discard(self)
        self.weights.close()


def watch_updates(*, has_served: bool = False) -> None:
    """Observe changes of the weights in this process, for its life. Raises whatever importing SGLang raises.

    has_served: the engine has served already. If it was not observed before, its weights are unknown.
    """
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for owner, names in ((WeightUpdater, _UPDATES), (SchedulerWeightUpdaterManager, _MEMORY)):
        for name in names:
            if observe(owner, name, functools.partial(_watched, name=name)) and has_served:
                _SEEN.changed = "SGLang served before this storage was attached"
                _SEEN.holds_old_pages = True


def _watched(call: Any, name: str) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Before the call, because threads go on writing pages meanwhile; even if it fails, as it may have done a part.
        if _may_have_pages(self):
            _SEEN.holds_old_pages = True  # before the key space changes: no old page may be written under the new one
        _SEEN.changed = f"SGLang did {name}"
        for watch in list(_WATCHES):
            watch.weights.changed(_SEEN.changed)
            if name == _RELEASE:  # SGLang does not count what a linker stores: it takes itself for idle
                watch.settle()
        return call(self, *args, **kwargs)

    return called


def _may_have_pages(updater: Any) -> bool:
    """Whether the engine may have got pages since the last change of its weights. updater: of either kind."""
    try:
        runner = updater.tp_worker.model_runner if hasattr(updater, "tp_worker") else updater.get_model_runner()
        passes = int(runner.forward_pass_id)
    except AttributeError:
        return True
    before = _SEEN.passes.get(runner)
    _SEEN.passes[runner] = passes
    return passes != before


def engine_name(ranks: int) -> str:
    """A name common to all ranks of this engine and to no other. One rank chooses it, so each must call this."""
    name = secrets.token_hex(8)
    if ranks > 1:
        from sglang.srt.runtime_context import get_parallel

        name = str(get_parallel().tp_group.broadcast_object(name, src=0))
    return name
