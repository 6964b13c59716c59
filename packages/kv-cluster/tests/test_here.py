"""What a verb asks of one server."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from kv_cluster import here
from kv_core.testing import key_chain
from kv_server.http.operation import Problem
from kv_server.peers.tier import PeersTier
from kv_testing.cache_servers import SLOT_BYTES, store
from kv_testing.peers import PATIENT, address_of, listening, own_nobody, promoted
from kv_testing.service_contract import CHUNK_BYTES
from kv_tiers.build import build_local_cache
from kv_tiers.cache.local import LocalCache
from kv_tiers.config import ColdConfig, HostConfig

KEYS = key_chain(2, salt="ann")


@pytest.mark.parametrize("is_in_time", [True, False])
@pytest.mark.parametrize(
    ("clear", "what"),
    [
        (lambda cache: cache.clear(), {}),
        (lambda cache: cache.admin.clear_tenant(KEYS[0].tenant), {"tenant": KEYS[0].tenant.hex()}),
        (lambda cache: cache.forget(KEYS), {"keys": [key.hex() for key in KEYS]}),
    ],
    ids=["everything", "a tenant", "a prefix"],
)
def test_a_tier_that_is_still_being_cleared_is_read_again_after_that(
    clear: Callable[[LocalCache], object],
    what: dict[str, Any],
    is_in_time: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lane clears its tier later: what it hides then would stay hidden, whatever is stored at other hosts."""
    own_nobody(monkeypatch)
    monkeypatch.setattr(here, "_CLEARING_S", 30.0 if is_in_time else 0.05)
    may_clear = threading.Event()

    def late(verb: Callable[..., None]) -> Callable[..., None]:
        def waits(tier: PeersTier, *of: Any) -> None:
            assert may_clear.wait(30)
            verb(tier, *of)

        return waits

    for verb in ("clear", "clear_tenant", "discard"):
        monkeypatch.setattr(PeersTier, verb, late(getattr(PeersTier, verb)))
    with ExitStack() as ending:
        peer = listening()
        ending.callback(peer.close)
        cache = build_local_cache(
            HostConfig(capacity_bytes=16 * SLOT_BYTES),
            group_bytes=(CHUNK_BYTES,),
            fingerprint="f",
            tiers=[{"type": "peers", "hosts": [address_of(peer)], **PATIENT}],
            cold=ColdConfig(wait_s=20.0),
        )
        ending.callback(cache.close)
        ending.callback(may_clear.set)
        theirs = peer.join("f")
        ending.callback(theirs.close)
        clear(cache)
        view: Any = SimpleNamespace(caches=lambda: {"format": cache})
        if is_in_time:
            threading.Timer(0.1, may_clear.set).start()
            assert here.all_cleared(view, here.AllCleared(**what)).caches == 1
            store(theirs, KEYS)
            assert promoted(cache, KEYS) == 2
        else:
            with pytest.raises(Problem, match="send this again"):
                here.all_cleared(view, here.AllCleared(**what))
