"""Why a prompt was missed, from the events of a cache up to `kv explain` against a real kv-server."""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_core import ChainScheme, KeySequence, KeySpace, tenant_tag
from kv_core.clock import HandClock
from kv_core.cost import Costs
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.keys import ChunkKey, keys_in
from kv_core.testing import key_chain
from kv_eviction import LruPolicy
from kv_observe.chunk_state import ChunkState, GroupState
from kv_observe.explain import Explanation, explain
from kv_observe.history import MAX_KNOWN_KEY_SPACES, ChunkFate, History, Memory
from kv_server import RemoteCache, launch, wire
from kv_server.connection import ask_server
from kv_server.explained import explained_text
from kv_server.process import ServerProcess
from kv_server.server import explain_prompt
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.shapes import keys_for, shapes
from kv_testing.tower import Tower
from kv_testing.wait import until
from kv_tiers import HostPool, LocalCache
from kv_tiers.events.bus import EventBus
from kv_tiers.pool.host_pool import slot_bytes_for

CHUNK_TOKENS = 4


class Remembered:
    """A cache whose history is kept, on a clock that a test moves."""

    def __init__(self, slots: int = 4, max_keys: int = 1000) -> None:
        self.clock = HandClock()
        self.bus = EventBus(interval_s=0.001, clock=self.clock)
        self.history = History(max_keys, 0.0)
        self.bus.subscribe(self.history)
        self.cache = LocalCache(
            HostPool.anonymous("test", CHUNK_BYTES, slots),
            clock=self.clock,
            policy=LruPolicy(),
            events=self.bus.source("c", (CHUNK_BYTES,)),
        )

    def store(self, keys: list[ChunkKey]) -> None:
        self.cache.commit(self.cache.begin_store(keys, "w"))

    def runs(self, keys: list[ChunkKey]) -> Explanation:
        assert self.bus.flush()
        return explain(self.cache, self.history.of("c"), [keys], self.clock.now_s())

    def explained(self, columns: list[list[ChunkKey]]) -> Explanation:
        assert self.bus.flush()
        return explain(self.cache, self.history.of("c"), columns, self.clock.now_s())

    def explain(self, keys: list[ChunkKey]) -> list[ChunkState]:
        """Each chunk's on its own."""
        return each(self.runs(keys))

    def close(self) -> None:
        self.cache.close()
        self.bus.close()


def each(explanation: Explanation) -> list[ChunkState]:
    """Runs taken apart again."""
    return [
        replace(run, first=at, chunks=1) for run in explanation.runs for at in range(run.first, run.first + run.chunks)
    ]


@pytest.fixture
def kept() -> Iterator[Remembered]:
    made = Remembered()
    yield made
    made.close()


def test_what_is_held_says_where_and_since_when(kept: Remembered) -> None:
    kept.store(key_chain(3))
    kept.clock.advance(60)
    assert kept.explain(key_chain(3))[0] == ChunkState(0, 1, "host", "stored", "host", "", "", 60.0, 60.0)


def test_what_was_evicted_says_when_by_what_and_why(kept: Remembered) -> None:
    kept.store(key_chain(4))
    kept.clock.advance(10)
    kept.store(key_chain(2, branch="other"))
    kept.clock.advance(180)
    states = kept.explain(key_chain(4))
    assert [state.where for state in states] == ["host", "host", "", ""]
    assert states[2] == ChunkState(2, 1, "", "evicted", "host", "store", "lru", 180.0, 190.0)
    explained = kept.runs(key_chain(4))
    assert [(run.first, run.chunks) for run in explained.runs] == [(0, 2), (2, 2)]
    assert explained.held == 2


