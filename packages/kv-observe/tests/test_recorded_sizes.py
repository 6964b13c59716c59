"""A recorded trace says what its chunks are, so that `kv sim` answers in the cache's own measure."""

import json
import random
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain, keys_of
from kv_core.tools.cli import main
from kv_server import RemoteCache, ServerConfig
from kv_server.server import CacheServer
from kv_testing.wait import joined
from kv_tiers import HostConfig
from kv_tiers.config import ObserveConfig
from kv_tiers.pool.host_pool import slot_bytes_for

CHUNK_BYTES = 5000
"""No whole number of pages: the pool has room for fewer than its bytes by this."""
CHUNK_TOKENS = 64
SLOTS = 24


def workload(requests: int, shards: int) -> list[list[ChunkKey]]:
    """Conversations that go on, and prompts that never come back."""
    chance = random.Random(7)
    prompts = []
    for number in range(requests):
        branch = f"talk {chance.randrange(6)}" if chance.random() < 0.7 else f"once {number}"
        prompts.append(key_chain(2 * chance.randrange(1, 5), branch=branch, shards=shards))
    return prompts


def record(path: Path, *, facts: dict[str, str], shards: int = 1) -> tuple[Path, float]:
    """A real server's trace of requests done one after the other, and the hit ratio that it counted itself."""
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        host = HostConfig(capacity_bytes=SLOTS * shards * slot_bytes_for(CHUNK_BYTES))
        observe = ObserveConfig(record=str(path))
        server = CacheServer(ServerConfig(host=host, observe=observe, socket=f"{home}/s"))
        thread = threading.Thread(target=server.serve)
        thread.start()
        cache = RemoteCache(
            Path(home) / "s", group_bytes=(CHUNK_BYTES,), fingerprint="f", shards=shards, facts=facts, timeout_s=10
        )
        for number, keys in enumerate(workload(300, shards)):
            cache.lookup(keys, f"r{number}", shape=keys_of(shards))
            cache.end(f"r{number}")
            cache.commit(cache.begin_store(keys, "w"))
        counts = cache.counts()
        cache.close()
        server.stop()
        joined(thread)
    (trace,) = path.parent.glob(f"{path.stem}*")
    return trace, counts.chunks_hit / counts.chunks_asked


@pytest.mark.parametrize(("shards", "within"), [(1, 1e-9), (2, 0.03)])
def test_kv_sim_at_the_caches_capacity_in_bytes_hits_what_the_cache_counted(
    shards: int, within: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exactly, but that a cache evicts a shard of a chunk where the simulator evicts all of it."""
    trace, ratio = record(tmp_path / "trace.jsonl", facts={"chunk_tokens": str(CHUNK_TOKENS)}, shards=shards)
    capacity = SLOTS * shards * slot_bytes_for(CHUNK_BYTES)
    assert main(["sim", str(trace), "--capacity", f"{capacity}B", "--warm-up", "0%", "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert 0.2 < ratio < 0.9
    assert replayed["hit_ratio"] == pytest.approx(ratio, abs=within)
    assert (replayed["capacity_bytes"], replayed["capacity_chunks"]) == (capacity, SLOTS)
    assert replayed["tokens_asked"] == sum(map(len, workload(300, 1))) * CHUNK_TOKENS


def test_the_first_line_says_what_a_chunk_is(tmp_path: Path) -> None:
    trace, _ = record(tmp_path / "trace.jsonl", facts={"chunk_tokens": str(CHUNK_TOKENS)}, shards=2)
    lines = trace.read_text().splitlines()
    assert len(lines) == 301
    assert json.loads(lines[0]) == {
        "kv_trace": 1,
        "chunk_tokens": CHUNK_TOKENS,
        "chunk_bytes": 2 * slot_bytes_for(CHUNK_BYTES),
        "keys_per_chunk": 2,
    }


def test_tokens_that_no_engine_told_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, ratio = record(tmp_path / "trace.jsonl", facts={"chunk_tokens": "many"})
    assert main(["sim", str(trace), "--capacity", "1GiB"]) == 2
    assert "give --chunk-tokens" in capsys.readouterr().err
    words = ["--capacity", f"{SLOTS * 8192}B", "--chunk-tokens", "64", "--warm-up", "0%", "--json"]
    assert main(["sim", str(trace), *words]) == 0
    assert json.loads(capsys.readouterr().out)["hit_ratio"] == pytest.approx(ratio, abs=1e-9)


def test_mooncakes_own_traces_are_what_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text('{"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]}\n')
    assert main(["sim", str(theirs), "--capacity", "1GiB", "--warm-up", "0%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_asked"] == 2 * 512


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ('{"kv_trace":1,"chunk_tokens":64,"chunk_bytes":8192,"keys_per_chunk":1}', "cut the trace in two"),
        ('{"kv_trace":1,"chunk_tokens":128,"chunk_bytes":4096,"keys_per_chunk":1}', "cut the trace in two"),
        ('{"kv_trace":2,"chunk_tokens":64,"chunk_bytes":4096,"keys_per_chunk":1}', "version 2"),
        ('{"kv_trace":1,"chunk_tokens":"64","chunk_bytes":4096}', "whole numbers"),
        ('{"kv_trace":1,"chunk_tokens":64,"chunk_bytes":0}', "whole numbers"),
        ('{"kv_trace":1', "is not one"),
    ],
)
def test_a_trace_of_several_formats_is_refused_by_line(
    tmp_path: Path, second: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.jsonl"
    first = '{"kv_trace":1,"chunk_tokens":64,"chunk_bytes":4096,"keys_per_chunk":1}'
    path.write_text(f'{first}\n{{"timestamp":1,"hash_ids":[1]}}\n{second}\n{{"timestamp":2,"hash_ids":[2]}}\n')
    assert main(["sim", str(path), "--capacity", "3"]) == 2
    said = capsys.readouterr().err
    assert f"{path}:3" in said and complaint in said


def test_a_trace_that_is_appended_to_by_the_next_process_is_one_trace(tmp_path: Path) -> None:
    facts = {"chunk_tokens": str(CHUNK_TOKENS)}
    trace, _ = record(tmp_path / "trace.jsonl", facts=facts)
    record(tmp_path / "trace.jsonl", facts=facts)
    assert sum('"kv_trace"' in line for line in trace.read_text().splitlines()) == 2
    assert main(["sim", str(trace), "--capacity", "10"]) == 0
    assert msgspec.json.decode(trace.read_bytes().splitlines()[301])["kv_trace"] == 1
