"""A wrapper that limits a tier's bandwidth, to simulate a slow disk or network."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from kv_core.keys import ChunkKey
from kv_core.outcome import Loaded, LoadOutcome, StoreOutcome
from kv_tiers.build import tier_factory
from kv_tiers.options import read_options
from kv_tiers.tier import NamesChunks, Read, ReadsPrefixes, ReadsRemainders, Tier, TierContext, TierUsage, Write


class ThrottledConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tier: the other, with its type and options. load_bytes_per_s: 0: as quick as that is."""

    tier: dict[str, object]
    load_bytes_per_s: float = 0.0


def make_throttled_tier(options: Mapping[str, object], context: TierContext) -> Tier:
    """The factory of a tier type that tests and benchmarks offer themselves (`offer`)."""
    config = read_options(ThrottledConfig, options, "throttled")
    inner = dict(config.tier)
    return ThrottledTier(tier_factory(str(inner.pop("type")))(inner, context), config.load_bytes_per_s)


def offer(directory: Path) -> None:
    """Make `type: throttled` known to every process that has this directory on its path, as a package would."""
    info = directory / "kv_tiers_throttled-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kv-tiers-throttled\nVersion: 0\n")
    offered = f"{make_throttled_tier.__module__}:{make_throttled_tier.__name__}"
    (info / "entry_points.txt").write_text(f"[kv_tiers.tiers]\nthrottled = {offered}\n")


class ThrottledTier:
    """Loads follow one another, as on one medium. Set `load_bytes_per_s` at any time."""

    def __init__(self, tier: Tier, load_bytes_per_s: float) -> None:
        self.name = tier.name
        self.holds_is_local = tier.holds_is_local
        self.load_bytes_per_s = load_bytes_per_s
        self.loaded_bytes = 0
        self._tier = tier
        self._medium = threading.Lock()

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._tier.holds(keys)

    def some_keys(self, count: int) -> list[ChunkKey]:
        return self._tier.some_keys(count) if isinstance(self._tier, NamesChunks) else []

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        return self._throttled(self._tier.load, reads)

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Only around a tier that `ReadsPrefixes`."""
        assert isinstance(self._tier, ReadsPrefixes)
        return self._throttled(self._tier.load_prefixes, reads)

    def load_remainders(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Only around a tier that `ReadsRemainders`."""
        assert isinstance(self._tier, ReadsRemainders)
        return self._throttled(self._tier.load_remainders, reads)

    def _throttled(
        self, load: Callable[[Sequence[Read]], list[LoadOutcome]], reads: Sequence[Read]
    ) -> list[LoadOutcome]:
        with self._medium:
            began = time.monotonic()
            outcomes = load(reads)
            nbytes = sum(
                outcome.nbytes - read.from_bytes
                for outcome, read in zip(outcomes, reads, strict=True)
                if isinstance(outcome, Loaded)
            )
            self.loaded_bytes += nbytes
            if self.load_bytes_per_s > 0.0:
                time.sleep(max(0.0, nbytes / self.load_bytes_per_s - (time.monotonic() - began)))
        return outcomes

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        return self._tier.store(writes)

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._tier.discard(keys)

    def clear(self) -> None:
        self._tier.clear()

    def probe(self) -> None:
        self._tier.probe()

    def usage(self) -> TierUsage:
        return self._tier.usage()

    def close(self) -> None:
        self._tier.close()
