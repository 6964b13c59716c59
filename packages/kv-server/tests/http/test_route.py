"""POST /route: the expected time to the first token, by engine, from what engines measured and what is held."""

from collections.abc import Iterator
from typing import Any

import pytest
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape, Coverage
from kv_core.keys import ChunkKey, KeySpace
from kv_core.testing import key_chain
from kv_server import RemoteCache
from kv_server.wire import REPEATS_LOOKUPS
from kv_testing.http import Served, keys_of, problem, store, store_keys

TOKEN_S = 1e-3
CHUNK_TOKENS = 256
SHAPE = ChunkShape(CHUNK_TOKENS)
COSTS = Costs(0, (TOKEN_S, 0.0), (0.01, 1e-5))
"""To compute a token takes a millisecond, to load one a hundredth of it."""


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(slots=32)
    yield made
    made.close()


def look_up(cache: RemoteCache, keys: list[ChunkKey], costs: Costs | None = COSTS, shape: ChunkShape = SHAPE) -> None:
    cache.lookup(keys, "r", shape=shape, costs=costs)
    cache.end("r")


def route(served: Served, keys: list[ChunkKey], **more: object) -> list[dict[str, Any]]:
    answer = served.post("/route", {"digests": [key.digest.hex() for key in keys], **more})
    assert answer.status_code == 200, answer.text
    engines = answer.json()["engines"]
    assert isinstance(engines, list)
    return engines


def test_each_engine_is_judged_by_its_own_costs_and_by_what_is_held(served: Served) -> None:
    quick, slow = served.join(engine="quick"), served.join(engine="slow")
    store(quick, 4)
    prompt = key_chain(6)
    look_up(quick, prompt[:1])
    look_up(slow, prompt[:1], Costs(0, (5 * TOKEN_S, 0.0), (0.01, 1e-5)))
    served.clock.advance(60.0)
    first, second = route(served, prompt, tokens=6 * CHUNK_TOKENS + 10)
    assert (first["engine"], second["engine"]) == ("quick", "slow")
    assert first["held_chunks"] == first["loaded_chunks"] == 4
    load_s, compute_s = 0.01 + 4 * CHUNK_TOKENS * 1e-5, (2 * CHUNK_TOKENS + 10) * TOKEN_S
    assert first["load_s"] == pytest.approx(load_s)
    assert first["compute_s"] == pytest.approx(compute_s)
    assert first["queue_s"] == 0.0
    assert first["ttft_s"] == pytest.approx(load_s + compute_s)
    assert second["compute_s"] == pytest.approx(5 * compute_s)
    for cache in (quick, slow):
        cache.close()


def test_an_engine_that_has_much_to_compute_is_later_until_that_is_done(served: Served) -> None:
    busy, idle = served.join(engine="busy"), served.join(engine="idle")
    look_up(idle, key_chain(1, branch="before"))
    served.clock.advance(60.0)
    look_up(busy, key_chain(10, branch="long"))
    first, second = route(served, key_chain(2))
    assert (first["engine"], second["engine"]) == ("idle", "busy")
    assert second["queue_s"] == pytest.approx(10 * CHUNK_TOKENS * TOKEN_S)
    served.clock.advance(1.0)
    assert route(served, key_chain(2))[1]["queue_s"] == pytest.approx(10 * CHUNK_TOKENS * TOKEN_S - 1.0)
    served.clock.advance(5.0)
    assert [one["queue_s"] for one in route(served, key_chain(2))] == [0.0, 0.0]
    for cache in (busy, idle):
        cache.close()


def test_what_is_held_leaves_less_in_the_queue(served: Served) -> None:
    cache = served.join(engine="e")
    store(cache, 4)
    look_up(cache, key_chain(6))
    assert route(served, key_chain(1))[0]["queue_s"] == pytest.approx(2 * CHUNK_TOKENS * TOKEN_S)
    cache.close()


def test_ranks_that_look_up_the_same_prompt_have_it_computed_once(served: Served) -> None:
    first = served.join(engine="e")
    others = [served.join(engine="e", facts={REPEATS_LOOKUPS: "true"}) for _ in range(3)]
    for cache in (*others, first):
        look_up(cache, key_chain(4))
    assert route(served, key_chain(1))[0]["queue_s"] == pytest.approx(4 * CHUNK_TOKENS * TOKEN_S)
    for cache in (first, *others):
        cache.close()


def test_where_computing_is_quicker_nothing_is_loaded(served: Served) -> None:
    cache = served.join(engine="e")
    store(cache, 3)
    look_up(cache, key_chain(1), Costs(0, (TOKEN_S, 0.0), (100.0, 0.0)))
    served.clock.advance(60.0)
    (one,) = route(served, key_chain(3))
    assert (one["held_chunks"], one["loaded_chunks"], one["load_s"]) == (3, 0, 0.0)
    assert one["ttft_s"] == pytest.approx(3 * CHUNK_TOKENS * TOKEN_S)
    cache.close()


