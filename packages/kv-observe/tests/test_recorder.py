"""What was recorded is a trace that `kv sim` replays with the same hits, in a file that is bounded and its owner's."""

import json
import logging
import os
import random
import stat
from pathlib import Path

import pytest
from kv_core.clock import HandClock
from kv_core.errors import ConfigError
from kv_core.keys import ChunkKey
from kv_core.testing import key_chain, keys_of
from kv_core.tools.cli import main
from kv_eviction import LruPolicy
from kv_observe.build import build_bus
from kv_observe.trace_file import Recorder, read_trace
from kv_server.config import read_config
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.tower import Tower
from kv_tiers import HostPool, LocalCache
from kv_tiers.config import ObserveConfig
from kv_tiers.events.bus import EventBus


def recorded(path: Path, max_bytes: int = 1 << 20, name: str = "", slots: int = 64) -> tuple[EventBus, LocalCache]:
    bus = EventBus(interval_s=0.001)
    bus.subscribe(Recorder(bus, str(path), max_bytes))
    pool = HostPool.anonymous("test", CHUNK_BYTES, slots)
    return bus, LocalCache(pool, policy=LruPolicy(), clock=HandClock(), events=bus.source(name, (CHUNK_BYTES,)))


def request(cache: LocalCache, keys: list[ChunkKey], holder: str) -> int:
    """As an engine does it: look up, compute the rest, store it. How many chunks were hit."""
    hit = cache.lookup(keys, holder).chunks
    cache.end(holder)
    cache.commit(cache.begin_store(keys, "writer"))
    return hit


def workload(requests: int) -> list[list[ChunkKey]]:
    """Conversations that go on, documents that are asked about again, and prompts that never come back."""
    chance = random.Random(11)
    prompts = []
    for number in range(requests):
        turn = chance.randrange(1, 6)
        kind = chance.random()
        branch = f"talk {chance.randrange(8)}" if kind < 0.7 else f"once {number}"
        prompts.append(key_chain(2 * turn, branch=branch))
    return prompts


