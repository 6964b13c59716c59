"""A long time with everything at once: random prefixes, aborts, resets while chunks are loading, and a disk that fails
in every way and comes back. No token is wrong, and nothing is left.

2,000 requests over all formats. In float32 a hit is exact in `canonical` and `blocks`, so every answer must be what an
engine without us gives. The lossy formats change some answers by themselves; a chunk of somebody else's would change
nearly all.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, Answer, Engine, started
from kv_core.errors import CopyFailed
from kv_testing.connect import QueuedCopy
from kv_testing.faults import Fault, FaultyTier
from kv_testing.wait import until
from kv_tiers import build as tiers_build
from kv_tiers.lanes.lane import Lane
from kv_tiers.tier import Tier
from server_apart import server_apart
from slow_device import slow_device
from unreliable import Behaviour, Unreliable, beside

NEW_TOKENS = 4
FAULTS: tuple[Fault, ...] = ("", "", "", "down", "flip", "truncate", "swap", "unreadable", "refuse", "delay")
TIGHT = {"num_gpu_blocks_override": 48, "max_num_batched_tokens": 512}
EQUAL = {"canonical": 1.0, "blocks": 1.0, "int8": 0.9, "fp8": 0.5}
"""The part of the answers that must be those of an engine without us."""


def prompts() -> list[tuple[int, ...]]:
    """120 prompts of 200 to 1,400 tokens that part from each other at random places."""
    chance = random.Random(7)
    known: list[tuple[int, ...]] = [tuple(chance.randrange(3, 2000) for _ in range(1400))]
    while len(known) < 120:
        parent = chance.choice(known)
        kept = parent[: chance.randrange(0, len(parent))]
        length = chance.randrange(200, 1400)
        known.append((*kept, *(chance.randrange(3, 2000) for _ in range(max(40, length - len(kept)))))[:1400])
    return known


@dataclass
class Soak:
    """One engine under load. Everything random comes from `chance`."""

    engine: Engine
    tiers: list[FaultyTier]
    prompts: list[tuple[int, ...]]
    chance: random.Random
    requested: int = 0
    running: dict[str, int] = field(default_factory=dict)
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    aborted: int = 0
    resets: int = 0
    change: Callable[[], None] = lambda: None  # called before each step

    def run(self, requests: int) -> None:
        inner, all_requested = self.engine.llm.llm_engine, self.requested + requests
        while (more := self.requested < all_requested) or self.running:
            if more:
                self._ask(inner, self.requested)
                self.requested += 1
            for _ in range(self.chance.randrange(1, 6) if more else 1):
                self._step(inner)

    def _ask(self, inner: Any, number: int) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
        chosen = self.chance.randrange(len(self.prompts))
        inner.add_request(str(number), TokensPrompt(prompt_token_ids=list(self.prompts[chosen])), sampling)
        self.running[str(number)] = chosen

    def _step(self, inner: Any) -> None:
        self.change()
        if self.chance.random() < 0.02:
            for tier in self.tiers:
                tier.fault = self.chance.choice(FAULTS)
        if self.chance.random() < 0.01:
            self.engine.llm.reset_prefix_cache(reset_connector=True)
            self.resets += 1
        if self.running and self.chance.random() < 0.03:
            gone = self.chance.choice(list(self.running))
            inner.abort_request([gone])
            self.aborted += self.running.pop(gone, None) is not None
        for output in inner.step():
            if output.finished and output.request_id in self.running:
                answer = tuple(output.outputs[0].token_ids)
                self.answers.append((self.running.pop(output.request_id), answer))


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> list[Answer]:
    with started(tiny_llama, cache=None) as plain:
        return plain.ask([list(prompt) for prompt in prompts()], NEW_TOKENS)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyTier]]:
    """Every tier that is made from now on, with faults around it."""
    made: list[FaultyTier] = []
    real = tiers_build.Lane

    def lane(tier: Tier, *args: Any, **named: Any) -> Lane:
        made.append(FaultyTier(tier))
        return real(made[-1], *args, **named)

    monkeypatch.setattr(tiers_build, "Lane", lane)
    yield made
    for tier in made:
        tier.let_go()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("canonical", 150),
        pytest.param("canonical", 800, marks=pytest.mark.long),
        pytest.param("blocks", 600, marks=pytest.mark.long),
        ("int8", 200),
        pytest.param("fp8", 300, marks=pytest.mark.long),
    ],
)
def test_no_wrong_token_and_nothing_left(
    kind: str,
    requests: int,
    tiny_llama: str,
    expected: list[Answer],
    faulty: list[FaultyTier],
    tmp_path: Path,
) -> None:
    tier = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    # The pool and vLLM's own blocks hold a part of what the prompts need: eviction, preemption and cold hits happen.
    capacity = "6MiB" if kind in ("int8", "fp8") else "20MiB"
    cache = {"format": kind, "host": {"capacity_bytes": capacity}, "tiers": [tier], "cold": {"wait_s": 0.05}}
    with started(tiny_llama, cache=cache, **TIGHT) as engine:
        soak = Soak(engine, faulty, prompts(), random.Random(kind))
        soak.run(requests)
        for each in faulty:
            each.let_go()
        soak.tiers = []
        loaded = engine.assert_at_rest()["tiers"]["disk"]["lane"]["loaded"]

        def loads_from_disk_again() -> bool:
            soak.run(20)
            return bool(engine.assert_at_rest()["tiers"]["disk"]["lane"]["loaded"] > loaded + 10)

        until(loads_from_disk_again, within_s=300)  # a disk that was down is probed before it is used
        seen = engine.assert_at_rest()
    assert len(soak.answers) + soak.aborted == soak.requested
    assert soak.aborted > 0
    assert soak.resets > 0
    assert seen["worker"]["loaded_tokens"] > 10_000
    equal = sum(answer == expected[number] for number, answer in soak.answers)
    print(f"{kind}: {equal} of {len(soak.answers)} answers equal, {soak.aborted} aborts, {soak.resets} resets, {seen}")
    assert equal >= EQUAL[kind] * len(soak.answers)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_beside_another_connector_on_a_server_apart_with_copies_that_fail(
    requests: int, tiny_llama: str, expected: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of the other connector fail in every way, our copies raise what they like, at any call, the server does not
    see our process, and its disk fails at random."""
    chance = random.Random(requests)
    raised = [RuntimeError, OSError, MemoryError, CopyFailed]

    def unsure(call: Callable[[QueuedCopy], Any]) -> Callable[[QueuedCopy], Any]:
        def answer(copy: QueuedCopy) -> Any:
            if chance.random() < 0.02:
                error = chance.choice(raised)
                if error is CopyFailed:  # which says that the copy has stopped
                    copy.queue.catch_up(copy)
                raise error("raised by the test")
            return call(copy)

        return answer

    def change() -> None:
        if chance.random() < 0.3:
            Unreliable.now.fails = chance.choice(["", "first", "middle", "last"])
            Unreliable.now.is_async = chance.random() < 0.5
            Unreliable.now.whole_requests = chance.random() < 0.5

    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": "64MiB"}
    settings = {"host": {"capacity_bytes": "20MiB", "lease_s": 2}, "tiers": [disk], "cold": {"wait_s": 0.05}}
    asked = [list(prompt) for prompt in prompts()]
    with (
        slow_device() as device,
        server_apart(tmp_path, settings, faulty=True) as joined,
        # Without vLLM's prefix cache: blocks that requests share may be computed from failed ones, by vLLM itself.
        started(
            tiny_llama,
            **beside({"chunk_tokens": CHUNK_TOKENS} | joined),
            num_gpu_blocks_override=48,
            max_num_batched_tokens=512,
        ) as engine,
    ):
        device.go_on(copy_s=0.0)
        Unreliable.now = Behaviour(offers=False)
        engine.ask(asked, NEW_TOKENS)
        engine.llm.reset_prefix_cache(reset_connector=True)
        Unreliable.now = Behaviour(held=Unreliable.now.held, chance=lambda: chance.random() < 0.3)
        for name in ("done", "wait", "hold_engine"):
            monkeypatch.setattr(QueuedCopy, name, unsure(getattr(QueuedCopy, name)))
        soak = Soak(engine, [], prompts(), chance, change=change)
        soak.run(requests)
        monkeypatch.undo()
        seen = engine.assert_at_rest()
        assert device.faults == []
    wrong = [number for number, answer in soak.answers if answer != expected[number]]
    print(f"{len(wrong)} of {len(soak.answers)} answers wrong, {soak.aborted} aborts, {soak.resets} resets, {seen}")
    assert not wrong and len(soak.answers) + soak.aborted == requests
    assert len(Unreliable.now.failed_requests) > requests // 50 and seen["worker"]["stores_failed"] > 0
    assert seen["worker"]["loaded_tokens"] > 5_000 and seen["worker"]["chunks_stored"] > 100
