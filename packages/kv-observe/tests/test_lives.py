"""How long chunks live in the pool, by what they did there, in constant memory."""

import random

import pytest
from kv_core.keys import ChunkKey
from kv_observe import lives as lives_module
from kv_observe.lives import Lives

A, B = ChunkKey(b"a" * 15 + b"\0"), ChunkKey(b"b" * 15 + b"\0")


def means(lives: Lives) -> dict[tuple[str, str], tuple[float, int]]:
    return {name: (found.sum, sum(found.counts)) for name, found in lives.spans.items() if any(found.counts)}


def test_spans_are_counted_by_what_a_chunk_did_before() -> None:
    lives = Lives()
    lives.stored([A, B], 10.0)
    for at_s in (12.0, 15.0, 19.0):
        lives.used([A], at_s)
    lives.evicted([B, A], 50.0)
    assert means(lives) == {
        ("gap", "unused"): (2.0, 1), ("gap", "once"): (3.0, 1), ("gap", "again"): (4.0, 1),
        ("residence", "unused"): (40.0, 1), ("idle", "unused"): (40.0, 1),
        ("residence", "again"): (40.0, 1), ("idle", "again"): (31.0, 1),
    }  # fmt: skip


def test_what_was_forgotten_or_never_seen_has_no_life() -> None:
    lives = Lives()
    lives.stored([A], 1.0)
    lives.forgotten([A])
    lives.used([A, B], 2.0)
    lives.stored([A], 3.0)
    lives.cleared()
    lives.evicted([A, B], 4.0)
    assert means(lives) == {}


def test_memory_is_bounded_and_the_sample_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives_module, "_MAX_RECORDS", lives_module._MAX_RECORDS // 8)
    chance = random.Random(7)
    lives = Lives()
    for number in range(3 * lives_module.SAMPLED * lives_module._MAX_RECORDS // 1024):
        lives.stored([ChunkKey(chance.randbytes(16)) for _ in range(1024)], float(number))
    assert len(lives._records) == lives_module._MAX_RECORDS