def test_where_a_prompt_parts_from_another_is_told_and_what_nobody_stored_is_not_made_up(kept: Remembered) -> None:
    common = key_chain(2)
    kept.store([*common, *key_chain(2, branch="stored")])
    states = kept.explain([*common, *key_chain(2, branch="asked")])
    assert [state.where for state in states] == ["host", "host", "", ""]
    assert [(state.what, state.diverges) for state in states[2:]] == [("", True), ("", False)]
    nothing = kept.explain(key_chain(2, branch="unheard of"))
    assert [(state.where, state.what, state.diverges) for state in nothing] == [("", "", False)] * 2


HYBRID = ChunkShape(CHUNK_TOKENS, (ALL, Coverage("window", 6), STATE))


def test_the_group_that_ends_a_hit_is_named_with_what_became_of_its_chunks(kept: Remembered) -> None:
    """Of a window and of states, what the boundary would have needed and what became of it; nothing of the rest."""
    kept.close()
    kept.__init__(slots=16)  # type: ignore[misc]
    keys = keys_for(HYBRID, 4)
    columns = [keys[group::3] for group in range(3)]
    kept.cache.lookup(keys, "r", shape=HYBRID)
    kept.store(columns[0])
    kept.store(columns[1][1:])
    kept.store(columns[2][1:2])
    explained = kept.explained(columns)
    assert [(run.first, run.chunks, run.where) for run in explained.runs] == [(0, 4, "host")]
    assert (explained.held, explained.prefix) == (0, 4)  # at the one state the window's first chunk is missing
    assert explained.lacking == [GroupState(2, "state", (ChunkState(3, 1, ""),))]
    kept.store(columns[1][:1])
    assert kept.explained(columns).held == 2
    kept.store(columns[2][3:])
    assert kept.explained(columns).lacking == []
    kept.cache.forget(columns[1][2:3])
    explained = kept.explained(columns)
    assert (explained.held, explained.prefix) == (2, 4)
    ((group, coverage, (state,)),) = [(one.group, one.coverage, one.states) for one in explained.lacking]
    assert (group, coverage, state.first, state.chunks, state.what) == (1, "window:6", 2, 1, "forgotten")
    assert kept.cache.lookup(keys, "r", shape=HYBRID).chunks == explained.held


@given(shapes(), st.integers(1, 6), st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_explained_is_what_a_lookup_answers(shape: ChunkShape, chunks: int, data: st.DataObject) -> None:
    keys = keys_for(shape, chunks)
    held = data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(keys), max_size=len(keys)))
    cache = LocalCache(HostPool.anonymous("explained", 64, len(keys)), policy=LruPolicy())
    cache.commit(cache.begin_store([key for key, is_held in zip(keys, held, strict=True) if is_held], "w"))
    plan = cache.lookup(keys, "r", shape=shape)
    explained = explain(cache, None, [keys[at :: shape.keys_per_chunk] for at in range(shape.keys_per_chunk)], 0.0)
    assert explained.held == plan.chunks
    if any(coverage == ALL for coverage in shape.groups):
        assert explained.prefix == plan.prefix_chunks
        assert [one.group for one in explained.lacking][:1] == ([plan.lacking] if plan.lacking >= 0 else [])
    cache.close()


def test_the_same_prompt_stored_longer_does_not_part_from_itself(kept: Remembered) -> None:
    kept.store(key_chain(3))
    assert [state.diverges for state in kept.explain(key_chain(4))] == [False] * 4


def test_refused_aborted_forgotten_and_being_written_are_told_apart(kept: Remembered) -> None:
    keys = key_chain(6)
    writing = kept.cache.begin_store(keys, "w")
    states = kept.explain(keys)
    assert [state.where for state in states] == ["being written"] * 4 + [""] * 2
    assert states[4].what == "refused" and "no room for 2 of 6" in states[4].cause
    kept.cache.release(writing)
    assert kept.explain(keys)[0].what == "aborted"
    kept.store(keys[:2])
    kept.cache.forget(keys[:1])
    assert kept.explain(keys)[0].what == "forgotten"
    kept.cache.clear()
    assert kept.explain(keys)[1] == ChunkState(1, 1, "", "forgotten", "host", "", "", 0.0)