def test_a_load_that_was_never_measured_is_taken_to_be_quick(served: Served) -> None:
    """As in a lookup: an engine that never gets a prompt which is held would never load one."""
    cache = served.join(engine="e")
    store(cache, 3)
    look_up(cache, key_chain(1), Costs(0, (TOKEN_S, 0.0), None))
    served.clock.advance(60.0)
    (one,) = route(served, key_chain(4))
    assert (one["loaded_chunks"], one["load_s"]) == (3, None)
    assert one["ttft_s"] == pytest.approx(CHUNK_TOKENS * TOKEN_S)
    cache.close()


def test_a_prompt_begins_at_its_first_token_wherever_the_last_lookup_began(served: Served) -> None:
    """SGLang's lookups begin after what it has itself, to which the tokens that it computes attend."""
    cache = served.join(engine="e")
    look_up(cache, key_chain(1), Costs(0, (TOKEN_S, 1e-6), before_tokens=100_000))
    assert route(served, key_chain(1))[0]["queue_s"] == pytest.approx(CHUNK_TOKENS * (TOKEN_S + 1e-6 * 100_128))
    served.clock.advance(60.0)
    assert route(served, key_chain(1))[0]["compute_s"] == pytest.approx(CHUNK_TOKENS * (TOKEN_S + 1e-6 * 128))
    cache.close()


def test_of_a_prompt_that_is_held_whole_the_last_token_is_computed(served: Served) -> None:
    cache = served.join(engine="e")
    store(cache, 3)
    look_up(cache, key_chain(3))
    served.clock.advance(60.0)
    assert route(served, key_chain(3))[0]["compute_s"] == pytest.approx(TOKEN_S)
    cache.close()


def test_a_tenants_prompt_is_another_prompt(served: Served) -> None:
    cache = served.join(engine="e")
    keys = keys_of("acme", 3)
    store_keys(cache, keys)
    look_up(cache, keys)
    assert route(served, keys, tenant=keys[0].tenant.hex())[0]["held_chunks"] == 3
    assert route(served, keys)[0]["held_chunks"] == 0
    cache.close()


def test_of_a_model_with_a_window_only_what_the_window_sees_must_be_held(served: Served) -> None:
    cache = served.join(engine="e")
    shape = ChunkShape(CHUNK_TOKENS, (Coverage("all"), Coverage("window", CHUNK_TOKENS)))
    space = KeySpace("two groups", "", "", "", 1, "c")
    digests = [key.digest for key in key_chain(4)]
    store_keys(cache, space.keys(digests))
    window = space.keys(digests[3:], groups=(1,))
    store_keys(cache, window)
    look_up(cache, space.keys(digests, groups=2), shape=shape)
    assert route(served, key_chain(4))[0]["held_chunks"] == 4
    cache.forget(window)
    assert route(served, key_chain(4))[0]["held_chunks"] == 0
    cache.close()


def test_engines_of_which_nothing_is_known_are_named_and_those_that_left_are_not(served: Served) -> None:
    known, new = served.join(engine="known"), served.join(engine="new")
    look_up(known, key_chain(2), costs=None)
    body = {"digests": [key.digest.hex() for key in key_chain(2)]}
    answer = served.post("/route", body).json()
    assert answer["unknown"] == ["new"]
    (one,) = answer["engines"]
    assert (one["engine"], one["ttft_s"], one["compute_s"]) == ("known", None, None)
    known.close()
    new.close()
    assert served.post("/route", body).json() == {"engines": [], "other_chunks": [], "unknown": []}


def test_engines_with_other_chunks_are_named_with_their_size_and_not_judged(served: Served) -> None:
    """Their digests would be others, so nothing would ever seem to be held for them."""
    usual, halved = served.join(engine="usual"), served.join(engine="halved")
    look_up(usual, key_chain(2))
    look_up(halved, key_chain(4, branch="halves"), shape=ChunkShape(CHUNK_TOKENS // 2))
    for keys, judged, other, other_tokens in (
        (key_chain(2), "usual", "halved", CHUNK_TOKENS // 2),
        (key_chain(4, branch="halves"), "halved", "usual", CHUNK_TOKENS),
    ):
        digests = [key.digest.hex() for key in keys]
        answer = served.post("/route", {"digests": digests, "tokens": 2 * CHUNK_TOKENS + 9}).json()
        (one,) = answer["engines"]
        assert (one["engine"], one["chunk_tokens"]) == (judged, 3 * CHUNK_TOKENS // 2 - other_tokens)
        assert answer["other_chunks"] == [{"engine": other, "chunk_tokens": other_tokens}]
    usual.close()
    halved.close()


def test_wrong_questions_are_refused(served: Served) -> None:
    digest = key_chain(1)[0].digest.hex()
    for body in ({}, {"digests": []}, {"digests": ["no digest"]}, {"digests": [digest], "tokens": 0}):
        problem(served.post("/route", body), 400)
    problem(served.post("/route", {"digests": [digest], "tenant": "acme"}), 400)
    problem(served.post("/route", {"digests": [digest], "fingerprint": "none has it"}), 404)
    problem(served.post("/route", {"digests": [digest]}, token="a guess"), 401)
