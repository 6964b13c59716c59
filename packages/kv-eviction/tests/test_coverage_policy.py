"""What leaves of a model with windows and states: what no boundary asked for lately needs, and no full attention."""

import hashlib
from collections.abc import Sequence

import pytest
from kv_core.coverage import ALL, STATE, ChunkShape, Coverage
from kv_core.keys import ChunkKey, KeySpace
from kv_core.service import ReadLease
from kv_core.testing import key_chain
from kv_eviction import POLICY_NAMES, LruPolicy, make_policy
from kv_tiers import HostPool, LocalCache

SESSIONS, TURNS, GROWN = 6, 20, 4
WINDOWS = ChunkShape(16, (ALL, Coverage("window", 32)))
STATES = ChunkShape(16, (ALL, STATE))
FULL = SESSIONS * TURNS * GROWN
"""Chunks of full attention that all sessions have in the end."""


def prompt(session: int, turn: int, shape: ChunkShape) -> list[ChunkKey]:
    space = KeySpace("m", "r", "f", "f", 1, "sha256:16")
    digests = [hashlib.sha256(f"{session}/{chunk}".encode()).digest() for chunk in range(turn * GROWN)]
    return space.keys(digests, groups=len(shape.groups))


def play(cache: LocalCache, shape: ChunkShape) -> list[tuple[int, int]]:
    """Sessions in turn, as an engine serves them. After each round: the chunks held of full attention, and others."""
    held = []
    for turn in range(1, TURNS + 1):
        for session in range(SESSIONS):
            keys = prompt(session, turn, shape)
            hit = cache.lookup(keys, "r", shape=shape).chunks
            assert hit == (turn - 1) * GROWN, "a session's state of its last turn has left"
            for group in range(len(shape.groups)):
                # An engine has of a window what the hit needed and what came since; a state it keeps at the end.
                first = len(keys) // 2 - 1 if shape.groups[group] == STATE else shape.first_chunk(group, hit)
                cache.commit(cache.begin_store(keys[group::2][first:], "w"))
            cache.end("r")
        groups = [key.group for key in cache.admin.resident_keys()]
        held.append((groups.count(0), groups.count(1)))
    return held


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc", "lfu", "fifo", "mru"])
@pytest.mark.parametrize(("shape", "room"), [(WINDOWS, 60), (STATES, 12)])
def test_twenty_turns_keep_all_full_attention_and_a_bounded_rest(policy: str, shape: ChunkShape, room: int) -> None:
    """The pool has room for little more than the full attention, and every turn's hit is whole."""
    slots = FULL + room
    cache = LocalCache(HostPool.anonymous("sessions", 64, slots), policy=make_policy(policy, slots))
    held = play(cache, shape)
    assert held[-1] == (FULL, room)
    cache.close()


def test_without_a_policy_that_knows_coverages_windows_push_full_attention_out() -> None:
    """What the test above is worth: the prefix policy by itself takes windows for prompts that come back."""
    slots = FULL + 60
    cache = LocalCache(HostPool.anonymous("sessions", 64, slots), policy=make_policy("prefix", slots))
    cache._bounded.note = lambda keys, shape: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="has left"):
        play(cache, WINDOWS)


def test_a_policy_is_told_of_a_turns_end_by_what_it_knows_of_the_prompt() -> None:
    told: list[tuple[list[ChunkKey], list[int]]] = []

    class Policy(LruPolicy):
        def turn_ended(self, keys: Sequence[ChunkKey], slots: Sequence[int]) -> None:
            told.append((list(keys), list(slots)))

    cache = LocalCache(HostPool.anonymous("turns", 64, 32), policy=Policy())
    keys = prompt(0, 2, WINDOWS)
    cache.lookup(keys, "r", shape=WINDOWS)
    for stored in (keys[:12:2], keys[9:12:2]):  # a window, and of full attention all but the last two chunks
        cache.commit(cache.begin_store(stored, "w"))
    cache.turn_ended(keys)
    assert told == [(keys[::2], [cache._index.find(key) for key in keys[:12:2]])]
    cache.close()


def test_noop_evicts_nothing_of_windows_and_states() -> None:
    cache = LocalCache(HostPool.anonymous("noop", 64, 8), policy=make_policy("noop", 8))
    for session, held in enumerate((8, 0, 0)):
        keys = prompt(session, 1, WINDOWS)
        assert cache.lookup(keys, "r", shape=WINDOWS).chunks == 0
        write = cache.begin_store(keys, "w")
        assert len(write.keys) == held
        cache.commit(write)
        cache.end("r")
    assert cache.lookup(prompt(0, 1, WINDOWS), "r", shape=WINDOWS).chunks == GROWN
    assert cache.counts().chunks_evicted == 0
    cache.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_is_demoted_leaves_first_and_when_it_is_used_again_it_is_the_youngest(policy: str) -> None:
    slots = 18
    cache = LocalCache(HostPool.anonymous("demoted", 64, slots), policy=make_policy(policy, slots))
    older, demoted, newer = (key_chain(6, branch=name) for name in ("older", "demoted", "newer"))

    def store(keys: list[ChunkKey]) -> None:
        cache.commit(cache.begin_store(keys, "w"))

    def left() -> list[list[int]]:
        """The chunks that have left of each prompt."""
        resident = set(cache.admin.resident_keys())
        prompts = (older, demoted, newer)
        return [[number for number, key in enumerate(keys) if key not in resident] for keys in prompts]

    for keys in (older, demoted, newer):
        store(keys)
    assert cache.admin.demote(demoted) == 6
    store(key_chain(2, branch="arriving"))
    assert left() == [[], [4, 5], []]
    lease = cache.load(demoted[2:4], "r")  # what is leased stays, and is demoted still when that ends
    assert isinstance(lease, ReadLease)
    store(key_chain(1, branch="arriving next"))
    assert left() == [[], [1, 4, 5], []]
    assert cache.release(lease)
    store(key_chain(3, branch="arriving last"))
    assert left() == [[], [0, 1, 2, 3, 4, 5], []]
    cache.forget(cache.admin.resident_keys())
    for keys in (older, demoted, newer):
        store(keys)
    cache.admin.demote(demoted)
    assert cache.lookup(demoted, "r").chunks == 6
    cache.end("r")
    store(key_chain(6, branch="arriving"))
    assert left()[1] == []
    for number in range(3):
        store(key_chain(4, branch=f"more {number}"))
    assert left()[1] in ([], *([*range(first, 6)] for first in range(6)))  # from its end
    cache.close()