def test_a_chunk_on_a_tier_below_is_found_there_and_one_lost_there_says_that_it_was() -> None:
    bus, history = EventBus(interval_s=0.001), History(1000, 0.0)
    bus.subscribe(history)
    tower = Tower("through", events=bus.source("c", (CHUNK_BYTES,)))
    keys = key_chain(2)
    tower.store_below(keys)
    assert bus.flush()
    assert [state.where for state in each(explain(tower.cache, history.of("c"), [keys], 0.0))] == ["tier0", "tier0"]
    tower.tiers[0].discard(keys[:1])  # as a tier does to make room
    (lost, _) = each(explain(tower.cache, history.of("c"), [keys], 0.0))
    assert (lost.where, lost.what, lost.below) == ("", "evicted", ("tier0",))
    tower.tiers[0].fault = "flip"
    tower.fetch(keys[1:])
    tower.run()
    assert bus.flush()
    (damaged,) = each(explain(tower.cache, history.of("c"), [keys[1:]], 0.0))
    assert (damaged.where, damaged.what, damaged.tier) == ("", "damaged", "tier0")
    tower.tiers[0].fault = ""
    tower.close()
    bus.close()


def test_a_tier_that_must_be_asked_over_a_network_is_not_asked() -> None:
    tower = Tower("through", remote=[True])
    keys = key_chain(2)
    tower.store_below(keys)
    calls = list(tower.tiers[0].calls)
    assert each(explain(tower.cache, None, [keys], 0.0)) == [ChunkState(0, 1, ""), ChunkState(1, 1, "")]
    assert tower.tiers[0].calls == calls and tower.cache.lower.remote_tiers_skipped() == ["tier0"]
    tower.close()


def test_a_chunk_of_several_shares_is_as_badly_off_as_the_worst(kept: Remembered) -> None:
    one, other = key_chain(2, branch="shard 0"), key_chain(2, branch="shard 1")
    kept.store(one)
    kept.store(other[:1])
    assert kept.bus.flush()
    for shares in ([one, other], [other, one]):
        explained = explain(kept.cache, kept.history.of("c"), shares, 0.0)
        assert [state.where for state in explained.runs] == ["host", ""] and explained.held == 1


def test_explaining_leases_and_touches_nothing(kept: Remembered) -> None:
    old, new = key_chain(2, branch="old"), key_chain(2, branch="new")
    kept.store(old)
    kept.store(new)
    kept.explain(old)
    counts = kept.cache.counts()
    assert counts.read_leases == 0 and counts.lookups == 0
    kept.store(key_chain(2, branch="more"))
    assert [state.where for state in kept.explain(old)] == ["", ""]  # the oldest left, though it was asked about


# The memory.


