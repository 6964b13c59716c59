"""What became of a prompt, over HTTP; and for which engines and prompts most was found."""

from collections.abc import Sequence

import pytest
from kv_core import ChainScheme, ChunkKey, KeySequence, KeySpace, tenant_tag
from kv_core.cost import Costs
from kv_core.coverage import ChunkShape
from kv_observe import lookup_uses
from kv_server import RemoteCache, wire
from kv_server.http import explain
from kv_testing.http import Served, problem, store_keys
from kv_testing.service_contract import CHUNK_BYTES
from kv_testing.wait import until

CHUNK_TOKENS = 4
TOKENS = list(range(100, 130))


def keys_of(tokens: list[int], salt: str | None = None) -> list[ChunkKey]:
    scheme = ChainScheme("sha256", CHUNK_TOKENS)
    space = KeySpace("m", "", "bfloat16", "f", 1, scheme.name)
    return space.keys(KeySequence(scheme, root=scheme.root(salt=salt)).append(tokens), tenant=tenant_tag(salt))


def join(served: Served, engine: str = "engine-1") -> RemoteCache:
    return served.join(engine=engine, facts={"chunk_tokens": str(CHUNK_TOKENS)})


def test_a_prompt_is_explained_by_its_tokens_or_digests(served: Served) -> None:
    cache = join(served)
    keys = keys_of(TOKENS, "acme")
    store_keys(cache, keys[:5])
    cache.lookup(keys, "r", shape=ChunkShape(CHUNK_TOKENS))
    body = {"tokens": TOKENS, "salt": "acme"}
    until(lambda: served.post("/explain", body).json()["explained"])
    said = served.post("/explain", body).json()
    (explained,) = said["explained"]
    assert (said["chunks"], said["why"], explained["held"], explained["engines"]) == (7, "", 5, ["engine-1"])
    assert explained["tenant"] == tenant_tag("acme").hex()
    assert explained["lines"][0] == "chunks 0–4: in host"
    assert explained["lines"][1].startswith("chunks 5–6: not stored here since the server started")
    digests = [key.digest.hex() for key in keys]
    assert served.post("/explain", {"digests": digests}).json()["explained"][0]["held"] == 5
    without = served.post("/explain", {"tokens": TOKENS, "chunk_tokens": CHUNK_TOKENS}).json()  # another tenant's
    assert without["explained"] == [] and "not stored here" in without["why"]
    cache.close()


def test_what_cannot_be_explained_is_said(served: Served) -> None:
    assert "no engine says" in problem(served.post("/explain", {"tokens": TOKENS}), 409)
    cache = join(served)
    assert "no whole chunk of 4" in problem(served.post("/explain", {"tokens": [1, 2, 3]}), 409)
    assert "either" in problem(served.post("/explain", {}), 409)
    assert "either" in problem(served.post("/explain", {"tokens": [1], "digests": ["0" * 64]}), 409)
    assert "one length" in problem(served.post("/explain", {"digests": ["0" * 64, "0" * 32]}), 409)
    assert problem(served.post("/explain", {"tokens": [-1]}), 400)
    assert problem(served.post("/explain", {"tokens": TOKENS}, token="another"), 401)
    other = served.join(engine="engine-2", facts={"chunk_tokens": "8"})
    assert "chunks of 4 and 8 tokens" in problem(served.post("/explain", {"tokens": TOKENS}), 409)
    cache.close()
    other.close()


def test_no_more_of_a_long_prompt_is_hashed_than_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would take a second, and engines would wait for their turns."""
    hashed: list[int] = []

    class Counting(KeySequence):
        def append(self, tokens: Sequence[int]) -> list[bytes]:
            hashed.append(len(tokens))
            return super().append(tokens)

    monkeypatch.setattr(explain, "KeySequence", Counting)
    prompt = explain.ExplainRequest(tokens=[1] * explain.MAX_TOKENS, chunk_tokens=1)
    assert len(explain._digests(prompt, [])) == wire.MAX_EXPLAINED
    assert hashed == [wire.MAX_EXPLAINED]


def test_engines_and_prefixes_are_listed_by_what_was_found_for_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_uses, "MAX_LISTED", 2)
    monkeypatch.setattr(lookup_uses, "_REMEMBERED", 3)
    one, two = join(served), join(served, "engine-2")
    shape, costs = ChunkShape(CHUNK_TOKENS), Costs(compute=(0.5, 0.0), load=(0.0, 0.0))
    much, little = keys_of(TOKENS), keys_of([1, *TOKENS])
    store_keys(one, much)
    store_keys(one, little[:2])
    for _ in range(3):
        assert one.lookup(much, "r", shape=shape, costs=costs).chunks == 7
    two.lookup(little, "r", shape=shape)
    two.lookup(keys_of([2, *TOKENS]), "r", shape=shape)
    status = served.get("/status").json()
    assert status["engines"] == [
        {"name": "engine-1", "lookups": 3, "chunks_asked": 21, "chunks_hit": 21, "hit_bytes": 21 * CHUNK_BYTES,
         "saved_s": 3 * 28 * 0.5},
        {"name": "engine-2", "lookups": 2, "chunks_asked": 14, "chunks_hit": 2, "hit_bytes": 2 * CHUNK_BYTES,
         "saved_s": 0.0},
    ]  # fmt: skip
    assert [use["name"] for use in status["prefixes"]] == [much[0].hex(), little[0].hex()]
    assert status["saved_s"] == 42.0
    for first in range(10, 13):  # the first ones are forgotten
        two.lookup(keys_of([first, *TOKENS]), "r", shape=shape)
    until(lambda: much[0].hex() not in [use["name"] for use in served.get("/status").json()["prefixes"]])
    one.close()
    two.close()
