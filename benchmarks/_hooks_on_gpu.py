"""What the host does for stores and loads of 16 chunks on a GPU, one and eight in a step, without the driver's part:
its functions do nothing.

Each hook is cold, as it is once a step of 100 ms: other code and other data pass through the processor's caches first.
Beside it is the way by Python, which everything took before there was one by C, in the same run and in turn.
"""

import ctypes
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from kv_connect.halves.request import RequestTokens, Scheduled
from kv_connect.halves.scheduler import SchedulerHalf
from kv_connect.halves.stores import HeldBlocks
from kv_connect.halves.worker import WorkerHalf
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace
from kv_core.shape import ConnectShape, GroupShape
from kv_cuda.copy import driver, gpu
from kv_cuda.layout import split_parts
from kv_testing.fake_device import FakeDevice, FakeEvent
from kv_tiers import HostPool, LocalCache

from benchmarks._report import Row

CHUNK, CHUNKS, TOKENS, BLOCKS = 256, 16, 16, 4096
ROUNDS, WARM_UP = 60, 10
LIMITS_US = {"store": 300.0, "load": 150.0}
AT_ONCE = (1, 8)
HOOKS = ("start_loads", "start_stores", "wait_for_save")
"""Of the worker, before the driver has everything."""


class NoBlocks:
    """An engine's blocks that nobody else wants."""

    def hold(self, _blocks: Sequence[int]) -> None: ...
    def give_back(self, _blocks: Sequence[int]) -> None: ...
    def is_ours_alone(self, _block: int) -> bool:
        return False


