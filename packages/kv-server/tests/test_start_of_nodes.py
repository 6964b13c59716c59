"""The start of an engine over two nodes: each has a private server, and a plan is followed where it means the same."""

import uuid
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from kv_connect.engine import Engine, EngineFacts
from kv_connect.neighbours import StoredFormat
from kv_connect.nodes import RankShare, share_of
from kv_connect.open_cache import Format
from kv_core.shape import GroupShape
from kv_tiers.settings import Settings

SETTINGS = msgspec.convert({"host": {"capacity_bytes": 1 << 20}}, Settings)
FACTS = EngineFacts(256, (GroupShape(16),), 4, "float32", "", ("canonical",), ("paged",))
CHUNKS = Format((4096,), "f")
RANKS = [share_of(rank, 4, 8, nodes=2) for rank in range(4)]


class Copier:
    """Of an engine whose memory is of no interest here."""

    is_queued = False
    stores_behind = False

    def attach(self, *_: Any) -> None: ...

    def detach(self, *_: Any) -> None: ...


def worker(engine_id: str, share: RankShare, facts: EngineFacts = FACTS, chunks: Format = CHUNKS) -> Engine:
    engine = Engine(engine_id)
    stored = StoredFormat("vllm", "m", "canonical", chunks.fingerprint)
    engine.bind_worker(SETTINGS, facts, chunks, stored, [Copier()], share=share, in_process=False)  # type: ignore[list-item]
    engine.start_worker()
    return engine


@pytest.fixture
def engine_id() -> str:
    """vLLM makes one up, and all nodes have it. Here they are on one host."""
    return uuid.uuid4().hex


def test_each_node_has_a_server_and_the_scheduler_meets_its_own_nodes_workers(
    engine_id: str, ending: ExitStack
) -> None:
    workers = [worker(engine_id, share) for share in RANKS]
    for one in reversed(workers):
        ending.callback(one.release, "WORKER")
    assert [one.off for one in workers] == [""] * 4
    assert [one.server is not None for one in workers] == [True, False, True, False]
    pools = [one.cache.pool.name for one in workers if one.cache is not None]
    assert pools[0] == pools[1] != pools[2] == pools[3]
    assert [one.share.shard for one in workers] == [0, 1, 2, 3]

    scheduler = Engine(engine_id)
    scheduler.bind_scheduler(SETTINGS, RANKS[0])
    ending.callback(scheduler.release, "SCHEDULER")
    assert scheduler.off == ""
    for one in workers:
        one.agree(scheduler.terms)
    assert [one.off for one in workers] == [""] * 4


def test_a_node_without_its_workers_has_no_scheduler(engine_id: str, ending: ExitStack) -> None:
    first = worker(engine_id, RANKS[0])
    ending.callback(first.release, "WORKER")
    scheduler = Engine(engine_id)
    scheduler.bind_scheduler(SETTINGS, RANKS[0])
    assert scheduler.off.startswith("1 of 2 workers have a cache")


@pytest.mark.parametrize(
    ("facts", "chunks"),
    [
        (replace(FACTS, chunk_tokens=128), CHUNKS),
        pytest.param(replace(FACTS, kv_dtype="bfloat16"), CHUNKS, marks=pytest.mark.slow),
        (FACTS, Format((4096,), "another layout")),
        pytest.param(FACTS, Format((2048,), "f"), marks=pytest.mark.slow),
    ],
)
def test_a_node_that_would_take_other_bytes_for_the_plans_is_off(
    engine_id: str, ending: ExitStack, facts: EngineFacts, chunks: Format
) -> None:
    here, there = worker(engine_id, RANKS[0]), worker(engine_id, RANKS[2], facts, chunks)
    for one in (here, there):
        ending.callback(one.release, "WORKER")
    assert here.served() is not None and there.served() is not None
    here.agree(here.terms)
    there.agree(here.terms)
    assert here.off == "" and here.served() is not None
    assert "not those of the scheduler's node" in there.off and there.served() is None
