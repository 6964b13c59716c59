"""KV events of the pool: a subscriber's copy of what is in it equals the cache, on both schedulers and the engine."""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import zmq
from engines import PROMPTS, Engine, started
from kv_connect.engine import engines
from kv_core.hashing import ChainScheme
from kv_core.sequence import KeySequence
from msgspec import msgpack
from oracle import BLOCK_TOKENS, Oracle
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

MEDIUM = "CPU"


class Router:
    """A copy of what is in the pool, made of events alone: for each block its tokens and the block before."""

    def __init__(self, medium: str = MEDIUM) -> None:
        self.medium = medium
        self.blocks: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.events = 0

    def hear(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared) or event.medium != self.medium:
                continue
            self.events += 1
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]  # nothing is removed that was not there
                continue
            assert isinstance(event, BlockStored)
            size, parent = event.block_size, event.parent_block_hash
            assert len(event.token_ids) == size * len(event.block_hashes)
            for number, block in enumerate(event.block_hashes):
                assert block not in self.blocks  # nothing is stored twice
                self.blocks[block] = parent, tuple(event.token_ids[number * size : (number + 1) * size])
                parent = block


def digests(prompt: Sequence[int], tokens: int) -> list[bytes]:
    return list(KeySequence(ChainScheme(chunk_tokens=tokens)).append(list(prompt)))


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def make(request: pytest.FixtureRequest, tiny_llama: str) -> Iterator[Callable[..., tuple[Oracle, Router]]]:
    made: list[Oracle] = []

    def build(**options: Any) -> tuple[Oracle, Router]:
        oracle = Oracle(tiny_llama, asynchronous=request.param, prefix_caching=True, events=True, **options)
        made.append(oracle)
        router = Router()
        oracle.scheduler.kv_event_publisher.publish = lambda batch: router.hear(batch.events)
        return oracle, router

    yield build
    for oracle in made:
        oracle.drain()
        oracle.assert_at_rest()
        oracle.close()


def held(oracle: Oracle) -> set[bytes]:
    """The chunks in the pool, by their digests."""
    assert oracle.engine.cache is not None
    return {key.digest for key in oracle.engine.cache._index.held()}  # type: ignore[union-attr]


def test_what_is_stored_is_announced_in_vllms_blocks(make: Callable[..., tuple[Oracle, Router]]) -> None:
    oracle, router = make()
    device = Router("GPU")
    hear = oracle.scheduler.kv_event_publisher.publish
    oracle.scheduler.kv_event_publisher.publish = lambda batch: (hear(batch), device.hear(batch.events))
    prompt = [3 + (7 * i) % 40 for i in range(200)]
    oracle.ask("a", prompt)
    assert len(router.blocks) == 192 // BLOCK_TOKENS
    assert router.blocks.items() <= device.blocks.items()  # the same blocks, by the same names
    oracle.ask("with tags", prompt, asked={"tags": {"a": "b"}})
    assert len(router.blocks) == 192 // BLOCK_TOKENS  # other chunks, the same blocks to vLLM
    before = router.events
    cache = oracle.engine.cache
    assert cache is not None
    cache.forget([key for key in cache._index.held() if key.digest not in digests(prompt, 64)])  # type: ignore[union-attr]
    oracle.ask("short", [5] * 8)
    assert router.events == before  # one of the two is left
    cache.clear()
    oracle.ask("shorter", [5] * 7)
    assert router.blocks == {}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_the_routers_copy_equals_the_pool_whatever_happens(
    seed: int, make: Callable[..., tuple[Oracle, Router]]
) -> None:
    """Stores, evictions, chunks forgotten, clears, and chunks that were there before the router began."""
    chance = random.Random(seed)
    oracle, router = make(host={"capacity_bytes": 10 * 64 * 2 * 2 * 2 * 32 * 4})  # ten chunks
    cache = oracle.engine.cache
    assert cache is not None
    heads = [[3 + (head + 7 * i) % 40 for i in range(128)] for head in range(4)]
    prompts: list[list[int]] = []
    for number in range(120):
        if prompts and chance.random() < 0.4:
            prompt = chance.choice(prompts)
        else:
            prompt = [*chance.choice(heads), *(chance.randrange(3, 43) for _ in range(chance.randrange(150)))]
            prompts.append(prompt)
        oracle.submit(f"r{number}", prompt, 2)
        if chance.random() < 0.6:
            oracle.run()
        if chance.random() < 0.05 and (keys := list(cache._index.held())):  # type: ignore[union-attr]
            cache.forget(chance.sample(keys, 1))
        if chance.random() < 0.03:
            cache.clear()
    oracle.run()
    oracle.ask("last", [5] * 8)  # a step, after which everything has been heard
    assert cache.counts().chunks_evicted > 20 and router.events > 100
    # Every block has its tokens; which chunk it is, its prompt says.
    in_pool = held(oracle)
    wanted = {
        (tuple(prompt[: at * 64]))
        for prompt in prompts
        for at, _ in enumerate(takewhile(in_pool.__contains__, digests(prompt, 64)), 1)  # what a hit can reach
    }
    assert wanted
    tokens = sorted(own for _, own in router.blocks.values())
    assert tokens == sorted(
        prefix[-64:][at : at + BLOCK_TOKENS] for prefix in wanted for at in range(0, 64, BLOCK_TOKENS)
    )