class Halves:
    """Both halves of a connector beside a cache with room for everything."""

    def __init__(self, device: FakeDevice) -> None:
        row = {"block": 2 * TOKENS * 8, "token": 8, "head": 8, "dim": 1, "value_offset": TOKENS * 8}
        sizes = {"dtype": "bfloat16", "itemsize": 2, "layers": 2, "heads": 1, "head_dim": 8}
        layout = split_parts("apart", blocks=BLOCKS, block_tokens=TOKENS, **row, **sizes)
        described = layout.canonical_format(CHUNK)
        cache = torch.zeros(2, BLOCKS, 2 * TOKENS * 8, dtype=torch.bfloat16)
        scheme = ChainScheme(chunk_tokens=CHUNK)
        space = KeySpace("model", "", "bfloat16", described.fingerprint, 1, scheme.name)
        shape = ConnectShape(scheme, space, (GroupShape(TOKENS),))
        pool = HostPool.anonymous("pool", described.nbytes, ROUNDS * sum(AT_ONCE) * CHUNKS)
        self.device, self.cache = device, LocalCache(pool)
        copier = gpu.GpuCopier(layout, list(cache), described)
        copier.attach("pool", pool.view)
        self.scheduler = SchedulerHalf(self.cache, shape, name="engine")
        self.worker = WorkerHalf(self.cache, shape, [copier], shard=0, name="engine")
        self.held = HeldBlocks(NoBlocks(), shape, ranks=1)
        self.chance, self.number = random.Random(7), 0
        self.us: dict[str, float] = defaultdict(float)
        self._ballast = np.ones(32 << 20, np.uint8)

    def cool(self) -> None:
        self._ballast[::64] += 1
        sorted({number: str(number) for number in range(20000)}.values())

    def timed(self, name: str, hook: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = hook(*arguments, **named)
        self.us[name] += (time.perf_counter() - began) * 1e6
        return result

    def step(self, prompts: Sequence[list[int]], *, loads: bool) -> dict[str, float]:
        """Microseconds of each hook of a step whose requests store their prompts, or find them."""
        self.us.clear()
        self.number += 1
        self.device.is_idle = False
        per_request = CHUNKS * CHUNK // TOKENS + 1
        blocks = self.chance.sample(range(BLOCKS), len(prompts) * per_request)
        scheduled = []
        self.cool()
        for at, tokens in enumerate(prompts):
            asked = RequestTokens(request_id=f"r{self.number}-{at}", tokens=tokens, keep_tokens=len(tokens))
            table = blocks[at * per_request : (at + 1) * per_request]
            matched = self.timed("match", self.scheduler.match, asked, 0)
            assert matched == (CHUNKS * CHUNK if loads else 0)
            self.timed("allocated", self.scheduler.allocated, asked.request_id, matched, (table,) if loads else ())
            scheduled.append(Scheduled(asked, CHUNKS * CHUNK, (table,)))
        plan = self.timed("build", lambda: self.held.hold(self.scheduler.build_step([] if loads else scheduled)))
        self.cool()
        self.timed("start_loads", self.worker.start_loads, plan)
        self.timed("start_stores", self.worker.stores.start, plan)
        self.timed("wait_for_save", self.worker.stores.finish, wait=False)
        self.device.discard()
        self.device.is_idle = True
        self.cool()
        self.timed("commit", self.worker.stores.finish, wait=False)
        report = self.timed("poll", self.worker.poll)
        assert not report.failed and len(report.finished) == len(prompts) * loads
        self.timed("acknowledge", self.held.acknowledge, {0: self.worker.stores.through})
        self.timed("loads_ended", self.scheduler.loads_ended, report.finished, report.failed)
        for each in scheduled:
            self.timed("finished", self.scheduler.finished, each.request.request_id)
        return dict(self.us)


def host_rows() -> Iterator[Row]:
    """Of stores and of loads, one and eight in a step: the worker's hooks, and all hooks."""
    took: dict[tuple[str, int, str], list[dict[str, float]]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        device = FakeDevice(7)
        device.install(patch)
        patch.setattr(gpu.GpuCopier, "is_queued", property(lambda _: True))
        patch.setattr(
            FakeEvent, "done", lambda event: event.stream.device.is_idle
        )  # its work would count as the host's
        nothing = ctypes.cast(ctypes.CDLL(None).pthread_getconcurrency, ctypes.c_void_p).value  # returns 0
        patch.setattr(driver, "functions_and_context", lambda: (*[nothing] * 6, 7))
        by_c = gpu.installed_kernels
        halves = {"C": Halves(device), "Python": Halves(device)}
        gc.collect()
        gc.freeze()  # as vLLM does before it serves: a collection in a hook would take longer than the hook
        for number in range(ROUNDS):
            starts = [10 * number + at for at in range(sum(AT_ONCE))]
            prompts = [[(7919 * start + 104729 * at) % 30000 for at in range(CHUNKS * CHUNK + 10)] for start in starts]
            for way, both in halves.items():
                patch.setattr(gpu, "installed_kernels", by_c if way == "C" else lambda: None)
                for requests, verb in product(AT_ONCE, LIMITS_US):
                    part = prompts[:1] if requests == 1 else prompts[1:]
                    took[verb, requests, way].append(both.step(part, loads=verb == "load"))
    for requests, verb in product(AT_ONCE, LIMITS_US):
        ours, python = (_medians(took[verb, requests, way][WARM_UP:]) for way in ("C", "Python"))
        limit_us = requests * LIMITS_US[verb]
        name = f"on a GPU, {requests} {verb}{'s' * (requests > 1)} of {CHUNKS} chunks in a step, cold"
        yield Row(f"{name}: worker", ours[0], "us", limit_us, ours[0] / limit_us, 1.0, at_most=True)
        yield Row(f"{name}: worker, beside Python", ours[0], "us", python[0], ours[0] / python[0], 0.6, at_most=True)
        yield Row(
            f"{name}: all hooks, beside Python", ours[1], "us", python[1], ours[1] / python[1], None, at_most=True
        )


def _medians(requests: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Of the worker's hooks before the driver, and of all."""
    worker = [sum(each[hook] for hook in HOOKS) for each in requests]
    return statistics.median(worker), statistics.median(sum(each.values()) for each in requests)
