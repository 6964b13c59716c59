"""Real vLLM over two nodes, a rank or a stage on each: it uses its own node's server, and a hit is what both hold."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import CHUNK_TOKENS, PROMPTS, WARM_HITS, Answer, Engine
from kv_core.keys import ChunkKey
from kv_server import wire
from kv_server.connection import ask_server
from kv_server.process import ServerProcess, launch
from kv_testing.servers import free_port
from kv_testing.wait import until
from models import BY_NAME
from second_node import two_nodes

TOKENS = 4
COLD_HITS = [0, 512, 512, 768, 0, 0]
CHUNK_BYTES = 256 << 10
"""One shard of the tiny model's."""
CHUNKS = 6
"""That the prompts have; a node has one shard of each."""


def serve(directory: Path, node: int) -> ServerProcess:
    """The second node has a disk below its pool."""
    tier = {"type": "disk", "directory": str(directory / "kv"), "capacity_bytes": "64MiB"}
    config = {"host": {"capacity_bytes": 64 << 20}, "tiers": [tier] if node else [], "cold": {"wait_s": 30}}
    return launch(config, socket=directory / f"node{node}" / "s")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    made = [serve(tmp_path, node) for node in range(2)]
    yield made
    for server in made:
        server.stop()


def on_second(engine: Engine, what: str, keys: list[str] | None = None) -> list[list[str]]:
    return list(engine.llm.collective_rpc("kv_on_node", args=(what, keys or [])))


def workers(engine: Engine, count: str) -> list[int]:
    """One of `WorkerCounts`, by node."""
    return [seen["worker"][count] for seen in engine.inside_all("kv_snapshot")]


def has_stored_below(server: ServerProcess) -> bool:
    answer = ask_server(server.socket, wire.Status())
    assert isinstance(answer, wire.Stated)
    (tier,) = answer.report.caches[0].tiers
    return tier.usage.chunks == CHUNKS and not (tier.spill.waiting or tier.spill.under_way)


def assert_at_rest(engine: Engine) -> None:
    for seen in engine.inside_all("kv_snapshot"):
        cache: dict[str, Any] = seen["cache"]
        assert seen["off"] == "" and seen["faults"] == []
        assert cache["read_leases"] == cache["write_leases"] == cache["chunks_reserved"] == 0, cache


def assert_both_load_their_share(engine: Engine, expected: list[Answer]) -> None:
    """When all that the prompts have is held."""
    before = workers(engine, "loaded_bytes")
    assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
    assert engine.hits == WARM_HITS
    one, other = (after - then for then, after in zip(before, workers(engine, "loaded_bytes"), strict=True))
    assert one == other == (2 + 2 + 4 + 3 + 2) * CHUNK_BYTES


def kill_and_bring_back(
    servers: list[ServerProcess], node: int, directory: Path, engine: Engine, expected: list[Answer]
) -> None:
    """Without one node's server nothing is a hit; with its successor everything is again."""
    os.kill(servers[node].pid, signal.SIGKILL)
    servers[node].stop()
    assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
    assert engine.hits == [0] * len(PROMPTS)
    servers[node] = serve(directory, node)
    until(lambda: engine.ask_in_turn(PROMPTS, TOKENS) == expected and engine.hits == WARM_HITS, within_s=60)


@pytest.mark.long
def test_a_hit_is_what_both_nodes_hold(
    tiny_llama: str, reference: list[Answer], servers: list[ServerProcess], tmp_path: Path
) -> None:
    expected = [answer[:TOKENS] for answer in reference]
    caches = tuple({"server": {"socket": str(server.socket), "answer_s": 20}} for server in servers)
    with two_nodes(tiny_llama, free_port(), (caches[0], caches[1])) as engine:
        on_second(engine, "follow")
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == COLD_HITS
        assert workers(engine, "chunks_stored") == [CHUNKS, CHUNKS]
        here, there = on_second(engine, "follow")
        assert [{ChunkKey.from_hex(key).shard for key in keys} for keys in (here, there)] == [{0}, {1}]

        assert_both_load_their_share(engine, expected)
        assert engine.ask(PROMPTS, TOKENS) == expected
        assert engine.hits == WARM_HITS
        assert_at_rest(engine)

        # Half of it leaves the second node's pool: a hit ends there, and no load is begun that would fail.
        on_second(engine, "evict", there[1::2])
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == [256, 512, 768, 768, 0, 256]
        assert workers(engine, "loads_failed") == [0, 0]
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == WARM_HITS

        # A chunk leaves it between the answer and the load: computed instead, and a hit again afterwards.
        on_second(engine, "lose")
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert workers(engine, "loads_failed") == [0, 1]
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == WARM_HITS

        # Its server dies, and comes back with what was on its disk.
        until(lambda: has_stored_below(servers[1]), within_s=60)
        kill_and_bring_back(servers, 1, tmp_path, engine, expected)

        # The same with this node's, whose pool is empty then.
        kill_and_bring_back(servers, 0, tmp_path, engine, expected)
        assert_at_rest(engine)

        # The control.
        on_second(engine, "corrupt")
        assert engine.ask_in_turn(PROMPTS, TOKENS)[:4] != expected[:4]