def test_a_cache_that_is_turned_off_retracts_everything(make: Callable[..., tuple[Oracle, Router]]) -> None:
    oracle, router = make()
    oracle.ask("a", [3 + (7 * i) % 40 for i in range(200)])
    assert router.blocks
    oracle.engine.turn_off("a test")
    oracle.ask("b", [5] * 8)
    assert router.blocks == {}
    oracle.engine.off = ""  # as it should be at rest
    oracle.engine.faults.clear()


def test_nothing_is_recorded_where_nobody_asks(tiny_llama: str) -> None:
    oracle = Oracle(tiny_llama)
    try:
        oracle.ask("a", [3 + (7 * i) % 40 for i in range(200)])
        connector = oracle.scheduler.connector
        assert connector is not None and list(connector.take_events()) == []
        source = oracle.engine.cache.events  # type: ignore[union-attr]
        assert not source.on and source.log is None
    finally:
        oracle.close()


class Subscriber:
    """vLLM's publisher at the other end of a socket."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._decoder = msgpack.Decoder(KVEventBatch)
        self.router = Router()

    def settle(self) -> None:
        """Hear everything until nothing comes for a while."""
        while self._socket.poll(700):
            self.router.hear(self._decoder.decode(self._socket.recv_multipart()[2]).events)

    def close(self) -> None:
        self._socket.close(0)


def ask_and_compare(engine: Engine, subscriber: Subscriber) -> None:
    """The pool has four chunks of the six that the prompts make."""
    time.sleep(0.5)  # until the subscription is known at the other end
    engine.ask_in_turn(PROMPTS[:2])
    engine.ask([[5] * 8])
    subscriber.settle()
    assert len(subscriber.router.blocks) * 128 == 512  # two chunks that both begin with
    tokens = sorted(own for _, own in subscriber.router.blocks.values())
    assert tokens == sorted(tuple(PROMPTS[0][at : at + 128]) for at in range(0, 512, 128))
    engine.ask_in_turn(PROMPTS)
    engine.ask_in_turn(PROMPTS)
    engine.ask([[5] * 8])
    subscriber.settle()
    resident = engine.assert_at_rest()["cache"]["chunks_resident"]
    assert resident > 0 and engine.assert_at_rest()["cache"]["chunks_evicted"] > 0
    assert len(subscriber.router.blocks) * 128 == resident * 256
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask([[5] * 8])
    subscriber.settle()
    assert subscriber.router.blocks == {}


@pytest.mark.parametrize("own_process", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_subscriber_of_the_real_engine_knows_the_pool(tiny_llama: str, own_process: bool) -> None:
    """In process, and with engine, worker and cache in three others."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        endpoint = f"ipc://{Path(directory) / 'events'}"
        config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        cache = {"host": {"capacity_bytes": "2MiB"}}
        arguments: dict[str, Any] = {"kv_events_config": config, "enable_prefix_caching": False}
        with started(tiny_llama, cache=cache, own_process=own_process, **arguments) as engine:
            subscriber = Subscriber(endpoint)
            try:
                ask_and_compare(engine, subscriber)
            finally:
                subscriber.close()
            if not own_process:
                assert len(engines()) == 1
