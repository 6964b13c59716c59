"""A wrapper around a tier that injects faults."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from kv_core.errors import TierDown
from kv_core.keys import ChunkKey
from kv_core.outcome import Absent, Loaded, LoadOutcome, ReadFailed, Refused, StoreOutcome
from kv_tiers.tier import (
    ClearsTenants,
    Read,
    ReadsPrefixes,
    ReadsRemainders,
    RemovalRefusedError,
    Tier,
    TierUsage,
    Write,
)

Fault = Literal[
    "", "refuse", "delay", "truncate", "flip", "swap", "lie", "hang", "unreadable", "add_only", "down", "bug", "panic"
]
"""refuse: stores are refused, loads find nothing. truncate, flip, swap: what is loaded is half zeros, has one bit
wrong, or is the neighbour's. lie: it says that it holds everything. hang: calls come back after `let_go`. unreadable:
reads fail. add_only: nothing may be removed. bug: it raises what no tier should; panic: what is no `Exception`
even, as bindings to Rust do. delay: calls take `DELAY_S`."""
DELAY_S: Final = 0.02

FAULTS: tuple[Fault, ...] = get_args(Fault)


class PanicError(BaseException):
    """What a library written in Rust raises when it meets a bug of its own."""


class FaultyTier:
    """Set `fault`, and every call from then on has it. The wrapped tier stays right."""

    def __init__(
        self, tier: Tier, *, holds_is_local: bool | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """sleep: how it passes the time of a delay."""
        self.name = tier.name
        self.holds_is_local = tier.holds_is_local if holds_is_local is None else holds_is_local
        self.fault: Fault = ""
        self.broken: set[ChunkKey] = set()
        """What it says it holds, and never brings."""
        self.calls: list[str] = []
        self._tier = tier
        self._sleep = sleep
        self._let_go = threading.Event()

    def let_go(self) -> None:
        """End the hanging, for calls under way too."""
        self.fault = ""
        self._let_go.set()

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._fail("holds")
        return [True] * len(keys) if self.fault == "lie" else self._tier.holds(keys)

    def load(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        self._fail("load")
        if self.fault == "refuse":
            return [Absent() for _ in reads]
        if self.fault == "unreadable":
            return [ReadFailed("told to be unreadable") for _ in reads]
        outcomes = self._spoil(reads, self._tier.load(reads))
        return [Absent() if read.key in self.broken else one for read, one in zip(reads, outcomes, strict=True)]

    def load_prefixes(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        self._fail("load_prefixes")
        assert isinstance(self._tier, ReadsPrefixes)
        return self._spoil(reads, self._tier.load_prefixes(reads))

    def load_remainders(self, reads: Sequence[Read]) -> list[LoadOutcome]:
        """Only around a tier that `ReadsRemainders`."""
        self._fail("load_remainders")
        assert isinstance(self._tier, ReadsRemainders)
        return self._spoil(reads, self._tier.load_remainders(reads))

    def store(self, writes: Sequence[Write]) -> list[StoreOutcome]:
        self._fail("store")
        if self.fault == "refuse":
            return [Refused("told to") for _ in writes]
        return self._tier.store(writes)

    def discard(self, keys: Sequence[ChunkKey]) -> None:
        self._fail("discard")
        self._tier.discard(keys)

    def clear(self) -> None:
        self._fail("clear")
        self._tier.clear()

    def clear_tenant(self, tenant: bytes) -> None:
        self._fail("clear_tenant")
        assert isinstance(self._tier, ClearsTenants)
        self._tier.clear_tenant(tenant)

    def probe(self) -> None:
        self._fail("probe")
        self._tier.probe()

    def usage(self) -> TierUsage:
        return self._tier.usage()

    def close(self) -> None:
        self.calls.append("close")
        self._tier.close()

    def _spoil(self, reads: Sequence[Read], outcomes: list[LoadOutcome]) -> list[LoadOutcome]:
        loaded = [
            (read, read.pages[: outcome.nbytes])
            for read, outcome in zip(reads, outcomes, strict=True)
            if isinstance(outcome, Loaded)
        ]
        for _, payload in loaded:
            if self.fault == "truncate":
                half = len(payload) // 2
                payload[half:] = bytes(len(payload) - half)
            elif self.fault == "flip":
                payload[len(payload) // 3] ^= 4
        if self.fault == "swap" and len(loaded) > 1:
            (first, one), (second, other) = loaded[:2]
            first.header[:], second.header[:] = bytes(second.header), bytes(first.header)
            size = min(len(one), len(other))
            one[:size], other[:size] = bytes(other[:size]), bytes(one[:size])
        return outcomes

    def _fail(self, call: str) -> None:
        self.calls.append(call)
        match self.fault:
            case "delay":
                self._sleep(DELAY_S)
            case "hang" if not (call == "holds" and self.holds_is_local):
                self._let_go.clear()
                self._let_go.wait()
            case "add_only" if call in ("discard", "clear", "clear_tenant"):
                raise RemovalRefusedError("told to keep everything")
            case "down":
                raise TierDown("told to be down")
            case "bug":
                raise RuntimeError("told to have a bug")
            case "panic" if not (call == "holds" and self.holds_is_local):
                raise PanicError("told to panic")
            case _:
                pass
