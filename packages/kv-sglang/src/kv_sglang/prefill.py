"""How fast SGLang computes prompts. It does not report this to its storage, so it is measured where its scheduler
processes the results of a step (`Scheduler.process_batch_result`)."""

from collections import deque
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from kv_core.clock import Clock
from kv_core.connect.engine_costs import MIN_PREFILL_TOKENS, EngineCosts
from kv_core.cost import Costs, Measured
from kv_core.log import limited_logger
from kv_tiers.clock import MonotonicClock

from kv_sglang.scheduler_calls import observe

_log = limited_logger(__name__)

_MAX_MEASURED: Final = 256
_UNKNOWN: Final = (
    "how fast it computes is not known; set cost.prefill_tokens_per_second, or chunks in slow tiers are waited for "
    "even where computing is faster"
)
_FOLLOWED: "WeakSet[PrefillSpeed]" = WeakSet()


class PrefillSpeed:
    """One engine's. The scheduler's thread reports steps; any thread may ask."""

    def __init__(self, *, tokens_per_second: float = 0.0, clock: Clock | None = None) -> None:
        """tokens_per_second: the speed if it is known in advance; 0: it is measured.
        clock: the one that SGLang dates its steps by, `time.monotonic`.
        """
        self._clock = clock or MonotonicClock()
        self._costs = EngineCosts(self._clock, prefill_tokens_per_second=tokens_per_second)
        self._ended_s = 0.0
        self._measured: deque[Measured] = deque(maxlen=_MAX_MEASURED)
        self._compute: tuple[float, float] | None = None  # replaced as a whole, for the other threads
        self._publish()

    def costs(self) -> Costs | None:
        """For a lookup. None: the speed is not known yet."""
        return None if self._compute is None else Costs(compute=self._compute)

    def take_measured(self) -> list[Measured]:
        """Estimates that were compared with measurements since the last call."""
        taken = []
        with suppress(IndexError):  # another thread may take them too
            while True:
                taken.append(self._measured.popleft())
        return taken

    def step_ended(self, batch: Any) -> None:
        """The scheduler has processed the results of this `ScheduleBatch`, or of its copy.

        Steps end in their order, and the device runs them one after the other. Those that load pages from SGLang's
        host memory count too: what a hit saves is what a step takes less with it, and often only such steps are short,
        so that without them a step's fixed part would be taken for computing.
        """
        before_s, self._ended_s = self._ended_s, self._clock.now_s()
        mode = batch.forward_mode
        if not mode.is_extend_without_speculative() or mode.is_split_prefill():
            return
        if max(batch.extend_lens, default=0) < MIN_PREFILL_TOKENS:
            return
        pairs = sum(new * (before + new / 2) for before, new in zip(batch.prefix_lens, batch.extend_lens, strict=True))
        self._costs.prefill_took(sum(batch.extend_lens), pairs, self._ended_s - max(batch.launch_ts, before_s))
        self._publish()

    def _publish(self) -> None:
        costs = self._costs.of(0)
        self._compute = None if costs is None else costs.compute
        self._measured.extend(self._costs.take_measured())


def follow_steps(speed: PrefillSpeed) -> None:
    """Report every step of this process to `speed`, as long as that lives; raises whatever importing SGLang raises."""
    _FOLLOWED.add(speed)
    observe("process_batch_result", _around, otherwise=_UNKNOWN)


def _around(call: Any) -> Any:
    def called(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(self, batch, *args, **kwargs)
        for speed in list(_FOLLOWED):
            try:
                speed.step_ended(batch)
            except Exception:  # noqa: BLE001  # any error would end the engine
                _FOLLOWED.discard(speed)
                _log.exception("a step of SGLang cannot be read: %s", _UNKNOWN)
        return answer

    return called