def test_a_recorded_workload_replays_with_the_same_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slots, path = 24, tmp_path / "trace.jsonl"
    bus, cache = recorded(path, slots=slots)
    prompts = workload(400)
    hits = sum(request(cache, keys, f"r{number}") for number, keys in enumerate(prompts))
    evicted = cache.counts().chunks_evicted
    cache.close()
    bus.close()
    assert bus.events_dropped == 0
    options = ["--capacity", str(slots), "--policy", "lru", "--warm-up", "0%", "--chunk-tokens", "1", "--json"]
    assert main(["sim", str(path), *options]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["requests"] == 400
    assert replayed["tokens_asked"] == sum(map(len, prompts))
    assert 0 < hits < replayed["tokens_asked"] and evicted > 0
    assert replayed["tokens_hit"] == hits
    assert replayed["tiers"][0]["chunks_evicted"] == evicted


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_lookups_behind_what_the_engine_has_itself_are_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[int, int]
) -> None:
    """As SGLang asks, and vLLM where its stores are lazy: a chunk is the first of one line, and follows in another."""
    path, keys = tmp_path / "trace.jsonl", key_chain(4)
    bus, cache = recorded(path)
    for first in order:
        cache.lookup(keys[first:], f"from {first}")
        cache.end(f"from {first}")
    cache.close()
    bus.close()
    assert [len(prompt) for prompt in read_trace(str(path)).prompts] == [4 - first for first in order]
    options = ["--capacity", "3", "--policy", "prefix", "--warm-up", "0%", "--chunk-tokens", "1", "--json"]
    assert main(["sim", str(path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_asked"] == 6


def test_neither_keys_nor_holders_are_in_the_file_and_it_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.touch(mode=0o644)
    bus, cache = recorded(path)
    keys = key_chain(3)
    request(cache, keys, "a-holder")
    cache.close()
    bus.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said, line = path.read_text().splitlines()
    assert set(json.loads(said)) == {"kv_trace", "chunk_tokens", "chunk_bytes", "keys_per_chunk"}
    assert set(json.loads(line)) == {"timestamp", "hash_ids"}
    assert "a-holder" not in line
    for key in keys:
        assert key.digest.hex()[:12] not in line and str(int.from_bytes(key.digest[:8])) not in line


def test_what_is_asked_again_while_it_waits_is_one_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    bus = EventBus(interval_s=0.001)
    bus.subscribe(Recorder(bus, str(path), 1 << 20))
    tower = Tower("through", events=bus.source("", (CHUNK_BYTES,)))
    keys = key_chain(4)
    tower.store_below(keys)
    tower.fetch(keys)  # several questions: it waits for what comes up
    tower.cache.lookup(keys, "r")
    tower.cache.lookup(keys, "r")
    tower.cache.end("r")
    tower.cache.lookup(keys, "r")  # another request of the same name
    tower.close()
    bus.close()
    assert len(path.read_text().splitlines()) == 1 + 2


def test_a_chunk_of_several_keys_is_one_id(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    bus, cache = recorded(path)
    cache.lookup(key_chain(6), "r", shape=keys_of(2))
    cache.close()
    bus.close()
    said, line = path.read_text().splitlines()
    assert json.loads(said)["keys_per_chunk"] == 2 and len(json.loads(line)["hash_ids"]) == 3


def test_a_full_file_stops_and_says_what_was_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    bus, cache = recorded(path, max_bytes=1000)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            request(cache, key_chain(4, branch=str(number)), f"r{number}")
        cache.close()
        bus.close()
    _, *lines, last = path.read_text().splitlines()
    assert path.stat().st_size <= 1000 + len(last) + 1
    assert last == f"# {50 - len(lines)} requests were left out"
    assert len([record for record in caplog.records if "is full" in record.message]) == 1
    assert len(read_trace(str(path)).prompts) == len(lines)


def test_a_second_process_goes_on_with_the_same_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        bus, cache = recorded(path)
        request(cache, key_chain(3), "r")
        cache.close()
        bus.close()
    trace = read_trace(str(path))
    assert len(trace.prompts) == 2 and trace.chunks_unique == 3


def test_each_cache_of_a_server_has_a_file_of_its_own(tmp_path: Path) -> None:
    bus = EventBus(interval_s=0.001)
    bus.subscribe(Recorder(bus, str(tmp_path / "trace.jsonl"), 1 << 20))
    for name in ("a", "b"):
        source = bus.source(name, (CHUNK_BYTES,))
        cache = LocalCache(HostPool.anonymous("test", CHUNK_BYTES, 2), events=source)
        cache.lookup(key_chain(2), "r")
        cache.close()
    bus.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-a.jsonl", "trace-b.jsonl"]


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "trace.jsonl", tmp_path / "victim"
    victim.write_text("mine")
    path.symlink_to(victim)
    bus, cache = recorded(path)
    request(cache, key_chain(2), "r")
    cache.close()
    bus.close()
    assert victim.read_text() == "mine" and bus.failures > 0


def test_a_medium_that_fills_up_ends_the_trace_with_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    bus, cache = recorded(path)
    request(cache, key_chain(2), "r0")
    assert bus.flush()
    real = os.write

    def half(file: int, data: bytes) -> int:
        real(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    request(cache, key_chain(2, branch="lost"), "r1")
    assert bus.flush()
    monkeypatch.setattr(os, "write", real)
    request(cache, key_chain(2, branch="later"), "r2")
    cache.close()
    bus.close()
    _, first, last = path.read_text().splitlines()
    assert len(json.loads(first)["hash_ids"]) == 2 and last == "# 2 requests were left out"
    assert "ends here" in caplog.text


def test_half_a_line_that_cannot_be_cut_off_is_all_that_a_reader_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up under one process, and another one appended to the same file meanwhile."""
    path = tmp_path / "trace.jsonl"
    bus, cache = recorded(path)
    other_bus, other = recorded(path)
    request(cache, key_chain(2), "r0")
    assert bus.flush()
    request(other, key_chain(1, branch="other"), "r0")
    assert other_bus.flush()
    real = os.write

    def half(file: int, data: bytes) -> int:
        if path.read_bytes().endswith(b"\n"):
            return real(file, data[: len(data) // 2])
        monkeypatch.setattr(os, "write", real)
        request(other, key_chain(2, branch="other"), "r1")
        assert other_bus.flush()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    request(cache, key_chain(2, branch="lost"), "r1")
    assert bus.flush()
    assert bus.failures == 0
    for one in (cache, other):
        one.close()
    bus.close()
    other_bus.close()
    bus, cache = recorded(path)
    request(cache, key_chain(3), "r2")
    cache.close()
    bus.close()
    trace = read_trace(str(path))
    assert list(map(len, trace.prompts)) == [2, 1, 2, 3] and trace.half_lines == 1
    assert path.read_text().count("# 1 requests were left out\n") == 1
    assert main(["sim", str(path), "--capacity", "9", "--chunk-tokens", "1"]) == 0
    assert f"1 incomplete lines of {path} are left out" in capsys.readouterr().err


@pytest.mark.parametrize("left", [1, 8, 30, 100, -5, -1])
def test_what_a_killed_process_left_of_a_line_costs_no_other(tmp_path: Path, left: int) -> None:
    """left: how many bytes of its file, or of all but how many."""
    path = tmp_path / "trace.jsonl"
    for number in range(2):
        bus, cache = recorded(path)
        for branch in "ab":
            request(cache, key_chain(2 + number, branch=branch), f"r {branch}")
        cache.close()
        bus.close()
        if not number:
            whole = path.read_bytes()
            path.write_bytes(whole[:left])
            kept = whole[:left].count(b'"hash_ids"')
            kept -= not whole[:left].endswith((b"}", b"\n")) and kept > 0
    trace = read_trace(str(path))
    assert list(map(len, trace.prompts)) == [2] * kept + [3, 3]
    assert trace.half_lines == (left != -1)


def test_settings_that_cannot_be_honoured_say_what_to_change(tmp_path: Path) -> None:
    for config, why in (
        (ObserveConfig(record=str(tmp_path / "no" / "such" / "trace")), "name a directory"),
        (ObserveConfig(record=str(tmp_path / "trace"), record_bytes=0), "record_bytes"),
        (ObserveConfig(record=str(tmp_path)), "is a directory; name a file in it"),
    ):
        with pytest.raises(ConfigError, match=why):
            build_bus(config)
    read = read_config({"observe": {"record": "t", "record_bytes": "2MiB"}})
    assert read.observe == ObserveConfig(record="t", record_bytes=2 << 20)
    with pytest.raises(ConfigError, match=r"did you mean 'observe.record'"):
        read_config({"observe": {"recod": "t"}})
