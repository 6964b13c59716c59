"""Access to the inside of a running engine, from any process.

vLLM loads it as `worker_extension_cls`, and its methods are called through `LLM.collective_rpc`: with the engine core
in a process of its own there is no other way in. The worker shares its process with the scheduler, so it sees both
halves.
"""

from dataclasses import asdict
from typing import Any

import numpy as np
from kv_connect.engine import Engine, engines
from kv_server.remote_cache import RemoteCache
from kv_tiers import LocalCache

from kv_testing.wait import until


class Inspect:
    """Methods that vLLM adds to its worker. Their names are the only ones they may not clash with."""

    kv_leaves_weights_alone = frozenset(
        {
            "kv_corrupt",
            "kv_forget_half",
            "kv_key_space",
            "kv_know_weights",
            "kv_scramble",
            "kv_server",
            "kv_settle",
            "kv_shards",
            "kv_snapshot",
        }
    )

    def kv_snapshot(self) -> dict[str, Any]:
        """Counts of the cache and of both halves, as plain data."""
        engine = _only_engine()
        assert engine.cache is not None and engine.worker is not None and engine.facts is not None
        scheduler = engine.scheduler  # where it is in another process, there is no way to it from here
        return {
            "off": engine.off,
            "faults": list(engine.faults),
            "formats": list(engine.facts.formats),
            "layouts": list(engine.facts.layouts),
            "cache": asdict(engine.cache.counts()),
            "tiers": _tiers(engine.cache),
            "worker": asdict(engine.worker.counts),
            "scheduler": asdict(scheduler.counts) if scheduler else None,
            "phases": {request: phase.name for request, phase in scheduler.tracked_phases().items()}
            if scheduler
            else {},
        }

    def kv_undeclared(self) -> None:
        """Does nothing, and does not say so."""

    def kv_settle(self) -> None:
        """Wait until transfers to and from the lower tiers have completed, and approximations are exact."""
        engine = _only_engine()
        if isinstance(engine.cache, LocalCache):
            engine.cache.lower.drain(10)
            upgrades = engine.cache.lower.upgrades
            until(lambda: not any(upgrades._under_way) and not any(upgrades._wanted))

    def kv_know_weights(self) -> bool:
        """Wait until it is known which weights and adapters the engine has; whether it is."""
        weights = _only_engine().weights
        assert weights is not None
        return weights.identity.wait(30) and weights.adapters.wait(30)

    def kv_key_space(self) -> str:
        """The fingerprint of the key space, as hex digits; empty while it is not known."""
        weights = _only_engine().weights
        assert weights is not None
        return weights.space.now.fingerprint.hex() if weights.space.now is not None else ""

    def kv_server(self) -> int:
        """The process of the private server; 0 in those that have not started it."""
        server = _only_engine().server
        return server.pid if server is not None else 0

    def kv_shards(self) -> int:
        """How many different shards every chunk has."""
        facts = _only_engine().facts
        assert facts is not None
        return facts.shards

    def kv_corrupt(self) -> None:
        """Halve every float32 in the host pool: what a cache that serves wrong bytes would do."""
        engine = _only_engine()
        assert engine.cache is not None
        values = np.frombuffer(engine.cache.pool.view, dtype=np.float32)
        values *= np.float32(0.5)

    def kv_scramble(self) -> None:
        """Move every byte of the host pool to another place of it, so that no row is where it was in any format."""
        engine = _only_engine()
        assert engine.cache is not None
        values = np.frombuffer(engine.cache.pool.view, dtype=np.uint8)
        values[:] = np.roll(values, 4096 + 32)

    def kv_forget_half(self) -> None:
        """Forget every second chunk that was stored, as eviction at the worst places would."""
        engine = _only_engine()
        assert isinstance(engine.cache, LocalCache)
        engine.cache.forget(engine.cache.admin.resident_keys()[::2])


def _tiers(cache: LocalCache | RemoteCache) -> dict[str, Any]:
    """The lower tiers, if they are in this process."""
    if not isinstance(cache, LocalCache):
        return {}
    return {
        state.name: {
            "health": state.health.name,
            "chunks": state.usage.chunks,
            "lane": asdict(state.lane),
            "spill": asdict(state.spill),
        }
        for state in cache.lower.states()
    }


def _only_engine() -> Engine:
    (engine,) = engines().values()
    return engine
