"""Real vLLM over a disk that it may read approximations of: the first answers may differ, the later ones are exact."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, WARM_HITS, Engine, in_pool, started
from kv_connect.engine import engines
from kv_core.hashing import checksum_of
from kv_core.outcome import Loaded, LoadOutcome
from kv_tiers.cache.local import LocalCache
from kv_tiers.cache.upgrade import Upgrades
from kv_tiers.tier import Read
from kv_tiers.tiers.disk import DiskTier


def over(directory: Path, **options: Any) -> dict[str, Any]:
    disk = {"type": "disk", "directory": str(directory), "capacity_bytes": "64MiB", **options}
    return {"host": {"capacity_bytes": "16MiB"}, "tiers": [disk], "cold": {"wait_s": 20.0}}


class Asked:
    """What an engine says to all prompts: what comes from the disk, and the same again from the pool."""

    def __init__(self, engine: Engine) -> None:
        self.first = engine.ask_in_turn(PROMPTS)
        assert engine.hits == WARM_HITS
        tier = engine.assert_at_rest()["tiers"]["disk"]
        self.pool, self.loaded, self.approximate = (
            in_pool(checksum_of),
            tier["lane"]["loaded"],
            tier["lane"]["approximate"],
        )
        self.again = engine.ask_in_turn(PROMPTS)
        assert engine.hits == WARM_HITS
        assert engine.assert_at_rest()["tiers"]["disk"]["lane"]["loaded"] == self.loaded  # the pool had it all
        (only,) = engines().values()
        assert isinstance(only.cache, LocalCache)
        self.upgraded = only.cache.lower.states()[0].upgraded


@pytest.mark.slow
def test_first_answers_from_first_parts_and_later_ones_from_exact_chunks(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: Counter[str] = Counter()

    def counted(name: str) -> None:
        load = getattr(DiskTier, name)

        def counting(self: DiskTier, reads: Sequence[Read]) -> list[LoadOutcome]:
            outcomes: list[LoadOutcome] = load(self, reads)
            for read, one in zip(reads, outcomes, strict=True):
                brought[name] += one.nbytes - read.from_bytes if isinstance(one, Loaded) else 0
            return outcomes

        monkeypatch.setattr(DiskTier, name, counting)

    exact = over(tmp_path / "kv", codec="progressive")
    with started(tiny_llama, cache=exact, dtype="bfloat16") as engine:
        engine.ask_in_turn(PROMPTS)
        warm = engine.ask_in_turn(PROMPTS)
        engine.assert_at_rest()
    with started(tiny_llama, cache=exact, dtype="bfloat16") as engine:
        of_exact = Asked(engine)
    assert of_exact.first == of_exact.again == warm
    assert of_exact.upgraded == of_exact.approximate == 0 < of_exact.loaded

    for name in ("load_prefixes", "load_remainders"):
        counted(name)
    approximate = over(tmp_path / "kv", approximate=True, write="never")
    with started(tiny_llama, cache=approximate, dtype="bfloat16") as engine:
        upgraded = Asked(engine)
    chunks = len(of_exact.pool)
    assert upgraded.approximate >= chunks
    assert upgraded.upgraded == chunks
    assert upgraded.pool == of_exact.pool
    assert upgraded.again == warm
    # Each chunk in the pool was read once, first a quarter and then the rest, besides what measures the disk at start.
    assert brought["load_remainders"] > 1.5 * chunks * brought["load_prefixes"] / upgraded.approximate
    print(f"{chunks} chunks, of {upgraded.approximate} first parts: {dict(brought)} bytes")

    monkeypatch.setattr(Upgrades, "_begin", lambda self, tier: self._wanted[tier].clear())  # the control
    with started(tiny_llama, cache=approximate, dtype="bfloat16") as engine:
        control = Asked(engine)
    assert control.upgraded == 0 < control.approximate
    assert control.pool.keys() == of_exact.pool.keys()
    assert not control.pool.items() & of_exact.pool.items()
    assert control.again == control.first