@pytest.mark.long
def test_a_stage_on_each_node_keeps_its_layers_there(
    tiny_llama: str, reference: list[Answer], servers: list[ServerProcess], tmp_path: Path
) -> None:
    expected = [answer[:TOKENS] for answer in reference]
    caches = tuple({"server": {"socket": str(server.socket), "answer_s": 20}} for server in servers)
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with two_nodes(tiny_llama, free_port(), (caches[0], caches[1]), **stages) as engine:
        engine.inside_all("kv_make_buffers")
        on_second(engine, "follow")
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == COLD_HITS
        assert workers(engine, "chunks_stored") == [CHUNKS, CHUNKS]
        here, there = on_second(engine, "follow")
        assert len(here) == len(there) == CHUNKS and not {*here} & {*there}
        assert_both_load_their_share(engine, expected)
        assert_at_rest(engine)

        # Half of its layers' chunks leave the second node: a hit ends there, whatever the first has.
        on_second(engine, "evict", there[1::2])
        assert engine.ask_in_turn(PROMPTS, TOKENS) == expected
        assert engine.hits == [256, 512, 768, 768, 0, 256]
        assert workers(engine, "loads_failed") == [0, 0]

        # Its server dies, and comes back with what was on its disk.
        until(lambda: has_stored_below(servers[1]), within_s=60)
        kill_and_bring_back(servers, 1, tmp_path, engine, expected)
        assert_at_rest(engine)

        # The control: one stage's bytes alone are changed.
        on_second(engine, "corrupt")
        assert engine.ask_in_turn(PROMPTS, TOKENS)[:4] != expected[:4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_with_the_same_latents_each_store_them(tiny_deepseek: str) -> None:
    """Servers of their own, which nobody had to start."""
    cache = {"host": {"capacity_bytes": "64MiB"}, "server": {"answer_s": 20}}
    with two_nodes(tiny_deepseek, free_port(), (cache, cache)) as engine:
        cold = engine.ask_in_turn(PROMPTS, TOKENS)
        assert workers(engine, "chunks_stored") == [CHUNKS, CHUNKS]
        assert engine.ask_in_turn(PROMPTS, TOKENS) == cold
        assert engine.hits == WARM_HITS
        assert_at_rest(engine)
        on_second(engine, "corrupt")
        assert engine.ask_in_turn(PROMPTS, TOKENS)[:4] != cold[:4]


@pytest.mark.long
@pytest.mark.parametrize("name", ["Gemma 3", "Falcon-H1"])
def test_windows_and_states_are_found_where_both_nodes_hold_all_groups(name: str, tmp_path: Path) -> None:
    """What a node lacks may be of one group only: then the hit is the longest that both nodes have in all groups."""
    row = BY_NAME[name]
    model = str(row.write(tmp_path / "model"))
    tokens = [3 + (7919 * i) % 1900 for i in range(1500)]
    prompts = [tokens[:700], tokens[:520] + [5 + (31 * i) % 1900 for i in range(200)], tokens, tokens[:1300]]

    def ask(engine: Engine) -> tuple[list[Answer], list[int]]:
        answers: list[Answer] = []
        hits: list[int] = []
        for prompt in prompts:
            engine.llm.reset_prefix_cache()
            answers += engine.ask([prompt], TOKENS)
            hits += engine.hits
        return answers, hits

    with two_nodes(model, free_port(), None, **row.arguments) as plain:
        expected, _ = ask(plain)
    cache = {"host": {"capacity_bytes": "64MiB"}, "server": {"answer_s": 20}}
    chunk_tokens = None if row.has_states else CHUNK_TOKENS
    with two_nodes(model, free_port(), (cache, cache), chunk_tokens=chunk_tokens, **row.arguments) as engine:
        on_second(engine, "follow")
        answers, hits = ask(engine)
        assert answers == expected and hits[0] == 0 and hits[2] > 0, hits
        _, there = on_second(engine, "follow")
        answers, warm = ask(engine)
        assert answers == expected and min(warm) >= 256 and max(warm) >= 1024, warm

        on_second(engine, "evict", there[1::2])
        answers, hits = ask(engine)
        assert answers == expected and sum(hits) < sum(warm), hits
        answers, hits = ask(engine)
        assert answers == expected and hits == warm, hits
        assert workers(engine, "loads_failed") == [0, 0]
        assert_at_rest(engine)

        on_second(engine, "corrupt")
        assert ask(engine)[0] != expected
