"""Prompts of very many pages: what a call may contain, and what a search may take."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kv_connect.identity import LiveKeySpace, LiveWeights, ServedModel
from kv_core.service import WriteLease
from kv_sglang import pages
from kv_sglang.pages import PageStore
from kv_sglang.pools import describe
from kv_tiers import HostConfig, build_local_cache
from kv_tiers.pool.host_pool import slot_bytes_for

PAGE = 4
WEIGHTS = LiveWeights(ServedModel("sglang", "m", None, "float32", dummy_seed=0))
HASHES = [hashlib.sha256(f"{number}".encode()).hexdigest() for number in range(16)]


@pytest.fixture
def store(make_pool: Callable[..., Any]) -> Iterator[PageStore]:
    described = describe(make_pool("mha", "page_first"), "kv", "auto")
    nbytes, fingerprint = described.format.nbytes, described.format.fingerprint
    cache = build_local_cache(
        HostConfig(capacity_bytes=32 * slot_bytes_for(nbytes)), group_bytes=(nbytes,), fingerprint=fingerprint
    )
    space = LiveKeySpace(
        WEIGHTS, kv_dtype=described.dtype, format_fingerprint=fingerprint, world=1, chain=f"sha256:{PAGE}"
    )
    made = PageStore(cache, space, described, shard=0, wait_s=5.0)
    yield made
    made.close()
    cache.close()


def test_a_write_far_into_a_prompt_has_no_more_keys_than_a_call_may_have(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More were refused, so every write ended all promises and was made again without the pages before it."""
    asked: list[int] = []
    begin = store.cache.begin_store

    def counted(keys: Sequence[Any], *args: Any, **named: Any) -> WriteLease:
        asked.append(len(keys))
        return begin(keys, *args, **named)

    monkeypatch.setattr(pages, "MAX_KEYS", 6)
    monkeypatch.setattr(store.cache, "begin_store", counted)
    for first in range(0, 12, 2):
        assert store.write(HASHES[first : first + 2], [0, PAGE], before=HASHES[:first]) == [True, True]
    assert asked == [2, 4, 6, 6, 6, 6]


def test_a_search_for_states_ends_although_no_page_has_one(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page without one costs a lookup."""
    now_s = 0.0
    asked = 0

    def held(hashes: Sequence[str], until: float | None = None) -> int:
        nonlocal now_s, asked
        now_s, asked = now_s + 1.0, asked + 1
        return 0

    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(store, "held", held)
    assert store.trailing(HASHES, 1, 16) == []
    assert asked == 6  # five seconds are the wait