def test_a_key_space_of_several_groups_that_does_not_know_a_prompt_costs_a_few_looks(
    kept: Remembered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server looks on its only thread, in every key space that it remembers."""
    stored, digests = keys_for(HYBRID, 1), [bytes([at % 256, 1 + at // 256]) * 8 for at in range(500)]
    kept.cache.lookup(stored, "r", shape=HYBRID)
    kept.store(stored)
    assert kept.bus.flush()
    looked_up: list[ChunkKey] = []
    where = kept.cache.admin.where
    monkeypatch.setattr(kept.cache.admin, "where", lambda keys: [looked_up.extend(keys), where(keys)][1])

    def explained(asked: list[bytes]) -> list[wire.Explained]:
        request = wire.Explain(len(asked[0]), b"".join(asked), [])
        return explain_prompt(request, {((CHUNK_BYTES,), "f"): kept.cache}, [], kept.history, 0.0).explained

    assert explained(digests) == [] and len(looked_up) <= 4
    (found,) = explained([stored[0].digest, digests[0]])
    assert found.prefix == 1


def test_a_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    memory = Memory(100)
    keys = key_chain(500)
    for number in range(0, 500, 10):
        memory.change(keys[number : number + 10], lambda _, number=number: ChunkFate("stored", float(number)))
        assert len(memory._young) + len(memory._old) <= 110
    assert memory.fate(keys[499]) == ChunkFate("stored", 490.0)
    assert all(memory.fate(key) is not None for key in keys[-50:])
    assert memory.fate(keys[0]) is None and not memory.is_whole


def test_keys_of_one_call_share_one_fate() -> None:
    memory = Memory(1000)
    keys = key_chain(10)
    memory.change(keys, lambda _: ChunkFate("stored", 1.0))
    memory.change(
        [*keys, *key_chain(5, branch="new")], lambda before: ChunkFate("evicted", 2.0, stored_s=before and 1.0)
    )
    assert len({id(memory.fate(key)) for key in keys}) == 1
    assert memory.fate(keys[0]) != memory.fate(key_chain(5, branch="new")[0])


# A real server.


SPACE = KeySpace("model", "r", "float16", "f", 1, ChainScheme("sha256", CHUNK_TOKENS).name)


def keys_of(tokens: list[int], salt: str | None = None, space: KeySpace = SPACE, group: int = 0) -> list[ChunkKey]:
    scheme = ChainScheme("sha256", CHUNK_TOKENS)
    digests = KeySequence(scheme, root=scheme.root(salt=salt)).append(tokens)
    return space.keys(digests, groups=(group,), tenant=tenant_tag(salt))


class Asked:
    """A kv-server process, a client that stores there, and `kv explain` about it. said: on standard error."""

    said = ""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], **options: object) -> None:
        self.home, self.capsys = home, capsys
        host = {"capacity_bytes": 8 * slot_bytes_for(CHUNK_BYTES), "policy": "lru"}
        self.server: ServerProcess = launch({"host": host, **options})
        self.remote = RemoteCache(self.server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f", engine="an engine")

    def store(self, keys: list[ChunkKey]) -> None:
        self.remote.commit(self.remote.begin_store(keys, "w"))

    def run(self, tokens: list[int], *options: str) -> tuple[int, str]:
        from kv_core.tools.cli import main

        prompt = self.home / "prompt"
        prompt.write_text(" ".join(map(str, tokens)))
        words = ["explain", str(prompt), "--chunk-tokens", str(CHUNK_TOKENS), "--socket", str(self.server.socket)]
        status = main([*words, *options])
        out, self.said = self.capsys.readouterr()
        return status, out

    def until(self, tokens: list[int], said: Callable[[str], bool], *options: str) -> tuple[int, str]:
        """Asked again until the server's history has been told of what just happened."""
        answers: list[tuple[int, str]] = []

        def is_told() -> bool:
            answers.append(self.run(tokens, *options))
            return said(answers[-1][1])

        until(is_told)
        return answers[-1]

    def close(self) -> None:
        self.remote.close()
        self.server.stop()


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Iterator[Asked]:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        made = Asked(Path(home), capsys)
        yield made
        made.close()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a kv-server needs Linux")


def test_what_would_be_loaded_does_not_depend_on_the_length_of_another_prompt() -> None:
    """Where loads overlap with computing the rest of the prompt: of this one, not of the one looked up last."""
    kept, keys = Remembered(slots=8), key_chain(4)
    kept.store(keys)

    def look_up(prompt: Sequence[ChunkKey], tokens: int) -> None:
        costs = Costs(compute=(1e-3, 0.0), load=(0.0, 2e-3), layerwise_tokens=tokens)
        kept.cache.lookup(prompt, "a", shape=ChunkShape(4), costs=costs)

    look_up(keys, 16)
    choice = explain(kept.cache, None, [keys], 0.0).choice
    assert choice is not None and choice.chunks == 0
    look_up(keys[:1], 4000)
    assert explain(kept.cache, None, [keys], 0.0).choice == choice
    kept.close()


def test_a_prompt_that_is_held_is_told_so_with_status_0(asked: Asked) -> None:
    tokens = list(range(12))
    asked.store(keys_of(tokens))
    status, out = asked.until(tokens, lambda out: "in host" in out)
    assert status == 0
    assert out.splitlines() == ["3 of 3 chunks of 4 tokens are held", "chunks 0–2: in host"]


def test_the_space_may_be_named_and_is_then_found_without_the_history(asked: Asked) -> None:
    tokens = list(range(8))
    asked.store(keys_of(tokens))
    named = ["--model", "model", "--revision", "r", "--dtype", "float16", "--format-fingerprint", "f"]
    status, out = asked.run(tokens, *named)
    assert status == 0 and "chunks 0–1: in host" in out
    status, out = asked.run(tokens, "--space", SPACE.fingerprint.hex(), "--json")
    told = json.loads(out)["salts"][0]["explained"][0]
    assert status == 0 and told["was_asked"] and told["space"] == SPACE.fingerprint.hex()
    status, out = asked.run(tokens, "--space", "ab" * 16)
    assert status == 1 and out.startswith("0 of 2 chunks")


def test_chunks_of_any_number_of_shards_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a history, from which a server would know the shards by itself."""
    tokens = list(range(4))
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        host = {"capacity_bytes": 128 * slot_bytes_for(CHUNK_BYTES)}
        made = Asked(Path(home), capsys, host=host, observe={"history_keys": 0})
        keys = keys_in(SPACE.fingerprint, [keys_of(tokens)[0].digest], shards=range(100))
        made.store(keys)
        named = ["--space", SPACE.fingerprint.hex(), "--world"]
        assert made.run(tokens, *named, "100")[0] == 0
        made.remote.forget(keys[-1:])
        assert made.run(tokens, *named, "100")[0] == 1
        assert made.run(tokens, *named, "1025")[0] == 2
        most = wire.Explain(32, bytes(32 * wire.MAX_EXPLAINED), [bytes(keys[0][:-32])] * 65)
        answer = ask_server(made.server.socket, most)
        assert isinstance(answer, wire.Failed) and "at most" in answer.text
        made.close()


def test_whether_loading_pays_is_told_with_both_estimates(asked: Asked) -> None:
    tokens = list(range(12))
    keys = keys_of(tokens)
    asked.store(keys)
    asked.until(tokens, lambda out: "in host" in out)

    def says(costs: Costs) -> str:
        asked.remote.lookup(keys, "r", shape=ChunkShape(CHUNK_TOKENS), costs=costs)
        return asked.run(tokens)[1].splitlines()[-1]

    assert says(Costs(0, (0.01, 0.0), (0.002, 0.001))) == (
        "if it were requested now: 3 chunks loaded, estimated at 14 ms: computing them takes 120 ms"
    )
    assert says(Costs(0, (0.01, 0.0), (2.0, 0.0))) == (
        "if it were requested now: computed, estimated at 120 ms: loading takes 2.00 s"
    )
    assert "takes a time not known yet" in says(Costs(0, None, (2.0, 0.0)))


def test_what_a_tier_has_that_does_not_pay_is_told_with_its_name() -> None:
    tower = Tower("through")
    keys = key_chain(4)
    tower.store_below(keys)
    tower.tiers[0].fault = "delay"
    for _ in range(4):
        tower.fetch(keys)
        tower.cache.end("r")
        tower.crowd_out()
    tower.fetch(keys[:1])  # one of them is in the pool
    tower.cache.end("r")
    shape, costs = ChunkShape(CHUNK_TOKENS), Costs(0, (1e-4, 0.0), (0.0, 0.0))
    tower.cache.lookup(keys, "r", shape=shape, costs=costs)
    choice = explain(tower.cache, None, [keys], 0.0).choice
    assert choice is not None and choice.chunks == 1 and choice.compute_s == pytest.approx(4e-4)
    assert choice.skipped is not None and (choice.skipped.chunks, choice.skipped.tier) == (3, "tier0")
    assert choice.skipped.load_s > choice.skipped.compute_s == pytest.approx(12e-4)
    dear = Costs(0, (1.0, 0.0), (0.0, 0.0))
    tower.cache.lookup(keys, "r", shape=shape, costs=dear)
    choice = explain(tower.cache, None, [keys], 0.0).choice
    assert choice is not None and choice.chunks == 4 and choice.skipped is None
    assert choice.load_s is not None and choice.load_s > 0.01  # that of the tier is in it
    tower.tiers[0].fault = ""
    tower.close()


def test_what_a_restarted_server_serves_from_its_disk_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    """It remembers nothing of what was stored before. What a request has loaded since is no news to it."""
    tokens = list(range(8))
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        tiers = [{"type": "disk", "directory": f"{home}/kv", "capacity_bytes": "64MiB"}]
        first = Asked(Path(home), capsys, tiers=tiers)
        first.store(keys_of(tokens))
        first.close()
        again = Asked(Path(home), capsys, tiers=tiers)
        status, out = again.run(tokens)
        assert status == 1 and "with --space, or once an engine has looked them up" in out
        plan = again.remote.lookup(keys_of(tokens), "r", wait_for_promotion=True)
        until(lambda: again.remote.lookup(keys_of(tokens), "r", wait_for_promotion=True).chunks == 2)
        assert plan.holder == "r"
        assert again.until(tokens, lambda out: "2 of 2" in out)[0] == 0
        again.close()


def test_a_tier_that_was_not_asked_may_hold_it_yet() -> None:
    """The next request asks it: nobody knows that it is gone."""
    state = ChunkState(0, 1, "", "evicted", "host", "store", "lru", 1.0, below=("disk", "redis"))
    explained = wire.Explained((1,), "f", "00", "00", [], False, 1, 0, 0, [], ["redis"], [state], False, None)
    answer = wire.Explanations(1, 10, 1.0, True, [explained])
    (text, _) = explained_text(explained, answer)
    assert "stored in disk since, and not there now" in text
    assert "stored in redis since, which was not queried" in text


def test_what_a_plan_reuses_is_told_segment_by_segment(asked: Asked) -> None:
    from kv_blend import edited, request_fields
    from kv_blend.keys import keys_of_plan
    from kv_blend.plan import read_plan

    tokens = list(range(100, 122))
    segments = [(2, 8), (9, 20)]  # behind two tokens: chunks of 4, 4 and of 4, 4, 4, 1
    request = asked.home / "request.json"

    def run(fields: object, *options: str, of: list[int] = tokens) -> tuple[int, str]:
        request.write_text(json.dumps(fields))
        return asked.run(of, "--plan", str(request), *options)

    for engine in ("vllm", "sglang"):
        fields = request_fields(segments, tokens=22, tenant=f"t {engine}", engine=engine)
        read = read_plan(fields.get("kv_transfer_params", fields.get("custom_params")), fields["cache_salt"], 22)
        assert read is not None
        scheme = ChainScheme("sha256", CHUNK_TOKENS)
        first, second = (
            SPACE.keys(each.digests, groups=(0,), tenant=tenant_tag(read[1]))
            for each in keys_of_plan(read[0], tokens, read[1], scheme, {}, engine=engine)
        )
        assert (len(first), len(second)) == (2, 4)
        asked.store(first)
        asked.store(second[:1])
        until(lambda fields=fields: "in host" in run(fields)[1])
        status, out = run(fields)
        assert status == 1
        assert out.splitlines()[:4] == [
            "tokens 2–7: 6 of 6 are held",
            "  chunks 0–1: in host",
            "tokens 9–19: 2 of 11 are held",
            "  chunk 0: in host",
        ]
        described = json.loads(run(fields, "--json")[1])["segments"]
        assert [(each["first"], each["end"], each["held_tokens"]) for each in described] == [(2, 8, 6), (9, 20, 2)]
    # What is left of a conversation, under its exact keys.
    before = [*range(1, 9), *range(200, 210), *range(1000, 1050)]
    asked.store(keys_of(before, "me")[:6])
    now = [*range(1, 9), *range(1000, 1050), 7]
    fields = request_fields(**edited(before, now), tenant="me")
    until(lambda: "in host" in run(fields, of=now)[1])
    status, out = run(fields, of=now)
    assert out.splitlines()[:3] == [
        "tokens 0–7: 8 of 8 are held",
        "  chunks 0–1: in host",
        "tokens 8–57: 6 of 50 are held",
    ]
    # What is refused, and what is no plan.
    for wrong, options, why in [
        ({**fields, "cache_salt": "x"}, [], "cache_salt is not this plan's"),
        ({"cache_salt": "x"}, [], "the request has no plan"),
        ([], [], "the request has no plan"),
        (fields, ["--salt", "x"], "the tenant's salt is the plan's"),
    ]:
        request.write_text(json.dumps(wrong))
        assert asked.run(now, "--plan", str(request), *options)[0] == 2
        assert why in asked.said
    request.write_text("{")
    assert asked.run(tokens, "--plan", str(request))[0] == 2
    assert "is not JSON" in asked.said


def test_where_the_prompt_parts_and_what_was_evicted_by_what(asked: Asked) -> None:
    common, rest = list(range(8)), list(range(100, 108))
    asked.store(keys_of(common + rest))
    status, out = asked.until(common + [7] * 8, lambda out: "in host" in out)
    assert status == 1
    assert out.splitlines()[:3] == [
        "2 of 4 chunks of 4 tokens are held",
        "chunks 0–1: in host",
        "chunk 2: where this prompt diverges from what was stored: other prompts went on differently here",
    ]
    assert re.search(r"chunk 3: not stored here since the server started, \d+ s ago", out)
    asked.store(keys_of(list(range(1000, 1024))))  # six chunks: two of the eight slots are not enough for the four
    status, out = asked.until(common + rest, lambda out: "evicted" in out)
    assert status == 1
    assert "chunks 2–3: evicted" in out and "from host by lru to make room for a prompt" in out


def test_the_layers_that_ended_a_hit_are_told_in_words(asked: Asked) -> None:
    tokens = list(range(12))
    columns = [keys_of(tokens, group=group) for group in range(3)]
    asked.remote.lookup([key for chunk in zip(*columns, strict=True) for key in chunk], "r", shape=HYBRID)
    asked.store(columns[0])
    asked.store(columns[1])
    asked.store(columns[2][1:])
    asked.until(tokens, lambda out: "3 of 3" in out)
    asked.remote.forget([columns[1][1], columns[2][2]])
    status, out = asked.until(tokens, lambda out: out.count("forgotten") == 2)
    assert status == 1
    assert out.splitlines() == [
        "0 of 3 chunks of 4 tokens are held",
        "chunks 0–2: in host",
        "the hit ends at chunk 0: for a longer one, some layers lack what they need",
        "chunk 1 of the sliding window of group 1: forgotten 0 s ago on request",
        "chunk 2 of the state of group 2: forgotten 0 s ago on request",
    ]


def test_another_salt_and_another_model_are_found(asked: Asked) -> None:
    tokens = list(range(8))
    asked.store(keys_of(tokens, salt="alice"))
    status, out = asked.until(tokens, lambda out: "under the salt" in out, "--also-salt", "alice")
    assert status == 1
    assert "0 of 2 chunks" in out and "the first 2 chunks are held under the salt 'alice'" in out
    status, out = asked.run(tokens, "--salt", "alice", "--model", "another", "--dtype", "bfloat16")
    assert status == 1 and "0 of 2 chunks" in out
    assert "the first 2 chunks are held under another model or format" in out and "an engine" in out
    asked.remote.clear()
    asked.store(keys_of(tokens))
    status, out = asked.until(tokens, lambda out: "without a salt" in out, "--salt", "alice")
    assert "the first 2 chunks are held without a salt" in out and status == 1


def test_of_any_number_of_tenants_those_that_stored_last_are_found(asked: Asked) -> None:
    tokens = list(range(4))
    for number in range(MAX_KNOWN_KEY_SPACES + 1):
        asked.store(keys_of(tokens, f"tenant {number}"))
    last = ("--salt", f"tenant {MAX_KNOWN_KEY_SPACES}")
    status, out = asked.until(tokens, lambda out: "in host" in out, *last)
    assert (status, out.splitlines()[0]) == (0, "1 of 1 chunks of 4 tokens are held")
    status, out = asked.run(tokens, "--salt", "tenant 0")  # of which the server remembers nothing any more
    assert status == 1 and "never stored" not in out


def test_json_has_everything_and_no_salt(asked: Asked) -> None:
    tokens = list(range(8))
    asked.store(keys_of(tokens, salt="a secret"))
    _, out = asked.until(
        tokens,
        lambda out: json.loads(out)["chunks_held"] == 2,
        "--salt",
        "a secret",
        "--also-salt",
        "another",
        "--json",
    )
    told = json.loads(out)
    assert (told["chunks"], told["chunk_tokens"]) == (2, 4)
    assert [one["salt"] for one in told["salts"]] == ["given", "none", "also 2"]
    assert told["salts"][0]["explained"][0]["states"][0]["where"] == "host"
    assert "secret" not in out and "another" not in out


def test_a_server_that_is_not_there_and_a_prompt_without_a_chunk_are_said(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_core.tools.cli import main

    prompt = asked.home / "prompt"
    prompt.write_text("1 2 3 4")
    assert main(["explain", str(prompt), "--chunk-tokens", "4", "--socket", str(asked.home / "none.sock")]) == 2
    assert "no server answers" in capsys.readouterr().err
    prompt.write_text("1 2 3")
    assert main(["explain", str(prompt), "--chunk-tokens", "4", "--socket", str(asked.server.socket)]) == 2
    assert "3 tokens are no whole chunk of 4" in capsys.readouterr().err


def test_chunks_have_the_size_that_the_servers_engines_give_them(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_core.tools.cli import main

    tokens = list(range(12))
    asked.store(keys_of(tokens))
    asked.until(tokens, lambda out: "in host" in out)
    words = ["explain", str(asked.home / "prompt"), "--socket", str(asked.server.socket)]
    assert main(words) == 2
    assert "12 tokens are no whole chunk of 256" in capsys.readouterr().err  # no engine has said how many
    facts = {"chunk_tokens": str(CHUNK_TOKENS)}
    engine = RemoteCache(asked.server.socket, group_bytes=(CHUNK_BYTES,), fingerprint="f", engine="b", facts=facts)
    assert main(words) == 0
    assert "3 of 3 chunks of 4 tokens are held" in capsys.readouterr().out
    assert main([*words, "--chunk-tokens", "2"]) == 1
    said = capsys.readouterr()
    assert "0 of 6 chunks of 2 tokens are held" in said.out
    assert "the engines of this server have chunks of 4 tokens; give --chunk-tokens" in said.err
    engine.close()


def test_without_a_history_the_answer_says_that_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as home:
        made = Asked(Path(home), capsys, observe={"history_keys": 0})
        status, out = made.run(list(range(8)))
        assert status == 1 and "remembers nothing (history_keys = 0)" in out
        made.close()


def test_hostile_questions_are_refused_and_the_next_is_answered(asked: Asked) -> None:
    for digests, heads in ((b"d" * 33, []), (b"d" * 32, [b"x" * 30])):
        answer = ask_server(asked.server.socket, wire.Explain(32, digests, heads))
        assert isinstance(answer, wire.Failed) and answer.kind == "malformed"
    answer = ask_server(asked.server.socket, wire.Explain(32, bytes(32 * wire.MAX_EXPLAINED), []))
    assert isinstance(answer, wire.Explanations) and answer.explained == []
