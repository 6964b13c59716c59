"""A router's own tree (`dynamo._core.RadixTree`), told of the pool by our events alone, equals the cache.

Real chunks in a real cache, in process and at a server of its own, and vLLM's requests and hashes of blocks; what the
scheduler would plan is drawn at random, so that thousands of stores take seconds. The tree is in an environment of its
own: `scripts/setup.sh dynamo`.
"""

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kv_connect.halves.step import LoadStep, StepPlan, StoreStep
from kv_core.hashing import ChainScheme
from kv_core.keys import KeySpace, tenant_tag
from kv_core.sequence import KeySequence
from kv_core.service import ReadLease
from kv_core.shape import ConnectShape, GroupShape
from kv_server import RemoteCache, ServerProcess, launch
from kv_testing.wait import until
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import HostConfig
from kv_tiers.events.bus import EventBus
from kv_vllm.kv_events import ChunkEvents
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "dynamo" / "bin" / "python"
BLOCK, CHUNK = 16, 64
CHUNK_BYTES = 4096
SLOTS = 24
PROMPTS, MOST_CHUNKS = 60, 7

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no router's tree here: scripts/setup.sh dynamo")


class Tree:
    """The router, in a process of its own. It fails at once when an event does not fit its tree."""

    def __init__(self) -> None:
        self.events = 0
        self._process = subprocess.Popen(
            [str(PYTHON), str(Path(__file__).with_name("radix_tree.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def hear(self, events: Sequence[BlockStored | BlockRemoved]) -> None:
        for event in events:
            assert event.medium == "CPU"
            self.events += 1
            blocks = [_number(block) for block in event.block_hashes]
            if isinstance(event, BlockRemoved):
                self._say({"removed": blocks})
            else:
                parent = None if event.parent_block_hash is None else _number(event.parent_block_hash)
                self._say({"stored": blocks, "parent": parent, "tokens": event.token_ids, "block": event.block_size})

    def worker_is_gone(self) -> None:
        self._say("gone")

    def finds(self, prompt: Sequence[int]) -> int:
        """How many blocks of the prompt."""
        return int(self._ask({"prompt": list(prompt), "block": BLOCK}))

    def blocks(self) -> set[int]:
        held: list[int] = json.loads(self._ask("blocks"))
        assert len(held) == len(set(held))
        return set(held)

    def close(self) -> None:
        self._process.communicate()

    def _say(self, said: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(said) + "\n")

    def _ask(self, said: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._say(said)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "an event did not fit the router's tree"
        return answer


def _number(block: Any) -> int:
    """As a router does: vLLM's hashes are longer than the tree's."""
    return int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else int(block) % (1 << 64)


class Engine:
    """A cache, and vLLM's requests for it."""

    def __init__(self, open_cache: Callable[[], Any], seed: int) -> None:
        self.chance = random.Random(seed)
        scheme = ChainScheme(chunk_tokens=CHUNK)
        self.space = KeySpace("model", "revision", "float32", "format", 1, scheme.name)
        self.shape = ConnectShape(scheme, self.space, (GroupShape(BLOCK),))
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        heads = [[self.chance.randrange(50) for _ in range(4 * CHUNK)] for _ in range(5)]
        self.requests: list[Any] = []
        for number in range(PROMPTS):
            head = self.chance.choice(heads)[: CHUNK * self.chance.randrange(1, 5)]
            tail = [self.chance.randrange(50) for _ in range(CHUNK * self.chance.randrange(MOST_CHUNKS - 4) + 5)]
            params = SamplingParams(max_tokens=1)
            self.requests.append(Request(str(number), [*head, *tail], params, None, block_hasher=hasher))
        self.digests = [list(KeySequence(scheme).append(request.prompt_token_ids)) for request in self.requests]
        self.keys = [self.space.keys(digests, tenant=tenant_tag(None)) for digests in self.digests]
        self._open = open_cache
        self.cache: Any = None
        self.begin()

    def begin(self) -> None:
        """Or begin again, with a cache as it is then."""
        self.cache = self._open()
        self.events = ChunkEvents(self.shape, self.cache.changes_since, hash_tokens=BLOCK)

    def planned(self, **steps: Any) -> None:
        plan = StepPlan(space_id=self.space.fingerprint, **steps)
        self.events.planned(plan, lambda name: self.requests[int(name)])

    def store(self, number: int) -> None:
        chunks = self.chance.randrange(1, len(self.digests[number]) + 1)
        step = StoreStep(str(number), tuple(self.digests[number][:chunks]), tenant_tag(None), ((),))
        self.planned(stores=(step,))
        holder = f"store {number}"
        lease = self.cache.begin_store(self.keys[number][:chunks], holder)
        if self.chance.random() < 0.1:
            self.cache.release(lease)
        else:
            self.cache.commit(lease)
        self.cache.end(holder)

    def load(self, number: int) -> None:
        """What is there beyond what vLLM has itself."""
        holder = f"load {number}"
        plan = self.cache.lookup(self.keys[number], holder, shape=self.shape.chunk)
        if plan.chunks:
            first = self.chance.randrange(plan.chunks)
            digests = tuple(self.digests[number][first : plan.chunks])
            step = LoadStep(str(number), first, digests, tenant_tag(None), ((),), first * CHUNK, plan.chunks * CHUNK)
            self.planned(loads=(step,))
            lease = self.cache.load(self.keys[number][first : plan.chunks], holder)
            if isinstance(lease, ReadLease):
                self.cache.release(lease)
        self.cache.end(holder)

    def reachable(self) -> tuple[set[int], list[int]]:
        """The blocks that hits can reach, and how many of each prompt."""
        blocks: set[int] = set()
        counts: list[int] = []
        for request, keys in zip(self.requests, self.keys, strict=True):
            plan = self.cache.lookup(keys, "router", shape=self.shape.chunk)
            self.cache.end("router")
            counts.append(plan.chunks * CHUNK // BLOCK)
            blocks.update(_number(block) for block in request.block_hashes[: counts[-1]])
        return blocks, counts


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree()
    yield made
    made.close()


def churn(engine: Engine, tree: Tree, operations: int, restart: Callable[[], None]) -> None:
    """Random operations, and from time to time a look at whether the tree is the cache."""
    chance = engine.chance
    for number in range(operations):
        prompt = chance.randrange(PROMPTS)
        what = chance.random()
        if what < 0.7:
            engine.store(prompt)
        elif what < 0.95:
            engine.load(prompt)
        elif what < 0.99:
            engine.cache.forget([chance.choice(engine.keys[prompt])])
        elif what < 0.995:
            engine.cache.clear()
        elif chance.random() < 0.1:
            restart()
        if number % 3 == 0:
            tree.hear(list(engine.events.take()))
        if number % 500 == 499:
            tree.hear(list(engine.events.take()))
            blocks, counts = engine.reachable()
            assert tree.blocks() == blocks
            assert [tree.finds(request.prompt_token_ids) for request in engine.requests] == counts
    assert tree.events > operations // 2


def test_the_routers_tree_equals_the_cache_in_process(tree: Tree) -> None:
    """After a restart nothing is there, and the router hears that the engine had gone."""
    config = HostConfig(capacity_bytes=SLOTS * CHUNK_BYTES)
    bus = EventBus()

    def open_cache() -> LocalCache:
        source = bus.source("f", (CHUNK_BYTES,))
        return build_local_cache(config, group_bytes=(CHUNK_BYTES,), fingerprint="f", events=source)

    engine = Engine(open_cache, 5)

    def restart() -> None:
        engine.cache.close()
        tree.worker_is_gone()
        engine.begin()

    churn(engine, tree, 10_000, restart)
    assert engine.cache.counts().chunks_evicted > 100
    assert engine.events.end() and tree.blocks()
    engine.cache.close()


@pytest.mark.slow
def test_the_routers_tree_equals_the_cache_at_a_server(tree: Tree, tmp_path: Path) -> None:
    """The server is killed from time to time, and the engine goes on with the next."""
    tmp_path.chmod(0o700)
    servers: list[ServerProcess] = []

    def start() -> None:
        servers.append(launch({"host": {"capacity_bytes": SLOTS * CHUNK_BYTES}}, socket=tmp_path / "s"))

    start()
    connect = {"group_bytes": (CHUNK_BYTES,), "fingerprint": "f", "timeout_s": 10.0}
    engine = Engine(lambda: RemoteCache(tmp_path / "s", **connect), 6)

    def restart() -> None:
        servers.pop().stop()
        start()
        until(lambda: engine.cache.lookup(engine.keys[0], "up").ended.name != "REFUSED")
        engine.cache.end("up")

    try:
        churn(engine, tree, 10_000, restart)
        restart()
        tree.hear(list(engine.events.take()))
        assert tree.blocks() == set()
    finally:
        engine.cache.close()
        servers.pop().stop()
