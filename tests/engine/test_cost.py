"""Real vLLM over a throttled tier: what would be slower to load than to compute is computed, and the event says why."""

import time
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, started
from kv_connect.engine import engines
from kv_core.cost import Choice
from kv_core.service import Holder
from kv_testing.throttled import ThrottledTier, offer
from kv_tiers.cache.local import LocalCache
from kv_tiers.events.bus import Occurred, Subscriber
from kv_tiers.events.events import EngineMeasured, LookedUp

PROMPTS = [[3 + (7919 * i + 101 * number * (i + 7)) % 2000 for i in range(1024 + 40)] for number in range(6)]
WHOLE = 1024
PROMPT_BYTES = 2e6
POOL = {"capacity_bytes": "2MiB"}
"""Room for one of them."""


class Lookups(Subscriber):
    """Of each final lookup its choice and whether its request waited for a load, and what was measured."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.waited: list[bool] = []
        self.measured = 0
        self._pending: set[Holder] = set()

    def take(self, occurred: Occurred) -> None:
        match occurred.event:
            case LookedUp(holder=holder, ended="PENDING"):
                self._pending.add(holder)
            case LookedUp(holder=holder, choice=Choice() as choice):
                self.choices.append(choice)
                self.waited.append(holder in self._pending)
            case EngineMeasured(samples):
                self.measured += len(samples)


def throttled(directory: Path, bytes_per_s: float) -> dict[str, Any]:
    below = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    tier = {"type": "throttled", "load_bytes_per_s": bytes_per_s, "tier": below}
    return {"use": "auto", "host": POOL, "tiers": [tier]}


def ask_all(engine: Engine) -> tuple[list[int], float]:
    """Each prompt in its turn: what was found, and the mean seconds of the last three."""
    hits: list[int] = []
    seconds = 0.0
    for number, prompt in enumerate(PROMPTS):
        began = time.perf_counter()
        engine.ask([prompt], new_tokens=2)
        seconds += time.perf_counter() - began if number >= 3 else 0.0
        hits += engine.hits
        engine.inside("kv_settle")
    return hits, seconds / 3


@pytest.mark.slow
def test_what_a_quick_tier_has_is_loaded_and_what_a_slow_one_has_is_computed(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with started(tiny_llama, cache=throttled(tmp_path, 0.0)) as engine:
        (running,) = engines().values()
        assert running._bus is not None and isinstance(running.cache, LocalCache)
        lookups = Lookups()
        running._bus.subscribe(lookups)
        cold, computing_s = ask_all(engine)
        assert cold == [0] * len(PROMPTS)
        hits, _ = ask_all(engine)  # half of them tell how quick the tier is
        assert running._bus.flush()
        last = lookups.choices[-1]
        assert sum(hits[3:]) >= 2 * WHOLE, lookups.choices  # a busy machine may be late once
        assert any(lookups.waited[-3:])  # a prompt below the pool is waited for, here a short time
        assert last.load_s is not None and last.compute_s is not None and last.load_s < last.compute_s
        assert lookups.measured > 0

        (tier,) = (lane.tier for lane in running.cache.lower.lanes)
        assert isinstance(tier, ThrottledTier)
        # From now a prompt takes 0.2 s to come up, and less to compute; on a busy machine twice what that took.
        tier.load_bytes_per_s = min(10e6, PROMPT_BYTES / (2 * computing_s))
        ask_all(engine)
        hits, _ = ask_all(engine)
        assert running._bus.flush()
        skipped = lookups.choices[-1].skipped
        assert sum(hits[3:]) <= WHOLE, lookups.choices
        assert sum(lookups.waited[-3:]) <= 1  # what is computed is not waited for first
        assert skipped is not None and skipped.tier == "throttled" and skipped.load_s > skipped.compute_s > 0.0
        engine.assert_at_rest()
