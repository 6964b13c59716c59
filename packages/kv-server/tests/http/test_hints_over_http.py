"""`POST /hints` on a running server: each action does what its outcome says, to its tenant's chunks alone."""

from pathlib import Path
from typing import Any

import pytest
from kv_core.keys import ChunkKey, tenant_tag
from kv_server import RemoteCache
from kv_testing.http import SLOT_BYTES, TOKEN, Served, keys_of, problem, store, store_keys
from kv_testing.wait import until

ACME, GLOBEX = keys_of("acme", 4), keys_of("globex", 4)


def hints(served: Served, keys: list[ChunkKey], kind: str, tenant: str = "acme", **payload: Any) -> dict[str, Any]:
    """The outcome of one action."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": payload}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    answer = served.post("/hints", {"tenant": tenant, "keys": [key.hex() for key in keys], "hints": envelope})
    assert answer.status_code == 200, answer.text
    assert answer.json()["message_id"] == "m"
    (outcome,) = answer.json()["outcomes"]
    assert (outcome.pop("action_id"), outcome.pop("action_type")) == ("a", kind)
    found: dict[str, Any] = outcome
    return found


def found(cache: RemoteCache, keys: list[ChunkKey]) -> int:
    chunks = cache.lookup(keys, "r").chunks
    cache.end("r")
    return chunks


def flood(cache: RemoteCache, chunks: int = 16, name: str = "flood") -> None:
    store(cache, chunks, branch=name)


def test_what_is_retained_survives_a_flood_until_its_time_is_over(served: Served) -> None:
    cache = served.join()
    store_keys(cache, ACME)
    store_keys(cache, GLOBEX)
    assert hints(served, ACME, "kv.retain", ttl_seconds=60) == {
        "outcome": "accepted", "granted": {"ttl_seconds": 60, "chunks": 4},
    }  # fmt: skip
    flood(cache)
    assert (found(cache, ACME), found(cache, GLOBEX)) == (4, 0)
    served.clock.advance(61)
    flood(cache, name="later")
    assert found(cache, ACME) == 0
    assert hints(served, ACME, "kv.retain", ttl_seconds=60)["outcome"] == "rejected"
    cache.close()


def test_what_is_retained_takes_a_quarter_and_an_hour_at_most(served: Served) -> None:
    cache = served.join()
    keys = keys_of("acme", 6)
    store_keys(cache, keys)
    outcome = hints(served, keys, "kv.retain")
    assert outcome["outcome"] == "clipped" and "a quarter" in outcome["why"]
    assert outcome["granted"] == {"ttl_seconds": 3600, "chunks": 4}  # of 16
    assert hints(served, keys_of("acme", 7), "kv.retain", ttl_seconds=1)["granted"]["chunks"] == 4
    # Of a quota, not of the pool; another tenant's quarter is its own.
    served.client.put(
        "/quota/globex", json={"quota_bytes": 4 * SLOT_BYTES}, headers={"authorization": f"Bearer {TOKEN}"}
    )
    store_keys(cache, GLOBEX)
    assert hints(served, GLOBEX, "kv.retain", "globex", ttl_seconds=9)["granted"]["chunks"] == 1
    cache.close()


def test_what_is_demoted_leaves_first(served: Served) -> None:
    cache = served.join()
    old, new = [keys_of(tenant, 6) for tenant in ("acme", "globex")]
    for keys in (old, new):
        store_keys(cache, keys)
    assert hints(served, new, "kv.demote", "globex") == {"outcome": "accepted", "granted": {"chunks": 6}}
    flood(cache, 8)
    assert (found(cache, old), found(cache, new)) == (6, 2)  # 4 slots were free: the rest has left from its end
    assert hints(served, new, "kv.demote", "globex")["outcome"] == "clipped"
    cache.close()


def test_a_prefix_is_promoted_from_a_tier_before_it_is_asked_for(tmp_path: Path) -> None:
    disk = {"type": "disk", "directory": str(tmp_path / "kv"), "capacity_bytes": 1 << 22}
    served = Served(tiers=[disk])
    cache = served.join()
    store_keys(cache, ACME)
    (behind,) = served.server.caches.values()
    behind.lower.drain(10)
    for number in range(4):
        flood(cache, name=str(number))
    assert found(cache, ACME) == 0
    assert hints(served, ACME, "kv.prefetch") == {"outcome": "accepted", "granted": {"chunks": 4}}
    assert found(cache, ACME) == 4  # without waiting for a tier
    assert hints(served, keys_of("acme", 5), "kv.prefetch")["outcome"] == "clipped"
    assert (
        hints(served, keys_of("initech", 2), "kv.prefetch", tenant_tag("salt of initech").hex())["outcome"]
        == "rejected"
    )
    until(lambda: not [job for job in served.get("/prefixes").json()["jobs"] if job["state"] == "running"])
    cache.close()
    served.close()


def test_pins_are_their_tenants_own(served: Served) -> None:
    cache = served.join()
    store_keys(cache, ACME)
    store_keys(cache, GLOBEX)
    assert hints(served, ACME, "kv.pin", name="system")["granted"] == {"chunks": 4}
    assert hints(served, GLOBEX, "kv.unpin", "globex", name="system")["outcome"] == "rejected"
    flood(cache)
    assert (found(cache, ACME), found(cache, GLOBEX)) == (4, 0)
    (pin,) = served.get("/prefixes").json()["pins"]
    assert pin["name"] == f"{tenant_tag('salt of acme').hex()}.system"
    assert hints(served, ACME, "kv.unpin", name="system") == {"outcome": "accepted"}
    flood(cache, name="later")
    assert found(cache, ACME) == 0
    cache.close()


def test_no_hint_touches_another_tenants_chunks(served: Served) -> None:
    cache = served.join()
    store_keys(cache, ACME)
    store_keys(cache, GLOBEX)
    for keys in (GLOBEX, [*ACME[:2], GLOBEX[2]]):
        body = {"tenant": "acme", "keys": [key.hex() for key in keys], "hints": {}}
        assert "not all of these keys" in problem(served.post("/hints", body), 409)
    assert "no tenant is called" in problem(served.post("/hints", {**body, "tenant": "nobody"}), 404)
    assert problem(served.post("/hints", body, token="wrong"), 401)
    (outcome,) = served.post("/hints", {**body, "keys": [ACME[0].hex()]}).json()["outcomes"]
    assert outcome["outcome"] == "rejected" and "the envelope" in outcome["why"]
    cache.close()


@pytest.mark.parametrize("kind", ["kv.retain", "kv.demote", "kv.pin", "kv.prefetch"])
def test_what_a_tenant_with_a_quota_finds_is_the_same_whatever_another_hints(kind: str) -> None:
    def globex_finds(*, acme_hints: bool) -> list[int]:
        served = Served()
        served.client.put(
            "/quota/globex", json={"quota_bytes": 6 * SLOT_BYTES}, headers={"authorization": f"Bearer {TOKEN}"}
        )
        cache = served.join()
        seen = []
        for round_ in range(3):
            store_keys(cache, ACME)
            store_keys(cache, GLOBEX)
            if acme_hints:
                hints(served, ACME, kind, **({"name": "x"} if kind == "kv.pin" else {}))
            flood(cache, 12, str(round_))
            store_keys(cache, keys_of("globex", 5)[4:])
            seen.append(found(cache, GLOBEX))
        cache.close()
        served.close()
        return seen

    assert globex_finds(acme_hints=True) == globex_finds(acme_hints=False)
